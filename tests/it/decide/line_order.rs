//! How long requests to a layer wait, and in which order those of a process.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::{HeaderValue, Request, Response, StatusCode};
use tokio::{
    task::JoinSet,
    time::{Instant, advance, sleep, sleep_until},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    AcquireError, Concurrency, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog, TokenBucket, key,
    store::{ErrorKind, Store, StoreError, StoreFuture, StoreRequest},
};

use super::line::{begin, in_line, stand_in_line, unless_places_expire};
use crate::support::{Broken, Gated, Redis, connected, eventually, patient};

type Body = http_body_util::Empty<bytes::Bytes>;

const SECOND: Duration = Duration::from_secs(1);

fn ten_a_second() -> Policy {
    Policy::new("api", SlidingLog::new(1, SECOND / 10))
        .key(key::constant("all"))
        .wait_up_to(60 * SECOND)
}

/// After how many tenths of a second these requests are admitted, which arrive one after the other, and their statuses; `name: value`
/// is a field of a request.
async fn admitted_after(policy: Policy, requests: impl IntoIterator<Item = &'static str>) -> Vec<(u128, StatusCode)> {
    let layer = RateLimitLayer::new(MemoryStore::new(), policy);
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for (nth, field) in requests.into_iter().enumerate() {
        let mut request = Request::new(Body::new());
        if let Some((name, value)) = field.split_once(": ") {
            request.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        let service = layer.layer(service_fn(async |_: Request<Body>| {
            Ok::<_, Infallible>(Response::new(Body::new()))
        }));
        tasks.spawn(async move {
            let response = service.oneshot(request).await.expect("it never fails");
            (nth, start.elapsed().as_millis() / 100, response.status())
        });
        tokio::task::yield_now().await;
    }
    let mut all = tasks.join_all().await;
    all.sort();
    all.into_iter().map(|(_, after, status)| (after, status)).collect()
}

fn times(admitted: &[(u128, StatusCode)]) -> Vec<u128> {
    assert!(admitted.iter().all(|(_, status)| status.is_success()), "{admitted:?}");
    admitted.iter().map(|(after, _)| *after).collect()
}

#[tokio::test(start_paused = true)]
async fn a_tenant_waits_for_one_request_of_another_tenant() {
    let policy = || ten_a_second().fair_by(key::header("tenant"));
    let requests = ["tenant: a"; 41].into_iter().chain(["tenant: b"; 2]);
    let admitted = times(&admitted_after(policy(), requests).await);
    assert_eq!(admitted[41..], [2, 4], "{admitted:?}");

    // Those without the field take turns as one.
    let requests = ["tenant: a"; 5].into_iter().chain([""; 4]);
    let admitted = times(&admitted_after(policy(), requests).await);
    assert_eq!(admitted, [0, 1, 3, 5, 7, 2, 4, 6, 8]);
    let requests = [""; 5].into_iter().chain(["tenant: b"; 2]);
    let admitted = times(&admitted_after(policy(), requests).await);
    assert_eq!(admitted, [0, 1, 3, 5, 6, 2, 4]);

    let admitted = times(&admitted_after(ten_a_second(), ["tenant: a", "tenant: a", "tenant: b"]).await);
    assert_eq!(admitted, [0, 1, 2], "without the setting it is the order of arrival");
}

#[tokio::test(start_paused = true)]
async fn requests_of_higher_priority_wait_before_others() {
    let policy = ten_a_second().priority_fn(|parts| match parts.headers.get("plan") {
        Some(plan) if plan == "paid" => 1,
        Some(_) => -1,
        None => 0,
    });
    let requests = ["", "plan: trial", "", "plan: paid", "plan: paid"];
    assert_eq!(times(&admitted_after(policy, requests).await), [0, 4, 3, 1, 2]);
}

/// The place of its process in the second line has it as arrived with one of a higher priority, which came later.
#[tokio::test]
async fn one_that_is_admitted_by_one_line_leaves_its_place_in_another() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let policy = |name, quota| Policy::new(name, SlidingLog::new(quota, 3_600 * SECOND)).wait_up_to(3_600 * SECOND);
    let limiter = Limiter::new(store, [policy("a", 1), policy("b", 2)]);
    let expired = async || {
        let stats: String = redis.command("INFO", ["stats"]).await;
        let line = stats.lines().find_map(|line| line.strip_prefix("expired_keys:"));
        line.and_then(|keys| keys.parse::<u64>().ok()).expect("a number")
    };
    unless_places_expire(&redis, async |round| {
        let request = |key: &str| limiter.request(format!("{key}{round}")).key_of("b", round);
        let acquire = async |key, priority| {
            let admitted = request(key).priority(priority).acquire().await.expect("it is admitted");
            admitted.take_receipt().refund().await.expect("it replies");
        };
        let check = async |key| request(key).check().await.expect("it replies");
        let before = expired().await;
        let (x, z) = (check("x").await, check("z").await);
        assert!(x.is_allowed() && z.is_allowed());
        let places = async || {
            let keys: Vec<String> = redis.command("KEYS", ["quota:1:line:*:b:*"]).await;
            keys.first().cloned()
        };

        let second = async {
            stand_in_line(&redis, 2).await; // in the lines of both keys
            acquire("y", 1).await;
        };
        let refunds = async {
            // Both are in the place, which has them as arrived at the same time after a second.
            eventually("the place is refreshed", async || {
                let Some(line) = places().await else { return false };
                let place: bytes::Bytes = redis.command("GET", [line]).await;
                place.len() == 64 && place[32..40] == place[48..56]
            })
            .await;
            let refunds = tokio::join!(z.take_receipt().refund(), x.take_receipt().refund());
            refunds.0.and(refunds.1).expect("it replies");
        };
        tokio::join!(acquire("x", 0), second, refunds);
        // It looks for the key, so that Redis counts it if it has expired.
        let line = places().await;
        eventually("no place is left", async || match &line {
            Some(line) => redis.command::<u64>("EXISTS", [line]).await == 0,
            None => true,
        })
        .await;
        match expired().await - before {
            0 => Ok(()),
            places => Err(format!("{places} places were left until they expired")),
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn each_request_waits_as_long_as_it_may() {
    let policy = ten_a_second().wait_up_to_fn(|parts| match parts.headers.contains_key("job") {
        true => SECOND,
        false => Duration::ZERO,
    });
    let admitted = admitted_after(policy, ["", "", "job: 1"]).await;
    assert_eq!(admitted[1], (0, StatusCode::TOO_MANY_REQUESTS));
    assert_eq!([admitted[0], admitted[2]], [(0, StatusCode::OK), (1, StatusCode::OK)]);
}

#[tokio::test(start_paused = true)]
async fn a_call_waits_no_longer_than_its_deadline() {
    let policy = || {
        Policy::new("api", SlidingLog::per_second(1))
            .key(key::constant("all"))
            .wait_up_to(60 * SECOND)
    };
    for (deadline, expected) in [
        ("grpc-timeout: 100m", (0, StatusCode::TOO_MANY_REQUESTS)),
        ("grpc-timeout: 2S", (10, StatusCode::OK)),
        ("grpc-timeout: soon", (10, StatusCode::OK)),
    ] {
        let admitted = admitted_after(policy(), ["", deadline, ""]).await;
        assert_eq!(admitted[1], expected, "{deadline}");
        // One that is denied takes nothing.
        let next = 10 * (1 + u128::from(expected.1.is_success()));
        assert_eq!(admitted[2], (next, StatusCode::OK), "{deadline}");
    }
}

/// Each process orders its own requests, and would wait for the first that has arrived in the other one.
#[tokio::test]
async fn processes_with_priorities_do_not_wait_for_each_other() {
    let redis = Redis::start();
    let policy = || Policy::new("api", Concurrency::new(1)).wait_up_to(60 * SECOND);
    let one = Limiter::new(connected(patient(), &redis.url()).await, policy());
    let other = Limiter::new(connected(patient(), &redis.url()).await, policy());
    unless_places_expire(&redis, async |round| {
        let held = one.check(round).await.expect("a server");
        let mut tasks = JoinSet::new();
        let callers = [("low", &one, 0), ("other", &other, 0), ("high", &one, 1)];
        for (standing, (name, limiter, priority)) in (1..).zip(callers) {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                let admitted = limiter.request(round).priority(priority).acquire().await;
                (admitted.expect("it is admitted").server_time(), name)
            });
            stand_in_line(&redis, standing).await;
        }
        drop(held);
        let mut admitted = tasks.join_all().await;
        admitted.sort();
        let order: Vec<_> = admitted.into_iter().map(|(_, name)| name).collect();
        match order == ["other", "high", "low"] {
            true => Ok(()),
            false => Err(format!("{order:?}")),
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn requests_of_a_tenant_that_have_left_take_no_turns() {
    let layer = RateLimitLayer::new(MemoryStore::new(), ten_a_second().fair_by(key::header("tenant")));
    let start = Instant::now();
    let call = |tenant: &'static str| {
        let service = layer.layer(service_fn(async |_: Request<Body>| {
            Ok::<_, Infallible>(Response::new(Body::new()))
        }));
        async move {
            let request = Request::builder().header("tenant", tenant).body(Body::new());
            let response = service.oneshot(request.expect("a request")).await;
            assert!(response.expect("it never fails").status().is_success());
            (start.elapsed().as_millis() / 100, tenant)
        }
    };
    call("a").await;
    let mut others = JoinSet::new();
    others.spawn(call("b"));
    tokio::task::yield_now().await;
    let leaving: Vec<_> = (0..40).map(|_| tokio::spawn(call("a"))).collect();
    tokio::task::yield_now().await;
    others.spawn(call("a"));
    tokio::task::yield_now().await;
    for call in leaving {
        call.abort();
        assert!(call.await.is_err(), "it waits");
    }
    for tenant in ["b", "a", "b", "b"] {
        others.spawn(call(tenant));
        tokio::task::yield_now().await;
    }
    let mut admitted = others.join_all().await;
    admitted.sort();
    let order: Vec<_> = admitted.into_iter().map(|(_, tenant)| tenant).collect();
    assert_eq!(order, ["b", "a", "b", "a", "b", "b"]);
}

/// Requests without a tenant and those of one leave in turn, until one is left that has been given the turn of another.
#[tokio::test(start_paused = true)]
async fn requests_that_were_given_turns_leave_nothing_behind() {
    let policy = Policy::new("api", SlidingLog::new(1, 10 * SECOND)).wait_up_to(60 * SECOND);
    let limiter = Limiter::new(MemoryStore::new(), policy);
    let acquire = |tenant: Option<&'static str>| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let request = limiter.request("k").wait_up_to(60 * SECOND);
            match tenant {
                Some(tenant) => request.fair_by(tenant).acquire().await.is_ok(),
                None => request.acquire().await.is_ok(),
            }
        })
    };
    assert!(limiter.check("k").await.expect("the store replies").is_allowed());
    let mut calls = Vec::new();
    for tenant in [None, Some("k"), None, None] {
        calls.push(acquire(tenant));
        tokio::task::yield_now().await;
    }
    for leaving in [0, 2, 1, 3] {
        calls[leaving].abort();
        tokio::task::yield_now().await;
    }
    let start = Instant::now();
    assert!(acquire(None).await.expect("no panic"));
    assert!(start.elapsed() <= 10 * SECOND, "{:?}", start.elapsed());
}

/// Limiters of two policies, and of the first one alone.
fn of_two_and_one() -> [Limiter; 2] {
    let store = MemoryStore::new();
    let [a, b] = [("a", 10), ("b", 25)].map(|(name, seconds)| {
        let policy = Policy::new(name, SlidingLog::new(1, seconds * SECOND));
        policy.wait_up_to(100 * SECOND)
    });
    [Limiter::new(store.clone(), [a.clone(), b]), Limiter::new(store, a)]
}

/// Waits for a request of a tenant, and returns after how many seconds it is admitted.
fn admitted(
    limiter: &Limiter,
    tenant: &'static str,
    start: Instant,
) -> impl Future<Output = (u64, &'static str)> + use<> {
    let limiter = limiter.clone();
    async move {
        let admitted = limiter.request("k").fair_by(tenant).acquire().await;
        assert!(admitted.is_ok(), "{admitted:?}");
        (start.elapsed().as_secs(), tenant)
    }
}

/// It leaves the line of each key that has room, and enters it again.
#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_two_keys_keeps_its_turn() {
    let ([both, one], start) = (of_two_and_one(), Instant::now());
    admitted(&both, "x", start).await;
    let mut callers = JoinSet::new();
    for tenant in ["x", "1", "2", "3", "4", "5"] {
        sleep(SECOND).await;
        callers.spawn(admitted(if tenant == "x" { &both } else { &one }, tenant, start));
    }
    let mut order = callers.join_all().await;
    order.sort_unstable();
    assert_eq!(
        order,
        [(10, "1"), (20, "2"), (30, "x"), (40, "3"), (50, "4"), (60, "5")]
    );
}

/// Its turn is that of the next one of its tenant.
#[tokio::test(start_paused = true)]
async fn a_request_that_leaves_while_one_of_two_keys_has_room_takes_no_turn() {
    let ([both, one], start) = (of_two_and_one(), Instant::now());
    admitted(&both, "x", start).await;
    let leaving = tokio::spawn(admitted(&both, "x", start));
    let mut callers = JoinSet::new();
    for tenant in ["1", "1"] {
        sleep(SECOND).await;
        callers.spawn(admitted(&one, tenant, start));
    }
    sleep(14 * SECOND).await;
    leaving.abort();
    assert!(leaving.await.is_err(), "it waits");
    callers.spawn(admitted(&one, "x", start));
    let mut order = callers.join_all().await;
    order.sort_unstable();
    assert_eq!(order, [(10, "1"), (20, "x"), (30, "1")]);
}

/// Waits for a request of a tenant with a priority, and returns after how many tenths of a second it is admitted.
fn admitted_with(
    limiter: &Limiter,
    (tenant, priority): (Option<&'static str>, i32),
    start: Instant,
) -> tokio::task::JoinHandle<Option<u128>> {
    let limiter = limiter.clone();
    tokio::spawn(async move {
        let request = limiter.request("k").priority(priority);
        let admitted = match tenant {
            Some(tenant) => request.fair_by(tenant).acquire().await,
            None => request.acquire().await,
        };
        admitted.ok().map(|_| start.elapsed().as_millis() / 100)
    })
}

fn one_a_second(longest: Duration) -> Limiter {
    let policy = Policy::new("p", TokenBucket::new(1, SECOND)).wait_up_to(longest);
    Limiter::new(MemoryStore::new(), policy)
}

/// Those that wait would take all of its time if it came after them.
#[tokio::test(start_paused = true)]
async fn a_request_waits_that_comes_before_those_which_fill_its_time() {
    for (arrival, at) in [
        ((Some("b"), 0), Some(20)),
        ((Some("b"), 1), Some(10)),
        ((Some("a"), 0), None),
    ] {
        let (limiter, start) = (one_a_second(10 * SECOND), Instant::now());
        let mut calls = Vec::new();
        for _ in 0..11 {
            calls.push(admitted_with(&limiter, (Some("a"), 0), start));
            sleep(SECOND / 100).await;
        }
        let last = admitted_with(&limiter, arrival, start);
        assert_eq!(last.await.expect("no panic"), at, "{arrival:?}");
    }
}

/// Its time is over as the one before it is admitted, for which it waits.
#[tokio::test(start_paused = true)]
async fn a_request_whose_wait_ends_does_not_come_before_those_ahead_of_it() {
    for ahead in [1, 3] {
        let (limiter, start) = (one_a_second(ahead * SECOND), Instant::now());
        assert!(limiter.check("k").await.expect("in memory").is_allowed());
        let last = admitted_with(&limiter, (None, 0), start);
        let mut first = Vec::new();
        for _ in 0..ahead {
            sleep(SECOND / 10).await;
            first.push(admitted_with(&limiter, (None, 1), start));
        }
        for (call, at) in first.into_iter().zip(1..) {
            assert_eq!(call.await.expect("no panic"), Some(10 * at), "{ahead}");
        }
        assert_eq!(last.await.expect("no panic"), None, "{ahead}");
    }
}

/// While those of a higher priority take turns, a tenant of a lower one does not come after all of another.
#[tokio::test(start_paused = true)]
async fn each_priority_has_turns_of_its_own() {
    let (limiter, start) = (one_a_second(60 * SECOND), Instant::now());
    assert!(limiter.check("k").await.expect("in memory").is_allowed());
    let mut low = Vec::new();
    for (tenant, priority) in [(Some("a"), 1), (Some("b"), 0)] {
        for _ in 0..6 {
            low.push(admitted_with(&limiter, (tenant, priority), start));
            tokio::task::yield_now().await;
        }
    }
    sleep(13 * SECOND / 2).await;
    let other = admitted_with(&limiter, (Some("c"), 0), start);
    assert_eq!(other.await.expect("no panic"), Some(80));
    let first = low.swap_remove(6);
    assert_eq!(first.await.expect("no panic"), Some(70));
}

/// The second policy lets it wait for a second, and denies the request only later.
#[tokio::test(start_paused = true)]
async fn a_request_waits_for_each_policy_as_long_as_that_lets_it() {
    let of = |name, window, longest| Policy::new(name, SlidingLog::new(1, window)).wait_up_to(longest);
    let store = MemoryStore::new();
    let [a, b] = [of("a", 10 * SECOND, 60 * SECOND), of("b", 60 * SECOND, SECOND)];
    let both = Limiter::new(store.clone(), [a.clone(), b.clone()]);
    let [a, b] = [a, b].map(|policy| Limiter::new(store.clone(), policy));
    let start = Instant::now();
    assert!(a.check("k").await.expect("in memory").is_allowed());
    let call = tokio::spawn(async move {
        let denied = both.acquire("k").await.is_err();
        (denied, start.elapsed().as_secs())
    });
    sleep(11 * SECOND / 2).await;
    assert!(b.check("k").await.expect("in memory").is_allowed());
    // It is checked each second.
    assert_eq!(call.await.expect("no panic"), (true, 6));
}

/// One that waits for two keys returns to the line of the first one with the turn that it had before.
#[tokio::test(start_paused = true)]
async fn a_request_that_returns_with_an_old_turn_changes_none_of_others() {
    let ([both, one], start) = (of_two_and_one(), Instant::now());
    admitted(&both, "x", start).await;
    let mut callers = JoinSet::new();
    for (second, tenant) in [(1, "w"), (2, "1"), (3, "1"), (4, "1"), (26, "c"), (27, "c"), (28, "c")] {
        sleep((start + second * SECOND) - Instant::now()).await;
        callers.spawn(admitted(if tenant == "w" { &both } else { &one }, tenant, start));
    }
    let mut order = callers.join_all().await;
    order.sort_unstable();
    assert_eq!(
        order,
        [
            (10, "1"),
            (20, "1"),
            (30, "w"),
            (40, "c"),
            (50, "1"),
            (60, "c"),
            (70, "c")
        ]
    );
}

/// All of them are sent before the first reply.
#[tokio::test(start_paused = true)]
async fn of_a_burst_those_are_denied_at_once_that_would_wait_for_too_long() {
    let store = Gated::new(MemoryStore::new());
    let policy = Policy::new("p", SlidingLog::per_second(1)).wait_up_to(5 * SECOND);
    let (limiter, start) = (Limiter::new(store.clone(), policy), Instant::now());
    let calls: Vec<_> = (0..20).map(|_| admitted_with(&limiter, (None, 0), start)).collect();
    tokio::task::yield_now().await;
    store.open(1_000);
    let denied_at_once = async {
        sleep(SECOND / 10).await;
        calls.iter().filter(|call| call.is_finished()).count()
    };
    // The first one is admitted at once, and five wait.
    assert_eq!(denied_at_once.await, 15);
    let mut admitted = Vec::new();
    for call in calls {
        admitted.extend(call.await.expect("no panic"));
    }
    assert_eq!(admitted, [0, 10, 20, 30, 40, 50]);
}

#[tokio::test(start_paused = true)]
async fn tenants_take_turns_while_the_store_fails() {
    let policy = Policy::new("p", SlidingLog::per_second(1)).wait_up_to(60 * SECOND);
    let (limiter, start) = (Limiter::new(Broken::default(), policy), Instant::now());
    let mut calls = Vec::new();
    for tenant in ["a", "a", "a", "a", "a", "b"] {
        calls.push(admitted_with(&limiter, (Some(tenant), 0), start));
        tokio::task::yield_now().await;
    }
    let mut admitted = Vec::new();
    for call in calls {
        admitted.push(call.await.expect("no panic").expect("it is admitted"));
    }
    assert_eq!(admitted, [0, 10, 30, 40, 50, 20]);
}

/// All of them are checked for the last time at once.
#[tokio::test(start_paused = true)]
async fn tenants_take_turns_when_their_time_is_over() {
    let policy = Policy::new("p", SlidingLog::per_second(10)).wait_up_to(SECOND);
    let (limiter, start) = (Limiter::new(MemoryStore::new(), policy), Instant::now());
    let taken = limiter.request("k").cost(10).check().await.expect("it replies");
    assert!(taken.is_allowed());
    let mut calls = Vec::new();
    for tenant in ["a", "b"] {
        calls.extend((0..10).map(|_| (tenant, admitted_with(&limiter, (Some(tenant), 0), start))));
    }
    let mut admitted = Vec::new();
    for (tenant, call) in calls {
        admitted.extend(call.await.expect("no panic").map(|at| (tenant, at)));
    }
    assert_eq!(admitted, [[("a", 10); 5], [("b", 10); 5]].concat());
}

/// A store that replies after a while.
#[derive(Clone)]
struct Far(MemoryStore);

impl Store for Far {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        let answer = self.0.decide(requests);
        StoreFuture::pending(async {
            sleep(SECOND / 50).await;
            answer.await
        })
    }
}

/// Their last checks are under way at once.
#[tokio::test(start_paused = true)]
async fn requests_that_are_denied_together_take_no_turns() {
    let policy = Policy::new("p", Concurrency::new(1)).wait_up_to(60 * SECOND);
    let limiter = Limiter::new(Far(MemoryStore::new()), policy);
    let acquire = |tenant: &'static str, longest| {
        let limiter = limiter.clone();
        async move {
            let request = limiter.request("k").fair_by(tenant).wait_up_to(longest);
            request.acquire().await.map(|_| tenant)
        }
    };
    let held = limiter.acquire("k").await.expect("there is a slot");
    let mut calls = vec![tokio::spawn(acquire("b", 60 * SECOND))];
    sleep(SECOND).await;
    let denied: Vec<_> = (0..10).map(|_| tokio::spawn(acquire("a", SECOND))).collect();
    for call in denied {
        assert!(call.await.expect("no panic").is_err(), "the slot is held");
    }
    let (sender, mut order) = tokio::sync::mpsc::unbounded_channel();
    for tenant in ["a", "b", "b", "b", "b"] {
        calls.push(tokio::spawn(acquire(tenant, 60 * SECOND)));
        sleep(SECOND / 10).await;
    }
    drop(held);
    for call in calls {
        let sender = sender.clone();
        tokio::spawn(async move {
            let _ = sender.send(call.await.expect("no panic").expect("it is admitted"));
        });
    }
    drop(sender);
    let mut tenants = Vec::new();
    while let Some(tenant) = order.recv().await {
        tenants.push(tenant);
    }
    assert_eq!(tenants, ["b", "a", "b", "b", "b", "b"]);
}

