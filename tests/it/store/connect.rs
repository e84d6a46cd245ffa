//! The errors that `connect` returns, and those that are logged later.

use std::{
    error::Error,
    fs, iter,
    pin::pin,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    task::JoinSet,
    time::timeout,
};
use tower_quota::{
    ClientLibrary, Limit, RedisStore, RedisStoreBuilder, SlidingLog,
    store::{ErrorKind, Operation, StoreError},
};

use super::topologies::tls;
use crate::support::{Cluster, Log, PATIENCE, Redis, connected, each_client, eventually, try_decide};

each_client! {
    a_missing_command_is_named
    a_missing_key_pattern_is_named
    a_strict_user_needs_the_script
    a_trial_leaves_nothing_behind
    a_setting_that_evicts_counts_is_logged_once
    a_redis_that_cannot_be_reached_is_an_error_after_the_connect_timeout
    a_redis_that_never_replies_is_an_error_after_the_connect_timeout
    a_server_without_tls_is_named_as_a_possible_cause
    a_server_with_tls_or_that_is_no_redis_is_named_as_a_possible_cause
    a_redis_that_replies_late_is_not_reported_as_unconnected
    a_redis_that_cannot_write_yet_is_waited_for
    a_redis_without_memory_cannot_be_used
    a_redis_that_starts_within_the_connect_timeout_is_waited_for
    a_lazy_store_logs_a_refusal_once
    a_lazy_store_logs_that_redis_is_unreachable
    a_password_that_is_changed_later_is_logged_once
    a_permission_that_is_lost_later_is_logged_once
}

fn builder(library: ClientLibrary) -> RedisStoreBuilder {
    RedisStore::builder()
        .client_library(library)
        .deadline(Duration::from_secs(2))
}

fn limit() -> Limit {
    SlidingLog::per_minute(100).into()
}

async fn connect(library: ClientLibrary, url: &str) -> RedisStore {
    connected(builder(library).connect_timeout(PATIENCE), url).await
}

async fn answers(store: &RedisStore) -> bool {
    try_decide(store, Operation::Check, &limit(), "k", 1).await.is_ok()
}

const PLAIN: &str = "ACL SETUSER limiter ";
const STRICT: &str = "ACL SETUSER strict-limiter ";

/// The line of `docs/redis.md` that begins with this.
fn line(begin: &str) -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/redis.md");
    let page = fs::read_to_string(page).expect("the page");
    let line = page.lines().find(|line| line.starts_with(begin));
    line.expect("the page has the line of the user").to_owned()
}

/// Creates a user with this line.
async fn set_user(redis: &Redis, line: &str) {
    redis.command::<()>("ACL", line.split(' ').skip(1)).await;
}

fn url(redis: &Redis, user: &str) -> String {
    redis.url().replace("://", &format!("://{user}:password@"))
}

async fn refusal(builder: RedisStoreBuilder, url: &str) -> String {
    let error = builder.url(url).connect().await.expect_err("Redis refuses");
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(!error.to_string().contains(":password"), "{error}");
    error.to_string()
}

async fn a_missing_command_is_named(library: ClientLibrary) {
    let redis = Redis::start();
    let line = line(PLAIN);
    let granted: Vec<_> = line.split(' ').filter_map(|word| word.strip_prefix('+')).collect();
    assert!(granted.len() > 20, "{line}");
    for command in granted {
        let without = format!("{line} ").replace(&format!(" +{command} "), " ");
        set_user(&redis, without.trim_end()).await;
        redis.command::<()>("SCRIPT", ["FLUSH"]).await;
        let connected = builder(library).url(&url(&redis, "limiter")).connect().await;
        if ["ping", "publish", "subscribe"].contains(&command) {
            drop(connected.expect("a check needs no `PING` and no message"));
            continue;
        }
        let error = connected.expect_err(command).to_string();
        assert!(
            error.contains(&format!("`{}`", command.to_uppercase())),
            "{command}: {error}"
        );
        assert!(error.contains(&format!("`{line}`")), "{command}: {error}");
    }
}

