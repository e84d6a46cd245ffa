//! A policy with another name goes on to be counted under its former one.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use tower_quota::{
    Ban, Concurrency, Denial, Limiter, MemoryStore, Plans, Policies, Policy, RateLimitLayer, SlidingLog, store::Store,
};

use crate::support::{Redis, connected, each_store, patient};

each_store! { with crate::support::Unclocked:
    replicas_with_the_old_and_the_new_name_count_together
    bans_hold_under_both_names
    slots_are_held_under_both_names
    a_share_has_the_same_keys_under_both_names
}

const LIMIT: SlidingLog = SlidingLog::per_hour(5);

fn limiter(store: &Arc<impl Store>, policy: Policy<()>) -> Limiter {
    Limiter::new(store.clone(), policy)
}

async fn replicas_with_the_old_and_the_new_name_count_together(store: Arc<impl Store>) {
    let old = limiter(&store, Policy::new("login", LIMIT));
    let new = limiter(&store, Policy::new("sign-in", LIMIT).formerly("login"));
    let other = limiter(&store, Policy::new("sign-in", LIMIT));
    for left in [4, 2, 0] {
        assert_eq!(old.check("k").await.expect("it answers").remaining(), left);
        if left > 0 {
            assert_eq!(new.check("k").await.expect("it answers").remaining(), left - 1);
        }
    }
    let denied = new.check("k").await.expect("it answers");
    assert!(!denied.is_allowed());
    assert_eq!(denied.policies().next().map(|policy| policy.name()), Some("sign-in"));
    assert_eq!(
        other.peek("k").await.expect("it answers").remaining(),
        5,
        "counted apart"
    );

    new.reset("k").await.expect("it answers");
    assert_eq!(old.peek("k").await.expect("it answers").remaining(), 5);
}

async fn a_share_has_the_same_keys_under_both_names(store: Arc<impl Store>) {
    let share = |policy: Policy<()>| limiter(&store, policy.enforce_share(0.5));
    let old = share(Policy::new("login", LIMIT));
    let new = share(Policy::new("sign-in", LIMIT).formerly("login"));
    for key in 0..50 {
        let mut observed = Vec::new();
        for limiter in [&old, &new] {
            let decision = limiter.peek(key).await.expect("it answers");
            observed.extend(decision.policies().map(|policy| policy.is_observed()));
        }
        assert_eq!(observed[0], observed[1], "{key}");
    }
}

async fn bans_hold_under_both_names(store: Arc<impl Store>) {
    let ban = || Ban::by_hand().longest(Duration::from_secs(3_600));
    let old = limiter(&store, Policy::new("login", LIMIT).ban(ban()));
    let new = limiter(&store, Policy::new("sign-in", LIMIT).formerly("login").ban(ban()));
    new.ban("banned", Duration::from_secs(60)).await.expect("it answers");
    let banned = old.peek("banned").await.expect("it answers");
    assert_eq!(
        banned.policies().next().and_then(|policy| policy.denial()),
        Some(Denial::Banned)
    );
}