/// The store has decided that check before.
#[tokio::test(start_paused = true)]
async fn a_slot_that_gets_free_while_another_line_has_the_request_checked_is_taken_at_once() {
    let policies = [
        Policy::new("rate", SlidingLog::new(1, SECOND / 2)).wait_up_to(60 * SECOND),
        Policy::new("slots", Concurrency::new(1)).wait_up_to(60 * SECOND),
    ];
    let (limiter, start) = (Limiter::new(Far(MemoryStore::new()), policies), Instant::now());
    let held = limiter.request("k").key_of("rate", "other").check().await;
    let held = held.expect("it replies");
    let used = limiter.request("k").key_of("slots", "other").check().await;
    assert!(held.is_allowed() && used.expect("it replies").is_allowed());
    let call = admitted_with(&limiter, (None, 0), start);
    // The check for the rate is sent after 520 milliseconds, and has its reply after 540.
    sleep_until(start + SECOND * 53 / 100).await;
    drop(held);
    assert_eq!(call.await.expect("no panic"), Some(5));
}

/// Those behind it follow into the place, of which a part is admitted.
#[tokio::test(start_paused = true)]
async fn no_request_comes_before_those_that_follow_into_the_place() {
    let policy = || Policy::new("p", SlidingLog::per_second(40)).wait_up_to(60 * SECOND);
    let (store, start) = (MemoryStore::new(), Instant::now());
    let (limiter, other) = (
        Limiter::new(Far(store.clone()), policy()),
        Limiter::new(store, policy()),
    );
    let take = async |cost| other.request("k").cost(cost).check().await.expect("it replies");
    assert!(take(31).await.is_allowed());
    sleep(SECOND / 2).await;
    let refunded = take(9).await;
    assert!(refunded.is_allowed());
    let early: Vec<_> = (0..42).map(|_| admitted_with(&limiter, (None, 0), start)).collect();
    // After a second 31 are admitted, which are all of the place but one.
    sleep(7 * SECOND / 10).await;
    refunded.take_receipt().refund().await.expect("it replies");
    let checked = limiter.check("k").await.expect("it replies");
    assert!(!checked.is_allowed(), "it comes before those that wait");
    let mut admitted = Vec::new();
    for call in early {
        admitted.extend(call.await.expect("no panic"));
    }
    assert_eq!(admitted, [[10; 31].as_slice(), &[12; 9], &[20; 2]].concat());
}