async fn a_missing_key_pattern_is_named(library: ClientLibrary) {
    let redis = Redis::start();
    // Redis 6.2 has no patterns for reading alone.
    let reading = redis.cli(&["ACL", "SETUSER", "reader", "%R~quota:*"]).starts_with("OK");
    let patterns = if reading {
        &["~other:*", "%R~quota:*"][..]
    } else {
        &["~other:*"]
    };
    for pattern in patterns {
        set_user(&redis, &line(PLAIN).replace("~quota:*", pattern)).await;
        let error = refusal(builder(library), &url(&redis, "limiter")).await;
        assert!(error.contains("the keys `quota:*`"), "{error}");
        assert!(error.contains(&format!("`{}`", line(PLAIN))), "{error}");
    }

    set_user(&redis, &line(PLAIN)).await;
    let error = refusal(builder(library).prefix("shop:quota"), &url(&redis, "limiter")).await;
    assert!(
        error.contains("the keys `shop:quota:*`") && error.contains(" ~shop:quota:* "),
        "{error}"
    );
}

async fn a_strict_user_needs_the_script(library: ClientLibrary) {
    let redis = Redis::start();
    set_user(&redis, &line(STRICT)).await;
    let error = refusal(builder(library), &url(&redis, "strict-limiter")).await;
    assert!(error.contains("`SCRIPT LOAD`") && error.contains("`EVAL`"), "{error}");
    assert!(error.contains(&format!("`{}`", line(STRICT))), "{error}");

    for script in RedisStore::scripts() {
        redis.command::<()>("SCRIPT", ["LOAD", script]).await;
    }
    assert!(answers(&connect(library, &url(&redis, "strict-limiter")).await).await);
}

async fn a_trial_leaves_nothing_behind(library: ClientLibrary) {
    let redis = Redis::start();
    set_user(&redis, &line(PLAIN).replace(" +zrem ", " ")).await;
    refusal(builder(library), &url(&redis, "limiter")).await;
    drop(connect(library, &redis.url()).await);
    assert_eq!(redis.command::<u64>("DBSIZE", [""; 0]).await, 0);
}

/// The cause in the text of an error, which is in plain words.
fn cause(error: &StoreError) -> String {
    let text = error.to_string();
    let (_, after) = text.split_once("connect timeout of ").expect("it names the time");
    let (cause, _) = after.rsplit_once("; ").expect("it names a fix");
    let (_, cause) = cause.split_once(": ").expect("it names the cause");
    assert!(!cause.is_empty() && !cause.contains(['{', '"']), "{cause}");
    cause.to_owned()
}

const SHORT: Duration = Duration::from_millis(300);

/// The error of connecting to a Redis that cannot be used, with this text in its chain, and the connect timeout. On a busy machine a
/// short timeout ends before an attempt has failed, and then the error has another cause.
pub(super) async fn connect_in_vain(builder: RedisStoreBuilder, text: &str) -> (StoreError, Duration) {
    let mut timeout = SHORT;
    loop {
        let error = builder.clone().connect_timeout(timeout).connect().await.unwrap_err();
        let chain = iter::successors(Some(&error as &dyn Error), |&error| error.source());
        if chain.into_iter().any(|error| error.to_string().contains(text)) {
            return (error, timeout);
        }
        assert!(timeout < PATIENCE, "{error}");
        timeout *= 2;
    }
}

async fn a_redis_without_memory_cannot_be_used(library: ClientLibrary) {
    let redis = Redis::start();
    redis.command::<()>("CONFIG", ["SET", "maxmemory", "1"]).await;
    let (error, _) = connect_in_vain(builder(library).url(&redis.url()), "OOM").await;
    assert!(cause(&error).contains("OOM"), "{}", cause(&error));
    redis.command::<()>("CONFIG", ["SET", "maxmemory", "0"]).await;
    assert!(answers(&connect(library, &redis.url()).await).await);
}

