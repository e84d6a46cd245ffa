//! Layers around clients, which learn from the responses of a server when it asks for a pause.

use std::{
    convert::Infallible,
    env,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, routing};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, uri::PathAndQuery};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, Empty, StreamBody};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::{
    net::TcpListener,
    time::{Instant, sleep},
};
use tonic::{
    client,
    server::NamedService,
    transport::{Endpoint, Server, server::TcpIncoming},
};
use tonic_prost::ProstCodec;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    Ban, Decision, Denial, FailureMode, Headers, Key, Limiter, ManualClock, MemoryStore, Policy, RateLimitLayer,
    SlidingLog, key, response, store::Store,
};

use crate::{
    examples::client as fleet,
    support::{Bench, Broken, Clock, Log, Redis, connected, eventually, patient},
};

type Body = Empty<Bytes>;

const HOUR: Duration = Duration::from_secs(3_600);

fn policy() -> Policy {
    let policy = Policy::new("api", SlidingLog::per_hour(1_000)).key(key::constant("token"));
    policy.learn_from_responses()
}

fn around(store: impl Store, policy: Policy) -> RateLimitLayer {
    RateLimitLayer::new(store, policy)
        .headers(Headers::None)
        .response_extensions(true)
}

/// A server in this process that responds like this.
fn server(
    status: u16,
    fields: &'static [(&'static str, &'static str)],
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone + Send {
    service_fn(move |_: Request<Body>| async move {
        let mut response = Response::new(Body::new());
        *response.status_mut() = StatusCode::from_u16(status).expect("a status");
        for (name, value) in fields {
            let (name, value) = (HeaderName::from_static(name), HeaderValue::from_static(value));
            response.headers_mut().append(name, value);
        }
        Ok(response)
    })
}

fn request() -> Request<Body> {
    Request::new(Body::new())
}

/// The wait of a denial by the layer, if it denies.
fn wait<B>(response: &Response<B>) -> Option<Duration> {
    let decision = response.extensions().get::<Decision>().expect("a decision");
    let policy = decision.policies().next().expect("a policy");
    assert!(decision.is_allowed() || policy.denial() == Some(Denial::Banned));
    decision.retry_after()
}

/// The pause that the decision of a response has.
fn pause<B>(response: &Response<B>) -> Option<Duration> {
    let decision = response.extensions().get::<Decision>().expect("a decision");
    decision.requested_pause()
}

/// The pause after a response.
async fn learnt(
    layer: &RateLimitLayer,
    status: u16,
    fields: &'static [(&'static str, &'static str)],
) -> Option<Duration> {
    let client = layer.layer(server(status, fields));
    let sent = client.clone().oneshot(request()).await.expect("infallible");
    assert_eq!((sent.status().as_u16(), wait(&sent)), (status, None), "it was sent");
    let next = client.oneshot(request()).await.expect("infallible");
    let denied = wait(&next);
    assert_eq!(pause(&sent).is_some(), denied.is_some(), "the decision has the pause");
    denied
}

#[tokio::test]
async fn each_response_that_asks_for_a_pause_begins_one() {
    for (status, fields, seconds) in [
        (429, &[("retry-after", "30")][..], Some(30)),
        (429, &[("ratelimit", "\"a\";r=0;t=7, \"b\";r=1;t=90")], Some(7)),
        (429, &[("ratelimit", "limit=10, remaining=0, reset=7")], Some(7)),
        (429, &[], Some(1)),
        (429, &[("retry-after", "0")], None),
        (429, &[("retry-after", "86400")], Some(3_600)),
        (429, &[("retry-after", "99999999999999999999999")], Some(3_600)),
        (503, &[("retry-after", "30")], Some(30)),
        (503, &[], None),
        (403, &[("retry-after", "30")], None),
        (200, &[("ratelimit", "\"a\";r=0;t=7")], Some(7)),
        (200, &[("ratelimit", "\"a\";r=1;t=7")], None),
        (404, &[("ratelimit", "limit=10, remaining=0, reset=7")], Some(7)),
        (
            200,
            &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "7")],
            Some(7),
        ),
        (
            200,
            &[
                ("x-ratelimit-remaining-requests", "0"),
                ("x-ratelimit-reset-requests", "6m0s"),
            ],
            Some(360),
        ),
        (
            200,
            &[
                ("grpc-status", "8"),
                ("grpc-retry-pushback-ms", "7000"),
                ("content-type", "application/grpc"),
            ],
            Some(7),
        ),
    ] {
        let store = MemoryStore::builder().manual_clock(&ManualClock::new()).build();
        let layer = around(store, policy());
        let expected = seconds.map(Duration::from_secs);
        assert_eq!(learnt(&layer, status, fields).await, expected, "{status} {fields:?}");
        let store = MemoryStore::builder().manual_clock(&ManualClock::new()).build();
        let client = around(store, policy()).layer(server(status, fields));
        let sent = client.oneshot(request()).await.expect("infallible");
        assert_eq!(
            pause(&sent).map(|pause| pause.min(HOUR)),
            expected,
            "{status} {fields:?}"
        );
        assert_eq!(layer.lost_settlements(), 0);
    }
}

