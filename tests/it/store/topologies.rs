//! Connections to Redis through each client: TLS, sockets, credentials, pools, Sentinel, and connections that fall silent.

use std::{
    env,
    error::Error,
    fs, iter,
    path::Path,
    time::{Duration, Instant},
};

use fred::{interfaces::ClientLike, types::config::ServerConfig};
use tokio::{
    net::TcpListener,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_quota::{
    ClientLibrary, Key, Limit, RedisStore, RedisStoreBuilder, SlidingLog,
    store::{Charge, ErrorKind, Operation, Store, StoreRequest},
};

use super::connect::connect_in_vain;
use crate::support::{
    Log, PATIENCE, Proxy, Redis, Sentinel, Worker, connected, decide, each_client, eventually, free_port, less_patient,
    lone_sentinel, patient, redis_key, this_binary, timed, try_decide,
};

each_client! {
    a_unix_socket_connects
    a_user_and_a_password_with_special_characters_connect
    a_database_number_selects_the_database
    a_pool_has_the_number_of_connections_that_is_set
    a_pool_goes_on_when_one_of_its_connections_is_lost
    a_pool_goes_on_when_one_of_its_connections_falls_silent
    a_connection_that_is_checked_is_preferred_to_one_that_is_lost
    after_a_reply_the_connection_is_not_checked
    a_connection_that_is_lost_while_nobody_asks_is_replaced
    a_server_that_closes_each_connection_is_not_flooded_with_attempts
    a_tls_connection_serves
    a_self_signed_certificate_is_not_trusted
    an_authority_that_is_replaced_is_trusted
    sentinel_leads_to_the_new_primary
    a_planned_failover_is_followed_while_the_old_primary_accepts_writes
    the_primary_that_most_sentinels_report_is_connected_to
    a_primary_that_works_is_left_only_for_one_that_can_be_used
    a_new_primary_that_refuses_the_store_is_logged
    sentinel_and_redis_may_have_different_credentials
    a_sentinel_that_is_unreachable_is_skipped
    a_sentinel_that_hangs_is_skipped
    the_sentinels_of_the_url_are_asked_again
    a_sentinel_that_reports_an_old_primary_is_skipped
    a_server_that_has_become_a_replica_is_left
    a_connection_that_falls_silent_under_traffic_is_replaced
    a_connection_that_is_full_is_replaced
    a_redis_that_hangs_under_traffic_serves_when_it_resumes
    checks_are_served_after_a_partition
    an_outage_is_not_reported_with_the_reason_of_an_earlier_one
    a_reply_after_the_deadline_fails_the_check_and_keeps_the_connection
    a_password_is_in_no_error_log_or_debug_output
}

/// As behind a name, whose address is that of the new primary.
async fn a_server_that_has_become_a_replica_is_left(library: ClientLibrary) {
    let new = Redis::start();
    // Its replies are `READONLY`, also as a part of the reply of a script, and `MASTERDOWN` without its primary.
    for (options, primary, operation) in [
        (&[][..], new.port(), Operation::Check),
        (&[], new.port(), Operation::Charge),
        (&["--replica-serve-stale-data", "no"], 1, Operation::Check),
    ] {
        let old = Redis::start_with(options);
        let proxy = Proxy::start(old.port()).await;
        let store = connected(patient().client_library(library), &proxy.url()).await;
        decide(&store, operation, &limit(), "k", 1).await;

        proxy.go_to(new.port());
        old.command::<()>("REPLICAOF", ["127.0.0.1", &primary.to_string()])
            .await;
        eventually("checks are counted by the new primary", async || {
            try_decide(&store, operation, &limit(), "k", 1).await
        })
        .await;
    }
}

fn limit() -> Limit {
    SlidingLog::per_hour(1_000_000).into()
}

fn builder(library: ClientLibrary) -> RedisStoreBuilder {
    RedisStore::builder().client_library(library)
}

async fn connect(library: ClientLibrary, url: &str) -> RedisStore {
    connected(builder(library).connect_timeout(PATIENCE), url).await
}

async fn answers(store: &impl Store) -> bool {
    try_decide(store, Operation::Peek, &limit(), "k", 1).await.is_ok()
}

async fn serves(store: &RedisStore) {
    eventually("the store is answered", async || {
        let outcome = try_decide(store, Operation::Check, &limit(), "k", 1).await;
        outcome.is_ok_and(|outcome| outcome.allowed)
    })
    .await;
}

/// A store with so many connections.
async fn pool(library: ClientLibrary, redis: &Redis, connections: usize) -> RedisStore {
    let builder = patient().client_library(library).connections(connections);
    connected(builder, &redis.url()).await
}

async fn connections(redis: &Redis) -> usize {
    let list: String = redis.command("CLIENT", ["LIST"]).await;
    list.lines().count()
}

/// A path in a URL.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace('%', "%25").replace(' ', "%20")
}