async fn a_setting_that_evicts_counts_is_logged_once(library: ClientLibrary) {
    let (log, redis) = (Log::capture(), Redis::start());
    let lines = async |url: &str| {
        let before = log.text().matches("maxmemory-policy").count();
        let store = connect(library, url).await;
        store.ready().await.expect("Redis answers");
        log.text().matches("maxmemory-policy").count() - before
    };
    assert_eq!(lines(&redis.url()).await, 0, "it is `noeviction`");
    redis
        .command::<()>("CONFIG", ["SET", "maxmemory-policy", "volatile-ttl"])
        .await;
    // Unless the setting is not read in time.
    eventually("it is logged", async || {
        let lines = lines(&redis.url()).await;
        assert!(lines <= 1, "once for each store");
        lines == 1
    })
    .await;
    assert!(log.text().contains("volatile-ttl"), "{}", log.text());

    set_user(&redis, &line("ACL SETUSER limiter")).await;
    assert_eq!(lines(&url(&redis, "limiter")).await, 0, "it may not read the setting");
}

async fn a_redis_that_cannot_be_reached_is_an_error_after_the_connect_timeout(library: ClientLibrary) {
    let (log, redis) = (Log::capture(), Redis::not_started());
    let started = Instant::now();
    let refused = builder(library).url(&url(&redis, "user"));
    let (error, timeout) = connect_in_vain(refused, "Connection refused").await;
    assert!(started.elapsed() >= timeout, "{:?}", started.elapsed());
    assert!(error.to_string().contains(&format!("{timeout:?}")), "{error}");
    assert!(error.to_string().contains("`connect_lazy`"), "{error}");
    let server = format!("redis://..@127.0.0.1:{}", redis.port());
    assert!(error.to_string().contains(&server), "{error}");
    let warning =
        format!("Redis cannot be used yet; the store keeps connecting server=\"{server}\" error=\"Connection refused");
    assert!(log.text().contains(&warning), "{}", log.text());
    assert!(!error.to_string().contains("password"), "{error}");
    assert!(cause(&error).starts_with("Connection refused"), "{}", cause(&error));
    assert_eq!(error.kind(), ErrorKind::Unreachable);
}

async fn a_redis_that_never_replies_is_an_error_after_the_connect_timeout(library: ClientLibrary) {
    // The system accepts the connections.
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = silent.local_addr().expect("a bound port");
    for user in ["", "user:password@"] {
        let url = format!("redis://{user}{address}");
        let connected = builder(library).connect_timeout(SHORT).url(&url).connect().await;
        let error = connected.unwrap_err();
        assert!(!cause(&error).contains("password"), "{}", cause(&error));
        assert!(
            matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unreachable),
            "{error}"
        );
    }
}

async fn a_server_without_tls_is_named_as_a_possible_cause(library: ClientLibrary) {
    const HINT: &str = "if the server has no TLS at this port, the URL begins with `redis`";
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let (redis, silent) = (Redis::start(), silent.local_addr().expect("a bound port"));
    for server in [format!("127.0.0.1:{}", redis.port()), silent.to_string()] {
        for timeout in [SHORT, 5 * SHORT] {
            let builder = builder(library).connect_timeout(timeout);
            let error = builder.url(&format!("rediss://{server}")).connect().await;
            let error = error.unwrap_err().to_string();
            assert!(error.contains(HINT), "{error}");
        }
    }

    // No name has a part of so many letters: no resolver is asked.
    let nowhere = format!("rediss://{}", "a".repeat(64));
    let error = builder(library)
        .connect_timeout(5 * SHORT)
        .url(&nowhere)
        .connect()
        .await;
    let error = error.unwrap_err().to_string();
    assert!(!error.contains(HINT), "{error}");
}

