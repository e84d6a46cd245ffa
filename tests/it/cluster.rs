//! A store in a cluster: whom it asks, and what it does while slots move and nodes die.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::task::JoinSet;
use tower::{Layer, ServiceExt};
use tower_quota::{
    Decision, Key, Limit, Limiter, Policy, RateLimitLayer, RedisStore, SlidingLog, TokenBucket, key,
    store::{Answer, Charge, ErrorKind, Operation, Request, Store},
};

use crate::support::{Cluster, decide, eventually, try_decide};

const DEADLINE: Duration = Duration::from_millis(500);
/// What a busy machine may add to it.
const SLACK: Duration = Duration::from_millis(400);

fn limit(quota: u64) -> Limit {
    SlidingLog::per_hour(quota).into()
}

async fn store(cluster: &Cluster) -> RedisStore {
    let builder = RedisStore::builder().deadline(DEADLINE);
    builder.connect(&cluster.url()).await.expect("the URL is good")
}

/// The Redis key of a key under the limits of these tests.
fn redis_key(key: &str) -> String {
    format!("quota:1:log:test:{{key={key}}}")
}

/// A key in each primary's slots.
async fn keys(cluster: &Cluster) -> [String; 3] {
    let mut found = [None, None, None];
    for number in 0..100 {
        let key = format!("k{number}");
        let owner = Cluster::owner(cluster.slot(&redis_key(&key)).await);
        found[owner].get_or_insert(key);
    }
    found.map(|key| key.expect("one in a hundred"))
}

async fn remaining(store: &RedisStore, limit: &Limit, key: &str) -> u64 {
    decide(store, Operation::Peek, limit, key, 1).await.verdicts[0].remaining
}

#[tokio::test]
async fn keys_spread_over_the_primaries() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    // Neither of these is a hash tag of the caller's choice.
    for number in 0..60 {
        decide(&store, Operation::Check, &limit(5), &format!("{{x}}/{number}"), 1).await;
    }

    for primary in &cluster.primaries {
        let keys: u64 = primary.command("DBSIZE", [""; 0]).await;
        assert!((5..=40).contains(&keys), "{keys} of 60 keys");
    }
}

#[tokio::test]
async fn all_policies_of_one_caller_are_decided_together() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let (log, bucket) = (limit(5), Limit::from(TokenBucket::per_minute(3)));
    for number in 0..20 {
        let key = Key::path(&format!("/{number}"));
        let charges = [Charge::new("a", &log, &key, 1), Charge::new("b", &bucket, &key, 1)];
        for admitted in [true, true, true, false] {
            let answer = store.decide(&[Request::new(Operation::Check, &charges)]).await;
            let outcome = &answer.expect("both are in one slot").outcomes[0];
            assert_eq!(outcome.allowed, admitted);
            assert!(outcome.verdicts[0].remaining >= 2, "a denial charges neither");
        }
    }
}

#[tokio::test]
async fn a_slot_on_its_way_is_asked_for_where_it_is() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let (old, new) = ("old", "new");
    let slot = cluster.slot(&redis_key(old)).await;
    let from = Cluster::owner(slot);
    let to = (from + 1) % 3;

    decide(&store, Operation::Check, &limit(10), old, 1).await;
    cluster.begin_to_move(slot, from, to).await;
    // Not there yet, so still with the old owner.
    decide(&store, Operation::Check, &limit(10), old, 1).await;

    cluster.move_keys(slot, from, to).await;
    // The old owner says `ASK`.
    decide(&store, Operation::Check, &limit(10), old, 1).await;
    assert_eq!(remaining(&store, &limit(10), old).await, 7);

    cluster.end_moving(slot, to).await;
    // And now `MOVED`.
    decide(&store, Operation::Check, &limit(10), old, 1).await;
    assert_eq!(remaining(&store, &limit(10), old).await, 6);
    assert!(decide(&store, Operation::Check, &limit(10), new, 1).await.allowed);
}

#[tokio::test]
async fn a_request_whose_keys_are_torn_apart_fails_uncharged() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let (log, key) = (limit(10), Key::from("k"));
    let charges = [Charge::new("a", &log, &key, 1), Charge::new("b", &log, &key, 1)];
    let check = [Request::new(Operation::Check, &charges)];
    store.decide(&check).await.expect("both are there");

    let slot = cluster.slot(&redis_key("k")).await;
    let from = Cluster::owner(slot);
    let to = (from + 1) % 3;
    cluster.begin_to_move(slot, from, to).await;
    cluster.move_key("quota:1:log:a:{key=k}", from, to).await;
    let error = store.decide(&check).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("TRYAGAIN"), "{error}");

    cluster.move_keys(slot, from, to).await;
    cluster.end_moving(slot, to).await;
    let answer = store.decide(&check).await.expect("both are there");
    let remaining: Vec<_> = answer.outcomes[0]
        .verdicts
        .iter()
        .map(|verdict| verdict.remaining)
        .collect();
    assert_eq!(remaining, [8, 8]);
}

