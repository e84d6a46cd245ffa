//! Two replicas of the application on one Redis, over HTTP as nginx sends it, and behind nginx.

#[path = "app.rs"]
mod app;
#[path = "../../tests/it/support/faketime.rs"]
#[allow(dead_code)]
mod faketime;
#[path = "../../tests/it/support/log.rs"]
#[allow(dead_code)]
mod log;
#[path = "../../tests/it/support/redis.rs"]
#[allow(dead_code)]
mod redis;
#[path = "webhooks.rs"]
mod webhooks;

use std::{
    collections::HashMap,
    fs,
    future::{Future, pending},
    net::{IpAddr, SocketAddr},
    process::Command,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{HeaderMap, Request, StatusCode, Uri, request::Builder},
    response::IntoResponse,
};
use http_body_util::BodyExt;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tower_quota::{Ban, Key, Limiter, MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog};

use self::{
    faketime::Faketime,
    log::Log,
    redis::{Process, Redis},
    webhooks::Webhooks,
};

const FILE: &str = include_str!("limits.toml");
const MINUTE: u64 = 60;
/// How long Redis may take: a busy machine is no fault.
const PATIENT: Duration = Duration::from_secs(60);

/// Two replicas, the Redis that both count in, and the file that both follow.
struct Service {
    replicas: [SocketAddr; 2],
    folder: TempDir,
    redis: Redis,
}

impl Service {
    async fn start() -> Self {
        Self::start_with(Redis::start(), HashMap::new()).await
    }

    async fn start_with(redis: Redis, receivers: HashMap<u64, Uri>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("limits.toml");
        fs::write(&file, FILE).expect("a file");
        let mut replicas = Vec::new();
        for _ in 0..2 {
            let store = RedisStore::builder()
                .url(&redis.url())
                .overrides(true)
                .deadline(PATIENT);
            let store = store.connect().await.expect("Redis replies");
            let app =
                app::app(store, file.to_str().expect("text"), receivers.clone()).expect("the file has the policies");
            replicas.push(serve(app).await);
        }
        let replicas = replicas.try_into().expect("two");
        Self {
            replicas,
            folder,
            redis,
        }
    }

    /// Changes the file that both replicas follow.
    fn write(&self, limits: &str) {
        let [fresh, file] = ["fresh", "limits.toml"].map(|name| self.folder.path().join(name));
        fs::write(&fresh, limits).expect("a file");
        fs::rename(fresh, file).expect("the same folder");
    }

    /// A request that nginx has received from this client, to one of the replicas.
    async fn from(&self, client: &str, replica: usize, request: Builder, body: impl ToString) -> Response {
        let uri = request.uri_ref().expect("a path").clone();
        let uri = format!("http://{}{uri}", self.replicas[replica]);
        let request = request.uri(uri).header("x-forwarded-for", client);
        send(&client_of([127, 0, 0, 1].into()), request, body).await
    }

    async fn log_in(&self, client: &str, replica: usize, name: &str, password: &str) -> Response {
        let request = Request::post("/login").header("content-type", "application/json");
        let body = json!({ "name": name, "password": password });
        self.from(client, replica, request, body).await
    }

    async fn session(&self, name: &str, password: &str) -> Session<'_> {
        let response = self.log_in("192.0.2.200", 0, name, password).await;
        assert_eq!(response.status, 200, "{response:?}");
        let cookie = response.field("set-cookie").expect("a cookie");
        let (cookie, _) = cookie.split_once(';').expect("attributes");
        Session {
            service: self,
            cookie: cookie.to_owned(),
        }
    }

    /// A limiter of the test's own on the counts of the replicas.
    async fn limiter(&self, policy: Policy<()>) -> Limiter {
        let store = RedisStore::builder().url(&self.redis.url()).deadline(PATIENT);
        Limiter::new(store.connect().await.expect("Redis replies"), policy)
    }

    async fn logins(&self) -> Logins {
        let logins = Policy::new("logins", SlidingLog::new(3, Duration::from_secs(5 * MINUTE)));
        Logins(self.limiter(logins).await)
    }
}