async fn a_server_with_tls_or_that_is_no_redis_is_named_as_a_possible_cause(library: ClientLibrary) {
    const HINT: &str = "if the server has TLS at this port, the URL begins with `rediss`; else it may be no Redis";
    let web = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let web_address = web.local_addr().expect("a bound port");
    let serving = tokio::spawn(async move {
        while let Ok((mut connection, _)) = web.accept().await {
            let mut request = [0; 512];
            let _ = connection.read(&mut request).await;
            let _ = connection.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        }
    });
    let (_redis, tls) = tls();
    for server in [web_address.to_string(), format!("127.0.0.1:{tls}")] {
        for user in ["", "user:password@"] {
            // On a busy machine a short timeout may end before the first attempt.
            let mut connect_timeout = SHORT;
            loop {
                let builder = builder(library).connect_timeout(connect_timeout);
                let error = builder.url(&format!("redis://{user}{server}")).connect().await;
                let error = error.unwrap_err().to_string();
                if error.contains(HINT) {
                    break;
                }
                assert!(connect_timeout < PATIENCE, "{error}");
                connect_timeout *= 2;
            }
        }
    }
    serving.abort();
}

async fn a_redis_that_replies_late_is_not_reported_as_unconnected(library: ClientLibrary) {
    let redis = Redis::start();
    // It connects clients, and runs no script.
    redis.command::<()>("CLIENT", ["PAUSE", "600000", "WRITE"]).await;
    let mut connect_timeout = SHORT;
    loop {
        let builder = builder(library).deadline(PATIENCE).connect_timeout(connect_timeout);
        let error = builder.url(&redis.url()).connect().await.unwrap_err().to_string();
        if error.contains("had not replied to all calls") {
            return assert!(error.contains("`connect_timeout`"), "{error}");
        }
        // On a busy machine a short timeout ends before there is a connection.
        assert!(connect_timeout < PATIENCE, "{error}");
        connect_timeout *= 2;
    }
}

async fn a_redis_that_cannot_write_yet_is_waited_for(library: ClientLibrary) {
    let redis = Redis::start();
    redis.command::<()>("REPLICAOF", ["127.0.0.1", "1"]).await;
    let (error, _) = connect_in_vain(builder(library).url(&redis.url()), "READONLY").await;
    assert!(cause(&error).contains("READONLY"), "{}", cause(&error));
    assert_eq!(error.kind(), ErrorKind::Refused);

    let url = redis.url();
    let connecting = tokio::spawn(async move { builder(library).url(&url).connect().await });
    redis.command::<()>("REPLICAOF", ["NO", "ONE"]).await;
    let store = connecting.await.expect("no panic").expect("it is a primary again");
    assert!(answers(&store).await);
}

async fn a_redis_that_starts_within_the_connect_timeout_is_waited_for(library: ClientLibrary) {
    let mut redis = Redis::not_started();
    let url = redis.url();
    let patient = builder(library).connect_timeout(Duration::from_secs(60));
    let connecting = tokio::spawn(async move { patient.url(&url).connect().await });
    tokio::task::yield_now().await;
    redis.restart();
    let store = connecting.await.expect("no panic").expect("Redis is there");
    assert!(answers(&store).await);
}

fn errors(log: &Log) -> Vec<String> {
    let text = log.text();
    text.lines()
        .filter(|line| line.contains("ERROR"))
        .map(str::to_owned)
        .collect()
}

/// Waits until an error is logged, sends more checks, and returns the only error.
async fn the_only_error(log: &Log, store: &RedisStore) -> String {
    eventually("the refusal is logged", async || !errors(log).is_empty()).await;
    for _ in 0..10 {
        let error = try_decide(store, Operation::Check, &limit(), "k", 1).await;
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Refused);
    }
    let mut errors = errors(log);
    assert_eq!(errors.len(), 1, "{errors:?}");
    errors.remove(0)
}

