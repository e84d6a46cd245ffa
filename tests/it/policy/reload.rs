//! Policies that follow a file.

use std::{
    fs,
    io::{self, Write},
    ops::Range,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant, SystemTime},
};

use axum::{Router, routing::get as route};
use http::StatusCode;
use tempfile::TempDir;
use tokio::runtime::Handle;
use tower_quota::{
    ConfigError, FailureMode, Headers, Key, Limiter, MemoryStore, Policies, Policy, RateLimitLayer, SlidingLog, key,
    store::Store,
};
use tracing_subscriber::util::SubscriberInitExt;

use crate::support::{Broken, Clock, Log, PATIENCE, Redis, connected, get, get_from, patient, send};

/// A file of limits that tests write.
struct File {
    folder: TempDir,
}

impl File {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let file = Self { folder };
        file.write(text);
        file
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("limits.toml")
    }

    /// The field of log lines.
    fn logged(&self) -> String {
        format!("file={:?}", self.path())
    }

    fn write(&self, text: &str) {
        fs::write(self.path(), text).expect("a file");
    }

    fn watch(&self) -> Policies {
        Policies::from_file(self.path()).expect("the file describes policies")
    }
}

/// One policy by the address.
fn api(limit: &str) -> String {
    format!("[policies.api]\nlimit = \"{limit}\"\nkey = \"ip\"\n")
}

fn app(layer: RateLimitLayer) -> Router {
    Router::new().route("/", route(async || "hi")).layer(layer)
}

/// The policy and the state that a response announces.
async fn announced(app: &Router) -> [Option<String>; 2] {
    let response = send(app, get("/")).await;
    ["ratelimit-policy", "ratelimit"].map(|name| response.field(name).map(str::to_owned))
}

async fn remaining(limiter: &Limiter) -> u64 {
    limiter.check("42").await.expect("the store replies").remaining()
}