/// The counts of logins.
struct Logins(Limiter);

impl Logins {
    fn key(client: &str, account: &str) -> Key {
        let client = Key::ip(client.parse().expect("an address"));
        client.and(Key::extension("account", account))
    }

    /// Returns when nothing is counted anymore.
    async fn refunded(&self, client: &str, account: &str) {
        eventually("it is refunded", async || {
            let peeked = self.0.peek(Self::key(client, account)).await;
            peeked.is_ok_and(|decision| decision.remaining() == 3)
        })
        .await;
    }
}

/// What one user sends.
struct Session<'a> {
    service: &'a Service,
    cookie: String,
}

impl Session<'_> {
    async fn get(&self, path: &str) -> Response {
        self.send(0, Request::get(path), "").await
    }

    async fn post(&self, replica: usize, path: &str, body: impl ToString) -> Response {
        let request = Request::post(path).header("content-type", "application/json");
        self.send(replica, request, body).await
    }

    async fn send(&self, replica: usize, request: Builder, body: impl ToString) -> Response {
        let request = request.header("cookie", format!("theme=dark; {}", self.cookie));
        self.service.from("192.0.2.201", replica, request, body).await
    }
}

#[derive(Debug)]
struct Response {
    status: u16,
    fields: HeaderMap,
    body: String,
}

impl Response {
    fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(|value| value.to_str().expect("text"))
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).expect("JSON")
    }
}

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(axum::serve(listener, service).into_future());
    addr
}

/// A client that connects from this address of the loopback network.
fn client_of(address: IpAddr) -> Client<HttpConnector, Body> {
    let mut connector = HttpConnector::new();
    connector.set_local_address(Some(address));
    Client::builder(TokioExecutor::new()).build(connector)
}

async fn send(client: &Client<HttpConnector, Body>, request: Builder, body: impl ToString) -> Response {
    let request = request.body(Body::from(body.to_string())).expect("a request");
    let (parts, body) = client.request(request).await.expect("a response").into_parts();
    let body = to_bytes(Body::new(body), 1 << 20).await.expect("a body");
    Response {
        status: parts.status.as_u16(),
        fields: parts.headers,
        body: String::from_utf8(body.to_vec()).expect("text"),
    }
}

async fn eventually<F: Future<Output = bool>>(what: &str, holds: impl Fn() -> F) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < Duration::from_secs(60), "still not: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn failed_logins_are_limited_and_successful_ones_are_free() {
    let service = Service::start().await;
    let (logins, attacker) = (service.logins().await, "203.0.113.7");
    for replica in [0, 1, 0, 1, 0, 1] {
        assert_eq!(service.log_in(attacker, replica, "ada", "lovelace").await.status, 200);
        logins.refunded(attacker, "ada").await;
    }
    for replica in [0, 1, 0] {
        assert_eq!(service.log_in(attacker, replica, "ada", "guess").await.status, 401);
    }
    for (retry_after, kind) in [("300", "quota-exceeded"), ("900", "abnormal-usage-detected")] {
        let denied = service.log_in(attacker, 1, "ada", "guess").await;
        assert_eq!((denied.status, denied.field("retry-after")), (429, Some(retry_after)));
        assert!(denied.body.contains(kind), "{denied:?}");
    }
    assert_eq!(
        service.log_in(attacker, 0, "ada", "lovelace").await.status,
        429,
        "banned"
    );
    assert_eq!(
        service.log_in("203.0.113.8", 0, "ada", "lovelace").await.status,
        200,
        "its owner is not"
    );
    assert_eq!(service.log_in(attacker, 0, "kei", "sakura").await.status, 200);

    // An operator lifts the ban.
    let reset = json!({ "policy": "logins", "key": Logins::key(attacker, "ada").as_str() });
    assert_eq!(
        service
            .session("root", "change-me")
            .await
            .post(1, "/admin/reset", reset)
            .await
            .status,
        200
    );
    eventually("no denial is cached", async || {
        service.log_in(attacker, 0, "ada", "lovelace").await.status == 200
    })
    .await;
}