async fn a_lazy_store_logs_a_refusal_once(library: ClientLibrary) {
    let log = Log::capture();
    let redis = Redis::start();
    set_user(&redis, &line(PLAIN).replace(" +zadd ", " ")).await;
    let store = builder(library)
        .url(&url(&redis, "limiter"))
        .connect_lazy()
        .expect("a good URL");
    let logged = the_only_error(&log, &store).await;
    assert!(
        logged.contains(&refusal(builder(library), &url(&redis, "limiter")).await),
        "{logged}"
    );

    let error = store.ready().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(logged.contains(&error.to_string()), "{error}");

    set_user(&redis, &line(PLAIN)).await;
    store.ready().await.expect("it may now");
    assert!(answers(&store).await);
}

async fn a_lazy_store_logs_that_redis_is_unreachable(library: ClientLibrary) {
    let log = Log::capture();
    let mut redis = Redis::not_started();
    let warnings = || log.text().matches("Redis cannot be used yet").count();
    let (mut timeout, mut stores) = (SHORT, 0);
    let store = loop {
        stores += 1;
        let lazy = builder(library).connect_timeout(timeout).url(&redis.url());
        let store = lazy.connect_lazy().expect("a good URL");
        eventually("it is logged", async || warnings() == stores).await;
        // On a busy machine a short timeout ends before the first attempt has failed.
        if log.text().contains("Connection refused") {
            break store;
        }
        timeout *= 2;
    };
    let text = log.text();
    assert!(!text.contains("Os {") && !text.contains("Err("), "{text}");

    redis.restart();
    store.ready().await.expect("Redis is there");
    assert!(answers(&store).await);
    eventually("it is logged", async || log.text().contains("Redis can be used now")).await;
    assert_eq!(warnings(), stores);
}

async fn a_password_that_is_changed_later_is_logged_once(library: ClientLibrary) {
    let log = Log::capture();
    let redis = Redis::start();
    set_user(&redis, &line(PLAIN)).await;
    let store = connect(library, &url(&redis, "limiter")).await;

    // Its connections end with the old one.
    redis.command::<()>("ACL", ["DELUSER", "limiter"]).await;
    set_user(&redis, &line(PLAIN).replace(">password", ">another")).await;
    eventually("checks are refused", async || {
        let check = try_decide(&store, Operation::Check, &limit(), "k", 1).await;
        check.is_err_and(|error| error.kind() == ErrorKind::Refused)
    })
    .await;
    let logged = the_only_error(&log, &store).await;
    assert!(
        logged.contains("credentials") && logged.contains("WRONGPASS"),
        "{logged}"
    );
}

async fn a_permission_that_is_lost_later_is_logged_once(library: ClientLibrary) {
    let log = Log::capture();
    let redis = Redis::start();
    set_user(&redis, &line(PLAIN)).await;
    let store = connect(library, &url(&redis, "limiter")).await;
    assert!(answers(&store).await);

    redis.command::<()>("ACL", ["SETUSER", "limiter", "-zadd"]).await;
    assert!(!answers(&store).await);
    let logged = the_only_error(&log, &store).await;
    assert!(logged.contains("`ZADD`") && logged.contains(&line(PLAIN)), "{logged}");
}

#[tokio::test]
async fn a_client_of_the_application_logs_a_refusal_once() {
    let log = Log::capture();
    let redis = Redis::start();
    let store = RedisStore::builder().deadline(Duration::from_secs(2));
    let store = store
        .client(redis.client().await.clone())
        .connect_lazy()
        .expect("a good client");
    redis.command::<()>("ACL", ["SETUSER", "default", "-zadd"]).await;
    assert!(!answers(&store).await);
    let logged = the_only_error(&log, &store).await;
    assert!(logged.contains("`ZADD`"), "{logged}");
    let error = store.ready().await.unwrap_err();
    assert!(logged.contains(&error.to_string()), "{error}");
}