async fn a_unix_socket_connects(library: ClientLibrary) {
    for name in ["redis.sock", "my redis.sock"] {
        let redis = Redis::start_with(&["--unixsocket", name, "--requirepass", "p@ss+w&rd"]);
        let socket = escaped(&redis.path(name));
        let url = format!("redis+unix://:p%40ss+w&rd@localhost{socket}");
        serves(&connect(library, &url).await).await;
    }
}

#[tokio::test]
async fn redis_rs_connects_to_urls_that_fred_does_not_read() {
    let redis = Redis::start_with(&[
        "--unixsocket",
        "redis.sock",
        "--requirepass",
        "pw",
        "--databases",
        "400",
    ]);
    let socket = escaped(&redis.path("redis.sock"));
    let server = redis.url().replace("://", "://:pw@");
    for url in [
        format!("redis+unix://:pw@{socket}"),
        format!("{server}/3/"),
        format!("{server}/300"),
    ] {
        let store = RedisStore::builder().url(&url).connect().await;
        serves(&store.unwrap_or_else(|error| panic!("{url}: {error}"))).await;
    }
    for url in [
        "redis-sentinel://127.0.0.1?sentinelServiceName=m&node=127.0.0.2",
        "redis-sentinel://127.0.0.1:26379?sentinelServiceName=m&node=[::1]:26380",
    ] {
        assert!(RedisStore::builder().url(url).connect_lazy().is_ok(), "{url}");
        // The application has chosen.
        assert!(builder(ClientLibrary::Fred).url(url).connect_lazy().is_err(), "{url}");
    }
    // The error is that of the first library.
    assert!(
        RedisStore::builder()
            .url("redis://127.0.0.1:99999")
            .connect_lazy()
            .is_err()
    );
}

async fn a_user_and_a_password_with_special_characters_connect(library: ClientLibrary) {
    let redis = Redis::start_with(&["--user", "lim:iter", "on", ">p@ss/w?rd#1+&", "~*", "+@all"]);
    let address = redis.url().replace("redis://", "");
    let url = format!("redis://lim%3Aiter:p%40ss%2Fw%3Frd%231+&@{address}");
    serves(&connect(library, &url).await).await;
}

async fn a_database_number_selects_the_database(library: ClientLibrary) {
    let redis = Redis::start();
    serves(&connect(library, &format!("{}/3", redis.url())).await).await;
    let keyspace: String = redis.command("INFO", ["keyspace"]).await;
    assert!(
        keyspace.contains("db3:keys=1") && !keyspace.contains("db0"),
        "{keyspace}"
    );
}

async fn a_pool_has_the_number_of_connections_that_is_set(library: ClientLibrary) {
    let redis = Redis::start();
    let before = connections(&redis).await;
    let store = pool(library, &redis, 3).await;
    eventually("all are connected", async || connections(&redis).await == before + 3).await;
    for remaining in (999_990..1_000_000).rev() {
        let outcome = decide(&store, Operation::Check, &limit(), "k", 1).await;
        assert_eq!(outcome.states()[0].remaining, remaining);
    }
    let list: String = redis.command("CLIENT", ["LIST"]).await;
    let used = list.lines().filter(|client| client.contains("cmd=evalsha")).count();
    assert_eq!(used, 3, "{list}");

    drop(store);
    eventually("all are closed", async || connections(&redis).await == before).await;
}