#[tokio::test]
async fn a_login_of_another_content_type_is_refused_and_not_counted() {
    let (service, client) = (Service::start().await, "203.0.113.7");
    let body = json!({ "name": "ada", "password": "lovelace" });
    let form = Request::post("/login").header("content-type", "text/plain");
    assert_eq!(service.from(client, 0, form, body).await.status, 415);
    assert_eq!(service.from(client, 0, Request::get("/login"), "").await.status, 405);
    let mut stream = TcpStream::connect(service.replicas[0]).await.expect("a connection");
    let broken = b"POST /login HTTP/1.1\r\nhost: saas\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n";
    stream.write_all(broken).await.expect("it is sent");
    let mut response = String::new();
    stream.read_to_string(&mut response).await.expect("a response");
    assert!(response.starts_with("HTTP/1.1 400"), "{response}");
    let logins = service.logins().await;
    let peeked = logins.0.peek(Logins::key(client, "ada")).await;
    assert_eq!(peeked.expect("Redis replies").remaining(), 3);
}

#[tokio::test]
async fn an_address_that_tries_many_accounts_is_limited() {
    let service = Service::start().await;
    for account in 0..30 {
        let failed = service
            .log_in("203.0.113.7", account % 2, &format!("user-{account}"), "123456")
            .await;
        assert_eq!(failed.status, 401);
    }
    let denied = service.log_in("203.0.113.7", 0, "ada", "lovelace").await;
    assert_eq!(denied.status, 429);
    assert_eq!(denied.json()["violated-policies"], json!(["addresses"]));
    assert_eq!(service.log_in("203.0.113.8", 0, "ada", "lovelace").await.status, 200);
}

