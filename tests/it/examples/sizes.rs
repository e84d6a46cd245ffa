//! The example `sizing`: its figures are those of the pages and of a Redis, and its arithmetic.

use std::{fs, path::Path};

use tokio::task::JoinSet;
use tower_quota::{Limiter, Policy, SlidingLog};

use super::sizing::{Sizing, figures, sizing};
use crate::support::{Redis, connected, patient};

fn of(arguments: &str) -> Result<Sizing, String> {
    let (numbers, limit) = arguments.split_once(" --limit ").expect("a limit");
    let words = numbers.split(' ').chain(["--limit", limit]);
    sizing(words.map(str::to_owned)).map_err(|error| error.to_string())
}

fn page(file: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).expect("the page")
}

/// 1234.0 as `1,234`.
fn with_commas(number: f64) -> String {
    let digits = format!("{number:.0}");
    let (first, rest) = digits.split_at((digits.len() - 1) % 3 + 1);
    let thousands = rest
        .as_bytes()
        .chunks(3)
        .map(|digits| format!(",{}", String::from_utf8_lossy(digits)));
    first.to_owned() + &thousands.collect::<String>()
}

#[test]
fn the_figures_of_sizes_are_those_of_the_pages() {
    let (redis, speed, limits) = (page("docs/redis.md"), page("docs/speed.md"), page("src/limit/mod.rs"));
    let fixed = format!("| 1 admission | {} |", figures::FIXED_SIZE);
    assert_eq!(redis.matches(&fixed).count(), 2, "{fixed}");
    for (admissions, bytes) in figures::LOG {
        let plural = if admissions > 1.0 { "s" } else { "" };
        let row = format!(
            "| `sliding-log 100/h` | {admissions} admission{plural} | {} |",
            with_commas(bytes)
        );
        assert!(redis.contains(&row), "{row}");
    }
    for ((parts, bytes), of) in figures::PRECISE_LOG
        .into_iter()
        .zip(["", ", each in its tenth of the window"])
    {
        let plural = if parts > 1.0 { "s" } else { "" };
        let row = format!("| `sliding-log 1000/h precision 10` | {parts} admission{plural}{of} | {bytes} |");
        assert!(redis.contains(&row), "{row}");
    }
    let (large, entry) = (figures::LARGEST_LIST, figures::ENTRY);
    assert!(limits.contains(&format!("up to {large} entries, and {entry} above")));
    for (algorithm, checks) in [
        ("sliding log", figures::CHECKS_OF_LOG),
        ("token bucket", figures::CHECKS_OF_BUCKET),
    ] {
        let row = format!("| tower-quota: {algorithm}, fred | {} |", with_commas(checks));
        assert!(speed.contains(&row), "{row}");
    }
    assert!(redis.contains(&format!("each decide {} of what one server", figures::IN_CLUSTER)));
    let ([to, to_in_batch], [from, from_in_batch]) = (figures::TO_REDIS, figures::FROM_REDIS);
    let network = format!("{to} bytes to Redis and {from} from it alone, {to_in_batch} and {from_in_batch} in a batch");
    assert!(redis.replace('\n', " ").contains(&network), "{network}");
}

#[test]
fn sizes_follow_from_the_figures() {
    let log = of("--checks-per-second 50000 --keys 1000000 --limit sliding-log 100/min").expect("a size");
    assert_eq!((log.admissions, log.servers, log.connections), (3.0, 1.0, 4.0));
    assert_eq!(log.key, 160.0 + 2.0 / 9.0 * (356.0 - 160.0));
    assert_eq!(log.memory, 1e6 * log.key);
    assert_eq!(log.load, 50.0 / 209.0);
    assert_eq!(log.to_redis, figures::TO_REDIS.map(|bytes| 50_000.0 * bytes));
    assert_eq!(log.from_redis, figures::FROM_REDIS.map(|bytes| 50_000.0 * bytes));

    // 700,000 a second are 1.92 of a server: 2.75 at 70 %, and 3.05 in a cluster.
    let many = "--checks-per-second 700000 --keys 10 --processes 20 --limit";
    let bucket = of(&format!("{many} token-bucket 10/s burst 30")).expect("a size");
    assert_eq!((bucket.admissions, bucket.key), (30.0, 192.0));
    assert_eq!((bucket.servers, bucket.connections), (4.0, 80.0));
    // A full log, above and below the largest list, and one that its precision bounds.
    let bytes_of = |limit: &str| of(&format!("{many} {limit}")).expect("a size").key;
    assert_eq!(bytes_of("sliding-log 10000/min"), 1_300_000.0);
    assert_eq!(bytes_of("sliding-log 100/min"), 2_185.0);
    assert_eq!(bytes_of("sliding-log 10000/min precision 10"), 464.0);
    assert_eq!(bytes_of("sliding-log 10000/min precision 10 prefetch 10ms"), 464.0);
    assert_eq!(bytes_of("sliding-log 10000/min precision 1"), 224.0);
    // A key that is active has at least one admission.
    let rare = of("--checks-per-second 1 --keys 1000000 --limit sliding-log 5/s").expect("a size");
    assert_eq!((rare.admissions, rare.key), (1.0, 160.0));
}

