//! Calls to a node of a cluster with keys of several slots, also while slots move.

use std::{
    collections::HashMap,
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use tokio::task::JoinSet;
use tower_quota::{
    Ban, Concurrency, FixedWindow, Key, Limit, Limiter, Policy, RedisStore, SlidingCounter, SlidingLog, TokenBucket,
    limit::Calendar,
    store::{Charge, ErrorKind, Operation, Outcome, Store, StoreRequest},
};

use crate::support::{Cluster, decide, eventually, patient};

fn limit(quota: u64) -> Limit {
    SlidingLog::per_hour(quota).into()
}

/// Without the deny cache, so that each check is a call.
async fn store(cluster: &Cluster) -> RedisStore {
    let store = patient().deny_cache(false).url(&cluster.url()).connect().await;
    let store = store.expect("the cluster replies");
    cluster.serves(&store).await;
    store
}

/// Keys of the limiter by the primary that has their slots; no slot has two.
async fn keys_by_owner(cluster: &Cluster, of_each: usize) -> [Vec<String>; 3] {
    let (mut keys, mut slots) = ([const { Vec::new() }; 3], Vec::new());
    for number in 0.. {
        let key = format!("n{number}");
        let slot = cluster.slot(&format!("{{key={key}}}")).await;
        let keys = &mut keys[Cluster::owner(slot)];
        if keys.len() < of_each && !slots.contains(&slot) {
            slots.push(slot);
            keys.push(key);
        }
        if slots.len() == 3 * of_each {
            break;
        }
    }
    keys
}

async fn slot(cluster: &Cluster, key: &str) -> u16 {
    cluster.slot(&format!("{{key={key}}}")).await
}

/// Checks or other operations on one key of each policy, which have the names of these positions.
async fn decide_all(store: &RedisStore, operation: Operation, limit: &Limit, keys: &[&str]) -> Result<Outcome, String> {
    const POLICIES: [&str; 4] = ["p0", "p1", "p2", "p3"];
    let keys: Vec<_> = keys.iter().map(|key| Key::from(*key)).collect();
    let charges: Vec<_> = POLICIES
        .iter()
        .zip(&keys)
        .map(|(policy, key)| Charge::new(policy, limit, key, 1))
        .collect();
    let response = store.decide(&[StoreRequest::new(operation, &charges)]).await;
    response
        .map(|response| response.outcomes()[0].clone())
        .map_err(|error| error.to_string())
}

/// The script calls that the primaries have run since the last call of this function.
async fn script_calls(cluster: &Cluster) -> u64 {
    let mut calls = 0;
    for primary in &cluster.primaries {
        calls += primary.calls("evalsha").await;
        primary.command::<()>("CONFIG", ["RESETSTAT"]).await;
    }
    calls
}

#[tokio::test]
async fn checks_of_many_slots_share_calls() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    script_calls(&cluster).await;
    let mut checks = JoinSet::new();
    for number in 0..600 {
        let store = store.clone();
        checks.spawn(async move { decide(&store, Operation::Check, &limit(5), &format!("s{number}"), 1).await });
    }
    assert!(checks.join_all().await.iter().all(|outcome| outcome.allowed));
    let calls = script_calls(&cluster).await;
    assert!(calls <= 60, "{calls} calls for 600 checks");
    for number in 0..20 {
        let left = decide(&store, Operation::Peek, &limit(5), &format!("s{number}"), 1).await;
        assert_eq!(left.states()[0].remaining, 4);
    }
}