/// Lets a request wait.
async fn assert_waits<T>(acquired: &mut (impl Future<Output = T> + Unpin)) {
    tokio::select! {
        biased;
        _ = acquired => panic!("there is no room"),
        () = tokio::task::yield_now() => {}
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_takes_the_new_numbers() {
    let file = File::new(&api("sliding-log 1/h"));
    let policies = file.watch();
    let limiter = Limiter::new(MemoryStore::new(), policies.get("api").unwrap());
    assert_eq!(remaining(&limiter).await, 0);
    let began = tokio::time::Instant::now();
    let request = limiter.request("42").wait_up_to(Duration::from_secs(3_600));
    let mut acquired = std::pin::pin!(request.acquire());
    assert_waits(&mut acquired).await;

    file.write(&api("sliding-log 3/h"));
    policies.reload().unwrap();
    let admitted = acquired.await.expect("there is room");
    assert_eq!((admitted.limit(), admitted.remaining()), (3, 1));
    assert!(began.elapsed() <= Duration::from_secs(2), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_last_check_of_a_request_that_waits_takes_the_new_numbers() {
    let file = File::new(&api("concurrency 1"));
    let policies = file.watch();
    let limiter = Limiter::new(MemoryStore::new(), policies.get("api").unwrap());
    let _held = limiter.check("42").await.expect("the store replies");
    let request = limiter.request("42").wait_up_to(Duration::from_millis(500));
    let mut acquired = std::pin::pin!(request.acquire());
    assert_waits(&mut acquired).await;
    file.write(&api("concurrency 2"));
    policies.reload().unwrap();
    assert_eq!(acquired.await.expect("there is room").limit(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_refund_after_a_reload_admits_by_the_new_numbers() {
    let waits = |limit| format!("{}wait = \"2h\"\n", api(limit));
    let file = File::new(&waits("sliding-log 1/h"));
    let policies = file.watch();
    let limiter = Limiter::new(MemoryStore::new(), policies.get("api").unwrap());
    let first = limiter.check("42").await.expect("the store replies");
    file.write(&waits("sliding-log 2/h"));
    policies.reload().unwrap();
    assert_eq!(remaining(&limiter).await, 0);
    let began = tokio::time::Instant::now();
    let mut acquired = std::pin::pin!(limiter.acquire("42").into_future());
    assert_waits(&mut acquired).await;

    first.take_receipt().refund().await.expect("the store replies");
    let admitted = acquired.await.expect("there is room");
    assert_eq!((admitted.limit(), admitted.remaining()), (2, 0));
    assert!(began.elapsed() <= Duration::from_millis(10), "{:?}", began.elapsed());
}

/// Counts under another name start at zero.
#[tokio::test(start_paused = true)]
async fn a_refund_and_a_wait_keep_the_name_under_which_they_count() {
    let file = File::new(&api("sliding-log 2/2s"));
    let policies = file.watch();
    let store = MemoryStore::new();
    let limiter = Limiter::new(store.clone(), policies.get("api").unwrap());
    let left = async |name: &'static str| {
        let limiter = Limiter::new(
            store.clone(),
            Policy::new(name, SlidingLog::new(2, Duration::from_secs(2))),
        );
        limiter.peek("42").await.expect("the store replies").remaining()
    };
    let first = limiter.check("42").await.expect("the store replies");
    assert_eq!(remaining(&limiter).await, 0);
    let request = limiter.request("42").wait_up_to(Duration::from_secs(5));
    let mut acquired = std::pin::pin!(request.acquire());
    assert_waits(&mut acquired).await;

    file.write(&format!("{}formerly = \"post\"\n", api("sliding-log 2/2s")));
    policies.reload().unwrap();
    first.take_receipt().refund().await.expect("the store replies");
    let admitted = acquired.await.expect("there is room");
    assert_eq!((admitted.remaining(), left("api").await, left("post").await), (0, 0, 2));
}

#[tokio::test(start_paused = true)]
async fn a_request_does_not_wait_behind_those_that_count_under_a_former_name() {
    let limited = "policies.sign-in = { limit = 'sliding-log 1/10s', key = 'ip', wait = '1min'";
    let file = File::new(&format!("{limited}, formerly = 'login' }}"));
    let policies = file.watch();
    let limiter = Limiter::new(MemoryStore::new(), policies.get("sign-in").unwrap());
    let acquire = || limiter.request("42").acquire();

    drop(acquire().await.expect("there is room"));
    let mut waiting: Vec<_> = (0..3).map(|_| Box::pin(acquire())).collect();
    for acquired in &mut waiting {
        assert_waits(acquired).await;
    }
    file.write(&format!("{limited} }}"));
    policies.reload().unwrap();
    drop(acquire().await.expect("there is room"));
    assert!(acquire().await.expect("there is room").waited() <= Duration::from_secs(10));
}

#[tokio::test]
async fn a_layer_applies_the_new_numbers_to_the_counts_there_are() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    let layer = RateLimitLayer::new(Clock::new().memory_store(), policies.get("api").unwrap());
    let app = app(layer);
    assert_eq!(
        announced(&app).await,
        [Some("\"api\";q=3;w=60".into()), Some("\"api\";r=2;t=60".into())]
    );

    file.write(&api("sliding-log 10/min"));
    assert_eq!(
        announced(&app).await[1].as_deref(),
        Some("\"api\";r=1;t=60"),
        "nothing was reloaded"
    );
    policies.reload().unwrap();
    assert_eq!(
        announced(&app).await,
        [Some("\"api\";q=10;w=60".into()), Some("\"api\";r=7;t=60".into())]
    );

    file.write(&api("sliding-log 4/min"));
    policies.reload().unwrap();
    assert_eq!(announced(&app).await[1].as_deref(), Some("\"api\";r=0;t=60"));
    let denied = send(&app, get("/")).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.field("ratelimit-policy"), Some("\"api\";q=4;w=60"));
}

#[tokio::test]
async fn the_key_the_cost_and_the_failure_mode_follow_the_file() {
    let file = File::new(&api("sliding-log 10/min"));
    let policies = file.watch();
    let layer = RateLimitLayer::new(Clock::new().memory_store(), policies.get("api").unwrap());
    let failing = RateLimitLayer::new(Broken::default(), policies.get("api").unwrap());
    // What a limiter takes without its key, the layers have with it.
    let _limiter = Limiter::new(MemoryStore::new(), policies.unkeyed("api").unwrap());
    let (app, failing) = (app(layer), app(failing));
    assert_eq!(
        send(&app, get_from("203.0.113.7", "/")).await.field("ratelimit"),
        Some("\"api\";r=9;t=60")
    );
    assert_eq!(send(&failing, get("/")).await.status, StatusCode::OK);

    file.write(
        "[policies.api]\nlimit = \"sliding-log 10/min\"\nkey = \"constant:all\"\ncost = 4\nfailure-mode = \"closed\"\n",
    );
    policies.reload().unwrap();
    assert_eq!(
        send(&app, get_from("203.0.113.7", "/")).await.field("ratelimit"),
        Some("\"api\";r=6;t=60")
    );
    assert_eq!(
        send(&app, get_from("203.0.113.8", "/")).await.field("ratelimit"),
        Some("\"api\";r=2;t=60")
    );
    assert_eq!(send(&failing, get("/")).await.status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn settings_in_code_stay_and_take_precedence() {
    let file =
        File::new("[policies.api]\nlimit = \"sliding-log 10/min\"\n[policies.mails]\nlimit = \"sliding-log 10/min\"\n");
    let policies = file.watch();
    let api = policies
        .unkeyed("api")
        .unwrap()
        .key(key::constant("all"))
        .cost_fn(|parts| if parts.method.is_safe() { 2 } else { 5 })
        .apply_if(|parts| parts.uri.path() != "/free")
        .failure_mode(FailureMode::Open);
    let layer = |store| RateLimitLayer::new(store, api.clone());
    let of_memory = Router::new()
        .route("/", route(async || "hi").post(async || "hi"))
        .route("/free", route(async || "hi"))
        .layer(layer(Clock::new().memory_store()));
    let failing = app(RateLimitLayer::new(Broken::default(), api.clone()));
    let of_mails = || policies.unkeyed("mails").unwrap();
    let keyed = app(RateLimitLayer::new(
        MemoryStore::new(),
        of_mails().key(key::constant("all")),
    ));
    let mails = Limiter::new(MemoryStore::new(), of_mails().cost(3));

    let with = "limit = \"sliding-log 20/min\"\nkey = \"ip\"\ncost = 9\nfailure-mode = \"closed\"\n";
    file.write(&format!("[policies.api]\n{with}[policies.mails]\n{with}"));
    policies.reload().unwrap();
    // Another layer has the key of the file.
    let _layer = RateLimitLayer::new(MemoryStore::new(), policies.get("mails").unwrap());
    policies.reload().unwrap();
    for (address, remaining) in [("203.0.113.8", "r=11"), ("203.0.113.9", "r=2")] {
        let fields = send(&keyed, get_from(address, "/")).await;
        assert!(fields.field("ratelimit").unwrap().contains(remaining), "{address}");
    }
    let post = get_from("203.0.113.8", "/").method("POST");
    assert_eq!(
        send(&of_memory, post).await.field("ratelimit"),
        Some("\"api\";r=15;t=60")
    );
    assert_eq!(
        send(&of_memory, get("/")).await.field("ratelimit"),
        Some("\"api\";r=13;t=60")
    );
    send(&of_memory, get("/free")).await.assert_silent();
    assert_eq!(send(&failing, get("/")).await.status, StatusCode::OK);
    assert_eq!(remaining(&mails).await, 17);
}

#[tokio::test]
async fn a_limiter_follows_the_file() {
    let file = File::new("policies.mails.limit = \"sliding-log 3/h\"");
    let policies = file.watch();
    let mails = Limiter::new(MemoryStore::new(), policies.unkeyed("mails").unwrap());
    let clone = mails.clone();
    assert_eq!(remaining(&mails).await, 2);

    file.write("policies.mails.limit = \"sliding-log 10/h\"");
    policies.reload().unwrap();
    assert_eq!(remaining(&mails).await, 8);
    assert_eq!(remaining(&clone).await, 7);
}

#[tokio::test]
async fn a_file_that_cannot_be_applied_changes_nothing_and_is_an_error_that_names_the_place() {
    let file = File::new(&format!(
        "{}[policies.login]\nlimit = \"sliding-log 5/min\"\n",
        api("sliding-log 3/min")
    ));
    let policies = file.watch();
    let app = app(RateLimitLayer::new(
        Clock::new().memory_store(),
        policies.get("api").unwrap(),
    ));
    let login = Limiter::new(MemoryStore::new(), policies.unkeyed("login").unwrap());

    let wrong_after_the_first = format!(
        "{}[policies.login]\nlimit = \"sliding-log 6\"\n",
        api("sliding-log 30/min")
    );
    for (text, [place, fault]) in [
        (wrong_after_the_first.as_str(), ["line 5", "no `/` or `per`"]),
        ("[policies.api\n", ["line 1", "^"]),
        (
            "[policies.api]\nlimit = \"sliding-log 30/min\"\n",
            ["`api`", "a `key` such as"],
        ),
        ("", ["limits.toml", "missing field `policies`"]),
    ] {
        file.write(text);
        let error = policies.reload().unwrap_err().to_string();
        for expected in ["limits.toml`: ", place, fault] {
            assert!(error.contains(expected), "{error}");
        }
    }
    fs::remove_file(file.path()).unwrap();
    let error = policies.reload().unwrap_err().to_string();
    assert!(
        error.contains("limits.toml") && error.contains("cannot be read"),
        "{error}"
    );

    assert_eq!(announced(&app).await[0].as_deref(), Some("\"api\";q=3;w=60"));
    assert_eq!(remaining(&login).await, 4);
    assert_eq!(policies.names(), ["api", "login"]);
}

#[tokio::test]
async fn a_former_name_that_is_another_policy_of_a_layer_is_refused() {
    let text = |formerly: &str| format!("[policies.sign-in]\nlimit = 'sliding-log 5/h'\nkey = 'ip'\n{formerly}\n");
    let file = File::new(&text(""));
    let policies = file.watch();
    let login = Policy::new("login", SlidingLog::per_hour(5)).key(key::ip());
    let both = [login, policies.get("sign-in").unwrap()];
    let _layer = RateLimitLayer::new(Clock::new().memory_store(), both);
    file.write(&text("formerly = 'login'"));
    let error = policies.reload().unwrap_err().to_string();
    assert!(error.contains("two policies are named `login`"), "{error}");
}

#[tokio::test]
async fn the_limits_of_plans_are_refused_as_the_limit_is() {
    let plans = |plan: &str| {
        format!(
            "[policies.api]\nlimit = 'sliding-log 9/min'\nkey = 'ip'\nplan = 'header:x-plan'\nplans.gold = '{plan}'\n"
        )
    };
    let file = File::new(&plans("sliding-log 3/min"));
    let policies = file.watch();
    let refunding = policies.get("api").unwrap().refund_if(|_| false);
    let layer = RateLimitLayer::new(Clock::new().memory_store(), refunding);
    file.write(&plans("concurrency 5"));
    let error = policies.reload().unwrap_err().to_string();
    assert!(error.contains("`.refund_if(..)`") && error.contains("`api`"), "{error}");
    drop(layer);

    let of = |plan: &str, setting: &str| Policies::from_toml(&(plans(plan) + setting)).and_then(|file| file.get("api"));
    let settings = |plan: &str, setting: &str| {
        let policy = of(plan, setting)?;
        RateLimitLayer::try_new(Clock::new().memory_store(), policy)
    };
    let prefetch = settings("sliding-log 300/min prefetch 5ms", "wait = '1s'")
        .unwrap_err()
        .to_string();
    assert!(prefetch.contains("`prefetch`"), "{prefetch}");
    let hopeless = settings("fixed-window 9/h", "wait = '1s'").unwrap_err().to_string();
    for words in ["wait in vain", "fixed-window 9/h", "`wait`", "`api`"] {
        assert!(hopeless.contains(words), "{hopeless}");
    }
    let monthly = settings("fixed-window 9/month UTC", "wait = '1s'").unwrap_err();
    assert!(monthly.to_string().contains("wait in vain"), "{monthly}");
    // A request that has failed gives its unit back at once.
    let refunding = of("fixed-window 9/h", "wait = '1s'").unwrap().refund_if(|_| true);
    assert!(refunding.validate().is_ok());
    let slots = of("concurrency 5", "")
        .unwrap()
        .refund_if(|_| false)
        .validate()
        .unwrap_err()
        .to_string();
    assert!(slots.contains("`.refund_if(..)`"), "{slots}");
}

#[tokio::test]
async fn a_file_that_contradicts_the_settings_in_code_of_a_layer_changes_nothing_while_the_layer_exists() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    let refunding = policies.get("api").unwrap().refund_if(|_| false);
    let app = app(RateLimitLayer::new(Clock::new().memory_store(), refunding));

    // No request has used this one when the next is refused.
    file.write(&api("sliding-log 9/min"));
    policies.reload().unwrap();
    file.write(&api("concurrency 5"));
    let error = policies.reload().unwrap_err().to_string();
    assert!(error.contains("`.refund_if(..)`") && error.contains("`api`"), "{error}");
    assert_eq!(announced(&app).await[0].as_deref(), Some("\"api\";q=9;w=60"));
    assert_eq!(
        policies.get("api").unwrap().limit(),
        Some(&SlidingLog::per_minute(9).into())
    );

    drop(app);
    policies.reload().unwrap();
}

#[tokio::test]
async fn a_file_with_a_limit_below_the_cost_is_an_error_of_the_start_and_of_a_reload() {
    let plans = |free| {
        format!(
            "{}plan = \"header:plan\"\nplans.free = \"{free}\"\n",
            api("sliding-log 9/min")
        )
    };
    let layer = |policy| RateLimitLayer::try_new(Clock::new().memory_store(), policy);
    let assert_refused = |error: ConfigError, cost: u64, limit: &str| {
        let error = error.to_string();
        assert!(
            error.contains("`api`") && error.contains(&format!("costs {cost}, and `{limit}`")),
            "{error}"
        );
    };
    // The cost is that of the file, or of code.
    for (text, cost, limit) in [
        (
            format!("{}cost = 4\n", api("sliding-log 3/min")),
            1,
            "sliding-log 3/min",
        ),
        (
            format!("{}cost = 4\n", plans("sliding-log 3/min")),
            1,
            "sliding-log 3/min",
        ),
        (api("sliding-log 3/min"), 4, "sliding-log 3/min"),
        (plans("sliding-log 3/min"), 4, "sliding-log 3/min"),
    ] {
        let with_cost = |policy: Policy| if cost == 1 { policy } else { policy.cost(cost) };
        let policies = Policies::from_toml(&text).unwrap();
        assert_refused(layer(with_cost(policies.get("api").unwrap())).unwrap_err(), 4, limit);

        let file = File::new(&text.replace("3/min", "5/min"));
        let policies = file.watch();
        let used = layer(with_cost(policies.get("api").unwrap())).unwrap();
        file.write(&text);
        assert_refused(policies.reload().unwrap_err(), 4, limit);
        drop(used);
    }

    // A policy that is switched off denies nothing.
    let text = format!("{}cost = 4\nenabled = false\n", api("sliding-log 3/min"));
    assert!(layer(Policies::from_toml(&text).unwrap().get("api").unwrap()).is_ok());
}

/// As of the state of an axum application, which is cloned for each request.
#[tokio::test]
async fn clones_of_a_limiter_follow_a_file_and_refuse_what_does_not_fit_them() {
    let limit = |quota| format!("[policies.mails]\nlimit = \"sliding-log {quota}/h\"\n");
    let file = File::new(&limit(100));
    let policies = file.watch();
    let mails = Limiter::new(MemoryStore::new(), policies.unkeyed("mails").unwrap());
    let early = mails.clone();
    file.write(&limit(5));
    policies.reload().unwrap();
    assert_eq!(remaining(&mails.clone()).await, 4);

    file.write(&format!("{}routes = \"/mails\"\n", limit(50)));
    let error = policies.reload().unwrap_err().to_string();
    assert!(error.contains("`routes`") && error.contains("`mails`"), "{error}");
    assert_eq!(remaining(&early).await, 3);
    drop(mails);
    assert!(policies.reload().is_err(), "a clone is left");
    assert_eq!(remaining(&early.clone()).await, 2);
    drop(early);
    policies.reload().unwrap();
}

#[tokio::test]
async fn a_limiter_that_is_built_after_a_reload_is_refused_if_the_new_limits_do_not_fit() {
    let limit = "[policies.mails]\nlimit = \"sliding-log 3/h\"\n";
    let file = File::new(limit);
    let policies = file.watch();
    let mails = policies.unkeyed("mails").unwrap();
    file.write(&format!("{limit}routes = \"/mails\"\n"));
    policies.reload().unwrap();
    let error = Limiter::try_new(MemoryStore::new(), mails)
        .map(drop)
        .unwrap_err()
        .to_string();
    assert!(error.contains("routes"), "{error}");
}

#[tokio::test]
async fn a_file_that_is_refused_blocks_nothing() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    let refunding = policies.get("api").unwrap().refund_if(|_| false);
    let app = app(RateLimitLayer::new(MemoryStore::new(), refunding));
    assert_eq!(send(&app, get("/")).await.status, StatusCode::OK);
    let blocking = |limit| format!("{}[block]\nroutes = \"/\"\n", api(limit));
    file.write(&blocking("concurrency 5"));
    policies.reload().unwrap_err();
    assert_eq!(send(&app, get("/")).await.status, StatusCode::OK);
    file.write(&blocking("sliding-log 3/min"));
    policies.reload().unwrap();
    assert_eq!(send(&app, get("/")).await.status, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn a_policy_that_vanished_keeps_its_last_numbers_with_a_warning() {
    let file = File::new(&format!(
        "{}[policies.unused]\nlimit = \"sliding-log 1/min\"\n",
        api("sliding-log 3/min")
    ));
    let policies = file.watch();
    let app = app(RateLimitLayer::new(
        Clock::new().memory_store(),
        policies.get("api").unwrap(),
    ));
    file.write(&api("sliding-log 5/min"));
    policies.reload().unwrap();

    let log = Log::capture();
    file.write("[policies]\n");
    policies.reload().unwrap();
    assert_eq!(announced(&app).await[0].as_deref(), Some("\"api\";q=5;w=60"));
    let text = log.text();
    let warning = format!(
        "WARN tower_quota::policy::file::warnings: the file of limits has no such policy anymore; it keeps its last numbers policy=\"api\" {}",
        file.logged()
    );
    assert!(text.contains(&warning), "{text}");
    assert!(!text.contains("unused"), "no code has it: {text}");

    // The switch turns it off and on, too.
    file.write("enabled = false\n[policies]\n");
    policies.reload().unwrap();
    assert_eq!(announced(&app).await, [None, None]);
    file.write("[policies]\n");
    policies.reload().unwrap();
    assert_eq!(announced(&app).await[1].as_deref(), Some("\"api\";r=3;t=60"));

    // It is back.
    file.write(&api("sliding-log 9/min"));
    policies.reload().unwrap();
    assert_eq!(announced(&app).await[1].as_deref(), Some("\"api\";r=6;t=60"));
}

#[tokio::test]
async fn overrides_that_a_load_puts_out_of_effect_or_makes_deny_are_a_warning() {
    let mails = |limit: &str, cost: u32| format!("[policies.mails]\nlimit = \"{limit}\"\ncost = {cost}\n");
    let file = File::new(&mails("sliding-log 3/h", 1));
    let policies = file.watch();
    let limiter = Limiter::new(MemoryStore::new(), policies.unkeyed("mails").expect("a policy"));
    for (key, quota) in [("a", 20), ("b", 30)] {
        let set = limiter.override_limit("mails", key, SlidingLog::per_hour(quota), Duration::from_secs(60));
        set.await.expect("it fits");
    }
    let log = Log::capture();
    for (text, unfit) in [
        (mails("sliding-log 300/h", 2), None),
        (mails("token-bucket 4/h", 1), Some("overrides=2")),
        (mails("sliding-log 300/h", 25), Some("overrides=1")),
        // While limits are turned off, none is needed.
        (format!("enabled = false\n{}", mails("sliding-log 300/h", 1)), None),
    ] {
        let before = log.text().len();
        file.write(&text);
        policies.reload().expect("it is applied");
        let lines = log.text()[before..].to_owned();
        let warning = lines.lines().find(|line| line.contains("do not fit the changed limit"));
        assert_eq!(warning.is_some(), unfit.is_some(), "{text}: {lines}");
        assert!(unfit.is_none_or(|unfit| lines.contains(unfit)), "{text}: {lines}");
    }
}

#[tokio::test]
async fn the_switches_of_a_file_turn_policies_off_and_on() {
    let on = api("sliding-log 3/min");
    let file = File::new(&on);
    let policies = file.watch();
    let app = app(RateLimitLayer::new(
        Clock::new().memory_store(),
        policies.get("api").unwrap(),
    ));
    let others = "[policies.others]\nlimit = '1/s'\n";
    let log = Log::capture();
    for (off, warnings, logged) in [
        (format!("enabled = false\n{on}"), 1, "policies=1 file="),
        (format!("{on}enabled = false\n"), 1, "policies=1 off=\"api\" file="),
        // It is one of the last table.
        (
            format!("{others}{on}enabled = false\n"),
            0,
            "policies=2 off=\"api\" file=",
        ),
    ] {
        let before = log.text().len();
        file.write(&off);
        policies.reload().unwrap();
        assert_eq!(announced(&app).await, [None, None], "{off}");
        let lines = log.text()[before..].to_owned();
        assert!(lines.contains(logged), "{off}: {lines}");
        let warning = format!("turns all of its limits off {}", file.logged());
        assert_eq!(lines.matches(&warning).count(), warnings, "{off}: {lines}");
    }
    file.write(&on);
    policies.reload().unwrap();
    assert_eq!(announced(&app).await[1].as_deref(), Some("\"api\";r=2;t=60"));
}

#[tokio::test]
async fn a_policy_that_observed_is_enforced_with_its_counts() {
    let enforced = api("sliding-log 2/min");
    let file = File::new(&format!("{enforced}mode = \"observe\"\n"));
    let policies = file.watch();
    let app = app(RateLimitLayer::new(
        Clock::new().memory_store(),
        policies.get("api").unwrap(),
    ));
    for _ in 0..3 {
        assert_eq!(announced(&app).await, [None, None]);
    }
    file.write(&enforced);
    policies.reload().unwrap();
    assert_eq!(send(&app, get("/")).await.status, StatusCode::TOO_MANY_REQUESTS);
    file.write(&format!("{enforced}mode = \"observe\"\n"));
    policies.reload().unwrap();
    assert_eq!(send(&app, get("/")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn another_algorithm_has_counts_of_its_own() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    let app = app(RateLimitLayer::new(
        Clock::new().memory_store(),
        policies.get("api").unwrap(),
    ));
    announced(&app).await;

    file.write(&api("token-bucket 3/min"));
    policies.reload().unwrap();
    assert_eq!(announced(&app).await[1].as_deref(), Some("\"api\";r=2;t=20"));
    file.write(&api("sliding-log 3/min"));
    policies.reload().unwrap();
    assert_eq!(announced(&app).await[1].as_deref(), Some("\"api\";r=1;t=60"));
}

#[tokio::test]
async fn another_spelling_of_a_rate_has_the_same_counts() {
    let file = File::new(&api("token-bucket 60/h burst 10"));
    let policies = file.watch();
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let limiter = Limiter::new(store, policies.unkeyed("api").unwrap());
    for left in (5..10).rev() {
        assert_eq!(remaining(&limiter).await, left);
    }
    file.write(&api("token-bucket 1/min burst 10"));
    policies.reload().unwrap();
    assert_eq!(remaining(&limiter).await, 4);
    assert_eq!(redis.cli(&["KEYS", "quota:*"]).lines().count(), 1);
}

/// Reads the policies whenever a line is logged.
struct Reader(Policies);

impl Write for Reader {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        assert_eq!(self.0.names(), ["api"]);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn what_receives_the_events_of_a_reload_may_read_the_policies() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    let (sender, done) = mpsc::channel();
    // Else a reload that never returns would be waited for.
    std::thread::spawn(move || {
        let reader = policies.clone();
        let writer = move || Reader(reader.clone());
        let _guard = tracing_subscriber::fmt().with_writer(writer).finish().set_default();
        file.write(&api("sliding-log 4/min"));
        let _ = sender.send(policies.reload());
    });
    assert_eq!(done.recv_timeout(PATIENCE), Ok(Ok(())));
}

#[tokio::test]
async fn a_layer_that_is_built_after_a_reload_is_up_to_date() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    let policy = policies.get("api").unwrap();
    file.write(&api("sliding-log 10/min"));
    policies.reload().unwrap();

    let app = app(RateLimitLayer::new(Clock::new().memory_store(), policy));
    assert_eq!(announced(&app).await[0].as_deref(), Some("\"api\";q=10;w=60"));
    assert_eq!(
        policies.get("api").unwrap().limit(),
        Some(&"sliding-log 10/min".parse().unwrap())
    );
}

#[tokio::test]
async fn a_setting_of_the_layer_after_a_reload_is_kept() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    let mut layer = RateLimitLayer::new(Broken::default(), policies.get("api").unwrap());
    file.write(&api("sliding-log 10/min"));
    policies.reload().unwrap();
    assert_eq!(send(&app(layer.clone()), get("/")).await.status, StatusCode::OK);

    layer = layer
        .block(|parts| parts.uri.path() == "/blocked")
        .headers(Headers::None);
    let assert_kept = async |layer: RateLimitLayer| {
        let app = app(layer);
        assert_eq!(send(&app, get("/blocked")).await.status, StatusCode::FORBIDDEN);
        assert_eq!(send(&app, get("/")).await.field("ratelimit"), None);
    };
    assert_kept(layer.clone()).await;
    file.write(&api("sliding-log 20/min"));
    policies.reload().unwrap();
    assert_kept(layer).await;
}

#[tokio::test]
async fn a_layer_of_policies_of_two_files_follows_both() {
    let (one, other) = (
        File::new(&api("sliding-log 3/min")),
        File::new(&api("sliding-log 3/min").replace("api", "day")),
    );
    let (live, also_live) = (one.watch(), other.watch());
    let fixed = Policy::new("fixed", tower_quota::SlidingLog::per_minute(7)).key(key::ip());
    let policies = [live.get("api").unwrap(), also_live.get("day").unwrap(), fixed];
    let app = app(RateLimitLayer::new(Clock::new().memory_store(), policies));

    for (file, live, limit, announces) in [
        (
            &one,
            &live,
            api("sliding-log 5/min"),
            "\"api\";q=5;w=60, \"day\";q=3;w=60, \"fixed\";q=7;w=60",
        ),
        (
            &other,
            &also_live,
            api("sliding-log 6/min").replace("api", "day"),
            "\"api\";q=5;w=60, \"day\";q=6;w=60, \"fixed\";q=7;w=60",
        ),
    ] {
        file.write(&limit);
        live.reload().unwrap();
        assert_eq!(announced(&app).await[0].as_deref(), Some(announces));
    }
}

#[tokio::test]
async fn counts_of_the_process_survive_a_reload_while_the_store_fails() {
    let file = File::new("policies.mails.limit = \"sliding-log 3/h\"");
    let policies = file.watch();
    let mails = Limiter::new(Broken::default(), policies.unkeyed("mails").unwrap());
    assert_eq!(remaining(&mails).await, 2);

    file.write("policies.mails.limit = \"sliding-log 5/h\"");
    policies.reload().unwrap();
    assert_eq!(remaining(&mails).await, 3);
}

#[tokio::test]
async fn a_policy_that_nested_layers_have_in_common_is_charged_once_during_a_reload() {
    let file = File::new(&api("sliding-log 5/min"));
    let policies = file.watch();
    let layer = RateLimitLayer::new(Clock::new().memory_store(), policies.get("api").unwrap());
    let reload = {
        let (policies, path) = (policies.clone(), file.path());
        move || {
            fs::write(&path, api("sliding-log 9/min")).unwrap();
            policies.reload().unwrap();
        }
    };
    // The reload is between the decisions of the two layers.
    let app = Router::new()
        .route("/", route(async || "hi").layer(layer.clone()))
        .layer(axum::middleware::map_request(move |request: axum::extract::Request| {
            reload();
            async { request }
        }))
        .layer(layer);
    assert_eq!(send(&app, get("/")).await.status, StatusCode::OK);
    assert_eq!(send(&app, get("/")).await.field("ratelimit"), Some("\"api\";r=7;t=60"));
}

/// It has the limit of the policy still.
#[tokio::test(start_paused = true)]
async fn a_request_that_has_waited_is_charged_once_by_nested_layers_during_a_reload() {
    let file = File::new(&format!("{}wait = \"1m\"\n", api("sliding-log 1/s")));
    let policies = file.watch();
    let layer = RateLimitLayer::new(MemoryStore::new(), policies.get("api").unwrap());
    let reload = {
        let (policies, path) = (policies.clone(), file.path());
        move || {
            fs::write(&path, format!("{}wait = \"1m\"\n", api("sliding-log 9/s"))).unwrap();
            policies.reload().unwrap();
        }
    };
    let requests = Arc::new(AtomicUsize::new(0));
    let app = Router::new()
        .route("/", route(async || "hi").layer(layer.clone()))
        .layer(axum::middleware::map_request(move |request: axum::extract::Request| {
            if requests.fetch_add(1, Ordering::Relaxed) == 1 {
                reload();
            }
            async { request }
        }))
        .layer(layer);
    assert_eq!(send(&app, get("/")).await.status, StatusCode::OK);
    assert_eq!(send(&app, get("/")).await.status, StatusCode::OK);
    assert_eq!(send(&app, get("/")).await.field("ratelimit"), Some("\"api\";r=7;t=1"));
}

#[tokio::test]
async fn a_plan_that_becomes_known_between_nested_layers_is_enforced() {
    let of_policy = format!(
        "{}plan = \"extension:plan\"\nplans.trial = \"sliding-log 1/h\"\n",
        api("sliding-log 9/min")
    );
    // One count, to which both layers charge.
    let of_file = format!(
        "plan = \"extension:plan\"\n{}[plans.trial.api]\nlimit = \"sliding-log 2/min\"\n",
        api("sliding-log 9/min")
    );
    for plans in [of_policy, of_file] {
        let policies = Policies::from_toml(&plans).unwrap();
        let policies = policies.with_extension("plan", |plan: &&'static str| *plan);
        let layer = policies.layer(Clock::new().memory_store(), ["api"]).unwrap();
        let app = Router::new()
            .route("/", route(async || "hi").layer(layer.clone()))
            .layer(axum::Extension("trial"))
            .layer(layer);
        let statuses = [send(&app, get("/")).await.status, send(&app, get("/")).await.status];
        assert_eq!(statuses, [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS], "{plans}");
    }
}

#[test]
fn an_application_replaces_policies_of_its_own_configuration() {
    let describe = |limit: &str| Policies::from_toml(&api(limit)).unwrap();
    let policies = describe("sliding-log 3/min");
    let limiter = Limiter::new(MemoryStore::new(), policies.get("api").unwrap());
    let limit = || {
        let decision = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(limiter.peek("42"));
        decision.unwrap().limit()
    };
    assert_eq!(limit(), 3);
    policies.replace(&describe("sliding-log 8/min")).unwrap();
    assert_eq!(limit(), 8);

    let error = policies.reload().unwrap_err().to_string();
    assert!(error.contains("`Policies::replace`"), "{error}");
    let error = policies
        .reload_on_change(Duration::from_secs(1))
        .unwrap_err()
        .to_string();
    assert!(error.contains("`Policies::replace`"), "{error}");
}

/// Two files whose policies belong together. Every other file blocks a path.
fn pair(n: u64) -> String {
    let (minute, hour) = (1_000_000_000 + n, 2_000_000_000 + n);
    let list = if blocks(n) {
        "block.routes = \"/sometimes\"\n"
    } else {
        ""
    };
    format!(
        "{list}[policies.minute]\nlimit = \"fixed-window {minute}/min\"\nkey = \"ip\"\n[policies.hour]\nlimit = \"fixed-window \
         {hour}/h\"\nkey = \"ip\"\n"
    )
}

fn blocks(n: u64) -> bool {
    n.is_multiple_of(2)
}

/// The limits of both policies in a field, which were in one file.
fn pair_of(field: &str) -> u64 {
    let limits: Vec<u64> = field
        .split("q=")
        .skip(1)
        .map(|item| item.split(';').next().unwrap().parse().unwrap())
        .collect();
    let [minute, hour] = limits[..] else {
        panic!("two policies: {field}")
    };
    assert_eq!(
        minute - 1_000_000_000,
        hour - 2_000_000_000,
        "parts of two files: {field}"
    );
    minute - 1_000_000_000
}

const RELOADS: u64 = 300;

/// While threads send requests as fast as they can, 300 reloads: each request is decided by one file, and each is counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn under_load_no_request_is_lost_or_decided_by_parts_of_two_files() {
    let file = File::new(&pair(0));
    let policies = file.watch();
    let store = Clock::new().memory_store();
    let both = || ["minute", "hour"].map(|name| policies.get(name).unwrap());
    let app = app(RateLimitLayer::new(store.clone(), both()));
    let limiter = Limiter::new(store, both());

    let started = Instant::now();
    let (done, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let callers: Vec<_> = (0..3)
        .map(|_| {
            let (app, limiter, done, sent) = (app.clone(), limiter.clone(), done.clone(), sent.clone());
            tokio::spawn(async move {
                let mut last = 0;
                while !done.load(Ordering::Relaxed) {
                    let response = send(&app, get("/")).await;
                    assert_eq!(response.status, StatusCode::OK);
                    let seen = pair_of(response.field("ratelimit-policy").unwrap());
                    assert!(seen >= last, "an older file applies again");
                    last = seen;

                    let response = send(&app, get("/sometimes")).await;
                    if response.status != StatusCode::FORBIDDEN {
                        let seen = pair_of(response.field("ratelimit-policy").unwrap());
                        assert!(!blocks(seen), "the list of one file and the limits of another: {seen}");
                        sent.fetch_add(1, Ordering::Relaxed);
                    }

                    let decision = limiter.check(Key::ip([203, 0, 113, 7].into())).await.unwrap();
                    let limits: Vec<_> = decision.policies().map(|policy| policy.limit()).collect();
                    assert_eq!(limits[0] + 1_000_000_000, limits[1]);
                    sent.fetch_add(2, Ordering::Relaxed);
                }
            })
        })
        .collect();

    for n in 1..=RELOADS {
        file.write(&pair(n));
        policies.reload().unwrap();
        // A request that starts after a reload is decided by its file, and some requests are between two reloads.
        let response = send(&app, get("/")).await;
        assert_eq!(pair_of(response.field("ratelimit-policy").unwrap()), n);
        sent.fetch_add(1, Ordering::Relaxed);
        let before = sent.load(Ordering::Relaxed);
        while sent.load(Ordering::Relaxed) < before + 100 {
            tokio::task::yield_now().await;
        }
    }
    done.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.expect("no assertion fails");
    }

    let sent_all = sent.load(Ordering::Relaxed) as f64;
    println!("{:.0} counted requests/s", sent_all / started.elapsed().as_secs_f64());
    let counted = limiter.peek(Key::ip([203, 0, 113, 7].into())).await.unwrap();
    let hour = counted.policies().nth(1).unwrap();
    assert_eq!(hour.limit() - hour.remaining(), sent.load(Ordering::Relaxed) as u64);
    assert!(sent.load(Ordering::Relaxed) as u64 >= 100 * RELOADS);
}

const INTERVAL: Duration = Duration::from_secs(5);

/// Waits for this many readings of the file.
async fn readings(number: u32) {
    tokio::time::sleep(INTERVAL * number + INTERVAL / 2).await;
}

/// A layer of the policy `api`, whose file is reloaded when it changes.
fn following(path: &Path) -> Router {
    following_at(path, INTERVAL)
}

fn following_at(path: &Path, interval: Duration) -> Router {
    let policies = Policies::from_file(path).unwrap();
    policies.reload_on_change(interval).unwrap();
    app(RateLimitLayer::new(MemoryStore::new(), policies.get("api").unwrap()))
}

async fn quota(app: &Router) -> String {
    let [policy, _] = announced(app).await;
    policy.expect("a policy").replace("\"api\";q=", "").replace(";w=60", "")
}

#[tokio::test(start_paused = true)]
async fn a_changed_file_is_applied_however_it_was_written() {
    let file = File::new(&api("sliding-log 3/min"));
    let app = following(&file.path());
    readings(3).await;
    assert_eq!(quota(&app).await, "3");

    // In place, to the same length.
    file.write(&api("sliding-log 4/min"));
    readings(2).await;
    assert_eq!(quota(&app).await, "4");

    // By another file in its place, as editors do.
    let other = file.folder.path().join("limits.toml.new");
    fs::write(&other, api("sliding-log 5/min")).unwrap();
    fs::rename(other, file.path()).unwrap();
    readings(2).await;
    assert_eq!(quota(&app).await, "5");
}

/// `limits.toml` leads to `..data/limits.toml`, and `..data` to a folder with the content.
#[tokio::test(start_paused = true)]
async fn a_config_map_that_changed_is_applied() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let content = |name: &str, limit: &str| {
        fs::create_dir(at(name)).unwrap();
        fs::write(at(name).join("limits.toml"), api(limit)).unwrap();
        std::os::unix::fs::symlink(name, at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
    };
    content("..2026_1", "sliding-log 3/min");
    std::os::unix::fs::symlink("..data/limits.toml", at("limits.toml")).unwrap();
    let app = following(&at("limits.toml"));
    assert_eq!(quota(&app).await, "3");

    content("..2026_2", "sliding-log 4/min");
    fs::remove_dir_all(at("..2026_1")).unwrap();
    readings(2).await;
    assert_eq!(quota(&app).await, "4");
}

#[tokio::test(start_paused = true)]
async fn a_file_is_not_applied_while_it_is_written() {
    let file = File::new(&api("sliding-log 3/min"));
    let app = following(&file.path());
    let log = Log::capture();
    for (part, limit) in [
        ("", "3"),
        ("[policies.api]\nlimit = \"sl", "3"),
        (api("sliding-log 7/min").as_str(), "3"),
    ] {
        file.write(part);
        tokio::time::sleep(INTERVAL).await;
        assert_eq!(quota(&app).await, limit);
    }
    tokio::time::sleep(INTERVAL).await;
    assert_eq!(quota(&app).await, "7");
    let text = log.text();
    assert!(
        text.contains("INFO") && text.contains(&format!("changed limits are applied policies=1 {}", file.logged())),
        "{text}"
    );
    assert_eq!(text.lines().count(), 1, "{text}");
}

/// Each part of the file is valid, and the first ones block nothing.
#[tokio::test(start_paused = true)]
async fn a_slow_writer_drops_no_block_while_it_writes() {
    const INTERVAL: Duration = Duration::from_millis(100);
    let blocking = |limit| format!("{}[block]\nroutes = \"/\"\n", api(limit));
    let file = File::new(&blocking("sliding-log 3/min"));
    let policies = file.watch();
    policies.reload_on_change(INTERVAL).unwrap();
    let app = app(RateLimitLayer::new(MemoryStore::new(), policies.get("api").unwrap()));

    let text = format!("{}\n[policies.new]\nlimit = \"1/s\"\n", blocking("sliding-log 7/min"));
    file.write("");
    let mut writer = fs::OpenOptions::new().append(true).open(file.path()).unwrap();
    for byte in text.bytes() {
        writer.write_all(&[byte]).unwrap();
        // Several readings find the same.
        tokio::time::sleep(INTERVAL * 5).await;
        assert_eq!(send(&app, get("/")).await.status, StatusCode::FORBIDDEN);
        assert_eq!(policies.names(), ["api"]);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(policies.names(), ["api", "new"]);
    assert_eq!(send(&app, get("/")).await.status, StatusCode::FORBIDDEN);
}

/// A runtime in virtual time of which one thread reads files.
fn one_reading_at_a_time() -> tokio::runtime::Runtime {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).max_blocking_threads(1);
    runtime.build().expect("a runtime")
}

/// A reading that is late finds a part that was just written, and the next reading is not earlier than an interval after it.
#[test]
fn a_part_of_a_file_that_a_late_reading_finds_is_not_applied() {
    one_reading_at_a_time().block_on(async {
        let file = File::new(&api("sliding-log 3/min"));
        let (release, released) = std::sync::mpsc::channel::<()>();
        let blocker = tokio::task::spawn_blocking(move || released.recv());
        let app = following_at(&file.path(), Duration::from_secs(1));
        tokio::task::yield_now().await;
        tokio::time::advance(Duration::from_millis(2_900)).await;
        file.write(&api("sliding-log 4/min"));
        release.send(()).unwrap();
        blocker.await.unwrap().unwrap();

        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(quota(&app).await, "3");
        file.write(&api("sliding-log 5/min"));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(quota(&app).await, "3");
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(quota(&app).await, "5");
    });
}

/// As on a network that fails. What was refused before is reported again when the reading has ended.
#[test]
fn a_reading_that_does_not_end_is_a_fault_until_it_does() {
    one_reading_at_a_time().block_on(async {
        let file = File::new(&api("sliding-log 3/min"));
        let policies = file.watch();
        policies.reload_on_change(INTERVAL).unwrap();
        let log = Log::capture();
        for (text, before) in [(api("sliding-log 3/min"), None), (api("sliding-log 3"), Some("line 2"))] {
            let is_before = || match (policies.fault(), before) {
                (None, None) => true,
                (fault, text) => fault
                    .zip(text)
                    .is_some_and(|(fault, text)| fault.to_string().contains(text)),
            };
            file.write(&text);
            readings(3).await;
            assert!(is_before(), "{:?}", policies.fault());

            let (release, released) = std::sync::mpsc::channel::<()>();
            let blocker = tokio::task::spawn_blocking(move || released.recv());
            for _ in 0..4 {
                tokio::time::advance(INTERVAL).await;
                tokio::task::yield_now().await;
            }
            let fault = policies.fault().expect("a fault");
            assert_eq!(fault.to_string(), "a reading of the file does not end");
            release.send(()).unwrap();
            blocker.await.unwrap().unwrap();
            readings(3).await;
            assert!(is_before(), "{:?}", policies.fault());
        }
        assert_eq!(log.text().matches("does not end").count(), 2, "{}", log.text());
        assert!(
            log.text().lines().all(|line| line.contains(&file.logged())),
            "{}",
            log.text()
        );
    });
}

#[tokio::test(start_paused = true)]
async fn a_file_is_not_applied_while_the_same_part_of_it_is_written_again() {
    let file = File::new(&api("sliding-log 3/min"));
    let app = following(&file.path());
    for second in 1..5 {
        file.write(&api("sliding-log 4/min"));
        let written = fs::File::options().write(true).open(file.path()).unwrap();
        written
            .set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(second))
            .unwrap();
        tokio::time::sleep(INTERVAL).await;
        assert_eq!(quota(&app).await, "3");
    }
    tokio::time::sleep(INTERVAL).await;
    assert_eq!(quota(&app).await, "4");
}

#[tokio::test(start_paused = true)]
async fn a_file_that_never_settles_is_a_fault_until_it_does() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    policies.reload_on_change(INTERVAL).unwrap();
    let app = app(RateLimitLayer::new(MemoryStore::new(), policies.get("api").unwrap()));
    let log = Log::capture();
    let warnings = || {
        log.text()
            .matches("the file changes from each reading to the next")
            .count()
    };
    let change = async |limits: Range<u32>| {
        for limit in limits {
            file.write(&api(&format!("sliding-log {limit}/min")));
            tokio::time::sleep(INTERVAL).await;
            assert_eq!(policies.fault().is_some(), warnings() == 1);
        }
    };
    // Twice it settles before it is reported.
    for (limits, last) in [(10..19, "18"), (20..29, "28")] {
        change(limits).await;
        readings(2).await;
        assert_eq!((quota(&app).await.as_str(), warnings()), (last, 0));
    }
    change(30..42).await;
    assert_eq!((quota(&app).await.as_str(), warnings()), ("28", 1));
    readings(2).await;
    assert_eq!((quota(&app).await.as_str(), policies.fault()), ("41", None));
}

#[tokio::test(start_paused = true)]
async fn a_fifo_is_reported_and_the_file_is_followed_again_in_its_place() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    policies.reload_on_change(INTERVAL).unwrap();
    let app = app(RateLimitLayer::new(MemoryStore::new(), policies.get("api").unwrap()));
    let beside = file.folder.path().join("limits.toml.new");
    let log = Log::capture();
    for (limit, quota_after) in [("sliding-log 3/min", "3"), ("sliding-log 6/min", "6")] {
        let before = quota(&app).await;
        let made = Command::new("mkfifo").arg(&beside).status().expect("`mkfifo` runs");
        assert!(made.success());
        fs::rename(&beside, file.path()).unwrap();
        readings(3).await;
        assert_eq!(quota(&app).await, before);
        let fault = policies.fault().expect("a fault");
        assert!(
            fault
                .to_string()
                .contains("limits.toml` cannot be read: it is not a regular file"),
            "{fault}"
        );

        fs::write(&beside, api(limit)).unwrap();
        fs::rename(&beside, file.path()).unwrap();
        readings(2).await;
        assert_eq!(policies.fault(), None);
        assert_eq!(quota(&app).await, quota_after);
    }
    assert_eq!(log.text().matches("not a regular file").count(), 2, "{}", log.text());
}

#[test]
fn a_task_that_ends_with_its_runtime_is_reported() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    let follow = || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let _entered = runtime.enter();
        policies.reload_on_change(INTERVAL).unwrap();
        assert_eq!(policies.fault(), None);
    };
    for _ in 0..2 {
        let log = Log::capture();
        follow();
        let fault = policies.fault().expect("a fault");
        assert!(fault.to_string().contains("are not followed anymore"), "{fault}");
        assert_eq!(log.text().matches("WARN").count(), 1, "{}", log.text());
        assert!(log.text().contains(&file.logged()), "{}", log.text());
    }
    // What is loaded by hand is in order, but the task is still missing.
    policies.reload().unwrap();
    assert!(policies.fault().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_changed_file_that_cannot_be_applied_is_logged_once() {
    let file = File::new(&api("sliding-log 3/min"));
    let app = following(&file.path());
    let log = Log::capture();
    file.write(&api("sliding-log 3"));
    readings(6).await;
    assert_eq!(quota(&app).await, "3");
    let text = log.text();
    assert_eq!(text.matches("WARN").count(), 1, "{text}");
    for expected in ["line 2", "not applied", &file.logged()] {
        assert!(text.contains(expected), "{text}");
    }

    fs::remove_file(file.path()).unwrap();
    readings(6).await;
    assert_eq!(log.text().matches("WARN").count(), 2, "{}", log.text());
    assert!(log.text().contains("cannot be read"), "{}", log.text());

    file.write(&api("sliding-log 6/min"));
    readings(2).await;
    assert_eq!(quota(&app).await, "6");
}

#[tokio::test(start_paused = true)]
async fn a_file_whose_content_is_in_force_again_is_in_order() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    policies.reload_on_change(INTERVAL).unwrap();
    readings(1).await;
    file.write(&api("sliding-log 3"));
    policies.reload().unwrap_err();
    assert!(policies.fault().is_some());
    file.write(&api("sliding-log 3/min"));
    readings(2).await;
    assert_eq!(policies.fault(), None);

    // What was refused is refused again, and reported.
    for _ in 0..2 {
        file.write(&api("sliding-log 3"));
        readings(3).await;
        assert!(policies.fault().is_some());
        file.write(&api("sliding-log 4/min"));
        readings(2).await;
        assert_eq!(policies.fault(), None);
    }
}

/// The file is the same as before.
#[tokio::test(start_paused = true)]
async fn policies_that_are_replaced_in_code_stay_until_the_file_changes() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    let limit = || policies.get("api").unwrap().limit().unwrap().to_string();
    policies.reload_on_change(INTERVAL).unwrap();
    readings(3).await;
    policies
        .replace(&Policies::from_toml(&api("sliding-log 9/min")).unwrap())
        .unwrap();
    readings(5).await;
    assert_eq!(limit(), "sliding-log 9/min");
    file.write(&api("sliding-log 4/min"));
    readings(3).await;
    assert_eq!(limit(), "sliding-log 4/min");
}

/// Between two readings another content was applied.
#[tokio::test(start_paused = true)]
async fn a_content_that_is_refused_again_after_a_reload_is_a_fault_again() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    policies.reload_on_change(INTERVAL).unwrap();
    readings(1).await;
    file.write(&api("sliding-log 3"));
    readings(3).await;
    assert!(policies.fault().is_some());
    file.write(&api("sliding-log 4/min"));
    policies.reload().unwrap();
    assert_eq!(policies.fault(), None);
    file.write(&api("sliding-log 3"));
    readings(3).await;
    assert!(policies.fault().is_some());
}

