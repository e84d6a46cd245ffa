//! Servers that send what Redis does not, to applications in processes of their own with bounds of memory, descriptors and time.
//!
//! Each check fails in time, the process counts by itself, and lives. Where a client library permits no better, the row is
//! marked, so that a change there is noticed.

mod client;
mod server;

use std::{
    collections::BTreeSet,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::timeout;
use tower_quota::{
    ClientLibrary::{self, Fred, RedisRs},
    Limiter, Policy, RedisStore, SlidingLog,
    store::ErrorKind,
};

use self::server::{Behavior, HostileServer, Reply};
use crate::support::{Log, PATIENCE, each_client, eventually, patient};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_application_uses_the_server_that_it_is_given() {
    client::work().await;
}

/// A cluster behind a proxy, or of another product, may permit the declared keys only.
#[tokio::test]
async fn a_cluster_that_refuses_keys_of_several_slots_in_a_call_is_logged_once_and_used() {
    static TRIALS: AtomicU64 = AtomicU64::new(0);
    let refusing = |command: &str, _, _| match command {
        "EVALSHA" if TRIALS.fetch_add(1, Ordering::Relaxed) == 0 => Reply::Bytes(packed(&[1.8e15])),
        "EVALSHA" => {
            Reply::Bytes(b"-ERR Script attempted to access keys that do not hash to the same slot\r\n".to_vec())
        }
        _ => Reply::Honest,
    };
    let server = HostileServer::start(refusing);
    let log = Log::capture();
    let url = format!("redis-cluster://127.0.0.1:{}", server.port());
    let _store = RedisStore::connect(&url).await.expect("the first trial succeeds");
    let text = log.text();
    assert_eq!(text.matches("INFO tower_quota").count(), 1, "{text}");
    assert!(text.contains("the keys of one slot of this cluster only"), "{text}");
    assert!(text.contains("do not hash to the same slot"), "{text}");
}

each_client! {
    a_connection_on_which_a_reply_is_lost_is_replaced
    bytes_that_are_no_reply_are_no_refusal
}

/// What was charged by the call is unknown, unlike after an error of the server.
async fn bytes_that_are_no_reply_are_no_refusal(library: ClientLibrary) {
    static BROKEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let broken = || BROKEN.lock().expect("no code panics while it is locked");
    let breaking = |command: &str, _, port: u16| match command {
        "EVALSHA" if BROKEN.lock().is_ok_and(|broken| broken.contains(&port)) => Reply::Bytes(b"garbage\r\n".to_vec()),
        "EVALSHA" => Reply::Bytes(packed(&[1.8e15, 1.0, 3.0, 0.0, 1e6])),
        _ => Reply::Honest,
    };
    let server = HostileServer::start(breaking);
    let url = format!("redis://127.0.0.1:{}", server.port());
    let store = patient().client_library(library).url(&url).connect().await;
    let limiter = Limiter::new(
        store.expect("the trial succeeds"),
        Policy::new("p", SlidingLog::per_hour(5)),
    );
    let error = async || limiter.check("k").await.expect("it is local").store_error().cloned();
    eventually("the server decides", async || error().await.is_none()).await;

    broken().insert(server.port());
    let error = error().await.expect("it is not decided");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

/// Each command has the reply of the one before from then on, also `PING`.
async fn a_connection_on_which_a_reply_is_lost_is_replaced(library: ClientLibrary) {
    let deciding = |command: &str, _, _| match command {
        "EVALSHA" => Reply::Bytes(packed(&[1.8e15, 1.0, 3.0, 0.0, 1e6])),
        _ => Reply::Honest,
    };
    let server = HostileServer::start(deciding);
    let url = format!("redis://127.0.0.1:{}", server.port());
    let builder = patient().client_library(library).deadline(Duration::from_millis(200));
    let store = builder.url(&url).connect().await.expect("the trial succeeds");
    let limiter = Limiter::new(store, Policy::new("shifted", SlidingLog::per_hour(5)));
    let check = async || limiter.check("k").await.expect("it is local");
    eventually("the server decides", async || check().await.store_error().is_none()).await;

    let before = server.connections();
    server.lose_a_reply();
    eventually("the connection is replaced", async || {
        let _ = check().await;
        server.connections() > before
    })
    .await;
    eventually("the server decides again", async || {
        check().await.store_error().is_none()
    })
    .await;
}

/// On a busy machine a short timeout may end before the trial does.
#[tokio::test]
async fn a_store_whose_overrides_cannot_be_read_connects_no_longer_than_its_timeout() {
    static IS_TRIED: AtomicBool = AtomicBool::new(false);
    let refusing = |command: &str, _, _| match command {
        "EVALSHA" if !IS_TRIED.swap(true, Ordering::Relaxed) => Reply::Bytes(packed(&[1.8e15])),
        "EVALSHA" => Reply::Bytes(b"-ERR no overrides\r\n".to_vec()),
        _ => Reply::Honest,
    };
    for timeouts in 1.. {
        IS_TRIED.store(false, Ordering::Relaxed);
        let server = HostileServer::start(refusing);
        let builder = RedisStore::builder().connect_timeout(timeouts * Duration::from_millis(500));
        let url = format!("redis://127.0.0.1:{}", server.port());
        let connected = timeout(PATIENCE, builder.overrides(true).url(&url).connect());
        let error = connected.await.expect("it ends").unwrap_err();
        if error.to_string() == "the overrides could not be read within the connect timeout" {
            return assert_eq!(error.kind(), ErrorKind::Timeout);
        }
        assert!(timeouts < 9, "{error}");
    }
}

/// What an attacker gains.
#[derive(Clone, Copy)]
enum Outcome {
    /// Each check fails, and the memory grows by no more megabytes than this.
    Fails { megabytes: usize },
    /// The process ends with `SIGABRT`, for this reason.
    Aborts { _because: &'static str },
}

use Outcome::{Aborts, Fails};

/// The time that each check may take: it has a deadline, may wait once, and the machine may be busy.
const IN_TIME: Duration = Duration::from_secs(30);
const MAX_TEXT: usize = 4_000;

fn assert_outcome(behavior: Behavior, scheme: &str, library: ClientLibrary, outcome: Outcome) {
    let server = HostileServer::start(behavior);
    let url = format!("{scheme}://127.0.0.1:{}", server.port());
    let report = match (client::run(&url, library), outcome) {
        (Ok(report), Fails { .. }) => report,
        (Err(6), Aborts { .. }) => return,
        (ended, _) => panic!("unexpected: {ended:?}"),
    };
    assert!(server.attacks() > 0, "it was not attacked: {report:?}");
    println!("{report:?}");
    let Fails { megabytes } = outcome else { return };
    assert_eq!(report.decided, 0, "{report:?}");
    assert!(report.failed >= 60, "{report:?}");
    assert!(report.slowest < IN_TIME, "{report:?}");
    assert!(report.megabytes <= megabytes, "{report:?}");
    assert!(report.descriptors < MAX_DESCRIPTORS, "{report:?}");
    assert!(
        report.longest_error < MAX_TEXT && report.longest_line < MAX_TEXT,
        "{report:?}"
    );
}

/// Those of the process, of a pool of connections, and of 100 redirections.
const MAX_DESCRIPTORS: usize = 180;

/// A test for each client library, with its outcome.
macro_rules! rows {
    ($scheme:literal: $($row:ident: $behavior:expr, $($library:ident $outcome:expr),+;)*) => {$(
        mod $row {
            use super::*;

            rows!(@ $scheme, $behavior, $($library $outcome),+);
        }
    )*};
    (@ $scheme:literal, $behavior:expr, Fred $fred:expr, RedisRs $redis_rs:expr) => {
        #[test]
        fn on_fred() {
            assert_outcome($behavior, $scheme, Fred, $fred);
        }

        rows!(@ $scheme, $behavior, RedisRs $redis_rs);
    };
    (@ $scheme:literal, $behavior:expr, RedisRs $redis_rs:expr) => {
        #[test]
        fn on_redis_rs() {
            assert_outcome($behavior, $scheme, RedisRs, $redis_rs);
        }
    };
}

const SMALL: Outcome = Fails { megabytes: 32 };
/// redis-rs reads the whole list of nodes.
const LISTED: Outcome = Fails { megabytes: 64 };
const LARGE: Outcome = Fails { megabytes: 400 };
const OVERFLOWS: Outcome = Aborts {
    _because: "redis-protocol 6.0 decodes an array in an array by a recursive call, without a bound",
};

rows! { "redis":
    deep_nesting: |command, _, _| to_script(command, || b"*1\r\n".repeat(100_000)), Fred OVERFLOWS, RedisRs SMALL;
    nesting_of_99_levels: |command, _, _| to_script(command, || [&b"*1\r\n".repeat(99)[..], b":1\r\n"].concat()), Fred SMALL, RedisRs SMALL;
    numbers_out_of_range: |command, nth, _| to_script(command, || numbers_out_of_range(nth)), Fred SMALL, RedisRs SMALL;
    wrong_lengths: |command, nth, _| to_script(command, || wrong_lengths(nth)), Fred SMALL, RedisRs SMALL;
    values_of_other_types: |command, nth, _| to_script(command, || one_of(&OTHER_VALUES, nth)), Fred SMALL, RedisRs SMALL;
    lengths_at_the_edge: |command, nth, _| to_script(command, || one_of(&EDGES, nth)), Fred SMALL, RedisRs SMALL;
    announced_and_not_sent: |command, nth, _| to_script(command, || one_of(&ANNOUNCED, nth)), Fred SMALL, RedisRs SMALL;
    an_endless_line: |command, _, _| endless(command, b"+", b"x"), Fred LARGE, RedisRs LARGE;
    an_endless_string: |command, _, _| endless(command, b"$2147483647\r\n", b"x"), Fred LARGE, RedisRs LARGE;
    an_endless_array: |command, _, _| endless(command, b"*1000000000\r\n", b":1\r\n"), Fred LARGE, RedisRs LARGE;
    pushes_that_belong_to_no_request: |command, _, _| endless(command, b"", b">2\r\n$7\r\nmessage\r\n$1\r\nx\r\n"), Fred LARGE, RedisRs LARGE;
    an_error_of_a_megabyte: |command, _, _| to_script(command, || error_of(1 << 20)), Fred LARGE, RedisRs LARGE;
    an_error_of_100_megabytes: |command, _, _| long_error_of(command), Fred LARGE, RedisRs LARGE;
    an_error_of_a_megabyte_to_each_command: |_, _, _| Reply::Bytes(error_of(1 << 20)), Fred LARGE, RedisRs LARGE;
    many_errors_in_a_reply: |command, _, _| to_script(command, many_errors), Fred LARGE, RedisRs LARGE;
    connections_that_close: |_, _, _| Reply::Close, Fred SMALL, RedisRs SMALL;
}

rows! { "redis-cluster":
    a_slot_map_of_16384_nodes: |command, _, port| slots(command, (0..16_384).map(|n| node(n, n, &address(n), port)).collect()), RedisRs LISTED;
    a_slot_map_without_ranges: |command, _, _| slots(command, Vec::new()), RedisRs SMALL;
    a_slot_map_of_wrong_ranges: |command, _, port| slots(command, wrong_ranges(port)), RedisRs SMALL;
    a_slot_map_that_is_none: |command, nth, _| match command { "CLUSTER" => Reply::Bytes(one_of(&OTHER_VALUES, nth)), _ => Reply::Honest }, RedisRs SMALL;
    redirections_without_end: |command, nth, port| to_script(command, || redirection(nth, port)), RedisRs SMALL;
}

/// The bytes for a call of the script, and what Redis would send for other commands.
fn to_script(command: &str, bytes: impl FnOnce() -> Vec<u8>) -> Reply {
    match command {
        "EVALSHA" | "EVAL" => Reply::Bytes(bytes()),
        _ => Reply::Honest,
    }
}

/// An endless reply to a call of the script.
fn endless(command: &str, first: &[u8], repeated: &[u8]) -> Reply {
    match command {
        "EVALSHA" | "EVAL" => Reply::Endless(first.to_vec(), repeated.repeat(16_384 / repeated.len())),
        _ => Reply::Honest,
    }
}

fn one_of(replies: &[&[u8]], nth: u64) -> Vec<u8> {
    replies[nth as usize % replies.len()].to_vec()
}

const OTHER_VALUES: [&[u8]; 16] = [
    b"+OK\r\n",
    b":1\r\n",
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*2\r\n*0\r\n*0\r\n",
    b"_\r\n",
    b"#t\r\n",
    b",nan\r\n",
    b"(99999999999999999999999999\r\n",
    b"%1\r\n+a\r\n+b\r\n",
    b"~1\r\n+a\r\n",
    b"=7\r\ntxt:abc\r\n",
    b"-\r\n",
    b"\xff\xfe\r\n",
];

const EDGES: [&[u8]; 14] = [
    b"$9223372036854775807\r\n",
    b"$18446744073709551615\r\n",
    b"$-2\r\n",
    b"*9223372036854775807\r\n",
    b"*-2\r\n",
    b"%9223372036854775807\r\n",
    b"%4611686018427387903\r\n",
    b"%-1\r\n",
    b"|9223372036854775807\r\n",
    b"|-1\r\n",
    b"~9223372036854775807\r\n",
    b"!-1\r\n",
    b"=-1\r\n",
    b">9223372036854775807\r\n",
];

const ANNOUNCED: [&[u8]; 3] = [b"$2147483647\r\n", b"*1000000000\r\n", b"*2\r\n$512000000\r\nx"];

/// A reply of these numbers.
fn packed(numbers: &[f64]) -> Vec<u8> {
    let bytes: Vec<_> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    bulk(&bytes)
}

fn bulk(bytes: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

/// The time, then how many are admitted, what remains, the wait and the reset: of a log of 5 per hour, whose requests wait up to
/// a second.
fn numbers_out_of_range(nth: u64) -> Vec<u8> {
    const EXACT: f64 = (1_u64 << 53) as f64;
    const NOW: f64 = 1.8e15;
    let replies = [
        [NOW, 1.0, 0.0, -EXACT + 1.0, 0.0],
        [NOW, 1.0, 0.0, -1_000_001.0, 0.0],
        [NOW, 0.0, 0.0, -1.0, 0.0],
        [NOW, 0.0, 0.0, EXACT - 1.0, 0.0],
        [NOW, 0.0, 0.0, 0.0, 0.0],
        [NOW, 1.0, 6.0, 0.0, 0.0],
        [NOW, 1.0, -1.0, 0.0, 0.0],
        [NOW, 1.0, 0.5, 0.0, 0.0],
        [NOW, 2.0, 0.0, 0.0, 0.0],
        [NOW, -1.0, 0.0, 0.0, 0.0],
        [NOW, -EXACT, 0.0, 0.0, 0.0],
        [NOW, 1.0, 0.0, 0.0, EXACT - 1.0],
        [NOW, 1.0, 0.0, 0.0, -1.0],
        [NOW, f64::NAN, 0.0, 0.0, 0.0],
        [NOW, 1.0, f64::INFINITY, 0.0, 0.0],
        [NOW, 1.0, 0.0, f64::NAN, 0.0],
        [NOW, 1.0, 0.0, f64::NEG_INFINITY, 0.0],
        [-1.0, 1.0, 0.0, 0.0, 0.0],
        [EXACT, 1.0, 0.0, 0.0, 0.0],
        [f64::NAN, 1.0, 0.0, 0.0, 0.0],
        [f64::INFINITY, 1.0, 0.0, 0.0, 0.0],
    ];
    packed(&replies[nth as usize % replies.len()])
}

fn wrong_lengths(nth: u64) -> Vec<u8> {
    let whole = [1.8e15, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0];
    match nth % 8 {
        0 => bulk(b""),
        1 => bulk(&[0; 39]),
        2 => bulk(&[0; 41]),
        3 => packed(&whole[..1]),
        4 => packed(&whole[..4]),
        5 => packed(&whole[..6]),
        6 => packed(&whole),
        _ => bulk(&[0; 80_000]),
    }
}

fn error_of(bytes: usize) -> Vec<u8> {
    let mut error = vec![b'x'; bytes];
    error[..5].copy_from_slice(b"-ERR ");
    error.extend_from_slice(b"\r\n");
    error
}

/// An error of 100 megabytes, which a busy machine would take long to make.
fn long_error_of(command: &str) -> Reply {
    match command {
        "EVALSHA" | "EVAL" => Reply::Long(vec![
            (b"-ERR ".to_vec(), 1),
            (vec![b'x'; 1 << 20], 100),
            (b"\r\n".to_vec(), 1),
        ]),
        _ => Reply::Honest,
    }
}

/// More errors than requests.
fn many_errors() -> Vec<u8> {
    let numbers = packed(&[1.8e15, -1.0, 0.0, 0.0, 0.0]);
    [b"*20001\r\n", &numbers[..], &b"$1\r\nx\r\n".repeat(20_000)].concat()
}

/// A reply to `CLUSTER SLOTS`, and redirections to the node itself.
#[expect(clippy::needless_pass_by_value, reason = "lists are made for it")]
fn slots(command: &str, ranges: Vec<Vec<u8>>) -> Reply {
    match command {
        "CLUSTER" => Reply::Bytes([format!("*{}\r\n", ranges.len()).into_bytes(), ranges.concat()].concat()),
        _ => Reply::Honest,
    }
}

fn node(first: i64, last: i64, host: &str, port: impl Into<i64>) -> Vec<u8> {
    let (length, port) = (host.len(), port.into());
    format!("*3\r\n:{first}\r\n:{last}\r\n*3\r\n${length}\r\n{host}\r\n:{port}\r\n$2\r\nid\r\n").into_bytes()
}

/// An address of this host.
fn address(n: i64) -> String {
    format!("127.1.{}.{}", n / 128, 1 + n % 128)
}

fn wrong_ranges(port: u16) -> Vec<Vec<u8>> {
    let host = "127.0.0.1";
    vec![
        node(-1, 16_383, host, port),
        node(0, 16_384, host, port),
        node(i64::MIN, i64::MAX, host, port),
        node(200, 100, host, port),
        node(300, 400, host, 0),
        node(300, 400, host, 65_536),
        node(300, 400, host, -1),
        node(300, 400, &"a".repeat(1 << 20), port),
        node(300, 400, "a host\0", port),
        // Of slots that overlap.
        node(500, 600, host, port),
        node(550, 650, host, port),
    ]
}

/// To a node that is another one each time.
fn redirection(nth: u64, port: u16) -> Vec<u8> {
    format!("-ASK 1 {}:{port}\r\n", address(nth as i64 % 16_384)).into_bytes()
}
