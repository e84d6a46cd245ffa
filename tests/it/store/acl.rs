//! The Redis users in `docs/redis.md` have the permissions that a limiter needs, and no others.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use fred::{
    interfaces::ClientLike,
    types::{Builder, ClusterHash, CustomCommand, config::Config},
};
use tower_quota::{
    ClientLibrary, Concurrency, Key, Limiter, Policy, RedisStore, SlidingLog,
    store::{Charge, ChargeLine, ErrorKind, LeaseId, Operation, Store, StoreRequest},
};

use super::connect::connect_in_vain;
use crate::support::{Algorithm, Cluster, Log, Redis, Sentinel, decide, each_client, eventually, patient, try_decide};

each_client! {
    the_plain_user_has_all_permissions_that_a_limiter_needs
    the_strict_user_works_after_the_script_is_loaded
    the_strict_user_fails_without_the_script
    the_user_of_a_sentinel_can_find_its_primary
    the_first_database_needs_no_permission_and_another_one_the_line_of_the_error
    a_url_of_another_kind_of_server_is_refused_by_name
    the_line_of_an_error_has_what_the_servers_require
    a_user_of_the_sentinels_needs_the_permissions_of_the_page
}

const OPERATIONS: [Operation; 4] = [Operation::Check, Operation::Charge, Operation::Peek, Operation::Reset];

/// The words of the line of `docs/redis.md` that begins with this.
pub(super) fn line(begin: &str) -> Vec<String> {
    let page = include_str!("../../../docs/redis.md");
    let line = page.lines().find(|line| line.starts_with(begin));
    let line = line.unwrap_or_else(|| panic!("docs/redis.md has no line that begins with `{begin}`"));
    line.split(' ').skip(1).map(str::to_owned).collect()
}

#[test]
fn the_strict_user_differs_in_one_permission() {
    let without = |word| line(PLAIN).into_iter().filter(move |one| one != word);
    let strict = line(STRICT)
        .into_iter()
        .map(|word| word.replace("strict-limiter", "limiter"));
    assert!(without("+eval").eq(strict), "the users differ in `+eval` alone");
}

async fn allow(redis: &Redis, begin: &str) {
    redis.command::<()>("ACL", line(begin)).await;
}

pub(super) const PLAIN: &str = "ACL SETUSER limiter reset";
const STRICT: &str = "ACL SETUSER strict-limiter reset";

fn url(redis: &Redis, user: &str) -> String {
    redis.url().replace("://", &format!("://{user}:password@"))
}

async fn connect(library: ClientLibrary, url: &str) -> RedisStore {
    let builder = patient().client_library(library);
    builder.url(url).connect().await.expect("the user may connect")
}

/// Every algorithm and operation, the waits of what is denied, and a refund.
pub(super) async fn do_all(store: &RedisStore) {
    for (number, algorithm) in Algorithm::ALL.into_iter().enumerate() {
        let key = format!("k{number}");
        for operation in OPERATIONS {
            decide(store, operation, &algorithm.limit(3), &key, 1).await;
        }
        while decide(store, Operation::Check, &algorithm.limit(3), &key, 1)
            .await
            .allowed
        {}
        decide(store, Operation::Check, &algorithm.limit(2), &key, 2).await;
        let admitted_at = Duration::ZERO;
        decide(store, Operation::Refund { admitted_at }, &algorithm.limit(3), &key, 1).await;
    }
}

/// A request waits for a slot, whose release wakes it.
pub(super) async fn wait_for_a_slot(nodes: &[&Redis], store: &RedisStore, key: &str) {
    let channels = async || {
        let mut channels = BTreeSet::<String>::new();
        for node in nodes {
            channels.extend(node.command::<Vec<_>>("PUBSUB", ["CHANNELS", "quota:1:wake:*"]).await);
        }
        channels
    };
    eventually("the stores before have unsubscribed", async || {
        channels().await.is_empty()
    })
    .await;
    let (limit, key) = (Concurrency::new(1).into(), Key::from(key));
    let leases = [LeaseId::random(), LeaseId::random()];
    let line = ChargeLine {
        number: 1,
        longest_us: 1_000_000,
        ahead: 0,
        leads: None,
        leads_elsewhere: false,
    };
    for (operation, lease) in [(Operation::Check, 0), (Operation::Wait, 1), (Operation::EndLease, 0)] {
        let charge = Charge::new("streams", &limit, &key, 1).lease(leases[lease]);
        let charges = [charge.in_line(Some(line))];
        let response = store.decide(&[StoreRequest::new(operation, &charges)]).await;
        let waits = !response.expect("Redis replies").outcomes()[0].allowed;
        assert_eq!(waits, operation == Operation::Wait);
    }
    store.receive_wakes();
    eventually("the store has subscribed, or may not", async || {
        let mut refused = Vec::new();
        for node in nodes {
            refused.extend(self::refused(node).await);
        }
        !refused.is_empty() || channels().await.len() == 1
    })
    .await;
}