#[tokio::test]
async fn requests_that_left_together_are_served_when_their_keys_are_torn_apart() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let (log, key) = (limit(10), Key::from("k"));
    let [a, b] = ["a", "b"].map(|policy| [Charge::new(policy, &log, &key, 1)]);
    let check = |charges| store.decide(&[Request::new(Operation::Check, charges)]);
    let (first, second) = tokio::join!(check(&a), check(&b));
    assert!(first.is_ok() && second.is_ok());

    let slot = cluster.slot(&redis_key("k")).await;
    let from = Cluster::owner(slot);
    let to = (from + 1) % 3;
    cluster.begin_to_move(slot, from, to).await;
    cluster.move_key("quota:1:log:a:{key=k}", from, to).await;
    let (first, second) = tokio::join!(check(&a), check(&b));
    for answer in [first, second] {
        let answer = answer.expect("each is in one place");
        assert_eq!(answer.outcomes[0].verdicts[0].remaining, 8);
    }
}

/// Policies about the callers of these names, which lie in different slots.
async fn check_both(store: &RedisStore, limits: [&Limit; 2], callers: [&str; 2]) -> Answer {
    let keys = callers.map(Key::from);
    let charges = [
        Charge::new("test", limits[0], &keys[0], 1),
        Charge::new("test", limits[1], &keys[1], 1),
    ];
    let answer = store.decide(&[Request::new(Operation::Check, &charges)]).await;
    answer.expect("the cluster answers")
}

#[tokio::test]
async fn policies_about_different_callers_are_asked_in_turn_and_refunded_when_a_later_one_denies() {
    let cluster = Cluster::start().await;
    let builder = RedisStore::builder().deadline(Duration::from_secs(5)).deny_cache(false);
    let store = builder.connect(&cluster.url()).await.expect("the URL is good");
    let [one, two, _] = &keys(&cluster).await;
    let (many, few) = (limit(10), limit(2));

    for left in [1, 0] {
        let answer = check_both(&store, [&many, &few], [one, two]).await;
        assert!(answer.outcomes[0].allowed);
        assert_eq!(answer.outcomes[0].verdicts[1].remaining, left);
    }
    for _ in 0..5 {
        let answer = check_both(&store, [&many, &few], [one, two]).await;
        let [first, second] = &answer.outcomes[0].verdicts[..] else {
            panic!("two verdicts: {answer:?}")
        };
        assert!(!answer.outcomes[0].allowed);
        assert_eq!(
            (first.remaining, first.retry_after),
            (8, None),
            "it has its charge back"
        );
        assert!(second.retry_after.is_some());
    }
    assert_eq!(remaining(&store, &many, one).await, 8);

    // The other way around the second one is not charged at all, and says how it stands.
    let answer = check_both(&store, [&few, &many], [two, one]).await;
    assert!(!answer.outcomes[0].allowed);
    assert_eq!(answer.outcomes[0].verdicts[1].remaining, 8);
}

#[tokio::test]
async fn a_receipt_for_several_slots_gives_each_its_own_back() {
    let cluster = Cluster::start().await;
    let builder = RedisStore::builder().deadline(Duration::from_secs(5));
    let store = builder.connect(&cluster.url()).await.expect("the URL is good");
    let [one, two, _] = &keys(&cluster).await;
    let policies = [(one, "one"), (two, "two")].map(|(caller, name)| {
        let policy = Policy::new(name, SlidingLog::per_hour(5));
        policy.key(key::constant(caller))
    });
    let layer = RateLimitLayer::new(store.clone(), policies.to_vec());
    let limiter = Limiter::new(store.clone(), Policy::new("refunds", SlidingLog::per_hour(5)));
    let service = layer.layer(tower::service_fn(async |request: http::Request<()>| {
        let decision = request.extensions().get::<Decision>().expect("it was counted");
        limiter
            .refund(decision.receipt().expect("it was charged"))
            .await
            .expect("the cluster answers");
        Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Empty::<bytes::Bytes>::new()))
    }));

    for _ in 0..20 {
        let response = service
            .clone()
            .oneshot(http::Request::new(()))
            .await
            .expect("it never fails");
        assert!(response.status().is_success(), "each gave its charge back");
    }
}

