//! Responses while the store fails: a failure of Redis is never reported as a denial.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    routing::{get as route, post},
};
use bytes::Bytes;
use fred::{
    interfaces::ClientLike,
    types::{Builder, ClusterHash, CustomCommand, config::Config},
};
use http::{Response, request::Parts};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tower_quota::{
    FailureMode, MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog, key,
    response::Rejection,
    store::{ErrorKind, Operation, Store},
};

use crate::support::{
    Broken, Later, PATIENCE, Received, Redis, connected, eventually, get, less_patient, patient, send, try_decide,
};

/// One request in an hour for all callers.
fn policy() -> Policy {
    Policy::new("p", SlidingLog::per_hour(1)).key(key::constant("all"))
}

/// Where [`policy`] counts.
const KEY: &str = "quota:1:log/1h:p:{const=all}";

/// The errors that a layer reported, each with its text.
#[derive(Clone, Default)]
struct Reported(Arc<Mutex<Vec<(ErrorKind, String)>>>);

impl Reported {
    fn by(&self, layer: RateLimitLayer) -> RateLimitLayer {
        let reported = self.clone();
        layer.on_failure(move |error| {
            reported
                .0
                .lock()
                .expect("no test panics")
                .push((error.kind(), error.to_string()))
        })
    }

    fn take(&self) -> Vec<(ErrorKind, String)> {
        std::mem::take(&mut self.0.lock().expect("no test panics"))
    }
}

async fn call(layer: RateLimitLayer) -> Received {
    send(
        &Router::new().route("/", route(async || "served").layer(layer)),
        get("/"),
    )
    .await
}

/// Responds to each rejected request with the reason.
fn degraded(rejection: Rejection<'_>, _: &Parts) -> Response<Bytes> {
    Response::new(
        match rejection {
            Rejection::Limited(decision) => format!("yesterday's page; {}", decision.limit()),
            Rejection::Refused(error) => format!("no key: {error}"),
            Rejection::Failed { error, .. } => format!("an empty page; {:?}", error.kind()),
            _ => "something new".into(),
        }
        .into(),
    )
}

// The failure modes.

#[tokio::test]
async fn a_format_receives_the_reason_and_builds_the_response() {
    let closed = policy().failure_mode(FailureMode::Closed);
    let store = MemoryStore::new();
    let layer = |policy: Policy, store: Arc<dyn Store>| RateLimitLayer::new(store, policy).format(degraded);
    call(layer(policy(), Arc::new(store.clone()))).await;

    let by_user = Policy::new("q", SlidingLog::per_hour(1)).key(key::header("user"));
    for (layer, body) in [
        (layer(policy(), Arc::new(store)), "yesterday's page; 1"),
        (
            layer(by_user, Arc::new(MemoryStore::new())),
            "no key: the request has no header `user`",
        ),
        (
            layer(closed, Arc::new(Later(Broken::default()))),
            "an empty page; Unreachable",
        ),
    ] {
        let answered = call(layer).await;
        assert_eq!((answered.status.as_u16(), &answered.body[..]), (200, body.as_bytes()));
        assert_eq!(
            (answered.field("retry-after"), answered.field("cache-control")),
            (None, Some("no-store"))
        );
    }
}

#[tokio::test]
async fn each_failure_is_reported_in_either_mode_and_no_denial_is() {
    for mode in [FailureMode::Open, FailureMode::Closed] {
        let reported = Reported::default();
        let fails = reported.by(RateLimitLayer::new(
            Later(Broken::default()),
            policy().failure_mode(mode),
        ));
        for _ in 0..3 {
            call(fails.clone()).await;
        }
        let errors = reported.take();
        assert_eq!(
            errors,
            vec![(ErrorKind::Unreachable, "the store is away".into()); 3],
            "{mode:?}"
        );

        let counts = reported.by(RateLimitLayer::new(MemoryStore::new(), policy().failure_mode(mode)));
        assert_eq!(call(counts.clone()).await.status, 200);
        assert_eq!(call(counts).await.status, 429);
        assert_eq!(reported.take(), []);
    }
}

