//! The rules for alerts in a Prometheus that scrapes services while there are faults.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use axum::{Router, routing::get as route};
use serde_json::Value;
use tempfile::TempDir;
use tokio::time::sleep;
use tower_quota::{MemoryStore, SlidingLog};

use crate::{
    fleet::{Replica, for_redis, with_file, with_memory, with_redis},
    support::{Browser, Process, Proxy, Redis, eventually, free_port, get, serve},
};

/// A Prometheus of the test's own, which ends with it.
pub(crate) struct Prometheus {
    _process: Process,
    url: String,
    client: Browser,
    _folder: TempDir,
}

impl Prometheus {
    /// Starts it with the URLs of each job, and waits until it has scraped each of them; none if it is not installed.
    ///
    /// # Panics
    ///
    /// If it is not installed and the environment variable `CI` is set.
    pub(crate) async fn start(interval: &str, rules: &str, jobs: &BTreeMap<&str, Vec<String>>) -> Option<Self> {
        if Command::new("prometheus").arg("--version").output().is_err() {
            assert!(
                env::var_os("CI").is_none(),
                "no Prometheus is installed; `CI` requires it"
            );
            eprintln!("skipped: no Prometheus is installed");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let mut config = format!(
            "global: {{ scrape_interval: {interval}, scrape_timeout: {interval}, evaluation_interval: {interval} }}\n\
             rule_files: [rules.yml]\n\
             scrape_configs:\n"
        );
        for (job, urls) in jobs {
            let targets: Vec<_> = urls.iter().map(|url| url.trim_start_matches("http://")).collect();
            writeln!(
                config,
                "- {{ job_name: {job}, static_configs: [{{ targets: {targets:?} }}] }}"
            )
            .expect("a string");
        }
        fs::write(folder.path().join("prometheus.yml"), config).expect("a file");
        fs::write(folder.path().join("rules.yml"), rules).expect("a file");
        let port = free_port();
        let process = Command::new("prometheus")
            .arg(format!(
                "--config.file={}",
                folder.path().join("prometheus.yml").display()
            ))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .arg("--log.level=error")
            .stdout(Stdio::null())
            .spawn();
        let prometheus = Self {
            _process: Process(process.expect("Prometheus starts")),
            url: format!("http://127.0.0.1:{port}"),
            client: Browser::http1(),
            _folder: folder,
        };
        eventually("Prometheus listens", async || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        })
        .await;
        let targets = jobs.values().flatten().count();
        eventually("all are scraped", async || {
            let up = prometheus.get("query?query=sum(up)").await;
            up["result"][0]["value"][1] == *targets.to_string()
        })
        .await;
        Some(prometheus)
    }

    /// The data of a response of the API; null if there is an error.
    pub(crate) async fn get(&self, path: &str) -> Value {
        let response = self.client.get(format!("{}/api/v1/{path}", self.url)).await;
        serde_json::from_slice::<Value>(&response.body).unwrap_or_default()["data"].take()
    }

    /// The names of the alerts that fire, by job, after a part of an interval: until the rules are evaluated again they are the same.
    pub(crate) async fn firing(&self) -> BTreeMap<String, BTreeSet<String>> {
        sleep(Duration::from_millis(100)).await;
        let mut firing = BTreeMap::<_, BTreeSet<_>>::new();
        let alerts = self.get("alerts").await;
        for alert in alerts["alerts"].as_array().into_iter().flatten() {
            if alert["state"] == "firing" {
                let label = |name| alert["labels"][name].as_str().unwrap_or_default().to_owned();
                firing.entry(label("job")).or_default().insert(label("alertname"));
            }
        }
        firing
    }
}

/// The rules with seconds in place of minutes, and minutes in place of hours.
pub(crate) fn in_seconds(rules: &str) -> String {
    let (mut divided, mut rest) = (String::new(), rules);
    while let Some(begin) = rest.find(|char: char| char.is_ascii_digit()) {
        let word_before = rest[..begin].ends_with(|char: char| char.is_alphanumeric() || char == '.');
        let length = rest[begin..]
            .find(|char: char| !char.is_ascii_digit())
            .expect("a rule ends with a text");
        let end = begin + length;
        divided.push_str(&rest[..end]);
        rest = &rest[end..];
        for (unit, shorter) in [("m", "s"), ("h", "m")] {
            let after = rest.strip_prefix(unit).filter(|_| !word_before);
            if let Some(after) = after.filter(|after| after.starts_with(|char: char| !char.is_alphanumeric())) {
                divided.push_str(shorter);
                rest = after;
                break;
            }
        }
    }
    divided + rest
}