/// The commands that Redis refused, without those that are sent on connecting and not needed.
async fn refused(redis: &Redis) -> Vec<String> {
    let log: Vec<HashMap<String, String>> = redis.command("ACL", ["LOG"]).await;
    let objects = log.into_iter().filter_map(|mut entry| entry.remove("object"));
    objects.filter(|object| !is_needless(object)).collect()
}

/// Whether it is a command that fred sends on connecting, or the store for a warning, and that is not needed.
pub(super) fn is_needless(object: &str) -> bool {
    // Redis 6.2 logs `client` and `config` for each of their subcommands.
    ["info", "client|id", "client", "config|get", "config"].contains(&object)
}

async fn the_plain_user_has_all_permissions_that_a_limiter_needs(library: ClientLibrary) {
    let redis = Redis::start();
    allow(&redis, PLAIN).await;
    let store = connect(library, &url(&redis, "limiter")).await;
    do_all(&store).await;
    wait_for_a_slot(&[&redis], &store, "42").await;
    assert_eq!(refused(&redis).await, [""; 0]);
    no_other_command_runs(&redis, "limiter", &["KEYS *", "FLUSHALL", "GET other", "CONFIG GET *"]).await;
}

async fn the_strict_user_works_after_the_script_is_loaded(library: ClientLibrary) {
    let redis = Redis::start();
    allow(&redis, STRICT).await;
    for script in RedisStore::scripts() {
        redis.command::<()>("SCRIPT", ["LOAD", script]).await;
    }

    let store = connect(library, &url(&redis, "strict-limiter")).await;
    do_all(&store).await;
    wait_for_a_slot(&[&redis], &store, "42").await;
    assert_eq!(refused(&redis).await, [""; 0]);
    let forbidden = [
        "EVAL redis.call('TIME') 0",
        "SCRIPT FLUSH",
        "KEYS *",
        "FLUSHALL",
        "GET other",
        "CONFIG GET *",
    ];
    no_other_command_runs(&redis, "strict-limiter", &forbidden).await;
}

async fn the_strict_user_fails_without_the_script(library: ClientLibrary) {
    let redis = Redis::start();
    allow(&redis, STRICT).await;
    let builder = patient().client_library(library);
    let store = builder.url(&url(&redis, "strict-limiter")).connect_lazy();
    let store = store.expect("the URL is good");
    store.ready().await.unwrap_err();
    let error = try_decide(&store, Operation::Check, &Algorithm::SLIDING_LOG.limit(3), "k", 1).await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("NOPERM"), "{error}");
}

/// What the key says of its expiry is believed by the checks that follow.
#[tokio::test]
async fn a_log_with_a_precision_names_no_expiry_that_was_refused() {
    let redis = Redis::start();
    let store = patient().url(&redis.url()).connect().await.expect("it is up");
    let limit = SlidingLog::new(1_000_000, Duration::from_secs(60)).precision(60).into();
    let check = async || try_decide(&store, Operation::Check, &limit, "k", 1).await;
    check().await.expect("the key is new");
    redis.command::<()>("ACL", ["SETUSER", "default", "-pexpireat"]).await;
    eventually("a later expiry is refused", async || {
        check().await.is_err_and(|error| error.kind() == ErrorKind::Refused)
    })
    .await;
    let keys: Vec<String> = redis.command("KEYS", ["*log*"]).await;
    let [key] = &keys[..] else { panic!("{keys:?}") };
    let named: bytes::Bytes = redis.command("GETRANGE", [key, "56", "63"]).await;
    let named = f64::from_le_bytes(named[..].try_into().expect("a number")) / 1e3;
    assert!(named <= redis.expires_at(key).await as f64, "{named}");
}