#[tokio::test]
async fn limits_of_all_algorithms_hold_in_a_call_of_many_slots() {
    const HOUR: Duration = Duration::from_secs(3_600);
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let calendar = FixedWindow::calendar(5, Calendar::Year, "UTC").expect("the time zone is known");
    let limits: [Limit; 7] = [
        SlidingLog::new(5, HOUR).into(),
        SlidingLog::new(5, HOUR).precision(10).into(),
        SlidingCounter::new(5, HOUR).into(),
        FixedWindow::new(5, HOUR).into(),
        calendar.into(),
        TokenBucket::new(5, HOUR).into(),
        Concurrency::new(5).into(),
    ];
    let mut checks = JoinSet::new();
    for _ in 0..7 {
        for (position, limit) in limits.iter().enumerate() {
            for number in 0..12 {
                let (store, limit) = (store.clone(), limit.clone());
                // Of one charge, of several on one key, and on several keys.
                let key = format!("{position}-{number}");
                let request = vec![key.clone(); 1 + number % 3];
                let (other, several) = (format!("{key}-other"), number % 4 == 3);
                checks.spawn(async move {
                    let mut request: Vec<_> = request.iter().map(String::as_str).collect();
                    if several {
                        request.push(&other);
                    }
                    let decided = decide_all(&store, Operation::Check, &limit, &request).await;
                    (key, decided.map(|outcome| outcome.allowed))
                });
            }
        }
    }
    let mut admitted = HashMap::<String, u64>::new();
    for (key, allowed) in checks.join_all().await {
        *admitted.entry(key).or_default() += u64::from(allowed.expect("no slot moves"));
    }
    assert_eq!(admitted.len(), limits.len() * 12);
    let wrong: Vec<_> = admitted.iter().filter(|(_, admitted)| **admitted != 5).collect();
    // Of keys on several nodes, one check may deny another until it is refunded.
    assert!(
        wrong.iter().all(|(key, admitted)| is_several(key) && **admitted < 5),
        "{wrong:?}"
    );
}

/// Whether the requests of this key in the test above have another one.
fn is_several(key: &str) -> bool {
    let number = key.rsplit('-').next().and_then(|number| number.parse::<usize>().ok());
    number.is_some_and(|number| number % 4 == 3)
}

#[tokio::test]
async fn policies_whose_slots_lie_on_one_node_are_decided_in_one_call() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let [keys, ..] = keys_by_owner(&cluster, 3).await;
    let keys: Vec<_> = keys.iter().map(String::as_str).collect();
    let two = limit(2);
    script_calls(&cluster).await;
    for admitted in [true, true, false, false] {
        let outcome = decide_all(&store, Operation::Check, &two, &keys)
            .await
            .expect("a reply");
        assert_eq!(outcome.allowed, admitted);
    }
    assert_eq!(script_calls(&cluster).await, 4);

    // A denial by the last one charges none of the others.
    let ten = limit(10);
    decide_all(&store, Operation::Reset, &ten, &keys[..2])
        .await
        .expect("a reply");
    assert!(
        !decide_all(&store, Operation::Check, &two, &keys)
            .await
            .expect("a reply")
            .allowed
    );
    let left = decide_all(&store, Operation::Peek, &ten, &keys).await.expect("a reply");
    let left: Vec<_> = left.states().iter().map(|state| state.remaining).collect();
    assert_eq!(left, [10, 10, 8]);

    // Units are counted in one slot, whichever nodes have the others.
    let of = |name| Policy::new(name, SlidingLog::per_hour(3));
    let both = Limiter::new(store, [of("one"), of("other")]);
    let taken = both.request(keys[0]).key_of("other", keys[1]).take_up_to(2).await;
    assert_eq!(taken.expect_err("they lie in two slots").kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn a_key_of_another_type_fails_no_other_check_of_the_call() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let [keys, ..] = keys_by_owner(&cluster, 6).await;
    let wrong = format!("quota:1:log/1h:p0:{{key={}}}", keys[2]);
    cluster.primaries[0].command::<()>("SET", [wrong.as_str(), "x"]).await;
    let checks = keys.iter().map(|key| {
        let store = store.clone();
        let key = key.clone();
        async move { decide_all(&store, Operation::Check, &limit(5), &[&key]).await }
    });
    let outcomes = checks.collect::<JoinSet<_>>().join_all().await;
    let failed: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert!(failed[0].contains("WRONGTYPE"), "{failed:?}");
}

