//! The subjects that all replicas deny most often, which a store in Redis counts.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde_json::{Value, json};
use tower_quota::{
    Admin, Ban, ClientLibrary, Limiter, MemoryStore, Policy, RedisStore, RedisStoreBuilder, SlidingLog,
    store::{DeniedSubjects, Store},
};

use super::router::Operator;
use crate::support::{Cluster, Log, Redis, connected, each_client, eventually, less_patient, patient};

const SET: &str = "quota:1:denied:mails";

fn builder(library: ClientLibrary) -> RedisStoreBuilder {
    patient().client_library(library).denied_subjects(true)
}

/// A replica of a service. Its limit denies all but the first mail of a key.
struct Replica {
    limiter: Limiter,
    operator: Operator,
}

impl Replica {
    fn of(store: impl Store) -> Self {
        Self::with(store, |admin| admin)
    }

    fn with(store: impl Store, set: impl FnOnce(Admin) -> Admin) -> Self {
        let limiter = Limiter::new(store, Policy::new("mails", SlidingLog::per_day(1)));
        let admin = set(Admin::new().limiter(&limiter));
        let operator = Operator(admin.router_behind_authentication());
        Self { limiter, operator }
    }

    async fn connect(builder: RedisStoreBuilder, redis: &Redis) -> Self {
        Self::of(connected(builder, &redis.url()).await)
    }

    /// Denies a key so many times that was never admitted before, or is denied already.
    async fn deny(&self, key: &str, times: u64) {
        let _ = self.limiter.charge(key, 1).await.expect("the store answers");
        for _ in 0..times {
            let decision = self.limiter.check(key).await.expect("the store answers");
            assert!(!decision.is_allowed());
        }
    }

    /// The denials by all replicas.
    async fn of_all(&self) -> Value {
        self.operator.policy().await["denials_of_all_replicas"].take()
    }

    async fn has(&self, total: u64) -> Value {
        eventually("the denials are counted", async || {
            self.of_all().await["total"] == total
        })
        .await;
        self.of_all().await
    }

    /// The keys and their denials.
    async fn listed(&self, total: u64, keys: &[&str]) -> Vec<(String, u64)> {
        let of_all = self.has(total).await;
        let mut listed = Vec::new();
        for subject in of_all["subjects"].as_array().expect("a list") {
            for key in keys {
                let found = self.operator.get("mails", &format!("key={key}")).await.json();
                if found["denied_by_all_replicas"]["subject"] == subject["subject"] {
                    assert_eq!(found["denied_by_all_replicas"], *subject);
                    listed.push(((*key).to_owned(), subject["denials"].as_u64().expect("a number")));
                }
            }
        }
        assert_eq!(
            Value::from(listed.len()),
            of_all["subjects"].as_array().map_or(0, Vec::len)
        );
        listed
    }
}

each_client! {
    each_replica_lists_what_the_others_deny
    a_ban_in_another_replica_is_listed
    nothing_is_sent_without_denials
    a_set_is_bounded_and_the_bounds_of_its_counts_hold
    a_flood_of_keys_in_one_second_is_within_its_bounds
    a_set_expires_a_day_after_the_last_denial
    hashed_keys_are_no_readable_ones_in_the_set
    a_report_has_the_denials_of_its_process_while_the_store_fails
    something_else_under_the_key_is_logged_once_and_in_the_report
    a_user_that_may_not_load_the_script_is_refused
}

