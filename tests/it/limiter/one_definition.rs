//! The policies of a layer, read and counted by code without a second definition of them.

use std::{
    convert::Infallible,
    error::Error,
    net::Ipv6Addr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use http::{Request, Response, StatusCode, request::Parts};
use http_body_util::Empty;
use tokio::time::timeout;
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    Ban, Decision, FailureMode, Key, Limit, Limiter, MemoryStore, Plans, Policies, Policy, RateLimitLayer, SlidingLog,
    TokenBucket,
    key::{self, KeyError},
    store::{ErrorKind, Store, StoreError, StoreFuture, StoreRequest},
};

use crate::support::{Gated, each_store};

type Body = Empty<bytes::Bytes>;

each_store! { with crate::support::Unclocked:
    a_peek_of_a_layer_is_what_its_check_would_return_and_counts_nothing
    a_handler_behind_a_layer_peeks_at_what_remains_after_its_request
    a_peek_of_a_layer_has_the_plan_of_the_caller
    a_limiter_of_a_layer_counts_with_it_by_what_needs_no_request
    the_messages_of_a_connection_are_counted_by_what_its_request_is
    a_reset_ends_bans_and_counts_of_limits_that_are_chosen
}

/// A store that fails.
#[derive(Clone)]
struct Down;

impl Store for Down {
    fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
        StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "connection refused")))
    }
}

fn user() -> impl tower_quota::KeyExtractor {
    key::header("x-user-id")
}

fn head(uri: &str, user: &str) -> Parts {
    let request = Request::get(uri).header("x-user-id", user);
    request.body(()).expect("a request").into_parts().0
}

async fn send(layer: &RateLimitLayer, head: Parts) -> StatusCode {
    let service = layer.layer(service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Body::new()))
    }));
    let Ok(response) = service.oneshot(Request::from_parts(head, Body::new())).await;
    response.status()
}

fn remaining(decision: &Decision) -> Vec<(&str, u64)> {
    let policies = decision.policies();
    policies.map(|policy| (policy.name(), policy.remaining())).collect()
}

async fn a_peek_of_a_layer_is_what_its_check_would_return_and_counts_nothing(store: Arc<impl Store>) {
    let path = |path: &'static str| move |parts: &Parts| parts.uri.path() == path;
    let observed = Arc::new(AtomicU32::new(0));
    let decisions = observed.clone();
    let layer = RateLimitLayer::new(
        store,
        [
            Policy::new("all", SlidingLog::per_hour(9)).key(user()).cost(2),
            // Nothing is known of its cost in the request of a page.
            Policy::new("tokens", TokenBucket::per_day(500))
                .key(user())
                .cost_fn(|parts| u64::from(parts.uri.path() == "/search")),
            Policy::new("search", SlidingLog::per_hour(1))
                .key(user())
                .apply_if(path("/search")),
        ],
    )
    .skip(path("/health"))
    .on_decision(move |_| {
        observed.fetch_add(1, Ordering::Relaxed);
    });

    assert_eq!(send(&layer, head("/search", "42")).await, StatusCode::OK);
    assert_eq!(decisions.load(Ordering::Relaxed), 1);
    for _ in 0..2 {
        let page = layer.peek(&head("/v1/limits", "42")).await.expect("the store replies");
        assert!(page.is_allowed());
        assert_eq!(remaining(&page), [("all", 7), ("tokens", 499)]);

        let search = layer.peek(&head("/search", "42")).await.expect("the store replies");
        assert!(!search.is_allowed() && search.retry_after().is_some(), "{search:?}");
        assert_eq!(remaining(&search), [("all", 7), ("tokens", 499), ("search", 0)]);

        let other = layer.peek(&head("/search", "43")).await.expect("the store replies");
        assert_eq!(remaining(&other), [("all", 9), ("tokens", 500), ("search", 1)]);

        let skipped = layer.peek(&head("/health", "42")).await.expect("nothing is asked");
        assert_eq!(remaining(&skipped), []);
    }
    let nobody = Request::get("/search").body(()).expect("a request").into_parts().0;
    let error = layer.peek(&nobody).await.expect_err("it has no key");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("x-user-id"), "{error}");

    assert_eq!(decisions.load(Ordering::Relaxed), 1, "peeks are not observed");
    assert_eq!(send(&layer, head("/search", "42")).await, StatusCode::TOO_MANY_REQUESTS);
}

