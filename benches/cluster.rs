//! What a check costs in a cluster of three primaries, beside one `EVALSHA` for each check on the same cluster, and beside a
//! single server. `cargo bench --bench cluster --all-features`, with `-- --help` for the options.
//!
//! All requests go through the Tower service in one process, on one core; all servers share another. What is compared takes
//! turns, and a ratio is the median of those within a round.

use std::{
    convert::Infallible,
    fs,
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{body::Body, extract::ConnectInfo};
use bench_harness::{
    Bare, Cluster, Options, Row, Server, Subject, Table, Traffic, count, decimal, median, targets, times,
};
use crc16::{State, XMODEM};
use http::{Request, Response, StatusCode};
use redis::{Value, aio::MultiplexedConnection};
use tower_layer::Layer;
use tower_quota::{
    ClientLibrary, FailureMode, Limit, Policy, RateLimitLayer, RedisStore, SlidingLog, TokenBucket, key,
};

const AMPLE: u64 = 100_000;
const WINDOW: Duration = Duration::from_secs(1);
/// Requests of one caller after the other, for a median latency.
const ALONE: usize = 400;

struct Entry {
    row: Row,
    subject: Box<dyn Subject>,
    /// The processes of the servers.
    servers: Vec<String>,
    /// Whether it is compared for latency only.
    is_pair: bool,
}

fn main() {
    let options = Options::from_command_line();
    bench_harness::run(async |server| {
        let cluster = Cluster::start().await;
        let mut entries = entries(server, &cluster).await;
        for round in 0..options.rounds {
            eprintln!("round {}", round + 1);
            measure(&mut entries, &options, &cluster).await;
        }
        report(&entries, server);
    });
}

async fn entries(server: &Server, cluster: &Cluster) -> Vec<Entry> {
    let connect = async |url: &str| {
        let builder = RedisStore::builder().client_library(ClientLibrary::RedisRs);
        let store = builder.deadline(Duration::from_secs(10)).url(url).connect();
        store.await.expect("a store")
    };
    let (in_cluster, single) = (connect(&cluster.url()).await, connect(&server.url()).await);
    let (cluster_processes, server_process) = (cluster.processes().await, server.process().await);
    let textbook = Evalsha::connect(cluster).await;
    let entry = |name: &str, algorithm, client, subject, is_pair| Entry {
        row: Row::new(name, algorithm, client),
        subject,
        servers: if name == "single server" {
            vec![server_process.clone()]
        } else {
            cluster_processes.clone()
        },
        is_pair,
    };
    let (log, bucket) = (
        Limit::from(SlidingLog::new(AMPLE, WINDOW)),
        Limit::from(TokenBucket::new(AMPLE, WINDOW)),
    );
    vec![
        entry(
            "one EVALSHA per check",
            "sliding log",
            "redis-rs",
            Box::new(textbook),
            false,
        ),
        entry(
            "cluster",
            "sliding log",
            "redis-rs",
            limited(&in_cluster, "log", &log, false),
            false,
        ),
        entry(
            "cluster",
            "token bucket",
            "redis-rs",
            limited(&in_cluster, "bucket", &bucket, false),
            false,
        ),
        entry(
            "single server",
            "sliding log",
            "redis-rs",
            limited(&single, "log", &log, false),
            false,
        ),
        entry(
            "single server",
            "token bucket",
            "redis-rs",
            limited(&single, "bucket", &bucket, false),
            false,
        ),
        entry(
            "cluster",
            "two sliding logs in two slots",
            "redis-rs",
            limited(&in_cluster, "pair", &log, true),
            true,
        ),
    ]
}

/// The limited service, also with a policy in another slot.
fn limited(store: &RedisStore, name: &str, limit: &Limit, with_other: bool) -> Box<dyn Subject> {
    let policy = |name: String| Policy::new(name, limit.clone()).failure_mode(FailureMode::Closed);
    let mut policies = vec![policy(name.to_owned()).key(key::ip())];
    if with_other {
        policies.push(policy(format!("{name}-other")).key((key::ip(), key::constant("other"))));
    }
    Box::new(RateLimitLayer::new(store.clone(), policies).layer(Bare))
}

async fn measure(entries: &mut [Entry], options: &Options, cluster: &Cluster) {
    let traffics = [Arc::new(Traffic::many()), Arc::new(Traffic::hot())];
    for entry in entries {
        cluster.flush().await;
        if entry.is_pair || entry.row.title().starts_with("one EVALSHA") {
            let mut latencies = Vec::new();
            for _ in 0..ALONE {
                let took = entry.subject.alone(traffics[0].next_address()).await;
                latencies.push(took.as_secs_f64() * 1e6);
            }
            entry.row.note("alone", median(&latencies));
        }
        if entry.is_pair {
            continue;
        }
        for traffic in &traffics {
            let own = [std::process::id().to_string()];
            let times = || [processor_time(&entry.servers), processor_time(&own)];
            let (before, requests) = (times(), traffic.requests());
            // The warm-up is counted too.
            let load = entry.subject.closed_loop(traffic, options.time, options.time).await;
            let (after, checks) = (times(), (traffic.requests() - requests) as f64);
            entry.row.note_load(traffic.name, load);
            if traffic.name == traffics[0].name {
                entry.row.note("of Redis", (after[0] - before[0]) / checks);
                entry.row.note("of the client", (after[1] - before[1]) / checks);
            }
        }
    }
}

/// The processor time of processes so far, in microseconds.
fn processor_time(processes: &[String]) -> f64 {
    /// `man 5 proc`: ticks of 10 ms, at these positions after the name of the program.
    const TIMES: [usize; 2] = [11, 12];
    let times = processes.iter().map(|process| {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let fields: Vec<_> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let ticks = TIMES
            .iter()
            .filter_map(|position| fields.get(*position)?.parse::<f64>().ok());
        ticks.sum::<f64>() * 10_000.0
    });
    times.sum()
}

/// The reference: one `EVALSHA` of the textbook script for each check, sent to the node of the key.
#[derive(Clone)]
struct Evalsha {
    nodes: Vec<MultiplexedConnection>,
    sha1: String,
}

impl Evalsha {
    async fn connect(cluster: &Cluster) -> Self {
        let mut limiter = Self {
            nodes: Vec::new(),
            sha1: String::new(),
        };
        for url in cluster.node_urls() {
            let client = redis::Client::open(url).expect("the URL is good");
            let mut node = client
                .get_multiplexed_async_connection()
                .await
                .expect("the node answers");
            let mut load = redis::cmd("SCRIPT");
            load.arg("LOAD").arg(include_str!("whole/sliding_log.lua"));
            limiter.sha1 = load.query_async(&mut node).await.expect("the script compiles");
            limiter.nodes.push(node);
        }
        limiter
    }

    async fn admits(&mut self, address: SocketAddr) -> bool {
        static MEMBERS: AtomicU64 = AtomicU64::new(0);
        let tag = format!("ip={}", address.ip());
        let node =
            usize::from(State::<XMODEM>::calculate(tag.as_bytes()) % SLOTS) * self.nodes.len() / usize::from(SLOTS);
        let mut command = redis::cmd("EVALSHA");
        command
            .arg(&self.sha1)
            .arg(1)
            .arg(format!("quota:1:log:bench:{{{tag}}}"));
        command.arg(AMPLE).arg(WINDOW.as_micros() as u64);
        command.arg(MEMBERS.fetch_add(1, Ordering::Relaxed));
        match self.nodes[node].send_packed_command(&command).await {
            Ok(Value::Array(reply)) => reply.first() == Some(&Value::Int(1)),
            other => panic!("the script fails: {other:?}"),
        }
    }
}

impl tower_service::Service<Request<Body>> for Evalsha {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let mut limiter = self.clone();
        Box::pin(async move {
            let ConnectInfo(address) = *request.extensions().get().expect("requests have an address");
            let mut response = Response::new(Body::empty());
            if !limiter.admits(address).await {
                *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            }
            Ok(response)
        })
    }
}