/// The place of a process in the store has the first 32 of them.
#[tokio::test(start_paused = true)]
async fn no_request_comes_before_those_that_wait_beyond_the_place() {
    let policy = Policy::new("p", SlidingLog::per_second(100)).wait_up_to(60 * SECOND);
    let (limiter, start) = (Limiter::new(Far(MemoryStore::new()), policy), Instant::now());
    let taken = limiter.request("k").cost(100).check().await.expect("it replies");
    assert!(taken.is_allowed());
    let early: Vec<_> = (0..300).map(|_| admitted_with(&limiter, (None, 0), start)).collect();
    let mut late = Vec::new();
    while start.elapsed() < 3 * SECOND {
        sleep(SECOND / 100).await;
        if start.elapsed() > SECOND / 2 && late.len() < 100 {
            late.push(admitted_with(&limiter, (None, 0), start));
        }
        let checked = limiter.check("k").await.expect("it replies");
        assert!(!checked.is_allowed(), "after {:?}", start.elapsed());
    }
    let mut last = 0;
    for call in early {
        last = last.max(call.await.expect("no panic").expect("it is admitted"));
    }
    for call in late {
        let admitted = call.await.expect("no panic").expect("it is admitted");
        assert!(last <= admitted, "{admitted} before {last}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_wait_behind_a_full_line_is_that_of_all_requests_there() {
    let policy = Policy::new("p", SlidingLog::per_second(10))
        .wait_up_to(60 * SECOND)
        .max_waiting(500);
    let (limiter, start) = (Limiter::new(MemoryStore::new(), policy), Instant::now());
    let _calls: Vec<_> = (0..510).map(|_| admitted_with(&limiter, (None, 0), start)).collect();
    sleep(SECOND / 2).await;
    let Err(AcquireError::LineFull(denied)) = limiter.acquire("k").await else {
        panic!("500 wait");
    };
    let wait = denied.decision().retry_after().expect("it is admitted later");
    assert!((49 * SECOND..=51 * SECOND).contains(&wait), "{wait:?}");
    let peeked = limiter.peek("k").await.expect("it replies").retry_after();
    assert_eq!(peeked, Some(wait));
}

#[tokio::test(start_paused = true)]
async fn a_peek_of_a_layer_is_behind_the_requests_that_wait() {
    let layer = RateLimitLayer::new(MemoryStore::new(), ten_a_second());
    let mut tasks = JoinSet::new();
    for _ in 0..101 {
        let service = layer.layer(service_fn(async |_: Request<Body>| {
            Ok::<_, Infallible>(Response::new(Body::new()))
        }));
        tasks.spawn(service.oneshot(Request::new(Body::new())));
        tokio::task::yield_now().await;
    }
    let (parts, ()) = Request::new(()).into_parts();
    let peeked = layer.peek(&parts).await.expect("it replies").retry_after();
    assert_eq!(peeked, Some(101 * SECOND / 10));
}

/// With units that are taken ahead, what is admitted counts for longer than the window.
#[tokio::test(start_paused = true)]
async fn a_request_that_would_wait_for_too_long_with_units_ahead_is_denied_at_once() {
    let log = SlidingLog::per_second(10).prefetch(SECOND / 10);
    let (limiter, start) = (Limiter::new(MemoryStore::new(), Policy::new("p", log)), Instant::now());
    let acquire = || {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let acquired = limiter.request("k").wait_up_to(SECOND * 215 / 100).acquire().await;
            (acquired.is_ok(), start.elapsed())
        })
    };
    let mut calls = Vec::new();
    for _ in 0..22 {
        calls.push(acquire());
        sleep(SECOND / 1_000).await;
    }
    for (nth, call) in calls.into_iter().enumerate() {
        let (is_admitted, after) = call.await.expect("no panic");
        assert_eq!(is_admitted, nth < 20, "{nth} after {after:?}");
        assert!(is_admitted || after < SECOND / 2, "{nth} was denied after {after:?}");
    }
}