async fn a_handler_behind_a_layer_peeks_at_what_remains_after_its_request(store: Arc<impl Store>) {
    let layer = RateLimitLayer::new(store, Policy::new("api", SlidingLog::per_hour(9)).key(user()));
    let limits = layer.clone();
    let service = layer.layer(service_fn(move |request: Request<Body>| {
        let limits = limits.clone();
        async move {
            // It has the decision of the layer in its extensions.
            let (head, _) = request.into_parts();
            assert!(head.extensions.get::<Decision>().is_some());
            let decision = limits.peek(&head).await.expect("the store replies");
            assert_eq!(remaining(&decision), [("api", 8)]);
            Ok::<_, Infallible>(Response::new(Body::new()))
        }
    }));
    let request = Request::from_parts(head("/v1/limits", "42"), Body::new());
    let Ok(response) = service.oneshot(request).await;
    assert_eq!(response.status(), StatusCode::OK);
}

async fn a_peek_of_a_layer_has_the_plan_of_the_caller(store: Arc<impl Store>) {
    let api = |n| Policy::new("api", SlidingLog::per_hour(n)).key(user());
    let plans = Plans::new("free", api(3)).plan("pro", api(100));
    let layer = RateLimitLayer::new(
        store,
        plans.by(|parts| {
            Some(if parts.headers["x-user-id"] == "pro" {
                "pro"
            } else {
                "free"
            })
        }),
    );
    for (user, left) in [("42", 3), ("pro", 100)] {
        let decision = layer.peek(&head("/", user)).await.expect("the store replies");
        assert_eq!(remaining(&decision), [("api", left)]);
    }
}

async fn a_limiter_of_a_layer_counts_with_it_by_what_needs_no_request(store: Arc<impl Store>) {
    let layer = RateLimitLayer::new(
        store,
        [
            Policy::new("fixed", SlidingLog::per_hour(9)).key(user()).cost(2),
            Policy::new("computed", SlidingLog::per_hour(9))
                .key(user())
                .cost_fn(|_| 4)
                .refund_if(|_| true)
                .apply_if(|_| false),
            Policy::new("waiting", TokenBucket::per_hour(9))
                .key(user())
                .wait_up_to_fn(|_| Duration::from_secs(3_600)),
            Policy::with_limit_fn("chosen", |_| Limit::from(SlidingLog::per_hour(3))).key(user()),
        ],
    );
    let limiter = Limiter::from(&layer);
    let key = || Key::header("x-user-id", "42");

    assert_eq!(send(&layer, head("/", "42")).await, StatusCode::OK);
    let decision = limiter.check(key()).await.expect("the store replies");
    assert_eq!(remaining(&decision), [("fixed", 5), ("computed", 8), ("waiting", 7)]);
    let layered = layer.peek(&head("/", "42")).await.expect("the store replies");
    assert_eq!(remaining(&layered), [("fixed", 5), ("waiting", 7), ("chosen", 2)]);

    // It would wait for most of an hour if the computed wait held.
    let request = limiter
        .request(key())
        .cost_of("waiting", 8)
        .cost_of("fixed", 0)
        .cost_of("computed", 0);
    assert!(!request.check().await.expect("the store replies").is_allowed());
}

