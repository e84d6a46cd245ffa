//! The connection of a store to Redis: its start, its errors and its end.

use std::{error::Error, iter, panic::catch_unwind, time::Duration};

use fred::{
    interfaces::ClientLike,
    types::{
        Builder,
        config::{Config, ReconnectPolicy, ServerConfig},
    },
};
use tokio::{net::TcpListener, time::timeout};
use tower_quota::{
    ClientLibrary, Limit, RedisStore, SlidingLog,
    store::{ErrorKind, Operation, StoreError},
};

use crate::support::{Redis, connected, decide, each_client, eventually, patient, timed, try_decide};

each_client! {
    a_store_starts_before_its_redis
    the_connection_ends_with_the_last_clone_of_the_store
    a_store_that_is_dropped_before_redis_starts_stops_connecting
    a_wrong_password_is_an_error_that_does_not_contain_it
    a_missing_password_is_an_error
    a_database_that_does_not_exist_is_an_error
    a_check_ends_by_its_deadline_when_redis_hangs
}

async fn connect(library: ClientLibrary, url: &str) -> Result<RedisStore, StoreError> {
    patient().client_library(library).url(url).connect().await
}

/// The error of connecting to this URL.
async fn error_of(library: ClientLibrary, url: &str) -> StoreError {
    connect(library, url).await.expect_err("Redis refuses it")
}

fn lazy(library: ClientLibrary, url: &str) -> RedisStore {
    let builder = RedisStore::builder().client_library(library);
    builder.url(url).connect_lazy().expect("Redis may come later")
}

fn limit() -> Limit {
    SlidingLog::per_minute(100).into()
}

async fn answers(store: &RedisStore) -> bool {
    try_decide(store, Operation::Peek, &limit(), "k", 1).await.is_ok()
}

async fn a_store_starts_before_its_redis(library: ClientLibrary) {
    let mut redis = Redis::not_started();
    let (store, took) = timed(async { lazy(library, &redis.url()) }).await;
    assert!(took < Duration::from_secs(3), "{took:?}");

    let checks = async {
        for _ in 0..10 {
            let error = try_decide(&store, Operation::Check, &limit(), "k", 1).await;
            assert_eq!(error.unwrap_err().kind(), ErrorKind::Unreachable);
        }
    };
    let ((), took) = timed(checks).await;
    assert!(took < Duration::from_millis(500), "{took:?}");

    redis.restart();
    let mut number = 0;
    eventually("a check is decided", async || {
        // One whose reply is late may be counted.
        number += 1;
        let checked = try_decide(&store, Operation::Check, &limit(), &format!("k{number}"), 1).await;
        checked.map(|outcome| assert_eq!(outcome.states()[0].remaining, 99))
    })
    .await;
}

async fn the_connection_ends_with_the_last_clone_of_the_store(library: ClientLibrary) {
    let redis = Redis::start();
    let connections = async || {
        let list: String = redis.command("CLIENT", ["LIST"]).await;
        list.lines().count()
    };
    let before = connections().await;

    let store = connected(patient().client_library(library), &redis.url()).await;
    let clone = store.clone();
    drop(store);
    assert!(answers(&clone).await);
    assert_eq!(connections().await, before + 1);

    drop(clone);
    eventually("the connection is closed", async || connections().await == before).await;
}

async fn a_store_that_is_dropped_before_redis_starts_stops_connecting(library: ClientLibrary) {
    let redis = Redis::not_started();
    let store = lazy(library, &redis.url());
    let listener = TcpListener::bind(("127.0.0.1", redis.port()))
        .await
        .expect("the port is free");
    listener.accept().await.expect("the store tries again");

    drop(store);
    // An attempt that was in progress may still arrive; a store that goes on retries within half a second.
    let mut late = 0;
    while timeout(Duration::from_secs(1), listener.accept()).await.is_ok() {
        late += 1;
        assert!(late <= 2, "it tries again after it was dropped");
    }
}

/// The error with its causes, as an application would log it.
fn in_full(error: &StoreError) -> String {
    let causes = iter::successors(Some(error as &dyn Error), |&error| error.source());
    let causes: Vec<_> = causes.map(ToString::to_string).collect();
    format!("{}; {error:?}", causes.join(": "))
}

async fn a_wrong_password_is_an_error_that_does_not_contain_it(library: ClientLibrary) {
    let redis = Redis::start_with(&["--requirepass", "right-one"]);
    let url = |password| format!("redis://:{password}@127.0.0.1:{}", redis.port());

    let error = error_of(library, &url("wrong-one")).await;
    assert!(error.to_string().contains("credentials"), "{error}");
    assert!(!in_full(&error).contains("wrong-one"), "{}", in_full(&error));

    let _ = connected(patient().client_library(library), &url("right-one")).await;
}

async fn a_missing_password_is_an_error(library: ClientLibrary) {
    let redis = Redis::start_with(&["--requirepass", "right-one"]);
    let error = error_of(library, &redis.url()).await;
    assert!(error.to_string().contains("credentials"), "{error}");
}

async fn a_database_that_does_not_exist_is_an_error(library: ClientLibrary) {
    let redis = Redis::start();
    let error = error_of(library, &format!("{}/200", redis.url())).await;
    assert!(
        in_full(&error).contains("DB index is out of range"),
        "{}",
        in_full(&error)
    );
}

