//! The layer in axum: each place for a layer, keys, responses and extractors.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Extension, Router,
    body::Body,
    extract::connect_info::{ConnectInfo, MockConnectInfo},
    handler::Handler,
    routing::{get, post},
};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header, request::Parts};
use tower::ServiceBuilder;
use tower_quota::{
    Decision, FailureMode, Key, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog,
    key::{self, ClientIpSource},
    response::{self, Rejection, ResponseFormat},
    store::Store,
};

use crate::support::{self, Browser, Clock, Log, Received, Redis, get_from, send, serve};

/// Two in any 30 seconds for each address and path.
fn say_hi() -> Policy {
    Policy::new("say-hi", SlidingLog::new(2, Duration::from_secs(30))).key((key::ip(), key::path()))
}

/// A layer for one policy on a clock that does not advance.
fn limit(policy: Policy) -> RateLimitLayer {
    RateLimitLayer::new(Clock::new().memory_store(), policy)
}

/// A handler under two in any 30 seconds.
fn hello(layer: RateLimitLayer) -> Router {
    Router::new().route("/hello/sayHi", get(async || "hi").layer(layer))
}

/// The statuses of so many calls of a path.
async fn statuses(app: &Router, path: &str, calls: usize) -> Vec<u16> {
    let mut statuses = Vec::new();
    for _ in 0..calls {
        statuses.push(send(app, support::get(path)).await.status.as_u16());
    }
    statuses
}

#[tokio::test]
async fn it_goes_on_a_router() {
    let app = Router::new().route("/", get(async || "hi")).layer(limit(say_hi()));
    assert_eq!(statuses(&app, "/", 3).await, [200, 200, 429]);
    assert_eq!(
        statuses(&app, "/none", 3).await,
        [404, 404, 429],
        "the fallback is behind it too"
    );
}

#[tokio::test]
async fn it_goes_on_the_routes_of_a_router() {
    let app = Router::new()
        .route("/", get(async || "hi"))
        .route_layer(limit(say_hi()));
    assert_eq!(statuses(&app, "/", 3).await, [200, 200, 429]);
    assert_eq!(
        statuses(&app, "/none", 3).await,
        [404, 404, 404],
        "the fallback is not behind it"
    );
}

#[tokio::test]
async fn it_goes_on_a_method_router() {
    let app = Router::new().route("/", get(async || "hi").layer(limit(say_hi())).post(async || "hi"));
    assert_eq!(statuses(&app, "/", 3).await, [200, 200, 429]);
    let posted = send(&app, support::get("/").method(Method::POST)).await;
    assert_eq!(posted.status, StatusCode::OK, "only GET is behind it");
}

#[tokio::test]
async fn it_goes_on_a_handler() {
    let app = Router::new().route("/", post((async || "hi").layer(limit(say_hi()))));
    for status in [200, 200, 429] {
        let posted = send(&app, support::get("/").method(Method::POST)).await;
        assert_eq!(posted.status, status);
    }
}