async fn a_pool_goes_on_when_one_of_its_connections_is_lost(library: ClientLibrary) {
    let redis = Redis::start();
    let before = connections(&redis).await;
    let store = pool(library, &redis, 2).await;
    eventually("both are connected", async || connections(&redis).await == before + 2).await;
    serves(&store).await;

    close_one(&redis).await;
    // After the first request that fails, the other connection is used until this one is back.
    let mut lost = 0;
    for _ in 0..20 {
        lost += usize::from(!answers(&store).await);
    }
    assert!(lost <= 1, "{lost} of 20 lost");
    eventually("it is back", async || connections(&redis).await == before + 2).await;
}

/// Closes a connection of a store.
async fn close_one(redis: &Redis) {
    let list: String = redis.command("CLIENT", ["LIST"]).await;
    let victim = list
        .lines()
        .find(|client| client.contains("cmd=evalsha"))
        .expect("one has sent a call");
    let id = victim
        .split(' ')
        .find_map(|field| field.strip_prefix("id="))
        .expect("it has an id");
    redis.command::<()>("CLIENT", ["KILL", "ID", id]).await;
}

async fn a_pool_goes_on_when_one_of_its_connections_falls_silent(library: ClientLibrary) {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let builder = less_patient().client_library(library).connections(2);
    let before = connections(&redis).await;
    let store = connected(builder, &proxy.url()).await;
    eventually("both are connected", async || connections(&redis).await == before + 2).await;
    serves(&store).await;

    let opened = proxy.opened();
    proxy.blackhole_the_first();
    // After the first request without a reply, the other connection is used until this one is replaced.
    let mut lost = 0;
    for _ in 0..20 {
        lost += usize::from(!answers(&store).await);
    }
    assert!(lost <= 1, "{lost} of 20 lost");
    eventually("it is replaced", async || proxy.opened() > opened).await;
}

async fn a_connection_that_is_checked_is_preferred_to_one_that_is_lost(library: ClientLibrary) {
    const DEADLINE: Duration = Duration::from_secs(1);

    eventually(
        "an answer is late, and the connection not silent for half a second",
        async || {
            let redis = Redis::start();
            let proxy = Proxy::start(redis.port()).await;
            let builder = patient().client_library(library).connections(2);
            let before = connections(&redis).await;
            let store = connected(builder.deadline(DEADLINE), &proxy.url()).await;
            eventually("both are connected", async || connections(&redis).await == before + 2).await;
            let opened = proxy.opened();
            proxy.go_to(free_port());
            close_one(&redis).await;
            eventually("it cannot be replaced", async || proxy.opened() > opened).await;

            let started = Instant::now();
            let held = proxy.hold();
            assert!(!answers(&store).await);
            drop(held);
            let mut lost = 0;
            for _ in 0..20 {
                lost += usize::from(!answers(&store).await);
            }
            let brief = started.elapsed() < DEADLINE + Duration::from_millis(500);
            assert!(!brief || lost == 0, "{lost} of 20 lost");
            brief
        },
    )
    .await;
}