#[test]
fn the_times_of_rules_are_divided_by_sixty() {
    let rules = "rate(a5m_total[5m]) > 10 * rate(b[1h] offset 10m)\nfor: 30m\n5 minutes, 0.5 msgs\n";
    let divided = "rate(a5m_total[5s]) > 10 * rate(b[1m] offset 10s)\nfor: 30s\n5 minutes, 0.5 msgs\n";
    assert_eq!(in_seconds(rules), divided);
}

/// What happens to the Redis of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Killed,
    Stopped,
    CutOff,
    Late,
    OutOfMemory,
    Busy,
    ScriptFlush,
}

impl Fault {
    const ALL: [(Self, &str); 7] = [
        (Self::Killed, "killed"),
        (Self::Stopped, "stopped"),
        (Self::CutOff, "cut-off"),
        (Self::Late, "late"),
        (Self::OutOfMemory, "out-of-memory"),
        (Self::Busy, "busy"),
        (Self::ScriptFlush, "script-flush"),
    ];

    /// The alerts that it causes, and those that it may cause.
    fn alerts(self) -> (&'static [&'static str], &'static [&'static str]) {
        const FAILS: [&str; 3] = ["LimitStoreFails", "LimitRedisNodeDown", "LimitRejectsByFailure"];
        const NO_REPLY: [&str; 5] = [
            FAILS[0],
            FAILS[1],
            FAILS[2],
            "LimitRedisDoesNotReply",
            "LimitSettlementsLost",
        ];

        match self {
            Self::Killed | Self::Stopped | Self::CutOff | Self::Late => (&NO_REPLY, &[]),
            Self::OutOfMemory | Self::Busy => (&FAILS, &["LimitSettlementsLost", "LimitRedisDoesNotReply"]),
            Self::ScriptFlush => (&[], &[]),
        }
    }
}

/// A Redis with a proxy in front of it, of the service of one fault.
struct Place {
    fault: Fault,
    redis: Redis,
    proxy: Proxy,
    busy: Option<Child>,
}

impl Place {
    async fn new(fault: Fault) -> Self {
        let redis = Redis::start_with(&["--lua-time-limit", "50"]);
        let proxy = Proxy::start(redis.port()).await;
        Self {
            fault,
            redis,
            proxy,
            busy: None,
        }
    }

    async fn begin(&mut self) {
        let (redis, proxy) = (&mut self.redis, &self.proxy);
        match self.fault {
            Fault::Killed => redis.kill(),
            Fault::Stopped => std::mem::forget(redis.freeze()),
            Fault::CutOff => proxy.partition(),
            Fault::Late => proxy.delay(Duration::from_secs(6)),
            Fault::OutOfMemory => redis.command("CONFIG", ["SET", "maxmemory", "1"]).await,
            Fault::Busy => {
                let mut client = Command::new("redis-cli");
                client.args(["-p", &redis.port().to_string(), "EVAL", "while true do end", "0"]);
                self.busy = Some(client.stdout(Stdio::null()).spawn().expect("redis-cli starts"));
            }
            Fault::ScriptFlush => redis.command("SCRIPT", ["FLUSH"]).await,
        }
    }

    async fn end(&mut self) {
        let (redis, proxy) = (&mut self.redis, &self.proxy);
        match self.fault {
            Fault::Killed => redis.restart(),
            Fault::Stopped => drop(redis.freeze()),
            Fault::CutOff => proxy.heal(),
            Fault::Late => proxy.delay(Duration::ZERO),
            Fault::OutOfMemory => redis.command("CONFIG", ["SET", "maxmemory", "0"]).await,
            Fault::Busy => {
                let Some(mut client) = self.busy.take() else { return };
                redis.cli(&["SCRIPT", "KILL"]);
                client.wait().expect("the script was killed");
            }
            Fault::ScriptFlush => {}
        }
    }
}