#[tokio::test]
async fn it_goes_into_a_service_builder() {
    let layers = ServiceBuilder::new().layer(Extension("state")).layer(limit(say_hi()));
    let app = Router::new()
        .route("/", get(async |Extension(state): Extension<&'static str>| state))
        .layer(layers);
    assert_eq!(statuses(&app, "/", 3).await, [200, 200, 429]);
}

#[tokio::test]
async fn the_layers_of_two_routes_count_apart_by_path() {
    let layer = limit(say_hi());
    let app = Router::new()
        .route("/a", get(async || "a").layer(layer.clone()))
        .route("/b", get(async || "b").layer(layer));
    assert_eq!(statuses(&app, "/a", 3).await, [200, 200, 429]);
    assert_eq!(statuses(&app, "/b?x=1", 3).await, [200, 200, 429]);
}

#[tokio::test]
async fn responses_have_the_fields_over_a_real_connection() {
    let clock = Clock::new();
    let url = serve(hello(RateLimitLayer::new(clock.memory_store(), say_hi()))).await + "/hello/sayHi";
    let browser = Browser::http1();

    for remaining in ["\"say-hi\";r=1;t=30", "\"say-hi\";r=0;t=30"] {
        let admitted = browser.get(&url).await;
        assert_eq!(admitted.status, StatusCode::OK);
        assert_eq!(admitted.field("ratelimit-policy"), Some("\"say-hi\";q=2;w=30"));
        assert_eq!(admitted.field("ratelimit"), Some(remaining));
        assert_eq!(admitted.field("retry-after"), None);
        assert_eq!(
            admitted.field("cache-control"),
            None,
            "caching of what was admitted is left alone"
        );
        assert_eq!(admitted.body, "hi");
    }

    let denied = browser.get(&url).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.field("retry-after"), Some("30"));
    assert_eq!(denied.field("ratelimit-policy"), Some("\"say-hi\";q=2;w=30"));
    assert_eq!(denied.field("ratelimit"), Some("\"say-hi\";r=0;t=30"));
    assert_eq!(denied.field("cache-control"), Some("no-store"));
    assert_eq!(denied.field("content-type"), Some("application/problem+json"));
    assert_eq!(
        denied.json(),
        serde_json::json!({
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Request cannot be satisfied as assigned quota has been exceeded",
            "status": 429,
            "violated-policies": ["say-hi"],
        })
    );
    assert!(
        !String::from_utf8_lossy(&denied.body).contains("127.0.0.1"),
        "no address in the body"
    );

    clock.advance(Duration::from_micros(28_999_999));
    assert_eq!(
        browser.get(&url).await.field("retry-after"),
        Some("2"),
        "1.000001 s, rounded up"
    );
    clock.advance(Duration::from_micros(1_000_001));
    assert_eq!(browser.get(&url).await.status, StatusCode::OK);
}

#[tokio::test]
async fn two_servers_on_one_redis_share_the_count() {
    let (clock, redis) = (Clock::new(), Redis::start());
    clock.write_to(&redis).await;
    let mut urls = Vec::new();
    for _ in 0..2 {
        let store = clock.redis_store(&redis).await;
        urls.push(serve(hello(RateLimitLayer::new(store, say_hi()))).await + "/hello/sayHi");
    }
    let browser = Browser::http1();

    assert_eq!(
        browser.get(&urls[0]).await.field("ratelimit"),
        Some("\"say-hi\";r=1;t=30")
    );
    assert_eq!(
        browser.get(&urls[1]).await.field("ratelimit"),
        Some("\"say-hi\";r=0;t=30")
    );
    for url in &urls {
        let denied = browser.get(url).await;
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(denied.field("retry-after"), Some("30"));
    }
    let keys: Vec<String> = redis.command("KEYS", ["quota:*"]).await;
    assert_eq!(keys, ["quota:1:log/30s:say-hi:{ip=127.0.0.1|path=/hello/sayHi}"]);

    clock.advance(Duration::from_secs(30));
    clock.write_to(&redis).await;
    assert_eq!(browser.get(&urls[0]).await.status, StatusCode::OK);
}

#[tokio::test]
async fn addresses_count_apart() {
    let app = hello(limit(say_hi()));
    assert_eq!(statuses(&app, "/hello/sayHi", 3).await, [200, 200, 429]);
    let other = send(&app, get_from("198.51.100.1", "/hello/sayHi")).await;
    assert_eq!(other.status, StatusCode::OK);
}

#[tokio::test]
async fn a_request_without_its_header_is_refused_and_costs_nothing() {
    let per_user = Policy::new("per-user", SlidingLog::per_minute(1)).key(key::header("x-user-id"));
    let store = Clock::new().memory_store();
    let app = hello(RateLimitLayer::new(store.clone(), per_user));

    let refused = send(&app, Request::get("/hello/sayHi")).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert_eq!(refused.json()["detail"], "the request has no header `x-user-id`");
    refused.assert_silent();
    assert!(store.is_empty());
}

/// The handler responds with the error of what it has asked for.
#[tokio::test]
async fn what_never_becomes_possible_is_not_to_be_asked_for_again() {
    let per_user = Policy::new("per-user", SlidingLog::per_minute(1)).key(key::header("x-user-id"));
    let layer = RateLimitLayer::new(MemoryStore::new(), per_user).block(|parts: &Parts| parts.uri.path() == "/blocked");
    let limiter = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(1)));
    let peek = async move |request: Request<Body>| layer.peek(&request.into_parts().0).await.map(drop);
    let check = async move || limiter.request("42").plan("none").check().await.map(drop);
    let app = Router::new().route("/check", get(check)).fallback(peek);
    // As the layer responds, and where it could not.
    for (path, status) in [("/peek", 400), ("/blocked", 403), ("/check", 500)] {
        let failed = send(&app, get_from("127.0.0.1", path)).await;
        assert_eq!(failed.status.as_u16(), status, "{path}");
        failed.assert_silent();
    }
}