/// As where they are granted after a deploy. What a cluster permits across slots is found then too.
#[tokio::test]
async fn permissions_that_come_later_are_found() {
    let log = Log::capture();
    let redis = Redis::start();
    let user = [
        "SETUSER",
        "limiter",
        "reset",
        "on",
        ">password",
        "+@connection",
        "+info",
    ];
    redis.command::<()>("ACL", user).await;
    let store = patient().url(&url(&redis, "limiter")).connect_lazy();
    let store = store.expect("the URL is good");
    eventually("the refusal is logged", async || {
        log.text().contains("Redis refuses a permission")
    })
    .await;
    allow(&redis, PLAIN).await;
    eventually("it is tried again", async || {
        log.text().contains("Redis can be used now")
    })
    .await;
    do_all(&store).await;
}

/// Redis replies `NOPERM` to each of these.
async fn no_other_command_runs(redis: &Redis, user: &str, commands: &[&str]) {
    let config = Config::from_url(&url(redis, user)).expect("a good URL");
    let client = Builder::from_config(config).build().expect("a client");
    client.init().await.expect("the user may connect");
    for command in commands {
        let (name, arguments) = command.split_once(' ').unwrap_or((command, ""));
        let arguments: Vec<_> = arguments.split_terminator(' ').collect();
        let custom = CustomCommand::new(name, ClusterHash::Random, false);
        let error = client.custom::<(), _>(custom, arguments).await.unwrap_err();
        assert!(error.details().starts_with("NOPERM"), "{command}: {error}");
    }
    client.quit().await.expect("it is connected");
}

async fn the_user_of_a_sentinel_can_find_its_primary(library: ClientLibrary) {
    let sentinel = Sentinel::start().await;
    allow(&sentinel.primary, PLAIN).await;
    sentinel
        .primary
        .command::<()>("ACL", ["SETUSER", "limiter", "+role"])
        .await;
    let store = connect(library, &sentinel.url_with("limiter:password@")).await;
    do_all(&store).await;
    assert_eq!(refused(&sentinel.primary).await, [""; 0]);
}

/// The words of the command that an error shows.
fn line_in(error: &str) -> Vec<String> {
    let (_, line) = error.split_once("`ACL SETUSER ").expect("the error shows a line");
    let (line, _) = line.split_once('`').expect("the line ends");
    ["SETUSER"]
        .into_iter()
        .chain(line.split(' '))
        .map(str::to_owned)
        .collect()
}

async fn the_first_database_needs_no_permission_and_another_one_the_line_of_the_error(library: ClientLibrary) {
    let redis = Redis::start();
    allow(&redis, PLAIN).await;
    let store = connect(library, &format!("{}/0", url(&redis, "limiter"))).await;
    do_all(&store).await;
    assert_eq!(refused(&redis).await, [""; 0]);

    let other = format!("{}/3", url(&redis, "limiter"));
    let builder = patient().client_library(library).url(&other);
    let error = connect_in_vain(builder, "+select").await.0.to_string();
    redis.command::<()>("ACL", line_in(&error)).await;
    do_all(&connect(library, &other).await).await;
}

async fn a_url_of_another_kind_of_server_is_refused_by_name(library: ClientLibrary) {
    let redis = Redis::start();
    let sentinel = format!(
        "{}?sentinelServiceName=main",
        redis.url().replace("redis://", "redis-sentinel://")
    );
    let mut wrong = vec![(sentinel, "no Sentinel")];
    if library == ClientLibrary::RedisRs {
        wrong.push((redis.url().replace("redis://", "redis-cluster://"), "no cluster"));
    }
    let cluster = Cluster::start().await;
    wrong.extend(
        cluster
            .primaries
            .iter()
            .map(|primary| (primary.url(), "`redis-cluster://..`")),
    );
    // Each key alone can be used on the only node of a cluster.
    let only = Redis::start_with(&["--cluster-enabled", "yes"]);
    let slots = (0..16_384).map(|slot: u16| slot.to_string());
    let add_slots: Vec<_> = std::iter::once("ADDSLOTS".to_owned()).chain(slots).collect();
    only.command::<()>("CLUSTER", add_slots).await;
    wrong.push((only.url(), "`redis-cluster://..`"));
    for (url, words) in wrong {
        let error = patient().client_library(library).url(&url).connect().await.unwrap_err();
        assert!(error.to_string().contains(words), "{url}: {error}");
    }
}