/// Each state in which the keys of a request can be while the slots of some move, with other checks in the same call.
#[tokio::test]
async fn a_request_in_several_slots_is_counted_in_all_or_in_none_while_slots_move() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let [keys, ..] = keys_by_owner(&cluster, 5).await;
    let [first, second, third, before, after] = &keys[..] else {
        unreachable!("five keys")
    };
    let many = limit(1_000_000);
    let request = [first.as_str(), second, third];
    let check = async || {
        let others = |key: &String| {
            let (store, key, many) = (store.clone(), key.clone(), many.clone());
            async move { decide_all(&store, Operation::Check, &many, &[&key]).await }
        };
        let (_, decided, _) = tokio::join!(
            others(before),
            decide_all(&store, Operation::Check, &many, &request),
            others(after)
        );
        decided
    };
    let counts = async || {
        let left = decide_all(&store, Operation::Peek, &many, &request)
            .await
            .expect("no slot moves");
        let counts = left.states().iter().map(|state| 1_000_000 - state.remaining);
        counts.collect::<Vec<_>>()
    };

    for moving in 1..8_u32 {
        let moving: Vec<_> = (0..3).filter(|bit| moving >> bit & 1 == 1).collect();
        // Whether each key is there before, and which of the keys of moving slots move first.
        for (present, moved) in [(false, 0), (true, 0), (true, 1), (true, 3)] {
            let mut admitted = 0;
            decide_all(&store, Operation::Reset, &many, &request)
                .await
                .expect("no slot moves");
            if present {
                check().await.expect("no slot moves");
                admitted += 1;
            }
            let mut slots = Vec::new();
            for position in &moving {
                slots.push(slot(&cluster, request[*position]).await);
            }
            for (position, slot) in slots.iter().enumerate() {
                cluster.begin_to_move(*slot, 0, 1).await;
                if position < moved {
                    cluster.move_keys(*slot, 0, 1).await;
                }
            }
            for _ in 0..3 {
                let outcome = check().await.expect("each slot has its keys on one node");
                assert!(outcome.allowed);
                admitted += 1;
            }
            for slot in &slots {
                for (from, to) in [(0, 1), (1, 0)] {
                    if from == 1 {
                        cluster.begin_to_move(*slot, from, to).await;
                    }
                    cluster.move_keys(*slot, from, to).await;
                    cluster.end_moving(*slot, to).await;
                }
            }
            assert_eq!(
                counts().await,
                [admitted; 3],
                "{moving:?} move, {moved} of them with their keys"
            );
        }
    }
}

/// The output of a future whose request is sent in a call with keys of other slots.
async fn batched<F: Future>(store: &RedisStore, [before, after]: [&String; 2], future: F) -> F::Output {
    let many = limit(1_000_000);
    let other = async |key: &String| decide_all(store, Operation::Check, &many, &[key]).await;
    // The first one is a call of its own, and the others wait meanwhile.
    let (first, output, last) = tokio::join!(other(before), future, other(after));
    assert!(first.is_ok() && last.is_ok());
    output
}

#[tokio::test]
async fn as_many_units_are_taken_from_a_slot_that_moves() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let [keys, ..] = keys_by_owner(&cluster, 3).await;
    let [moving, before, after] = &keys[..] else {
        unreachable!("three keys")
    };
    let limiter = Limiter::new(store.clone(), Policy::new("p0", SlidingLog::per_hour(9)));
    let slot = slot(&cluster, moving).await;
    cluster.begin_to_move(slot, 0, 1).await;
    for taken in [5, 4, 0] {
        let decision = batched(&store, [before, after], limiter.request(moving.clone()).take_up_to(5)).await;
        assert_eq!(decision.expect("the key is on one node").taken(), taken);
    }
}

/// A check would count a denial for a ban, and stand in no line.
#[tokio::test]
async fn a_request_whose_slot_has_moved_waits() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let [keys, ..] = keys_by_owner(&cluster, 3).await;
    let [moved, before, after] = &keys[..] else {
        unreachable!("three keys")
    };
    let policy = Policy::new("p0", SlidingLog::per_hour(1)).wait_up_to(Duration::from_secs(7_200));
    let limiter = Limiter::new(store.clone(), policy.ban(Ban::after(1, Duration::from_secs(3_600))));
    assert!(limiter.check(moved.clone()).await.expect("a decision").is_allowed());
    let slot = slot(&cluster, moved).await;
    cluster.begin_to_move(slot, 0, 1).await;
    cluster.move_keys(slot, 0, 1).await;
    cluster.end_moving(slot, 1).await;

    let waiting = {
        let (limiter, moved) = (limiter.clone(), moved.clone());
        async move { limiter.acquire(moved).await.map(drop) }
    };
    // It is polled once in the batch, and then in its task.
    let mut waiting = Box::pin(waiting);
    let begun = poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending()));
    assert!(batched(&store, [before, after], begun).await);
    let waiting = tokio::spawn(waiting);
    let line = format!("quota:1:line:log/1h:p0:{{key={moved}}}");
    eventually("it stands in the line", async || {
        let stands: bool = cluster.primaries[1].command("EXISTS", [&*line]).await;
        stands || waiting.is_finished()
    })
    .await;
    limiter.reset(moved.clone()).await.expect("the cluster replies");
    assert!(waiting.await.expect("no panic").is_ok());
}

