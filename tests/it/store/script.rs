//! The scripts themselves, called as they are: what their replies contain.

use std::time::Duration;

use fred::types::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    task::JoinSet,
};
use tower_quota::{
    Ban, Concurrency, Decision, FixedWindow, Key, Limit, Limiter, Policy, RedisStore, SlidingCounter, SlidingLog,
    TokenBucket,
    store::{Charge, Operation, Store, StoreRequest},
};

use crate::support::{Clock, Redis, connected, decide, eventually, packed, patient, try_decide};

/// The words of a line of `MONITOR`, which begins with the time and the client.
fn words(line: &str) -> impl Iterator<Item = &str> {
    let words = line.trim_end().split_once("] \"").map_or("", |(_, words)| words);
    words.trim_end_matches('"').split("\" \"")
}

/// Clusters of other products permit no others.
#[tokio::test]
async fn the_scripts_touch_declared_keys_only() {
    let redis = Redis::start();
    let mut monitor = BufReader::new(TcpStream::connect(("127.0.0.1", redis.port())).await.expect("Redis"));
    monitor.write_all(b"MONITOR\r\n").await.expect("it is sent");

    let store = connected(patient(), &redis.url()).await;
    let limits: [Limit; 6] = [
        SlidingLog::per_hour(2).into(),
        SlidingLog::per_hour(2).precision(2).into(),
        SlidingCounter::per_hour(2).into(),
        FixedWindow::per_hour(2).into(),
        TokenBucket::per_hour(2).into(),
        Concurrency::new(2).into(),
    ];
    let policy = |(n, limit): (usize, &Limit)| Policy::new(format!("p{n}"), limit.clone());
    let one = limits
        .iter()
        .enumerate()
        .map(|limit| Limiter::new(store.clone(), policy(limit)));
    let banning = limits
        .iter()
        .enumerate()
        .map(|limit| Limiter::new(store.clone(), policy(limit).ban(Ban::by_hand())));
    let all = Limiter::new(store.clone(), limits.iter().enumerate().map(policy).collect::<Vec<_>>());
    let log = Policy::new("line", SlidingLog::per_hour(2)).wait_up_to(Duration::from_secs(3_600));
    let (reset, line) = (all.clone(), Limiter::new(store.clone(), log));
    for limiter in one.chain(banning).chain([all, line]) {
        for times in [1, 3, 20] {
            let mut checks = JoinSet::new();
            for n in 0..times {
                let limiter = limiter.clone();
                checks.spawn(async move { limiter.check(format!("k{n}")).await });
            }
            while let Some(decision) = checks.join_next().await {
                let decision = decision.expect("no panic").expect("a decision");
                assert!(decision.store_error().is_none());
            }
        }
    }
    reset.reset("k0").await.expect("Redis replies");
    redis.command::<()>("ECHO", ["all is monitored"]).await;

    let (mut declared, mut touched, mut line) = (Vec::new(), 0, String::new());
    while !line.contains("all is monitored") {
        line.clear();
        assert!(
            monitor.read_line(&mut line).await.expect("a line") > 0,
            "Redis has ended"
        );
        let mut words = words(&line);
        match (words.next(), line.contains(" lua] ")) {
            (Some("TIME"), true) => {}
            (Some(_), true) => {
                let key = words.next().expect("a key").to_owned();
                assert!(declared.contains(&key), "{line} beside {declared:?}");
                touched += 1;
            }
            (Some("EVALSHA" | "EVAL"), false) => {
                let count = words
                    .nth(1)
                    .and_then(|count| count.parse().ok())
                    .expect("a number of keys");
                declared = words.take(count).map(str::to_owned).collect();
            }
            _ => {}
        }
    }
    assert!(touched > 200, "{touched}");
}

/// Each algorithm as the script reads it apart from the cost, for a limit of 5 in 60 seconds.
const LIMITS: [&str; 6] = [
    "log 5 60000000 0 0",
    "precise 5 60000000 600000 0",
    "counter 5 60000000 1 75059993",
    "fixed 5 60000000 1 0",
    "fixed 5 60000000 0 0",
    "bucket 5 1 12000000 375299936",
];

/// Removes all keys. An aligned window of this limit does not end soon.
async fn clear(redis: &Redis, limit: &str) {
    redis.command::<()>("FLUSHALL", ["SYNC"]).await;
    if limit != LIMITS[4] {
        return;
    }
    eventually("an aligned window has 15 s left", async || {
        let [seconds, _]: [u64; 2] = redis.command("TIME", [""; 0]).await;
        seconds % 60 < 45
    })
    .await;
}

/// The reply to one request.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RequestReply {
    /// How many callers are admitted; and remaining, wait and reset of each charge.
    StoreResponse(i64, Vec<[i64; 3]>),
    Error(String),
}

impl RequestReply {
    fn admitted(&self) -> i64 {
        match self {
            Self::StoreResponse(admitted, _) => *admitted,
            Self::Error(error) => panic!("{error}"),
        }
    }

    fn verdict(&self) -> [i64; 3] {
        match self {
            Self::StoreResponse(_, states) => states[0],
            Self::Error(error) => panic!("{error}"),
        }
    }

    fn error(&self) -> &str {
        match self {
            Self::StoreResponse(..) => panic!("{self:?}"),
            Self::Error(error) => error,
        }
    }
}

/// The first argument of the driver without calendars and without keys in several slots.
const ANY_TIME: &str = "0 9007199254740992 0";

/// Calls a script with arguments that are given as text.
async fn eval(redis: &Redis, script: &str, keys: &[&str], arguments: &[String]) -> Value {
    let mut words = vec![script.into(), keys.len().to_string().into_bytes()];
    words.extend(keys.iter().map(|key| key.as_bytes().to_vec()));
    words.extend(arguments.iter().map(|argument| packed(argument)));
    redis.command_of_bytes("EVAL", words).await
}

/// The script for requests of any kind.
fn driver() -> &'static str {
    // After those for checks of one rule, and those for other requests of one rule.
    RedisStore::scripts()[2 * LIMITS.len()]
}

/// The reply to one check that is alone in its call: the numbers of the driver without the time, or an error.
async fn call_single(redis: &Redis, limit: &str, key: &str) -> Result<[i64; 4], String> {
    Ok(call_checks(redis, limit, &[key]).await?[0])
}

