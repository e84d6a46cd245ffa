//! The figures in the docs are those that the tests measure.

use std::{collections::HashMap, fs, path::Path};

use tower_quota::{FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket};

use crate::support::{Redis, Tally, Traffic, Usage, limits};

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
    let mut wrong = Vec::new();
    for limit in limits().into_iter().filter(|limit| limit.quota() != 10_000) {
        let stated = &table[&limit.to_string()];
        let measured = Usage::of(&limit, &redis).await;
        let cells = measured.to_string();
        let mut are_close = stated
            .iter()
            .zip(cells.split(" | "))
            .enumerate()
            .map(|(column, (stated, measured))| {
                let number = |text: &str| text.replace(',', "").parse::<f64>().expect("a number");
                let (stated, measured) = (number(stated), number(measured));
                match column {
                    ..3 if valkey => measured <= 1.2 * stated,
                    ..3 => (0.8 * stated..=1.2 * stated).contains(&measured),
                    _ => measured == stated,
                }
            });
        if !are_close.all(|close| close) {
            wrong.push(format!("`{limit}` | {cells}"));
        }
    }
    assert!(wrong.is_empty(), "measured:\n{}", wrong.join("\n"));
}