/// Other threads reload as fast as they can: what they have read before a change is not applied after it.
#[test]
fn what_was_read_before_another_reload_is_not_applied_after_it() {
    let file = File::new(&api("sliding-log 1/min"));
    let policies = file.watch();
    let limiter = Limiter::new(MemoryStore::new(), policies.get("api").unwrap());
    let is_done = AtomicBool::new(false);
    let beside = file.folder.path().join("limits.toml.new");
    let change = |text: &str| {
        fs::write(&beside, text).unwrap();
        fs::rename(&beside, file.path()).unwrap();
        policies.reload()
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    let _ = policies.reload();
                }
            });
        }
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for quota in 2..300 {
                change(&api(&format!("sliding-log {quota}/min"))).unwrap();
                assert_eq!(policies.fault(), None, "{quota}");
                let decision = limiter.request(Key::ip([203, 0, 113, 7].into())).check_now().unwrap();
                assert_eq!(decision.limit(), quota);
                change("policies = 3").unwrap_err();
                assert!(policies.fault().is_some(), "{quota}");
            }
        }));
        is_done.store(true, Ordering::Relaxed);
        outcome.unwrap();
    });
}

/// As of an application that builds its runtime anew.
#[test]
fn the_last_call_follows_a_file_and_the_task_of_an_earlier_one_ends_without_a_fault() {
    let file = File::new(&api("sliding-log 3/min"));
    let policies = file.watch();
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap()
    };
    let (first, second) = (runtime(), runtime());
    first.block_on(async {
        policies.reload_on_change(INTERVAL).unwrap();
        readings(1).await;
    });
    second.block_on(async { policies.reload_on_change(INTERVAL).unwrap() });
    let log = Log::capture();
    drop(first);
    assert_eq!(policies.fault(), None);
    assert!(!log.text().contains("WARN"), "{}", log.text());

    file.write(&api("sliding-log 4/min"));
    second.block_on(readings(2));
    assert_eq!(
        policies.get("api").unwrap().limit(),
        Some(&"sliding-log 4/min".parse().unwrap())
    );
    drop(second);
    assert!(policies.fault().is_some());
}