async fn the_line_of_an_error_has_what_the_servers_require(library: ClientLibrary) {
    let sentinel = Sentinel::start().await;
    allow(&sentinel.primary, PLAIN).await;
    let more = ["SETUSER", "limiter", "+role", "+select", "-zadd"];
    sentinel.primary.command::<()>("ACL", more).await;
    let url = sentinel.url_with("limiter:password@").replace("?", "/3?");
    let error = patient().client_library(library).url(&url).connect().await;
    let line = line_in(&error.unwrap_err().to_string());
    sentinel.primary.command::<()>("ACL", line).await;
    sentinel.primary.command::<()>("ACL", ["LOG", "RESET"]).await;
    do_all(&connect(library, &url).await).await;
    assert_eq!(refused(&sentinel.primary).await, [""; 0]);
}

async fn a_user_of_the_sentinels_needs_the_permissions_of_the_page(library: ClientLibrary) {
    let sentinel = Sentinel::start().await;
    let line = line("ACL SETUSER watcher reset");
    let watcher: Vec<_> = ["ACL"].into_iter().chain(line.iter().map(String::as_str)).collect();
    sentinel.command_to_watchers(&watcher);
    if library == ClientLibrary::Fred {
        let error = error_of(library, &sentinel, "password").await;
        assert!(error.contains("a sentinel refuses the command `SENTINEL"), "{error}");
        assert!(error.contains("`+sentinel"), "{error}");
        sentinel.command_to_watchers(&["ACL", "SETUSER", "watcher", "+sentinel|sentinels"]);
    }
    do_all(&connect(library, &with_user(&sentinel, "password")).await).await;

    let error = error_of(library, &sentinel, "wrong").await;
    assert!(error.contains("a sentinel refuses the connection"), "{error}");
    assert!(
        error.contains("`&sentinelUsername=user&sentinelPassword=password`"),
        "{error}"
    );
}

fn with_user(sentinel: &Sentinel, password: &str) -> String {
    format!(
        "{}&sentinelUsername=watcher&sentinelPassword={password}",
        sentinel.url()
    )
}

async fn error_of(library: ClientLibrary, sentinel: &Sentinel, password: &str) -> String {
    let builder = patient().client_library(library).url(&with_user(sentinel, password));
    let error = builder.connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(!error.to_string().contains("ACL SETUSER"), "{error}");
    error.to_string()
}

#[tokio::test]
async fn the_line_of_an_error_has_what_a_cluster_requires() {
    let cluster = Cluster::start().await;
    for primary in &cluster.primaries {
        allow(primary, PLAIN).await;
    }
    let url = cluster.url().replace("://", "://limiter:password@");
    let builder = patient().client_library(ClientLibrary::RedisRs);
    let error = builder.url(&url).connect().await.unwrap_err().to_string();
    for primary in &cluster.primaries {
        primary.command::<()>("ACL", line_in(&error)).await;
        primary.command::<()>("ACL", ["LOG", "RESET"]).await;
    }
    let store = connect(ClientLibrary::RedisRs, &url).await;
    cluster.serves(&store).await;
    is_served_while_a_slot_moves(&cluster, store).await;
    for primary in &cluster.primaries {
        assert_eq!(refused(primary).await, [""; 0]);
    }
}

#[tokio::test]
async fn the_user_of_a_cluster_can_find_its_slots() {
    let cluster = Cluster::start().await;
    for primary in &cluster.primaries {
        allow(primary, PLAIN).await;
        primary
            .command::<()>("ACL", ["SETUSER", "limiter", "+cluster|slots", "+asking"])
            .await;
    }
    let url = cluster.url().replace("://", "://limiter:password@");
    let store = connect(ClientLibrary::RedisRs, &url).await;
    cluster.serves(&store).await;
    do_all(&store).await;

    is_served_while_a_slot_moves(&cluster, store).await;
    for primary in &cluster.primaries {
        assert_eq!(refused(primary).await, [""; 0]);
    }
}

/// A new key of a slot that moves is found where it moves to.
async fn is_served_while_a_slot_moves(cluster: &Cluster, store: RedisStore) {
    let [key, ..] = cluster.keys().await;
    let slot = cluster.slot(&format!("{{key={key}}}")).await;
    cluster.begin_to_move(slot, 0, 1).await;
    let limiter = Limiter::new(store, Policy::new("mails", SlidingLog::per_hour(1)));
    for is_allowed in [true, false] {
        let decision = limiter.check(&*key).await.expect("its node is asked");
        assert_eq!(decision.is_allowed(), is_allowed);
    }
}