#[tokio::test]
async fn a_hook_changes_nothing() {
    for mode in [FailureMode::Open, FailureMode::Closed] {
        let plain = RateLimitLayer::new(Broken::default(), policy().failure_mode(mode));
        let reported = call(Reported::default().by(plain.clone())).await;
        let plain = call(plain).await;
        assert_eq!(
            (reported.status, &reported.headers, &reported.body),
            (plain.status, &plain.headers, &plain.body)
        );
    }
}

#[tokio::test]
async fn a_mode_is_that_of_its_layer() {
    let open = RateLimitLayer::new(Broken::default(), policy().failure_mode(FailureMode::Open));
    let closed = RateLimitLayer::new(Broken::default(), policy().failure_mode(FailureMode::Closed));
    let app = Router::new()
        .route("/", route(async || "served").layer(open))
        .route("/login", route(async || "served").layer(closed));
    assert_eq!(send(&app, get("/")).await.status, 200);
    assert_eq!(send(&app, get("/login")).await.status, 503);
}

#[tokio::test]
async fn a_policy_that_is_closed_closes_nothing_that_does_not_count_against_it() {
    let open = || Policy::new("total", SlidingLog::per_hour(9)).key(key::constant("all"));
    let closed = || policy().failure_mode(FailureMode::Closed);
    let unkeyed = Policy::new("p", SlidingLog::per_hour(1));
    let by_user = |parts: &Parts| Some(parts.headers.get("user")?.to_str().ok()?.to_owned());
    for (what, closed) in [
        ("another path", closed().apply_if(|parts| parts.uri.path() == "/login")),
        (
            "no cost",
            closed().cost_fn(|parts| (parts.uri.path() == "/login").into()),
        ),
        (
            "no key",
            unkeyed.key(key::from_fn(by_user)).failure_mode(FailureMode::Closed),
        ),
    ] {
        let layer = RateLimitLayer::new(Later(Broken::default()), [open(), closed]);
        let app = Router::new().fallback(route(async || "served")).layer(layer);
        assert_eq!(send(&app, get("/")).await.status, 200, "{what}");
        assert_eq!(
            send(&app, get("/login").header("user", "42")).await.status,
            503,
            "{what}"
        );
    }
}

#[tokio::test]
async fn each_closure_runs_once_for_a_request_that_the_store_fails() {
    for mode in [FailureMode::Local, FailureMode::Open, FailureMode::Closed] {
        for later in [false, true] {
            let calls = Arc::new(Mutex::new(Vec::new()));
            let note = |what| {
                let calls = calls.clone();
                move || calls.lock().expect("no test panics").push(what)
            };
            let (applies, cost, key) = (note("apply_if"), note("cost_fn"), note("key"));
            let policy = Policy::new("p", SlidingLog::per_hour(9))
                .key(key::from_fn(move |_: &Parts| {
                    key();
                    Some("k".to_owned())
                }))
                .apply_if(move |_| {
                    applies();
                    true
                })
                .cost_fn(move |_| {
                    cost();
                    1
                })
                .failure_mode(mode);
            let store: Arc<dyn Store> = match later {
                true => Arc::new(Later(Broken::default())),
                false => Arc::new(Broken::default()),
            };

            let status = call(RateLimitLayer::new(store, policy)).await.status;
            assert_eq!(status == 503, mode == FailureMode::Closed);
            assert_eq!(
                calls.lock().expect("no test panics")[..],
                ["apply_if", "cost_fn", "key"],
                "{mode}"
            );
        }
    }
}

// Replies of Redis that are no decision.

async fn store_in(redis: &Redis) -> RedisStore {
    connected(patient(), &redis.url()).await
}

