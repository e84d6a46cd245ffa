//! What every public type can do: be shared, be cloned, be a trait object.

use std::{fmt::Debug, sync::Arc};

use axum::{Router, routing::get as route};

use tower_quota::{
    AcquireError, Admin, ApplicationClient, Ban, ClientLibrary, Completion, Concurrency, ConfigError, ConnectError,
    Credentials, Decision, Denial, Denied, FailureMode, FixedWindow, Headers, Key, KeyExtractor, Limit, Limiter,
    LimiterRequest, ManualClock, MemoryStore, MemoryStoreBuilder, Plans, Policies, Policy, PolicyDecision, RateLimit,
    RateLimitLayer, Receipt, RedisStore, RedisStoreBuilder, ResponseBody, ResponseFuture, SlidingCounter, SlidingLog,
    Slots, TokenBucket,
    key::{self, ClientAddr, ClientIp, ClientIpSource, Extractor, Ip, KeyError, Path, PeerAddr, UnixPeer},
    limit::Calendar,
    response::{Grpc, Problem, Rejection, ResponseFormat},
    store::{
        Charge, ChargeState, ErrorKind, LeaseId, NodeState, NodeStatus, Operation, Outcome, Override, Overrides, Store,
        StoreError, StoreFuture, StoreId, StoreRequest, StoreResponse, StoreStatus,
    },
};

use crate::support::{get, send};

fn shared<T: Clone + Debug + Send + Sync + 'static>() {}
fn error<T: std::error::Error + Send + Sync + 'static>() {}
fn borrowed<T: Copy + Debug + Send + Sync>() {}
fn extractor<T: KeyExtractor + Clone + Debug>(_: T) {}
fn held<T: Debug + Send + Sync>() {}
fn sent<T: Debug + Send>() {}
fn moved<T: Unpin>() {}

#[test]
fn public_types_are_shared_and_cloned() {
    shared::<Admin>();
    shared::<ApplicationClient>();
    shared::<ClientAddr>();
    shared::<ClientLibrary>();
    shared::<Credentials>();
    shared::<Decision>();
    shared::<Denial>();
    shared::<Denied>();
    shared::<FailureMode>();
    shared::<Grpc>();
    shared::<Headers>();
    shared::<Key>();
    shared::<Limiter>();
    shared::<ManualClock>();
    shared::<MemoryStore>();
    shared::<Override>();
    shared::<Overrides>();
    shared::<PeerAddr>();
    shared::<Plans>();
    shared::<Policies>();
    shared::<Policy>();
    shared::<Policy<()>>();
    shared::<PolicyDecision>();
    shared::<Problem>();
    shared::<RateLimit<String>>();
    shared::<RateLimitLayer>();
    shared::<RedisStore>();
    shared::<RedisStoreBuilder>();
    shared::<UnixPeer>();
    borrowed::<Completion<'_>>();
    borrowed::<Rejection<'_>>();
}

#[test]
fn limits_are_shared_and_cloned() {
    shared::<Ban>();
    shared::<Calendar>();
    shared::<Concurrency>();
    shared::<FixedWindow>();
    shared::<Limit>();
    shared::<SlidingCounter>();
    shared::<SlidingLog>();
    shared::<TokenBucket>();
}

#[test]
fn what_a_store_takes_and_gives_is_shared_and_cloned() {
    shared::<ChargeState>();
    shared::<ErrorKind>();
    shared::<LeaseId>();
    shared::<Operation>();
    shared::<Outcome>();
    shared::<StoreError>();
    shared::<StoreId>();
    shared::<StoreResponse>();
    shared::<StoreStatus>();
    shared::<NodeStatus>();
    shared::<NodeState>();
    borrowed::<Charge<'_>>();
    borrowed::<StoreRequest<'_>>();
    sent::<StoreFuture>();
    held::<MemoryStoreBuilder>();
}

#[test]
fn what_a_request_holds_is_sent_and_printed() {
    held::<LimiterRequest<'_>>();
    held::<Receipt>();
    held::<Slots>();
}

