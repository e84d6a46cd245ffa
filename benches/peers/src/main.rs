//! tower-quota and other rate limiters for Tower, measured in turn in one run. See the README.

mod axum_governor;
#[path = "../../whole/evalsha.rs"]
#[allow(dead_code)]
mod evalsha;
mod peer;
mod tower_governor;
mod tower_quota;
mod tower_rate_limit_fred;
mod tower_rate_limiter;

use std::{sync::Arc, time::Duration};

use bench_harness::{
    Bare, HTTP, HTTP_P50, HTTP_P99, Options, Row, Server, Subject, Table, Traffic,
    allocations::{self, Counting},
    count, decimal, over_http, targets, times,
};
use serde_json::json;

use self::{evalsha::Evalsha, peer::Peer};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const HOUR: Duration = Duration::from_secs(3_600);

fn main() {
    let options = Options::from_command_line();
    bench_harness::run(async |server| {
        let mut distributed = distributed(server, &options).await;
        if options.http {
            let mut peers = in_process(&options);
            peers.append(&mut distributed);
            return http(&mut peers, &options, server).await;
        }
        throughput(&mut distributed, &options).await;
        alone(&mut distributed, &options).await;

        let mut in_process = in_process(&options);
        at_once(&mut in_process, &options).await;

        let distributed: Vec<_> = distributed.into_iter().map(|peer| peer.row).collect();
        let in_process: Vec<_> = in_process.into_iter().map(|peer| peer.row).collect();
        report(&distributed, &in_process, &options, server);
    });
}

/// The limiters that share their counts through one Redis. The first is the reference.
async fn distributed(server: &Server, options: &Options) -> Vec<Peer> {
    let url = server.url();
    let mut peers = vec![Peer {
        row: Row::new(
            "one EVALSHA per check",
            "sliding log",
            format!("fred {}", peer::version("fred")),
        ),
        admitting: Box::new(
            Evalsha::sliding_log(&url, 100_000, Duration::from_secs(1))
                .await
                .around(Bare),
        ),
        denying: Box::new(Evalsha::sliding_log(&url, 1, HOUR).await.around(Bare)),
    }];
    let others = [
        tower_rate_limit_fred::peers(server).await,
        tower_rate_limiter::peers(server).await,
        tower_quota::distributed(server).await,
    ];
    let others = others.into_iter().flatten();
    peers.extend(others.filter(|peer| options.includes(&peer.row.title())));
    peers
}

/// The limiters that count in the process. The first is the reference.
fn in_process(options: &Options) -> Vec<Peer> {
    let mut peers = vec![Peer {
        row: Row::new("no limit", "", ""),
        admitting: Box::new(Bare),
        denying: Box::new(Bare),
    }];
    let others = [
        tower_governor::peers(),
        axum_governor::peers(),
        tower_quota::in_process(),
    ];
    let others = others.into_iter().flatten();
    peers.extend(others.filter(|peer| options.includes(&peer.row.title())));
    peers
}

const MANY: &str = "10,000 keys";
const HOT: &str = "one hot key";
const DENIED: &str = "denied";
const ALONE: &str = "one caller, us";
const FIRST: &str = "after others, us";

/// Checks per second of 256 callers.
async fn throughput(peers: &mut [Peer], options: &Options) {
    for traffic in [Traffic::many(), Traffic::hot()].map(Arc::new) {
        for _ in 0..options.rounds {
            for peer in &mut *peers {
                let load = peer.admitting.closed_loop(&traffic, options.time, options.time).await;
                assert_eq!(load.denied, 0, "{} admits all of {}", peer.row.title(), traffic.name);
                peer.row.note_load(traffic.name, load);
            }
        }
    }

    let traffic = Arc::new(Traffic::denied());
    for _ in 0..options.rounds {
        for peer in &mut *peers {
            let load = peer.denying.closed_loop(&traffic, options.time, options.time).await;
            assert!(load.admitted <= 1_000, "{} denies all but the first", peer.row.title());
            peer.row.note_load(DENIED, load);
        }
    }
}

/// Requests of one caller to the same limiter. The first follows requests to others, so its code is not in the caches unless theirs is
/// the same.
const IN_A_ROW: usize = 8;