/// Calls the script for checks of this limit, with one request of these keys.
async fn call_checks(redis: &Redis, limit: &str, keys: &[&str]) -> Result<Vec<[i64; 4]>, String> {
    call_run(redis, limit, keys, 1).await
}

/// The same with so many requests, which share these keys.
async fn call_run(redis: &Redis, limit: &str, keys: &[&str], requests: usize) -> Result<Vec<[i64; 4]>, String> {
    let (rule, numbers) = limit.split_once(' ').expect("a rule and its numbers");
    let rules = ["log", "precise", "counter", "fixed", "bucket", "concurrency"];
    let script = RedisStore::scripts()[rules.iter().position(|name| *name == rule).expect("a rule")];
    let mut words = vec![script.into(), keys.len().to_string().into_bytes()];
    words.extend(keys.iter().map(|key| key.as_bytes().to_vec()));
    words.push(packed(&vec![format!("1 1 {numbers}"); keys.len() / requests].join(" ")));
    if requests > 1 {
        words.push(packed(&format!("{requests} 0")));
    }
    let reply: Result<Value, fred::error::Error> = redis.try_command_of_bytes("EVAL", words).await;
    Ok(numbers_of(reply.map_err(|error| error.to_string())?))
}

/// The numbers of each charge in a reply.
fn numbers_of(reply: Value) -> Vec<[i64; 4]> {
    let mut texts = reply.into_array().into_iter();
    let reply = texts.next().and_then(Value::into_bytes).expect("packed numbers");
    let numbers = reply.chunks(8).skip(1);
    let numbers = numbers.map(|number| f64::from_le_bytes(number.try_into().expect("eight bytes")) as i64);
    let numbers: Vec<_> = numbers.collect();
    let charges = numbers.chunks(4).map(|four| four.try_into().expect("four numbers"));
    charges.collect()
}

/// As a call across slots of a cluster, of which one key is declared, the driver checks each of these keys.
async fn call_across(redis: &Redis, limit: &str, keys: &[&str]) -> Vec<[i64; 4]> {
    let (algorithm, numbers) = limit.split_once(' ').expect("an algorithm and its numbers");
    let runs = 1;
    let mut words = vec![driver().into(), b"1".to_vec(), keys[0].as_bytes().to_vec()];
    words.push(packed(&format!("0 9007199254740992 {runs}")));
    words.push(packed(&format!("check {} 1 1 0 {algorithm} 1 {numbers}", keys.len())));
    words.extend(keys.iter().map(|key| key.as_bytes().to_vec()));
    numbers_of(redis.command_of_bytes("EVAL", words).await)
}

/// Calls the driver: runs are of one charge each, unless the keys of a request say otherwise with a space.
async fn call(redis: &Redis, limit: &str, runs: &[(&str, &[&str])]) -> Vec<RequestReply> {
    let requests = || runs.iter().flat_map(|(_, requests)| *requests);
    let keys: Vec<&str> = requests().flat_map(|request| request.split(' ')).collect();
    let (algorithm, numbers) = limit.split_once(' ').expect("an algorithm and its numbers");
    let arguments = runs.iter().map(|(run, requests)| {
        // `check 3 2` for three callers and a cost of 2, `refund 1 2 9` for what was admitted at 9.
        let [operation, times, cost, admitted_at @ ..] = &run.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{run}")
        };
        let charges = requests[0].split(' ').count();
        let mut run = format!("{operation} {} {charges} {times} 0", requests.len());
        run.extend(admitted_at.iter().map(|at| format!(" {at}")));
        if *operation == "peek" {
            // No process, and no place in a line.
            run += " 0 0";
        }
        // Nothing stays of what is refunded.
        let kept = if *operation == "refund" { " 0" } else { "" };
        run + &format!(" {algorithm} {cost} {numbers}{kept}").repeat(charges)
    });
    let arguments = std::iter::once(ANY_TIME.to_owned()).chain(arguments);
    let reply = eval(redis, driver(), &keys, &arguments.collect::<Vec<_>>()).await;
    let mut texts = reply.into_array().into_iter();
    let packed = texts.next().and_then(Value::into_bytes).expect("packed numbers");
    let errors: Vec<String> = texts
        .map(|error| error.as_string().expect("the text of an error"))
        .collect();
    let mut numbers = packed
        .chunks(8)
        .skip(1)
        .map(|number| f64::from_le_bytes(number.try_into().expect("eight bytes")) as i64);
    let replies = requests().map(|request| {
        let mut admitted = 0;
        let states = request.split(' ').map(|_| {
            let mut number = || numbers.next().expect("four numbers for each charge");
            admitted = number();
            [number(), number(), number()]
        });
        let states = states.collect();
        match admitted {
            0.. => RequestReply::StoreResponse(admitted, states),
            _ => RequestReply::Error(errors[(-admitted - 1) as usize].clone()),
        }
    });
    let replies = replies.collect();
    assert_eq!(numbers.next(), None, "nothing follows");
    replies
}

/// No loop or function of a script is in two of its files.
#[tokio::test]
async fn each_file_of_the_scripts_loads_alone() {
    let redis = Redis::start();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/lua");
    let mut count = 0;
    for file in std::fs::read_dir(folder).expect("the folder of the script") {
        let path = file.expect("a file").path();
        let text = std::fs::read(&path).expect("a file of the script");
        let sha1: Value = redis.command_of_bytes("SCRIPT", vec![b"LOAD".to_vec(), text]).await;
        assert_eq!(sha1.as_string().map(|sha1| sha1.len()), Some(40), "{}", path.display());
        count += 1;
    }
    assert!(count > 10, "{count} files were found");
}