/// Asserts that requests are admitted or rejected with 503 as the failure mode defines, and that each failure is reported:
/// `message` is part of the first error.
async fn assert_follows_the_failure_mode(store: RedisStore, kinds: &[ErrorKind], message: &str) {
    let reported = Reported::default();
    let layer = |mode| reported.by(RateLimitLayer::new(store.clone(), policy().failure_mode(mode)));

    let passed = call(layer(FailureMode::Open)).await;
    assert_eq!((passed.status.as_u16(), &passed.body[..]), (200, &b"served"[..]));
    passed.assert_silent();
    let errors = reported.take();
    assert!(
        matches!(&errors[..], [(kind, error)] if kinds.contains(kind) && error.contains(message)),
        "{errors:?}"
    );

    let failed = call(layer(FailureMode::Closed)).await;
    assert_eq!((failed.status.as_u16(), failed.field("retry-after")), (503, Some("1")));
    assert_eq!(
        (failed.field("ratelimit"), failed.field("ratelimit-policy")),
        (None, None)
    );

    let app = Router::new().route("/", post(async || "served").layer(layer(FailureMode::Closed)));
    let grpc = get("/").method("POST").header("content-type", "application/grpc");
    let grpc = send(&app, grpc).await;
    assert_eq!((grpc.status.as_u16(), grpc.field("grpc-status")), (200, Some("14")));

    let answered = call(layer(FailureMode::Closed).format(degraded)).await;
    assert_eq!(answered.status, 200);
    assert!(answered.body.starts_with(b"an empty page; "), "{:?}", answered.body);
    assert_eq!(reported.take().len(), 3);

    let local = RateLimitLayer::new(store, policy());
    assert_eq!(call(local.clone()).await.status, 200);
    assert_eq!(call(local).await.status, 429, "denied by the counts of this process");
}

/// Asserts it for an error that Redis replies with.
async fn assert_is_a_failure(store: RedisStore, code: &str) {
    assert_follows_the_failure_mode(store, &[ErrorKind::Refused], code).await;
}

#[tokio::test]
async fn a_redis_that_hangs() {
    let redis = Redis::start();
    let builder = RedisStore::builder().connect_timeout(PATIENCE);
    let builder = builder.deadline(Duration::from_millis(100));
    let store = builder.url(&redis.url()).connect().await.expect("the URL is good");
    let _frozen = redis.freeze();
    assert_follows_the_failure_mode(store, &[ErrorKind::Timeout, ErrorKind::Unreachable], "Redis").await;
}

#[tokio::test]
async fn a_redis_that_was_killed() {
    let mut redis = Redis::start();
    let store = connected(less_patient(), &redis.url()).await;
    redis.kill();
    assert_follows_the_failure_mode(store, &[ErrorKind::Unreachable, ErrorKind::Timeout], "Redis").await;
}

#[tokio::test]
async fn out_of_memory() {
    let redis = Redis::start_with(&["--maxmemory-policy", "noeviction"]);
    let store = store_in(&redis).await;
    redis.command::<()>("CONFIG", ["SET", "maxmemory", "1"]).await;
    assert_is_a_failure(store.clone(), "OOM").await;

    // And while it does not have the script.
    redis.command::<()>("SCRIPT", ["FLUSH"]).await;
    let error = try_decide(&store, Operation::Check, &SlidingLog::per_hour(5).into(), "other", 1).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Refused);
}

#[tokio::test]
async fn busy_with_a_script() {
    let redis = Redis::start_with(&["--lua-time-limit", "1"]);
    let store = store_in(&redis).await;
    redis.client().await; // while it can connect
    let other = redis.builder().build().expect("a client");
    other.init().await.expect("the server answers");
    let endless = CustomCommand::new_static("EVAL", ClusterHash::Random, false);
    tokio::spawn(async move { other.custom::<(), _>(endless, vec!["while true do end", "0"]).await });

    assert_is_answered_with(&redis, "BUSY").await;
    assert_is_a_failure(store, "BUSY").await;
}

/// Waits until Redis replies to a ping with this error.
async fn assert_is_answered_with(redis: &Redis, code: &str) {
    let client = redis.client().await;
    eventually(code, async || {
        let pong = client.ping::<()>(None).await;
        pong.is_err_and(|error| error.details().starts_with(code))
    })
    .await;
}

#[tokio::test]
async fn loading_its_data() {
    let primary = Redis::start_with(&["--repl-diskless-sync-delay", "0", "--rdbcompression", "no"]);
    // A server that loads its data answers once every 2 MB: here every 400 ms, for 20 s. Redis 6.2 has no setting for it.
    const FILL: &str = "for key = 1, 1000 do redis.call('SET', key, string.rep('x', 100000)) end";
    primary.command::<()>("EVAL", [FILL, "0"]).await;

    let redis = Redis::start_with(&["--key-load-delay", "20000"]);
    let store = store_in(&redis).await;
    redis.client().await; // while it can connect
    redis
        .command::<()>("REPLICAOF", ["127.0.0.1", &primary.port().to_string()])
        .await;
    assert_is_answered_with(&redis, "LOADING").await;
    assert_is_a_failure(store, "LOADING").await;
}