/// Latency of a check of one caller.
async fn alone(peers: &mut [Peer], options: &Options) {
    let turns = if options.quick { 20 } else { 1_000 };
    let traffic = Traffic::many();
    for _ in 0..options.rounds {
        let mut times = vec![[Vec::new(), Vec::new()]; peers.len()];
        for _ in 0..turns {
            for (peer, [first, others]) in peers.iter().zip(&mut times) {
                for request in 0..IN_A_ROW {
                    let took = peer.admitting.alone(traffic.next_address()).await.as_secs_f64() * 1e6;
                    if request == 0 { &mut *first } else { &mut *others }.push(took);
                }
            }
        }
        for (peer, [first, others]) in peers.iter_mut().zip(&times) {
            peer.row.note(FIRST, bench_harness::median(first));
            peer.row.note(ALONE, bench_harness::median(others));
        }
    }
}

const DENIED_HTTP: &str = "denied per second";

/// An axum server on one core with each limiter in front of it, and `wrk` on another, beside Redis.
async fn http(peers: &mut [Peer], options: &Options, server: &Server) {
    let (many, denied) = (Arc::new(Traffic::many()), Arc::new(Traffic::denied()));
    for _ in 0..options.rounds {
        for peer in &mut *peers {
            over_http(&*peer.admitting, &many, options, &mut peer.row, HTTP).await;
            over_http(&*peer.denying, &denied, options, &mut peer.row, DENIED_HTTP).await;
        }
    }

    println!("{}", server.machine());
    println!(
        "axum, {} connections of wrk; medians of {} rounds of {:?}; x: times no limit\n",
        options.connections, options.rounds, options.time
    );
    let mut table = Table::new(&["over HTTP", HTTP, "x", HTTP_P50, HTTP_P99, DENIED_HTTP, "x"]);
    for peer in &*peers {
        let row = &peer.row;
        let (x, denied_x) = (row.ratio(HTTP, &peers[0].row), row.ratio(DENIED_HTTP, &peers[0].row));
        let latencies = [HTTP_P50, HTTP_P99].map(|cell| decimal(row.median(cell)));
        let rates = [count(row.median(HTTP)), times(x)];
        let denied = [count(row.median(DENIED_HTTP)), times(denied_x)];
        table.row([row.title()].into_iter().chain(rates).chain(latencies).chain(denied));
    }
    println!("{table}");
}

const ONE_ADDRESS: &str = "one address, ns";
const MANY_ADDRESSES: &str = "10,000 addresses, ns";
const ALLOCATIONS: &str = "allocations";
const DENIED_NS: &str = "denied, ns";
const DENIED_ALLOCATIONS: &str = "allocations, denied";

/// Time and allocations that a limiter in the process adds to a request.
async fn at_once(peers: &mut [Peer], options: &Options) {
    let (requests, rounds) = if options.quick {
        (1_000, 1)
    } else {
        (20_000, 5 * options.rounds)
    };
    let (one, many) = (Traffic::single(), Traffic::many());
    for _ in 0..rounds {
        let mut bare = None;
        for peer in &mut *peers {
            let figures = [
                (ONE_ADDRESS, peer.admitting.at_once(&one, requests).nanoseconds()),
                (MANY_ADDRESSES, peer.admitting.at_once(&many, requests).nanoseconds()),
                (DENIED_NS, peer.denying.at_once(&one, requests / 10).nanoseconds()),
                (ALLOCATIONS, allocations_of(&*peer.admitting, &one).await),
                (DENIED_ALLOCATIONS, allocations_of(&*peer.denying, &one).await),
            ];
            let bare = bare.get_or_insert(figures);
            for ((cell, figure), (_, bare)) in figures.into_iter().zip(bare) {
                peer.row.note(cell, figure - *bare);
            }
        }
    }
}

async fn allocations_of(subject: &dyn Subject, traffic: &Traffic) -> f64 {
    const REQUESTS: u64 = 100;
    let (_, allocations) = allocations::count(async { subject.at_once(traffic, REQUESTS) }).await;
    allocations.count as f64 / REQUESTS as f64
}