/// Callers who check without pause, each against a key and a limit of its own.
struct Load {
    running: Arc<AtomicBool>,
    callers: JoinSet<Seen>,
}

struct Seen {
    key: String,
    quota: u64,
    admitted: u64,
    failed: u64,
    longest: Duration,
}

impl Load {
    fn start(store: &RedisStore, keys: impl IntoIterator<Item = String>) -> Self {
        let running = Arc::new(AtomicBool::new(true));
        let mut callers = JoinSet::new();
        for (number, key) in keys.into_iter().enumerate() {
            let (store, running) = (store.clone(), running.clone());
            callers.spawn(async move {
                // So that nobody could take another's answer for theirs.
                let quota = 1_000_000 + 1_000_000 * number as u64;
                let limit = Limit::from(TokenBucket::per_hour(quota).burst(quota));
                let mut seen = Seen {
                    key,
                    quota,
                    admitted: 0,
                    failed: 0,
                    longest: Duration::ZERO,
                };
                while running.load(Ordering::Relaxed) {
                    let started = Instant::now();
                    match try_decide(&store, Operation::Check, &limit, &seen.key, 1).await {
                        Ok(outcome) => {
                            assert!(outcome.allowed, "there is room for {}", seen.key);
                            seen.admitted += 1;
                            let left = outcome.verdicts[0].remaining;
                            let own = (quota - 400_000..quota).contains(&left);
                            assert!(own, "{left} left of {quota} is the answer to somebody else");
                        }
                        Err(error) => {
                            assert_ne!(error.kind(), ErrorKind::Protocol, "{error}");
                            seen.failed += 1;
                            tokio::time::sleep(Duration::from_millis(5)).await;
                        }
                    }
                    seen.longest = seen.longest.max(started.elapsed());
                }
                seen
            });
        }
        Self { running, callers }
    }

