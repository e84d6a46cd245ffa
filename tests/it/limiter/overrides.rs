//! Overrides of single keys: in each store, in all processes, and while Redis is away.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    runtime::Builder,
    task::{spawn_blocking, yield_now},
    time::{sleep, timeout},
};
use tower_quota::{
    Ban, ClientLibrary, Concurrency, FixedWindow, Key, Limit, Limiter, ManualClock, MemoryStore, Plans, Policies,
    Policy, RateLimitLayer, RedisStore, RedisStoreBuilder, SlidingLog, TokenBucket, key,
    store::{ErrorKind, Store},
};

use crate::support::{
    Cluster, Counted, Faketime, Log, PATIENCE, Redis, Wrapped, connected, each_client, eventually, get, less_patient,
    patient, send,
};

const HOUR: Duration = Duration::from_secs(3_600);

fn log_of(quota: u64) -> SlidingLog {
    SlidingLog::per_hour(quota)
}

fn limiter(store: impl Store) -> Limiter {
    Limiter::new(store, Policy::new("mails", log_of(5)))
}

fn builder() -> RedisStoreBuilder {
    patient().overrides(true)
}

/// The quota of a key, and what remains of it.
async fn state(limiter: &Limiter, key: &str) -> (u64, u64) {
    let peeked = limiter.peek(key).await.expect("the store replies");
    let policy = peeked.policies().next().expect("the limiter has a policy");
    (policy.limit(), policy.remaining())
}

async fn has_quota(limiter: &Limiter, key: &str, quota: u64) {
    eventually("the override is known", async || state(limiter, key).await.0 == quota).await;
}

#[tokio::test]
async fn an_override_ends_at_its_time() {
    // A long key is counted by its hash.
    for key in ["a", &*"x".repeat(400)] {
        let clock = ManualClock::new();
        let mails = limiter(MemoryStore::builder().manual_clock(&clock).build());
        let set = mails.override_limit("mails", key, log_of(9), HOUR).await;
        set.expect("it is valid");
        clock.advance(HOUR - Duration::from_micros(1));
        assert_eq!(state(&mails, key).await, (9, 9));
        assert_eq!(mails.overrides().len(), 1);
        clock.advance(Duration::from_micros(1));
        assert_eq!(state(&mails, key).await, (5, 5));
        assert_eq!(mails.overrides(), []);
    }
}

#[tokio::test]
async fn a_ban_or_an_override_that_lasts_no_microsecond_is_refused() {
    let policy = Policy::new("mails", log_of(5)).ban(Ban::by_hand());
    let mails = Limiter::new(MemoryStore::new(), policy);
    for shortest in [Duration::ZERO, Duration::from_nanos(999)] {
        let error = mails.ban("a", shortest).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "this ban lasts less than a microsecond; to end one, call `reset`"
        );
        let error = mails
            .override_limit("mails", "a", log_of(9), shortest)
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("call `end_override`"), "{error}");
    }
}

async fn an_override_lasts_31_years_at_most(mails: &Limiter) {
    let set = mails.override_limit("mails", "a", log_of(9), Duration::MAX).await;
    set.expect("it is valid");
    assert_eq!(state(mails, "a").await, (9, 9));
    let now = mails.check("a").await.expect("the store replies").server_time();
    let lasts = (mails.overrides()[0].expires_at - now).as_secs();
    assert!((999_999_000..=1_000_000_000).contains(&lasts), "{lasts} s");
}

#[tokio::test]
async fn an_override_in_memory_lasts_31_years_at_most() {
    an_override_lasts_31_years_at_most(&limiter(MemoryStore::new())).await;
}

async fn an_override_in_redis_lasts_31_years_at_most(library: ClientLibrary) {
    let redis = Redis::start();
    let store = connected(builder().client_library(library), &redis.url()).await;
    an_override_lasts_31_years_at_most(&limiter(store)).await;
}

#[tokio::test]
async fn only_overrides_that_can_be_applied_are_set() {
    let store = MemoryStore::new();
    let slots = Policy::new("slots", Concurrency::new(3));
    let both = Limiter::new(store.clone(), [Policy::new("mails", log_of(5)), slots]);
    let set = async |policy: &str, limit: Limit| match both.override_limit(policy, "a", limit, HOUR).await {
        Ok(()) => String::new(),
        Err(error) if error.kind() == ErrorKind::Invalid => error.to_string(),
        Err(error) => panic!("{error}"),
    };
    assert_eq!(
        set("mail", log_of(9).into()).await,
        "the limiter has no policy `mail`; it has `mails`, `slots`"
    );
    let other = set("mails", TokenBucket::per_second(9).into()).await;
    assert!(
        other.contains("`token-bucket 9/s` cannot override `sliding-log 5/h`"),
        "{other}"
    );
    let large = set("mails", SlidingLog::per_hour(1_000_000).into()).await;
    assert!(large.contains(".precision("), "{large}");
    assert_eq!(both.overrides(), []);

    for limit in [Limit::Unlimited, Limit::DenyAll, log_of(9).into()] {
        assert_eq!(set("mails", limit).await, "");
    }
    assert_eq!(set("slots", Concurrency::new(9).into()).await, "");
    let names = both.overrides();
    assert_eq!(
        names
            .iter()
            .map(|one| (&*one.policy, one.key.as_str()))
            .collect::<Vec<_>>(),
        [("mails", "key=a"), ("slots", "key=a")]
    );

    let none = limiter(Counted::new(store))
        .override_limit("mails", "a", log_of(9), HOUR)
        .await;
    assert!(none.unwrap_err().to_string().contains("`.overrides(true)`"));
}