fn report(distributed: &[Row], in_process: &[Row], options: &Options, server: &Server) {
    let fastest = fastest_peer(distributed);
    let us = format!("tower-quota {}", peer::version("tower-quota"));
    let governor = format!("tower_governor {}", peer::version("tower_governor"));
    let ours = |algorithm: &str, cell: &str| {
        let title = format!("{us}, {algorithm}, fred");
        let row = distributed.iter().find(|row| row.title().starts_with(&title));
        row.map_or(f64::NAN, |row| row.ratio(cell, &fastest))
    };
    let here = |algorithm: &str, reference: &str, cell: &str| {
        let find = |title: String| in_process.iter().find(|row| row.title() == title);
        let rows = find(format!("{us}, {algorithm}")).zip(find(format!("{governor}, {reference}")));
        rows.map_or(f64::NAN, |(row, reference)| row.ratio(cell, reference))
    };
    let (targets, target_values) = targets(&[
        (
            "sliding log / fastest peer, 10,000 keys",
            ours("sliding log", MANY),
            ">= 0.95",
        ),
        (
            "sliding log / fastest peer, one hot key",
            ours("sliding log", HOT),
            ">= 5",
        ),
        (
            "token bucket / fastest peer, 10,000 keys",
            ours("token bucket", MANY),
            ">= 1.3",
        ),
        (
            "sliding log / fastest peer, denied",
            ours("sliding log", DENIED),
            ">= 20",
        ),
        (
            "in memory / tower_governor, admitted, headers, ns",
            here("token bucket, headers", "GCRA, headers", ONE_ADDRESS),
            "<= 1",
        ),
        (
            "in memory / tower_governor, admitted, headers, allocations",
            here("token bucket, headers", "GCRA, headers", ALLOCATIONS),
            "<= 1",
        ),
        (
            "in memory / tower_governor, admitted, no headers, ns",
            here("token bucket", "GCRA", ONE_ADDRESS),
            "<= 2",
        ),
        (
            "in memory / tower_governor, denied, headers, ns",
            here("token bucket, headers", "GCRA, headers", DENIED_NS),
            "<= 0.1",
        ),
    ]);

    if options.json {
        let rows = |rows: &[Row]| rows.iter().map(Row::to_json).collect::<Vec<_>>();
        let report = json!({
            "machine": server.machine(),
            "rounds": options.rounds,
            "seconds": options.time.as_secs_f64(),
            "distributed": rows(distributed),
            "in_process": rows(in_process),
            "targets": target_values,
        });
        println!("{report:#}");
        return;
    }

    println!("{}", server.machine());
    println!(
        "256 callers; medians of {} rounds of {:?}; x: times the fastest peer in each round\n",
        options.rounds, options.time
    );
    let cells = [MANY, HOT, DENIED];
    let mut table = Table::new(&["checks per second", MANY, "x", HOT, "x", DENIED, "x", ALONE, "x", FIRST]);
    for row in distributed.iter().chain([&fastest]) {
        let figures = cells
            .into_iter()
            .flat_map(|cell| [count(row.median(cell)), times(row.ratio(cell, &fastest))]);
        let alone = [
            decimal(row.median(ALONE)),
            times(row.ratio(ALONE, &fastest)),
            decimal(row.median(FIRST)),
        ];
        table.row([row.title()].into_iter().chain(figures).chain(alone));
    }
    println!("{table}");

    let cells = [ONE_ADDRESS, MANY_ADDRESSES, ALLOCATIONS, DENIED_NS, DENIED_ALLOCATIONS];
    let mut table = Table::new(&[&["in the process, beyond no limit"], &cells[..]].concat());
    for row in in_process {
        table.row(
            [row.title()]
                .into_iter()
                .chain(cells.map(|cell| decimal(row.median(cell)))),
        );
    }
    println!("{table}");
    println!("{targets}");
    for failures in distributed.iter().filter_map(Row::failures) {
        println!("{failures}");
    }
}

/// The best figures of all others in each round.
fn fastest_peer(rows: &[Row]) -> Row {
    let mut fastest = Row::new("the fastest peer", "", "");
    let peers: Vec<_> = rows
        .iter()
        .skip(1)
        .filter(|row| !row.title().starts_with("tower-quota"))
        .collect();
    for cell in [MANY, HOT, DENIED, ALONE, FIRST] {
        let best = if [ALONE, FIRST].contains(&cell) { f64::min } else { f64::max };
        let rounds = peers.iter().map(|row| row.rounds(cell).to_vec());
        let merged = rounds.reduce(|a, b| a.iter().zip(&b).map(|(a, b)| best(*a, *b)).collect());
        for figure in merged.unwrap_or_default() {
            fastest.note(cell, figure);
        }
    }
    fastest
}