const SLOTS: u16 = 16_384;

fn report(entries: &[Entry], server: &Server) {
    let mut table = Table::new(&[
        "",
        "10,000 keys",
        "",
        "one hot key",
        "",
        "alone, us",
        "us of Redis",
        "us of the client",
    ]);
    let reference = &entries[0].row;
    for Entry { row, .. } in entries {
        table.row([
            row.title(),
            count(row.median("10,000 keys")),
            times(row.ratio("10,000 keys", reference)),
            count(row.median("one hot key")),
            times(row.ratio("one hot key", reference)),
            count(row.median("alone")),
            decimal(row.median("of Redis")),
            decimal(row.median("of the client")),
        ]);
        if let Some(line) = row.failures() {
            println!("{line}");
        }
    }
    println!("{}\n\n{table}", server.machine());
    let [_, log, bucket, _, _, pair] = entries else {
        unreachable!("all are there")
    };
    let (table, _) = targets(&[
        ("log / EVALSHA", log.row.ratio("10,000 keys", reference), ">= 1.5"),
        ("bucket / EVALSHA", bucket.row.ratio("10,000 keys", reference), ">= 2.8"),
        (
            "latency of two EVALSHA / two logs",
            2.0 * reference.ratio("alone", &pair.row),
            ">= 0.9",
        ),
    ]);
    println!("{table}");
}