#[test]
fn sizes_without_an_argument_or_a_window_are_refused() {
    for (arguments, error) in [
        ("--keys 1 --limit 5/s", "`--checks-per-second` is missing"),
        ("--keys --limit 5/s", "`5/s` is unknown, or has no value"),
        ("--checks-per-second 1 --keys 0 --limit 5/s", "`--keys` is at least 1"),
        (
            "--checks-per-second 1 --keys x --limit 5/s",
            "`--keys`: invalid digit found in string",
        ),
        (
            "--checks-per-second 1 --keys 1 --limit concurrency 5",
            "`concurrency 5` has no window",
        ),
    ] {
        assert_eq!(of(arguments).expect_err("an error"), error);
    }
    assert!(of("--checks-per-second 1 --keys 1 --limit 5/s and more").is_err());
}

/// The table of docs/redis.md, which readers compare with theirs.
#[test]
fn the_page_about_redis_shows_the_table_of_sizes() {
    let page = page("docs/redis.md");
    let (_, block) = page
        .split_once("$ cargo run --example sizing -- ")
        .expect("the command");
    let (command, table) = block.split_once('\n').expect("a table");
    let (table, _) = table.split_once("```").expect("its end");
    assert_eq!(of(&command.replace('"', "")).expect("a size").to_string(), table);
    assert!(self::page("examples/sizing.rs").contains(command));
}

#[tokio::test]
async fn redis_counts_the_bytes_of_a_check() {
    const CHECKS: usize = 3_840;
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let limiter = Limiter::new(store, Policy::new("api", SlidingLog::per_minute(100)));
    let bytes = async || -> [f64; 2] {
        let info: String = redis.command("INFO", ["stats"]).await;
        ["total_net_input_bytes:", "total_net_output_bytes:"].map(|name| {
            let number = info.lines().find_map(|line| line.strip_prefix(name));
            number.and_then(|number| number.trim().parse().ok()).expect("a number")
        })
    };
    let key = |number: usize| format!("{}", 10_000_000 + number);
    let _ = limiter.check(&*key(0)).await.expect("the script is loaded");

    let start = bytes().await;
    for number in 0..CHECKS / 10 {
        let _ = limiter.check(&*key(number)).await.expect("Redis replies");
    }
    let alone = bytes().await;
    let mut checks = JoinSet::new();
    for number in 0..CHECKS {
        let (limiter, key) = (limiter.clone(), key(number));
        checks.spawn(async move { limiter.check(&*key).await });
    }
    assert_eq!(
        checks.join_all().await.into_iter().filter(Result::is_ok).count(),
        CHECKS
    );
    let end = bytes().await;

    let measured = [0, 1].map(|direction| {
        let of_alone = (alone[direction] - start[direction]) / (CHECKS / 10) as f64;
        [of_alone, (end[direction] - alone[direction]) / CHECKS as f64]
    });
    let stated = [figures::TO_REDIS, figures::FROM_REDIS];
    for (measured_bytes, stated_bytes) in measured.iter().flatten().zip(stated.iter().flatten()) {
        let ratio = measured_bytes / stated_bytes;
        assert!((0.8..=1.2).contains(&ratio), "{measured:?}, not {stated:?}");
    }
}