#[tokio::test]
async fn a_client_of_redis_rs_without_the_permissions_is_an_error() {
    let redis = Redis::start();
    set_user(&redis, &line(PLAIN).replace(" +zadd ", " ")).await;
    let client = redis::Client::open(url(&redis, "limiter")).expect("a good URL");
    let error = RedisStore::builder().client(client).connect().await.unwrap_err();
    assert!(error.to_string().contains("`ZADD`"), "{error}");
}

#[tokio::test]
async fn a_user_that_one_node_of_a_cluster_lacks_is_found() {
    let cluster = Cluster::start().await;
    let url = cluster.url().replace("://", "://limiter:password@");
    let connect = async || builder(ClientLibrary::RedisRs).url(&url).connect().await;
    for primary in &cluster.primaries {
        set_user(primary, &line(PLAIN)).await;
    }
    let error = connect().await.unwrap_err().to_string();
    // Redis 6.2 does not name the subcommand.
    let named = error.contains("`CLUSTER SLOTS`") && error.contains("`+cluster|slots`");
    assert!(
        named || error.contains("`CLUSTER`") && error.contains("`+cluster`"),
        "{error}"
    );

    let complete = format!("{} +cluster|slots +asking", line(PLAIN));
    for primary in &cluster.primaries {
        set_user(primary, &complete).await;
    }
    assert!(answers(&connect().await.expect("all nodes have it")).await);

    for primary in &cluster.primaries {
        for (denied, named) in [("-zrem", "`ZREM`"), ("-asking", "`ASKING`")] {
            primary.command::<()>("ACL", ["SETUSER", "limiter", denied]).await;
            let error = connect().await.unwrap_err().to_string();
            let replied_by = format!("(the node 127.0.0.1:{} replied: ", primary.port());
            assert!(error.contains(named) && error.contains(&replied_by), "{error}");
            set_user(primary, &complete).await;
        }
        primary.command::<()>("ACL", ["DELUSER", "limiter"]).await;
        let error = connect().await.unwrap_err().to_string();
        assert!(error.contains("credentials") && error.contains("WRONGPASS"), "{error}");
        set_user(primary, &complete).await;
    }
}

#[tokio::test]
async fn while_a_primary_is_dead_the_trial_alone_is_repeated() {
    let mut cluster = Cluster::start().await;
    cluster.primaries[0].kill();
    let alive = &cluster.primaries[1];
    let url = format!("redis-cluster://127.0.0.1:{}", alive.port());
    let _store = builder(ClientLibrary::RedisRs).url(&url).connect_lazy();
    eventually("the trial is repeated", async || alive.script_calls().await > 10).await;
    let memory = alive.cli(&["INFO", "memory"]);
    let cached = memory.lines().find(|line| line.starts_with("number_of_cached_scripts"));
    assert_eq!(cached.map(str::trim), Some("number_of_cached_scripts:1"));
}

#[tokio::test]
async fn a_lookup_of_the_slots_that_is_refused_later_is_logged() {
    let (log, mut cluster) = (Log::capture(), Cluster::start().await);
    for node in cluster.primaries.iter().chain(&cluster.replicas) {
        set_user(node, &format!("{} +cluster|slots +asking", line(PLAIN))).await;
    }
    let url = cluster.url().replace("://", "://limiter:password@");
    let store = connect(ClientLibrary::RedisRs, &url).await;
    cluster.serves(&store).await;

    for node in cluster.primaries.iter().chain(&cluster.replicas) {
        node.command::<()>("ACL", ["SETUSER", "limiter", "-cluster"]).await;
    }
    let [key, ..] = cluster.keys().await;
    cluster.primaries[0].kill();
    eventually("the refusal is logged", async || {
        let check = try_decide(&store, Operation::Check, &limit(), &key, 1).await;
        check.is_err() && errors(&log).iter().any(|error| error.contains("`CLUSTER"))
    })
    .await;
}