/// The memory of a Redis, as redis_exporter has it.
async fn memory_of(redis: &Redis) -> String {
    let [used, most] = ["used_memory:", "maxmemory:"].map(|name| field(redis, "memory", name));
    format!(
        "redis_memory_used_bytes {}\nredis_memory_max_bytes {}\n",
        used.await,
        most.await
    )
}

/// A field of a section of `INFO`.
async fn field(redis: &Redis, section: &str, name: &str) -> String {
    let info: String = redis.command("INFO", [section]).await;
    let line = info.lines().find_map(|line| line.strip_prefix(name));
    line.expect("a field").trim().to_owned()
}

const LIMITS: &str = "policies.api = { limit = 'sliding-log 100000/min', key = 'header:user' }";

fn write(path: &Path, text: &str) {
    fs::write(path, text).expect("a file");
}

/// A service of each kind with a fault that is not of Redis: its job, its alert, and the alerts that it may have too.
const OTHERS: [(&str, &str, &[&str]); 7] = [
    ("attacked", "LimitAttack", &["LimitTooLow"]),
    ("differing", "LimitReplicasDiffer", &[]),
    ("evicting", "LimitMemoryStoreFull", &[]),
    ("keyless", "LimitFindsNoKey", &[]),
    ("low", "LimitTooLow", &[]),
    ("redis", "LimitRedisNearlyFull", &[]),
    ("refusing", "LimitReloadRefused", &[]),
];

/// The alerts that each job must have, and those that it may have, while there are faults.
fn expected() -> BTreeMap<&'static str, (BTreeSet<&'static str>, BTreeSet<&'static str>)> {
    let of_redis = Fault::ALL.map(|(fault, job)| (job, fault.alerts()));
    let of_redis = of_redis.map(|(job, (must, may))| (job, (must.to_vec(), may.to_vec())));
    let others = OTHERS.map(|(job, must, may)| (job, (vec![must], may.to_vec())));
    let all = of_redis.into_iter().chain(others);
    let sets = all.map(|(job, (must, may))| (job, (must.into_iter().collect(), may.into_iter().collect())));
    sets.chain([("healthy", Default::default())]).collect()
}

fn report<'a>(what: &str, alerts: impl Iterator<Item = (&'a str, &'a String, &'a u64)>) {
    for (job, alert, seconds) in alerts {
        eprintln!("{alert} of {job} {what} after {seconds} s");
    }
}

