//! The figures in the docs are those that the tests measure.

use std::{collections::HashMap, fs, path::Path, time::Duration};

use tower_quota::{Ban, FixedWindow, Limit, Limiter, Policy, SlidingCounter, SlidingLog, TokenBucket, store::Store};

use crate::support::{Clock, Redis, Tally, Traffic, Usage, connected, limits, patient};

const N: u64 = Traffic::LIMIT;

async fn meet(traffic: Traffic, limit: impl Into<Limit>) -> Tally {
    traffic.meet(&limit.into()).await
}

/// The cells of each row of the tables in the docs of a file, by the first cell; those of the first table that has it.
fn rows(file: &str) -> HashMap<String, Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let text = fs::read_to_string(path).expect("the file");
    let rows = text.lines().filter_map(|line| {
        let row = line
            .trim_start_matches(['/', '!'])
            .trim()
            .strip_prefix('|')?
            .strip_suffix('|')?;
        let mut cells = row.split('|').map(|cell| cell.trim().trim_matches('`').to_owned());
        Some((cells.next()?, cells.collect()))
    });
    let mut first = HashMap::new();
    for (name, cells) in rows {
        first.entry(name).or_insert(cells);
    }
    first
}

#[tokio::test]
async fn a_log_never_admits_more_than_its_limit_in_any_window() {
    let log = SlidingLog::new(N, Traffic::WINDOW);
    for log in [log, log.precision(1_000), log.precision(100)] {
        for traffic in Traffic::ALL {
            assert_eq!(meet(traffic, log).await.most, N, "{log}, {traffic:?}");
        }
    }
}

#[tokio::test]
async fn a_plain_log_denies_nothing_while_the_last_window_has_room() {
    for traffic in Traffic::ALL {
        let tally = meet(traffic, SlidingLog::new(N, Traffic::WINDOW)).await;
        assert!(tally.with_room == 0.0, "{traffic:?}: {tally:?}");
    }
}

#[tokio::test]
async fn a_counter_admits_at_most_twice_its_limit_less_one_in_any_window() {
    for traffic in Traffic::ALL {
        let tally = meet(traffic, SlidingCounter::new(N, Traffic::WINDOW)).await;
        assert!(tally.most < 2 * N, "{traffic:?}: {tally:?}");
    }
}

#[tokio::test]
async fn an_adversary_reaches_the_error_bound_of_a_counter() {
    let tally = meet(Traffic::Adversarial, SlidingCounter::new(N, Traffic::WINDOW)).await;
    assert_eq!(tally.most, 2 * N - 1);
}

#[tokio::test]
async fn the_table_in_the_docs_of_the_counter_is_up_to_date() {
    let table = rows("src/limit/sliding_counter.rs");
    for traffic in Traffic::ALL {
        let tally = meet(traffic, SlidingCounter::new(N, Traffic::WINDOW)).await;
        let name = format!("{traffic:?}").to_lowercase();
        assert_eq!(table[&name].join(" | "), tally.to_string(), "{name}");
    }
}

#[tokio::test]
async fn the_docs_of_the_algorithms_state_what_an_adversary_gets() {
    let table = rows("src/limit/mod.rs");
    let window = Traffic::WINDOW;
    let limits: [(&str, Limit); 6] = [
        ("[`SlidingLog`]", SlidingLog::new(N, window).into()),
        (
            "with [`precision`](SlidingLog::precision)",
            SlidingLog::new(N, window).precision(100).into(),
        ),
        ("[`SlidingCounter`]", SlidingCounter::new(N, window).into()),
        ("[`FixedWindow`]", FixedWindow::new(N, window).into()),
        (
            "[`aligned`](FixedWindow::aligned)",
            FixedWindow::new(N, window).aligned().into(),
        ),
        ("[`TokenBucket`]", TokenBucket::new(N, window).into()),
    ];
    for (name, limit) in limits {
        let stated = match table[name][1].as_str() {
            "N" => N,
            "2 N" => 2 * N,
            "2 N - 1" | "burst + N - 1" => 2 * N - 1,
            other => panic!("{name}: {other}"),
        };
        assert_eq!(meet(Traffic::Adversarial, limit).await.most, stated, "{name}");
    }
}

/// `MEMORY USAGE` depends a little on the version of Redis and on its allocator. On Valkey a key may need less than stated.
#[tokio::test]
async fn the_docs_of_the_algorithms_state_what_a_key_needs() {
    let (table, redis) = (rows("src/limit/mod.rs"), Redis::start());
    let server: String = redis.command("INFO", ["server"]).await;
    let valkey = server.contains("server_name:valkey");
    for limit in limits().into_iter().filter(|limit| limit.quota() != 10_000) {
        let stated = &table[&limit.to_string()];
        let measured = Usage::of(&limit, &redis).await;
        let cells = measured.to_string();
        for (column, (stated, measured)) in stated.iter().zip(cells.split(" | ")).enumerate() {
            let number = |text: &str| text.replace(',', "").parse::<f64>().expect("a number");
            let (stated, measured) = (number(stated), number(measured));
            let close = match column {
                ..3 if valkey => measured <= 1.2 * stated,
                ..3 => (0.8 * stated..=1.2 * stated).contains(&measured),
                _ => measured == stated,
            };
            assert!(close, "`{limit}`, column {column}: {measured}, not {stated}");
        }
    }
}