#[tokio::test]
async fn a_policy_that_does_not_learn_and_one_of_another_key_are_not_banned() {
    let store = || MemoryStore::builder().manual_clock(&ManualClock::new()).build();
    let plain = Policy::new("api", SlidingLog::per_hour(9)).key(key::constant("token"));
    let silent = around(store(), plain.clone());
    let client = silent.layer(server(429, &[("retry-after", "30")]));
    for _ in 0..3 {
        assert_eq!(
            wait(&client.clone().oneshot(request()).await.expect("infallible")),
            None
        );
    }

    let by_path = Policy::new("api", SlidingLog::per_hour(9))
        .key(key::path())
        .learn_from_responses();
    let client = around(store(), by_path).layer(server(429, &[("retry-after", "30")]));
    for (path, expected) in [("/a", None), ("/a", Some(30)), ("/b", None), ("/b", Some(30))] {
        let request = Request::get(path).body(Body::new()).expect("a good request");
        let response = client.clone().oneshot(request).await.expect("infallible");
        assert_eq!(wait(&response), expected.map(Duration::from_secs), "{path}");
    }
}

#[tokio::test]
async fn the_fields_of_an_inner_layer_on_an_admitted_response_teach_nothing() {
    let inner = Policy::new("inner", SlidingLog::per_hour(1)).key(key::path());
    let inner = RateLimitLayer::new(MemoryStore::new(), inner);
    let client = around(MemoryStore::new(), policy()).layer(inner.layer(server(200, &[])));
    for path in ["/a", "/b", "/c"] {
        let request = Request::get(path).body(Body::new()).expect("a good request");
        let response = client.clone().oneshot(request).await.expect("infallible");
        assert_eq!(response.headers()["ratelimit"], "\"inner\";r=0;t=3600");
        assert_eq!((wait(&response), pause(&response)), (None, None), "{path}");
    }
}

#[tokio::test]
async fn only_the_fields_that_no_inner_layer_has_added_are_read() {
    let layer = || {
        let policy = Policy::new("inner", SlidingLog::per_hour(1)).key(key::constant("all"));
        RateLimitLayer::new(MemoryStore::new(), policy)
    };
    let (none, silent) = (
        || RateLimitLayer::new(MemoryStore::new(), vec![]),
        || layer().headers(Headers::None),
    );
    let observing = || {
        let policy = Policy::new("inner", SlidingLog::per_hour(1)).key(key::constant("all"));
        RateLimitLayer::new(MemoryStore::new(), policy.observe_only())
    };
    let roomy = |headers| {
        let policy = Policy::new("inner", SlidingLog::per_hour(100)).key(key::constant("all"));
        RateLimitLayer::new(MemoryStore::new(), policy).headers(headers)
    };
    let legacy = &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "7")][..];
    let theirs = &[("ratelimit", "\"a\";r=0;t=7")][..];
    let earlier = &[("ratelimit", "limit=9, remaining=0, reset=7")][..];
    let redirect = &[("ratelimit", "\"a\";r=0;t=7"), ("location", "/")][..];
    for (layers, status, fields, seconds) in [
        ([layer(), none()], 429, &[][..], Some(1)),
        ([layer().extensions(false), none()], 429, &[], Some(1)),
        ([silent(), layer()], 429, &[], Some(1)),
        ([layer(), silent()], 429, &[], Some(1)),
        ([layer(), layer()], 429, &[("retry-after", "30")], Some(30)),
        ([layer(), none()], 200, theirs, None),
        ([silent(), layer()], 503, theirs, None),
        ([silent(), silent()], 429, theirs, Some(7)),
        ([silent(), silent()], 200, theirs, Some(7)),
        ([silent().extensions(false), none()], 200, theirs, Some(7)),
        ([observing(), none()], 200, theirs, Some(7)),
        // A redirect has no fields of layers.
        ([layer(), none()], 307, redirect, Some(7)),
        // The server has less left than the layer, whose fields are left out.
        ([roomy(Headers::LegacyDelta), none()], 200, legacy, Some(7)),
        (
            [roomy(Headers::LegacyDelta), roomy(Headers::Draft06)],
            200,
            legacy,
            None,
        ),
        (
            [roomy(Headers::Draft08.and(Headers::LegacyDelta)), none()],
            200,
            legacy,
            None,
        ),
        // Their field stays, since it is the dictionary of an earlier draft.
        ([roomy(Headers::Draft08), none()], 200, earlier, Some(7)),
        ([roomy(Headers::Draft07), none()], 200, earlier, Some(7)),
    ] {
        let case = format!("{status} {fields:?} {layers:?}");
        let [middle, inner] = layers;
        let client = middle.layer(inner.layer(server(status, fields)));
        let client = around(MemoryStore::new(), policy()).layer(client);
        let response = client.oneshot(request()).await.expect("infallible");
        assert_eq!(response.status().as_u16(), status, "{case}");
        assert_eq!(pause(&response), seconds.map(Duration::from_secs), "{case}");
    }
}