#[tokio::test]
async fn a_reload_of_the_file_changes_the_plans_and_keeps_what_was_counted() {
    let service = Service::start().await;
    let (ada, kei) = (
        service.session("ada", "lovelace").await,
        service.session("kei", "sakura").await,
    );
    for (replica, status) in [(0, 201), (1, 201), (0, 429)] {
        assert_eq!(ada.post(replica, "/orders", "tea").await.status, status);
    }
    let ordered = kei.post(0, "/orders", "tea").await;
    assert_eq!(ordered.field("ratelimit-policy"), Some(r#""orders";q=100;w=60"#));

    let changed = FILE.replace("2/min", "3/min").replace("100/min", "1/s");
    service.write(&changed);
    // The status, once the plan has changed.
    let ordered = async |session: &Session<'_>, replica, plan: &str| {
        let ordered = session.post(replica, "/orders", "tea").await;
        let has_changed = ordered.field("ratelimit-policy") == Some(plan);
        has_changed.then_some(ordered.status)
    };
    for (session, plan, statuses) in [
        (&ada, r#""orders";q=3;w=60"#, [201, 429]),
        // These wait.
        (&kei, r#""orders";q=1;w=1"#, [201, 201]),
    ] {
        for (replica, status) in [0, 1].into_iter().zip(statuses) {
            eventually("the plan changes", async || {
                let ordered = ordered(session, replica, plan).await;
                ordered
                    .inspect(|ordered| assert_eq!(*ordered, status, "{plan}"))
                    .is_some()
            })
            .await;
        }
    }

    // A mistake changes nothing, and operators see it.
    let root = service.session("root", "change-me").await;
    service.write(&changed.replace("1/s\"", "1/moon\""));
    eventually("the report has the mistake", async || {
        root.get("/admin/report").await.body.contains("1/moon")
    })
    .await;
    assert_eq!(ordered(&kei, 0, r#""orders";q=1;w=1"#).await, Some(201));
}

#[tokio::test]
async fn an_operator_gives_one_tenant_another_limit() {
    let service = Service::start().await;
    let (ada, root) = (
        service.session("ada", "lovelace").await,
        service.session("root", "change-me").await,
    );
    for status in [201, 201, 429] {
        assert_eq!(ada.post(0, "/orders", "tea").await.status, status);
    }
    let raised = |limit| json!({ "policy": "orders", "key": "ext:tenant=10", "limit": limit, "lasts": "3d" });
    let raise = raised("sliding-log 50/min");
    assert_eq!(ada.post(0, "/admin/override", &raise).await.status, 403);
    let set = root.post(0, "/admin/override", &raise).await.json();
    assert_eq!(set["override"]["limit"], "sliding-log 50/min", "{set}");
    assert_eq!(set["override"]["set_by"], "3", "{set}");
    for replica in [0, 1] {
        eventually("the replica has read it", async || {
            ada.post(replica, "/orders", "tea").await.status == 201
        })
        .await;
    }

    let refused = root.post(0, "/admin/override", raised("token-bucket 50/min")).await;
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("token-bucket"), "{refused:?}");
}

#[tokio::test]
async fn the_admin_page_is_behind_the_login() {
    let service = Service::start().await;
    let unknown = service.from("203.0.113.7", 0, Request::get("/admin/report"), "").await;
    assert_eq!(unknown.status, 401);
    assert_eq!(service.session("ada", "lovelace").await.get("/admin").await.status, 403);

    let root = service.session("root", "change-me").await;
    let page = root.get("/admin").await;
    assert_eq!(page.status, 200);
    assert!(
        page.field("content-type")
            .is_some_and(|kind| kind.starts_with("text/html"))
    );
    let report = root.get("/admin/report").await.json();
    let names = report["policies"]
        .as_array()
        .expect("policies")
        .iter()
        .map(|policy| policy["policy"].clone());
    let names: Vec<_> = names.collect();
    for name in ["addresses", "logins", "mails", "orders", "webhooks"] {
        assert!(names.contains(&json!(name)), "{names:?}");
    }
    assert_eq!(report["unused_policies"], json!([]));
}

#[tokio::test]
async fn no_replica_calls_a_receiver_before_it_accepts_calls_again() {
    const PAUSE: Duration = Duration::from_secs(2);

    let arrivals = Arc::new(Mutex::new(Vec::new()));
    let seen = arrivals.clone();
    let receiver = serve(Router::new().fallback(async move |event: String| {
        let mut seen = seen.lock().expect("no thread panics with it");
        seen.push((Instant::now(), event));
        match seen.len() {
            1 => (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "2")]).into_response(),
            _ => "thanks".into_response(),
        }
    }))
    .await;
    let url = format!("http://{receiver}/orders").parse().expect("a URL");
    let service = Service::start_with(Redis::start(), HashMap::from([(10, url)])).await;
    let ada = service.session("ada", "lovelace").await;
    let webhooks = Policy::new("webhooks", SlidingLog::per_second(10)).ban(Ban::by_hand());
    let webhooks = service.limiter(webhooks).await;

    assert_eq!(ada.post(0, "/orders", "tea").await.status, 201);
    eventually("all replicas know of the pause", async || {
        let peeked = webhooks.peek(Key::extension("tenant", 10)).await;
        peeked.is_ok_and(|decision| !decision.is_allowed())
    })
    .await;
    assert_eq!(ada.post(1, "/orders", "milk").await.status, 201);
    let arrived = || arrivals.lock().expect("no thread panics with it").clone();
    eventually("both orders are delivered", async || arrived().len() == 3).await;

    let [(denied_at, first), delivered @ ..] = &arrived()[..] else {
        panic!("three arrivals")
    };
    assert_eq!(first, "tea");
    for (at, event) in delivered {
        assert!(
            at.duration_since(*denied_at) >= PAUSE,
            "{event} after {:?}",
            at.duration_since(*denied_at)
        );
    }
    let mut events: Vec<_> = delivered.iter().map(|(_, event)| &**event).collect();
    events.sort_unstable();
    assert_eq!(events, ["milk", "tea"]);
}

/// With a server in place of a client, so that the times of a clock that is paused do not depend on sockets.
fn calling(server: Router, policy: Policy<()>, paths: &[(u64, &str)]) -> Webhooks<Router> {
    let url = |path| format!("http://example.com{path}").parse().expect("a URL");
    let receivers = paths.iter().map(|(tenant, path)| (*tenant, url(path))).collect();
    let limit = RateLimitLayer::new(MemoryStore::new(), webhooks::policy(policy));
    Webhooks::new(&limit, server, receivers)
}

/// Two tenants have receivers on one server, of which one requires a pause of centuries.
#[tokio::test(start_paused = true)]
async fn a_receiver_holds_its_own_events_alone_and_for_a_bounded_time() {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let seen = calls.clone();
    let server = Router::new().fallback(async move |uri: Uri| {
        seen.lock()
            .expect("no thread panics with it")
            .push(uri.path().to_owned());
        match uri.path() {
            "/hostile" => (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "99999999999")]).into_response(),
            _ => "thanks".into_response(),
        }
    });
    let calls_of = |path: &str| {
        let calls = calls.lock().expect("no thread panics with it");
        calls.iter().filter(|called| *called == path).count()
    };
    let policy = Policy::new("webhooks", SlidingLog::per_second(10));
    let webhooks = calling(server, policy, &[(10, "/hostile"), (20, "/friendly")]);
    let log = Log::capture();

    let started = tokio::time::Instant::now();
    let hostile = tokio::spawn(webhooks.clone().deliver(10, "tea".to_owned()));
    eventually("the hostile one is called", async || calls_of("/hostile") == 1).await;
    webhooks.deliver(20, "milk".to_owned()).await;
    assert_eq!((calls_of("/friendly"), calls_of("/hostile")), (1, 1));

    hostile.await.expect("it gives up");
    assert_eq!(calls_of("/hostile"), 10);
    let waited = started.elapsed();
    assert!(waited < 10 * webhooks::LONGEST_PAUSE, "{waited:?}");
    let log = log.text();
    assert!(log.contains("tenant=10") && !log.contains("tea"), "{log}");
}