/// The place of its process has expired in the store meanwhile.
#[tokio::test(start_paused = true)]
async fn a_check_after_a_stall_does_not_overtake_those_that_wait() {
    for stall in [490, 610, 3_000] {
        let policy = Policy::new("api", SlidingLog::new(5, Duration::from_millis(10_550))).wait_up_to(18 * SECOND);
        let limiter = Limiter::new(MemoryStore::new(), policy);
        let start = Instant::now();
        let at = move |millis| sleep_until(start + Duration::from_millis(millis));
        let first = limiter.request("k").cost(5).check().await.expect("it is counted");
        assert!(first.is_allowed());
        at(100).await;
        let mut calls = JoinSet::new();
        let waits = limiter.clone();
        calls.spawn(async move { waits.request("k").cost(5).acquire().await.is_ok() });
        let arrives = limiter.clone();
        let late = tokio::spawn(async move {
            at(10_095).await;
            arrives.check("k").await.expect("it is counted").is_allowed()
        });
        at(10_090).await;
        advance(Duration::from_millis(stall)).await;
        assert!(!late.await.expect("no panic"), "after {stall} ms");
        assert_eq!(calls.join_all().await, [true], "after {stall} ms");
    }
}

/// How long a request waits which fits 0.8 s after this, and 0.3 s after it since a settlement gives units back.
async fn waits_for_a_settlement(limiter: &Limiter, other: &Limiter, in_line: impl AsyncFn() -> bool) -> Duration {
    let start = Instant::now();
    let charged = other.request("k").cost(10).check().await.expect("it is counted");
    let waits = limiter.clone();
    let waiting = tokio::spawn(async move { waits.request("k").cost(8).acquire().await });
    // A busy machine may admit it before that is seen.
    eventually("it stands in the line", async || {
        in_line().await || waiting.is_finished()
    })
    .await;
    charged.take_receipt().settle(5).await.expect("it is counted");
    let admitted = waiting.await.expect("no panic").expect("it is admitted");
    assert!(admitted.is_allowed());
    let waited = start.elapsed();
    limiter.reset("k").await.expect("the store replies");
    waited
}