#[tokio::test]
async fn a_refused_lookup_of_the_slots_is_forgotten_with_the_next_one() {
    let (log, cluster) = (Log::capture(), Cluster::start().await);
    let nodes: Vec<_> = cluster.primaries.iter().chain(&cluster.replicas).collect();
    let set_users = async |permission: &str| {
        for node in &nodes {
            set_user(node, &format!("{} {permission} +asking", line(PLAIN))).await;
        }
    };
    set_users("+cluster|slots").await;
    let url = cluster.url().replace("://", "://limiter:password@");
    let store = connect(ClientLibrary::RedisRs, &url).await;
    cluster.serves(&store).await;

    let [key, ..] = cluster.keys().await;
    let slot = cluster.slot(&format!("{{key={key}}}")).await.to_string();
    let fails_by = async |cause: &str| {
        eventually(cause, async || {
            let check = try_decide(&store, Operation::Check, &limit(), &key, 1).await;
            check.is_err_and(|error| format!("{error:?}").contains(cause))
        })
        .await;
    };
    set_users("-cluster").await;
    for node in &nodes {
        node.cli(&["CLUSTER", "DELSLOTS", &slot]);
    }
    fails_by("Hash slot not served").await;
    eventually("a lookup is refused", async || {
        let _ = try_decide(&store, Operation::Check, &limit(), &key, 1).await;
        errors(&log).iter().any(|error| error.contains("`CLUSTER"))
    })
    .await;
    set_users("+cluster|slots").await;
    fails_by("no node of the cluster has this slot").await;
}

#[tokio::test]
async fn a_store_without_a_source_is_an_error_that_names_the_fix() {
    for error in [
        RedisStore::builder().connect().await.unwrap_err(),
        RedisStore::builder()
            .connect_lazy()
            .map_err(StoreError::from)
            .unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(
            error.to_string().contains("`.url(\"redis://127.0.0.1:6379\")`"),
            "{error}"
        );
    }
}

#[test]
fn a_store_outside_of_a_runtime_is_an_error_that_names_the_fix() {
    for library in [ClientLibrary::Fred, ClientLibrary::RedisRs] {
        let builder = || builder(library).url("redis://127.0.0.1:1");
        let mut connect = pin!(builder().connect());
        let Poll::Ready(connected) = connect.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
            panic!("it waits for nothing");
        };
        for error in [
            connected.unwrap_err(),
            builder().connect_lazy().map_err(StoreError::from).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            assert!(error.to_string().contains("`#[tokio::main]`"), "{error}");
            assert!(error.to_string().contains("`let _guard = runtime.enter();`"), "{error}");
        }
    }

    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _guard = runtime.enter();
    assert!(RedisStore::builder().url("redis://127.0.0.1:1").connect_lazy().is_ok());
}

#[test]
fn a_store_whose_runtime_has_shut_down_says_so() {
    let redis = Redis::start();
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
    };
    for library in [ClientLibrary::Fred, ClientLibrary::RedisRs] {
        // Alone, and several at once, of which some wait for others.
        for (operation, at_once) in [(Operation::Check, 1), (Operation::Reset, 1), (Operation::Check, 3)] {
            let store = runtime().block_on(async {
                let store = connect(library, &redis.url()).await;
                assert!(answers(&store).await);
                store
            });
            let decided = runtime().block_on(async {
                let mut decided = JoinSet::new();
                for number in 0..at_once {
                    let store = store.clone();
                    decided.spawn(async move { try_decide(&store, operation, &limit(), &number.to_string(), 1).await });
                }
                decided.join_all().await
            });
            let ready = runtime().block_on(async { timeout(PATIENCE, store.ready()).await });
            let decided = decided.into_iter().map(Result::err);
            for error in decided.chain([ready.expect("it does not wait").err()]) {
                let error = error.expect("nothing sends it");
                let source = error.source().expect("a cause").to_string();
                assert!(
                    source.contains("the runtime in which the store was connected has shut down"),
                    "{library:?}, {at_once} of {operation:?}: {source}"
                );
            }
        }
    }
}