/// The bytes by which `used_memory` grows for each copy of the only key that matches a pattern, and `MEMORY USAGE` of it.
async fn bytes_of_a_key(redis: &Redis, pattern: &str) -> [f64; 2] {
    const COPIES: u32 = 15_000;
    let copy = "for number = 20000001, 20000000 + ARGV[1] do
                    local copy = string.gsub(KEYS[1], '10000042', number)
                    redis.call('COPY', KEYS[1], copy)
                    redis.call('PEXPIRE', copy, 86400000)
                end";
    let memory = async || -> u32 {
        let info: String = redis.command("INFO", ["memory"]).await;
        let used = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
        used.expect("the memory").trim().parse().expect("a number")
    };

    let keys: Vec<String> = redis.command("KEYS", [pattern]).await;
    let [key] = &keys[..] else {
        panic!("{pattern} is not one key: {keys:?}")
    };
    let usage: u32 = redis.command("MEMORY", ["USAGE", key, "SAMPLES", "0"]).await;
    let before = memory().await;
    redis.command::<()>("EVAL", [copy, "1", key, &COPIES.to_string()]).await;
    let growth = memory().await - before;
    redis.command::<()>("FLUSHALL", ["SYNC"]).await;
    [growth, usage * COPIES].map(|bytes| f64::from(bytes) / f64::from(COPIES))
}

/// A limiter with this limit and bans, for the key `10000042`.
fn limiter(store: impl Store, limit: &Limit) -> Limiter {
    let ban = Ban::after(10, Duration::from_secs(600));
    Limiter::new(store, Policy::new("api", limit.clone()).ban(ban))
}

#[tokio::test]
async fn the_page_about_redis_states_what_each_kind_of_key_needs() {
    const KEY: &str = "10000042";
    let redis = Redis::start();
    let server: String = redis.command("INFO", ["server"]).await;
    let valkey = server.contains("server_name:valkey");
    let store = connected(patient(), &redis.url()).await;
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/redis.md")).expect("the page");
    let (_, table) = page.split_once("| key of | holds |").expect("the table");
    let (table, _) = table.split_once("\n\n").expect("its end");

    let (mut rows, mut wrong) = (0, Vec::new());
    for row in table.lines().skip(2) {
        let [_, of, holds, growth, usage, _] = row.split('|').map(str::trim).collect::<Vec<_>>()[..] else {
            panic!("another number of cells: {row}")
        };
        let entries: u64 = holds
            .split_once(' ')
            .map_or(holds, |(entries, _)| entries)
            .parse()
            .expect("a number");
        let measured = match of {
            "a ban" => {
                let limiter = limiter(store.clone(), &SlidingLog::per_hour(1).into());
                limiter.ban(KEY, Duration::from_secs(600)).await.expect("Redis replies");
                bytes_of_a_key(&redis, "*:ban:*").await
            }
            limits => {
                let first = limits.split(',').next().expect("a limit").trim_matches('`');
                let limit: Limit = first.parse().expect("a limit");
                let coarse = matches!(&limit, Limit::SlidingLog(log) if *log == log.precision(10));
                if coarse {
                    // One admission in each grain.
                    let clock = Clock::new();
                    let limiter = limiter(clock.redis_store(&redis).await, &limit);
                    for _ in 0..entries {
                        clock.advance(Duration::from_secs(330));
                        clock.write_to(&redis).await;
                        assert!(limiter.check(KEY).await.expect("Redis replies").is_allowed());
                    }
                } else {
                    let limiter = limiter(store.clone(), &limit);
                    let mut held = Vec::new();
                    for _ in 0..entries {
                        held.push(limiter.check(KEY).await.expect("Redis replies"));
                    }
                    assert!(held.iter().all(|decision| decision.is_allowed()), "{limit}");
                    held.into_iter()
                        .filter_map(|decision| decision.take_slots())
                        .for_each(std::mem::forget);
                }
                bytes_of_a_key(&redis, "quota:1:*").await
            }
        };
        let is_close = |(stated, measured): (&str, f64)| {
            let stated: f64 = stated.replace(',', "").parse().expect("a number");
            let least = if valkey { 0.0 } else { 0.8 * stated };
            (least..=1.2 * stated).contains(&measured)
        };
        if ![growth, usage].into_iter().zip(measured).all(is_close) {
            wrong.push(format!("{of} | {holds} | {measured:?}, not {growth} and {usage}"));
        }
        rows += 1;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(rows >= 10, "the rows were found");
}

/// `docs/redis.md` rounds what it takes from the tables of `docs/speed.md`.
#[test]
fn the_page_about_redis_has_the_instructions_and_the_throughput_of_the_page_about_speed() {
    let (redis, speed) = (rows("docs/redis.md"), rows("docs/speed.md"));
    for check in ["a sliding log", "a token bucket"] {
        assert_eq!(redis[check][..2], speed[check][..2], "{check}");
    }
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/redis.md")).expect("the page");
    let page = page.replace('\n', " ");
    for (name, sentence) in [
        (
            "tower-quota: sliding log, fred",
            "{} checks of a sliding log in a second",
        ),
        ("tower-quota: token bucket, fred", "or {} of a token bucket"),
    ] {
        let sentence = sentence.replace("{}", &speed[name][0]);
        assert!(page.contains(&sentence), "no `{sentence}`");
    }
}

#[tokio::test]
async fn a_million_in_ten_seconds_fits_into_a_coarse_log() {
    let redis = Redis::start();
    let log = |precision| SlidingLog::new(1_000_000, std::time::Duration::from_secs(10)).precision(precision);
    for (precision, most) in [(1_000, 130_000), (100, 4_000)] {
        let bytes = Usage::of(&log(precision).into(), &redis).await.bytes_when_full;
        assert!(bytes <= most, "{bytes} bytes with precision({precision})");
    }
}