fn ten_at_once() -> Policy<()> {
    Policy::new("api", TokenBucket::per_second(10)).wait_up_to(60 * SECOND)
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_learns_of_a_settlement_after_which_it_fits_earlier() {
    let limiter = Limiter::new(MemoryStore::new(), ten_at_once());
    let waited = waits_for_a_settlement(&limiter, &limiter, async || {
        sleep(SECOND / 10).await;
        true
    })
    .await;
    assert_eq!(waited.as_millis(), 300);
}

#[tokio::test]
async fn a_request_that_waits_learns_of_a_settlement_by_another_process() {
    let redis = Redis::start();
    let store = async || connected(patient(), &redis.url()).await;
    let [one, other] = [store().await, store().await].map(|store| Limiter::new(store, ten_at_once()));
    let mut waits = Vec::new();
    for _ in 0..5 {
        waits.push(waits_for_a_settlement(&one, &other, async || in_line(&redis).await == 1).await);
    }
    // Without a message each takes 0.8 s.
    assert!(waits.iter().any(|waited| *waited < 7 * SECOND / 10), "{waits:?}");
}

/// A store that fails while it is down.
struct Failing(MemoryStore, Arc<AtomicBool>);

impl Store for Failing {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        match self.1.load(Ordering::Relaxed) {
            true => StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "it is down"))),
            false => self.0.decide(requests),
        }
    }
}