    async fn stop(self) -> Vec<Seen> {
        self.running.store(false, Ordering::Relaxed);
        self.callers.join_all().await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_slots_move_nobody_is_counted_twice_or_told_of_another() {
    let cluster = Cluster::start().await;
    let store = RedisStore::builder()
        .deadline(Duration::from_secs(5))
        .connect(&cluster.url())
        .await
        .expect("the URL is good");
    let keys: Vec<String> = (0..12).map(|number| format!("caller-{number}")).collect();
    let load = Load::start(&store, keys.iter().cloned());

    for key in &keys {
        let slot = cluster.slot(&format!("{{key={key}}}")).await;
        let from = Cluster::owner(slot);
        let to = (from + 1) % 3;
        cluster.begin_to_move(slot, from, to).await;
        cluster.move_keys(slot, from, to).await;
        cluster.end_moving(slot, to).await;
    }

    for seen in load.stop().await {
        assert_eq!(seen.failed, 0, "a slot on its way is served");
        assert!(seen.admitted > 10, "{} was admitted {} times", seen.key, seen.admitted);
        let limit = Limit::from(TokenBucket::per_hour(seen.quota).burst(seen.quota));
        let left = remaining(&store, &limit, &seen.key).await;
        let counted = seen.quota - left;
        // A bucket of so many an hour gives some back meanwhile: up to 12 s of 3,334 each.
        let back = seen.quota / 3_600 * 12;
        assert!(counted <= seen.admitted, "{counted} of {} counted", seen.admitted);
        assert!(
            counted + back >= seen.admitted,
            "{counted} of {} counted",
            seen.admitted
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_slot_moves_a_log_counts_exactly() {
    let cluster = Cluster::start().await;
    let store = RedisStore::builder()
        .deadline(Duration::from_secs(5))
        .connect(&cluster.url())
        .await
        .expect("the URL is good");
    const QUOTA: u64 = 400;
    let slot = cluster.slot(&redis_key("hot")).await;
    let admitted = Arc::new(AtomicU64::new(0));
    let mut callers = JoinSet::new();
    for _ in 0..8 {
        let (store, admitted) = (store.clone(), admitted.clone());
        callers.spawn(async move {
            for _ in 0..100 {
                if decide(&store, Operation::Check, &limit(QUOTA), "hot", 1).await.allowed {
                    admitted.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }

    let mut from = Cluster::owner(slot);
    while !callers.is_empty() {
        let to = (from + 1) % 3;
        cluster.begin_to_move(slot, from, to).await;
        cluster.move_keys(slot, from, to).await;
        cluster.end_moving(slot, to).await;
        from = to;
        while callers
            .try_join_next()
            .map(|caller| caller.expect("no caller panics"))
            .is_some()
        {}
    }
    assert_eq!(admitted.load(Ordering::Relaxed), QUOTA);
}

#[tokio::test]
async fn a_node_that_has_forgotten_the_script_is_taught_again() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let keys = keys(&cluster).await;
    for key in &keys {
        decide(&store, Operation::Check, &limit(10), key, 1).await;
    }

    cluster.primaries[1].command::<()>("SCRIPT", ["FLUSH"]).await;
    for key in &keys {
        let outcome = decide(&store, Operation::Check, &limit(10), key, 1).await;
        assert_eq!(outcome.verdicts[0].remaining, 8);
    }
}

#[tokio::test]
async fn a_dead_primary_fails_its_own_keys_alone_and_its_replica_takes_over() {
    let mut cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let keys = keys(&cluster).await;
    for key in &keys {
        decide(&store, Operation::Check, &limit(1_000), key, 1).await;
    }
    let load = Load::start(&store, [keys[0].clone(), keys[2].clone()]);

    cluster.primaries[1].kill();
    let started = Instant::now();
    let error = try_decide(&store, Operation::Check, &limit(1_000), &keys[1], 1)
        .await
        .unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Timeout),
        "{error:?}"
    );
    assert!(started.elapsed() < DEADLINE + SLACK, "{:?}", started.elapsed());

    eventually("the replica has taken over", async || {
        try_decide(&store, Operation::Check, &limit(1_000), &keys[1], 1)
            .await
            .is_ok()
    })
    .await;
    for seen in load.stop().await {
        assert_eq!(seen.failed, 0, "{} has a primary that lives", seen.key);
        assert!(seen.longest < DEADLINE, "{:?}", seen.longest);
    }
}

#[tokio::test]
async fn a_hung_primary_holds_up_its_own_keys_alone_and_its_replica_takes_over() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let keys = keys(&cluster).await;
    for key in &keys {
        decide(&store, Operation::Check, &limit(1_000), key, 1).await;
    }
    let load = Load::start(&store, [keys[0].clone(), keys[2].clone()]);

    let frozen = cluster.primaries[1].freeze();
    let mut longest = Duration::ZERO;
    eventually("the replica has taken over", async || {
        let started = Instant::now();
        let answer = try_decide(&store, Operation::Check, &limit(1_000), &keys[1], 1).await;
        longest = longest.max(started.elapsed());
        answer.is_ok()
    })
    .await;
    assert!(longest < DEADLINE + SLACK, "{longest:?}");
    for seen in load.stop().await {
        assert_eq!(seen.failed, 0, "{} has a primary that answers", seen.key);
        assert!(seen.longest < DEADLINE, "{:?}", seen.longest);
    }
    drop(frozen);
}

#[tokio::test]
async fn replicas_are_not_asked() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    for key in keys(&cluster).await {
        decide(&store, Operation::Check, &limit(10), &key, 1).await;
        decide(&store, Operation::Peek, &limit(10), &key, 1).await;
    }
    for replica in &cluster.replicas {
        let stats: String = replica.command("INFO", ["commandstats"]).await;
        // What the primary sends it does not count as a script.
        assert!(!stats.contains("cmdstat_eval"), "{stats}");
    }
}

#[tokio::test]
async fn the_nodes_may_be_named_by_clients_of_the_application() {
    let cluster = Cluster::start().await;
    let url = format!("redis://127.0.0.1:{}", cluster.primaries[2].port());
    let nodes = [redis::Client::open(url).expect("a good URL")];
    let store = RedisStore::builder().deadline(DEADLINE).redis_rs_cluster(&nodes);
    let store = store.await.expect("the node is there");
    let mut owners = HashSet::new();
    for key in keys(&cluster).await {
        assert!(decide(&store, Operation::Check, &limit(10), &key, 1).await.allowed);
        owners.insert(Cluster::owner(cluster.slot(&redis_key(&key)).await));
    }
    assert_eq!(owners.len(), 3);
}

#[tokio::test]
async fn a_password_that_the_cluster_turns_down_is_an_error_that_does_not_show_it() {
    let cluster = Cluster::start_with(&["--user", "limiter", "on", ">right-one", "~*", "+@all"]).await;
    let url = |password| cluster.url().replace("://", &format!("://limiter:{password}@"));
    let error = RedisStore::connect(&url("wrong-one")).await.unwrap_err();
    assert!(error.to_string().contains("credentials"), "{error}");
    assert!(!format!("{error} {error:?}").contains("wrong-one"), "{error:?}");

    let store = RedisStore::connect(&url("right-one"))
        .await
        .expect("the password is right");
    eventually("the store is answered", async || {
        try_decide(&store, Operation::Peek, &limit(1), "k", 1).await.is_ok()
    })
    .await;
}