#[tokio::test]
async fn a_client_of_the_application_keeps_all_other_settings() {
    let redis = Redis::start();
    let (fred, redis_rs) = (redis.client().await.clone(), redis::Client::open(redis.url()));
    let redis_rs = redis_rs.expect("a good URL");
    let builder = || {
        RedisStore::builder()
            .prefix("shop")
            .deadline(Duration::from_secs(3))
            .url("redis://127.0.0.1:1")
    };
    for builder in [builder().client(fred), builder().client(redis_rs)] {
        let store = builder.connect().await.expect("Redis permits it");
        assert!(format!("{store:?}").contains("deadline: 3s"), "{store:?}");
        assert!(answers(&store).await);
        let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
        assert_eq!(keys, ["shop:1:log/1min:test:{key=k}"]);
        redis.command::<()>("FLUSHALL", [""; 0]).await;
    }
}

#[tokio::test]
async fn a_setting_that_a_client_of_the_application_has_already_is_an_error() {
    let fred = Redis::not_started().builder().build().expect("a client");
    let redis_rs = redis::Client::open("redis://127.0.0.1:1").expect("a good URL");
    let of_fred = || RedisStore::builder().client(fred.clone());
    let of_redis_rs = || RedisStore::builder().client(redis_rs.clone());
    let cluster = RedisStore::builder().client([redis_rs.clone()]);

    for (builder, fix) in [
        (of_fred().connections(8), "`.client(pool)`"),
        (of_fred().connections(1), "instead of `.connections(1)`"),
        (
            of_fred().client_library(ClientLibrary::RedisRs),
            "remove one of the two",
        ),
        (
            of_redis_rs().client_library(ClientLibrary::Fred),
            "`.client_library(ClientLibrary::Fred)`",
        ),
        (cluster.client_library(ClientLibrary::Fred), "is one of RedisRs"),
    ] {
        let error = builder.connect_lazy().unwrap_err().to_string();
        assert!(error.contains(fix), "`{fix}` is not in: {error}");
    }
    for builder in [
        of_fred().client_library(ClientLibrary::Fred),
        of_redis_rs().client_library(ClientLibrary::RedisRs).connections(8),
        of_fred().connections(8).url("redis://127.0.0.1:1"),
    ] {
        assert!(builder.connect_lazy().is_ok());
    }
}

#[tokio::test]
async fn connect_runs_the_trial_on_a_client_of_the_application() {
    let redis = Redis::start();
    let client = redis.client().await.clone();
    redis.command::<()>("ACL", ["SETUSER", "default", "-zadd"]).await;
    let error = RedisStore::builder().client(client).connect().await.unwrap_err();
    assert!(error.to_string().contains("`ZADD`"), "{error}");
}

#[tokio::test]
async fn a_store_on_a_client_of_redis_rs_starts_before_its_redis() {
    let mut redis = Redis::not_started();
    let client = redis::Client::open(redis.url()).expect("a good URL");
    let store = RedisStore::builder().deadline(Duration::from_secs(2));
    let store = store.client(client).connect_lazy().expect("Redis may come later");
    assert!(!answers(&store).await);
    redis.restart();
    eventually("the store replies", async || answers(&store).await).await;
}

#[test]
#[should_panic(expected = "such as 5 s")]
fn a_connect_timeout_of_zero_is_an_error() {
    let _ = RedisStore::builder().connect_timeout(Duration::ZERO);
}

#[tokio::test]
async fn a_wrong_url_is_shown_without_its_password() {
    for (url, shown) in [
        ("http://user:secret@localhost:1/", "`http://..@localhost:1`: "),
        ("redis://user:sec#secret@localhost", "`redis://..@localhost`: "),
        ("redis://localhost:99999", "`redis://localhost:99999`: "),
    ] {
        let error = RedisStore::builder().url(url).connect_lazy().unwrap_err();
        assert!(error.to_string().starts_with(shown), "{error}");
        assert!(!format!("{error:?} {error}").contains("sec"), "{error:?}");
    }
}