#[tokio::test]
async fn the_decision_of_nested_layers_has_the_pause_of_the_outer_one() {
    let plain = Policy::new("plain", SlidingLog::per_hour(1_000)).key(key::constant("token"));
    let (outer, inner) = (around(MemoryStore::new(), policy()), around(MemoryStore::new(), plain));
    let client = outer.layer(inner.layer(server(429, &[("retry-after", "30")])));
    let sent = client.oneshot(request()).await.expect("infallible");
    assert_eq!(pause(&sent), Some(Duration::from_secs(30)));
}

#[tokio::test]
async fn the_longest_pause_is_that_of_the_ban() {
    let store = MemoryStore::builder().manual_clock(&ManualClock::new()).build();
    let layer = around(store, policy().ban(Ban::by_hand().longest(2 * HOUR)));
    assert_eq!(learnt(&layer, 429, &[("retry-after", "86400")]).await, Some(2 * HOUR));
}

#[tokio::test]
async fn a_pause_of_a_policy_with_longer_pauses_is_observed() {
    for bench in [Bench::memory_store().await, Bench::redis_store().await] {
        let other = Policy::new("api", SlidingLog::per_hour(1_000)).ban(Ban::by_hand().longest(6 * HOUR));
        let other = Limiter::new(bench.store.clone(), other);
        let banned = other.ban(Key::constant("token"), 6 * HOUR).await;
        banned.expect("the store replies");
        let client = around(bench.store.clone(), policy()).layer(server(200, &[]));
        let unsent = client.oneshot(request()).await.expect("infallible");
        assert_eq!(wait(&unsent), Some(6 * HOUR));
    }
}

#[tokio::test]
async fn a_pause_ends_and_a_limiter_sees_and_lifts_it() {
    for bench in [Bench::memory_store().await, Bench::redis_store().await] {
        let layer = around(bench.store.clone(), policy());
        let limiter = Policy::new("api", SlidingLog::per_hour(1_000)).ban(Ban::by_hand());
        let limiter = Limiter::new(bench.store.clone(), limiter);
        let peek = async || {
            let peeked = limiter.peek(Key::constant("token")).await;
            peeked.expect("the store replies").retry_after()
        };
        for _ in 0..2 {
            let client = layer.layer(server(429, &[("retry-after", "30")]));
            let sent = client.oneshot(request()).await.expect("infallible");
            assert_eq!(wait(&sent), None);
            eventually("the pause is stored", async || {
                peek().await == Some(Duration::from_secs(30))
            })
            .await;
            bench.advance(Duration::from_secs(30)).await;
            assert_eq!(peek().await, None);
        }
        let client = layer.layer(server(429, &[("retry-after", "30")]));
        assert_eq!(wait(&client.oneshot(request()).await.expect("infallible")), None);
        eventually("the pause is stored", async || peek().await.is_some()).await;
        limiter.reset(Key::constant("token")).await.expect("the store replies");
        assert_eq!(peek().await, None);
    }
}