async fn each_replica_lists_what_the_others_deny(library: ClientLibrary) {
    let redis = Redis::start();
    let connect = async || connected(builder(library), &redis.url()).await;
    // Two secrets: each lists the subjects by its own hashes.
    let with =
        |store, secret: &'static str| Replica::with(store, |admin| admin.hash_secret(secret).expect("it is long"));
    let one = with(connect().await, "0123456789abcdef");
    let other = with(connect().await, "another of 16 b.");
    let began = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .expect("after it")
        .as_secs();
    assert_eq!(
        one.of_all().await,
        json!({ "total": 0, "since": null, "most_of_others": 0, "subjects": [] })
    );

    one.deny("both", 3).await;
    other.deny("both", 2).await;
    other.deny("theirs", 4).await;
    let expected = [("both".to_owned(), 5), ("theirs".to_owned(), 4)];
    let keys = ["both", "theirs"];
    // One that starts later, and denies nothing.
    let later = Replica::connect(builder(library), &redis).await;
    for replica in [&one, &other, &later] {
        assert_eq!(replica.listed(9, &keys).await, expected);
        let of_all = replica.of_all().await;
        let since = of_all["since"].as_u64().expect("a time");
        assert!((began..began + 60).contains(&since), "{since}");
        assert_eq!(
            (&of_all["most_of_others"], &of_all["subjects"][0]["error"]),
            (&json!(0), &json!(0))
        );
    }
    assert_eq!(later.operator.policy().await["denials"]["total"], 0);
    let [hash, of_other] =
        [one.of_all().await, other.of_all().await].map(|of_all| of_all["subjects"][0]["subject"].clone());
    assert_ne!(hash, of_other);

    other.deny("theirs", 2).await;
    assert_eq!(
        one.listed(11, &keys).await,
        [("theirs".to_owned(), 6), ("both".to_owned(), 5)]
    );
    // A replica without the setting has its own denials alone.
    let without = Replica::connect(patient().client_library(library), &redis).await;
    assert_eq!(without.of_all().await, Value::Null);
    without.deny("both", 1).await;
    assert_eq!(without.operator.policy().await["denials"]["total"], 1);
}

/// Except where a store hashes the keys, by which it cannot look for a ban.
async fn a_ban_in_another_replica_is_listed(library: ClientLibrary) {
    for is_hashed in [false, true] {
        let redis = Redis::start();
        let replica = async || {
            let builder = match is_hashed {
                true => builder(library).hash_keys("0123456789abcdef"),
                false => builder(library),
            };
            let policy = Policy::new("mails", SlidingLog::per_day(1)).ban(Ban::after(1, Duration::from_secs(3_600)));
            let limiter = Limiter::new(connected(builder, &redis.url()).await, policy);
            let admin = Admin::new().limiter(&limiter).show_keys(true);
            let operator = Operator(admin.router_behind_authentication());
            Replica { limiter, operator }
        };
        let (one, other) = (replica().await, replica().await);
        one.deny("42", 3).await;
        other.has(3).await;
        let subjects = async |replica: &Replica| -> Vec<Value> {
            let bans = replica.operator.policy().await["bans"].take();
            let bans = bans.as_array().expect("a list").iter();
            bans.map(|ban| ban["subject"].clone()).collect()
        };
        assert_eq!(subjects(&one).await, ["key=42"]);
        let listed: &[&str] = if is_hashed { &[] } else { &["key=42"] };
        assert_eq!(subjects(&other).await, listed, "hashed: {is_hashed}");
    }
}

async fn nothing_is_sent_without_denials(library: ClientLibrary) {
    let redis = Redis::start();
    let store = connected(builder(library), &redis.url()).await;
    let limiter = Limiter::new(store, Policy::new("mails", SlidingLog::per_day(10)));
    let calls = async || {
        let stats: String = redis.command("INFO", ["commandstats"]).await;
        let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:"));
        line.map(|line| line.split(',').next().unwrap_or_default().to_owned())
    };
    assert!(limiter.check("a").await.expect("the store answers").is_allowed());
    let before = calls().await;
    assert!(before.is_some());
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    assert_eq!(calls().await, before);

    // Many denials of one second are one call.
    let _ = limiter.charge("a", 10).await.expect("the store answers");
    for _ in 0..50 {
        assert!(!limiter.check("a").await.expect("the store answers").is_allowed());
    }
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    let number = |calls: Option<String>| calls.and_then(|calls| calls.rsplit('=').next()?.parse::<u64>().ok());
    let more = number(calls().await).expect("a number") - number(before).expect("a number");
    // The charge, the first check, which is denied and cached, and the denials, unless a second ended between them.
    assert!((3..=4).contains(&more), "{more} calls");
}

