//! What every public type can do: be shared, be cloned, be a trait object.

use std::{fmt::Debug, sync::Arc};

use axum::{Router, routing::get as route};

use tower_quota::{
    Admin, Ban, ClientLibrary, Completion, Concurrency, ConfigError, Decision, Denied, DrainBody, DrainBodyFuture,
    DrainBodyLayer, FailureMode, Headers, Key, KeyExtractor, Keyed, Limit, Limiter, MemoryStore, Policy,
    PolicyDecision, RateLimit, RateLimitLayer, RedisStore, RedisStoreBuilder, ResponseBody, ResponseFuture, SlidingLog,
    Slots, Unkeyed,
    key::{self, KeyError, PeerAddr},
    limit::PolicyLimit,
    response::{Problem, ResponseFormat},
    store::{
        Charge, ChargeState, ErrorKind, LeaseId, Operation, Outcome, Store, StoreError, StoreFuture, StoreId,
        StoreRequest, StoreResponse, StoreStatus,
    },
};

use crate::support::{get, send};

fn shared<T: Clone + Debug + Send + Sync + 'static>() {}
fn error<T: std::error::Error + Send + Sync + 'static>() {}
fn borrowed<T: Copy + Debug + Send + Sync>() {}
fn extractor<T: KeyExtractor + Clone + Debug>(_: T) {}
fn sent<T: Send>() {}

#[test]
fn public_types_are_shared_and_cloned() {
    shared::<Admin>();
    shared::<Ban>();
    shared::<ClientLibrary>();
    shared::<Decision>();
    shared::<Denied>();
    shared::<DrainBody<String>>();
    shared::<DrainBodyLayer>();
    shared::<FailureMode>();
    shared::<Headers>();
    shared::<Key>();
    shared::<Limit>();
    shared::<Limiter>();
    shared::<MemoryStore>();
    shared::<PeerAddr>();
    shared::<Policy>();
    shared::<Policy<Keyed>>();
    shared::<Policy<Unkeyed>>();
    shared::<PolicyDecision>();
    shared::<PolicyLimit>();
    shared::<Problem>();
    shared::<RateLimit<String>>();
    shared::<RateLimitLayer>();
    shared::<RedisStore>();
    shared::<RedisStoreBuilder>();
    shared::<SlidingLog>();
}

#[test]
fn what_a_store_takes_and_gives_is_shared_and_cloned() {
    shared::<StoreResponse>();
    shared::<ErrorKind>();
    shared::<Operation>();
    shared::<Outcome>();
    shared::<StoreError>();
    shared::<StoreId>();
    shared::<StoreStatus>();
    shared::<ChargeState>();
    borrowed::<Charge<'_>>();
    borrowed::<Completion<'_>>();
    borrowed::<StoreRequest<'_>>();
    sent::<StoreFuture>();
    sent::<Slots>();
    shared::<LeaseId>();
    shared::<Concurrency>();
}

#[test]
fn errors_go_into_a_box() {
    error::<ConfigError>();
    error::<KeyError>();
    error::<Denied>();
    error::<StoreError>();
}

#[test]
fn extractors_are_cloned_and_printed() {
    extractor(key::constant("all"));
    extractor(key::extension::<String>(String::clone));
    extractor(key::from_fn(|parts| parts.method.to_string()));
    extractor(key::header("x-user-id"));
    extractor(key::header("x-user-id").or(key::ip()));
    extractor(key::ip());
    extractor(key::method());
    extractor(key::path());
    extractor(key::route());
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
    sent::<DrainBodyFuture<String, String, std::future::Ready<()>>>();
    sent::<ResponseBody<String>>();
}