/// Each waits in the line for at most 5 s, which is 50 of them.
#[tokio::test(start_paused = true)]
async fn events_that_the_limit_holds_back_are_sent_at_last() {
    const EVENTS: usize = 1_000;
    let received = Arc::new(AtomicUsize::new(0));
    let seen = received.clone();
    let server = Router::new().fallback(async move || {
        seen.fetch_add(1, Ordering::Relaxed);
    });
    let policy = Policy::new("webhooks", SlidingLog::per_second(10)).wait_up_to(Duration::from_secs(5));
    let webhooks = calling(server, policy, &[(10, "/")]);

    let mut sent = JoinSet::new();
    for _ in 0..EVENTS {
        sent.spawn(webhooks.clone().deliver(10, "tea".to_owned()));
    }
    sent.join_all().await;
    assert_eq!(received.load(Ordering::Relaxed), EVENTS);
}

#[tokio::test]
async fn what_a_tenant_can_keep_in_memory_is_bounded() {
    let policy = Policy::new("webhooks", SlidingLog::per_second(10));
    let webhooks = calling(Router::new(), policy, &[(10, "/")]);
    let mut places: Vec<_> = (0..100).map(|_| webhooks.place(10).expect("a place")).collect();
    assert!(webhooks.place(10).is_err());
    assert!(
        webhooks.place(20).is_ok_and(|place| place.is_none()),
        "it has no receiver"
    );
    places.pop();
    assert!(webhooks.place(10).is_ok());

    let service = Service::start().await;
    let ada = service.session("ada", "lovelace").await;
    let large = "x".repeat((16 << 10) + 1);
    assert_eq!(ada.post(0, "/orders", &*large).await.status, 413);
    assert_eq!(ada.post(0, "/orders", &large[1..]).await.status, 201);
}