async fn a_set_is_bounded_and_the_bounds_of_its_counts_hold(library: ClientLibrary) {
    let redis = Redis::start();
    let replica = Replica::connect(builder(library), &redis).await;
    let members = (0..1_000).flat_map(|n| ["5".to_owned(), format!("key={n}")]);
    redis
        .command::<()>("ZADD", std::iter::once(SET.to_owned()).chain(members))
        .await;
    for n in 0..3 {
        replica.deny(&format!("new-{n}"), 2).await;
    }
    let of_all = replica.has(6).await;
    let count: u64 = redis.command("ZCOUNT", [SET, "(0", "+inf"]).await;
    assert_eq!(count, 1_000);
    assert_eq!(of_all["most_of_others"], 5);
    let subjects = of_all["subjects"].as_array().expect("a list");
    assert_eq!(subjects.len(), 1_000);
    for (place, subject) in subjects.iter().enumerate() {
        let denials = if place < 3 { 7 } else { 5 };
        assert_eq!((&subject["denials"], &subject["error"]), (&json!(denials), &json!(5)));
    }
}

async fn a_flood_of_keys_in_one_second_is_within_its_bounds(library: ClientLibrary) {
    let redis = Redis::start();
    let replica = Replica::connect(builder(library), &redis).await;
    let keys: Vec<_> = (0..300).map(|n| format!("{n}")).collect();
    for key in &keys {
        replica.deny(key, 1).await;
        replica.deny("often", 1).await;
    }
    let of_all = replica.has(600).await;
    let subjects = of_all["subjects"].as_array().expect("a list");
    let most_of_others = of_all["most_of_others"].as_u64().expect("a number");
    assert!((100..=301).contains(&subjects.len()), "{}", subjects.len());
    let often = replica.operator.get("mails", "key=often").await.json()["denied_by_all_replicas"].take();
    assert_eq!(often["subject"], subjects[0]["subject"]);
    for (subject, denied) in subjects.iter().zip(std::iter::once(300).chain(std::iter::repeat(1))) {
        let [denials, error] = ["denials", "error"].map(|name| subject[name].as_u64().expect("a number"));
        assert!(denials - error <= denied && denied <= denials, "{denied}: {subject}");
        assert!(error <= most_of_others);
    }
    if subjects.len() < 301 {
        assert!(most_of_others >= 1);
    }
}

async fn a_set_expires_a_day_after_the_last_denial(library: ClientLibrary) {
    let redis = Redis::start();
    let replica = Replica::connect(builder(library), &redis).await;
    replica.deny("a", 1).await;
    replica.has(1).await;
    let day = 24 * 3_600_000;
    let left = async || redis.command::<u64>("PTTL", [SET]).await;
    assert!((day - 60_000..=day).contains(&left().await));
    redis.command::<()>("PEXPIRE", [SET, "60000"]).await;
    replica.deny("b", 1).await;
    replica.has(2).await;
    assert!((day - 60_000..=day).contains(&left().await));
}

async fn hashed_keys_are_no_readable_ones_in_the_set(library: ClientLibrary) {
    let redis = Redis::start();
    let builder = builder(library).hash_keys("sixteen random bytes");
    let [one, other] = [
        Replica::connect(builder.clone(), &redis).await,
        Replica::connect(builder, &redis).await,
    ];
    one.deny("ann@example.com", 2).await;
    assert_eq!(
        other.listed(2, &["ann@example.com"]).await,
        [("ann@example.com".to_owned(), 2)]
    );
    let members: Vec<String> = redis.command("ZRANGE", [SET, "0", "-1"]).await;
    assert!(members.iter().any(|member| member.starts_with("keyed=")), "{members:?}");
    assert!(members.iter().all(|member| !member.contains("ann")), "{members:?}");
}

async fn a_report_has_the_denials_of_its_process_while_the_store_fails(library: ClientLibrary) {
    let mut redis = Redis::start();
    let builder = less_patient().client_library(library).denied_subjects(true);
    let replica = Replica::connect(builder, &redis).await;
    replica.deny("a", 2).await;
    redis.kill();
    let policy = replica.operator.policy().await;
    assert_eq!(
        (&policy["denials_of_all_replicas"], &policy["denials"]["total"]),
        (&Value::Null, &json!(2))
    );
    assert!(
        policy["denials_error"].as_str().is_some_and(|error| !error.is_empty()),
        "{policy}"
    );

    redis.restart();
    eventually("the denials are counted again", async || {
        let _ = replica.limiter.charge("b", 1).await;
        let _ = replica.limiter.check("b").await;
        let policy = replica.operator.policy().await;
        policy["denials_error"].is_null() && policy["denials_of_all_replicas"]["total"].as_u64() > Some(0)
    })
    .await;
}