#[tokio::test(start_paused = true)]
async fn two_tasks_that_read_a_file_end_with_the_last_layer() {
    let file = File::new(&api("sliding-log 3/min"));
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let policies = file.watch();
    policies.reload_on_change(INTERVAL).unwrap();
    policies.reload_on_change(INTERVAL).unwrap();
    readings(2).await;
    assert_eq!(tasks(), 1);
    drop(policies);
    readings(2).await;
    assert_eq!(tasks(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_task_that_reads_a_file_ends_with_the_last_layer() {
    let file = File::new(&api("sliding-log 3/min"));
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let app = following(&file.path());
    readings(2).await;
    assert_eq!(tasks(), 1);
    drop(app);
    readings(2).await;
    assert_eq!(tasks(), 0);
}

#[test]
fn a_change_is_followed_in_a_runtime_at_an_interval_above_zero() {
    let file = File::new(&api("sliding-log 3/min"));
    let error = file.watch().reload_on_change(INTERVAL).unwrap_err().to_string();
    assert!(error.contains("runtime"), "{error}");
    let error = file.watch().reload_on_change(Duration::ZERO).unwrap_err().to_string();
    assert!(error.contains("`Duration::from_secs(5)`"), "{error}");
}

/// A long request is settled after the window has become longer, and the others of the new window have used it up.
#[tokio::test]
async fn a_settlement_after_a_reload_removes_no_counts_of_the_new_window() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let in_redis = clock.redis_store(&redis).await;
    settles_with_the_newest_limit(&clock, clock.memory_store(), async || {}).await;
    settles_with_the_newest_limit(&clock, in_redis, async || clock.write_to(&redis).await).await;
}

async fn settles_with_the_newest_limit(clock: &Clock, store: impl Store + Clone, set: impl AsyncFn()) {
    // After 10 s the charge is in the same hour as the new counts.
    settles_later(clock, &store, &set, 10_000).await;
    settles_later(clock, &store, &set, 10).await;
}

async fn settles_later(clock: &Clock, store: &(impl Store + Clone), set: &impl AsyncFn(), later: u64) {
    for (number, (limit, actual)) in [
        ("sliding-log", 0),
        ("sliding-log", 2),
        ("sliding-counter", 0),
        ("sliding-counter", 2),
        ("fixed-window", 0),
        ("fixed-window", 2),
        ("token-bucket", 0),
        ("token-bucket", 2),
    ]
    .into_iter()
    .enumerate()
    {
        let described = |window| format!("policies.mails{number}-{later}.limit = '{limit} 5/{window}'");
        let policies = |window| Policies::from_toml(&described(window)).expect("it describes a policy");
        let live = policies("s");
        let mails = Limiter::new(
            store.clone(),
            live.unkeyed(&format!("mails{number}-{later}")).expect("it is there"),
        );
        let advance = async |by| {
            clock.advance(Duration::from_secs(by));
            set().await;
        };
        advance(0).await;
        let long = mails.check("42").await.expect("the store replies");

        live.replace(&policies("h")).expect("it fits");
        advance(later).await;
        let mut used = 0;
        while mails.check("42").await.expect("the store replies").is_allowed() {
            used += 1;
        }
        assert_eq!(used, 5, "{limit}");
        advance(2).await;
        long.take_receipt().settle(actual).await.expect("the store replies");
        assert!(
            !mails.check("42").await.expect("the store replies").is_allowed(),
            "{limit}, settled to {actual} after {later} s"
        );
    }
}

/// Otherwise the next process would not start with the file.
#[test]
fn a_reload_of_a_limit_for_which_requests_would_wait_in_vain_is_refused() {
    let file = |limit: &str| Policies::from_toml(&format!("[policies.mails]\nlimit = '{limit}'\n")).expect("a file");
    let policies = file("sliding-log 10/s");
    let mails = policies
        .unkeyed("mails")
        .expect("a policy")
        .wait_up_to(Duration::from_secs(1));
    let limiter = Limiter::new(MemoryStore::new(), mails);
    let error = policies.replace(&file("fixed-window 9/h")).unwrap_err().to_string();
    assert!(error.contains("wait in vain") && error.contains("`mails`"), "{error}");
    let decision = limiter.request("42").check_now().expect("a memory store");
    assert_eq!(decision.limit(), 10);
}
