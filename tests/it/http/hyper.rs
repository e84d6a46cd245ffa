//! The layer on a bare hyper server, whose accept loop sets the peer address.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use tower::{Layer, service_fn};
use tower_quota::{Policy, RateLimitLayer, SlidingLog, key};

use crate::support::{Browser, Clock, serve_by_hyper};

async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("hi")))
}

/// Serves two a minute for each address, and returns the URL.
async fn serve(clock: &Clock) -> String {
    let policy = Policy::new("say-hi", SlidingLog::per_minute(2)).key((key::ip(), key::path()));
    let service = RateLimitLayer::new(clock.memory_store(), policy).layer(service_fn(hello));

    serve_by_hyper(service).await
}

async fn two_pass_and_the_third_is_denied(browser: Browser) {
    let clock = Clock::new();
    let url = serve(&clock).await;

    for fields in ["\"say-hi\";r=1;t=60", "\"say-hi\";r=0;t=60"] {
        let admitted = browser.get(&url).await;
        assert_eq!(admitted.status, StatusCode::OK);
        assert_eq!(admitted.field("ratelimit"), Some(fields));
        assert_eq!(admitted.body, "hi");
    }

    let denied = browser.get(&url).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.field("retry-after"), Some("60"));
    assert_eq!(denied.json()["violated-policies"], serde_json::json!(["say-hi"]));
    assert_eq!(denied.field("content-length"), Some(&*denied.body.len().to_string()));

    let to_head = browser.head(&url).await;
    assert_eq!(to_head.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(to_head.body.is_empty());
    assert_eq!(to_head.field("content-length"), denied.field("content-length"));

    clock.advance(Duration::from_secs(60));
    assert_eq!(
        browser.get(&url).await.status,
        StatusCode::OK,
        "the connection is as good as before"
    );
}

#[tokio::test]
async fn two_pass_and_the_third_is_denied_over_http1() {
    two_pass_and_the_third_is_denied(Browser::http1()).await;
}

#[tokio::test]
async fn two_pass_and_the_third_is_denied_over_http2() {
    two_pass_and_the_third_is_denied(Browser::http2()).await;
}

#[tokio::test]
async fn two_connections_of_one_address_share_its_count() {
    let url = serve(&Clock::new()).await;
    for status in [200, 200, 429] {
        assert_eq!(Browser::http1().get(&url).await.status, status);
    }
}