#[tokio::test(start_paused = true)]
async fn requests_that_wait_are_not_sent_during_a_pause() {
    let policy = Policy::new("api", SlidingLog::per_second(1)).key(key::constant("token"));
    let policy = policy.wait_up_to(Duration::from_secs(20)).learn_from_responses();
    let store = MemoryStore::new();
    let server = server(429, &[("retry-after", "30")]);
    let client = around(store.clone(), policy).layer(service_fn(move |request| {
        let server = server.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(500)).await;
            server.oneshot(request).await
        }
    }));

    let sent: Vec<_> = (0..5)
        .map(|_| tokio::spawn(client.clone().oneshot(request())))
        .collect();
    let mut waits = Vec::new();
    for response in sent {
        let response = response.await.expect("no panic").expect("infallible");
        waits.push(wait(&response).map(|wait| wait.as_secs()));
    }
    assert_eq!(waits, [None, Some(29), Some(29), Some(29), Some(29)], "one was sent");

    // Those that were not sent do not count.
    let limiter = Limiter::new(store, Policy::new("api", SlidingLog::per_second(1)));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(
        limiter
            .peek(Key::constant("token"))
            .await
            .expect("in memory")
            .remaining(),
        1
    );
}

#[tokio::test(start_paused = true)]
async fn requests_that_may_wait_wait_out_a_pause() {
    let policy = Policy::new("api", SlidingLog::per_second(1)).key(key::constant("token"));
    let policy = policy.wait_up_to(Duration::from_secs(32)).learn_from_responses();
    let sent = Arc::new(Mutex::new(Vec::new()));
    let (start, times) = (Instant::now(), sent.clone());
    let client = around(MemoryStore::new(), policy).layer(service_fn(move |_: Request<Body>| {
        let mut times = times.lock().expect("no panic");
        times.push(start.elapsed().as_secs());
        let response = match times.len() {
            1 => Response::builder().status(429).header("retry-after", "30"),
            _ => Response::builder(),
        };
        std::future::ready(Ok::<_, Infallible>(
            response.body(Body::new()).expect("a good response"),
        ))
    }));

    let first = client.clone().oneshot(request()).await.expect("infallible");
    assert_eq!((first.status(), wait(&first)), (StatusCode::TOO_MANY_REQUESTS, None));
    let later: Vec<_> = (0..5)
        .map(|_| tokio::spawn(client.clone().oneshot(request())))
        .collect();
    let mut statuses = Vec::new();
    for response in later {
        let response = response.await.expect("no panic").expect("infallible");
        let retry_after = response
            .headers()
            .get("retry-after")
            .map(|wait| wait.to_str().unwrap_or("").to_owned());
        statuses.push((response.status().as_u16(), retry_after));
    }
    // Three are admitted at 30, 31 and 32 s; the others are denied then.
    let denied = (429, Some("1".to_owned()));
    assert_eq!(
        statuses,
        [(200, None), (200, None), (200, None), denied.clone(), denied]
    );
    assert_eq!(*sent.lock().expect("no panic"), [0, 30, 31, 32]);
}

#[tokio::test]
async fn a_pause_longer_than_the_wait_denies_at_once() {
    for bench in [Bench::memory_store().await, Bench::redis_store().await] {
        let policy = policy().wait_up_to(Duration::from_secs(29));
        let client = around(bench.store.clone(), policy).layer(server(429, &[("retry-after", "30")]));
        assert_eq!(
            wait(&client.clone().oneshot(request()).await.expect("infallible")),
            None
        );
        eventually("the pause is stored", async || {
            wait(&client.clone().oneshot(request()).await.expect("infallible")) == Some(Duration::from_secs(30))
        })
        .await;
    }
}

#[tokio::test]
async fn denials_of_this_process_teach_nothing() {
    let store = MemoryStore::builder().manual_clock(&ManualClock::new()).build();
    let full = Policy::new("full", SlidingLog::per_day(1)).key(key::constant("all"));
    let inner = RateLimitLayer::new(MemoryStore::new(), full).layer(server(200, &[]));
    let client = around(store, policy()).layer(inner);
    for denied in [false, true, true] {
        let response = client.clone().oneshot(request()).await.expect("infallible");
        assert_eq!(response.status() == StatusCode::TOO_MANY_REQUESTS, denied);
        let decision = response.extensions().get::<Decision>().expect("a decision");
        assert!(
            decision
                .policies()
                .all(|policy| policy.denial() != Some(Denial::Banned))
        );
    }
}