#[tokio::test]
async fn callers_that_are_merged_are_decided_and_counted_as_if_each_was_sent() {
    let redis = Redis::start();
    for limit in LIMITS {
        for operation in ["check", "charge"] {
            for cost in [1, 2, 5] {
                for (before, callers) in [(0, 1), (0, 2), (0, 5), (0, 9), (3, 1), (3, 4), (5, 3)] {
                    clear(&redis, limit).await;
                    let (filled, one) = (format!("charge 1 {before}"), format!("{operation} 1 {cost}"));
                    let merged = format!("{operation} {callers} {cost}");
                    let mut runs: Vec<(&str, &[&str])> = vec![(&filled, &["apart", "merged"])];
                    if before == 0 {
                        runs.clear();
                    }
                    let apart = vec!["apart"; callers];
                    runs.extend([
                        (&*one, &*apart),
                        (&*merged, &["merged"]),
                        ("peek 1 1", &["apart", "merged"]),
                    ]);

                    let replies = call(&redis, limit, &runs).await;

                    let mut replies = replies.iter().skip(if before == 0 { 0 } else { 2 });
                    let apart: Vec<_> = replies.by_ref().take(callers).collect();
                    let merged = replies.next().expect("a reply");
                    let case = format!("`{limit}`, {before} before, {callers} times {operation} at {cost}");
                    let admitted: i64 = apart.iter().map(|reply| reply.admitted()).sum();
                    assert_eq!(merged.admitted(), admitted, "{case}");
                    assert_eq!(merged.verdict(), apart[callers - 1].verdict(), "{case}");
                    assert_eq!(replies.next(), replies.next(), "afterwards: {case}");
                }
            }
        }
    }
}

#[tokio::test]
async fn of_callers_that_are_merged_as_many_are_admitted_as_there_is_room_for() {
    let redis = Redis::start();
    for limit in LIMITS {
        clear(&redis, limit).await;
        let runs: [(&str, &[&str]); 2] = [("check 9 1", &["a"]), ("check 9 2", &["b"])];
        let replies = call(&redis, limit, &runs).await;
        assert_eq!([replies[0].admitted(), replies[1].admitted()], [5, 2], "{limit}");
        assert_eq!([replies[0].verdict()[0], replies[1].verdict()[0]], [0, 1], "{limit}");
    }
}

#[tokio::test]
async fn callers_that_are_merged_wait_for_what_was_counted_before() {
    let redis = Redis::start();
    for limit in LIMITS {
        clear(&redis, limit).await;
        call(&redis, limit, &[("check 1 1", &["a"])]).await;
        let replies = call(&redis, limit, &[("check 9 1", &["a"]), ("check 1 1", &["a"])]).await;
        assert_eq!([replies[0].admitted(), replies[1].admitted()], [4, 0], "{limit}");
        assert_eq!(replies[0].verdict(), replies[1].verdict(), "{limit}");
    }
}

/// They are removed where not all callers fit beside them.
#[tokio::test]
async fn callers_that_are_merged_fit_where_entries_of_a_clock_that_is_gone_count() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let store = clock.redis_store(&redis).await;
    let (limit, ban) = (Limit::from(SlidingLog::per_minute(10)), Ban::by_hand());
    let (start, other) = (clock.now(), Key::from("other"));
    for (gone, callers, cost) in [(2, 4, 2), (3, 1, 5)] {
        for (policies, bans, others) in [(1, false, 0), (1, false, 1), (2, false, 0), (1, true, 0)] {
            let case = format!("{callers} at {cost}, {policies} policies, {bans}, {others} others");
            let key = Key::from(&*case);
            let charge = |policy, key, cost| Charge::new(policy, &limit, key, cost).ban(bans.then_some(&ban));
            let charges = |cost| {
                ["one", "two"][..policies]
                    .iter()
                    .map(|policy| charge(policy, &key, cost))
                    .collect()
            };
            let (gone, charges): (Vec<_>, Vec<_>) = (charges(gone), charges(cost));
            let apart = [charge("one", &other, 1)];

            clock.set(start + 100_000_000);
            clock.write_to(&redis).await;
            for _ in 0..2 {
                let checked = store.decide(&[StoreRequest::new(Operation::Check, &gone)]).await;
                assert!(checked.expect("Redis replies").outcomes()[0].allowed, "{case}");
            }
            clock.set(start);
            clock.write_to(&redis).await;
            let mut checks = vec![StoreRequest::new(Operation::Check, &charges); callers];
            checks.extend(vec![StoreRequest::new(Operation::Check, &apart); others]);
            let checked = store.decide(&checks).await.expect("Redis replies");

            assert!(checked.outcomes().iter().all(|outcome| outcome.allowed), "{case}");
        }
    }
}

#[tokio::test]
async fn callers_that_are_merged_look_without_counting() {
    let redis = Redis::start();
    for limit in LIMITS {
        clear(&redis, limit).await;
        let replies = call(
            &redis,
            limit,
            &[("peek 9 2", &["a"]), ("check 1 5", &["a"]), ("peek 9 1", &["a"])],
        )
        .await;
        assert_eq!(
            replies.iter().map(RequestReply::admitted).collect::<Vec<_>>(),
            [9, 1, 0],
            "{limit}"
        );
    }
}

#[tokio::test]
async fn a_check_alone_in_its_call_is_answered_as_in_company() {
    let redis = Redis::start();
    for limit in LIMITS {
        for before in [
            "charge 1 1",
            "charge 4 1",
            "charge 1 2",
            "charge 5 1",
            "charge 6 1",
            "peek 1 1",
        ] {
            clear(&redis, limit).await;
            call(&redis, limit, &[(before, &["alone", "company"])]).await;

            let alone = call_single(&redis, limit, "alone").await.expect("it is answered");
            let company = call(&redis, limit, &[("check 1 1", &["company", "other"])]).await;
            let left = call(&redis, limit, &[("peek 1 1", &["alone", "company"])]).await;

            let [admitted, alone @ ..] = alone;
            assert_eq!(admitted, company[0].admitted(), "{limit}, {before}");
            assert_eq!(alone[0], company[0].verdict()[0], "{limit}, {before}");
            assert_eq!(left[0].verdict()[0], left[1].verdict()[0], "{limit}, {before}");
            let [wait, reset] = [1, 2].map(|n| alone[n].abs_diff(company[0].verdict()[n]));
            assert!(
                wait < 5_000_000 && reset < 5_000_000,
                "{limit}, {before}: {alone:?}, {company:?}"
            );
            let [alone, company] = ["alone", "company"].map(|key| redis.command::<i64>("PTTL", [key]));
            let (alone, company) = (alone.await, company.await);
            assert!(alone.abs_diff(company) < 5_000, "{limit}, {before}: {alone}, {company}");
        }
    }
}