#[tokio::test]
async fn an_override_has_the_algorithm_of_the_limits_that_are_chosen() {
    let text = "policies.mails = { limit = 'sliding-log 10/min', key = 'header:user', plan = 'header:plan', \
                plans.pro = 'sliding-log 100/min', plans.internal = 'unlimited' }";
    let policies = Policies::from_toml(text).expect("a file");
    let of_file = policies.layer(MemoryStore::new(), ["mails"]).expect("a policy");
    let chosen = Policy::with_limit_fn("mails", |_| log_of(3)).key(key::header("user"));
    let chosen = RateLimitLayer::new(MemoryStore::new(), chosen);
    let app = axum::Router::new().route("/", axum::routing::get(|| async {}));
    send(&app.layer(chosen.clone()), get("/").header("user", "a")).await;
    for layer in [of_file, chosen] {
        let limiter = Limiter::from(&layer);
        let set = async |limit: Limit| {
            let key = Key::header("user", "a");
            limiter.override_limit("mails", key, limit, HOUR).await
        };
        let error = set(TokenBucket::per_minute(1).into()).await;
        let error = error.expect_err("no request would have it").to_string();
        assert!(
            error.contains("`token-bucket 1/min` cannot override `sliding-log "),
            "{error}"
        );
        assert_eq!(limiter.overrides(), []);
        for limit in [log_of(9).into(), Limit::DenyAll] {
            set(limit).await.expect("it has effect");
        }
    }
}

/// Policies of one name share counts where they have one algorithm.
#[tokio::test]
async fn an_override_has_the_algorithm_of_one_of_the_plans() {
    let keyed = |limit: Limit| Policy::new("mails", limit).key(key::header("user"));
    let plans = Plans::new("free", [keyed(log_of(2).into())]).plan("pro", [keyed(TokenBucket::per_minute(100).into())]);
    let layer = RateLimitLayer::new(
        MemoryStore::new(),
        plans.by(|parts| parts.headers.get("plan")?.to_str().ok()),
    );
    let limiter = Limiter::from(&layer);
    let set = async |limit: Limit| {
        limiter
            .override_limit("mails", Key::header("user", "a"), limit, HOUR)
            .await
    };
    for limit in [log_of(9).into(), TokenBucket::per_minute(1).into()] {
        set(limit).await.expect("requests of one of the plans have it");
    }
    let other = set(FixedWindow::per_hour(9).into()).await;
    assert!(other.is_err(), "{other:?}");
}

/// It applies to the requests whose limit has its algorithm.
#[tokio::test]
async fn an_override_has_one_of_the_algorithms_that_are_chosen() {
    let text = "policies.mails = { limit = 'sliding-log 10/min', key = 'header:user', plan = 'header:plan', \
                plans = { pro = 'token-bucket 100/min', blocked = 'deny-all' } }";
    let policies = Policies::from_toml(text).expect("a file");
    let limiter = Limiter::from(&policies.layer(MemoryStore::new(), ["mails"]).expect("a policy"));
    let key = || Key::header("user", "a");
    for limit in [Limit::from(log_of(9)), TokenBucket::per_minute(1).into()] {
        let set = limiter.override_limit("mails", key(), limit, HOUR).await;
        set.expect("requests of one of the plans have it");
    }
    let other = limiter
        .override_limit("mails", key(), FixedWindow::per_hour(9), HOUR)
        .await;
    assert!(other.is_err());
}