#[tokio::test]
async fn a_request_without_a_peer_address_is_refused_and_the_log_names_the_fix() {
    let log = Log::capture();
    let app = hello(limit(say_hi()));

    for _ in 0..2 {
        let refused = send(&app, Request::get("/hello/sayHi")).await;
        assert_eq!(refused.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(
            refused.json()["title"],
            "Internal Server Error",
            "the fix is not for callers"
        );
        assert!(refused.json().get("detail").is_none());
        refused.assert_silent();
    }

    let log = log.text();
    assert!(log.contains("ERROR"), "{log}");
    assert_eq!(
        log.matches("into_make_service_with_connect_info").count(),
        1,
        "once in {log}"
    );
}

#[tokio::test]
async fn a_server_without_connect_info_refuses_over_a_real_connection() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hello/sayHi", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, hello(limit(say_hi()))).await });

    assert_eq!(
        Browser::http1().get(url).await.status,
        StatusCode::INTERNAL_SERVER_ERROR
    );
}

#[tokio::test]
async fn a_policy_met_twice_on_one_request_is_charged_once_with_one_warning() {
    let log = Log::capture();
    let layer = limit(say_hi());
    let app = hello(layer.clone()).layer(layer);

    let first = send(&app, support::get("/hello/sayHi")).await;
    assert_eq!(first.field("ratelimit"), Some("\"say-hi\";r=1;t=30"));
    assert_eq!(first.field("ratelimit-policy"), Some("\"say-hi\";q=2;w=30"));
    assert_eq!(statuses(&app, "/hello/sayHi", 2).await, [200, 429]);

    let log = log.text();
    assert_eq!(log.matches("met twice").count(), 1, "{log}");
}

#[tokio::test]
async fn a_policy_met_twice_is_charged_once_for_a_cost_of_its_whole_limit() {
    let layer = limit(say_hi().cost(2));
    let app = hello(layer.clone()).layer(layer);
    assert_eq!(statuses(&app, "/hello/sayHi", 2).await, [200, 429]);
}

#[tokio::test]
async fn a_format_that_returns_a_stream_is_logged_once() {
    let log = Log::capture();
    let format = response::axum(|_: Rejection<'_>, _: &Parts| {
        Body::from_stream(tokio_stream::once(Ok::<_, Infallible>("later")))
    });
    let app = hello(limit(say_hi()).format(format));
    assert_eq!(statuses(&app, "/hello/sayHi", 5).await, [200, 200, 429, 429, 429]);

    let log = log.text();
    assert_eq!(log.matches("a body that is not ready at once").count(), 1, "{log}");
}

#[tokio::test]
async fn a_policy_met_again_under_another_key_is_charged_again() {
    let store = Clock::new().memory_store();
    let by = |key: &str| Policy::new("p", SlidingLog::per_minute(9)).key(key::constant(key));
    let app = hello(RateLimitLayer::new(store.clone(), by("a"))).layer(RateLimitLayer::new(store.clone(), by("b")));

    send(&app, support::get("/hello/sayHi")).await;
    assert_eq!(store.len(), 2);
}

