//! Checks with several keys in a slot that moves: those of two policies, of bans, or of lines.

use std::time::Duration;

use tokio::time::timeout;
use tower_quota::{
    Ban, Concurrency, FailureMode, Key, Limit, Limiter, Policy, RedisStore, SlidingLog, TokenBucket,
    store::{Charge, ErrorKind, LeaseId, Operation, Outcome, Store, StoreRequest},
};

use crate::support::{Cluster, PATIENCE, patient, redis_key};

/// Without the deny cache, so that each check is a call.
async fn store(cluster: &Cluster) -> RedisStore {
    let store = patient().deny_cache(false).url(&cluster.url()).connect().await;
    let store = store.expect("the cluster replies");
    cluster.serves(&store).await;
    store
}

/// The slot of a key while it moves.
struct Moving<'a> {
    cluster: &'a Cluster,
    slot: u16,
    from: usize,
    to: usize,
}

impl<'a> Moving<'a> {
    async fn of(cluster: &'a Cluster, key: &str) -> Self {
        let slot = cluster.slot(&format!("{{key={key}}}")).await;
        let from = Cluster::owner(slot);
        Self {
            cluster,
            slot,
            from,
            to: (from + 1) % 3,
        }
    }

    async fn begin(cluster: &'a Cluster, key: &str) -> Self {
        let moving = Self::of(cluster, key).await;
        cluster.begin_to_move(moving.slot, moving.from, moving.to).await;
        moving
    }

    async fn move_keys(&self) {
        self.cluster.move_keys(self.slot, self.from, self.to).await;
    }

    async fn end(&self) {
        self.move_keys().await;
        self.cluster.end_moving(self.slot, self.to).await;
    }
}

async fn decide(store: &RedisStore, operation: Operation, charges: &[Charge]) -> Outcome {
    let response = store.decide(&[StoreRequest::new(operation, charges)]).await;
    let response = response.unwrap_or_else(|error| panic!("{operation:?} of {}: {error}", charges[0].policy()));
    response.outcomes()[0].clone()
}

fn remaining(outcome: &Outcome) -> Vec<u64> {
    outcome.states().iter().map(|state| state.remaining).collect()
}

#[tokio::test]
async fn a_limit_of_several_keys_holds_and_no_check_fails() {
    const LIMIT: u64 = 10;
    const HOUR: Duration = Duration::from_secs(3_600);
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let log = || SlidingLog::per_hour(LIMIT);
    let policies = [
        (
            "ban",
            vec![Policy::new("ban", log()).ban(Ban::after(1_000, Duration::from_secs(60)))],
        ),
        (
            "two",
            vec![
                Policy::new("one", log()),
                Policy::new("other", TokenBucket::per_hour(2 * LIMIT)),
            ],
        ),
        ("waits", vec![Policy::new("waits", log()).wait_up_to(2 * HOUR)]),
        (
            "all",
            vec![
                Policy::new("both", log()).wait_up_to(2 * HOUR),
                Policy::new("more", SlidingLog::per_hour(2 * LIMIT)).ban(Ban::after(1_000, Duration::from_secs(60))),
            ],
        ),
    ];
    for (name, policies) in policies {
        let first = redis_key(policies[0].name(), &log().into(), &Key::from(format!("{name}-2")));
        let policies = policies
            .into_iter()
            .map(|policy| policy.failure_mode(FailureMode::Closed));
        let limiter = Limiter::new(store.clone(), policies.collect::<Vec<_>>());
        // Without counts before, and with some.
        for before in [0, 2] {
            let key = format!("{name}-{before}");
            let mut admitted = 0;
            let mut check = async |checks: u64| {
                for _ in 0..checks {
                    let decision = limiter.check(key.as_str()).await;
                    let decision = decision.unwrap_or_else(|error| panic!("{key}, {admitted} admitted: {error}"));
                    admitted += u64::from(decision.is_allowed());
                }
            };
            check(before).await;
            let moving = Moving::begin(&cluster, &key).await;
            check(2).await;
            if before > 0 {
                // The other keys of the request stay, or are not there.
                cluster.move_key(&first, moving.from, moving.to).await;
                check(2).await;
            }
            moving.move_keys().await;
            check(LIMIT + 3).await;
            moving.end().await;
            check(3).await;
            assert_eq!(admitted, LIMIT, "{key}");
        }
    }
}