#[tokio::test(start_paused = true)]
async fn the_connection_of_a_response_is_free_while_its_pause_lasts() {
    let bodies = Arc::new(Mutex::new(Vec::new()));
    let seen = bodies.clone();
    let server = Router::new().fallback(async move || {
        let connection = Arc::new(());
        seen.lock()
            .expect("no thread panics with it")
            .push(Arc::downgrade(&connection));
        let body = Body::from("busy").map_frame(move |frame| {
            let _held = &connection;
            frame
        });
        (
            StatusCode::SERVICE_UNAVAILABLE,
            [("retry-after", "60")],
            Body::new(body),
        )
    });
    let policy = Policy::new("webhooks", SlidingLog::per_second(10));
    let webhooks = calling(server, policy, &[(10, "/")]);
    let sent = tokio::spawn(webhooks.deliver(10, "tea".to_owned()));
    tokio::time::sleep(Duration::from_secs(1)).await;
    {
        let bodies = bodies.lock().expect("no thread panics with it");
        assert_eq!(bodies.iter().map(Weak::strong_count).collect::<Vec<_>>(), [0]);
    }
    sent.abort();
}

/// The second call waits in the line for longer than a call may take.
#[tokio::test(start_paused = true)]
async fn a_receiver_that_does_not_respond_is_called_again() {
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = calls.clone();
    let server = Router::new().fallback(async move || {
        if seen.fetch_add(1, Ordering::Relaxed) == 0 {
            pending::<()>().await;
        }
    });
    let minute = Duration::from_secs(MINUTE);
    let policy = Policy::new("webhooks", SlidingLog::per_minute(1)).wait_up_to(minute);
    let webhooks = calling(server, policy, &[(10, "/")]);

    let started = tokio::time::Instant::now();
    let delivered = tokio::time::timeout(10 * minute, webhooks.deliver(10, "tea".to_owned())).await;
    assert!(delivered.is_ok());
    let waited = started.elapsed();
    assert!((MINUTE..MINUTE + 5).contains(&waited.as_secs()), "{waited:?}");
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

/// 15:00 in Berlin, and 23:00 in Tokyo.
const AFTERNOON: u64 = 1_803_909_600;
const HOUR: u64 = 60 * MINUTE;

#[tokio::test]
#[ignore = "needs faketime: `.ci/test`"]
async fn mails_are_counted_by_the_calendar_day_of_each_user() {
    let clock = Faketime::new();
    clock.stop_at(AFTERNOON * 1_000_000);
    let service = Service::start_with(clock.start_redis(), HashMap::new()).await;
    let (ada, kei) = (
        service.session("ada", "lovelace").await,
        service.session("kei", "sakura").await,
    );
    for (session, hours) in [(&ada, 9), (&kei, 1)] {
        for (replica, status, remaining) in [(0, 200, 1), (1, 200, 0), (0, 429, 0)] {
            let response = session.post(replica, "/mails", "").await;
            assert_eq!(response.status, status);
            let field = format!(r#""mails";r={remaining};t={}"#, hours * HOUR);
            assert_eq!(response.field("ratelimit"), Some(&*field));
        }
    }

    clock.stop_at((AFTERNOON + HOUR) * 1_000_000);
    eventually("a day begins in Tokyo", async || {
        kei.post(0, "/mails", "").await.status == 200
    })
    .await;
    let denied = ada.post(1, "/mails", "").await;
    assert_eq!((denied.status, denied.field("retry-after")), (429, Some("28800")));
}

#[tokio::test]
#[ignore = "needs faketime: `.ci/test`"]
async fn each_ban_of_a_login_is_twice_as_long_as_the_last() {
    let (clock, mut now) = (Faketime::new(), AFTERNOON);
    clock.stop_at(now * 1_000_000);
    let service = Service::start_with(clock.start_redis(), HashMap::new()).await;
    let logins = service.logins().await;
    for minutes in [15, 30, 60] {
        for status in [401, 401, 401, 429] {
            assert_eq!(service.log_in("203.0.113.7", 0, "ada", "guess").await.status, status);
        }
        let banned = service.log_in("203.0.113.7", 1, "ada", "guess").await;
        let length = (minutes * MINUTE).to_string();
        assert_eq!((banned.status, banned.field("retry-after")), (429, Some(&*length)));

        now += minutes * MINUTE;
        clock.stop_at(now * 1_000_000);
        for replica in [0, 1] {
            eventually("the ban has ended, and is not cached", async || {
                service.log_in("203.0.113.7", replica, "ada", "lovelace").await.status == 200
            })
            .await;
        }
        logins.refunded("203.0.113.7", "ada").await;
    }
}

/// A command of the README with what it prints.
struct Shown {
    command: Vec<String>,
    output: String,
}

/// The commands of the session in the README.
fn session() -> Vec<Shown> {
    let page = include_str!("README.md");
    let blocks = page.split("```console\n").skip(2);
    let blocks = blocks.map(|rest| rest.split("```").next().expect("a block"));
    let mut shown: Vec<Shown> = Vec::new();
    for line in blocks.flat_map(str::lines) {
        let Some(command) = line.strip_prefix("$ ") else {
            shown.last_mut().expect("a command").output += &format!("{line}\n");
            continue;
        };
        // Quotes are around whole arguments.
        let parts = command.split('\'').enumerate();
        let command = parts.flat_map(|(number, part)| match number % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        });
        let command = command.collect();
        shown.push(Shown {
            command,
            output: String::new(),
        });
    }
    shown
}

/// The clients: curl keeps their cookies in files of these names.
type Jar = HashMap<String, String>;

/// What curl prints, without the fields of the content.
async fn curl(service: &Service, arguments: &[String], jar: &mut Jar) -> String {
    let (mut arguments, mut body, mut saved, mut format) = (arguments.iter(), None, None, String::new());
    let (mut request, mut shows_head, mut path) = (Request::get("/"), false, "");
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().expect("a value").clone();
        match &**argument {
            "-i" => shows_head = true,
            "-s" => {}
            "-b" => request = request.header("cookie", &jar[&value()]),
            "-c" => saved = Some(value()),
            "-d" => body = Some(value()),
            "-o" => assert_eq!(value(), "/dev/null"),
            "-w" => format = value(),
            "-X" => body = (value() == "POST").then(String::new),
            "--json" => {
                request = request.header("content-type", "application/json");
                body = Some(value());
            }
            url => path = url.strip_prefix("http://127.0.0.1:8080").expect("the URL of nginx"),
        }
    }
    let method = if body.is_some() { "POST" } else { "GET" };
    let request = request.method(method).uri(path);
    let response = service.from("127.0.0.1", 0, request, body.unwrap_or_default()).await;
    if let Some((file, cookie)) = saved.zip(response.field("set-cookie")) {
        let (cookie, _) = cookie.split_once(';').expect("attributes");
        jar.insert(file, cookie.to_owned());
    }
    if !format.is_empty() {
        return format!("{}\n", response.status);
    }
    let mut printed = String::new();
    if shows_head {
        let status = StatusCode::from_u16(response.status).expect("a status");
        printed = format!("HTTP/1.1 {status}\n");
        for name in ["set-cookie", "retry-after", "ratelimit-policy", "ratelimit"] {
            if let Some(value) = response.field(name) {
                printed += &format!("{name}: {value}\n");
            }
        }
        printed += "\n";
    }
    printed + &response.body
}