#[tokio::test]
async fn a_denial_has_none_of_the_extensions_of_its_request() {
    #[derive(Clone)]
    struct User;

    let app = hello(limit(say_hi().cost(2)));
    for (status, is_denied) in [(200, false), (429, true)] {
        let response = send(&app, support::get("/hello/sayHi").extension(User)).await;
        assert_eq!(response.status, status);
        assert!(response.extensions.get::<User>().is_none());
        assert_eq!(response.extensions.get::<Decision>().is_some(), is_denied);
    }
}

#[tokio::test]
async fn the_handler_finds_the_decision() {
    let remaining = async |Extension(decision): Extension<Decision>| {
        let names: Vec<_> = decision.policies().map(|policy| policy.name()).collect();
        format!("{names:?} {} of {}", decision.remaining(), decision.limit())
    };
    let store = Clock::new().memory_store();
    let everyone = Policy::new("everyone", SlidingLog::per_minute(100)).key(key::constant("all"));
    let app = Router::new()
        .route("/", get(remaining).layer(RateLimitLayer::new(store.clone(), say_hi())))
        .layer(RateLimitLayer::new(store, everyone));

    let admitted = send(&app, support::get("/")).await;
    assert_eq!(admitted.body, "[\"everyone\", \"say-hi\"] 1 of 2");
}

#[tokio::test]
async fn responses_carry_the_decision_of_admitted_requests_by_choice() {
    let app = hello(limit(say_hi()));
    let decision_of = |received: Received| received.extensions.get::<Decision>().cloned();
    assert!(decision_of(send(&app, support::get("/hello/sayHi")).await).is_none());

    let app = hello(limit(say_hi()).response_extensions(true));
    let admitted = decision_of(send(&app, support::get("/hello/sayHi")).await).expect("a decision");
    assert!(admitted.is_allowed());
    assert_eq!((admitted.limit(), admitted.remaining()), (2, 1));
    assert_eq!(admitted.reset_after(), Duration::from_secs(30));
    assert_eq!(admitted.retry_after(), None);

    send(&app, support::get("/hello/sayHi")).await;
    let denied = decision_of(send(&app, support::get("/hello/sayHi")).await).expect("a decision");
    assert!(!denied.is_allowed());
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(30)));
}

#[tokio::test]
async fn a_layer_without_policies_admits_all_requests_without_fields() {
    let app = hello(RateLimitLayer::new(support::Broken::default(), Vec::new()));
    for _ in 0..3 {
        let passed = send(&app, Request::get("/hello/sayHi")).await;
        assert_eq!(passed.status, StatusCode::OK);
        passed.assert_silent();
    }
}

#[tokio::test]
async fn a_policy_that_does_not_apply_admits_the_request_without_fields() {
    let tenants = Policy::new("tenants", SlidingLog::per_minute(1)).key(key::from_fn(|parts: &Parts| {
        parts.headers.get("tenant").map(|_| "tenant".to_owned())
    }));
    let app = hello(limit(tenants));
    for _ in 0..3 {
        let passed = send(&app, Request::get("/hello/sayHi")).await;
        assert_eq!(passed.status, StatusCode::OK);
        passed.assert_silent();
    }
    for status in [200, 429] {
        let counted = send(&app, Request::get("/hello/sayHi").header("tenant", "a")).await;
        assert_eq!(counted.status, status);
    }
}

/// Responds with one line of text.
struct Brief;

impl ResponseFormat for Brief {
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
        let text = match rejection {
            Rejection::Limited(decision) => format!("{} over {}", parts.uri.path(), decision.limit()),
            Rejection::Refused(error) => format!("refused: {error}"),
            _ => "failed".into(),
        };
        let response = Response::builder()
            .status(StatusCode::IM_A_TEAPOT)
            .header(header::CONTENT_TYPE, "text/plain");
        response.body(text.into()).unwrap()
    }
}

