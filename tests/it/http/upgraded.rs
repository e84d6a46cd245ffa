//! A slot that a handler takes is held for as long as the connection that the request was upgraded to.

use std::future::pending;

use axum::{
    Router,
    body::Body,
    extract::Request,
    routing::{any, get},
};
use http::{Method, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy, split},
    net::TcpStream,
};
use tower::ServiceExt;
use tower_quota::{Concurrency, Decision, MemoryStore, Policy, RateLimitLayer, key};

use crate::support::{Log, Redis, connected, eventually, patient, serve};

/// Echoes what the upgraded connection receives.
async fn echo(decision: Decision, request: Request) -> Response<Body> {
    let slots = decision.take_slots();
    tokio::spawn(async move {
        let upgraded = hyper::upgrade::on(request).await.expect("the client upgrades");
        let (mut received, mut sent) = split(TokioIo::new(upgraded));
        let _ = copy(&mut received, &mut sent).await;
        drop(slots);
    });
    let response = Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header("connection", "upgrade")
        .header("upgrade", "echo");
    response.body(Body::empty()).expect("a response")
}

/// A connection, and the head of the response to its request.
async fn connect(address: &str) -> (TcpStream, String) {
    let mut connection = TcpStream::connect(address).await.expect("the server listens");
    let request = "GET /echo HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
    connection.write_all(request.as_bytes()).await.expect("it is read");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(connection.read_u8().await.expect("a response"));
    }
    (connection, String::from_utf8(head).expect("text"))
}

#[tokio::test]
async fn a_slot_is_held_until_an_upgraded_connection_ends() {
    let redis = Redis::start();
    let sockets = Policy::new("sockets", Concurrency::new(1)).key(key::constant("all"));
    let layer = RateLimitLayer::new(connected(patient(), &redis.url()).await, sockets);
    let url = serve(Router::new().route("/echo", get(echo).layer(layer))).await;
    let address = url.trim_start_matches("http://");

    let (mut first, head) = connect(address).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    first.write_all(b"ping").await.expect("the connection is open");
    let mut echoed = [0; 4];
    first.read_exact(&mut echoed).await.expect("an echo");
    assert_eq!(&echoed, b"ping");
    let (_, head) = connect(address).await;
    assert!(head.starts_with("HTTP/1.1 429 "), "{head}");

    drop(first);
    eventually("the slot is free", async || {
        connect(address).await.1.starts_with("HTTP/1.1 101 ")
    })
    .await;
}

/// The response that opens a connection: 101, and 200 to the CONNECT of a WebSocket in HTTP/2.
fn opened(method: &Method) -> StatusCode {
    match *method {
        Method::CONNECT => StatusCode::OK,
        _ => StatusCode::SWITCHING_PROTOCOLS,
    }
}

/// A response that opens none.
fn ended(method: &Method) -> StatusCode {
    match *method {
        Method::CONNECT => StatusCode::BAD_REQUEST,
        _ => StatusCode::OK,
    }
}

#[tokio::test]
async fn the_first_upgraded_connection_without_its_slots_is_logged() {
    for method in [Method::GET, Method::CONNECT] {
        let sockets = |name| Policy::new(name, Concurrency::new(9)).key(key::constant("all"));
        let layer = RateLimitLayer::new(MemoryStore::new(), [sockets("one"), sockets("two")]);
        let forgets = async |method: Method| opened(&method);
        let takes = async |decision: Decision, method: Method| {
            let slots = decision.take_slots();
            tokio::spawn(async move {
                let () = pending().await;
                drop(slots);
            });
            opened(&method)
        };
        let app = Router::new()
            .route("/takes", any(takes))
            .route("/forgets", any(forgets))
            .route("/ends", any(async |method: Method| ended(&method)))
            .layer(layer);
        let log = Log::capture();
        for path in ["/takes", "/ends", "/forgets", "/forgets"] {
            let request = Request::builder().method(&method).uri(path).body(Body::empty());
            let response = app.clone().oneshot(request.expect("a request")).await;
            let status = response.expect("a response").status();
            let answered = if path == "/ends" { ended } else { opened };
            assert_eq!(status, answered(&method), "{method} {path}");
            let expected = usize::from(path == "/forgets");
            let text = log.text();
            assert_eq!(
                text.matches("`Decision::take_slots`").count(),
                expected,
                "{method} {path}: {text}"
            );
            assert_eq!(
                text.matches(r#"["one", "two"]"#).count(),
                expected,
                "{method} {path}: {text}"
            );
        }
    }
}