async fn something_else_under_the_key_is_logged_once_and_in_the_report(library: ClientLibrary) {
    let (log, redis) = (Log::capture(), Redis::start());
    let replica = Replica::connect(builder(library), &redis).await;
    redis.command::<()>("SET", [SET, "x"]).await;
    let logged = || log.text().matches("the denied subjects cannot be counted").count();
    replica.deny("a", 1).await;
    eventually("it is logged", async || logged() == 1).await;
    replica.deny("a", 1).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(logged(), 1);
    let policy = replica.operator.policy().await;
    assert!(
        policy["denials_error"]
            .as_str()
            .is_some_and(|error| error.contains("WRONGTYPE")),
        "{policy}"
    );

    redis.command::<()>("DEL", [SET]).await;
    replica.deny("a", 1).await;
    replica.has(1).await;
}

async fn a_user_that_may_not_load_the_script_is_refused(library: ClientLibrary) {
    let redis = Redis::start();
    let user = [
        "SETUSER", "strict", "on", ">secret", "~quota:*", "+@all", "-eval", "-script",
    ];
    redis.command::<()>("ACL", user).await;
    redis.command::<()>("SCRIPT", ["LOAD", RedisStore::scripts()[0]]).await;
    let url = format!("redis://strict:secret@127.0.0.1:{}", redis.port());
    let strict = || builder(library).url(&url).connect();
    let error = strict().await.unwrap_err();
    assert!(error.to_string().contains("`RedisStore::scripts()`"), "{error}");

    redis.command::<()>("SCRIPT", ["LOAD", RedisStore::scripts()[2]]).await;
    let replica = Replica::of(strict().await.expect("the script is loaded"));
    replica.deny("a", 1).await;
    replica.has(1).await;
}

#[tokio::test]
async fn the_replicas_of_a_cluster_list_what_the_others_deny() {
    let cluster = Cluster::start().await;
    let connect = async || connected(builder(ClientLibrary::RedisRs), &cluster.url()).await;
    let (one, other) = (connect().await, connect().await);
    cluster.serves(&one).await;
    let policies = |store| {
        let policy = |name: &'static str| Policy::new(name, SlidingLog::per_day(1));
        Limiter::new(store, ["mails", "exports", "logins"].map(policy))
    };
    let (one, other) = (policies(one), policies(other));
    for limiter in [&one, &other] {
        let _ = limiter.charge("a", 1).await.expect("the store answers");
        assert!(!limiter.check("a").await.expect("the store answers").is_allowed());
    }
    let operator = Operator::of_limiter(&one);
    eventually("the denials of all policies are counted", async || {
        let report = operator.report().await;
        let policies = report["policies"].as_array().expect("a list").iter();
        let of_all: Vec<_> = policies
            .map(|policy| policy["denials_of_all_replicas"]["total"].clone())
            .collect();
        of_all == [2, 2, 2]
    })
    .await;
}

#[tokio::test]
async fn a_store_around_a_store_passes_them_on() {
    fn subjects(store: &impl Store) -> Option<&DeniedSubjects> {
        store.denied_subjects()
    }
    let redis = Redis::start();
    let store = connected(patient().denied_subjects(true), &redis.url()).await;
    assert_eq!(
        format!("{:?}", subjects(&store).expect("it has them")),
        "DeniedSubjects { .. }"
    );
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let boxed: Box<dyn Store> = Box::new(store);
    assert!(subjects(&shared).is_some() && subjects(&boxed).is_some());
    assert!(subjects(&MemoryStore::new()).is_none());

    let replica = Replica::of(boxed);
    drop(shared);
    replica.deny("a", 1).await;
    replica.has(1).await;
    let memory = Replica::of(MemoryStore::new());
    memory.deny("a", 1).await;
    let policy = memory.operator.policy().await;
    assert_eq!(
        (&policy["denials_of_all_replicas"], &policy["denials_error"]),
        (&Value::Null, &Value::Null)
    );
}