/// All services have a policy `api`. The times of the rules are divided by 60.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs Prometheus: `.ci/test`"]
async fn each_alert_fires_for_the_service_with_its_fault_and_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name);
    let mut places = Vec::new();
    let mut replicas = BTreeMap::<&str, Vec<Replica>>::new();
    for (fault, job) in Fault::ALL.into_iter().chain([(Fault::ScriptFlush, "healthy")]) {
        let place = Place::new(fault).await;
        let url = place.proxy.url();
        let replica = Replica::start(|| with_redis(url), 24, for_redis);
        replicas.insert(job, vec![replica]);
        places.push(place);
    }
    let healthy = places.pop();

    let much = || SlidingLog::per_minute(100_000);
    let in_memory = move || with_memory(MemoryStore::new(), much());
    let usual = |number: u64, _| get("/").header("user", number % 7);
    let attacked = Replica::start(
        || with_memory(MemoryStore::new(), SlidingLog::per_hour(100)),
        40,
        |number, has_fault| match has_fault && number % 2 == 0 {
            true => get("/").header("user", "attacker"),
            false => get("/").header("user", number),
        },
    );
    let low = Replica::start(
        || with_memory(MemoryStore::new(), SlidingLog::per_hour(1)),
        4,
        |number, has_fault| match has_fault && number % 5 == 0 {
            true => get("/").header("user", "one"),
            false => get("/").header("user", number),
        },
    );
    let evicting = Replica::start(
        move || with_memory(MemoryStore::builder().capacity(50).build(), much()),
        40,
        |number, has_fault| get("/").header("user", if has_fault { number } else { number % 7 }),
    );
    let keyless = Replica::start(in_memory, 40, |number, has_fault| match has_fault {
        true => get("/"),
        false => get("/").header("user", number % 7),
    });
    let following = |path: PathBuf| {
        write(&path, LIMITS);
        Replica::start(|| with_file(path), 10, usual)
    };
    let differing = ["one.toml", "other.toml"].map(|name| following(file(name)));
    replicas.insert("differing", differing.into());
    replicas.insert("refusing", vec![following(file("refused.toml"))]);
    for (job, replica) in [
        ("attacked", attacked),
        ("low", low),
        ("evicting", evicting),
        ("keyless", keyless),
    ] {
        replicas.insert(job, vec![replica]);
    }

    let redis = std::sync::Arc::new(Redis::start());
    let exported = redis.clone();
    let exporter = Router::new().route("/metrics", route(async move || memory_of(&exported).await));
    let mut jobs: BTreeMap<_, Vec<_>> = replicas
        .iter()
        .map(|(job, replicas)| (*job, replicas.iter().map(|replica| replica.url.clone()).collect()))
        .collect();
    jobs.insert("redis", vec![serve(exporter).await]);
    let rules = in_seconds(include_str!("../../docs/alerts.yml"));
    let Some(prometheus) = Prometheus::start("250ms", &rules, &jobs).await else {
        return;
    };
    // Its alert takes longer than all others.
    replicas["low"][0].set_fault(true);
    // The rates of the rules have values then.
    sleep(Duration::from_secs(6)).await;
    assert_eq!(prometheus.firing().await, BTreeMap::new(), "there is no fault");

    for replica in replicas.values().flatten() {
        replica.set_fault(true);
    }
    for place in &mut places {
        place.begin().await;
    }
    write(&file("other.toml"), &LIMITS.replace("100000", "50000"));
    write(&file("refused.toml"), &LIMITS.replace("/min", ""));
    let used = field(&redis, "memory", "used_memory:").await;
    let maximum = used.parse::<u64>().expect("bytes") * 11 / 10;
    redis
        .command::<()>("CONFIG", ["SET", "maxmemory", &maximum.to_string()])
        .await;

    let began = Instant::now();
    let (mut fired, mut missing) = (BTreeMap::new(), Vec::new());
    eventually("all alerts fire", async || {
        let firing = prometheus.firing().await;
        missing.clear();
        for (job, (must, may)) in expected() {
            let firing = firing.get(job).cloned().unwrap_or_default();
            for alert in &firing {
                assert!(
                    must.contains(&**alert) || may.contains(&**alert),
                    "{alert} of {job}, which has no such fault"
                );
                fired
                    .entry((job, alert.clone()))
                    .or_insert_with(|| began.elapsed().as_secs());
            }
            let unfired = must
                .into_iter()
                .filter(|alert| !fired.contains_key(&(job, (*alert).to_owned())));
            missing.extend(unfired.map(|alert| format!("{alert} of {job}")));
        }
        if missing.iter().all(|alert| !alert.ends_with(" of busy")) {
            // The script takes all of a processor until then.
            let busy = places.iter_mut().find(|place| place.fault == Fault::Busy);
            busy.expect("a Redis with a script").end().await;
        }
        missing.is_empty()
    })
    .await;
    report(
        "fired",
        fired.iter().map(|((job, alert), seconds)| (*job, alert, seconds)),
    );

    for replica in replicas.values().flatten() {
        replica.set_fault(false);
    }
    for place in &mut places {
        place.end().await;
    }
    write(&file("other.toml"), LIMITS);
    write(&file("refused.toml"), LIMITS);
    redis.command::<()>("CONFIG", ["SET", "maxmemory", "0"]).await;
    let (began, mut lasted) = (Instant::now(), BTreeMap::new());
    eventually("all alerts end", async || {
        let firing = prometheus.firing().await;
        let pairs = firing
            .iter()
            .flat_map(|(job, alerts)| alerts.iter().map(move |alert| (job, alert)));
        for (job, alert) in pairs {
            lasted.insert((job.clone(), alert.clone()), began.elapsed().as_secs());
        }
        firing.is_empty()
    })
    .await;
    report(
        "ended",
        lasted.iter().map(|((job, alert), seconds)| (&**job, alert, seconds)),
    );
    drop(healthy);
}
