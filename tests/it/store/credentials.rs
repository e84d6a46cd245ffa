//! Credentials from a provider, which change while the store runs.

use std::{
    error::Error,
    fs,
    future::{pending, ready},
    iter,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    net::TcpListener,
    sync::RwLock,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_quota::{
    ClientLibrary, Credentials, Limit, RedisStore, RedisStoreBuilder, SlidingLog,
    store::{ErrorKind, Operation, Store},
};

use super::acl::{do_all, wait_for_a_slot};
use super::connect::connect_in_vain;
use crate::support::{
    Cluster, Log, Redis, Sentinel, decide, each_client, eventually, less_patient, patient, try_decide,
};

each_client! {
    passwords_rotate_under_load_without_a_failed_check
    a_file_that_rotates_is_read_for_each_connection
    an_open_connection_is_authenticated_again_without_a_failed_check
    a_connection_stays_when_it_cannot_be_authenticated_again
    a_provider_that_fails_is_named_and_called_again
    a_provider_that_panics_is_called_again
    a_provider_may_take_longer_than_an_attempt_to_connect
    credentials_that_redis_refuses_are_an_error_that_names_the_provider
    connections_that_are_made_together_share_a_call
    while_redis_is_down_the_provider_is_called_seldom
    a_token_that_expires_now_is_replaced_once_a_second
    the_url_has_no_credentials_beside_those_of_a_provider
    a_secret_of_a_provider_is_in_no_error_log_or_debug_output
    a_password_that_the_server_replies_is_in_no_error_log_or_status
}

fn limit() -> Limit {
    SlidingLog::per_hour(1_000_000).into()
}

async fn checks(store: &RedisStore) {
    decide(store, Operation::Check, &limit(), "k", 1).await;
}

/// Adds a password to a user that may do all, or removes one: `>new` or `<old`.
async fn set_user(redis: &Redis, user: &str, password: &str) {
    let set = ["SETUSER", user, "on", password, "~*", "&*", "+@all"];
    redis.command::<()>("ACL", set).await;
}

/// The ids of the connections of a user.
async fn connections(redis: &Redis, user: &str) -> Vec<String> {
    let list: String = redis.command("CLIENT", ["LIST"]).await;
    let user = format!("user={user}");
    let of_user = list.lines().filter(|line| line.split(' ').any(|word| word == user));
    let ids = of_user.map(|line| line.split(' ').next().expect("an id").to_owned());
    ids.collect()
}

/// The attempts to authenticate that Redis has refused.
async fn refused(redis: &Redis) -> usize {
    let log: Vec<std::collections::HashMap<String, String>> = redis.command("ACL", ["LOG"]).await;
    log.iter().filter(|entry| entry["reason"] == "auth").count()
}

/// A provider of the current password of the user `limiter`.
#[derive(Clone)]
struct Vault(Arc<Mutex<String>>);

impl Vault {
    fn new(password: &str) -> Self {
        Self(Arc::new(Mutex::new(password.to_owned())))
    }

    fn rotate(&self, password: &str) {
        *self.0.lock().expect("no test panics here") = password.to_owned();
    }

    fn password(&self) -> String {
        self.0.lock().expect("no test panics here").clone()
    }

    fn builder(&self, library: ClientLibrary) -> RedisStoreBuilder {
        let vault = self.clone();
        patient().client_library(library).credentials(move || {
            let credentials = Credentials::new("limiter", vault.password());
            ready(Ok::<_, String>(credentials))
        })
    }
}

/// Checks without pause in several tasks. While the gate is closed, no check is in flight.
struct Load {
    tasks: JoinSet<()>,
    sent: Arc<AtomicUsize>,
    ends: Arc<AtomicBool>,
    gate: Arc<RwLock<()>>,
}

impl Load {
    fn on(store: &RedisStore) -> Self {
        let (sent, ends, gate) = <(Arc<AtomicUsize>, Arc<AtomicBool>, Arc<RwLock<()>>)>::default();
        let mut tasks = JoinSet::new();
        for number in 0..8 {
            let (store, sent, ends, gate) = (store.clone(), sent.clone(), ends.clone(), gate.clone());
            tasks.spawn(async move {
                while !ends.load(Ordering::Relaxed) {
                    let _open = gate.read().await;
                    decide(&store, Operation::Check, &limit(), &format!("k{number}"), 1).await;
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        Self {
            tasks,
            sent,
            ends,
            gate,
        }
    }

    /// Waits until a hundred more checks were made.
    async fn goes_on(&self) {
        let before = self.sent.load(Ordering::Relaxed);
        eventually("checks are made", async || {
            self.sent.load(Ordering::Relaxed) >= before + 100
        })
        .await;
    }

    /// Ends it. None of the checks has failed.
    async fn end(self) {
        self.ends.store(true, Ordering::Relaxed);
        self.tasks.join_all().await;
    }
}

async fn passwords_rotate_under_load_without_a_failed_check(library: ClientLibrary) {
    let redis = Redis::start();
    set_user(&redis, "limiter", ">p0").await;
    let vault = Vault::new("p0");
    let builder = vault.builder(library).connections(2);
    let store = builder.url(&redis.url()).connect().await.expect("Redis accepts p0");
    wait_for_a_slot(&[&redis], &store, "slots").await;
    let load = Load::on(&store);

    for number in 1..=3 {
        let (old, new) = (format!("p{}", number - 1), format!("p{number}"));
        set_user(&redis, "limiter", &format!(">{new}")).await;
        vault.rotate(&new);
        set_user(&redis, "limiter", &format!("<{old}")).await;
        load.goes_on().await;

        // A check that is in flight on a connection that is killed fails, as with any lost connection.
        let closed = load.gate.write().await;
        let before = connections(&redis, "limiter").await;
        redis.command::<()>("CLIENT", ["KILL", "USER", "limiter"]).await;
        eventually("all are connected again", async || {
            let now = connections(&redis, "limiter").await;
            now.len() == 3
                && now.iter().all(|id| !before.contains(id))
                && try_decide(&store, Operation::Peek, &limit(), "k", 1).await.is_ok()
        })
        .await;
        // The last one that was connected is seen by the client too.
        for _ in 0..20 {
            checks(&store).await;
        }
        drop(closed);
    }
    load.goes_on().await;
    load.end().await;
    assert_eq!(refused(&redis).await, 0, "no connection was made with an old password");
}

async fn a_file_that_rotates_is_read_for_each_connection(library: ClientLibrary) {
    let redis = Redis::start();
    let file = redis.path("password");
    let builder = less_patient().client_library(library).password_file("default", &file);
    let builder = builder.url(&redis.url());

    let fault = format!("{}` cannot be read: No such file", file.display());
    connect_in_vain(builder.clone(), &fault).await;

    for (make, fault) in [
        ("mkfifo", "not a regular file"),
        ("mkdir", "not a regular file"),
        ("ln -s /dev/null", "not a regular file"),
        ("truncate -s 2M", "more than 1 MiB"),
    ] {
        let mut words = make.split(' ');
        let made = Command::new(words.next().expect("a program"))
            .args(words)
            .arg(&file)
            .status();
        assert!(made.expect(make).success(), "{make}");
        connect_in_vain(builder.clone(), fault).await;
        match make {
            "mkdir" => fs::remove_dir(&file).expect("the folder"),
            _ => fs::remove_file(&file).expect("the file"),
        }
    }

    redis.command::<()>("CONFIG", ["SET", "requirepass", "old"]).await;
    fs::write(&file, "old\n").expect("the file");
    let store = builder.connect().await.expect("the password is right");
    checks(&store).await;

    redis.command::<()>("CONFIG", ["SET", "requirepass", "new"]).await;
    checks(&store).await;
    fs::write(&file, "\n new\r\n").expect("the file");
    let kill = ["KILL", "TYPE", "normal", "SKIPME", "yes"];
    redis.command::<()>("CLIENT", kill).await;
    eventually("the new password is used", async || {
        try_decide(&store, Operation::Check, &limit(), "k", 1).await
    })
    .await;
    assert_eq!(refused(&redis).await, 0);
}

async fn an_open_connection_is_authenticated_again_without_a_failed_check(library: ClientLibrary) {
    let redis = Redis::start();
    for user in ["one", "two"] {
        set_user(&redis, user, ">password").await;
    }
    let next = Arc::new(Mutex::new("one"));
    let provider = next.clone();
    let builder = patient().client_library(library).connections(2).credentials(move || {
        let credentials = Credentials::new(*provider.lock().expect("no test panics here"), "password");
        ready(Ok::<_, String>(
            credentials.reauthenticate_after(Duration::from_millis(50)),
        ))
    });
    let store = builder.url(&redis.url()).connect().await.expect("Redis accepts them");
    eventually("both are connected", async || {
        connections(&redis, "one").await.len() == 2
    })
    .await;
    let before = connections(&redis, "one").await;
    wait_for_a_slot(&[&redis], &store, "slots").await;

    let load = Load::on(&store);
    *next.lock().expect("no test panics here") = "two";
    eventually("all have the new user", async || {
        connections(&redis, "one").await.is_empty() && connections(&redis, "two").await.len() == 3
    })
    .await;
    let after = connections(&redis, "two").await;
    assert!(
        before.iter().all(|id| after.contains(id)),
        "{before:?} are still open: {after:?}"
    );
    // The old user is gone: Redis closes its connections.
    redis.command::<()>("ACL", ["DELUSER", "one"]).await;
    load.goes_on().await;
    load.end().await;
}

async fn a_connection_stays_when_it_cannot_be_authenticated_again(library: ClientLibrary) {
    let redis = Redis::start();
    set_user(&redis, "limiter", ">password").await;
    let (log, started) = (Log::capture(), Instant::now());
    let calls = Arc::<AtomicUsize>::default();
    let provider = calls.clone();
    let builder = patient().client_library(library).credentials(move || {
        let password = match provider.fetch_add(1, Ordering::Relaxed) {
            0 => "password",
            _ => "another",
        };
        ready(Ok::<_, String>(
            Credentials::new("limiter", password).reauthenticate_after(Duration::from_millis(50)),
        ))
    });
    let store = builder
        .url(&redis.url())
        .connect()
        .await
        .expect("Redis accepts the first");
    let before = connections(&redis, "limiter").await;
    eventually("it is logged", async || {
        log.text().contains("cannot be authenticated again")
    })
    .await;
    assert!(log.text().contains("WRONGPASS"), "{}", log.text());
    for _ in 0..100 {
        checks(&store).await;
    }
    assert_eq!(connections(&redis, "limiter").await, before);
    let most = 2 + started.elapsed().as_secs() as usize / 5;
    assert!(
        calls.load(Ordering::Relaxed) <= most,
        "it pauses after a failure: {calls:?}"
    );
}

/// An error with its causes.
fn in_full(error: &dyn Error) -> String {
    let chain: Vec<_> = iter::successors(Some(error), |&error| error.source())
        .map(ToString::to_string)
        .collect();
    chain.join(": ")
}

async fn a_provider_that_fails_is_named_and_called_again(library: ClientLibrary) {
    let redis = Redis::start();
    set_user(&redis, "limiter", ">password").await;
    let is_sealed = Arc::new(AtomicBool::new(true));
    let provider = is_sealed.clone();
    let builder = patient().client_library(library).credentials(move || {
        // Like a reply of Redis, which it is not.
        let sealed = "unauthenticated: the vault is sealed";
        let is_sealed = provider.load(Ordering::Relaxed);
        ready(if is_sealed {
            Err(sealed)
        } else {
            Ok(Credentials::new("limiter", "password"))
        })
    });
    let builder = builder.url(&redis.url());
    let fault = "`RedisStoreBuilder::credentials` fails: unauthenticated: the vault is sealed";
    let (error, _) = connect_in_vain(builder.clone(), fault).await;
    assert_eq!(error.kind(), ErrorKind::Unreachable);

    let store = builder.connect_lazy().expect("the settings are good");
    eventually("the error of a check is that of the provider", async || {
        let decided = try_decide(&store, Operation::Check, &limit(), "k", 1).await;
        in_full(&decided.unwrap_err()).contains("the vault is sealed")
    })
    .await;
    is_sealed.store(false, Ordering::Relaxed);
    // Sooner than credentials that were not used would be replaced.
    let ready = timeout(Duration::from_secs(4), store.ready()).await;
    ready.expect("the next attempt calls it").expect("it keeps connecting");
    checks(&store).await;
}

async fn a_provider_that_panics_is_called_again(library: ClientLibrary) {
    let redis = Redis::start();
    set_user(&redis, "limiter", ">password").await;
    let calls = AtomicUsize::new(0);
    let builder = patient().client_library(library).credentials(move || {
        assert!(calls.fetch_add(1, Ordering::Relaxed) > 0, "the first call panics");
        ready(Ok::<_, String>(Credentials::new("limiter", "password")))
    });
    checks(
        &builder
            .url(&redis.url())
            .connect()
            .await
            .expect("the second call returns"),
    )
    .await;
}

async fn a_provider_may_take_longer_than_an_attempt_to_connect(library: ClientLibrary) {
    let redis = Redis::start();
    set_user(&redis, "limiter", ">password").await;
    let calls = Arc::<AtomicUsize>::default();
    let provider = calls.clone();
    let builder = patient().client_library(library).credentials(move || {
        provider.fetch_add(1, Ordering::Relaxed);
        async {
            sleep(Duration::from_secs(2)).await;
            Ok::<_, String>(Credentials::new("limiter", "password"))
        }
    });
    checks(&builder.url(&redis.url()).connect().await.expect("it returns")).await;
    assert_eq!(calls.load(Ordering::Relaxed), 1);

    let never = patient().client_library(library);
    let never = never.credentials(pending::<Result<Credentials, String>>);
    connect_in_vain(
        never.url(&redis.url()),
        "`RedisStoreBuilder::credentials` has not returned",
    )
    .await;
}

async fn credentials_that_redis_refuses_are_an_error_that_names_the_provider(library: ClientLibrary) {
    let redis = Redis::start();
    set_user(&redis, "limiter", ">password").await;
    let wrong = Vault::new("wrong").builder(library);
    let error = wrong.url(&redis.url()).connect().await.unwrap_err();
    let text = error.to_string();
    for part in [
        "refuses the credentials",
        "`RedisStoreBuilder::credentials`",
        "`RedisStoreBuilder::password_file`",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

async fn connections_that_are_made_together_share_a_call(library: ClientLibrary) {
    let redis = Redis::start();
    set_user(&redis, "limiter", ">password").await;
    let calls = Arc::<AtomicUsize>::default();
    let provider = calls.clone();
    let builder = patient().client_library(library).connections(8).credentials(move || {
        provider.fetch_add(1, Ordering::Relaxed);
        async {
            sleep(Duration::from_millis(300)).await;
            Ok::<_, String>(Credentials::new("limiter", "password"))
        }
    });
    let _store = builder.url(&redis.url()).connect().await.expect("Redis accepts them");
    eventually("all are connected", async || {
        connections(&redis, "limiter").await.len() == 8
    })
    .await;
    assert!(calls.load(Ordering::Relaxed) < 8, "{calls:?}");
}

async fn while_redis_is_down_the_provider_is_called_seldom(library: ClientLibrary) {
    let calls = Arc::<AtomicUsize>::default();
    let provider = calls.clone();
    let builder = patient().client_library(library).credentials(move || {
        provider.fetch_add(1, Ordering::Relaxed);
        ready(Ok::<_, String>(Credentials::new("limiter", "password")))
    });
    // As a proxy does whose Redis is down: a client asks for its credentials when it is connected.
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("redis://{}", listener.local_addr().expect("a bound port"));
    let started = Instant::now();
    let store = builder.url(&url).connect_lazy().expect("the settings are good");
    while started.elapsed() < Duration::from_secs(2) {
        let _ = timeout(Duration::from_millis(100), listener.accept()).await;
    }
    let calls = calls.load(Ordering::Relaxed);
    let most = 1 + started.elapsed().as_secs() as usize / 5;
    assert!((1..=most).contains(&calls), "{calls}");
    drop(store);
}

async fn a_token_that_expires_now_is_replaced_once_a_second(library: ClientLibrary) {
    let redis = Redis::start();
    set_user(&redis, "limiter", ">password").await;
    let calls = Arc::<AtomicUsize>::default();
    let provider = calls.clone();
    let builder = patient().client_library(library).credentials(move || {
        provider.fetch_add(1, Ordering::Relaxed);
        ready(Ok::<_, String>(
            Credentials::new("limiter", "password").reauthenticate_after(Duration::ZERO),
        ))
    });
    let started = Instant::now();
    let store = builder.url(&redis.url()).connect().await.expect("Redis accepts them");
    eventually("it was authenticated again twice", async || {
        calls.load(Ordering::Relaxed) >= 3
    })
    .await;
    assert!(started.elapsed() > Duration::from_secs(2), "{:?}", started.elapsed());
    checks(&store).await;
}

async fn the_url_has_no_credentials_beside_those_of_a_provider(library: ClientLibrary) {
    let builder = Vault::new("password").builder(library);
    let error = builder
        .url("redis://user:hunter2@127.0.0.1:1")
        .connect_lazy()
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("the URL has credentials") && !error.contains("hunter2"),
        "{error}"
    );
}

async fn a_secret_of_a_provider_is_in_no_error_log_or_debug_output(library: ClientLibrary) {
    const SECRET: &str = "hunter2secret";
    let log = Log::capture_everything();
    let redis = Redis::start();
    set_user(&redis, "limiter", &format!(">{SECRET}")).await;
    let vault = Vault::new(&format!("wrong-{SECRET}"));
    let builder = || {
        let vault = vault.clone();
        let builder = less_patient().client_library(library).credentials(move || {
            let credentials = Credentials::new("limiter", vault.password());
            ready(Ok::<_, String>(
                credentials.reauthenticate_after(Duration::from_millis(50)),
            ))
        });
        builder.url(&redis.url())
    };
    let mut seen = in_full(&builder().connect().await.unwrap_err());
    vault.rotate(SECRET);
    let store = builder().connect().await.expect("the second is right");
    vault.rotate(&format!("late-{SECRET}"));
    eventually("it is logged", async || {
        log.text().contains("cannot be authenticated again")
    })
    .await;
    redis.command::<()>("CLIENT", ["KILL", "USER", "limiter"]).await;
    eventually("the third is refused", async || {
        let error = try_decide(&store, Operation::Check, &limit(), "k", 1).await.err();
        let text = error.map(|error| in_full(&error)).unwrap_or_default();
        seen += &text;
        text.contains("WRONGPASS")
    })
    .await;
    seen += &format!(
        "{store:?} {:?} {:?} {}",
        builder(),
        Credentials::new("u", SECRET),
        log.text()
    );
    assert!(!seen.contains(SECRET), "{seen}");
}

/// A server without the command replies with its arguments.
async fn a_password_that_the_server_replies_is_in_no_error_log_or_status(library: ClientLibrary) {
    const SECRET: &str = "hunter2secret";
    // What fred itself logs at `DEBUG` and below contains the error as it was received.
    let log = Log::capture();
    let command = if library == ClientLibrary::Fred {
        "AUTH"
    } else {
        "HELLO"
    };
    let redis = Redis::start_with(&["--rename-command", command, &format!("X{command}")]);
    let url = redis.url().replace("://", &format!("://limiter:{SECRET}@"));
    let builder = || less_patient().client_library(library).url(&url);

    let error = builder().connect().await.unwrap_err();
    let mut seen = format!("{} {error:?}", in_full(&error));
    assert!(
        seen.contains(&format!("unknown command '{command}'"))
            || seen.contains(&format!("unknown command `{command}`"))
            // What redis-rs says of the error of Redis 6.2.
            || seen.contains("doesn't support HELLO"),
        "{seen}"
    );
    let store = builder().connect_lazy().expect("a good URL");
    eventually("a check meets the error", async || {
        let error = try_decide(&store, Operation::Check, &limit(), "k", 1)
            .await
            .unwrap_err();
        seen += &format!("{} {error:?}", in_full(&error));
        format!("{:?}", store.status()).contains("unknown command")
    })
    .await;
    seen += &format!("{:?} {}", store.status(), log.text());
    assert!(!seen.contains(SECRET), "{seen}");
}

#[tokio::test]
async fn a_cluster_and_sentinel_are_authenticated_by_a_provider() {
    let cluster = Cluster::start().await;
    for node in cluster.primaries.iter().chain(&cluster.replicas) {
        set_user(node, "default", "resetpass").await;
        set_user(node, "limiter", ">password").await;
    }
    let vault = Vault::new("password");
    let builder = vault.builder(ClientLibrary::RedisRs);
    let store = builder
        .url(&cluster.url())
        .connect()
        .await
        .expect("all nodes accept them");
    cluster.serves(&store).await;
    do_all(&store).await;
    for node in &cluster.primaries {
        set_user(node, "limiter", ">new").await;
    }
    vault.rotate("new");
    for node in &cluster.primaries {
        set_user(node, "limiter", "<password").await;
        node.command::<()>("CLIENT", ["KILL", "USER", "limiter"]).await;
    }
    cluster.serves(&store).await;

    let sentinel = Sentinel::start_with_passwords("of-redis", "of+sentinels").await;
    let url = sentinel.url() + "&sentinelPassword=of%2Bsentinels";
    let password = || ready(Ok::<_, String>(Credentials::new("default", "of-redis")));
    let store = patient().credentials(password).url(&url).connect().await;
    checks(&store.expect("the sentinels have other credentials")).await;
}

#[tokio::test]
async fn a_client_with_credentials_of_its_own_is_an_error_beside_a_provider() {
    let password = || RedisStore::builder().password_file("limiter", "/run/secrets/redis");
    let fred = fred::types::Builder::default_centralized().build().expect("a client");
    let with_password = redis::Client::open("redis://:hunter2@127.0.0.1:1").expect("a good URL");
    let without = redis::Client::open("redis://127.0.0.1:1").expect("a good URL");
    let sentinel = "redis-sentinel://127.0.0.1:1?sentinelServiceName=main";
    for (builder, words) in [
        (password().client(fred), "`credential_provider` of its `Config`"),
        (password().client(with_password.clone()), "the client has credentials"),
        (
            password().client([without.clone(), with_password]),
            "the client has credentials",
        ),
        (
            password().client_library(ClientLibrary::Fred).url(sentinel),
            "need redis-rs",
        ),
    ] {
        let error = builder.connect_lazy().unwrap_err().to_string();
        assert!(error.contains(words) && !error.contains("hunter2"), "{error}");
    }
    assert!(password().client(without).connect_lazy().is_ok());
    assert!(password().url(sentinel).connect_lazy().is_ok());
}