#[tokio::test]
async fn the_layer_adds_the_fields_to_the_response_of_another_format() {
    let app = hello(limit(say_hi()).format(Brief));
    statuses(&app, "/hello/sayHi", 2).await;

    let denied = send(&app, support::get("/hello/sayHi")).await;
    assert_eq!(denied.status, StatusCode::IM_A_TEAPOT);
    assert_eq!(denied.body, "/hello/sayHi over 2");
    assert_eq!(denied.field("content-type"), Some("text/plain"));
    assert_eq!(denied.field("retry-after"), Some("30"));
    assert_eq!(denied.field("cache-control"), Some("no-store"));
    assert_eq!(denied.field("ratelimit"), Some("\"say-hi\";r=0;t=30"));

    let refused = send(&app, Request::get("/hello/sayHi")).await;
    assert!(refused.body.starts_with(b"refused: no peer address"));
}

#[tokio::test]
async fn the_error_of_a_missing_peer_names_what_each_server_needs() {
    let app = hello(limit(say_hi()).format(Brief));
    let refused = send(&app, Request::get("/hello/sayHi")).await;
    let error = String::from_utf8_lossy(&refused.body);
    for fix in [
        "into_make_service_with_connect_info",
        "`axum`",
        "`tonic`",
        "`tonic-tls`",
        "PeerAddr",
    ] {
        assert!(error.contains(fix), "{fix}: {error}");
    }
}

#[tokio::test]
async fn a_layer_fits_in_a_signature_and_its_clones_share_one_count() {
    fn app(store: impl Store) -> [Router; 2] {
        let layer: RateLimitLayer = RateLimitLayer::new(store, say_hi());
        [layer.clone(), layer].map(hello)
    }

    let [a, b] = app(MemoryStore::new());
    assert_eq!(statuses(&a, "/hello/sayHi", 2).await, [200, 200]);
    assert_eq!(statuses(&b, "/hello/sayHi", 1).await, [429]);
}

#[tokio::test]
async fn a_handler_takes_the_decision() {
    let remaining = async |decision: Decision| format!("{} of {}", decision.remaining(), decision.limit());
    let app = Router::new().route("/", get(remaining).layer(limit(say_hi())));
    assert_eq!(send(&app, support::get("/")).await.body, "1 of 2");
}

#[tokio::test]
async fn a_handler_may_do_without_the_decision() {
    let remaining = async |decision: Option<Decision>| format!("{:?}", decision.map(|decision| decision.remaining()));
    let app = |layer: RateLimitLayer| Router::new().route("/", get(remaining).layer(layer));
    assert_eq!(send(&app(limit(say_hi())), support::get("/")).await.body, "Some(1)");

    let away = RateLimitLayer::new(support::Broken::default(), say_hi().failure_mode(FailureMode::Open));
    assert_eq!(
        send(&app(away.clone().extensions(false)), support::get("/")).await.body,
        "None"
    );
    let unlimited = Router::new().route("/", get(remaining));
    assert_eq!(send(&unlimited, support::get("/")).await.body, "None");
}

#[tokio::test]
async fn a_handler_takes_an_empty_decision_if_no_policy_applies() {
    let open = |store: Arc<dyn Store>| RateLimitLayer::new(store, say_hi().failure_mode(FailureMode::Open));
    for layer in [
        limit(say_hi().cost_fn(|_| 0)),
        limit(say_hi().apply_if(|_| false)),
        RateLimitLayer::new(MemoryStore::new(), []),
        open(Arc::new(support::Broken::default())),
        open(Arc::new(support::Later(support::Broken::default()))),
    ] {
        let handler = async |decision: Decision| {
            assert!(decision.is_allowed() && decision.policies().next().is_none());
            assert_eq!((decision.limit(), decision.remaining()), (u64::MAX, u64::MAX));
            assert_eq!((decision.retry_after(), decision.reset_after()), (None, Duration::ZERO));
            assert!(decision.take_receipt().is_empty());
        };
        let received = send(&Router::new().route("/", get(handler).layer(layer)), support::get("/")).await;
        assert_eq!(received.status, StatusCode::OK);
        received.assert_silent();
    }
}

