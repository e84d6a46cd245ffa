//! What the page of the example loads and calls.

#[path = "../hello.rs"]
#[allow(dead_code)]
mod hello;

use std::net::SocketAddr;

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::ConnectInfo,
    http::{HeaderMap, Request, StatusCode, header::CONTENT_SECURITY_POLICY},
};
use tower::ServiceExt;
use tower_quota::MemoryStore;

const FILES: [&str; 3] = ["/", "/hello.css", "/hello.js"];

fn app() -> Router {
    hello::app(MemoryStore::new())
}

async fn get(app: &Router, path: &str) -> (HeaderMap, String) {
    let peer = SocketAddr::from(([127, 0, 0, 1], 40_000));
    let request = Request::get(path).extension(ConnectInfo(peer)).body(Body::empty());
    let response = app
        .clone()
        .oneshot(request.expect("a request"))
        .await
        .expect("infallible");
    assert_eq!(response.status(), StatusCode::OK, "{path}");
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, usize::MAX).await.expect("a body");
    (parts.headers, String::from_utf8(body.to_vec()).expect("text"))
}

#[tokio::test]
async fn the_page_allows_only_its_own_files() {
    for path in FILES {
        let (headers, _) = get(&app(), path).await;
        let policy = headers[CONTENT_SECURITY_POLICY].to_str().expect("text");
        let directives: Vec<_> = policy.split("; ").collect();
        assert!(directives.contains(&"default-src 'none'"), "{path}: {policy}");
        for directive in directives {
            let (_, source) = directive.split_once(' ').expect("a source");
            assert!(["'none'", "'self'"].contains(&source), "{path}: {directive}");
        }
    }
}

#[tokio::test]
async fn the_page_names_no_other_server() {
    for path in FILES {
        let (_, text) = get(&app(), path).await;
        // The name of a format, which is not loaded.
        let text = text.replace("http://www.w3.org/2000/svg", "");
        for part in ["://", "\"//", "'//", "url(", "@import", " style=", " onclick="] {
            assert!(!text.contains(part), "{path} has `{part}`");
        }
    }
}

#[tokio::test]
async fn each_algorithm_of_the_page_has_the_same_quota() {
    let app = app();
    let (_, page) = get(&app, "/").await;
    let paths: Vec<_> = page
        .split("data-path=\"")
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
        .collect();
    let [say_hi, algorithms @ ..] = &paths[..] else {
        panic!("the page has no route")
    };
    assert_eq!(*say_hi, "/hello/sayHi");
    assert_eq!(algorithms.len(), 4);

    for path in algorithms {
        let (headers, _) = get(&app, path).await;
        let name = path.strip_prefix("/hello/").expect("a route of the example");
        assert_eq!(headers["ratelimit-policy"], format!("\"{name}\";q=4;w=10"));
    }
}