#[tokio::test]
async fn a_failure_and_a_denial_without_extensions_of_an_inner_layer_teach_nothing() {
    let failing = Policy::new("failing", SlidingLog::per_day(1)).failure_mode(FailureMode::Closed);
    let full = Policy::new("full", SlidingLog::per_day(1));
    let hidden = response::axum(|_, _| StatusCode::TOO_MANY_REQUESTS);
    for (inner, status) in [
        (
            RateLimitLayer::new(MemoryStore::new(), Vec::<Policy>::new())
                .block(|_| true)
                .format(hidden),
            429,
        ),
        (
            RateLimitLayer::new(Broken::default(), failing.key(key::constant("all"))),
            503,
        ),
        (
            RateLimitLayer::new(MemoryStore::new(), full.key(key::constant("all"))).extensions(false),
            429,
        ),
    ] {
        let store = MemoryStore::builder().manual_clock(&ManualClock::new()).build();
        let client = around(store, policy()).layer(inner.layer(server(200, &[])));
        let mut last = StatusCode::OK;
        for _ in 0..3 {
            let response = client.clone().oneshot(request()).await.expect("infallible");
            let decision = response.extensions().get::<Decision>();
            let mut policies = decision.iter().flat_map(|decision| decision.policies());
            assert!(
                policies.all(|policy| policy.denial() != Some(Denial::Banned)),
                "{status}"
            );
            last = response.status();
        }
        assert_eq!(last, status);
    }
}

#[tokio::test]
async fn while_the_store_fails_this_process_bans_the_key_and_the_loss_is_counted() {
    let _log = Log::capture();
    let layer = around(Broken::default(), policy());
    let pause = learnt(&layer, 429, &[("retry-after", "30")]).await.expect("it learns");
    assert!(pause <= Duration::from_secs(30) && pause > Duration::ZERO);
    assert_eq!(layer.lost_settlements(), 1);
}

#[test]
fn a_limiter_refuses_a_policy_that_learns() {
    let error = Limiter::try_new(MemoryStore::new(), policy()).unwrap_err().to_string();
    for part in ["`.learn_from_responses()`", "`.ban(Ban::by_hand())`", "`ban`"] {
        assert!(error.contains(part), "{error}");
    }
}

/// A ban adds no request to the place of its process.
#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_a_pause_is_not_overtaken_after_a_reset() {
    let limit = SlidingLog::new(1, Duration::from_millis(100));
    let policy = Policy::new("api", limit).key(key::constant("token"));
    let policy = policy.learn_from_responses().wait_up_to(Duration::from_secs(30));
    let layer = around(MemoryStore::new(), policy);
    let (limiter, key) = (Limiter::from(&layer), || Key::constant("token"));
    let asks = layer.layer(server(503, &[("retry-after", "20")]));
    drop(asks.oneshot(request()).await.expect("infallible"));
    sleep(Duration::from_millis(2_500)).await;
    let waiting = tokio::spawn(layer.layer(server(200, &[])).oneshot(request()));
    sleep(Duration::from_millis(50)).await;
    let banned = limiter.peek(key()).await.expect("memory");
    assert_eq!(
        banned.policies().next().and_then(|policy| policy.denial()),
        Some(Denial::Banned)
    );
    limiter.reset(key()).await.expect("memory");
    let next = limiter.check(key()).await.expect("memory");
    assert!(!next.is_allowed(), "it comes behind the one that waits");
    let sent = waiting.await.expect("no panic").expect("infallible");
    assert_eq!(sent.status(), StatusCode::OK);
}