/// A limiter of five in ten seconds, and the switch by which its store is down.
fn five_in_an_outage() -> (Limiter, Arc<AtomicBool>) {
    let is_down = Arc::new(AtomicBool::new(true));
    let store = Failing(MemoryStore::new(), is_down.clone());
    let policy = Policy::new("api", SlidingLog::new(5, 10 * SECOND)).wait_up_to(20 * SECOND);
    (Limiter::new(store, policy), is_down)
}

/// Those that have come to wait meanwhile have their place in the counts of this process.
#[tokio::test(start_paused = true)]
async fn a_check_after_an_outage_does_not_overtake_those_that_wait() {
    let (limiter, is_down) = five_in_an_outage();
    let start = Instant::now();
    let at = |tenths: u32| sleep_until(start + tenths * SECOND / 10);
    let check = async |cost| {
        let check = limiter.request("k").cost(cost).check().await;
        check.expect("it is counted")
    };
    assert!(check(3).await.is_allowed());
    at(1).await;
    let waits = limiter.clone();
    let waiting = tokio::spawn(async move { waits.request("k").cost(3).acquire().await.is_ok() });
    at(2).await;
    // There is room for both when what was counted first has expired.
    let denied = check(1).await;
    assert_eq!(denied.retry_after(), Some(98 * SECOND / 10), "in the outage");
    at(52).await;
    is_down.store(false, Ordering::Relaxed);
    assert!(
        check(1).await.is_allowed(),
        "the store has counted nothing: there is room for both"
    );
    assert!(!check(2).await.is_allowed(), "after the outage");
    assert!(waiting.await.expect("no panic"));
}

/// One that comes to wait then has its place in the store, and those before it have none there yet.
#[tokio::test(start_paused = true)]
async fn one_that_comes_to_wait_after_an_outage_stands_behind_those_before_it() {
    let (limiter, is_down) = five_in_an_outage();
    let start = Instant::now();
    let at = |tenths: u32| sleep_until(start + tenths * SECOND / 10);
    let check = async |cost| {
        let check = limiter.request("k").cost(cost).check().await;
        check.expect("it is counted").is_allowed()
    };
    assert!(check(3).await);
    at(1).await;
    let waits = limiter.clone();
    let first = tokio::spawn(async move { waits.request("k").cost(5).acquire().await.is_ok() });
    at(52).await;
    is_down.store(false, Ordering::Relaxed);
    let mut second = Box::pin(limiter.request("k").cost(1).acquire());
    begin(&mut second).await;
    // The first one has not been checked since.
    assert!(!check(4).await, "the first one waits for five");
    assert!(first.await.expect("no panic"));
    assert!(start.elapsed() < 7 * SECOND);
    assert!(second.await.expect("memory").is_allowed());
}