#[tokio::test]
async fn an_override_affords_the_cost_of_one_of_the_plans() {
    let costing = |cost, quota| Policy::new("mails", SlidingLog::per_day(quota)).cost(cost);
    let plans = || Plans::new("free", costing(1, 10)).plan("batch", costing(100, 1000));
    let set = async |limiter: Limiter, quota| {
        let limit = SlidingLog::per_day(quota);
        let set = limiter.override_limit("mails", "a", limit, HOUR).await;
        set.map_err(|error| error.to_string())
    };
    let of_plans = Limiter::new(MemoryStore::new(), plans());
    set(of_plans.clone(), 20).await.expect("of a caller of the plan `free`");
    assert!(
        of_plans
            .request("a")
            .plan("free")
            .check()
            .await
            .expect("it replies")
            .is_allowed()
    );

    let of_all = Limiter::new(MemoryStore::new(), costing(100, 1000));
    let of_one_plan = Limiter::new(MemoryStore::new(), Plans::new("batch", costing(100, 1000)));
    for costly in [of_all, of_one_plan] {
        let error = set(costly, 20).await.expect_err("no request would be admitted");
        assert!(
            error.contains("costs 100, and") && error.contains("admits at most 20,"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn an_override_is_refused_units_that_its_policy_is_refused() {
    let banning = Policy::new("mails", SlidingLog::per_day(5)).ban(Ban::by_hand());
    let limiter = Limiter::new(MemoryStore::new(), [banning, Policy::new("jobs", Limit::DenyAll)]);
    let ahead: Limit = "sliding-log 100/min prefetch 10ms".parse().expect("a limit");
    let error = limiter.override_limit("mails", "a", ahead, HOUR).await;
    let error = error.expect_err("Redis decides each request of a policy with bans");
    assert!(error.to_string().contains("`prefetch`"), "{error}");

    // A lease is of the slots of one request.
    let jobs = Limiter::new(MemoryStore::new(), Policy::new("jobs", Limit::DenyAll));
    let slots = jobs.override_limit("jobs", "a", Concurrency::new(5), HOUR).await;
    slots.expect("the policy has no counts");
    let error = jobs.request("a").take_up_to(3).await.expect_err("several units");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(jobs.peek("a").await.expect("it replies").remaining(), 5);
}

/// The code names plans and policies still.
#[tokio::test]
async fn an_empty_list_of_policies_admits_what_names_a_plan_or_a_policy() {
    let off = Limiter::new(MemoryStore::new(), Vec::<Policy<()>>::new());
    for decided in [
        off.request("a").plan("pro").check().await,
        off.request("a").cost_of("bytes", 3).check().await,
    ] {
        assert!(decided.expect("limits are off").is_allowed());
    }
}

#[tokio::test]
async fn an_override_that_no_plan_applies_is_refused() {
    let mails = |limit| Policy::new("mails", limit);
    let free = || Plans::new("free", mails(Limit::Unlimited));
    let set = async |plans| {
        let limiter = Limiter::new(MemoryStore::new(), plans);
        let set = limiter.override_limit("mails", "a", log_of(9), HOUR).await;
        set.map(|()| limiter)
    };
    let error = set(free()).await.expect_err("nothing would be limited");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(
        error.to_string().contains("has no effect; give the policy a limit"),
        "{error}"
    );
    let plans = free().plan("pro", mails(log_of(5).into()));
    let limiter = set(plans).await.expect("it has effect in one plan");
    for (plan, limit) in [("pro", 9), ("free", u64::MAX)] {
        let decision = limiter.request("a").plan(plan).check().await;
        assert_eq!(decision.expect("the store replies").limit(), limit, "{plan}");
    }
}

#[tokio::test]
async fn a_reset_is_of_the_limit_that_is_overridden_too() {
    let policies = ["mails", "texts"].map(|name| Policy::new(name, SlidingLog::per_day(5)).ban(Ban::by_hand()));
    let both = Limiter::new(MemoryStore::new(), policies);
    let states = async || {
        let peeked = both.peek("a").await.expect("the store replies");
        let states = peeked.policies().map(|policy| (policy.limit(), policy.remaining()));
        states.collect::<Vec<_>>()
    };
    for limit in [log_of(20).into(), Limit::Unlimited, Limit::DenyAll] {
        let _ = both.request("a").cost(5).charge().await.expect("it is charged");
        both.ban("a", HOUR).await.expect("the policies have bans");
        let set = both.override_limit("mails", "a", limit.clone(), HOUR);
        set.await.expect("it is valid");
        let _ = both.request("a").charge().await.expect("it is charged");
        both.reset("a").await.expect("the store replies");
        if limit.window().is_some() {
            assert_eq!(states().await, [(20, 20), (5, 5)]);
        }
        both.end_override("mails", "a").await.expect("the store replies");
        assert_eq!(states().await, [(5, 5), (5, 5)], "{limit}");
        let next = both.peek("a").await.expect("the store replies");
        assert!(next.is_allowed(), "the bans have ended: {limit}");
    }
}

#[tokio::test]
async fn a_store_has_the_overrides_the_status_and_the_identity_of_the_store_that_it_wraps() {
    let store = MemoryStore::new();
    let around = Wrapped(store.clone());
    assert_eq!((around.id(), around.status()), (store.id(), store.status()));
    let set = limiter(around).override_limit("mails", "a", log_of(9), HOUR).await;
    set.expect("the store that is wrapped has overrides");
    assert_eq!(state(&limiter(store), "a").await, (9, 9));
}

#[tokio::test]
async fn an_override_to_unlimited_or_deny_all_is_applied() {
    let mails = limiter(MemoryStore::new());
    let _ = mails.request("a").cost(9).charge().await.expect("it is charged");
    mails
        .override_limit("mails", "a", Limit::Unlimited, HOUR)
        .await
        .expect("it is valid");
    assert!(mails.check("a").await.expect("the store replies").is_allowed());
    mails
        .override_limit("mails", "b", Limit::DenyAll, HOUR)
        .await
        .expect("it is valid");
    assert!(!mails.check("b").await.expect("the store replies").is_allowed());
}

/// Slots are not refunded.
#[tokio::test]
async fn an_override_of_slots_is_not_applied_where_requests_are_refunded() {
    let store = MemoryStore::new();
    let mails = || Policy::new("mails", Limit::DenyAll);
    let limiter = Limiter::new(store.clone(), mails());
    let set = limiter.override_limit("mails", Key::constant("all"), Concurrency::new(1), HOUR);
    set.await.expect("it is valid");
    for (policy, status) in [(mails(), 200), (mails().refund_if(|_| true), 429)] {
        let layer = RateLimitLayer::new(store.clone(), policy.key(key::constant("all")));
        let app = axum::Router::new()
            .route("/", axum::routing::get(async || "hi"))
            .layer(layer);
        assert_eq!(send(&app, get("/")).await.status.as_u16(), status);
    }
}

#[tokio::test]
async fn an_override_below_the_cost_of_each_request_is_refused() {
    let policy = Policy::new("mails", log_of(9)).cost(5);
    let mails = Limiter::new(MemoryStore::new(), policy);
    let error = mails.override_limit("mails", "a", log_of(4), HOUR).await.unwrap_err();
    let error = error.to_string();
    assert!(error.contains("costs 5") && error.contains("`deny-all`"), "{error}");
    for possible in [log_of(5).into(), Limit::DenyAll] {
        let set = mails.override_limit("mails", "a", possible, HOUR).await;
        set.expect("it is valid");
    }
}

#[tokio::test]
async fn a_layer_applies_an_override_to_fixed_and_to_chosen_limits() {
    let store = MemoryStore::new();
    let chosen = Policy::with_limit_fn("mails", |_| log_of(3)).key(key::header("user"));
    let fixed = Policy::new("mails", log_of(5)).key(key::header("user"));
    let key = Key::header("user", "a");
    limiter(store.clone())
        .override_limit("mails", key, log_of(9), HOUR)
        .await
        .expect("it is valid");
    let own = limiter(store.clone());
    let unlimited = own.override_limit("mails", Key::header("user", "c"), Limit::Unlimited, HOUR);
    unlimited.await.expect("it is valid");
    for (policy, quota) in [(chosen, 3), (fixed, 5)] {
        let app = axum::Router::new().route("/", axum::routing::get(|| async {}));
        let app = app.layer(RateLimitLayer::new(store.clone(), policy));
        for (user, quota) in [("a", 9), ("b", quota)] {
            let response = send(&app, get("/").header("user", user)).await;
            assert_eq!(
                response.field("ratelimit-policy"),
                Some(&*format!("\"mails\";q={quota};w=3600"))
            );
        }
        send(&app, get("/").header("user", "c")).await.assert_silent();
    }
}

each_client! {
    an_override_is_known_to_all_processes
    an_override_in_redis_lasts_31_years_at_most
    a_denial_that_is_cached_is_none_under_a_higher_limit
    overrides_apply_while_redis_is_away
    a_user_that_may_not_load_the_script_of_overrides_is_refused
    something_else_under_the_key_of_overrides_is_logged_once
    after_a_failure_they_are_read_again_soon
    a_store_that_is_ready_knows_them
    what_is_not_a_list_of_overrides_is_refused_and_not_read
    of_a_change_no_other_override_is_read
    an_override_that_a_failover_has_lost_is_forgotten
    overrides_that_redis_has_lost_are_logged_and_those_that_were_ended_are_not
    hashed_keys_have_overrides_without_a_readable_key
    a_store_has_a_bounded_number_of_overrides
    all_overrides_are_read_whatever_the_deadline_of_a_check
    a_runtime_that_is_not_driven_stops_no_overrides
}

async fn two(builder: RedisStoreBuilder, redis: &Redis) -> [Limiter; 2] {
    let stores = [
        connected(builder.clone(), &redis.url()).await,
        connected(builder, &redis.url()).await,
    ];
    stores.map(limiter)
}

async fn an_override_is_known_to_all_processes(library: ClientLibrary) {
    let redis = Redis::start();
    let [one, other] = two(builder().client_library(library), &redis).await;
    one.override_limit("mails", "a", log_of(9), HOUR)
        .await
        .expect("it is valid");
    assert_eq!(state(&one, "a").await, (9, 9));
    has_quota(&other, "a", 9).await;
    assert_eq!(state(&other, "b").await, (5, 5));
    assert_eq!(other.overrides(), one.overrides());

    // One that starts later knows it at once.
    let later = limiter(connected(builder().client_library(library), &redis.url()).await);
    assert_eq!(state(&later, "a").await, (9, 9));
    // And one that connects in the background, when it is ready.
    let lazy = builder().client_library(library).url(&redis.url()).connect_lazy();
    let lazy = lazy.expect("a URL of Redis");
    lazy.ready().await.expect("Redis answers");
    assert_eq!(state(&limiter(lazy), "a").await, (9, 9));
    // One without the setting has none.
    let without = limiter(connected(patient().client_library(library), &redis.url()).await);
    assert_eq!(state(&without, "a").await, (5, 5));

    other
        .override_limit("mails", "a", log_of(7), HOUR)
        .await
        .expect("it is valid");
    has_quota(&one, "a", 7).await;
    assert_eq!(one.overrides().len(), 1);
    one.end_override("mails", "a").await.expect("it is valid");
    assert_eq!(state(&one, "a").await, (5, 5));
    has_quota(&other, "a", 5).await;
    assert_eq!(other.overrides(), []);

    one.override_limit("mails", "a", log_of(8), Duration::from_millis(1))
        .await
        .expect("it is valid");
    has_quota(&one, "a", 5).await;
}

async fn a_denial_that_is_cached_is_none_under_a_higher_limit(library: ClientLibrary) {
    let redis = Redis::start();
    let [one, other] = two(builder().client_library(library), &redis).await;
    let _ = one.request("a").cost(5).charge().await.expect("it is charged");
    for limiter in [&one, &other] {
        assert!(!limiter.check("a").await.expect("the store replies").is_allowed());
    }
    one.override_limit("mails", "a", log_of(6), HOUR)
        .await
        .expect("it is valid");
    has_quota(&other, "a", 6).await;
    assert!(other.check("a").await.expect("the store replies").is_allowed());
    assert!(!one.check("a").await.expect("the store replies").is_allowed());
}

async fn overrides_apply_while_redis_is_away(library: ClientLibrary) {
    let mut redis = Redis::start();
    let [one, other] = two(less_patient().overrides(true).client_library(library), &redis).await;
    one.override_limit("mails", "a", log_of(9), HOUR)
        .await
        .expect("it is valid");
    has_quota(&other, "a", 9).await;

    redis.kill();
    eventually("this process counts", async || {
        let decision = other.check("a").await.expect("this process counts");
        decision.store_error().is_some()
    })
    .await;
    assert_eq!(state(&other, "a").await.0, 9);
    assert!(one.override_limit("mails", "a", log_of(7), HOUR).await.is_err());
    assert_eq!(state(&one, "a").await.0, 9);

    redis.restart();
    eventually("Redis, which has lost it, is read again", async || {
        other.overrides().is_empty()
    })
    .await;
}

async fn a_user_that_may_not_load_the_script_of_overrides_is_refused(library: ClientLibrary) {
    let redis = Redis::start();
    let user = [
        "SETUSER", "strict", "on", ">secret", "~quota:*", "+@all", "-eval", "-script",
    ];
    redis.command::<()>("ACL", user).await;
    let [of_checks @ .., of_overrides] = RedisStore::scripts() else {
        panic!("a store has scripts");
    };
    for script in of_checks {
        redis.command::<()>("SCRIPT", ["LOAD", script]).await;
    }
    let url = format!("redis://strict:secret@127.0.0.1:{}", redis.port());
    let strict = || builder().client_library(library).url(&url).connect();
    let error = strict().await.unwrap_err();
    assert!(error.to_string().contains("`RedisStore::scripts()`"), "{error}");

    redis.command::<()>("SCRIPT", ["LOAD", of_overrides]).await;
    assert!(strict().await.is_ok());
}

/// How often Redis has refused to read them.
async fn refused_reads(redis: &Redis) -> u64 {
    let info: String = redis.command("INFO", ["errorstats"]).await;
    let count = info.split_once("errorstat_WRONGTYPE:count=").map(|(_, rest)| rest);
    count.map_or(0, |rest| {
        rest.lines().next().and_then(|n| n.parse().ok()).expect("a number")
    })
}

async fn something_else_under_the_key_of_overrides_is_logged_once(library: ClientLibrary) {
    let (log, mut redis) = (Log::capture(), Redis::start());
    let [one, _] = two(builder().client_library(library), &redis).await;
    let failures = Arc::new(AtomicU64::new(0));
    let count = failures.clone();
    let one = one.on_failure(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    one.override_limit("mails", "a", log_of(9), HOUR)
        .await
        .expect("it is valid");
    redis.command::<()>("SET", ["quota:1:overrides", "x"]).await;
    eventually("a read is refused", async || refused_reads(&redis).await > 0).await;
    // While Redis is away, nothing is refused.
    redis.command::<()>("SAVE", [""; 0]).await;
    redis.kill();
    sleep(Duration::from_secs(3)).await;
    let started = Instant::now();
    redis.restart();
    eventually("it is logged", async || {
        log.text().contains("the overrides cannot be read")
    })
    .await;
    assert!(started.elapsed() >= Duration::from_secs(3), "a failover is not logged");
    let error = one.override_limit("mails", "a", log_of(8), HOUR).await.unwrap_err();
    assert!(error.to_string().contains("WRONGTYPE"), "{error}");
    assert_eq!(failures.load(Ordering::Relaxed), 1);
    assert_eq!(state(&one, "a").await.0, 9, "it was read before");

    redis.command::<()>("DEL", ["quota:1:overrides"]).await;
    eventually("it is read again", async || one.overrides().is_empty()).await;
    eventually("that is logged", async || {
        log.text().contains("the overrides are read again")
    })
    .await;
    for line in ["the overrides cannot be read", "the overrides are read again"] {
        assert!(log.text().matches(line).count() <= 2, "once for each store");
    }
}

/// On a busy machine a read may be late, but not each.
async fn after_a_failure_they_are_read_again_soon(library: ClientLibrary) {
    let redis = Redis::start();
    let store = connected(builder().client_library(library), &redis.url()).await;
    for outage in 0..2 {
        for round in 0.. {
            redis.command::<()>("CONFIG", ["RESETSTAT"]).await;
            redis.command::<()>("SET", ["quota:1:overrides", "x"]).await;
            eventually("a read fails", async || refused_reads(&redis).await > 0).await;
            let failed = Instant::now();
            eventually("another one does", async || refused_reads(&redis).await > 1).await;
            let is_soon = failed.elapsed() < Duration::from_millis(500);
            assert!(is_soon || round < 20, "the next read was after {:?}", failed.elapsed());
            if is_soon && outage == 0 {
                // The pauses have become long.
                eventually("more reads fail", async || refused_reads(&redis).await > 7).await;
            }
            redis.command::<()>("DEL", ["quota:1:overrides"]).await;
            store.ready().await.expect("it is read again");
            // By the task that follows them too.
            let reads = redis.script_calls().await;
            eventually("it is read twice", async || redis.script_calls().await > reads + 1).await;
            if is_soon {
                break;
            }
        }
    }
}

async fn a_store_that_is_ready_knows_them(library: ClientLibrary) {
    let redis = Redis::start();
    let one = limiter(connected(builder().client_library(library), &redis.url()).await);
    let set = one.override_limit("mails", "a", Limit::DenyAll, HOUR).await;
    set.expect("it is valid");
    for _ in 0..10 {
        let lazy = builder().client_library(library).url(&redis.url()).connect_lazy();
        let lazy = lazy.expect("the URL is good");
        lazy.ready().await.expect("Redis answers");
        assert!(!limiter(lazy).check("a").await.expect("Redis answers").is_allowed());
    }
}

/// A sorted set of a neighbor, and values with which no change can be stored.
async fn what_is_not_a_list_of_overrides_is_refused_and_not_read(library: ClientLibrary) {
    let redis = Redis::start();
    let store = connected(builder().client_library(library), &redis.url()).await;
    let one = limiter(store.clone());
    let huge =
        "for n = 1, 500000 do redis.call('ZADD', KEYS[1], n, 'member-' .. n) end redis.call('ZADD', KEYS[1], -1, '#')";
    let small = "redis.call('ZADD', KEYS[1], 1, 'mails\\nkey=a\\ndeny-all\\n\\n9999999999999999')";
    let first = "redis.call('ZADD', KEYS[1], '-inf', '#')";
    let last = "redis.call('ZADD', KEYS[1], -1, '#', '+inf', 'mails\\nkey=a\\ndeny-all\\n\\n9999999999999999')";
    for (made_by, members) in [(huge, 500_001), (small, 1), (first, 1), (last, 2)] {
        redis.command::<()>("DEL", ["quota:1:overrides"]).await;
        redis.command::<()>("EVAL", [made_by, "1", "quota:1:overrides"]).await;
        let refusals = [
            one.override_limit("mails", "a", log_of(9), HOUR).await,
            one.end_override("mails", "a").await,
            store.ready().await,
        ];
        for refusal in refusals {
            let error = refusal.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused);
            let expected = format!("quota:1:overrides has {members} members, not overrides of this store; delete it");
            assert!(error.to_string().contains(&expected), "{error}");
        }
        assert_eq!(one.overrides(), []);
    }
}

/// The script of overrides: 1 if it returns all, and the changes that it returns, without their expiry.
async fn read(redis: &Redis, known: &str, change: &[&str]) -> (String, bool, Vec<String>) {
    let script = RedisStore::scripts().last().expect("a store has scripts");
    let words = [script, "1", "quota:1:overrides", known, "4"];
    let reply: fred::bytes::Bytes = redis
        .command("EVAL", words.into_iter().chain(change.iter().copied()))
        .await;
    let number = |n: usize| f64::from_le_bytes(reply[8 * n..8 * n + 8].try_into().expect("8 bytes"));
    let changes = String::from_utf8(reply[24..].to_vec()).expect("text");
    let changes = changes
        .split('\0')
        .filter_map(|change| Some(change.rsplit_once('\n')?.0.replace('\n', " ")));
    (format!("{:.0}", number(1)), number(2) > 0.0, changes.collect())
}

#[tokio::test]
async fn a_process_reads_the_changes_since_its_version_or_all_if_some_are_forgotten() {
    let redis = Redis::start();
    const LONG: &str = "3600000000";
    let (v1, _, _) = read(&redis, "0", &[LONG, "p\na\n1/h\n"]).await;
    // Another life of the key has later ones.
    assert_eq!(v1.len(), 16, "{v1} is a time in microseconds");
    let (v2, _, _) = read(&redis, &v1, &[LONG, "p\nb\n2/h\n"]).await;
    let (v3, all, changes) = read(&redis, &v2, &["0", "p\na\nunlimited\n"]).await;
    assert_eq!((all, &*changes), (false, &["p a unlimited".to_owned()][..]));
    assert_eq!(read(&redis, &v3, &[]).await, (v3.clone(), false, vec![]));
    assert_eq!(read(&redis, &v1, &[]).await.2, ["p b 2/h", "p a unlimited"]);
    assert!(read(&redis, "0", &[]).await.1);

    // With the fifth change the ones of `a` and the first of `b` are forgotten.
    let (v4, _, _) = read(&redis, &v3, &[LONG, "p\nb\n3/h\n"]).await;
    let (v5, _, _) = read(&redis, &v4, &[LONG, "p\nc\n4/h\n"]).await;
    let (v6, _, changes) = read(&redis, &v5, &[LONG, "p\nd\n5/h\n"]).await;
    assert_eq!(changes, ["p d 5/h"]);
    let kept = ["p b 3/h", "p c 4/h", "p d 5/h"].map(str::to_owned);
    for (known, reads_all) in [("0", true), (&v2, true), (&v3, false)] {
        assert_eq!(read(&redis, known, &[]).await, (v6.clone(), reads_all, kept.to_vec()));
    }

    read(&redis, &v6, &[LONG, "p\ne\n6/h\n"]).await;
    let script = RedisStore::scripts().last().expect("a store has scripts");
    let full = redis.cli(&["EVAL", script, "1", "quota:1:overrides", &v6, "4", LONG, "p\nf\n7/h\n"]);
    assert!(full.contains("ERR the store has too many overrides"), "{full}");

    // The versions of another life of the key.
    redis.command::<()>("DEL", ["quota:1:overrides"]).await;
    assert_eq!(read(&redis, &v6, &[]).await, ("0".to_owned(), true, vec![]));
    let (_, all, changes) = read(&redis, &v6, &[LONG, "p\na\n1/h\n"]).await;
    assert_eq!((all, &*changes), (true, &["p a 1/h".to_owned()][..]));
}

#[tokio::test]
async fn versions_are_kept_for_an_hour_after_the_last_override() {
    let redis = Redis::start();
    for change in [["86400000000", "p\na\n1/h\n"], ["0", "p\na\nunlimited\n"]] {
        read(&redis, "0", &change).await;
        let left: i64 = redis.command("PTTL", ["quota:1:overrides"]).await;
        assert!((89_940_000..=90_002_000).contains(&left), "{left} ms");
    }
}

/// By another process, with a clock that is an hour ahead.
#[tokio::test]
async fn after_the_clock_is_set_back_an_override_that_was_ended_is_over_and_later_ones_are_read() {
    let redis = Redis::start();
    let [one, other] = two(builder(), &redis).await;
    let set = async |key: &str| one.override_limit("mails", key, log_of(9), 9 * HOUR).await;
    set("a").await.expect("it is valid");
    has_quota(&other, "a", 9).await;

    let script = RedisStore::scripts().last().expect("a store has scripts");
    let ahead = script.replacen("call('TIME')", "{ call('TIME')[1] + 3600, 0 }", 1);
    assert_ne!(ahead, *script, "the script reads the time");
    let end = [
        &*ahead,
        "1",
        "quota:1:overrides",
        "0",
        "4",
        "0",
        "mails\nkey=a\nunlimited\n\n",
    ];
    redis.command::<()>("EVAL", end).await;
    eventually("it is over", async || {
        one.overrides().is_empty() && other.overrides().is_empty()
    })
    .await;
    set("b").await.expect("it is valid");
    has_quota(&other, "b", 9).await;
}

#[tokio::test]
async fn an_override_that_a_clock_ahead_has_ended_applies_again_when_it_is_set_back() {
    let clock = Faketime::new();
    let redis = clock.start_redis();
    let [one, other] = two(builder(), &redis).await;
    let set = async |key: &str, quota| one.override_limit("mails", key, log_of(quota), HOUR).await;
    set("a", 9).await.expect("it is valid");
    has_quota(&other, "a", 9).await;
    clock.set(90 * 60_000);
    eventually("it is over", async || other.overrides().is_empty()).await;
    // Another one is read meanwhile.
    set("b", 8).await.expect("it is valid");
    has_quota(&other, "b", 8).await;
    clock.set(0);
    has_quota(&other, "a", 9).await;
}

/// The bytes that Redis has sent.
async fn sent(redis: &Redis) -> u64 {
    let info: String = redis.command("INFO", ["stats"]).await;
    let bytes = info.split_once("total_net_output_bytes:").expect("a line").1;
    bytes
        .lines()
        .next()
        .and_then(|bytes| bytes.parse().ok())
        .expect("a number")
}

async fn of_a_change_no_other_override_is_read(library: ClientLibrary) {
    let redis = Redis::start();
    redis.add_overrides(9_000).await;
    let [one, other] = two(builder().client_library(library), &redis).await;
    assert_eq!(one.overrides().len(), 9_000);
    let before = sent(&redis).await;
    one.override_limit("mails", "1", log_of(8), HOUR)
        .await
        .expect("it is valid");
    has_quota(&other, "1", 8).await;
    let bytes = sent(&redis).await - before;
    assert!(bytes < 100_000, "{bytes} bytes, and all are 400,000");
}

async fn an_override_that_a_failover_has_lost_is_forgotten(library: ClientLibrary) {
    let redis = Redis::start();
    let [one, other] = two(builder().client_library(library), &redis).await;
    for (key, quota) in [("a", 9), ("b", 8)] {
        let set = one.override_limit("mails", key, log_of(quota), HOUR).await;
        set.expect("it is valid");
        has_quota(&other, key, quota).await;
    }
    // The new primary has not received the last one, and has another one before it is read.
    let lose_and_set = "
        redis.call('ZREMRANGEBYRANK', KEYS[1], -1, -1)
        local version = redis.call('TIME')[1] * 1000000
        redis.call('ZADD', KEYS[1], version + 1000000, 'mails\\nkey=c\\nsliding-log 7/h\\n\\n9999999999999999')";
    redis
        .command::<()>("EVAL", [lose_and_set, "1", "quota:1:overrides"])
        .await;
    for limiter in [&one, &other] {
        has_quota(limiter, "c", 7).await;
        assert_eq!((state(limiter, "a").await.0, state(limiter, "b").await.0), (9, 5));
    }
    assert_eq!(one.overrides(), other.overrides());
}

async fn overrides_that_redis_has_lost_are_logged_and_those_that_were_ended_are_not(library: ClientLibrary) {
    let (log, redis) = (Log::capture(), Redis::start());
    let [one, other] = two(builder().client_library(library), &redis).await;
    for (key, quota) in [("a", 9), ("b", 8)] {
        let set = one.override_limit("mails", key, log_of(quota), HOUR).await;
        set.expect("it is valid");
    }
    one.end_override("mails", "b").await.expect("the store replies");
    eventually("all is known", async || {
        !one.overrides().is_empty() && other.overrides() == one.overrides()
    })
    .await;
    assert!(!log.text().contains("overrides are lost"), "{}", log.text());
    redis.command::<()>("FLUSHALL", [""; 0]).await;
    eventually("the loss is logged", async || log.text().contains("overrides are lost")).await;
    assert!(log.text().contains("lost=1"), "{}", log.text());
    eventually("it is lost everywhere", async || other.overrides().is_empty()).await;
}

async fn hashed_keys_have_overrides_without_a_readable_key(library: ClientLibrary) {
    let redis = Redis::start();
    let builder = builder()
        .client_library(library)
        .hash_keys("sixteen random bytes")
        .expect("a long secret");
    let [one, other] = two(builder, &redis).await;
    one.override_limit("mails", "ann@example.com", log_of(9), HOUR)
        .await
        .expect("it is valid");
    has_quota(&other, "ann@example.com", 9).await;
    let members: Vec<String> = redis.command("ZRANGE", ["quota:1:overrides", "0", "-1"]).await;
    assert!(members.iter().all(|member| !member.contains("ann")), "{members:?}");
    let listed = one.overrides().remove(0);
    assert!(listed.key.as_str().starts_with("keyed="));

    // A key that is listed names the caller.
    let extended = one
        .override_limit(&listed.policy, listed.key.clone(), log_of(12), HOUR)
        .await;
    extended.expect("it is valid");
    has_quota(&other, "ann@example.com", 12).await;
    one.reset(listed.key.clone()).await.expect("it is valid");
    one.end_override(&listed.policy, listed.key).await.expect("it is valid");
    has_quota(&other, "ann@example.com", 5).await;
    assert!(one.overrides().is_empty());
}

/// Redis takes longer for all of them than for a check.
async fn all_overrides_are_read_whatever_the_deadline_of_a_check(library: ClientLibrary) {
    let redis = Redis::start();
    redis.add_overrides(10_000).await;
    let builder = builder().client_library(library).deadline(Duration::from_millis(1));
    let limiter = limiter(connected(builder, &redis.url()).await);
    assert_eq!(limiter.overrides().len(), 10_000);
}

async fn a_runtime_that_is_not_driven_stops_no_overrides(library: ClientLibrary) {
    let redis = Redis::start();
    let [one, other] = two(builder().client_library(library), &redis).await;
    let caller = one.clone();
    let begun = spawn_blocking(move || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.spawn(async move { caller.override_limit("mails", "a", log_of(9), HOUR).await });
        runtime.block_on(yield_now());
        runtime
    });
    let runtime = begun.await.expect("no panic");
    other
        .override_limit("mails", "b", log_of(8), HOUR)
        .await
        .expect("it is valid");
    has_quota(&one, "b", 8).await;
    let set = timeout(PATIENCE, one.override_limit("mails", "c", log_of(7), HOUR)).await;
    set.expect("Redis replies").expect("it is valid");
    // Also the one whose caller does not go on.
    has_quota(&other, "a", 9).await;
    runtime.shutdown_background();
}

async fn a_store_has_a_bounded_number_of_overrides(library: ClientLibrary) {
    let redis = Redis::start();
    redis.add_overrides(10_000).await;
    let [one, _] = two(builder().client_library(library), &redis).await;
    let error = one.override_limit("mails", "b", log_of(9), HOUR).await.unwrap_err();
    assert!(error.to_string().contains("at most 10000 overrides"), "{error}");
    one.override_limit("mails", "1", log_of(8), HOUR)
        .await
        .expect("it replaces one");
    assert_eq!(one.overrides().len(), 10_000);
    assert_eq!(state(&one, "9999").await.0, 9);
    one.end_override("mails", "1").await.expect("it is valid");
    one.override_limit("mails", "b", log_of(9), HOUR)
        .await
        .expect("there is room");
}

#[tokio::test]
async fn what_a_later_version_has_written_is_left_out() {
    let redis = Redis::start();
    let [one, _] = two(builder(), &redis).await;
    let words = [
        "quota:1:overrides",
        "-1",
        "#",
        "1",
        "mails\nkey=a\nfuture 9\n\n9999999999999999",
        "2",
        "mails\nkey=b\nsliding-log 9/h\n\n9999999999999999",
    ];
    redis.command::<()>("ZADD", words).await;
    has_quota(&one, "b", 9).await;
    assert_eq!(state(&one, "a").await, (5, 5));
    assert_eq!(one.overrides()[0].key, Key::from("b"));
    assert_eq!(one.overrides()[0].set_by, None, "the application has set it");
}

#[tokio::test]
async fn a_cluster_has_overrides() {
    let cluster = Cluster::start_patient().await;
    let stores: [RedisStore; 2] = [
        connected(builder(), &cluster.url()).await,
        connected(builder(), &cluster.url()).await,
    ];
    cluster.serves(&stores[0]).await;
    let [one, other] = stores.map(limiter);
    one.override_limit("mails", "a", log_of(9), HOUR)
        .await
        .expect("it is valid");
    has_quota(&other, "a", 9).await;
}