async fn the_messages_of_a_connection_are_counted_by_what_its_request_is(store: Arc<impl Store>) {
    let path = |path: &'static str| move |parts: &Parts| parts.uri.path() == path;
    let messages = |n| Policy::new("messages", TokenBucket::per_hour(n)).key((user(), key::path()));
    let plans = Plans::new("free", messages(3)).plan("pro", messages(100));
    let plans = plans
        .in_each(Policy::new("all", SlidingLog::per_hour(50)).key(key::constant("all")))
        .in_each(
            Policy::new("chats", SlidingLog::per_hour(9))
                .key(user())
                .apply_if(path("/chat")),
        )
        .in_each(
            Policy::new("observed", SlidingLog::per_hour(9))
                .key(key::header("x-other"))
                .observe_only(),
        );
    let layer = RateLimitLayer::new(
        store,
        plans.by(|parts| Some(if parts.uri.query().is_some() { "pro" } else { "free" })),
    );
    let layer = layer.skip(path("/health"));
    let limiter = Limiter::from(&layer);
    let counted = async |uri: &str, cost| {
        let connection = head(uri, "42");
        let message = limiter.request_of(&connection).expect("it has the keys").cost(cost);
        let decision = message.check().await.expect("the store replies");
        remaining(&decision)
            .into_iter()
            .map(|(name, left)| (name.to_owned(), left))
            .collect::<Vec<_>>()
    };
    let expected = |left: &[(&str, u64)]| {
        left.iter()
            .map(|(name, left)| ((*name).to_owned(), *left))
            .collect::<Vec<_>>()
    };

    assert_eq!(counted("/feed", 1).await, expected(&[("messages", 2), ("all", 49)]));
    assert_eq!(counted("/feed", 2).await, expected(&[("messages", 0), ("all", 47)]));
    assert_eq!(
        counted("/chat?pro", 2).await,
        expected(&[("messages", 98), ("all", 45), ("chats", 7)])
    );
    assert_eq!(
        counted("/chat?pro", 0).await,
        expected(&[("messages", 98), ("all", 45), ("chats", 7)])
    );
    assert_eq!(counted("/health", 1).await, []);
    // A key by hand applies also where the request has none.
    let feed = head("/feed?pro", "42");
    let message = limiter
        .request_of(&feed)
        .expect("it has the keys")
        .key_of("chats", Key::header("x-user-id", "42"));
    let decision = message.check().await.expect("the store replies");
    assert_eq!(remaining(&decision), [("messages", 99), ("all", 44), ("chats", 6)]);
    // The requests of the layer have the same counts.
    assert_eq!(send(&layer, head("/feed", "42")).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(send(&layer, head("/feed", "43")).await, StatusCode::OK);

    let without_user = Request::get("/feed").body(()).expect("a request").into_parts().0;
    let error = limiter.request_of(&without_user).expect_err("it has no user");
    let missing = error.source().and_then(|source| source.downcast_ref::<KeyError>());
    assert!(missing.is_some_and(KeyError::is_absent), "{error}");
}

#[tokio::test]
async fn a_limit_that_a_reload_sets_is_for_open_connections_too() {
    let parse = |limit: &str| {
        let text = format!("policies.chat = {{ limit = '{limit}', key = 'header:x-user-id' }}");
        Policies::from_toml(&text).expect("a file")
    };
    let policies = parse("unlimited");
    let limiter = Limiter::from(&policies.layer(MemoryStore::new(), ["chat"]).expect("a policy"));
    let connection = head("/", "42");
    let caller = limiter.request_of(&connection).expect("it has a key");
    let without_user = Request::get("/").body(()).expect("a request").into_parts().0;
    assert!(limiter.request_of(&without_user).is_ok(), "nothing is counted for it");

    policies.replace(&parse("sliding-log 1/h")).expect("a file");
    for is_allowed in [true, false] {
        let decision = caller.clone().check().await.expect("a memory store replies");
        assert_eq!(decision.is_allowed(), is_allowed);
    }
    let error = limiter.request_of(&without_user).expect_err("it has no key now");
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn a_limiter_that_is_not_of_a_layer_has_no_keys_of_requests() {
    let policy = || Policy::new("api", SlidingLog::per_hour(9));
    for limiter in [
        Limiter::new(MemoryStore::new(), policy()),
        Limiter::new(MemoryStore::new(), policy().key(user())),
    ] {
        let error = limiter.request_of(&head("/", "42")).expect_err("it has no extractor");
        assert!(
            error.kind() == ErrorKind::Invalid && error.to_string().contains("`Limiter::from(&layer)`"),
            "{error}"
        );
        let empty = limiter.check("42").await.expect("a memory store replies");
        assert_eq!(remaining(&empty), [("api", 8)]);
    }
}

async fn a_reset_ends_bans_and_counts_of_limits_that_are_chosen(store: Arc<impl Store>) {
    let hour = Duration::from_secs(3_600);
    let key = || Key::header("x-user-id", "42");
    let chosen = Policy::with_limit_fn("chosen", |parts| match parts.uri.path() {
        "/logs" => Limit::from(SlidingLog::per_hour(1)),
        _ => TokenBucket::per_hour(1).into(),
    });
    let chosen = RateLimitLayer::new(store.clone(), chosen.key(user()).ban(Ban::by_hand()));
    let limiter = Limiter::from(&chosen);
    limiter.ban(key(), hour).await.expect("it has bans");
    // No limit was chosen yet: the ban ends, and the counts are not known.
    let error = limiter.reset(key()).await.expect_err("its counts remain");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(
        error.to_string().contains("no limit of the policy `chosen` is known"),
        "{error}"
    );
    for path in ["/logs", "/"] {
        assert_eq!(
            send(&chosen, head(path, "42")).await,
            StatusCode::OK,
            "the ban has ended"
        );
        assert_eq!(send(&chosen, head(path, "42")).await, StatusCode::TOO_MANY_REQUESTS);
    }
    limiter.ban(key(), hour).await.expect("it has bans");
    limiter.reset(key()).await.expect("both limits are known");
    for path in ["/logs", "/"] {
        assert_eq!(send(&chosen, head(path, "42")).await, StatusCode::OK);
    }

    // Another process of the same file has counted.
    let file = || {
        let text = "policies.file = { limit = 'sliding-log 1/h', key = 'header:x-user-id', plan = 'header:plan', \
                    plans.pro = 'token-bucket 1/h' }";
        Policies::from_toml(text).expect("a file")
    };
    let [one, other] = [(); 2].map(|()| file().layer(store.clone(), ["file"]).expect("a policy"));
    for plan in ["free", "pro"] {
        let planned = || {
            let mut head = head("/", "42");
            head.headers.insert("plan", plan.parse().expect("a value"));
            head
        };
        assert_eq!(send(&one, planned()).await, StatusCode::OK);
        assert_eq!(send(&one, planned()).await, StatusCode::TOO_MANY_REQUESTS);
        Limiter::from(&other)
            .reset(key())
            .await
            .expect("the file has the limits");
        assert_eq!(send(&one, planned()).await, StatusCode::OK, "{plan}");
    }

    // A ban of a policy that limits nothing now would apply when it has a limit again.
    let open = |limit| Limiter::new(store.clone(), Policy::new("open", limit).ban(Ban::by_hand()));
    for off in [Limit::Unlimited, Limit::DenyAll] {
        open(off.clone()).ban("42", hour).await.expect("it has bans");
        open(off).reset("42").await.expect("the store replies");
        let later = open(SlidingLog::per_hour(1).into())
            .peek("42")
            .await
            .expect("the store replies");
        assert!(later.is_allowed());
    }
}

#[tokio::test]
async fn a_limiter_of_a_layer_refuses_the_key_of_no_request() {
    let hour = Duration::from_secs(3_600);
    let banning = |name| Policy::new(name, SlidingLog::per_hour(1)).ban(Ban::by_hand());
    let of = |layer: RateLimitLayer| Limiter::from(&layer);
    let on_path = of(RateLimitLayer::new(
        MemoryStore::new(),
        banning("api").key((key::ip(), key::path())),
    ));
    let limiter = of(RateLimitLayer::new(MemoryStore::new(), banning("api").key(key::ip())));
    let by_56_bits = key::ip().ipv6_prefix(56);
    let of_56_bits = of(RateLimitLayer::new(
        MemoryStore::new(),
        banning("api").key(by_56_bits.clone()),
    ));
    let network = by_56_bits.key_of(Ipv6Addr::LOCALHOST.into());
    of_56_bits.ban(network, hour).await.expect("a key of a request");
    // A client beside the NAT64 of its /64.
    let translated = key::ip().nat64_prefixes(["2001:db8:64::/96"]).expect("a prefix");
    let of_nat64 = of(RateLimitLayer::new(
        MemoryStore::new(),
        banning("api").key(translated.clone()),
    ));
    let beside = translated.key_of(Ipv6Addr::new(0x2001, 0xdb8, 0x64, 0, 0, 1, 0, 1).into());
    of_nat64.ban(beside, hour).await.expect("a key of a request");
    let caller = Key::ip([203, 0, 113, 7].into());
    for (limiter, key, form) in [
        (&limiter, Key::from("203.0.113.7"), "`ip=..`"),
        (&limiter, Key::header("x-user", "42"), "`ip=..`"),
        (&limiter, caller.clone().and(Key::route("/")), "`ip=..`"),
        (&on_path, caller.clone(), "`ip=..|path=/..`"),
        (&of_56_bits, Key::ip(Ipv6Addr::LOCALHOST.into()), "`ip=..`"),
    ] {
        for refused in [
            limiter.reset(key.clone()).await,
            limiter.ban(key.clone(), hour).await,
            limiter
                .override_limit("api", key.clone(), SlidingLog::per_hour(9), hour)
                .await,
        ] {
            let error = refused.expect_err("no request has this key");
            assert_eq!(error.kind(), ErrorKind::Invalid);
            let forms = format!("its keys are {form}; make one of the same parts, such as `Key::ip(address)`");
            assert!(error.to_string().contains(&forms), "{error}");
        }
    }
    assert!(
        limiter
            .check(caller.clone())
            .await
            .is_ok_and(|first| first.is_allowed())
    );
    limiter.reset(caller.clone()).await.expect("a key of a request");
    assert!(
        limiter
            .check(caller.clone())
            .await
            .is_ok_and(|again| again.is_allowed())
    );
    limiter.ban(caller, hour).await.expect("a key of a request");

    // Requests may have such a key.
    let numbered = banning("api").key(key::from_fn(|_| Some(42_u64)));
    for limiter in [
        of(RateLimitLayer::new(MemoryStore::new(), [numbered.clone()])),
        Limiter::new(MemoryStore::new(), banning("api").key(key::ip())),
    ] {
        limiter.reset(42).await.expect("a key of a limiter, or of a request");
        limiter.ban(42, hour).await.expect("the same");
        assert!(limiter.check(42).await.is_ok_and(|banned| !banned.is_allowed()));
    }
}

/// Otherwise it is reported as done, and the caller is admitted.
#[tokio::test]
async fn a_ban_is_refused_if_no_policy_with_bans_has_such_keys() {
    let per_hour = |name| Policy::new(name, SlidingLog::per_hour(9));
    let per_address = per_hour("per-address").key(key::ip());
    let logins = per_hour("logins").key(key::header("x-user")).ban(Ban::by_hand());
    let hour = Duration::from_secs(3_600);
    let caller = || Key::ip([203, 0, 113, 7].into());

    let limiter = Limiter::from(&RateLimitLayer::new(MemoryStore::new(), [per_address.clone(), logins]));
    let error = limiter.ban(caller(), hour).await.expect_err("nothing is banned");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("its keys are `header:x-user=..`"), "{error}");
    limiter
        .ban(Key::header("x-user", "42"), hour)
        .await
        .expect("it has bans");
    limiter.reset(caller()).await.expect("a key of a request");

    let limiter = Limiter::from(&RateLimitLayer::new(MemoryStore::new(), per_address));
    let error = limiter.ban(caller(), hour).await.expect_err("it has no bans");
    assert!(error.to_string().contains("`.ban(Ban::by_hand())`"), "{error}");
}

#[tokio::test]
async fn a_peek_reports_that_the_store_fails() {
    let policy = |mode| {
        Policy::new("api", SlidingLog::per_hour(9))
            .key(user())
            .failure_mode(mode)
    };
    for (mode, counted) in [(FailureMode::Local, 1), (FailureMode::Open, 0)] {
        let failures = Arc::new(AtomicU32::new(0));
        let observed = failures.clone();
        let layer = RateLimitLayer::new(Down, policy(mode)).on_failure(move |_| {
            observed.fetch_add(1, Ordering::Relaxed);
        });
        let decision = layer.peek(&head("/", "42")).await.expect("it is not closed");
        assert!(decision.store_error().is_some());
        assert_eq!(decision.policies().count(), counted);
        assert_eq!(failures.load(Ordering::Relaxed), 1);
    }
    let error = RateLimitLayer::new(Down, policy(FailureMode::Closed))
        .peek(&head("/", "42"))
        .await;
    assert_ne!(error.expect_err("it is closed").kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn a_peek_of_a_blocked_request_says_so() {
    let policies = Policies::from_toml(
        r#"
        [block]
        routes = ["/admin"]

        [policies]
        api = { limit = "sliding-log 9/h", key = "header:x-user-id" }
        "#,
    )
    .expect("a file");
    let layer = policies
        .layer(tower_quota::MemoryStore::new(), ["api"])
        .expect("a layer");
    assert!(layer.peek(&head("/", "42")).await.is_ok());
    let error = layer.peek(&head("/admin", "42")).await.expect_err("it is blocked");
    assert!(error.to_string().contains("blocked"), "{error}");
    let messages = Limiter::from(&layer);
    assert!(messages.request_of(&head("/", "42")).is_ok());
    let error = messages.request_of(&head("/admin", "42")).expect_err("it is blocked");
    assert_eq!(
        (error.kind(), &*error.to_string()),
        (ErrorKind::Invalid, "the request is blocked")
    );
    #[cfg(feature = "axum")]
    assert_eq!(
        axum::response::IntoResponse::into_response(error).status(),
        StatusCode::FORBIDDEN
    );
}

#[tokio::test]
async fn what_a_caller_of_a_limiter_leaves_stays_charged_whatever_a_layer_refunds() {
    let store = Gated::new(MemoryStore::new());
    let policy = Policy::new("p", SlidingLog::per_hour(10)).refund_if(|completion| !completion.is_success());
    let trial = Policy::new("trial", SlidingLog::per_hour(9)).observe_only();
    let off = Policy::new("off", Limit::DenyAll).observe_only();
    let layer = RateLimitLayer::new(store.clone(), [policy, trial, off].map(|policy| policy.key(user())));
    let limiter = Limiter::from(&layer);
    let key = Key::header("x-user-id", "42");
    let mut charged = Box::pin(limiter.request(key.clone()).cost(3).charge());
    let mut checked = Box::pin(limiter.check(key.clone()));
    assert!(
        timeout(Duration::ZERO, &mut charged).await.is_err() && timeout(Duration::ZERO, &mut checked).await.is_err()
    );
    drop((charged, checked));
    store.open(9);
    assert!(store.drained(Duration::from_secs(60)).await.is_ok());
    assert_eq!(limiter.peek(key).await.expect("the store replies").remaining(), 6);
}

#[tokio::test]
async fn a_message_is_not_counted_by_a_policy_for_which_its_request_costs_nothing() {
    let search = Policy::new("search", SlidingLog::per_hour(9)).key(user());
    let search = search.cost_fn(|parts| u64::from(parts.uri.path() == "/search"));
    let all = Policy::new("all", SlidingLog::per_hour(9)).key(user());
    let limiter = Limiter::from(&RateLimitLayer::new(MemoryStore::new(), [all, search]));
    for (path, expected) in [
        ("/", &[("all", 8)][..]),
        ("/search", &[("all", 7), ("search", 8)]),
        ("/", &[("all", 6)]),
    ] {
        let connection = head(path, "42");
        let message = limiter.request_of(&connection).expect("it has the keys");
        let decision = message.check().await.expect("a memory store replies");
        assert_eq!(remaining(&decision), expected, "{path}");
    }
}
