//! Layers of axum that name the type of what they wrap, outside of a rate limit layer.

use std::convert::Infallible;

use axum::{Router, body::Body, middleware::map_response, response::Response, routing::get as route};
use tower::ServiceBuilder;
use tower_http::map_response_body::MapResponseBodyLayer;
use tower_quota::{MemoryStore, Policy, RateLimitLayer, ResponseBody, SlidingLog, key};

use crate::support::{get, send};

fn limit() -> RateLimitLayer {
    let hello = Policy::new("hello", SlidingLog::per_hour(1)).key(key::constant("all"));
    RateLimitLayer::new(MemoryStore::new(), hello)
}

async fn stamp<B>(mut response: Response<B>) -> Response<B> {
    response.headers_mut().insert("x-stamp", 1.into());
    response
}

async fn stamp_of_axum(response: Response) -> Response {
    stamp(response).await
}

async fn stamp_of_limit(response: Response<ResponseBody<Body>>) -> Response<ResponseBody<Body>> {
    stamp(response).await
}

#[tokio::test]
async fn a_response_is_mapped_around_the_layer_in_each_of_the_documented_ways() {
    let to_axum = MapResponseBodyLayer::new(Body::new::<ResponseBody<Body>>);
    for app in [
        Router::new().layer((map_response(stamp_of_axum), to_axum.clone(), limit())),
        Router::new().layer((map_response(stamp_of_limit), limit())),
        Router::new().layer(limit()).layer(map_response(stamp_of_axum)),
        Router::new().route("/", route(async || "hi")).layer(
            ServiceBuilder::new()
                .layer(map_response(stamp_of_axum))
                .layer(to_axum)
                .layer(limit()),
        ),
    ] {
        for status in [404, 429] {
            let received = send(&app, get("/other")).await;
            assert_eq!(
                (received.status.as_u16(), received.field("x-stamp")),
                (status, Some("1"))
            );
        }
    }
}

#[tokio::test]
async fn layers_of_one_route_are_chained_if_the_error_of_all_but_the_last_is_named() {
    let chained = route(async || "hi")
        .layer::<_, Infallible>(limit())
        .layer::<_, Infallible>(map_response(stamp_of_axum))
        .layer(limit());
    let app: Router = Router::new().route("/", chained);
    for status in [200, 429] {
        assert_eq!(send(&app, get("/")).await.status, status);
    }

    let to_axum = MapResponseBodyLayer::new(Body::new::<ResponseBody<Body>>);
    let in_a_tuple = route(async || "hi").layer((limit(), map_response(stamp_of_axum), to_axum, limit()));
    let app: Router = Router::new().route("/", in_a_tuple);
    for status in [200, 429] {
        assert_eq!(send(&app, get("/")).await.status, status);
    }
}