async fn after_a_reply_the_connection_is_not_checked(library: ClientLibrary) {
    let redis = Redis::start();
    // After the deadline of a check it would be.
    let store = connected(patient().client_library(library), &redis.url()).await;
    let before = redis.calls("ping").await;
    // A connection that was checked is not checked again for a moment.
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(500) {
        serves(&store).await;
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(redis.calls("ping").await, before);
}

async fn a_connection_that_is_lost_while_nobody_asks_is_replaced(library: ClientLibrary) {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let _store = connected(patient().client_library(library), &proxy.url()).await;

    let before = proxy.opened();
    redis.close_connections().await;
    eventually("another one is opened", async || proxy.opened() > before).await;
}

async fn a_server_that_closes_each_connection_is_not_flooded_with_attempts(library: ClientLibrary) {
    const SHORTEST_PAUSE: Duration = Duration::from_millis(150);

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("a bound port").port();
    let store = patient()
        .client_library(library)
        .url(&format!("redis://127.0.0.1:{port}"))
        .connect_lazy()
        .expect("the URL is good");
    listener.accept().await.expect("the first attempt");
    let started = Instant::now();
    for _ in 0..3 {
        listener.accept().await.expect("another attempt");
    }
    assert!(started.elapsed() >= 3 * SHORTEST_PAUSE, "{:?}", started.elapsed());
    drop(store);
}

/// A server that speaks TLS alone, and its certificate.
pub(super) fn tls() -> (Redis, u16) {
    let mut redis = Redis::not_started();
    certify(&redis);
    let port = free_port();
    redis.set(&["--tls-port", &port.to_string(), "--tls-auth-clients", "no"]);
    redis.set(&["--tls-cert-file", "certificate.pem", "--tls-key-file", "key.pem"]);
    redis.set(&["--tls-ca-cert-file", "certificate.pem"]);
    redis.restart();
    (redis, port)
}

/// Gives a server that is not running a new certificate.
fn certify(redis: &Redis) {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    fs::write(redis.path("certificate.pem"), certified.cert.pem()).expect("the certificate");
    fs::write(redis.path("key.pem"), certified.signing_key.serialize_pem()).expect("the key");
}

async fn a_tls_connection_serves(library: ClientLibrary) {
    let (redis, port) = tls();
    let url = format!("rediss://localhost:{port}");
    let mut worker = Worker::start_trusting(&url, library, &redis.path("certificate.pem"));
    worker.order("k", 3, 5);
    assert_eq!(worker.outcome().0, 3);
}

async fn a_self_signed_certificate_is_not_trusted(library: ClientLibrary) {
    let (_redis, port) = tls();
    let builder = builder(library).url(&format!("rediss://localhost:{port}"));
    let (error, _) = connect_in_vain(builder, "ertificate").await;
    assert!(in_full(&error).contains("ertificate"), "{}", in_full(&error));
    assert!(error.to_string().contains("`SSL_CERT_FILE`"), "{error}");
}

/// The client library of a process that trusts the certificates in the file `SSL_CERT_FILE`.
const TRUSTING: &str = "TOWER_QUOTA_TRUSTING";

async fn an_authority_that_is_replaced_is_trusted(library: ClientLibrary) {
    let folder = tempfile::tempdir().expect("a folder");
    let output = this_binary("store::topologies::an_authority_is_replaced")
        .env("SSL_CERT_FILE", folder.path().join("trusted.pem"))
        .env(TRUSTING, format!("{library:?}"))
        .output()
        .expect("this binary starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

/// In another process.
#[tokio::test]
async fn an_authority_is_replaced() {
    let Ok(library) = env::var(TRUSTING) else { return };
    let library = match library.as_str() {
        "Fred" => ClientLibrary::Fred,
        _ => ClientLibrary::RedisRs,
    };
    let (mut redis, port) = tls();
    let trust = |redis: &Redis| {
        let trusted = env::var_os("SSL_CERT_FILE").expect("the test sets it");
        fs::copy(redis.path("certificate.pem"), trusted).expect("the certificate")
    };
    trust(&redis);
    let store = connected(patient().client_library(library), &format!("rediss://localhost:{port}")).await;
    serves(&store).await;

    redis.kill();
    certify(&redis);
    trust(&redis);
    redis.restart();
    serves(&store).await;
    store.receive_wakes();
    eventually("the store is subscribed", async || {
        redis.wake_subscriptions().await == 1
    })
    .await;
}

async fn sentinel_leads_to_the_new_primary(library: ClientLibrary) {
    let mut sentinel = Sentinel::start_that_fails_over().await;
    let store = connect(library, &sentinel.url()).await;
    serves(&store).await;

    sentinel.primary.kill();
    let promoted = sentinel.promoted().await;
    serves(&store).await;
    assert_eq!(promoted.cli(&["KEYS", "quota:*"]).lines().count(), 1);
}

async fn a_planned_failover_is_followed_while_the_old_primary_accepts_writes(library: ClientLibrary) {
    const QUOTA: u64 = 300;
    const BEFORE: u64 = 10;

    let sentinel = Sentinel::start().await;
    // Sentinels make it a replica ten seconds after a failover; this one never becomes one.
    let stays = ["SETUSER", "default", "-replicaof", "-slaveof"];
    sentinel.primary.command::<()>("ACL", stays).await;
    let store = connected(patient().client_library(library), &sentinel.url()).await;
    let (limit, key) = (SlidingLog::per_hour(QUOTA).into(), Key::from("k"));
    let is_admitted = async || {
        let outcome = try_decide(&store, Operation::Check, &limit, "k", 1).await;
        outcome.is_ok_and(|outcome| outcome.allowed)
    };
    for _ in 0..BEFORE {
        assert!(is_admitted().await);
    }
    sentinel.primary.command::<u64>("WAIT", ["2", "0"]).await;

    sentinel.fail_over().await;
    let promoted = sentinel.promoted().await;
    let counted = || promoted.cli(&["ZCARD", &redis_key("test", &limit, &key)]);
    let replicated = counted();
    let mut lost = 0;
    eventually("the new primary counts", async || {
        let was_admitted = is_admitted().await;
        let is_moved = counted() != replicated;
        lost += u64::from(was_admitted && !is_moved);
        is_moved
    })
    .await;
    let mut admitted = BEFORE + lost + 1;
    while is_admitted().await {
        admitted += 1;
    }
    assert!(admitted <= QUOTA + lost, "{admitted} admitted, {lost} of them lost");
    let replication = sentinel.primary.cli(&["INFO", "replication"]);
    assert!(replication.contains("role:master"), "{replication}");
}

async fn the_primary_that_most_sentinels_report_is_connected_to(library: ClientLibrary) {
    let (old, new) = (Redis::start(), Redis::start());
    // One is cut off from the others, perhaps the first one that a client queries.
    for cut_off in 0..3 {
        let mut ports = Vec::new();
        for number in 0..3 {
            let primary = if number == cut_off { &old } else { &new };
            ports.push(lone_sentinel(primary.port()).await.to_string());
        }
        let nodes = ports
            .join("&node=127.0.0.1:")
            .replacen('&', "?sentinelServiceName=main&", 1);
        let url = format!("redis-sentinel://127.0.0.1:{nodes}");
        let store = connected(patient().client_library(library), &url).await;
        eventually("the new primary counts", async || {
            serves(&store).await;
            new.command::<u64>("DBSIZE", [""; 0]).await == 1
        })
        .await;
        new.command::<()>("FLUSHALL", [""; 0]).await;
    }
}

/// Connects a store to a primary, of which the only sentinel then reports this one.
async fn store_that_is_led(library: ClientLibrary, primary: &Redis, to: u16) -> (RedisStore, Proxy) {
    let (current, other) = (lone_sentinel(primary.port()).await, lone_sentinel(to).await);
    let proxy = Proxy::start(current).await;
    let url = format!("redis-sentinel://127.0.0.1:{}?sentinelServiceName=main", proxy.port());
    let store = connected(patient().client_library(library), &url).await;
    proxy.go_to(other);
    proxy.cut_before_the_next_answer();
    (store, proxy)
}

async fn a_primary_that_works_is_left_only_for_one_that_can_be_used(library: ClientLibrary) {
    const ATTEMPTS: u32 = 3;

    let redis = Redis::start();
    let gone = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = gone.local_addr().expect("a bound port").port();
    let (store, _proxy) = store_that_is_led(library, &redis, port).await;
    let mut attempts = 0;
    eventually("the other one is connected to in vain", async || {
        decide(&store, Operation::Check, &limit(), "k", 1).await;
        // It closes the connection.
        attempts += u32::from(timeout(Duration::from_millis(10), gone.accept()).await.is_ok());
        attempts == ATTEMPTS
    })
    .await;
}

async fn a_new_primary_that_refuses_the_store_is_logged(library: ClientLibrary) {
    let log = Log::capture();
    let (redis, other) = (Redis::start(), Redis::start());
    other.command::<()>("CONFIG", ["SET", "requirepass", "another"]).await;
    let (store, _proxy) = store_that_is_led(library, &redis, other.port()).await;
    eventually("it is logged", async || {
        log.text().contains("the new primary cannot be used")
    })
    .await;
    decide(&store, Operation::Check, &limit(), "k", 1).await;
}

/// What sentinels report may be out of date.
#[tokio::test]
async fn a_new_primary_that_is_none_is_not_used() {
    let log = Log::capture();
    let (redis, other) = (Redis::start(), Redis::start());
    other
        .command::<()>("REPLICAOF", ["127.0.0.1", &redis.port().to_string()])
        .await;
    let (store, _proxy) = store_that_is_led(ClientLibrary::Fred, &redis, other.port()).await;
    eventually("it is logged", async || {
        log.text().contains("the server is not a primary")
    })
    .await;
    decide(&store, Operation::Check, &limit(), "k", 1).await;
}

async fn sentinel_and_redis_may_have_different_credentials(library: ClientLibrary) {
    let sentinel = Sentinel::start_with_passwords("of-redis", "of+sentinels").await;
    let url = sentinel.url_with(":of-redis@") + "&sentinelPassword=of%2Bsentinels";
    serves(&connect(library, &url).await).await;
}

async fn a_sentinel_that_is_unreachable_is_skipped(library: ClientLibrary) {
    let mut sentinel = Sentinel::start().await;
    sentinel.kill_watcher(0);
    serves(&connect(library, &sentinel.url()).await).await;
}

async fn a_sentinel_that_hangs_is_skipped(library: ClientLibrary) {
    let sentinel = Sentinel::start().await;
    let mut stores = Vec::new();
    for position in 0..3 {
        let _hanging = sentinel.freeze_watcher(position);
        let store = connected(patient().client_library(library), &sentinel.url()).await;
        store.receive_wakes();
        stores.push(store);
        eventually("the store is subscribed", async || {
            sentinel.primary.wake_subscriptions().await == stores.len() as u64
        })
        .await;

        sentinel.primary.close_connections().await;
        for store in &stores {
            serves(store).await;
        }
    }
}

async fn the_sentinels_of_the_url_are_asked_again(library: ClientLibrary) {
    let mut sentinel = Sentinel::start().await;
    let store = connected(patient().client_library(library), &sentinel.url_of_the_first()).await;
    serves(&store).await;

    // Those that the first one reports.
    sentinel.kill_watcher(1);
    sentinel.kill_watcher(2);
    sentinel.primary.close_connections().await;
    serves(&store).await;
}

async fn a_sentinel_that_reports_an_old_primary_is_skipped(library: ClientLibrary) {
    let redis = Redis::start();
    let replica = Redis::start_with(&["--replicaof", "127.0.0.1", &redis.port().to_string()]);
    let current = lone_sentinel(redis.port()).await;
    for old in [free_port(), replica.port()] {
        let outdated = lone_sentinel(old).await;
        for (first, second) in [(outdated, current), (current, outdated)] {
            let url = format!("redis-sentinel://127.0.0.1:{first}?sentinelServiceName=main&node=127.0.0.1:{second}");
            let store = patient().client_library(library).url(&url).connect_lazy();
            serves(&store.expect("the URL is good")).await;
        }
    }
}

/// Checks without pause until one is answered, and returns how long that took.
async fn until_served(store: &RedisStore) -> Duration {
    let served = eventually("it is served again", async || answers(store).await);
    timed(served).await.1
}

async fn a_connection_that_falls_silent_under_traffic_is_replaced(library: ClientLibrary) {
    let (old, new) = (Redis::start(), Redis::start());
    let proxy = Proxy::start(old.port()).await;
    let store = connect(library, &proxy.url()).await;
    serves(&store).await;

    proxy.blackhole_and_go_to(new.port());
    let silence = until_served(&store).await;
    assert!(silence < Duration::from_secs(3), "{silence:?}");
}

async fn a_connection_that_is_full_is_replaced(library: ClientLibrary) {
    let (old, new) = (Redis::start(), Redis::start());
    let proxy = Proxy::start(old.port()).await;
    let store = connect(library, &proxy.url()).await;
    serves(&store).await;

    proxy.blackhole_and_go_to(new.port());
    // More than the socket buffers hold, so that the client waits to write.
    let limit = limit();
    let keys: Vec<_> = (0..5_000)
        .map(|number| Key::path(&format!("/{number:0>100}")))
        .collect();
    let charges: Vec<_> = keys.iter().map(|key| [Charge::new("test", &limit, key, 1)]).collect();
    let requests: Vec<_> = charges
        .iter()
        .map(|charge| StoreRequest::new(Operation::Peek, charge))
        .collect();
    let mut calls = JoinSet::new();
    for _ in 0..20 {
        calls.spawn(store.decide(&requests));
    }
    while let Some(answer) = calls.join_next().await {
        answer.expect("no call panics").unwrap_err();
    }

    let silence = until_served(&store).await;
    assert!(silence < Duration::from_secs(3), "{silence:?}");
}

async fn a_redis_that_hangs_under_traffic_serves_when_it_resumes(library: ClientLibrary) {
    let redis = Redis::start();
    let store = connect(library, &redis.url()).await;
    serves(&store).await;

    let frozen = redis.freeze();
    for _ in 0..20 {
        assert!(!answers(&store).await);
    }
    drop(frozen);
    let silence = until_served(&store).await;
    assert!(silence < Duration::from_secs(3), "{silence:?}");
}

async fn checks_are_served_after_a_partition(library: ClientLibrary) {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let store = connect(library, &proxy.url()).await;
    serves(&store).await;

    proxy.partition();
    for _ in 0..20 {
        assert!(!answers(&store).await);
    }
    proxy.heal();
    let silence = until_served(&store).await;
    assert!(silence < Duration::from_secs(3), "{silence:?}");
}

async fn an_outage_is_not_reported_with_the_reason_of_an_earlier_one(library: ClientLibrary) {
    let redis = Redis::start_with(&["--requirepass", "old"]);
    let proxy = Proxy::start(redis.port()).await;
    let url = proxy.url().replace("://", "://:new@");
    let builder = less_patient().client_library(library).url(&url);
    is_not_reported_in_an_outage(builder, &redis, &proxy).await;
}

#[tokio::test]
async fn an_outage_of_a_client_is_not_reported_with_the_reason_of_an_earlier_one() {
    let redis = Redis::start_with(&["--requirepass", "old"]);
    let proxy = Proxy::start(redis.port()).await;
    let mut builder = redis.builder();
    builder.with_config(|config| {
        config.server = ServerConfig::new_centralized("127.0.0.1", proxy.port());
        config.password = Some("new".to_owned());
        config.fail_fast = false;
    });
    let client = builder.build().expect("a client");
    client.connect();
    is_not_reported_in_an_outage(less_patient().client(client), &redis, &proxy).await;
}

/// The store has a password that Redis refuses at first.
async fn is_not_reported_in_an_outage(builder: RedisStoreBuilder, redis: &Redis, proxy: &Proxy) {
    let store = builder.connect_lazy().expect("Redis may come later");
    let error = async || {
        let outcome = try_decide(&store, Operation::Check, &limit(), "k", 1).await;
        outcome.err().map(|error| error.kind())
    };
    eventually("the password is refused", async || {
        error().await == Some(ErrorKind::Refused)
    })
    .await;
    redis.command::<()>("CONFIG", ["SET", "requirepass", "new"]).await;
    serves(&store).await;

    let before = proxy.opened();
    proxy.partition();
    eventually("there is no connection", async || {
        let is_lost = proxy.opened() > before;
        let error = error().await;
        assert_ne!(error, Some(ErrorKind::Refused));
        is_lost && error == Some(ErrorKind::Unreachable)
    })
    .await;
}

async fn a_reply_after_the_deadline_fails_the_check_and_keeps_the_connection(library: ClientLibrary) {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let store = connect(library, &proxy.url()).await;
    serves(&store).await;

    eventually(
        "an answer is late, and the connection not silent for half a second",
        async || {
            let (started, opened) = (Instant::now(), proxy.opened());
            let held = proxy.hold();
            assert!(!answers(&store).await);
            drop(held);
            serves(&store).await;
            let brief = started.elapsed() < Duration::from_millis(500);
            assert!(
                !brief || proxy.opened() == opened,
                "a slow connection is not a silent one"
            );
            brief
        },
    )
    .await;
}

/// The error with its causes, as an application would log it.
fn in_full(error: &(dyn Error + 'static)) -> String {
    let causes = iter::successors(Some(error), |&error| error.source());
    let causes: Vec<_> = causes.map(|error| format!("{error} {error:?}")).collect();
    causes.join(": ")
}

async fn a_password_is_in_no_error_log_or_debug_output(library: ClientLibrary) {
    const SECRET: &str = "hunter2secret";
    let log = Log::capture_everything();
    let mut redis = Redis::start_with(&["--requirepass", SECRET]);
    let address = redis.url().replace("redis://", "");
    let mut seen = String::new();

    let wrong = format!("no-{SECRET}");
    for url in [
        format!("redis://:{wrong}@{address}"),
        format!("redis://{SECRET}@{address}"),
        format!("redis://user:{SECRET}@{address}"),
        format!("redis://:{SECRET}@{address}/200"),
        format!("redis://:{SECRET}@{address}/x"),
        format!("redis://:{SECRET}@127.0.0.1:notaport"),
        format!("redis://:{SECRET}@"),
        format!("redis://:{SECRET}@{address}?db=1"),
        format!("redis-ring://:{SECRET}@{address}"),
        format!("redis-sentinel://:{SECRET}@{address}"),
        format!("redis-sentinel://:{SECRET}@127.0.0.1:1?sentinelServiceName=main&sentinelPassword={SECRET}"),
        format!("redis-cluster://:{SECRET}@127.0.0.1:1"),
        format!("http://:{SECRET}@{address}"),
        format!(":{SECRET}@{address}"),
    ] {
        let builder = builder(library).connect_timeout(Duration::from_millis(300));
        let error = builder.clone().url(&url).connect().await.unwrap_err();
        seen += &in_full(&error);
        match builder.url(&url).connect_lazy() {
            Ok(store) => {
                let error = try_decide(&store, Operation::Check, &limit(), "k", 1)
                    .await
                    .unwrap_err();
                seen += &format!("{store:?} {}", in_full(&error));
            }
            Err(error) => seen += &in_full(&error),
        }
    }

    let builder = builder(library);
    seen += &format!("{builder:?}");
    let store = connect(library, &format!("redis://:{SECRET}@{address}")).await;
    serves(&store).await;
    redis.kill();
    for _ in 0..50 {
        if let Err(error) = try_decide(&store, Operation::Check, &limit(), "k", 1).await {
            seen += &in_full(&error);
        }
    }
    seen += &format!("{store:?}");
    seen += &log.text();
    assert!(!seen.contains(SECRET), "{seen}");
}

#[test]
#[should_panic(expected = "1 to 64")]
fn a_pool_of_no_connections_is_an_error() {
    let _ = RedisStore::builder().connections(0);
}

#[test]
#[should_panic(expected = "1 to 64")]
fn a_pool_of_too_many_connections_is_an_error() {
    let _ = RedisStore::builder().connections(65);
}

#[tokio::test]
async fn a_client_of_redis_rs_keeps_its_tls_settings() {
    let (redis, port) = tls();
    let certificate = fs::read(redis.path("certificate.pem")).expect("the certificate");
    let certificates = redis::TlsCertificates {
        client_tls: None,
        root_cert: Some(certificate),
    };
    let client = redis::Client::build_with_tls(format!("rediss://localhost:{port}"), certificates);
    let store = RedisStore::builder()
        .client(client.expect("a good certificate"))
        .connect()
        .await;
    serves(&store.expect("the client will do")).await;
}