#[tokio::test]
async fn a_replica() {
    let redis = Redis::start();
    let store = store_in(&redis).await;
    redis.command::<()>("REPLICAOF", ["127.0.0.1", "1"]).await;
    assert_is_a_failure(store, "READONLY").await;
}

#[tokio::test]
async fn a_replica_without_its_primary() {
    let redis = Redis::start_with(&["--replica-serve-stale-data", "no"]);
    // Each such reply ends the connection: a request that had been sent on it may wait for its deadline.
    let store = connected(patient().deadline(Duration::from_secs(20)), &redis.url()).await;
    redis.command::<()>("REPLICAOF", ["127.0.0.1", "1"]).await;
    assert_is_a_failure(store, "MASTERDOWN").await;
}

#[tokio::test]
async fn a_user_without_the_permission_for_scripts() {
    let redis = Redis::start();
    let store = store_in(&redis).await;
    redis.command::<()>("ACL", ["SETUSER", "default", "-@scripting"]).await;
    assert_is_a_failure(store, "NOPERM").await;
}

#[tokio::test]
async fn a_user_without_access_to_the_key() {
    let redis = Redis::start();
    let store = store_in(&redis).await;
    redis
        .command::<()>("ACL", ["SETUSER", "default", "resetkeys", "~another:*"])
        .await;
    assert_is_a_failure(store, "NOPERM").await;
}

#[tokio::test]
async fn a_connection_without_a_password() {
    let redis = Redis::start();
    let client = redis.client().await.clone();
    let store = patient().client(client).connect().await.expect("a good client");
    redis.command::<()>("CONFIG", ["SET", "requirepass", "secret"]).await;
    redis.command::<String>("RESET", [""; 0]).await;
    // `NOAUTH`, or for a call of more than ten words that such a length is not for the unauthenticated.
    assert_is_a_failure(store, "uthenticat").await;
}

#[tokio::test]
async fn a_key_of_another_type() {
    let redis = Redis::start();
    let store = store_in(&redis).await;
    redis.command::<()>("SET", [KEY, "text"]).await;
    assert_is_a_failure(store, "WRONGTYPE").await;
}

#[tokio::test]
async fn a_script_that_is_unknown_twice() {
    let redis = Redis::start();
    let address = without_eval(redis.port()).await;
    let config = Config::from_url(&format!("redis://{address}")).expect("the URL is good");
    let mut builder: Builder = redis.builder();
    builder.set_config(config);
    let client = builder.build().expect("a client");
    client.init().await.expect("the server answers");

    let store = patient().client(client).connect_lazy().expect("a good client");
    assert_is_a_failure(store, "NOSCRIPT").await;
}

/// Stands before a Redis and turns every `EVAL` into an `EVALSHA`, so that no script is ever taught.
async fn without_eval(port: u16) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound port");
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let redis = TcpStream::connect(("127.0.0.1", port)).await.expect("the server runs");
            let (from_client, to_client) = client.into_split();
            let (from_redis, to_redis) = redis.into_split();
            tokio::spawn(pass(from_redis, to_client, |bytes| bytes));
            tokio::spawn(pass(from_client, to_redis, |bytes| {
                replaced(&bytes, b"$4\r\nEVAL\r\n", b"$7\r\nEVALSHA\r\n")
            }));
        }
    });
    address
}

/// The arguments of a script are not text.
fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    match bytes.windows(from.len()).position(|part| part == from) {
        Some(position) => [
            &bytes[..position],
            to,
            &replaced(&bytes[position + from.len()..], from, to),
        ]
        .concat(),
        None => bytes.to_vec(),
    }
}

async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, edit: impl Fn(Vec<u8>) -> Vec<u8>) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(length @ 1..) = from.read(&mut bytes).await {
        if to.write_all(&edit(bytes[..length].to_vec())).await.is_err() {
            return;
        }
    }
}