#[test]
fn errors_go_into_a_box() {
    error::<AcquireError>();
    error::<ConfigError>();
    error::<ConnectError>();
    error::<Denied>();
    error::<KeyError>();
    error::<StoreError>();
}

#[test]
fn extractors_are_cloned_and_printed() {
    extractor(key::constant("all"));
    extractor(key::extension("user", String::clone));
    extractor(key::from_fn(|parts| parts.method.to_string()));
    extractor(key::header("x-user-id"));
    extractor(key::header("x-user-id").or(key::ip()));
    extractor(key::ip());
    extractor(key::method());
    extractor(key::path());
    extractor(key::route());

    shared::<ClientIp>();
    shared::<ClientIpSource>();
    shared::<Extractor>();
    shared::<Ip>();
    shared::<Path>();
}

#[test]
fn traits_are_for_objects() {
    fn is<T: ?Sized>() {}
    is::<dyn KeyExtractor>();
    is::<dyn ResponseFormat>();
    is::<dyn Store>();

    // Shared objects are what they share.
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let extractor: Arc<dyn KeyExtractor> = Arc::new((key::ip(), key::path()));
    let policy = Policy::new("p", SlidingLog::per_minute(5)).key(extractor);
    let _ = RateLimitLayer::new(store, policy);
}

#[tokio::test]
async fn a_boxed_store_shares_its_counts_with_the_store() {
    let counts = MemoryStore::new();
    let boxed = || -> Box<dyn Store> { Box::new(counts.clone()) };
    let shared: Arc<dyn Store> = Arc::new(counts.clone());
    let policy = || Policy::new("p", SlidingLog::per_minute(9)).key(key::constant("all"));
    assert_eq!((boxed().id(), shared.id()), (counts.id(), counts.id()));

    // The policy that both layers have in common is charged once.
    let layer = RateLimitLayer::new(boxed(), policy());
    let app = Router::new()
        .route("/", route(async || "hi").layer(layer.clone()))
        .layer(layer);
    assert_eq!(send(&app, get("/")).await.field("ratelimit"), Some("\"p\";r=8;t=60"));
    let layer = RateLimitLayer::new(shared.clone(), policy());
    let app = Router::new().route("/", route(async || "hi").layer(layer));
    assert_eq!(send(&app, get("/")).await.field("ratelimit"), Some("\"p\";r=7;t=60"));

    let all = Key::constant("all");
    for (limiter, remaining) in [
        (Limiter::new(boxed(), policy()), 6),
        (Limiter::new(shared, policy()), 5),
    ] {
        assert_eq!(
            limiter.check(all.clone()).await.expect("memory replies").remaining(),
            remaining
        );
    }
}

#[test]
fn the_future_and_the_body_are_sent_where_those_of_the_service_are() {
    sent::<ResponseFuture<String, String, std::future::Ready<()>>>();
    sent::<ResponseBody<String>>();
}

#[test]
fn what_is_polled_is_moved_where_that_of_the_service_is() {
    moved::<RateLimit<String>>();
    moved::<RateLimitLayer>();
    moved::<ResponseBody<String>>();
    moved::<ResponseFuture<String, String, std::future::Ready<()>>>();
    moved::<StoreFuture>();
}

#[test]
fn what_is_printed_for_debugging_names_the_type_or_its_value() {
    let store = MemoryStore::new();
    let error = StoreError::new(ErrorKind::Timeout, "no reply");
    let future: StoreFuture = store.decide(&[]);
    let printed: [(&dyn Debug, &str); 10] = [
        (&store, "MemoryStore"),
        (&MemoryStore::builder(), "MemoryStoreBuilder"),
        (&error, "no reply"),
        (&Key::header("x-user-id", "secret"), "Key"),
        (&RedisStore::builder(), "RedisStoreBuilder"),
        (&future, "Ready(Ok("),
        (&LeaseId::random(), "LeaseId("),
        (&key::extension("user", |user: &u32| user.to_string()), "ext:user=.."),
        (&key::from_fn(|_| 7_u64), "key=.."),
        (&key::ip(), "Ip"),
    ];
    for (value, text) in printed {
        assert!(format!("{value:?}").contains(text), "{value:?}");
    }
}