#[tokio::test]
async fn denials_begin_a_ban_which_a_reset_ends() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let (one, key) = (Limit::from(SlidingLog::per_hour(1)), Key::from("k"));
    let ban = Ban::after(3, Duration::from_secs(3_600));
    let charges = [Charge::new("p", &one, &key, 1).ban(&ban)];
    let check = async || decide(&store, Operation::Check, &charges).await;
    let bans = |outcome: &Outcome| outcome.states()[0].banned_for().is_some();
    let moving = Moving::begin(&cluster, "k").await;
    for _ in 0..2 {
        assert!(check().await.allowed);
        for denial in 1..=3 {
            // A peek counts no denial.
            let peeked = decide(&store, Operation::Peek, &charges).await;
            assert!(!peeked.allowed && !bans(&peeked), "before denial {denial}");
            let denied = check().await;
            assert!(
                !denied.allowed && denied.states()[0].retry_after.is_some(),
                "denial {denial}"
            );
            assert_eq!(bans(&denied), denial == 3, "denial {denial}");
        }
        assert!(bans(&check().await) && bans(&decide(&store, Operation::Peek, &charges).await));
        let reset = decide(&store, Operation::Reset, &charges).await;
        assert_eq!((remaining(&reset), bans(&reset)), (vec![1], false));
        moving.move_keys().await;
    }

    // A denial of a cost above the limit counts for no ban.
    let above = [Charge::new("above", &one, &key, 2).ban(&Ban::after(1, Duration::from_secs(3_600)))];
    for _ in 0..2 {
        let denied = decide(&store, Operation::Check, &above).await;
        assert!(!denied.allowed && !bans(&denied));
    }

    // One that another caller begins denies, and nothing is counted.
    let length = Duration::from_secs(60);
    decide(&store, Operation::Ban { length }, &charges).await;
    assert!(bans(&check().await));
    moving.end().await;
    let denied = check().await;
    assert!(bans(&denied) && remaining(&denied) == [1]);
}

#[tokio::test]
async fn each_operation_on_several_keys_is_executed_once() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let (ten, full, slots) = (
        Limit::from(SlidingLog::per_hour(10)),
        Limit::from(SlidingLog::per_hour(3)),
        Limit::from(Concurrency::new(4)),
    );
    let key = Key::from("k");
    let charges = [
        Charge::new("ten", &ten, &key, 1),
        Charge::new("slots", &slots, &key, 1).lease(LeaseId::random()),
        Charge::new("full", &full, &key, 1),
    ];
    let moving = Moving::begin(&cluster, "k").await;
    for is_moved in [false, true] {
        assert!(decide(&store, Operation::Check, &charges).await.allowed);
        assert!(decide(&store, Operation::RenewLease, &charges[1..2]).await.allowed);
        let charged = decide(&store, Operation::Charge, &[&charges[..1], &charges[2..]].concat()).await;
        assert_eq!(remaining(&charged), [8, 1]);
        let renewed = decide(&store, Operation::RenewLease, &charges).await;
        assert_eq!((renewed.allowed, remaining(&renewed)), (true, vec![8, 3, 1]));
        decide(&store, Operation::Charge, &charges[2..]).await;

        // A check that the last charge denies is refunded in the others.
        let other = charges[1].clone().lease(LeaseId::random());
        let denied = [charges[0].clone(), other, charges[2].clone()];
        assert!(!decide(&store, Operation::Check, &denied).await.allowed);
        assert_eq!(remaining(&decide(&store, Operation::Peek, &denied).await), [8, 3, 0]);
        decide(&store, Operation::EndLease, &charges).await;
        assert_eq!(remaining(&decide(&store, Operation::Peek, &charges).await), [8, 4, 0]);
        let reset = decide(&store, Operation::Reset, &charges).await;
        assert_eq!(remaining(&reset), [10, 4, 3], "{is_moved}");
        moving.move_keys().await;
    }

    // A charge of before is refunded when its keys are on two nodes.
    let both = [charges[0].clone(), charges[2].clone()];
    let admitted_at = {
        let response = store.decide(&[StoreRequest::new(Operation::Charge, &both)]).await;
        let response = response.expect("a decision");
        response.outcomes()[0].states()[0]
            .decided_at
            .unwrap_or(response.server_time)
    };
    decide(&store, Operation::Refund { admitted_at }, &both[..1]).await;
    assert_eq!(remaining(&decide(&store, Operation::Peek, &both).await), [10, 2]);
    moving.end().await;
    assert_eq!(remaining(&decide(&store, Operation::Peek, &both).await), [10, 2]);
}