#[tokio::test]
async fn a_charge_is_refunded_beside_one_whose_slot_moves() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let [callers, ..] = keys_by_owner(&cluster, 2).await;
    let (limit, keys) = (limit(5), [&callers[0], &callers[1]].map(|caller| Key::from(&**caller)));
    let charges = keys.each_ref().map(|key| Charge::new("p0", &limit, key, 1));
    let slot = slot(&cluster, &callers[1]).await;
    cluster.begin_to_move(slot, 0, 1).await;
    let checks = charges
        .each_ref()
        .map(|charge| StoreRequest::new(Operation::Check, [charge]));
    let response = store.decide(&checks).await.expect("each key is on one node");

    for (charge, (outcome, caller)) in charges.iter().zip(response.outcomes().iter().zip(&callers)) {
        assert_eq!(remaining(&store, &limit, 0, caller).await, 4);
        let admitted_at = outcome.states()[0].decided_at.unwrap_or(response.server_time);
        let refund = [StoreRequest::new(Operation::Refund { admitted_at }, [charge])];
        store.decide(&refund).await.expect("the cluster replies");
        assert_eq!(remaining(&store, &limit, 0, caller).await, 5);
    }
}

/// Requests with one key, with two policies on one key, and with policies on keys of several slots.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_slots_of_a_batch_move_each_check_is_counted_once() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let keys = keys_by_owner(&cluster, 12).await.concat();
    let (running, many) = (Arc::new(AtomicBool::new(true)), limit(1_000_000));
    let mut callers = JoinSet::new();
    for caller in 0..24 {
        let (store, running, keys, many) = (store.clone(), running.clone(), keys.clone(), many.clone());
        callers.spawn(async move {
            let mut counted = HashMap::<(usize, String), [u64; 2]>::new();
            let mut round = caller;
            while running.load(Ordering::Relaxed) {
                round += 7;
                let key = |offset: usize| keys[(round + offset) % keys.len()].as_str();
                let request = match caller % 3 {
                    0 => vec![key(0)],
                    1 => vec![key(0), key(0)],
                    _ => vec![key(0), key(1), key(2)],
                };
                let decided = decide_all(&store, Operation::Check, &many, &request).await;
                for (position, key) in request.iter().enumerate() {
                    let [admitted, failed] = counted.entry((position, (*key).to_owned())).or_default();
                    match &decided {
                        Ok(outcome) if outcome.allowed => *admitted += 1,
                        Ok(outcome) => panic!("there is room: {outcome:?}"),
                        Err(_) => *failed += 1,
                    }
                }
                tokio::task::yield_now().await;
            }
            counted
        });
    }

    for key in keys.iter().step_by(3) {
        let slot = slot(&cluster, key).await;
        let from = Cluster::owner(slot);
        let to = (from + 1) % 3;
        cluster.begin_to_move(slot, from, to).await;
        cluster.move_keys(slot, from, to).await;
        cluster.end_moving(slot, to).await;
    }
    running.store(false, Ordering::Relaxed);
    let mut expected = HashMap::<(usize, String), [u64; 2]>::new();
    for counted in callers.join_all().await {
        for (key, [admitted, failed]) in counted {
            let sum = expected.entry(key).or_default();
            *sum = [sum[0] + admitted, sum[1] + failed];
        }
    }
    for ((position, key), [admitted, failed]) in expected {
        let counted = 1_000_000 - remaining(&store, &many, position, &key).await;
        // One that failed after a part of it was charged in another slot is counted there.
        assert!(
            (admitted..=admitted + failed).contains(&counted),
            "{counted} counted on {key} of p{position}: {admitted} admitted, {failed} failed"
        );
    }
}

async fn remaining(store: &RedisStore, limit: &Limit, position: usize, key: &str) -> u64 {
    let (policy, key) = (format!("p{position}"), Key::from(key));
    let charges = [Charge::new(&policy, limit, &key, 1)];
    let response = store.decide(&[StoreRequest::new(Operation::Peek, &charges)]).await;
    response.expect("the cluster replies").outcomes()[0].states()[0].remaining
}
