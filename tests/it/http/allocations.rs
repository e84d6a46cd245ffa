//! The allocations that the layer adds to a request, as its docs state.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    pin::pin,
    task::{Context, Poll, Waker},
};

use allocation_counter::measure;
use http::{HeaderValue, Request, Response, StatusCode, header::CONTENT_TYPE};
use http_body_util::Empty;
use tower::{Layer, Service};
use tower_quota::{Headers, MemoryStore, Policy, RateLimitLayer, SlidingLog, key, store::Store};

use crate::support::{Later, get};

type Body = Empty<bytes::Bytes>;

/// A service that responds at once, with a header field or without any.
#[derive(Clone)]
struct Bare {
    content_type: Option<HeaderValue>,
}

const SILENT: Bare = Bare { content_type: None };

impl Service<Request<Body>> for Bare {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        let mut response = Response::new(Body::new());
        if let Some(content_type) = self.content_type.clone() {
            response.headers_mut().insert(CONTENT_TYPE, content_type);
        }
        ready(Ok(response))
    }
}

fn layer(store: impl Store, limit: impl Into<tower_quota::Limit>) -> RateLimitLayer {
    RateLimitLayer::new(store, Policy::new("hello", limit).key(key::ip()))
}

fn call<S, B>(service: &mut S, request: Request<Body>) -> StatusCode
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    let mut cx = Context::from_waker(Waker::noop());
    let mut future = pin!(service.call(request));
    loop {
        if let Poll::Ready(Ok(response)) = future.as_mut().poll(&mut cx) {
            return response.status();
        }
    }
}

fn allocations_of<S, B>(mut service: S, answered: StatusCode) -> u64
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    let request = || get("/").body(Body::new()).expect("a good request");
    // The first request of a caller finds nothing stored, and a log grows by doubling.
    for _ in 0..20 {
        call(&mut service, request());
    }
    let request = request();
    let mut status = None;
    let allocations = measure(|| status = Some(call(&mut service, request)));
    assert_eq!(status, Some(answered));
    allocations.count_total
}

/// What a layer around a service adds.
fn added(layer: &RateLimitLayer, bare: Bare, answered: StatusCode) -> u64 {
    let with = allocations_of(layer.layer(bare.clone()), answered);
    with - allocations_of(bare, StatusCode::OK)
}

#[test]
fn an_admitted_request_allocates_four_times_and_with_the_decision_in_the_response_seven() {
    let layer = layer(MemoryStore::new(), SlidingLog::per_hour(1_000));
    assert_eq!(added(&layer, SILENT, StatusCode::OK), 4);
    assert_eq!(added(&layer.response_extensions(true), SILENT, StatusCode::OK), 7);
}

#[test]
fn a_response_that_has_header_fields_needs_two_allocations_less() {
    let layer = layer(MemoryStore::new(), SlidingLog::per_hour(1_000));
    let html = Bare {
        content_type: Some(HeaderValue::from_static("text/html")),
    };
    assert_eq!(added(&layer, html, StatusCode::OK), 2);
}

#[test]
fn without_header_fields_an_admitted_request_allocates_twice() {
    let layer = layer(MemoryStore::new(), SlidingLog::per_hour(1_000)).headers(Headers::None);
    assert_eq!(added(&layer, SILENT, StatusCode::OK), 2);
}

#[test]
fn without_extensions_an_admitted_request_allocates_three_times_and_without_header_fields_once() {
    let layer = layer(MemoryStore::new(), SlidingLog::per_hour(1_000)).extensions(false);
    assert_eq!(added(&layer, SILENT, StatusCode::OK), 3);
    assert_eq!(added(&layer.headers(Headers::None), SILENT, StatusCode::OK), 1);
}

#[test]
fn a_limit_that_is_chosen_for_each_request_allocates_nothing_more() {
    let by_path = Policy::with_limit_fn("hello", |parts| match parts.uri.path() {
        "/" => SlidingLog::per_hour(1_000),
        _ => SlidingLog::per_hour(100),
    });
    let layer = RateLimitLayer::new(MemoryStore::new(), by_path.key(key::ip()));
    assert_eq!(added(&layer, SILENT, StatusCode::OK), 4);
}

#[test]
fn a_store_that_replies_later_adds_its_future_and_what_waits_for_it() {
    let layer = layer(Later(MemoryStore::new()), SlidingLog::per_hour(1_000));
    assert_eq!(added(&layer, SILENT, StatusCode::OK), 6);
}

#[test]
fn a_policy_that_depends_on_the_completion_adds_one_allocation_and_a_refund_none() {
    let policy = Policy::new("hello", SlidingLog::per_hour(1_000)).key(key::ip());
    let kept = RateLimitLayer::new(
        MemoryStore::new(),
        policy.clone().refund_if(|completion| completion.is_error()),
    );
    assert_eq!(added(&kept, SILENT, StatusCode::OK), 5);
    let refunded = RateLimitLayer::new(
        MemoryStore::new(),
        policy.refund_if(|completion| completion.is_success()),
    );
    assert_eq!(added(&refunded, SILENT, StatusCode::OK), 5);
}

#[test]
fn a_denied_request_allocates_four_times() {
    let layer = layer(MemoryStore::new(), SlidingLog::per_hour(1));
    assert_eq!(added(&layer, SILENT, StatusCode::TOO_MANY_REQUESTS), 4);
}

#[test]
fn without_extensions_a_denied_request_allocates_three_times() {
    let layer = layer(MemoryStore::new(), SlidingLog::per_hour(1)).extensions(false);
    assert_eq!(added(&layer, SILENT, StatusCode::TOO_MANY_REQUESTS), 3);
}