#[tokio::test]
async fn a_key_of_another_type_ends_no_denial_and_no_refund_of_the_others() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let (one, key) = (Limit::from(SlidingLog::per_hour(1)), Key::from("k"));
    let ban = Ban::after(9, Duration::from_secs(3_600));
    let charges = ["full", "foreign", "moved"].map(|policy| Charge::new(policy, &one, &key, 1));
    let response = store.decide(&[StoreRequest::new(Operation::Check, &charges)]).await;
    let admitted_at = response.expect("the cluster replies").server_time;

    let moving = Moving::of(&cluster, "k").await;
    let [_, foreign, moved] = charges.each_ref().map(|charge| redis_key(charge.policy(), &one, &key));
    let foreign_ban = "quota:1:ban:foreign:{key=k}";
    let node = &cluster.primaries[moving.from];
    node.command::<()>("DEL", [&foreign]).await;
    for key in [&foreign, foreign_ban] {
        node.command::<()>("HSET", [key, "field", "value"]).await;
    }
    cluster.begin_to_move(moving.slot, moving.from, moving.to).await;
    cluster.move_key(&moved, moving.from, moving.to).await;
    assert!(!decide(&store, Operation::Check, &charges).await.allowed);

    let length = Duration::from_secs(60);
    let with_bans = charges.clone().map(|charge| charge.ban(&ban));
    decide(&store, Operation::Ban { length }, &with_bans[..1]).await;
    let denied = decide(&store, Operation::Check, &with_bans).await;
    assert!(!denied.allowed && denied.states()[0].banned_for().is_some());

    let [full, foreign, moved] = charges;
    let refund = StoreRequest::new(Operation::Refund { admitted_at }, [&foreign, &full, &moved]);
    assert!(store.decide(&[refund]).await.is_err());
    assert_eq!(
        remaining(&decide(&store, Operation::Peek, &[full, moved]).await),
        [1, 1]
    );
}

#[tokio::test]
async fn units_of_several_policies_are_counted_by_the_failure_mode() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let policies =
        ["one", "two"].map(|name| Policy::new(name, SlidingLog::per_hour(3)).failure_mode(FailureMode::Local));
    let limiter = Limiter::new(store, policies);
    let moving = Moving::begin(&cluster, "k").await;
    let decision = limiter.request("k").take_up_to(5).await.expect("they are counted here");
    let error = decision.store_error().expect("no node has both keys");
    assert_eq!((error.kind(), decision.taken()), (ErrorKind::Refused, 3));
    moving.end().await;
}

/// The lines are not stored then, and each process knows its own.
#[tokio::test]
async fn requests_wait() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let window = Duration::from_millis(200);
    let policies = [
        Policy::new("waits", SlidingLog::new(1, window)).wait_up_to(PATIENCE),
        Policy::new("other", SlidingLog::per_hour(10)).ban(Ban::after(1, Duration::from_secs(3_600))),
    ];
    let policies = policies.map(|policy| policy.failure_mode(FailureMode::Closed));
    let limiter = Limiter::new(store, policies);
    let moving = Moving::begin(&cluster, "k").await;
    for position in 0..4 {
        let acquired = timeout(PATIENCE, limiter.acquire("k")).await.expect("it ends");
        assert!(acquired.expect("no check fails").is_allowed(), "request {position}");
        if position == 1 {
            moving.move_keys().await;
        }
    }
    moving.end().await;
    let acquired = limiter.acquire("k").await;
    assert!(acquired.expect("no check fails").is_allowed());
}