/// Checks until these keys have an expiry: one check of some looks for it, so that the others cost less.
async fn check_until_all_expire(redis: &Redis, keys: &[impl AsRef<str>], mut check: impl AsyncFnMut()) {
    for _ in 0..1_000 {
        check().await;
        let mut lost = 0;
        for key in keys {
            lost += i32::from(redis.command::<i64>("PTTL", [key.as_ref()]).await == -1);
        }
        if lost == 0 {
            return;
        }
    }
    panic!("no check has looked for the expiry");
}

#[tokio::test]
async fn a_key_that_has_lost_its_expiry_has_one_again_once_checks_are_denied() {
    let redis = Redis::start();
    for limit in LIMITS {
        for keys in [&["a"][..], &["a", "b"]] {
            clear(&redis, limit).await;
            call(&redis, limit, &[("check 5 1", keys)]).await;
            for by_driver in [true, false] {
                for key in keys {
                    redis.command::<()>("PERSIST", [*key]).await;
                }
                check_until_all_expire(&redis, keys, async || {
                    let admitted: i64 = if by_driver {
                        let replies = call(&redis, limit, &[("check 1 1", keys)]).await;
                        replies.iter().map(RequestReply::admitted).sum()
                    } else {
                        let replies = call_checks(&redis, limit, keys).await.expect("it is answered");
                        replies.iter().map(|[admitted, ..]| admitted).sum()
                    };
                    assert_eq!(admitted, 0, "{limit}");
                })
                .await;
                for key in keys {
                    let left: i64 = redis.command("PTTL", [*key]).await;
                    // An aligned window may end at once.
                    let least = if limit == LIMITS[4] { 0 } else { 50_000 };
                    assert!((least..=121_000).contains(&left), "{limit}: {left}");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_key_that_has_lost_its_expiry_has_one_again_once_checks_are_admitted() {
    let redis = Redis::start();
    let store = connected(patient().deny_cache(false), &redis.url()).await;
    for limit in [
        "sliding-log 5000/min",
        "sliding-log 5000/min precision 100",
        "sliding-counter 5000/min",
        "fixed-window 5000/min",
        "token-bucket 5000/min",
        "concurrency 5000 lease 60s",
    ] {
        redis.command::<()>("FLUSHALL", ["SYNC"]).await;
        let limiter = Limiter::new(store.clone(), Policy::new("p", limit.parse::<Limit>().expect(limit)));
        let mut held = vec![limiter.check("k").await.expect("Redis replies")];
        let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
        redis.command::<()>("PERSIST", [&keys[0]]).await;
        check_until_all_expire(&redis, &keys, async || {
            held.push(limiter.check("k").await.expect("Redis replies"));
        })
        .await;
        assert!(held.iter().all(Decision::is_allowed), "{limit}");
        let left: i64 = redis.command("PTTL", [&keys[0]]).await;
        assert!((1..=122_000).contains(&left), "{limit}: {left}");
    }
}

/// To set an expiry costs as much as the rest of a check.
#[tokio::test]
async fn a_key_whose_expiry_will_do_is_written_without_it() {
    // The grain is that of the years 1970 to 2065: an entry of the next one needs room, so the value is written anew.
    const PRECISE: &str = "precise 5 3000000000000000 3000000000000000 0";
    for (limit, place) in [(PRECISE, 7), (LIMITS[3], 3)] {
        an_expiry_that_will_do_is_kept(limit, place).await;
    }
}

/// The number in this place of the key is when it expires.
async fn an_expiry_that_will_do_is_kept(window: &str, place: usize) {
    let redis = Redis::start();
    call(&redis, window, &[("check 1 1", &["k"])]).await;
    let in_ms = async || -> u64 {
        let time: Vec<u64> = redis.command("TIME", [""; 0]).await;
        time[0] * 1_000 + time[1] / 1_000
    };
    let before = in_ms().await;
    let left: u64 = redis.command("PTTL", ["k"]).await;
    let after = in_ms().await;
    let value: Vec<u8> = redis.command("GET", ["k"]).await;
    let noted = f64::from_le_bytes(value[8 * place..][..8].try_into().expect("eight bytes")) as u64 / 1_000;
    assert!(
        (before + left..=after + left).contains(&noted),
        "the key has the time at which it expires"
    );

    redis.command::<()>("CONFIG", ["RESETSTAT"]).await;
    for _ in 0..3 {
        assert_eq!(call(&redis, window, &[("check 1 1", &["k"])]).await[0].admitted(), 1);
    }
    assert_eq!(redis.calls("setrange").await, 3);
    assert_eq!(redis.calls("set").await, 0);
}

#[tokio::test]
async fn the_expiry_of_merged_admissions_is_set_once_a_second() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let store = clock.redis_store(&redis).await;
    let limit = Limit::from(SlidingLog::per_minute(9).precision(2));
    clock.advance(Duration::from_micros(60_000_000 - clock.now() % 60_000_000));
    clock.write_to(&redis).await;
    // With its first call a store tries the script's commands.
    decide(&store, Operation::Peek, &limit, "k", 1).await;
    redis.command::<()>("CONFIG", ["RESETSTAT"]).await;

    for millis in [0, 100, 1_000, 100, 100] {
        clock.advance(Duration::from_millis(millis));
        clock.write_to(&redis).await;
        assert!(decide(&store, Operation::Check, &limit, "k", 1).await.allowed);
    }

    // The first write sets it with the value.
    assert_eq!(redis.calls("set").await, 1);
    assert_eq!(redis.calls("pexpireat").await, 1);
}

/// A key has the time at which it expires. That is in whole milliseconds, and later than it matters by a second at most.
#[tokio::test]
async fn a_key_is_given_a_later_expiry_when_the_one_it_has_is_too_early() {
    const SECOND: u64 = 1_000_000;
    let redis = Redis::start();
    let clock = Clock::new();
    let store = clock.redis_store(&redis).await;
    let start = clock.now();
    // With its first call a store tries the script's commands.
    clock.write_to(&redis).await;
    decide(&store, Operation::Peek, &SlidingLog::per_second(1).into(), "k", 1).await;
    for (limit, into_window, expiries) in [
        // An expiry at the very end of the next window will do for it.
        (
            FixedWindow::new(5, Duration::from_secs(1)).aligned(),
            SECOND / 2,
            [2, 2, 4],
        ),
        (FixedWindow::new(5, Duration::from_secs(1)), 0, [2, 2, 4]),
        // The end of a window within a millisecond is later than the expiry.
        (FixedWindow::new(5, Duration::from_secs(1)), 500, [2, 3, 4]),
    ] {
        redis.command::<()>("FLUSHALL", ["SYNC"]).await;
        redis.command::<()>("CONFIG", ["RESETSTAT"]).await;
        let limit = Limit::from(limit);
        let mut noted = Vec::new();
        for window in 0..3 {
            clock.set(start + window * SECOND + into_window);
            clock.write_to(&redis).await;
            for _ in 0..2 {
                decide(&store, Operation::Check, &limit, "k", 1).await;
            }
            let keys: Vec<String> = redis.command("KEYS", ["*key=k*"]).await;
            let value: Vec<u8> = redis.command("GET", [&keys[0]]).await;
            noted.push(f64::from_le_bytes(value[24..].try_into().expect("eight bytes")) as u64 - start);
        }
        assert_eq!(noted, expiries.map(|seconds| seconds * SECOND), "{limit}");
        noted.dedup();
        assert_eq!(redis.calls("set").await, noted.len() as u64, "{limit}");
    }
}

/// Redis 6.2 can replicate the text of a script instead of its writes, and then refuses writes after a read of the clock.
#[tokio::test]
async fn a_server_that_replicates_scripts_as_text_counts() {
    const SETTING: &str = "lua-replicate-commands";
    let redis = Redis::start();
    let has: Vec<String> = redis.command("CONFIG", ["GET", SETTING]).await;
    if !has.is_empty() {
        redis.command::<()>("CONFIG", ["SET", SETTING, "no"]).await;
    }
    for limit in LIMITS {
        clear(&redis, limit).await;
        let admitted = call(&redis, limit, &[("check 6 1", &["k"])]).await[0].admitted();
        assert_eq!(admitted, 5, "{limit}");
    }
}

#[tokio::test]
async fn a_refund_of_what_was_not_counted_writes_no_key() {
    let redis = Redis::start();
    for limit in LIMITS {
        for admitted_at in ["9", "8000000000000000"] {
            call(&redis, limit, &[(&format!("refund 1 1 {admitted_at}"), &["k"])]).await;
            assert_eq!(redis.command::<u64>("DBSIZE", [""; 0]).await, 0, "{limit}");
        }
    }
}

#[tokio::test]
async fn a_ban_and_slots_that_have_lost_their_expiry_have_one_again_once_checks_are_denied() {
    const MINUTE: Duration = Duration::from_secs(60);
    let redis = Redis::start();
    let store = connected(patient().deny_cache(false), &redis.url()).await;
    let calls = Policy::new("calls", SlidingLog::per_minute(5)).ban(Ban::by_hand());
    let banned = Limiter::new(store.clone(), calls);
    banned.ban("k", MINUTE).await.expect("Redis replies");
    let slots = Limiter::new(store, Policy::new("exports", Concurrency::new(1).lease(MINUTE)));
    let _held = slots.check("k").await.expect("Redis replies");
    let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
    assert_eq!(keys.len(), 2, "{keys:?}");
    for key in &keys {
        redis.command::<()>("PERSIST", [key]).await;
    }

    check_until_all_expire(&redis, &keys, async || {
        for limiter in [&banned, &slots] {
            assert!(!limiter.check("k").await.expect("Redis replies").is_allowed());
        }
    })
    .await;
    for key in &keys {
        let left: i64 = redis.command("PTTL", [key]).await;
        assert!((50_000..=61_000).contains(&left), "{key}: {left}");
    }
}

#[tokio::test]
async fn a_peek_sets_no_expiry() {
    let redis = Redis::start();
    let store = connected(patient().deny_cache(false), &redis.url()).await;
    let calls = Policy::new("calls", SlidingLog::per_minute(1)).ban(Ban::by_hand());
    let limiter = Limiter::new(store, calls);
    assert!(limiter.check("k").await.expect("Redis replies").is_allowed());
    for is_banned in [false, true] {
        if is_banned {
            let banned = limiter.ban("k", Duration::from_secs(60)).await;
            banned.expect("Redis replies");
        }
        let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
        assert_eq!(keys.len(), 1 + usize::from(is_banned), "{keys:?}");
        for key in &keys {
            redis.command::<()>("PERSIST", [key]).await;
        }
        assert!(!limiter.peek("k").await.expect("Redis replies").is_allowed());
        for key in &keys {
            assert_eq!(redis.command::<i64>("PTTL", [key]).await, -1, "{key}");
        }
    }
}

#[tokio::test]
async fn denials_are_not_counted_for_bans_by_hand() {
    // No number of denials begins such a ban.
    const BY_HAND: &str = "ban 0 1000001 60000000 1000000 60000000";
    let redis = Redis::start();
    for limit in LIMITS {
        clear(&redis, limit).await;
        call(&redis, limit, &[("charge 1 5", &["k"])]).await;
        let (algorithm, numbers) = limit.split_once(' ').expect("an algorithm and its numbers");
        let check = format!("check 1 2 1 0 {BY_HAND} {algorithm} 1 {numbers}");
        let arguments = [ANY_TIME.to_owned(), check, format!("deny 1 1 1 0 {BY_HAND}")];
        eval(&redis, driver(), &["ban", "k", "ban"], &arguments).await;
        assert_eq!(redis.command::<u32>("EXISTS", ["ban"]).await, 0, "{limit}");
    }
}

#[tokio::test]
async fn a_check_alone_in_its_call_has_the_text_of_its_error() {
    let redis = Redis::start();
    for limit in LIMITS {
        clear(&redis, limit).await;
        redis.command::<()>("HSET", ["bad", "field", "value"]).await;
        let wrong = call_single(&redis, limit, "bad").await.unwrap_err();
        redis.command::<()>("CONFIG", ["SET", "maxmemory", "1"]).await;
        let full = call_single(&redis, limit, "new").await.unwrap_err();
        redis.command::<()>("CONFIG", ["SET", "maxmemory", "0"]).await;

        assert!(wrong.contains("WRONGTYPE Operation "), "{limit}: {wrong}");
        assert!(full.contains("OOM command not allowed"), "{limit}: {full}");
        assert_eq!(redis.command::<u32>("EXISTS", ["new"]).await, 0, "{limit}");
    }
}

/// Twice the same call, which Redis decides for its own time.
#[tokio::test]
async fn a_call_with_a_calendar_that_does_not_fit_has_done_nothing() {
    let redis = Redis::start();
    let [seconds, _]: [u64; 2] = redis.command("TIME", [""; 0]).await;
    let ahead = |hours: u64| (seconds + 3_600 * hours) * 1_000_000;
    let (within, boundaries) = (
        format!("{} {} 0", ahead(3), ahead(6)),
        [3, 4, 5, 6, 7].map(|hours| ahead(hours).to_string()).join(" "),
    );
    let calendar = format!("fixed 1 9 0 0 0 {boundaries}");
    let log = "log 1 5 60000000 0 0";
    let calls = [
        (
            2,
            vec![format!("check 1 1 1 0 {log}"), format!("check 1 1 1 0 {calendar}")],
        ),
        (
            2,
            vec![
                "charge 1 1 1 0 counter 1 5 60000000 1 75059993".to_owned(),
                format!("check 1 1 1 0 {calendar}"),
            ],
        ),
        (
            3,
            vec![
                "check 1 1 3 0 bucket 1 5 1 12000000 375299936".to_owned(),
                format!("check 1 2 1 0 {log} {calendar}"),
            ],
        ),
    ];
    for (count, mut arguments) in calls {
        arguments.insert(0, within.clone());
        for _ in 0..2 {
            let keys = ["first", "second", "third"];
            let reply = eval(&redis, driver(), &keys[..count], &arguments).await;
            assert_eq!(reply.into_bytes().expect("the time").len(), 8, "{arguments:?}");
            assert_eq!(redis.command::<u32>("EXISTS", keys).await, 0, "{arguments:?}");
        }
    }
}

/// The process guesses the time of Redis: its period may be any of the three.
#[tokio::test]
async fn a_calendar_counts_in_the_period_around_the_time_of_redis() {
    let redis = Redis::start();
    let [seconds, _]: [i64; 2] = redis.command("TIME", [""; 0]).await;
    let at = |period: i64| (seconds - 1_800 + 3_600 * period) * 1_000_000;
    for position in 0..3 {
        let boundaries = [0, 1, 2, 3, 4]
            .map(|period| at(period - position).to_string())
            .join(" ");
        let arguments = [
            format!("{} {} 0", at(-position), at(3 - position)),
            format!("check 1 1 1 0 fixed 1 9 0 0 0 {boundaries}"),
        ];
        let key = format!("key {position}");
        let reply = eval(&redis, driver(), &[&key], &arguments)
            .await
            .into_bytes()
            .expect("packed numbers");
        let numbers = reply
            .chunks(8)
            .map(|number| f64::from_le_bytes(number.try_into().expect("eight bytes")) as i64);
        let [now, admitted, remaining, wait, reset] = numbers.collect::<Vec<_>>()[..] else {
            panic!("five numbers: {reply:?}")
        };
        assert_eq!(
            [admitted, remaining, wait, now + reset],
            [1, 8, 0, at(1)],
            "position {position}"
        );
    }
}

#[tokio::test]
async fn a_key_of_another_type_fails_its_own_request_and_no_other() {
    let redis = Redis::start();
    for limit in LIMITS {
        clear(&redis, limit).await;
        redis.command::<()>("HSET", ["bad", "field", "value"]).await;

        for operation in ["check 1 1", "charge 1 1", "peek 1 1"] {
            let replies = call(&redis, limit, &[(operation, &["a", "bad", "b"]), ("check 1 1", &["c"])]).await;
            assert!(
                replies[1].error().starts_with("WRONGTYPE Operation "),
                "{limit}: {replies:?}"
            );
            for good in [0, 2, 3] {
                assert_eq!(replies[good].admitted(), 1, "{limit}, {operation}: {replies:?}");
            }
        }
        // One check and one charge.
        let replies = call(&redis, limit, &[("peek 1 1", &["a", "b"])]).await;
        assert_eq!([replies[0].verdict()[0], replies[1].verdict()[0]], [3, 3], "{limit}");
    }
}

#[tokio::test]
async fn a_request_that_fails_has_added_nothing() {
    let redis = Redis::start();
    for limit in LIMITS {
        clear(&redis, limit).await;
        redis.command::<()>("HSET", ["bad", "field", "value"]).await;

        let replies = call(&redis, limit, &[("check 1 1", &["a bad b"]), ("peek 1 1", &["a", "b"])]).await;

        assert!(replies[0].error().starts_with("WRONGTYPE "), "{limit}: {replies:?}");
        assert_eq!([replies[1].verdict()[0], replies[2].verdict()[0]], [5, 5], "{limit}");
        assert_eq!(redis.command::<u32>("EXISTS", ["a", "b"]).await, 0, "{limit}");
    }
}

#[tokio::test]
async fn a_refund_that_fails_disturbs_no_other() {
    let redis = Redis::start();
    redis.command::<()>("HSET", ["bad", "field", "value"]).await;
    for limit in LIMITS {
        let replies = call(&redis, limit, &[("refund 1 1 9", &["bad", "good"])]).await;
        assert!(replies[0].error().starts_with("WRONGTYPE "), "{limit}: {replies:?}");
        assert_eq!(replies[1], RequestReply::StoreResponse(1, vec![[5, 0, 0]]), "{limit}");
    }
}

#[tokio::test]
async fn a_value_that_is_not_ours_counts_for_nothing() {
    let redis = Redis::start();
    let values = [
        "",
        "garbage",
        "1800000000000000 5 1800000000000000",
        "not a number, 32 bytes..........",
        "not a number, 72 bytes..................................................",
        "\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}",
    ];
    for limit in LIMITS.iter().filter(|limit| !limit.starts_with("log")) {
        for value in values {
            redis.command::<()>("FLUSHALL", ["SYNC"]).await;
            redis.command::<()>("SET", ["bad", value]).await;

            let replies = call(&redis, limit, &[("check 1 1", &["a", "bad", "b"])]).await;

            let left: Vec<_> = replies.iter().map(|reply| reply.verdict()[0]).collect();
            assert_eq!(left, [4, 4, 4], "{limit}: {value:?}");
            let expires: i64 = redis.command("PTTL", ["bad"]).await;
            assert!(expires > 0, "{limit}: {value:?}");
        }
    }
}

#[tokio::test]
async fn numbers_that_are_no_log_count_for_nothing() {
    let redis = Redis::start();
    for [total, expired, count, room] in [
        [0.0, 0.0, 1.0, 0.0],
        [9_007_199_254_740_992.0, 0.0, 1.0, 0.0],
        [3.0, -1.0, 1.0, 1.0],
        [3.0, 1.0, 1.0, 0.0],
        [3.0, 0.0, 3.0, 1.0],
        [3.0, 0.0, 1.0, 9_007_199_254_740_992.0],
        [f64::NAN, 0.0, 1.0, 0.0],
        [3.0, 0.0, 1.0, f64::NAN],
    ] {
        let time: Vec<u64> = redis.command("TIME", [""; 0]).await;
        let newest = (time[0] * 1_000_000) as f64;
        let numbers = [newest, 3.0, newest, total, expired, count, newest, 0.0, room];
        let value = numbers.map(f64::to_le_bytes).concat();
        redis.command_of_bytes::<()>("SET", vec![b"k".to_vec(), value]).await;

        let replies = call(&redis, LIMITS[1], &[("check 1 1", &["k"])]).await;

        assert_eq!(replies[0].verdict()[0], 4, "{total} {expired} {count} {room}");
    }
}

#[tokio::test]
async fn members_that_are_not_ours_fail_no_other_request() {
    let redis = Redis::start();
    let log = LIMITS[0];
    for (score, member) in [
        ("-inf", "#"),
        ("7", "#"),
        ("7", "="),
        ("-5", ">60000000"),
        ("-inf", "@1"),
        ("0", "=x"),
        ("+inf", "x"),
        ("-5", "x"),
        ("1800000000000000", "x:y"),
    ] {
        redis.command::<()>("FLUSHALL", ["SYNC"]).await;
        redis.command::<()>("ZADD", ["bad", score, member]).await;

        let replies = call(&redis, log, &[("check 1 1", &["a", "bad", "b"])]).await;

        assert_eq!(
            [replies[0].admitted(), replies[2].admitted()],
            [1, 1],
            "{score} {member}"
        );
        if let RequestReply::StoreResponse(_, states) = &replies[1] {
            assert!(
                states[0].iter().all(|number| *number >= 0),
                "{score} {member}: {replies:?}"
            );
        }
    }
}

/// The total of a log is the score of a member.
#[tokio::test]
async fn a_total_that_is_not_ours_is_none_or_denies_for_a_window_at_most() {
    let redis = Redis::start();
    for (score, admitted, left) in [
        ("-inf", 0, 0),
        ("-1e300", 0, 0),
        ("-9007199254740992", 0, 0),
        ("0", 1, 4),
    ] {
        redis.command::<()>("FLUSHALL", ["SYNC"]).await;
        call(&redis, LIMITS[0], &[("check 1 1", &["k"])]).await;
        redis.command::<()>("ZREM", ["k", "="]).await;
        redis.command::<()>("ZADD", ["k", score, "#"]).await;

        let replies = call(&redis, LIMITS[0], &[("check 1 1", &["k"])]).await;

        let [remaining, wait, reset] = replies[0].verdict();
        assert_eq!((replies[0].admitted(), remaining), (admitted, left), "{score}");
        assert!((0..=60_000_000).contains(&wait), "{score}: {wait}");
        assert!((1..=60_000_000).contains(&reset), "{score}: {reset}");
    }
}

#[tokio::test]
async fn without_memory_each_request_that_would_add_fails_and_the_others_are_answered() {
    let redis = Redis::start();
    for limit in LIMITS {
        clear(&redis, limit).await;
        call(&redis, limit, &[("check 1 5", &["full"])]).await;
        redis.command::<()>("CONFIG", ["SET", "maxmemory", "1"]).await;

        let runs: [(&str, &[&str]); 2] = [("check 1 1", &["a", "full", "b"]), ("peek 1 1", &["a"])];
        let replies = call(&redis, limit, &runs).await;
        let checks = call_run(&redis, limit, &["full", "a", "full"], 3).await;
        redis.command::<()>("CONFIG", ["SET", "maxmemory", "0"]).await;

        let checks = checks.expect("a reply");
        assert_eq!(
            checks.iter().map(|check| check[0]).collect::<Vec<_>>(),
            [0, -1, 0],
            "{limit}"
        );
        for failed in [0, 2] {
            let error = replies[failed].error();
            assert!(error.starts_with("OOM command not allowed"), "{limit}: {error}");
            assert!(!error.contains(['\r', '\n']), "{limit}: {error}");
        }
        assert_eq!(replies[1].admitted(), 0, "{limit}");
        assert_eq!(replies[3].verdict()[0], 5, "{limit}");
        assert_eq!(redis.command::<u32>("EXISTS", ["a", "b"]).await, 0, "{limit}");
    }
}

/// A log of a key that exists is written before, after which Redis would let the others pass.
#[tokio::test]
async fn without_memory_no_key_is_added_beside_one_that_exists() {
    let redis = Redis::start();
    for limit in LIMITS {
        clear(&redis, limit).await;
        call(&redis, limit, &[("check 1 1", &["known"])]).await;
        redis.command::<()>("CONFIG", ["SET", "maxmemory", "1"]).await;

        let runs: [(&str, &[&str]); 3] = [
            ("check 1 1", &["known", "a"]),
            ("charge 1 1", &["b"]),
            ("check 1 1", &["known c"]),
        ];
        let replies = call(&redis, limit, &runs).await;
        let checks = call_checks(&redis, limit, &["known", "d"]).await;
        let two = call(&redis, limit, &[("check 1 1", &["known", "e"])]).await;
        let across = call_across(&redis, limit, &["known", "f"]).await;
        redis.command::<()>("CONFIG", ["SET", "maxmemory", "0"]).await;

        for failed in [&replies[1], &replies[2], &replies[3], &two[1]] {
            let error = failed.error();
            assert!(error.starts_with("OOM command not allowed"), "{limit}: {error}");
        }
        assert!(checks.expect("a reply")[1][0] < 0, "{limit}");
        assert!(across[1][0] < 0, "{limit}");
        let added = ["a", "b", "c", "d", "e", "f"];
        assert_eq!(redis.command::<u32>("EXISTS", added).await, 0, "{limit}");
    }
}

/// A later expiry is written before the count, and once a script has written, Redis refuses nothing.
#[tokio::test]
async fn without_memory_a_log_that_exists_and_needs_a_later_expiry_is_not_written() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let store = clock.redis_store(&redis).await;
    let limit = Limit::from(SlidingLog::per_minute(9).precision(2));
    assert!(decide(&store, Operation::Check, &limit, "k", 1).await.allowed);
    clock.advance(Duration::from_secs(2));
    clock.write_to(&redis).await;
    redis.command::<()>("CONFIG", ["SET", "maxmemory", "1"]).await;
    let checked = try_decide(&store, Operation::Check, &limit, "k", 1).await;
    redis.command::<()>("CONFIG", ["SET", "maxmemory", "0"]).await;

    assert!(checked.is_err());
    assert_eq!(
        decide(&store, Operation::Peek, &limit, "k", 1).await.states()[0].remaining,
        8
    );
}

/// Redis counts the errors of scripts.
#[tokio::test]
async fn with_memory_a_call_of_several_keys_has_no_errors() {
    let redis = Redis::start();
    for limit in LIMITS {
        clear(&redis, limit).await;
        for _ in 0..2 {
            call(&redis, limit, &[("check 1 1", &["a", "b"])]).await;
            call_checks(&redis, limit, &["a", "b"]).await.expect("a reply");
        }
    }
    let stats: String = redis.command("INFO", ["stats"]).await;
    assert!(stats.contains("total_error_replies:0\r"), "{stats}");
}

#[tokio::test]
async fn a_store_whose_scripts_were_loaded_teaches_none() {
    let redis = Redis::start();
    for script in RedisStore::scripts() {
        redis.command::<()>("SCRIPT", ["LOAD", script]).await;
    }
    let store = patient().url(&redis.url()).connect().await.expect("a store");
    redis.command::<()>("CONFIG", ["RESETSTAT"]).await;

    let limit = Limit::from(SlidingLog::per_minute(5));
    assert!(decide(&store, Operation::Check, &limit, "k", 1).await.allowed);

    assert_eq!(redis.calls("eval").await, 0);
}

/// Without the bound, a caller who chooses the costs could make Redis read a long log once for each cost.
#[tokio::test]
async fn a_call_reads_a_bounded_number_of_members_for_the_waits_of_denied_checks() {
    let log = SlidingLog::per_hour(3_000);
    waits_are_bounded(log.into(), Duration::from_millis(1)).await;
    waits_are_bounded(log.precision(100_000).into(), Duration::from_millis(36)).await;
}

/// With an entry after each such time.
async fn waits_are_bounded(limit: Limit, step: Duration) {
    const ENTRIES: u64 = 990;
    let (redis, clock) = (Redis::start(), Clock::new());
    let store = clock.redis_store(&redis).await;
    for _ in 0..ENTRIES {
        clock.advance(step);
        clock.write_to(&redis).await;
        assert!(decide(&store, Operation::Check, &limit, "k", 2).await.allowed);
    }

    let key = Key::from("k");
    let free = 3_000 - 2 * ENTRIES;
    let lacking: Vec<u64> = (0..20).map(|nth| 2 * (985 - nth)).collect();
    let charges: Vec<_> = lacking
        .iter()
        .map(|lacking| [Charge::new("test", &limit, &key, free + lacking)])
        .collect();
    let checks = charges
        .iter()
        .map(|charges| StoreRequest::new(Operation::Check, charges));
    let response = store.decide(&checks.collect::<Vec<_>>()).await.expect("Redis answers");
    let waits = response
        .outcomes()
        .iter()
        .map(|outcome| outcome.states()[0].retry_after);
    let waits: Vec<_> = waits.map(|wait| wait.expect("a denial")).collect();

    let until = |entry: u64| Duration::from_secs(3_600) - step * (ENTRIES - entry) as u32;
    let exact = lacking[..8].iter().map(|lacking| until(lacking / 2));
    assert_eq!(waits[..8], exact.collect::<Vec<_>>());
    assert_eq!(waits[8..], [until(8); 12], "no further than the first members");
}

#[tokio::test]
async fn admissions_of_one_grain_of_a_microsecond_are_one_entry() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let store = clock.redis_store(&redis).await;
    clock.write_to(&redis).await;
    let limit = Limit::from(SlidingLog::new(9, Duration::from_millis(10)).precision(10_000));
    for _ in 0..3 {
        assert!(decide(&store, Operation::Check, &limit, "k", 1).await.allowed);
    }
    let bytes: u64 = redis.command("STRLEN", ["quota:1:log/10ms/1us:test:{key=k}"]).await;
    assert_eq!(bytes, 72, "one, and the total");
}

#[tokio::test]
async fn a_refund_of_a_sliding_counter_keeps_its_key_no_longer() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let store = clock.redis_store(&redis).await;
    let limit = Limit::from(SlidingCounter::per_hour(100));
    let step = async |to: u64| {
        clock.advance(Duration::from_micros(to - clock.now()));
        clock.write_to(&redis).await;
    };
    let (minute, hour) = (60_000_000, 3_600_000_000);
    let turn = clock.now() - clock.now() % hour + hour;
    step(turn - minute).await;
    decide(&store, Operation::Check, &limit, "k", 1).await;
    let keys: Vec<String> = redis.command("KEYS", ["quota:1:counter*"]).await;
    let expires = redis.expires_at(&keys[0]).await;

    step(turn + minute).await;
    let admitted_at = Duration::from_micros(turn - minute);
    decide(&store, Operation::Refund { admitted_at }, &limit, "k", 1).await;
    let later = redis.expires_at(&keys[0]).await;
    assert!(later <= expires, "{} ms later", later - expires);
}