#[tokio::test]
async fn times_of_more_than_an_hour_are_errors() {
    const HOUR: Duration = Duration::from_secs(3_600);
    let builder = || RedisStore::builder().url("redis://127.0.0.1:1");

    assert!(builder().deadline(HOUR).connect_timeout(HOUR).connect_lazy().is_ok());
    for longer in [HOUR + Duration::from_nanos(1), Duration::MAX] {
        assert!(catch_unwind(|| RedisStore::builder().deadline(longer)).is_err());
        assert!(catch_unwind(|| RedisStore::builder().connect_timeout(longer)).is_err());
    }
}

#[test]
fn a_prefix_that_could_break_a_key_is_an_error() {
    for prefix in ["", "shop quota", "shop{1}", "quota*", "größe", "a\nb"] {
        let error = catch_unwind(|| RedisStore::builder().prefix(prefix)).unwrap_err();
        let error = error.downcast_ref::<String>().expect("a message");
        assert!(error.contains("`shop:quota`"), "{prefix:?}: {error}");
    }
}

#[tokio::test]
async fn keys_begin_with_the_prefix() {
    let redis = Redis::start();
    let store = connected(patient().prefix("shop:quota"), &redis.url()).await;
    decide(&store, Operation::Check, &limit(), "k", 1).await;
    let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
    assert_eq!(keys, ["shop:quota:1:log/1min:test:{key=k}"]);
}

#[test]
#[should_panic(expected = "longer than zero and at most an hour, such as 100 ms")]
fn a_deadline_of_zero_is_an_error() {
    let _ = RedisStore::builder().deadline(Duration::ZERO);
}

async fn a_check_ends_by_its_deadline_when_redis_hangs(library: ClientLibrary) {
    const DEADLINE: Duration = Duration::from_millis(100);
    let redis = Redis::start();
    let builder = RedisStore::builder().client_library(library).deadline(DEADLINE);
    let store = connected(builder, &redis.url()).await;

    let frozen = redis.freeze();
    for _ in 0..7 {
        let limit = limit();
        let (outcome, waited) = timed(try_decide(&store, Operation::Check, &limit, "k", 1)).await;
        let error = outcome.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unreachable),
            "{error:?}"
        );
        assert!(waited < 2 * DEADLINE, "{waited:?}");
    }

    drop(frozen);
    eventually("the store is answered", async || answers(&store).await).await;
}

// Clients that the application builds.

/// The error of a store on the client that this builder builds.
fn fault(builder: &Builder) -> String {
    let client = builder.build().expect("a client");
    let error = RedisStore::builder().client(client).connect_lazy().unwrap_err();
    error.to_string()
}

#[tokio::test]
async fn a_client_that_does_not_reconnect_is_refused_with_the_fix() {
    let redis = Redis::not_started();
    let mut builder = Builder::from_config(Config::from_url(&redis.url()).expect("the URL is good"));
    builder.with_connection_config(|connection| connection.max_command_attempts = 1);
    let fault = fault(&builder);
    assert!(
        fault.contains("`.set_policy(ReconnectPolicy::new_constant(0, 150))`"),
        "{fault}"
    );
}

#[tokio::test]
async fn a_client_that_sends_twice_is_refused_with_the_fix() {
    let redis = Redis::not_started();
    let mut builder = redis.builder();
    builder.with_connection_config(|connection| connection.max_command_attempts = 3);
    let fault = fault(&builder);
    assert!(fault.contains("config.max_command_attempts = 1"), "{fault}");
}

#[tokio::test]
async fn a_client_with_a_bounded_queue_is_refused_with_the_fix() {
    let redis = Redis::not_started();
    let mut builder = redis.builder();
    builder.with_connection_config(|connection| connection.max_command_buffer_len = 1_000);
    let fault = fault(&builder);
    assert!(fault.contains("config.max_command_buffer_len = 0"), "{fault}");
}

#[tokio::test]
async fn a_clustered_client_is_refused_with_the_fix() {
    let mut builder = Builder::from_config(Config {
        server: ServerConfig::new_clustered(vec![("127.0.0.1", 7_000)]),
        ..Config::default()
    });
    builder
        .set_policy(ReconnectPolicy::new_constant(0, 150))
        .with_connection_config(|connection| connection.max_command_attempts = 1);
    let fault = fault(&builder);
    assert!(fault.contains("feature `cluster`"), "{fault}");
}

#[tokio::test]
async fn a_pool_of_clients_is_audited_too() {
    let redis = Redis::not_started();
    let mut builder = redis.builder();
    builder.with_connection_config(|connection| connection.max_command_attempts = 3);
    let pool = builder.build_pool(3).expect("a pool");
    let error = RedisStore::builder().client(pool).connect_lazy().unwrap_err();
    assert!(error.to_string().contains("config.max_command_attempts = 1"), "{error}");
}

#[tokio::test]
async fn a_client_of_the_application_serves_and_is_not_closed() {
    let redis = Redis::start();
    let client = redis.builder().build().expect("a client");
    client.init().await.expect("the server answers");
    let store = patient().client(client.clone()).connect_lazy().expect("a good client");
    let outcome = decide(&store, Operation::Check, &limit(), "k", 1).await;
    assert_eq!(outcome.states()[0].remaining, 99);

    drop(store);
    client.ping::<()>(None).await.expect("it is still connected");
}

#[tokio::test]
async fn the_clients_of_a_pool_share_one_count() {
    let redis = Redis::start();
    let pool = redis.builder().build_pool(3).expect("a pool");
    pool.init().await.expect("the server answers");
    let store = patient().client(pool).connect_lazy().expect("a good pool");
    for remaining in (94..100).rev() {
        let outcome = decide(&store, Operation::Check, &limit(), "k", 1).await;
        assert_eq!(outcome.states()[0].remaining, remaining);
    }
}