#[tokio::test]
#[ignore = "needs faketime: `.ci/test`"]
async fn curl_prints_what_the_readme_shows() {
    let clock = Faketime::new();
    clock.stop_at(AFTERNOON * 1_000_000);
    let service = Service::start_with(clock.start_redis(), HashMap::new()).await;
    let (logins, mut jar) = (service.logins().await, Jar::new());
    let shown = session();
    assert_eq!(shown.len(), 20);
    for Shown { command, output } in shown {
        match &*command[0] {
            "sed" => {
                let [_, from, to, _] = command[2].split(',').collect::<Vec<_>>()[..] else {
                    panic!("{command:?}")
                };
                service.write(&FILE.replace(from, to));
                let root = service.session("root", "change-me").await;
                eventually("the file is reloaded", async || {
                    root.get("/admin/report").await.body.contains(to)
                })
                .await;
            }
            "curl" => {
                let printed = curl(&service, &command[1..], &mut jar).await;
                assert_eq!(printed.trim(), output.trim(), "{command:?}");
            }
            _ => panic!("{command:?}"),
        }
        if output.contains("welcome") {
            for account in ["ada", "root"] {
                logins.refunded("127.0.0.1", account).await;
            }
        }
    }
}

/// An nginx of the test's own, with the file of this folder, which ends with it.
struct Nginx {
    _process: Process,
    addr: SocketAddr,
    _folder: TempDir,
}