async fn overrides_hold_under_both_names(store: Arc<impl Store>) {
    let old = limiter(&store, Policy::new("login", LIMIT));
    let new = limiter(&store, Policy::new("sign-in", LIMIT).formerly("login"));
    let raised = SlidingLog::per_hour(50);
    let hour = Duration::from_secs(3_600);
    new.override_limit("sign-in", "raised", raised, hour)
        .await
        .expect("it has overrides");
    for limiter in [&old, &new] {
        assert_eq!(limiter.peek("raised").await.expect("it answers").remaining(), 50);
    }
    let names = |limiter: &Limiter| {
        limiter
            .overrides()
            .iter()
            .map(|one| one.policy.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (names(&old), names(&new)),
        (vec!["login".to_owned()], vec!["sign-in".to_owned()])
    );
    assert!(
        new.end_override("login", "raised").await.is_err(),
        "it has no policy of this name"
    );
    new.end_override("sign-in", "raised").await.expect("it has overrides");
    assert_eq!(old.peek("raised").await.expect("it answers").remaining(), 5);
}

#[tokio::test]
async fn overrides_in_memory_hold_under_both_names() {
    overrides_hold_under_both_names(Arc::new(MemoryStore::new())).await;
}

#[tokio::test]
async fn overrides_in_redis_hold_under_both_names() {
    let redis = Redis::start();
    let store = connected(patient().overrides(true), &redis.url()).await;
    overrides_hold_under_both_names(Arc::new(store)).await;
}

async fn slots_are_held_under_both_names(store: Arc<impl Store>) {
    let slots = || Concurrency::new(2);
    let old = limiter(&store, Policy::new("jobs", slots()));
    let new = limiter(&store, Policy::new("tasks", slots()).formerly("jobs"));
    let held = [
        old.check("k").await.expect("it answers"),
        new.check("k").await.expect("it answers"),
    ];
    assert!(held.iter().all(|decision| decision.is_allowed()));
    assert!(!new.check("k").await.expect("it answers").is_allowed());
}

#[tokio::test]
async fn a_file_has_former_names() {
    let policies = |fields: &str| {
        Policies::from_toml(&format!(
            "[policies]\nsign-in = {{ limit = \"sliding-log 5/h\", key = \"ip\"{fields} }}"
        ))
    };
    let store = MemoryStore::new();
    let old = Limiter::new(store.clone(), Policy::new("login", LIMIT));
    let renamed = policies(", formerly = \"login\"").expect("a file");
    let new = Limiter::new(store.clone(), renamed.unkeyed("sign-in").expect("a policy"));
    assert_eq!(old.check("k").await.expect("it answers").remaining(), 4);
    assert_eq!(new.check("k").await.expect("it answers").remaining(), 3);

    let error = policies(", formerly = \"Log in\"").expect_err("no name").to_string();
    assert!(error.contains("such as `say-hi`"), "{error}");
    let of_a_file = policies("").expect("a file").unkeyed("sign-in").expect("a policy");
    assert!(
        std::panic::catch_unwind(AssertUnwindSafe(|| of_a_file.formerly("login"))).is_err(),
        "the file has it"
    );

    // Both would count under one name.
    let one = || {
        Policy::new("sign-in", LIMIT)
            .formerly("login")
            .key(tower_quota::key::ip())
    };
    let other = Policy::new("login", LIMIT).key(tower_quota::key::ip());
    let error = RateLimitLayer::try_new(store, [one(), other]).expect_err("two of one name");
    assert!(
        error.to_string().starts_with("two policies are named `login`"),
        "{error}"
    );
}

/// A file may have both while replicas with the old name run.
#[test]
fn two_limits_of_a_file_that_would_be_counted_under_one_name_are_refused() {
    let file =
        "[policies]\nsign-in = { limit = 'sliding-log 5/h', formerly = 'login' }\nlogin.limit = 'sliding-log 9/h'";
    let policies = Policies::from_toml(file).expect("a file");
    let limiter = |store: &MemoryStore, name| {
        let policy = policies.unkeyed(name).expect("a policy");
        Limiter::try_new(store.clone(), policy)
    };
    let store = MemoryStore::new();
    let _login = limiter(&store, "login").expect("the first of its name");
    let error = limiter(&store, "sign-in").expect_err("they count together").to_string();
    for part in ["`sign-in`", "`sliding-log 5/h`", "`sliding-log 9/h`"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(limiter(&MemoryStore::new(), "sign-in").is_ok());
}

#[tokio::test]
async fn all_plans_have_the_former_name_of_a_policy() {
    let sign_in = |quota| Policy::new("sign-in", SlidingLog::per_hour(quota));
    let limiter = |free: Policy<()>, pro: Policy<()>| {
        Limiter::try_new(MemoryStore::new(), Plans::new("free", free).plan("pro", pro)).map(drop)
    };
    for (free, pro) in [
        (sign_in(5).formerly("login"), sign_in(50)),
        (sign_in(5), sign_in(50).formerly("login")),
        (sign_in(5).formerly("log-in"), sign_in(50).formerly("login")),
    ] {
        let error = limiter(free, pro).expect_err("they count apart").to_string();
        assert!(
            error.contains("`sign-in`") && error.contains("`.formerly(..)`"),
            "{error}"
        );
    }
    assert!(limiter(sign_in(5).formerly("login"), sign_in(50).formerly("login")).is_ok());

    let store = MemoryStore::new();
    let old = Limiter::new(store.clone(), Policy::new("login", LIMIT));
    let policies = Policies::from_toml(
        "policies.sign-in = { limit = 'sliding-log 5/h', formerly = 'login' }
         plans.pro.sign-in.limit = 'sliding-log 50/h'",
    );
    let plans = policies.expect("a file").unkeyed_plans(["sign-in"]);
    let new = Limiter::new(store, plans.expect("plans"));
    let pro = new.request("k").plan("pro").check().await.expect("it answers");
    assert_eq!(pro.remaining(), 49);
    assert_eq!(new.check("k").await.expect("it answers").remaining(), 3);
    assert_eq!(old.check("k").await.expect("it answers").remaining(), 2);
}