/// Two replicas, each with the client of hyper-util.
#[tokio::test]
async fn all_replicas_learn_from_the_response_to_one() {
    let (calls, redis) = (Arc::new(AtomicUsize::new(0)), Redis::start());
    let counter = calls.clone();
    let respond = async move || {
        counter.fetch_add(1, Ordering::Relaxed);
        (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "1800")])
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let uri = format!("http://{}/", listener.local_addr().expect("a bound port"));
    tokio::spawn(axum::serve(listener, Router::new().route("/", routing::get(respond))).into_future());

    let mut replicas = Vec::new();
    for _ in 0..2 {
        let layer = around(connected(patient(), &redis.url()).await, policy());
        replicas.push(layer.layer(Client::builder(TokioExecutor::new()).build_http::<Body>()));
    }
    let send = async |replica: usize| {
        let request = Request::get(&uri).body(Body::new()).expect("a good request");
        replicas[replica]
            .clone()
            .oneshot(request)
            .await
            .expect("the server responds")
    };
    assert_eq!(wait(&send(0).await), None);
    eventually("the pause is stored", async || {
        redis.command::<Vec<String>>("KEYS", ["*:ban:*"]).await == ["quota:1:ban:api:{const=token}"]
    })
    .await;
    for replica in [1, 0, 1, 0] {
        let response = send(replica).await;
        let pause = wait(&response).expect("it is not sent");
        assert!((1_000..=1_800).contains(&pause.as_secs()), "{pause:?}");
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[derive(Clone, PartialEq, prost::Message)]
struct Nothing {}

/// Ends each call with this status in the trailers.
#[derive(Clone)]
struct Exhausted(HeaderMap);

impl NamedService for Exhausted {
    const NAME: &'static str = "test.Exhausted";
}

impl<B> Service<Request<B>> for Exhausted {
    type Response = Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        let frames = [
            Ok::<_, Infallible>(Frame::data(Bytes::from_static(&[0; 5]))),
            Ok(Frame::trailers(self.0.clone())),
        ];
        let body = StreamBody::new(tokio_stream::iter(frames));
        let mut response = Response::new(tonic::body::Body::new(body));
        let content_type = HeaderValue::from_static("application/grpc");
        response.headers_mut().insert("content-type", content_type);
        std::future::ready(Ok(response))
    }
}

/// The trailers of a status with `RetryInfo`.
fn retry_in(wait: Duration) -> HeaderMap {
    let details = tonic_types::ErrorDetails::with_retry_info(Some(wait));
    let status = <tonic::Status as tonic_types::StatusExt>::with_error_details(
        tonic::Code::ResourceExhausted,
        "slow down",
        details,
    );
    let mut trailers = HeaderMap::new();
    status.add_header(&mut trailers).expect("good fields");
    trailers
}

#[tokio::test]
async fn a_channel_of_tonic_learns_from_trailers() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = Endpoint::try_from(format!("http://{}", listener.local_addr().expect("a bound port")));
    let exhausted = Exhausted(retry_in(Duration::from_secs(90)));
    let incoming = TcpIncoming::from(listener);
    tokio::spawn(Server::builder().add_service(exhausted).serve_with_incoming(incoming));

    let channel = endpoint
        .expect("a good address")
        .connect()
        .await
        .expect("the server listens");
    let channel = around(Clock::new().memory_store(), policy()).layer(channel);
    let call = async || {
        let mut client = client::Grpc::new(channel.clone());
        client.ready().await.expect("it is ready");
        let path = PathAndQuery::from_static("/test.Exhausted/Call");
        let request = tonic::Request::new(Nothing {});
        let ended = client
            .unary(request, path, ProstCodec::<Nothing, Nothing>::default())
            .await;
        ended.expect_err("it is exhausted")
    };
    assert_eq!(call().await.message(), "slow down");
    let denied = call().await;
    assert_eq!(
        (denied.code(), denied.message()),
        (tonic::Code::ResourceExhausted, "rate limit exceeded")
    );
    let details = tonic_types::StatusExt::get_details_retry_info(&denied);
    let wait = details.and_then(|info| info.retry_delay);
    assert_eq!(wait, Some(Duration::from_secs(90)));
}