#[tokio::test]
async fn a_handler_takes_the_failure_of_the_store_with_its_decision() {
    let layer = RateLimitLayer::new(support::Broken::default(), say_hi().failure_mode(FailureMode::Open));
    let handler = async |decision: Decision| decision.store_error().expect("it failed").to_string();
    let app = Router::new().route("/", get(handler).layer(layer));
    assert_eq!(send(&app, support::get("/")).await.body, "the store is away");
    // Also beside the decision of an outer layer, and one that has nothing to decide.
    for outer in [limit(say_hi()), limit(say_hi().apply_if(|_| false))] {
        let app = app.clone().layer(outer);
        assert_eq!(send(&app, support::get("/")).await.body, "the store is away");
    }
}

#[tokio::test]
async fn a_layer_that_counts_nothing_hides_no_decision_of_another() {
    let remaining = async |decision: Decision| decision.remaining().to_string();
    let uncounted = || limit(say_hi().apply_if(|_| false));
    for layers in [[uncounted(), limit(say_hi())], [limit(say_hi()), uncounted()]] {
        let [outer, inner] = layers.map(|layer| layer.response_extensions(true));
        let app = Router::new().route("/", get(remaining)).layer(inner).layer(outer);
        let received = send(&app, support::get("/")).await;
        assert_eq!(received.body, "1");
        let policies = received
            .extensions
            .get::<Decision>()
            .map(|decision| decision.policies().count());
        assert_eq!(policies, Some(1));
    }
}

#[tokio::test]
async fn a_handler_without_its_decision_responds_how_to_get_one() {
    let log = Log::capture();
    let app = Router::new().route("/", get(async |_: Decision| "hi"));
    let failed = send(&app, support::get("/")).await;

    assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR);
    for text in [String::from_utf8_lossy(&failed.body).into_owned(), log.text()] {
        assert!(text.contains("put a `RateLimitLayer` around the handler"), "{text}");
        assert!(text.contains("`Option<Decision>`"), "{text}");
    }
}

#[tokio::test]
async fn the_address_of_mock_connect_info_is_that_of_the_peer() {
    let from = |address: [u8; 4]| MockConnectInfo(SocketAddr::from((address, 4711)));
    let proxies = key::client_ip(ClientIpSource::XForwardedFor)
        .trusted(["10.0.0.0/8"])
        .unwrap();
    let by_client = Policy::new("clients", SlidingLog::per_minute(1)).key(proxies);

    let app = hello(limit(say_hi())).layer(from([203, 0, 113, 7]));
    for status in [200, 200, 429] {
        assert_eq!(send(&app, Request::get("/hello/sayHi")).await.status, status);
    }
    let real = Request::get("/hello/sayHi").extension(ConnectInfo(SocketAddr::from(([203, 0, 113, 8], 4711))));
    assert_eq!(
        send(&app, real).await.status,
        200,
        "the address of a connection goes first"
    );

    let app = hello(limit(by_client)).layer(from([10, 0, 0, 2]));
    for (client, status) in [("203.0.113.7", 200), ("203.0.113.7", 429), ("203.0.113.8", 200)] {
        let request = Request::get("/hello/sayHi").header("x-forwarded-for", client);
        assert_eq!(send(&app, request).await.status, status, "{client}");
    }
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
        .route("/", get(async || "hi").layer(layer.clone()))
        .layer(layer);
    assert_eq!(
        send(&app, support::get("/")).await.field("ratelimit"),
        Some("\"p\";r=8;t=60")
    );
    let layer = RateLimitLayer::new(shared.clone(), policy());
    let app = Router::new().route("/", get(async || "hi").layer(layer));
    assert_eq!(
        send(&app, support::get("/")).await.field("ratelimit"),
        Some("\"p\";r=7;t=60")
    );

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