impl Nginx {
    async fn start(replicas: [SocketAddr; 2]) -> Self {
        let folder = tempfile::tempdir().expect("a folder for nginx");
        let addr = SocketAddr::from(([127, 0, 0, 1], redis::free_port()));
        let mut server = include_str!("nginx.conf").to_owned();
        for (shown, here) in [
            ("127.0.0.1:3001", replicas[0]),
            ("127.0.0.1:3002", replicas[1]),
            ("8080", addr),
        ] {
            assert!(server.contains(shown), "{shown}");
            server = server.replace(shown, &here.to_string());
        }
        let temporary = ["client_body", "fastcgi", "proxy", "scgi", "uwsgi"];
        let temporary = temporary.map(|kind| format!("{kind}_temp_path {kind};")).concat();
        let config = format!(
            "daemon off; master_process off; pid nginx.pid; events {{}} http {{ access_log off; {temporary} {server} }}"
        );
        fs::write(folder.path().join("nginx.conf"), config).expect("a file");
        let process = Command::new("nginx")
            .args(["-e", "stderr", "-c", "nginx.conf", "-p"])
            .arg(folder.path())
            .spawn();
        let nginx = Self {
            _process: Process(process.expect("nginx runs; `.ci/test` installs it")),
            addr,
            _folder: folder,
        };
        eventually("nginx listens", async || TcpStream::connect(addr).await.is_ok()).await;
        nginx
    }

    async fn send(&self, client: &str, request: Builder, body: impl ToString) -> Response {
        let uri = format!("http://{}{}", self.addr, request.uri_ref().expect("a path"));
        let request = request.uri(uri).header("content-type", "application/json");
        send(&client_of(client.parse().expect("an address")), request, body).await
    }
}

#[tokio::test]
#[ignore = "needs nginx: `.ci/test`"]
async fn behind_nginx_each_client_is_counted_by_its_own_address() {
    // Other systems have not all addresses of 127.0.0.0/8.
    if !cfg!(target_os = "linux") {
        return;
    }
    let service = Service::start().await;
    let nginx = Nginx::start(service.replicas).await;
    let log_in = async |client: &str, forged: &str, name: &str, password: &str| {
        let request = Request::post("/login").header("x-forwarded-for", forged);
        let body = json!({ "name": name, "password": password });
        nginx.send(client, request, body).await
    };
    for (forged, status) in [
        ("192.0.2.1", 401),
        ("192.0.2.2", 401),
        ("192.0.2.3, 127.0.0.1", 401),
        ("192.0.2.4", 429),
    ] {
        assert_eq!(log_in("127.0.0.2", forged, "ada", "guess").await.status, status);
    }
    let owner = log_in("127.0.0.3", "127.0.0.2", "ada", "lovelace").await;
    assert_eq!(owner.status, 200);

    // The page for operators compares the host with the origin of a request.
    let root = log_in("127.0.0.3", "", "root", "change-me").await;
    let cookie = root.field("set-cookie").and_then(|cookie| cookie.split_once(';'));
    let (cookie, _) = cookie.expect("a cookie");
    for (origin, status) in [
        (format!("http://{}", nginx.addr), 200),
        ("http://evil.example".to_owned(), 403),
    ] {
        let reset = Request::post("/admin/reset")
            .header("cookie", cookie)
            .header("origin", origin);
        let key = json!({ "policy": "logins", "key": "ip=127.0.0.2|ext:account=ada" });
        assert_eq!(nginx.send("127.0.0.3", reset, key).await.status, status);
    }
}