#[tokio::test]
async fn the_longer_one_of_the_pauses_in_the_head_and_in_the_trailers_holds() {
    let without_wait = |status: &'static str| {
        let status = (HeaderName::from_static("grpc-status"), HeaderValue::from_static(status));
        HeaderMap::from_iter([status])
    };
    for (trailers, seconds) in [
        (retry_in(Duration::from_secs(5)), Some(60)),
        (retry_in(Duration::from_secs(90)), Some(90)),
        (retry_in(Duration::ZERO), Some(60)),
        (without_wait("8"), Some(60)),
        (without_wait("0"), Some(60)),
    ] {
        let store = MemoryStore::builder().manual_clock(&ManualClock::new()).build();
        let exhausted = ServiceExt::<Request<Body>>::map_response(Exhausted(trailers.clone()), |mut response| {
            let state = HeaderValue::from_static("\"a\";r=0;t=60");
            response.headers_mut().insert("ratelimit", state);
            response
        });
        let client = around(store, policy()).layer(exhausted);
        let read = client.clone().oneshot(request()).await.expect("infallible");
        let decision = read.extensions().get::<Decision>().expect("a decision").clone();
        read.into_body().collect().await.expect("no error");
        let next = client.oneshot(request()).await.expect("infallible");
        let pauses = [wait(&next), decision.requested_pause()];
        assert_eq!(pauses, [seconds.map(Duration::from_secs); 2], "{trailers:?}");
    }
}

/// A stream may last longer than the pause.
#[tokio::test(start_paused = true)]
async fn the_pause_of_a_head_begins_when_it_is_received() {
    let status = (HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"));
    let exhausted =
        ServiceExt::<Request<Body>>::map_response(Exhausted(HeaderMap::from_iter([status])), |mut response| {
            let state = HeaderValue::from_static("\"a\";r=0;t=30");
            response.headers_mut().insert("ratelimit", state);
            response
        });
    let client = around(MemoryStore::new(), policy()).layer(exhausted);
    let stream = client.clone().oneshot(request()).await.expect("infallible");
    let denied = client.clone().oneshot(request()).await.expect("infallible");
    assert_eq!(wait(&denied), Some(Duration::from_secs(30)));
    tokio::time::advance(Duration::from_secs(600)).await;
    stream.into_body().collect().await.expect("no error");
    let later = client.oneshot(request()).await.expect("infallible");
    assert_eq!(wait(&later), None);
}

#[tokio::test]
async fn a_body_that_is_dropped_before_its_trailers_teaches_nothing() {
    let store = MemoryStore::builder().manual_clock(&ManualClock::new()).build();
    let client = around(store, policy()).layer(Exhausted(retry_in(Duration::from_secs(90))));
    let dropped = client.clone().oneshot(request()).await.expect("infallible");
    assert!(!dropped.body().is_end_stream());
    drop(dropped);
    let read = client.clone().oneshot(request()).await.expect("infallible");
    assert_eq!(wait(&read), None);
    read.into_body().collect().await.expect("no error");
    let denied = client.oneshot(request()).await.expect("infallible");
    assert_eq!(wait(&denied), Some(Duration::from_secs(90)));
}

/// The example with three processes, in one: each has a store of its own.
/// The environment variables of a process of the fleet: the address of the API, and the URL of Redis.
const API: &str = "TOWER_QUOTA_FLEET_API";
const REDIS: &str = "TOWER_QUOTA_FLEET_REDIS";
/// The test that is the process.
const PROCESS: &str = "decide::learning::a_process_of_a_fleet_works_if_it_is_started_for_that";
const PROCESSES: usize = 3;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_of_a_fleet_works_if_it_is_started_for_that() {
    let (Ok(api), Ok(redis)) = (env::var(API), env::var(REDIS)) else {
        return;
    };
    let (api, store) = (api.parse().expect("an address"), connected(patient(), &redis).await);
    let served = fleet::work(store, api, Duration::from_millis(200)).await;
    assert_eq!(served.expect("the API and Redis are there"), fleet::EACH);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_processes_share_the_quota_of_a_server_that_another_program_uses_too() {
    let (seen, redis) = (fleet::Seen::default(), Redis::start());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound port");
    tokio::spawn(axum::serve(listener, fleet::api(seen.clone())).into_future());
    fleet::use_up(address).await.expect("the server listens");
    assert_eq!(seen.take().1, 0, "the other program stays within the quota");

    let processes = (0..PROCESSES).map(|_| {
        let mut process = tokio::process::Command::new(env::current_exe().expect("this binary"));
        let process = process.args(["--exact", PROCESS]).env(API, address.to_string());
        process
            .env(REDIS, redis.url())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
    });
    for process in processes.collect::<Vec<_>>() {
        let status = process.expect("a process").wait().await.expect("it ends");
        assert!(status.success(), "it was served {} times", fleet::EACH);
    }
    // How many depends on the load of the machine.
    println!("{} complaints", seen.take().1);
}
