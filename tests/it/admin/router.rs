//! The router for operators.

use std::{
    env, process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, UNIX_EPOCH},
};

use axum::{Router, body::Body, routing::get as route};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use http::{Method, Request, StatusCode};
use serde_json::{Value, json};
use tokio::time::advance;
use tower::ServiceExt;
use tower_quota::{
    Admin, Ban, Concurrency, FailureMode, FixedWindow, Key, Limit, Limiter, ManualClock, MemoryStore, Plans, Policies,
    Policy, RateLimitLayer, RedisStore, RedisStoreBuilder, SlidingLog, TokenBucket, key,
    limit::Calendar,
    store::{ErrorKind, SecretFuture, Store, StoreError, StoreFuture, StoreRequest, StoreStatus},
};

use crate::support::{
    Broken, Counted, Flaky, Log, Received, Redis, connected, eventually, get, get_from, less_patient, patient, send,
    this_binary,
};

pub(super) const MINUTE: Duration = Duration::from_secs(60);

fn unix_seconds() -> u64 {
    UNIX_EPOCH.elapsed().expect("a clock after 1970").as_secs()
}

/// The router of an `Admin`.
pub(super) struct Operator(pub(super) Router);

impl Operator {
    pub(super) fn of(layer: &RateLimitLayer) -> Self {
        Self(Admin::new().layer(layer).router_behind_authentication())
    }

    pub(super) fn of_limiter(limiter: &Limiter) -> Self {
        Self(Admin::new().limiter(limiter).router_behind_authentication())
    }

    pub(super) async fn report(&self) -> Value {
        let response = send(&self.0, Request::get("/report")).await;
        assert_eq!(response.status, StatusCode::OK);
        response.json()
    }

    /// The first policy of the report.
    pub(super) async fn policy(&self) -> Value {
        self.report().await["policies"][0].take()
    }

    pub(super) async fn get(&self, policy: &str, key: &str) -> Received {
        let escaped: String = key.bytes().map(|byte| format!("%{byte:02X}")).collect();
        send(&self.0, Request::get(format!("/subject?policy={policy}&key={escaped}"))).await
    }

    /// The counts of a key by the first limit of a policy.
    pub(super) async fn counts(&self, policy: &str, key: &str) -> Value {
        let response = self.get(policy, key).await;
        assert_eq!(response.status, StatusCode::OK, "{}", response.json());
        response.json()["counts"][0].take()
    }

    pub(super) async fn reset(&self, policy: &str, key: &str) -> Received {
        self.post("/reset", &json!({ "policy": policy, "key": key }).to_string(), &[])
            .await
    }

    pub(super) async fn set_override(&self, policy: &str, key: &str, limit: &str, lasts: impl Into<Value>) -> Received {
        let body = json!({ "policy": policy, "key": key, "limit": limit, "lasts": lasts.into() });
        self.post("/override", &body.to_string(), &[]).await
    }

    pub(super) async fn end_override(&self, policy: &str, key: &str) -> Received {
        let body = json!({ "policy": policy, "key": key }).to_string();
        self.post("/end-override", &body, &[]).await
    }

    pub(super) async fn post(&self, path: &str, body: &str, fields: &[(&str, &str)]) -> Received {
        let mut request = Request::post(path);
        if !fields.iter().any(|(name, _)| *name == "content-type") {
            request = request.header("content-type", "application/json");
        }
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let Ok(response) = self
            .0
            .clone()
            .oneshot(request.body(Body::from(body.to_owned())).expect("a request"))
            .await;
        Received::read(response).await
    }
}

fn app(layer: &RateLimitLayer) -> Router {
    Router::new().route("/", route(async || "hi")).layer(layer.clone())
}

/// Sends requests from an address, and returns the status of the last one.
async fn call(app: &Router, address: &str, times: usize) -> StatusCode {
    let mut status = StatusCode::OK;
    for _ in 0..times {
        status = send(app, get_from(address, "/")).await.status;
    }
    status
}

fn api(limit: impl Into<Limit>) -> Policy {
    Policy::new("api", limit.into()).key(key::ip())
}

/// A layer with one policy that admits 2 requests a minute of each address.
fn layer() -> RateLimitLayer {
    RateLimitLayer::new(MemoryStore::new(), api(SlidingLog::per_minute(2)))
}

#[tokio::test(start_paused = true)]
async fn the_report_has_the_plan_of_a_policy_and_a_reset_is_for_all_plans() {
    let requests = |quota| api(SlidingLog::per_hour(quota));
    let plans = Plans::new("free", requests(1)).plan("pro", requests(5));
    let layer = RateLimitLayer::new(
        MemoryStore::new(),
        plans.by(|parts| parts.headers.get("plan")?.to_str().ok()),
    );
    let operator = Operator::of(&layer);
    let report = operator.report().await;
    let of = |position: usize, field: &str| report["policies"][position][field].clone();
    assert_eq!([of(0, "policy"), of(1, "policy")], ["api", "api"]);
    assert_eq!([of(0, "plan"), of(1, "plan")], ["free", "pro"]);

    let app = Router::new().route("/", route(async || "hi")).layer(layer);
    let pro = async || {
        let response = send(&app, get_from("192.0.2.1", "/").header("plan", "pro")).await;
        response.field("ratelimit").map(str::to_owned)
    };
    let first = Some(r#""api";r=4;t=3600"#.to_owned());
    assert_eq!(pro().await, first);
    let reset = operator.reset("api", "ip=192.0.2.1").await;
    assert!(reset.status.is_success(), "{}", reset.status);
    assert_eq!(pro().await, first);

    // Each plan has its own numbers.
    for _ in 0..2 {
        send(&app, get_from("192.0.2.2", "/")).await;
    }
    let report = operator.report().await;
    let numbers = |position: usize| {
        let policy = &report["policies"][position];
        let subjects = policy["denials"]["subjects"].as_array().map(Vec::len);
        (
            policy["decisions"].as_u64(),
            policy["denials"]["total"].as_u64(),
            subjects,
        )
    };
    assert_eq!(
        [numbers(0), numbers(1)],
        [(Some(2), Some(1), Some(1)), (Some(2), Some(0), Some(0))]
    );
    let denied = operator.get("api", "ip=192.0.2.2").await.json()["denied"].take();
    assert_eq!(denied["denials"], 1, "a look-up is of all plans");
}

#[tokio::test(start_paused = true)]
async fn the_report_has_each_policy_with_its_settings() {
    let started = unix_seconds();
    let layer = RateLimitLayer::new(
        MemoryStore::new(),
        [
            api(TokenBucket::per_second(10).burst(30))
                .cost(2)
                .failure_mode(FailureMode::local_share(1, 4)),
            Policy::new("logins", SlidingLog::per_minute(5))
                .key(key::ip())
                .observe_only()
                .ban(Ban::after(3, MINUTE).first(MINUTE)),
            Policy::new("closed", Limit::DenyAll).key(key::ip()).cost_fn(|_| 1),
            Policy::new("open", Limit::Unlimited).key(key::ip()),
        ],
    );
    let report = Operator::of(&layer).report().await;
    let policies = report["policies"].as_array().expect("a list");
    assert_eq!(policies.len(), 4);

    let [api, logins, closed, open] = &policies[..] else {
        panic!("{report}")
    };
    assert_eq!(api["policy"], "api");
    assert_eq!(api["limit"], "token-bucket 10/s burst 30");
    assert_eq!(
        api["limits"],
        json!([{ "limit": "token-bucket 10/s burst 30", "quota": 30, "window_seconds": 3.0 }])
    );
    assert_eq!((&api["cost"], &api["failure_mode"]), (&json!(2), &json!("local 1/4")));
    assert_eq!((&api["observed"], &api["ban"]), (&json!(false), &Value::Null));
    assert!(api["since"].as_u64() >= Some(started), "{report}");
    assert_eq!(api["reloaded_at"], Value::Null);

    assert_eq!((&logins["observed"], &logins["cost"]), (&json!(true), &json!(1)));
    assert_eq!(logins["ban"], "ban after 3/min first 1min longest 1d");
    assert_eq!((&closed["limit"], &closed["cost"]), (&json!("deny-all"), &Value::Null));
    assert_eq!(closed["limits"][0]["quota"], 0);
    assert_eq!(
        open["limits"][0],
        json!({ "limit": "unlimited", "quota": null, "window_seconds": null })
    );
}

#[tokio::test(start_paused = true)]
async fn the_report_follows_a_reload() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("limits.toml");
    let write =
        |limit: &str| std::fs::write(&file, format!("[policies.api]\nlimit = '{limit}'\nkey = 'ip'\n")).unwrap();
    write("sliding-log 2/min");
    let policies = Policies::from_file(&file).expect("a file of policies");
    let layer = policies.layer(MemoryStore::new(), ["api"]).expect("a policy");
    let limiter = Limiter::new(MemoryStore::new(), policies.unkeyed("api").expect("a policy"));
    let operators = [Operator::of(&layer), Operator::of_limiter(&limiter)];
    for operator in &operators {
        let before = operator.policy().await;
        assert_eq!(
            (&before["limit"], &before["reloaded_at"]),
            (&json!("sliding-log 2/min"), &Value::Null)
        );
    }
    assert_eq!(call(&app(&layer), "192.0.2.1", 3).await, StatusCode::TOO_MANY_REQUESTS);

    write("sliding-log 5/min");
    policies.reload().expect("the file is valid");
    for operator in &operators {
        let after = operator.policy().await;
        assert_eq!(after["limit"], "sliding-log 5/min");
        assert!(after["reloaded_at"].as_u64() >= after["since"].as_u64(), "{after}");
    }
    let [of_layer, _] = &operators;
    assert_eq!(of_layer.counts("api", "ip=192.0.2.1").await["remaining"], 3);
    assert_eq!(
        of_layer.policy().await["denials"]["total"],
        1,
        "denials before a reload stay"
    );
    assert_eq!(call(&app(&layer), "192.0.2.1", 4).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(of_layer.policy().await["denials"]["total"], 2);
}

#[tokio::test(start_paused = true)]
async fn the_report_has_the_mistake_in_a_file_until_it_is_mended() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("limits.toml");
    let write =
        |limit: &str| std::fs::write(&file, format!("[policies.api]\nlimit = '{limit}'\nkey = 'ip'\n")).unwrap();
    write("sliding-log 2/min");
    let policies = Policies::from_file(&file).expect("a file of policies");
    let layer = policies.layer(MemoryStore::new(), ["api"]).expect("a policy");
    let operator = Operator::of(&layer);
    let refused = async || operator.policy().await["refused_reload"].take();
    assert_eq!(refused().await, Value::Null);

    let written = unix_seconds();
    write("sliding-log 2/minute-or-so");
    assert!(policies.reload().is_err());
    let error = refused().await;
    assert!(
        error["error"]
            .as_str()
            .is_some_and(|error| error.contains("minute-or-so")),
        "{error}"
    );
    assert!(error["since"].as_u64() >= Some(written), "{error}");
    assert_eq!(operator.policy().await["limit"], "sliding-log 2/min");
    write("sliding-log 3/min");
    policies.reload().expect("the file is valid");
    assert_eq!(refused().await, Value::Null);

    policies.reload_on_change(Duration::from_secs(1)).expect("a runtime");
    std::fs::remove_file(&file).expect("the file was there");
    eventually("the missing file is reported", async || {
        refused().await["error"].is_string()
    })
    .await;
    write("sliding-log 3/min");
    eventually("the file is back", async || refused().await.is_null()).await;
}

#[tokio::test(start_paused = true)]
async fn the_report_has_what_a_file_has_switched_off_or_has_no_more_and_the_overrides_that_do_not_fit() {
    let file = |text: &str| Policies::from_toml(text).expect("a file");
    let api = "[policies.api]\nlimit = 'sliding-log 2/min'\nkey = 'ip'\n";
    let logins = "[policies.logins]\nlimit = 'sliding-log 5/min'\nkey = 'ip'\n";
    let policies = file(&format!("{api}{logins}"));
    let layer = policies.layer(MemoryStore::new(), ["api", "logins"]).expect("policies");
    let operator = Operator::of(&layer);
    let set = operator
        .set_override("api", "ip=192.0.2.1", "sliding-log 9/min", "1h")
        .await;
    assert_eq!(set.json()["override"]["applies"], true);
    let state = async || {
        let report = operator.report().await;
        let of = |position: usize| {
            let policy = &report["policies"][position];
            (policy["off"].clone(), policy["missing"].clone())
        };
        (of(0), of(1), report["overrides"][0]["applies"].clone())
    };
    let (yes, no) = (json!(true), json!(false));
    let of = |off: &Value, missing: &Value| (off.clone(), missing.clone());
    assert_eq!(state().await, (of(&no, &no), of(&no, &no), yes.clone()));

    policies
        .replace(&file(&format!("{logins}enabled = false\n")))
        .expect("a file");
    assert_eq!(state().await, (of(&no, &yes), of(&yes, &no), yes.clone()));
    let refused = operator.reset("logins", "ip=192.0.2.1").await;
    assert_eq!(refused.status, StatusCode::CONFLICT);

    policies
        .replace(&file(&format!("enabled = false\n{api}{logins}")))
        .expect("a file");
    assert_eq!(state().await, (of(&yes, &no), of(&yes, &no), no.clone()));

    let other = api.replace("sliding-log", "token-bucket");
    policies.replace(&file(&format!("{other}{logins}"))).expect("a file");
    assert_eq!(state().await, (of(&no, &no), of(&no, &no), no.clone()));
    let subject = operator.get("api", "ip=192.0.2.1").await.json();
    assert_eq!(
        (&subject["override"]["applies"], &subject["counts"][0]["limit"]),
        (&no, &json!("token-bucket 2/min"))
    );
}

/// Reads and resets the counts of one caller, in this store.
async fn reads_and_resets(store: impl Store + Clone) {
    let policy = |name| Policy::new(name, SlidingLog::per_minute(2)).key((key::ip(), key::path()));
    let banning = policy("banning").ban(Ban::after(2, MINUTE).first(10 * MINUTE));
    let layer = RateLimitLayer::new(store.clone(), [policy("api"), policy("other")]);
    let bans = RateLimitLayer::new(store, banning);
    let operator = Operator(Admin::new().layer(&layer).layer(&bans).router_behind_authentication());
    let key = "ip=192.0.2.1|path=/";
    assert_eq!(operator.counts("api", key).await["remaining"], 2);

    assert_eq!(call(&app(&layer), "192.0.2.1", 3).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(call(&app(&layer), "192.0.2.2", 1).await, StatusCode::OK);
    let counts = operator.counts("api", key).await;
    assert_eq!(
        (&counts["allowed"], &counts["denial"]),
        (&json!(false), &json!("quota exceeded"))
    );
    assert_eq!((&counts["quota"], &counts["remaining"]), (&json!(2), &json!(0)));
    let wait = counts["retry_after_seconds"].as_f64().expect("a number");
    assert!(0.0 < wait && wait <= 60.0, "{counts}");
    assert_eq!(operator.counts("api", "ip=192.0.2.2|path=/").await["remaining"], 1);

    // A peek is not a denial and counts nothing.
    assert_eq!(operator.get("api", key).await.json()["denied"]["denials"], 1);

    let response = operator.reset("api", key).await;
    assert_eq!(response.status, StatusCode::OK);
    assert_eq!(response.json()["counts"][0]["remaining"], 2);
    assert_eq!(
        operator.counts("other", key).await["remaining"],
        0,
        "another policy keeps its counts"
    );
    assert_eq!(
        operator.counts("api", "ip=192.0.2.2|path=/").await["remaining"],
        1,
        "so does another key"
    );
    operator.reset("other", key).await;
    assert_eq!(call(&app(&layer), "192.0.2.1", 1).await, StatusCode::OK);

    // A ban, which is longer than the window of its policy.
    assert_eq!(call(&app(&bans), "192.0.2.1", 5).await, StatusCode::TOO_MANY_REQUESTS);
    let counts = operator.counts("banning", key).await;
    assert_eq!(counts["denial"], "banned");
    assert!(counts["retry_after_seconds"].as_f64() > Some(500.0), "{counts}");
    assert_eq!(operator.reset("banning", key).await.status, StatusCode::OK);
    assert_eq!(operator.counts("banning", key).await["remaining"], 2);
    assert_eq!(call(&app(&bans), "192.0.2.1", 1).await, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn a_subject_is_read_and_reset_in_memory() {
    reads_and_resets(MemoryStore::new()).await;
}

#[tokio::test]
async fn a_subject_is_read_and_reset_in_redis() {
    let redis = Redis::start();
    reads_and_resets(connected(patient(), &redis.url()).await).await;
}

#[tokio::test]
async fn a_subject_is_read_and_reset_where_redis_has_hashes_of_keys() {
    let redis = Redis::start();
    let store = connected(
        patient().hash_keys("0123456789abcdef").expect("a long secret"),
        &redis.url(),
    )
    .await;
    reads_and_resets(store).await;
}

/// Gives one caller another limit for a time, in this store.
async fn overrides_a_limit(store: impl Store + Clone) {
    const KEY: &str = "ip=192.0.2.1";
    let layer = RateLimitLayer::new(store.clone(), api(SlidingLog::per_day(2)));
    let app = app(&layer);
    let operator = Operator::of(&layer);
    assert_eq!(call(&app, "192.0.2.1", 3).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(operator.report().await["overrides"], json!([]));
    let before = operator.get("api", KEY).await.json();
    assert_eq!(
        (&before["override"], &before["counts"][0]["in_place_of"]),
        (&Value::Null, &Value::Null)
    );

    let set = operator.set_override("api", KEY, "sliding-log 5/d", "3d").await;
    assert_eq!(set.status, StatusCode::OK, "{}", set.json());
    let subject = set.json();
    let counts = &subject["counts"][0];
    assert_eq!(
        (&counts["limit"], &counts["in_place_of"]),
        (&json!("sliding-log 5/d"), &json!("sliding-log 2/d"))
    );
    assert_eq!(
        (&counts["allowed"], &counts["remaining"], &counts["quota"]),
        (&json!(true), &json!(3), &json!(5))
    );
    let own = &subject["override"];
    assert_eq!(
        (&own["policy"], &own["store"], &own["limit"], &own["set_by"]),
        (&json!("api"), &json!(1), &json!("sliding-log 5/d"), &json!("not known"))
    );
    let ends = own["ends_after_seconds"].as_f64().expect("a number");
    assert!((259_190.0..=259_200.0).contains(&ends), "{own}");
    let listed = operator.report().await["overrides"].take();
    assert_eq!(listed.as_array().map(Vec::len), Some(1), "{listed}");
    assert_eq!(
        (&listed[0]["subject"], &listed[0]["limit"]),
        (&own["subject"], &own["limit"])
    );
    assert!(!listed.to_string().contains("192.0.2"), "no key is shown: {listed}");
    assert_eq!(call(&app, "192.0.2.1", 3).await, StatusCode::OK);
    assert_eq!(call(&app, "192.0.2.2", 3).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(operator.counts("api", "ip=192.0.2.2").await["in_place_of"], Value::Null);

    // It replaces the one before.
    for lasts in [json!(3_600), json!("3600"), json!(" 1h ")] {
        let set = operator.set_override("api", KEY, "deny-all", lasts).await.json();
        assert_eq!(
            (&set["counts"][0]["denial"], &set["counts"][0]["in_place_of"]),
            (&json!("deny all"), &json!("sliding-log 2/d"))
        );
        let ends = set["override"]["ends_after_seconds"].as_f64().expect("a number");
        assert!((3_590.0..=3_600.0).contains(&ends), "{set}");
    }
    assert_eq!(operator.reset("api", KEY).await.status, StatusCode::OK);
    assert_eq!(call(&app, "192.0.2.1", 1).await, StatusCode::TOO_MANY_REQUESTS);

    // Until a time, by an operator with a line break in the name.
    let now = unix_seconds();
    let until =
        |until: u64| json!({ "policy": "api", "key": KEY, "limit": "sliding-log 5/d", "until": until }).to_string();
    let eve = format!("Basic {}", BASE64_STANDARD.encode("eve\n\0sliding-log 9/s:password"));
    let set = operator
        .post("/override", &until(now + 3_600), &[("authorization", &eve)])
        .await
        .json();
    let own = operator.report().await["overrides"][0].take();
    assert_eq!(own["set_by"], "evesliding-log 9/s", "{set}");
    assert_eq!(
        (&own["limit"], &own["ends_at"]),
        (&set["override"]["limit"], &set["override"]["ends_at"])
    );
    let (ends, ends_at) = (own["ends_after_seconds"].as_f64(), own["ends_at"].as_u64());
    assert!(ends.is_some_and(|ends| (3_590.0..=3_600.0).contains(&ends)), "{own}");
    assert!(ends_at.is_some_and(|at| at.abs_diff(now + 3_600) <= 10), "{own}");
    for mistake in [now, 1_000 * now] {
        let refused = operator.post("/override", &until(mistake), &[]).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{mistake}");
    }
    let date = until(now).replace(&now.to_string(), "\"2126-12-01\"");
    let length = date.replace("until", "lasts");
    for (body, fix) in [
        (date, "use the seconds since the Unix epoch"),
        (length, "`until`, in seconds since"),
    ] {
        let refused = operator.post("/override", &body, &[]).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        assert!(
            refused.json()["error"]
                .as_str()
                .is_some_and(|error| error.contains(fix)),
            "{body}"
        );
    }
    let both = until(now + 9).replace("}", r#","lasts":"3d"}"#);
    let past = operator.post("/override", &both, &[]).await;
    assert_eq!(past.status, StatusCode::BAD_REQUEST);
    assert!(
        past.json()["error"]
            .as_str()
            .is_some_and(|error| error.contains("exclude each other"))
    );

    let ended = operator.end_override("api", KEY).await.json();
    assert_eq!(
        (&ended["override"], &ended["counts"][0]["remaining"]),
        (&Value::Null, &json!(2))
    );
    assert_eq!(operator.report().await["overrides"], json!([]));
    assert_eq!(call(&app, "192.0.2.1", 2).await, StatusCode::OK);
    assert_eq!(operator.end_override("api", KEY).await.status, StatusCode::OK);

    // A reset removes what was counted by the limit of the override alone.
    let layer = RateLimitLayer::new(store, Policy::new("closed", Limit::DenyAll).key(key::ip()));
    let operator = Operator::of(&layer);
    operator.set_override("closed", KEY, "sliding-log 5/d", "3d").await;
    assert_eq!(call(&self::app(&layer), "192.0.2.1", 5).await, StatusCode::OK);
    assert_eq!(operator.counts("closed", KEY).await["remaining"], 0);
    operator.reset("closed", KEY).await;
    assert_eq!(operator.counts("closed", KEY).await["remaining"], 5);
}

#[tokio::test(start_paused = true)]
async fn a_limit_is_overridden_in_memory() {
    overrides_a_limit(MemoryStore::new()).await;
}

#[tokio::test]
async fn a_limit_is_overridden_in_redis() {
    let redis = Redis::start();
    overrides_a_limit(connected(patient().overrides(true), &redis.url()).await).await;
}

#[tokio::test]
async fn a_limit_is_overridden_where_redis_has_hashes_of_keys() {
    let redis = Redis::start();
    let builder = patient()
        .overrides(true)
        .hash_keys("0123456789abcdef")
        .expect("a long secret");
    let store = connected(builder, &redis.url()).await;
    overrides_a_limit(store.clone()).await;

    // No hash of the page: it selects nothing.
    let operator = Operator::of(&RateLimitLayer::new(store, api(SlidingLog::per_day(2))));
    let set = operator
        .set_override("api", "ip=192.0.2.1", "sliding-log 5/d", "3d")
        .await
        .json();
    let subject = set["override"]["subject"].as_str().expect("text");
    assert!(subject.starts_with("keyed="), "{set}");
}

#[tokio::test]
async fn a_store_without_overrides_says_so() {
    let redis = Redis::start();
    let layer = RateLimitLayer::new(connected(patient(), &redis.url()).await, api(SlidingLog::per_minute(2)));
    let operator = Operator::of(&layer);
    assert_eq!(operator.report().await["overrides"], json!([]));
    let key = "ip=192.0.2.1";
    for response in [
        operator.set_override("api", key, "sliding-log 5/min", "1h").await,
        operator.end_override("api", key).await,
    ] {
        assert_eq!(response.status, StatusCode::CONFLICT);
        let error = response.json()["error"].to_string();
        assert!(
            error.contains("the store has no overrides; set `.overrides(true)`"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn an_override_that_redis_has_not_confirmed_is_an_error() {
    let mut redis = Redis::start();
    let layer = RateLimitLayer::new(
        connected(less_patient().overrides(true), &redis.url()).await,
        api(SlidingLog::per_minute(2)),
    );
    redis.kill();
    let operator = Operator::of(&layer);
    let set = operator.set_override("api", "ip=192.0.2.1", "sliding-log 5/min", "1h");
    let response = set.await;
    assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE);
    let error = response.json()["error"].to_string();
    assert!(
        error.contains("the store has not confirmed the change of the override: "),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn the_overrides_of_other_policies_are_not_listed() {
    let store = MemoryStore::new();
    let mails = Limiter::new(store.clone(), Policy::new("mails", SlidingLog::per_hour(3)));
    let layer = RateLimitLayer::new(store, api(SlidingLog::per_minute(2)));
    let set = mails.override_limit("mails", "42", SlidingLog::per_hour(9), MINUTE);
    set.await.expect("a memory store replies");
    assert_eq!(Operator::of(&layer).report().await["overrides"], json!([]));

    let both = Admin::new().layer(&layer).limiter(&mails).show_keys(true);
    let both = Operator(both.router_behind_authentication());
    let listed = both.report().await["overrides"].take();
    assert_eq!(
        listed,
        json!([{ "policy": "mails", "store": 1, "subject": "key=42", "limit": "sliding-log 9/h", "applies": true, "set_by": null, "ends_at": listed[0]["ends_at"], "ends_after_seconds": listed[0]["ends_after_seconds"] }])
    );
    tokio::time::advance(MINUTE).await;
    assert_eq!(both.report().await["overrides"], json!([]));
    assert_eq!(both.get("mails", "key=42").await.json()["override"], Value::Null);
}

#[tokio::test]
async fn a_key_is_written_as_redis_shows_it() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let limiter = Limiter::new(store, Policy::new("mails", SlidingLog::per_hour(3)));
    let operator = Operator::of_limiter(&limiter);
    let escaped = Key::header("x-user", "a|b {}").and(Key::path("/é"));
    let network = Key::ip("2001:db8:1:2:3::".parse().expect("an address"));
    for key in [escaped, network, Key::from("x".repeat(400))] {
        let _ = limiter.check(key).await.expect("Redis replies");
        let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
        let [stored] = &keys[..] else { panic!("{keys:?}") };
        let text = stored.split(['{', '}']).nth(1).expect("a key in braces");
        assert_eq!(operator.counts("mails", text).await["remaining"], 2, "{text}");
        let _: String = redis.command("FLUSHALL", [""; 0]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_too_long_for_a_store_is_found_by_its_text() {
    let limiter = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(3)));
    let operator = Operator::of_limiter(&limiter);
    let long = Key::from("x".repeat(400));
    let _ = limiter.check(long.clone()).await.expect("a memory store replies");

    let response = operator.get("mails", long.as_str()).await.json();
    assert_eq!(response["counts"][0]["remaining"], 2);
    let hash = response["key"].as_str().expect("text");
    assert!(hash.starts_with("hash="), "{hash}");
    assert_eq!(operator.counts("mails", hash).await["remaining"], 2);
}

#[tokio::test(start_paused = true)]
async fn keys_of_denials_are_hashes_that_a_look_up_shows() {
    let layer = layer();
    let operator = Operator::of(&layer);
    for (address, times) in [("192.0.2.1", 4), ("192.0.2.2", 7), ("192.0.2.3", 2)] {
        call(&app(&layer), address, times).await;
    }
    let denials = &operator.policy().await["denials"];
    assert_eq!((&denials["total"], &denials["most_of_others"]), (&json!(7), &json!(0)));
    let [second, first] = ["192.0.2.1", "192.0.2.2"].map(|address| format!("ip={address}"));
    let hash = async |key: &str| operator.get("api", key).await.json()["subject"].take();
    let last_at = &denials["subjects"][0]["last_at"];
    let expected = json!([
        { "subject": hash(&first).await, "denials": 5, "error": 0, "last_at": last_at },
        { "subject": hash(&second).await, "denials": 2, "error": 0, "last_at": denials["subjects"][1]["last_at"] },
    ]);
    assert_eq!(denials["subjects"], expected);
    let (since, last_at) = (denials["since"].as_u64(), last_at.as_u64());
    assert!(since.is_some() && since <= last_at && last_at <= operator.report().await["now"].as_u64());
    assert!(
        !operator.report().await.to_string().contains("192.0.2"),
        "no key is shown"
    );

    assert_eq!(operator.get("api", &first).await.json()["denied"], expected[0]);
    assert_eq!(operator.get("api", "ip=192.0.2.3").await.json()["denied"], Value::Null);

    let shown = Operator(
        Admin::new()
            .layer(&layer)
            .show_keys(true)
            .router_behind_authentication(),
    );
    let subjects = &shown.policy().await["denials"]["subjects"];
    assert_eq!(
        (&subjects[0]["subject"], &subjects[1]["subject"]),
        (&json!(first), &json!(second))
    );
}

#[tokio::test(start_paused = true)]
async fn instances_with_one_secret_list_a_subject_by_one_hash() {
    let layer = layer();
    let admin = || Admin::new().layer(&layer);
    let with = |secret: &str| {
        let admin = admin().hash_secret(secret).expect("the secret is long enough");
        Operator(admin.router_behind_authentication())
    };
    let secret = "0123456789abcdef";
    let operators = [
        with(secret),
        with(secret),
        with("another of 16 b."),
        Operator::of(&layer),
        Operator::of(&layer),
    ];
    call(&app(&layer), "192.0.2.1", 3).await;
    let mut hashes = Vec::new();
    for (position, operator) in operators.iter().enumerate() {
        let report = operator.report().await;
        assert_eq!(report["shares_hashes"], position < 3, "{report}");
        let listed = &report["policies"][0]["denials"]["subjects"][0]["subject"];
        let looked_up = operator.get("api", "ip=192.0.2.1").await.json();
        assert_eq!(&looked_up["subject"], listed);
        hashes.push(listed.as_str().expect("text").to_owned());
    }
    assert_eq!(hashes[0], hashes[1]);
    hashes.remove(0);
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 4, "{hashes:?}");

    let error = admin().hash_secret("fifteen bytes..").expect_err("the secret is short");
    assert!(error.to_string().contains("at least 16 bytes, not 15"), "{error}");
}

/// A service of two processes, with the operators of both.
async fn two_processes(builder: impl Fn() -> RedisStoreBuilder, redis: &Redis) -> [(RateLimitLayer, Operator); 2] {
    let process = async || {
        let layer = RateLimitLayer::new(connected(builder(), &redis.url()).await, api(SlidingLog::per_minute(2)));
        (layer.clone(), Operator::of(&layer))
    };
    [process().await, process().await]
}

async fn hash_of(operator: &Operator) -> String {
    let subject = operator.get("api", "ip=192.0.2.1").await.json()["subject"].take();
    subject.as_str().expect("text").to_owned()
}

#[tokio::test]
async fn processes_on_one_redis_name_a_subject_by_one_hash() {
    let (redis, other) = (Redis::start(), Redis::start());
    let [(_, one), (_, two)] = two_processes(patient, &redis).await;
    let [(_, elsewhere), _] = two_processes(patient, &other).await;
    let hash = hash_of(&one).await;
    assert_eq!(hash, hash_of(&two).await);
    assert_ne!(hash, hash_of(&elsewhere).await);
    assert_eq!(one.report().await["shares_hashes"], true);
    let expires = async || redis.command::<i64>("TTL", ["quota:1:secret"]).await;
    assert!(expires().await > 365 * 86_400);
    // It is renewed when it is read.
    let () = redis.command("PEXPIRE", ["quota:1:secret", "1000000"]).await;
    let [(_, later), _] = two_processes(patient, &redis).await;
    assert_eq!(hash, hash_of(&later).await);
    assert!(expires().await > 365 * 86_400);

    // Redis is not to have the secret where keys are hashed.
    let () = other.command("FLUSHALL", ["SYNC"]).await;
    let hashed = || patient().hash_keys("0123456789abcdef").expect("a long secret");
    let [(_, one), (_, two)] = two_processes(hashed, &other).await;
    let hash = hash_of(&one).await;
    assert_eq!(hash, hash_of(&two).await);
    let stored: i64 = other.command("EXISTS", ["quota:1:secret"]).await;
    assert_eq!(stored, 0);
}

#[tokio::test]
async fn a_store_that_cannot_have_a_secret_is_reported() {
    let redis = Redis::start();
    let () = redis.command("RPUSH", ["quota:1:secret", "element"]).await;
    let [(_, one), (_, two)] = two_processes(patient, &redis).await;
    let report = one.report().await;
    assert_eq!(report["shares_hashes"], false);
    let error = report["hashes_error"].as_str().expect("text");
    assert!(error.contains("WRONGTYPE"), "{error}");
    let hash = hash_of(&one).await;
    assert_eq!(hash, hash_of(&one).await);
    assert_ne!(hash, hash_of(&two).await);
}

/// A store that shares a secret, unless it fails.
#[derive(Clone)]
struct Sharing {
    counts: MemoryStore,
    secret: Arc<Mutex<Option<[u8; 32]>>>,
    asked: Arc<AtomicU32>,
}

impl Sharing {
    fn of(secret: Option<[u8; 32]>) -> Self {
        Self {
            counts: MemoryStore::new(),
            secret: Arc::new(Mutex::new(secret)),
            asked: Arc::default(),
        }
    }

    fn set(&self, secret: Option<[u8; 32]>) {
        *self.secret.lock().expect("no test panics with it") = secret;
    }
}

impl Store for Sharing {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        self.counts.decide(requests)
    }

    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.counts)
    }

    fn shared_secret(&self, _: [u8; 32]) -> Option<SecretFuture> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let secret = *self.secret.lock().expect("no test panics with it");
        Some(Box::pin(async move {
            secret.ok_or_else(|| StoreError::new(ErrorKind::Unreachable, "connection refused"))
        }))
    }
}

#[tokio::test(start_paused = true)]
async fn the_secret_is_that_of_the_first_store_and_is_read_again() {
    let (first, second) = (Sharing::of(None), Sharing::of(Some([2; 32])));
    let layer_on = |store: &Sharing| RateLimitLayer::new(store.clone(), api(SlidingLog::per_minute(2)));
    let (one, another) = (layer_on(&first), layer_on(&second));
    let operator = Operator(Admin::new().layer(&one).layer(&another).router_behind_authentication());
    let hash = async || {
        let subject = operator
            .post("/subject", r#"{"policy":"api","key":"ip=192.0.2.1","store":1}"#, &[])
            .await;
        subject.json()["subject"].as_str().expect("text").to_owned()
    };
    let own = hash().await;
    let report = operator.report().await;
    assert_eq!(report["shares_hashes"], false);
    assert!(
        report["hashes_error"]
            .as_str()
            .is_some_and(|error| error.contains("refused"))
    );
    assert_eq!(
        (
            first.asked.load(Ordering::Relaxed),
            second.asked.load(Ordering::Relaxed)
        ),
        (1, 0)
    );

    first.set(Some([1; 32]));
    advance(Duration::from_secs(10)).await;
    let shared = hash().await;
    assert_ne!(shared, own);
    let report = operator.report().await;
    assert_eq!(
        (&report["shares_hashes"], &report["hashes_error"]),
        (&json!(true), &Value::Null)
    );

    // Redis was emptied, and another process was faster.
    first.set(Some([3; 32]));
    advance(Duration::from_secs(59)).await;
    assert_eq!(hash().await, shared);
    advance(Duration::from_secs(1)).await;
    let newer = hash().await;
    assert_ne!(newer, shared);

    // One that fails later does not undo it.
    first.set(None);
    advance(Duration::from_secs(60)).await;
    assert_eq!(hash().await, newer);
    let report = operator.report().await;
    assert_eq!(report["shares_hashes"], true);
    assert!(report["hashes_error"].is_string());
    assert_eq!(first.asked.load(Ordering::Relaxed), 4);
}

#[tokio::test]
async fn a_secret_that_redis_has_lost_is_the_one_that_a_process_has() {
    let mut redis = Redis::start();
    let store = connected(less_patient(), &redis.url()).await;
    let of = async |known| {
        store
            .shared_secret([known; 32])
            .expect("it has one")
            .await
            .expect("an answer")
    };
    assert_eq!(of(1).await, [1; 32]);
    assert_eq!(of(2).await, [1; 32]);
    redis.kill();
    redis.restart();
    eventually("Redis is back", async || {
        store.shared_secret([2; 32]).expect("it has one").await
    })
    .await;
    assert_eq!(of(1).await, [2; 32]);
}

/// An operator that has a hash, from a list of the report or the audit log of another process, needs no key.
#[tokio::test]
async fn the_hash_of_a_subject_selects_it() {
    let redis = Redis::start();
    let [(first, one), (second, two)] = two_processes(|| patient().overrides(true), &redis).await;
    call(&app(&first), "192.0.2.1", 3).await;
    let hash = one.policy().await["denials"]["subjects"][0]["subject"].take();
    let hash = hash.as_str().expect("text");
    let search = async |operator: &Operator| {
        let found = operator
            .post("/search", &json!({ "text": hash }).to_string(), &[])
            .await
            .json();
        assert!(!found.to_string().contains("192.0.2"), "no key is shown: {found}");
        found["found"].as_array().expect("a list").clone()
    };
    let [found] = &search(&one).await[..] else {
        panic!("one policy has denied it")
    };
    assert_eq!((&found["policy"], &found["key"]), (&json!("api"), &json!(hash)));
    assert_eq!(found["counts"][0]["allowed"], false);
    assert!(search(&two).await.is_empty(), "the other process does not know it");

    assert_eq!(one.reset("api", hash).await.json()["key"], json!(hash));
    assert_eq!(call(&app(&first), "192.0.2.1", 1).await, StatusCode::OK);

    // An override is known to all.
    one.set_override("api", hash, "sliding-log 9/min", "1h").await;
    eventually("the override is read", async || !search(&two).await.is_empty()).await;
    assert_eq!(call(&app(&second), "192.0.2.1", 4).await, StatusCode::OK);
    assert_eq!(two.end_override("api", hash).await.status, StatusCode::OK);
    assert_eq!(call(&app(&second), "192.0.2.1", 1).await, StatusCode::TOO_MANY_REQUESTS);

    let shows_keys = Admin::new()
        .layer(&second)
        .show_keys(true)
        .router_behind_authentication();
    let found = Operator(shows_keys)
        .post("/search", &json!({ "text": hash }).to_string(), &[])
        .await;
    assert_eq!(found.json()["found"][0]["key"], "ip=192.0.2.1", "it has denied it too");
    let unknown = two
        .post("/search", &json!({ "text": "0123456789abcdef" }).to_string(), &[])
        .await;
    assert_eq!(unknown.json()["unknown_hash"], true);
    assert_eq!(two.get("api", "0123456789abcdef").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test(start_paused = true)]
async fn each_response_names_the_instance() {
    let layer = layer();
    let admin = Admin::new().layer(&layer).instance("api-7");
    let operator = Operator(admin.router_behind_authentication());
    let key = "ip=192.0.2.1";
    for response in [
        operator.report().await,
        operator.get("api", key).await.json(),
        operator.reset("api", key).await.json(),
        operator
            .set_override("api", key, "sliding-log 5/min", "1h")
            .await
            .json(),
        operator.end_override("api", key).await.json(),
    ] {
        assert_eq!(response["instance"], "api-7", "{response}");
    }
}

/// In processes of their own, which have another environment.
#[test]
fn the_instance_is_the_host_of_a_container_or_the_process() {
    const TEST: &str = "admin::router::the_instance_is_the_host_of_a_container_or_the_process";
    const EXPECTED: &str = "TOWER_QUOTA_INSTANCE";
    if let Ok(host) = env::var(EXPECTED) {
        let process = format!("process {}", process::id());
        let expected = if host.is_empty() { process } else { host };
        let text = format!("{:?}", Admin::new());
        assert!(text.contains(&format!("instance: {expected:?}")), "{text}");
        return;
    }
    for (host, expected) in [(Some("api-7"), "api-7"), (Some(""), ""), (None, "")] {
        let mut child = this_binary(TEST);
        child
            .env(EXPECTED, expected)
            .env_remove("HOSTNAME")
            .envs(host.map(|host| ("HOSTNAME", host)));
        let output = child.output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{host:?}: {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn denials_of_more_keys_than_are_counted_stay_within_their_bounds() {
    let layer = layer();
    let operator = Operator(Admin::new().layer(&layer).most_denied(3).router_behind_authentication());
    let app = app(&layer);
    for number in 0..20 {
        call(&app, &format!("192.0.2.{number}"), 3).await;
        call(&app, "203.0.113.7", 3).await;
    }
    let denials = &operator.policy().await["denials"];
    assert_eq!(denials["total"], 20 + 58);
    let subjects = denials["subjects"].as_array().expect("a list");
    assert_eq!(subjects.len(), 3);
    assert_eq!(subjects[0]["denials"], 58);
    let bound = denials["most_of_others"].as_u64().expect("a number");
    assert!((1..=78 / 3).contains(&bound), "{denials}");
}

#[tokio::test(start_paused = true)]
async fn denials_are_counted_while_there_is_a_router() {
    let layer = layer();
    let app = app(&layer);
    call(&app, "192.0.2.1", 4).await;
    let total = async |operator: &Operator| operator.policy().await["denials"]["total"].take();

    let operator = Operator::of(&layer);
    assert_eq!(total(&operator).await, 0);
    call(&app, "192.0.2.1", 1).await;
    let second = Operator::of(&layer);
    assert_eq!((total(&operator).await, total(&second).await), (json!(1), json!(1)));
    drop(operator);
    call(&app, "192.0.2.1", 1).await;
    assert_eq!(total(&second).await, 2);

    drop(second);
    call(&app, "192.0.2.1", 1).await;
    assert_eq!(total(&Operator::of(&layer)).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_policy_that_observes_lists_what_it_would_have_denied() {
    let layer = RateLimitLayer::new(MemoryStore::new(), api(SlidingLog::per_minute(2)).observe_only());
    let operator = Operator::of(&layer);
    assert_eq!(call(&app(&layer), "192.0.2.1", 5).await, StatusCode::OK);
    assert_eq!(operator.policy().await["denials"]["total"], 3);
    let counts = operator.counts("api", "ip=192.0.2.1").await;
    assert_eq!((&counts["allowed"], &counts["observed"]), (&json!(false), &json!(true)));
}

#[tokio::test(start_paused = true)]
async fn layers_and_limiters_on_one_store_share_a_policy_and_its_denials() {
    let store = MemoryStore::new();
    let policy = || api(SlidingLog::per_minute(2));
    let layers = [(); 2].map(|()| RateLimitLayer::new(store.clone(), policy()));
    let limiter = Limiter::new(store.clone(), policy().ban(Ban::by_hand()));
    let admin = Admin::new()
        .layer(&layers[0])
        .layer(&layers[0])
        .layer(&layers[1])
        .limiter(&limiter);
    let operator = Operator(admin.router_behind_authentication());
    for layer in &layers {
        call(&app(layer), "192.0.2.1", 3).await;
    }
    let report = operator.report().await;
    assert_eq!(report["stores"].as_array().map(Vec::len), Some(1));
    // The limiter has bans beside the limit.
    assert_eq!(report["policies"].as_array().map(Vec::len), Some(2));
    assert_eq!(report["policies"][0]["denials"]["total"], 4);
    let subjects = &report["policies"][0]["denials"]["subjects"];
    assert_eq!(
        (subjects.as_array().map(Vec::len), &subjects[0]["denials"]),
        (Some(1), &json!(4))
    );

    let caller = Key::ip([192, 0, 2, 9].into());
    limiter.ban(caller, MINUTE).await.expect("a memory store replies");
    let banned = operator.get("api", "ip=192.0.2.9").await.json();
    assert_eq!(
        (&banned["counts"][0]["denial"], &banned["counts"][1]["denial"]),
        (&Value::Null, &json!("banned"))
    );
    let reset = operator.reset("api", "ip=192.0.2.9").await.json();
    assert_eq!(reset["counts"][1]["denial"], Value::Null);
}

#[tokio::test(start_paused = true)]
async fn policies_that_differ_in_a_setting_are_listed_apart() {
    let same = || api(SlidingLog::per_minute(2));
    for (other, listed) in [
        (same(), 1),
        (same().cost(2), 2),
        (same().failure_mode(FailureMode::Closed), 2),
        (same().enforce_share(0.5), 2),
        (same().ban(Ban::by_hand()), 2),
    ] {
        let (store, text) = (MemoryStore::new(), format!("{other:?}"));
        let layers = [same(), other].map(|policy| RateLimitLayer::new(store.clone(), policy));
        let admin = Admin::new().layer(&layers[0]).layer(&layers[1]);
        let report = Operator(admin.router_behind_authentication()).report().await;
        assert_eq!(report["policies"].as_array().map(Vec::len), Some(listed), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_policy_of_two_stores_is_selected_by_the_number_of_the_store() {
    let store = MemoryStore::new();
    let [first, third] = [(); 2].map(|()| RateLimitLayer::new(store.clone(), api(SlidingLog::per_minute(2))));
    let second = layer();
    let operator = Operator(
        Admin::new()
            .layer(&first)
            .layer(&second)
            .layer(&third)
            .router_behind_authentication(),
    );
    call(&app(&second), "192.0.2.1", 1).await;
    let get = async |query: &str| {
        send(
            &operator.0,
            Request::get(format!("/subject?policy=api&key=ip%3D192.0.2.1{query}")),
        )
        .await
    };

    let unclear = get("").await;
    assert_eq!(unclear.status, StatusCode::BAD_REQUEST);
    let error = unclear.json();
    assert!(
        error["error"]
            .as_str()
            .is_some_and(|error| error.contains("`store=1` or `store=2`")),
        "{error}"
    );
    assert_eq!(get("&store=3").await.status, StatusCode::BAD_REQUEST);
    assert_eq!(get("&store=1").await.json()["counts"][0]["remaining"], 2);
    assert_eq!(get("&store=2").await.json()["counts"][0]["remaining"], 1);

    let body = json!({ "policy": "api", "key": "ip=192.0.2.1", "store": 2 }).to_string();
    assert_eq!(
        operator.post("/reset", &body, &[]).await.json()["counts"][0]["remaining"],
        2
    );
}

#[tokio::test]
async fn a_subject_is_allowed_if_a_request_of_the_cost_of_the_policy_fits() {
    let layer = RateLimitLayer::new(MemoryStore::new(), api(SlidingLog::per_minute(5)).cost(3));
    let operator = Operator::of(&layer);
    for (requests, remaining, allowed) in [(0, 5, true), (1, 2, false)] {
        call(&app(&layer), "192.0.2.1", requests).await;
        let counts = operator.counts("api", "ip=192.0.2.1").await;
        assert_eq!(
            (&counts["remaining"], &counts["allowed"]),
            (&json!(remaining), &json!(allowed))
        );
    }
}

#[tokio::test]
async fn a_policy_whose_name_has_another_limit_elsewhere_is_marked() {
    let store = MemoryStore::new();
    let policy = |quota| Policy::new("api", SlidingLog::per_minute(quota)).key(key::ip());
    let operator = Operator::of(&RateLimitLayer::new(store.clone(), policy(100)));
    assert_eq!(operator.policy().await["other_limit"], Value::Null);
    let other = RateLimitLayer::new(store, policy(10));
    assert_eq!(operator.policy().await["other_limit"], "sliding-log 10/min");
    drop(other);
    assert_eq!(operator.policy().await["other_limit"], Value::Null);
}

#[tokio::test(start_paused = true)]
async fn of_limits_that_are_chosen_those_of_this_process_are_known() {
    let plan = |parts: &http::request::Parts| match parts.uri.query() {
        Some("pro") => Limit::from(SlidingLog::per_minute(10)),
        Some("hourly") => FixedWindow::per_hour(20).into(),
        _ => SlidingLog::per_minute(2).into(),
    };
    let policy = Policy::with_limit_fn("api", plan).key(key::ip());
    let layer = RateLimitLayer::new(MemoryStore::new(), policy);
    let operator = Operator::of(&layer);
    assert_eq!(operator.get("api", "ip=203.0.113.7").await.json()["counts"], json!([]));
    assert_eq!(operator.policy().await["limits"], json!([]));
    let refused = operator.reset("api", "ip=203.0.113.7").await;
    assert_eq!(refused.status, StatusCode::CONFLICT);
    let error = refused.json()["error"].to_string();
    assert!(
        error.contains("nothing is reset: no limit of this policy is known, since no request has chosen one"),
        "{error}"
    );

    let app = app(&layer);
    for query in ["pro", "free", "free", "hourly"] {
        send(&app, get(&format!("/?{query}"))).await;
    }
    let policy = operator.policy().await;
    assert_eq!(policy["limit"], Value::Null);
    let limits: Vec<_> = policy["limits"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|limit| &limit["quota"])
        .collect();
    assert_eq!(limits, [2, 10, 20]);
    let remaining = async || {
        let counts = operator.get("api", "ip=203.0.113.7").await.json();
        let counts = counts["counts"].as_array().expect("a list").clone();
        counts
            .iter()
            .map(|counts| counts["remaining"].as_u64())
            .collect::<Vec<_>>()
    };
    // Limits of one algorithm share the count.
    assert_eq!(remaining().await, [Some(0), Some(8), Some(19)]);
    operator.reset("api", "ip=203.0.113.7").await;
    assert_eq!(remaining().await, [Some(2), Some(10), Some(20)]);
}

#[tokio::test(start_paused = true)]
async fn a_reset_ends_bans_where_no_limit_was_chosen_yet() {
    let store = MemoryStore::new();
    let policy = || {
        let policy = Policy::with_limit_fn("api", |parts| match parts.uri.query() {
            Some("hourly") => FixedWindow::per_hour(20).into(),
            _ => Limit::from(SlidingLog::per_minute(1)),
        });
        policy.key(key::ip()).ban(Ban::after(1, MINUTE).first(10 * MINUTE))
    };
    let (here, elsewhere) = (
        RateLimitLayer::new(store.clone(), policy()),
        RateLimitLayer::new(store, policy()),
    );
    assert_eq!(
        call(&app(&elsewhere), "203.0.113.7", 2).await,
        StatusCode::TOO_MANY_REQUESTS
    );
    let hourly = async || send(&app(&elsewhere), get_from("203.0.113.7", "/?hourly")).await.status;
    assert_eq!(hourly().await, StatusCode::TOO_MANY_REQUESTS, "it is banned");

    let log = Log::capture();
    let refused = Operator::of(&here).reset("api", "ip=203.0.113.7").await;
    assert_eq!(refused.status, StatusCode::CONFLICT);
    let error = refused.json()["error"].to_string();
    assert!(error.contains("only bans are reset"), "{error}");
    assert!(log.text().contains("outcome=\"done\""), "{}", log.text());
    assert_eq!(hourly().await, StatusCode::OK);
}

#[tokio::test]
async fn a_reset_ends_bans_that_only_one_of_two_layers_has() {
    let store = MemoryStore::new();
    let limited = RateLimitLayer::new(store.clone(), api(SlidingLog::per_minute(1)));
    let bans = api(SlidingLog::per_minute(1)).ban(Ban::after(1, 10 * MINUTE));
    let banning = RateLimitLayer::new(store, bans);
    let admin = Admin::new().layer(&limited).layer(&banning);
    assert_eq!(
        call(&app(&banning), "192.0.2.1", 3).await,
        StatusCode::TOO_MANY_REQUESTS
    );
    let operator = Operator(admin.router_behind_authentication());
    assert_eq!(operator.reset("api", "ip=192.0.2.1").await.status, StatusCode::OK);
    assert_eq!(call(&app(&banning), "192.0.2.1", 1).await, StatusCode::OK);
}

/// The limits of two plans, which have counts of their own.
#[tokio::test(start_paused = true)]
async fn a_reset_while_the_store_fails_is_of_all_that_this_process_counts() {
    let mails = |limit: Limit| Policy::new("mails", limit);
    let plans = Plans::new("free", mails(SlidingLog::per_hour(9).into()));
    let plans = plans.plan("pro", mails(FixedWindow::per_hour(9).into()));
    let limiter = Limiter::new(Broken::default(), plans);
    let operator = Operator::of_limiter(&limiter);
    for plan in ["free", "pro"] {
        let request = limiter.request("42").plan(plan);
        let _ = request.check().await.expect("it counts locally");
    }
    let remaining = async || {
        let subject = operator.get("mails", "key=42").await.json();
        let counts = subject["counts"].as_array().expect("a list").iter();
        counts
            .map(|count| count["remaining"].as_u64().expect("a number"))
            .collect::<Vec<_>>()
    };
    let before = remaining().await;
    assert_eq!(before.len(), 2);
    let reset = operator.reset("mails", "key=42").await;
    assert_eq!(reset.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        remaining().await,
        before.iter().map(|left| left + 1).collect::<Vec<_>>()
    );
}

#[tokio::test(start_paused = true)]
async fn a_reset_is_of_the_limits_of_all_time_zones() {
    let zones = (1..=12).map(|hours| format!("Etc/GMT+{hours}"));
    let zones = zones.chain((0..=14).map(|hours| format!("Etc/GMT-{hours}")));
    let cities = ["Berlin", "Kyiv", "Lisbon", "London", "Madrid", "Oslo", "Paris", "Rome"];
    let cities = cities
        .into_iter()
        .chain(["Sofia", "Stockholm", "Tallinn", "Vienna", "Warsaw"]);
    let zones: Vec<_> = zones.chain(cities.map(|city| format!("Europe/{city}"))).collect();
    let zone_of = |parts: &http::request::Parts| parts.uri.query().expect("a zone").to_owned();
    let policy = Policy::with_limit_fn("mails", move |parts| {
        FixedWindow::calendar(1, Calendar::Month, &zone_of(parts)).expect("a zone")
    });
    let layer = RateLimitLayer::new(MemoryStore::new(), policy.key(key::ip()));
    let (app, operator) = (app(&layer), Operator::of(&layer));
    let send = async |n: usize, zone: &str| {
        let request = get_from(&format!("192.0.2.{n}"), &format!("/?{zone}"));
        send(&app, request).await.status
    };
    for (n, zone) in zones.iter().enumerate() {
        assert_eq!(send(n, zone).await, StatusCode::OK);
        assert_eq!(send(n, zone).await, StatusCode::TOO_MANY_REQUESTS);
    }
    for (n, zone) in zones.iter().enumerate() {
        let reset = operator.reset("mails", &format!("ip=192.0.2.{n}")).await;
        assert_eq!(reset.status, StatusCode::OK);
        assert_eq!(send(n, zone).await, StatusCode::OK, "{zone}");
    }

    // An operator sees twenty of them.
    let seen = [
        operator.policy().await["limits"].take(),
        operator.get("mails", "ip=192.0.2.0").await.json()["counts"].take(),
    ];
    assert_eq!(seen.map(|seen| seen.as_array().map(Vec::len)), [Some(20); 2]);
}

#[tokio::test(start_paused = true)]
async fn an_override_is_no_limit_of_other_keys() {
    let chosen = Policy::with_limit_fn("api", |_| SlidingLog::per_minute(9)).key(key::ip());
    let layer = RateLimitLayer::new(MemoryStore::new(), chosen);
    let (app, operator) = (app(&layer), Operator::of(&layer));
    let (alice, bob) = ("ip=192.0.2.1", "ip=192.0.2.2");
    assert_eq!(call(&app, "192.0.2.1", 1).await, StatusCode::OK);
    let seen = async || {
        let counts = operator.get("api", alice).await.json()["counts"].take();
        (counts, operator.policy().await["limits"].take())
    };
    let before = seen().await;
    for limit in ["deny-all", "sliding-log 1/min"] {
        let set = operator.set_override("api", bob, limit, "1h").await;
        assert_eq!(set.json()["counts"][0]["in_place_of"], "sliding-log 9/min");
        assert_eq!(seen().await, before, "{limit}");
        call(&app, "192.0.2.2", 2).await;
        assert_eq!(seen().await, before, "{limit}");
    }
    assert_eq!(call(&app, "192.0.2.2", 1).await, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test(start_paused = true)]
async fn slots_and_limits_that_count_nothing_are_shown() {
    let policies = [
        Policy::new("exports", Concurrency::new(3)),
        Policy::new("closed", Limit::DenyAll).observe_only(),
        Policy::new("open", Limit::Unlimited),
    ];
    let limiter = Limiter::new(MemoryStore::new(), policies);
    let operator = Operator::of_limiter(&limiter);
    let held = limiter.check("42").await.expect("a memory store replies");
    let slots = operator.counts("exports", "key=42").await;
    assert_eq!((&slots["allowed"], &slots["remaining"]), (&json!(true), &json!(2)));
    drop(held);

    let closed = operator.counts("closed", "key=42").await;
    assert_eq!(
        (&closed["allowed"], &closed["denial"]),
        (&json!(false), &json!("deny all"))
    );
    let open = operator.counts("open", "key=42").await;
    assert_eq!((&open["allowed"], &open["remaining"]), (&json!(true), &Value::Null));
    let log = Log::capture();
    for policy in ["closed", "open"] {
        let refused = operator.reset(policy, "key=42").await;
        assert_eq!(refused.status, StatusCode::CONFLICT, "{policy}");
        let error = refused.json()["error"].to_string();
        assert!(
            error.contains("nothing is reset: no limit of this policy counts now"),
            "{error}"
        );
    }
    let text = log.text();
    assert_eq!(text.matches("outcome=\"refused\"").count(), 2, "{text}");
    assert!(!text.contains("outcome=\"done\""), "{text}");

    // The limit of an override counts.
    let set = operator
        .set_override("closed", "key=42", "sliding-log 5/min", "1h")
        .await;
    assert_eq!(set.status, StatusCode::OK, "{}", set.json());
    assert_eq!(operator.reset("closed", "key=42").await.status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn a_request_with_a_mistake_is_an_error_with_the_fix() {
    let operator = Operator::of(&layer());
    for (path, status, fix) in [
        ("/subject", 400, "`policy`, such as `api`"),
        ("/subject?policy=api", 400, "`key`, such as `ip=203.0.113.7`"),
        ("/subject?policy=login&key=ip%3D192.0.2.1", 404, "those are `api`"),
        ("/subject?policy=api&key=192.0.2.1", 400, "`ip=203.0.113.7`"),
        ("/subject?policy=api&key=ip%3D1%7C", 400, "is not an address"),
        ("/subject?policy=api&key=key%3D%FF%FE", 400, "`key=^EF^BF^BD^EF^BF^BD`"),
        ("/subject?policy=api&key=keyed%3D00", 400, "the key itself"),
        (
            "/subject?policy=api&key=ip%3D192.0.2.1&store=x",
            400,
            "/subject?policy=api&key=",
        ),
        ("/subject?policy=api&policy=b&key=a", 400, "/subject?policy=api&key="),
        ("/subject?%", 400, "`policy`"),
        ("/nothing", 404, "`/report`"),
        ("/reset", 405, "`POST` for `/reset`"),
    ] {
        let response = send(&operator.0, Request::get(path)).await;
        assert_eq!(response.status.as_u16(), status, "{path}");
        let error = response.json();
        let is_shown = error["error"].as_str().is_some_and(|error| error.contains(fix));
        assert!(is_shown, "{path}: {error}");
    }
    for (body, status, fix) in [
        ("", 400, r#"{"policy":"api","key":"ip=203.0.113.7"}"#),
        ("[1]", 400, r#"{"policy":"api","key":"ip=203.0.113.7"}"#),
        ("\u{0}", 400, r#"{"policy":"api","key":"ip=203.0.113.7"}"#),
        (r#"{"policy":1,"key":"a"}"#, 400, "{\"policy\":\"api\""),
        (r#"{"policy":"api"}"#, 400, "`key`, such as"),
        (
            r#"{"policy":"api","key":"ip=192.0.2.1","store":-1}"#,
            400,
            "{\"policy\":\"api\"",
        ),
        (
            &format!(r#"{{"policy":"api","key":"key={}"}}"#, "x".repeat(20_000)),
            413,
            "more than 16 KiB",
        ),
    ] {
        let response = operator.post("/reset", body, &[]).await;
        assert_eq!(response.status.as_u16(), status, "{body}");
        let error = response.json();
        let is_shown = error["error"].as_str().is_some_and(|error| error.contains(fix));
        assert!(is_shown, "{body}: {error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_mistake_in_an_override_is_an_error_with_the_fix() {
    let operator = Operator::of(&layer());
    let subject = r#""policy":"api","key":"ip=192.0.2.1""#;
    for (rest, status, fix) in [
        (r#""limit":"sliding-log 5/min""#, 400, "`lasts`, such as `3d`"),
        (r#""lasts":"3d""#, 400, "`limit`, such as `sliding-log 50/d`"),
        (r#""limit":"5 a day","lasts":"3d""#, 400, "5 a day"),
        (
            r#""limit":"token-bucket 5/min","lasts":"3d""#,
            400,
            "use the same algorithm",
        ),
        (
            r#""limit":"sliding-log 5/min","lasts":"long""#,
            400,
            "use one such as `3d`",
        ),
        (r#""limit":"sliding-log 5/min","lasts":"0"#, 400, r#""lasts":"3d"}"#),
        (r#""limit":"sliding-log 5/min","lasts":0"#, 400, "use one such as `3d`"),
        (
            r#""limit":"sliding-log 5/min","lasts":"0h""#,
            400,
            "use one such as `3d`",
        ),
        (r#""limit":5,"lasts":"3d""#, 400, "the body is not an override: "),
        (r#""limit":"sliding-log 5/min","lasts":-1"#, 400, "use one such as `3d`"),
        (r#""limit":"sliding-log 5/min","lasts":"3d","store":7"#, 400, ""),
        (
            r#""limit":"sliding-log 5/min","lasts":"100000d""#,
            400,
            "up to 31 years",
        ),
    ] {
        let response = operator.post("/override", &format!("{{{subject},{rest}}}"), &[]).await;
        assert_eq!(response.status.as_u16(), status, "{rest}: {}", response.json());
        let error = response.json();
        let is_shown = error["error"].as_str().is_some_and(|error| error.contains(fix));
        assert!(is_shown, "{rest}: {error}");
    }
    let unknown = operator.set_override("mails", "key=1", "sliding-log 5/min", "3d").await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
    assert_eq!(operator.report().await["overrides"], json!([]));
}

/// The keys of `policy::enforced_share`.
#[tokio::test(start_paused = true)]
async fn a_key_outside_of_the_share_is_observed() {
    let policy = Policy::new("mails", SlidingLog::per_hour(1)).enforce_share(0.5);
    let limiter = Limiter::new(MemoryStore::new(), policy);
    let operator = Operator::of_limiter(&limiter);
    for (key, is_observed) in [("3", false), ("1", true)] {
        for _ in 0..2 {
            let _ = limiter.check(key).await.expect("in memory");
        }
        let subject = operator.get("mails", &format!("key={key}")).await.json();
        let count = &subject["counts"][0];
        assert_eq!(count["allowed"], false, "{subject}");
        assert_eq!(count["observed"], is_observed, "{subject}");
    }
}

#[tokio::test(start_paused = true)]
async fn requests_of_keys_outside_of_the_share_are_admitted_and_no_denials() {
    let policy = Policy::new("mails", SlidingLog::per_hour(1)).enforce_share(0.07);
    let limiter = Limiter::new(MemoryStore::new(), policy);
    let operator = Operator::of_limiter(&limiter);
    let (mut would_be, mut denied) = (0, 0);
    for key in 0..100 {
        for _ in 0..3 {
            let decision = limiter.check(key.to_string()).await.expect("in memory");
            would_be += usize::from(decision.policies().any(|policy| policy.denial().is_some()));
            denied += usize::from(!decision.is_allowed());
        }
    }
    assert_eq!(would_be, 200);
    assert!(0 < denied && denied < 100, "{denied}");
    let denials = operator.policy().await["denials"].take();
    assert_eq!(denials["total"], denied, "{denials}");
    assert_eq!(
        denials["subjects"].as_array().map(Vec::len),
        Some(denied / 2),
        "{denials}"
    );
}

/// Two layers or limiters enforce a policy for other shares of the keys.
#[tokio::test(start_paused = true)]
async fn a_key_that_one_of_two_shares_has_is_denied() {
    let (store, policy) = (MemoryStore::new(), || Policy::new("mails", SlidingLog::per_hour(1)));
    let [part, whole] = [0.5, 1.0].map(|share| Limiter::new(store.clone(), policy().enforce_share(share)));
    let admin = Admin::new().limiter(&part).limiter(&whole);
    let operator = Operator(admin.router_behind_authentication());
    let _ = whole.check("1").await.expect("in memory");
    let subject = operator.get("mails", "key=1").await.json();
    let counts = subject["counts"].as_array().expect("a list");
    let observed: Vec<_> = counts.iter().map(|count| &count["observed"]).collect();
    assert_eq!(observed, [true, false], "{subject}");
}

#[tokio::test(start_paused = true)]
async fn a_page_of_another_site_cannot_reset() {
    let layer = layer();
    let operator = Operator::of(&layer);
    call(&app(&layer), "192.0.2.1", 2).await;
    let body = r#"{"policy":"api","key":"ip=192.0.2.1","limit":"sliding-log 9/min","lasts":"1h"}"#;
    let host = ("host", "a.example");
    for (fields, status, reason) in [
        (&[host, ("sec-fetch-site", "cross-site")][..], 403, "another origin"),
        (
            &[host, ("sec-fetch-site", "same-site"), ("origin", "http://a.example")],
            403,
            "another origin",
        ),
        (&[host, ("sec-fetch-site", "none")], 403, "another origin"),
        (&[host, ("origin", "https://evil.example")], 403, "another origin"),
        (&[host, ("origin", "http://a.example:81")], 403, "another origin"),
        (&[host, ("origin", "null")], 403, "another origin"),
        (&[host, ("origin", "a.example")], 403, "another origin"),
        (&[("origin", "http://a.example")], 403, "another origin"),
        (&[host, ("content-type", "text/plain")], 415, "application/json"),
        (
            &[host, ("content-type", "application/x-www-form-urlencoded")],
            415,
            "application/json",
        ),
    ] {
        for path in ["/subject", "/reset", "/override", "/end-override"] {
            let response = operator.post(path, body, fields).await;
            assert_eq!(response.status.as_u16(), status, "{fields:?}");
            assert!(response.json().to_string().contains(reason), "{fields:?}");
        }
        assert_eq!(operator.counts("api", "ip=192.0.2.1").await["remaining"], 0);
    }
    for path in ["/reset", "/override", "/end-override"] {
        let query = format!("{path}?policy=api&key=ip%3D192.0.2.1&limit=unlimited&lasts=1h");
        for method in [Method::GET, Method::PUT, Method::OPTIONS] {
            let response = send(&operator.0, Request::builder().method(method).uri(&query)).await;
            assert_eq!(response.status, StatusCode::METHOD_NOT_ALLOWED);
            let mut names = response.headers.keys();
            assert!(names.all(|name| !name.as_str().starts_with("access-control")));
        }
    }
    assert_eq!(operator.counts("api", "ip=192.0.2.1").await["remaining"], 0);

    let same_origin = ("sec-fetch-site", "same-origin");
    let json = ("content-type", "application/json; charset=utf-8");
    for (uri, own) in [
        ("/reset", &[host, same_origin, json][..]),
        // A proxy has replaced `Host`.
        (
            "/reset",
            &[("host", "10.0.0.1"), same_origin, ("origin", "https://a.example")],
        ),
        (
            "/reset",
            &[("host", "a.example:3000"), ("origin", "http://a.example:3000")],
        ),
        ("/reset", &[host, ("origin", "http://A.example")]),
        // HTTP/2
        ("https://a.example/reset", &[("origin", "https://a.example")]),
    ] {
        assert_eq!(operator.post(uri, body, own).await.status, StatusCode::OK, "{own:?}");
        assert_eq!(operator.counts("api", "ip=192.0.2.1").await["remaining"], 2, "{own:?}");
        call(&app(&layer), "192.0.2.1", 2).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_page_of_another_site_reads_nothing() {
    let store = Counted::new(MemoryStore::new());
    let layer = RateLimitLayer::new(
        store.clone(),
        Policy::new("api", SlidingLog::per_minute(2)).key(key::ip()),
    );
    let operator = Operator::of(&layer);
    for path in ["/report", "/subject?policy=api&key=ip%3D192.0.2.1"] {
        for (field, value, status) in [
            ("sec-fetch-site", "cross-site", 403),
            ("sec-fetch-site", "same-site", 403),
            ("referer", "https://evil.example/a.example", 403),
            ("origin", "null", 403),
            // An address that the operator enters, the page, and curl.
            ("sec-fetch-site", "none", 200),
            ("sec-fetch-site", "same-origin", 200),
            ("referer", "https://a.example/admin?x=//y", 200),
            ("accept", "*/*", 200),
        ] {
            for method in [Method::GET, Method::HEAD] {
                let before = store.calls();
                let request = Request::builder().method(method).uri(path).header("host", "a.example");
                let response = send(&operator.0, request.header(field, value)).await;
                assert_eq!(response.status.as_u16(), status, "{path} {field}: {value}");
                assert_eq!(store.calls() > before, status == 200, "{path} {field}: {value}");
            }
        }
    }
    let link = Request::get("/").header("sec-fetch-site", "cross-site");
    assert_eq!(send(&operator.0, link).await.status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn a_subject_in_a_body_is_read_as_one_in_a_query() {
    let layer = layer();
    let operator = Operator::of(&layer);
    call(&app(&layer), "192.0.2.1", 4).await;
    let body = r#"{"policy":"api","key":"ip=192.0.2.1"}"#;
    let posted = operator.post("/subject", body, &[]).await.json();
    assert_eq!(posted["denied"]["denials"], 2);
    assert_eq!(posted, operator.get("api", "ip=192.0.2.1").await.json());
}

#[tokio::test(start_paused = true)]
async fn no_response_is_cached_or_framed_or_read_as_another_type() {
    let operator = Operator::of(&layer());
    let paths = [
        "/",
        "/report",
        "/subject?policy=api&key=key%3D1",
        "/subject",
        "/search",
        "/nothing",
        "/reset",
        "/override",
        "/end-override",
    ];
    for path in paths {
        for request in [Request::get(path), Request::head(path), Request::delete(path)] {
            let response = send(&operator.0, request).await;
            assert_eq!(response.field("cache-control"), Some("no-store"), "{path}");
            assert_eq!(response.field("x-content-type-options"), Some("nosniff"), "{path}");
            assert_eq!(response.field("referrer-policy"), Some("no-referrer"), "{path}");
            let policy = response.field("content-security-policy").expect("a policy");
            assert!(
                policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"),
                "{policy}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_report_has_the_numbers_of_a_memory_store() {
    let (store, clock) = (MemoryStore::builder().capacity(2), ManualClock::new());
    let layer = RateLimitLayer::new(store.manual_clock(&clock).build(), api(SlidingLog::per_minute(2)));
    let operator = Operator::of(&layer);
    for address in ["192.0.2.1", "192.0.2.2", "192.0.2.3"] {
        call(&app(&layer), address, 1).await;
    }
    let store = &operator.report().await["stores"][0];
    assert_eq!(
        (&store["store"], &store["kind"], &store["error"]),
        (&json!(1), &json!("memory"), &Value::Null)
    );
    assert_eq!(
        store["numbers"],
        json!([["keys", 2], ["capacity", 2], ["evictions", 1]])
    );
    assert!(store["replied_after_seconds"].as_f64() >= Some(0.0));
}

#[tokio::test]
async fn the_report_has_the_failure_of_a_store_of_another_kind() {
    let layer = RateLimitLayer::new(Broken::default(), api(SlidingLog::per_minute(2)));
    let operator = Operator::of(&layer);
    let store = operator.report().await["stores"][0].take();
    assert_eq!((&store["health"], &store["nodes"]), (&Value::Null, &json!([])));
    assert_eq!(call(&app(&layer), "192.0.2.1", 3).await, StatusCode::TOO_MANY_REQUESTS);

    let report = operator.report().await;
    let store = &report["stores"][0];
    assert_eq!(
        (&store["kind"], &store["error"]),
        (&json!("custom"), &json!("the store is away"))
    );
    assert_eq!(
        (&store["replied_after_seconds"], &store["nodes"][0]["error"]),
        (&Value::Null, &json!("the store is away"))
    );
    assert_eq!(
        (&store["health"], &store["nodes"][0]["failed"]),
        (&json!("100 % of checks failed in the last minute"), &json!(3))
    );
    assert_eq!(
        report["policies"][0]["denials"]["total"], 1,
        "denials by this process are counted"
    );

    // This process counts, so the peek is one of its counts; and a reset removes these and reports the failure.
    let counts = operator.counts("api", "ip=192.0.2.1").await;
    assert_eq!(
        (&counts["remaining"], &counts["store_error"]),
        (&json!(0), &json!("the store is away"))
    );
    let reset = operator.reset("api", "ip=192.0.2.1").await;
    assert_eq!(reset.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        reset.json()["error"],
        "the store of the counts fails: the store is away"
    );
    assert_eq!(operator.counts("api", "ip=192.0.2.1").await["remaining"], 2);

    // Layers on one store have its failures in common.
    let store = Flaky::default();
    store.fail(true);
    let [one, other] = [(); 2].map(|()| RateLimitLayer::new(store.clone(), api(SlidingLog::per_minute(2))));
    call(&app(&one), "192.0.2.1", 1).await;
    let admin = Admin::new().layer(&one).layer(&other);
    let report = Operator(admin.router_behind_authentication()).report().await;
    assert_eq!(report["stores"][0]["nodes"].as_array().map(Vec::len), Some(1));

    for mode in [FailureMode::Open, FailureMode::Closed] {
        let layer = RateLimitLayer::new(Broken::default(), api(SlidingLog::per_minute(2)).failure_mode(mode));
        let response = Operator::of(&layer).get("api", "ip=192.0.2.1").await;
        assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE, "{mode}");
        assert_eq!(
            response.json()["error"],
            "the store of the counts fails: the store is away"
        );
    }
}

#[tokio::test]
async fn the_report_has_the_breaker_of_redis() {
    let mut redis = Redis::start();
    let store: RedisStore = connected(less_patient(), &redis.url()).await;
    let status = store.status().expect("a status");
    let closed = StoreStatus::new("redis")
        .number("breakers", 1)
        .number("open breakers", 0);
    assert_eq!((status.kind, status.numbers), (closed.kind, closed.numbers));
    let layer = RateLimitLayer::new(store, api(SlidingLog::per_minute(2)));
    let operator = Operator::of(&layer);
    let numbers = async || operator.report().await["stores"][0]["numbers"].take();
    assert_eq!(numbers().await, json!([["breakers", 1], ["open breakers", 0]]));

    redis.kill();
    let (open, closed) = (
        json!([["breakers", 1], ["open breakers", 1]]),
        json!([["breakers", 1], ["open breakers", 0]]),
    );
    let app = app(&layer);
    eventually("the breaker is open", async || {
        call(&app, "192.0.2.1", 1).await;
        numbers().await == open
    })
    .await;
    let address = format!("127.0.0.1:{}", redis.port());
    eventually("the node is down", async || {
        call(&app, "192.0.2.1", 1).await;
        operator.report().await["stores"][0]["nodes"][0]["state"] == "down"
    })
    .await;
    let store = operator.report().await["stores"][0].take();
    assert!(
        store["error"].is_string() && store["nodes"][0]["error"].is_string(),
        "{store}"
    );
    assert_eq!(store["nodes"][0]["node"], address);
    assert!(
        store["health"]
            .as_str()
            .is_some_and(|health| health.starts_with("down: ")),
        "{store}"
    );

    redis.restart();
    eventually("the breaker is closed", async || numbers().await == closed).await;
    eventually("the outage has ended", async || {
        call(&app, "192.0.2.1", 1).await;
        operator.report().await["stores"][0]["nodes"][0]["state"] == "ok"
    })
    .await;
}

/// Counts are read while no request is decided by them.
#[tokio::test]
async fn a_subject_has_the_error_of_a_redis_that_refuses_writes() {
    let redis = Redis::start_with(&["--maxmemory-policy", "noeviction"]);
    let store: RedisStore = connected(patient(), &redis.url()).await;
    let layer = RateLimitLayer::new(store, api(SlidingLog::per_minute(9)));
    let (app, operator) = (app(&layer), Operator::of(&layer));
    let counts = async || operator.counts("api", "ip=192.0.2.1").await;
    assert_eq!(counts().await["store_error"], Value::Null);

    redis.command::<()>("CONFIG", ["SET", "maxmemory", "1"]).await;
    eventually("the failure is reported", async || {
        call(&app, "192.0.2.1", 1).await;
        let counts = counts().await;
        let error = counts["store_error"].as_str().unwrap_or_default();
        error.starts_with("checks fail at 127.0.0.1:") && error.contains("OOM")
    })
    .await;
    let counts = counts().await;
    assert_eq!(
        (&counts["counted_locally"], &counts["remaining"]),
        (&json!(false), &json!(9))
    );
}

#[tokio::test(start_paused = true)]
async fn a_router_without_policies_reports_none() {
    let operator = Operator(Admin::default().router_behind_authentication());
    let report = operator.report().await;
    assert_eq!((&report["policies"], &report["stores"]), (&json!([]), &json!([])));
    assert_eq!(operator.get("api", "key=1").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test(start_paused = true)]
async fn the_debug_text_of_an_admin_has_no_key() {
    let layer = layer();
    let admin = Admin::new().layer(&layer).show_keys(true).instance("api-7");
    let admin = admin
        .hash_secret("0123456789abcdef")
        .expect("the secret is long enough");
    let text = format!("{admin:?}");
    assert_eq!(
        text,
        r#"Admin { sources: 1, instance: "api-7", show_keys: true, most_denied: 100, .. }"#
    );
    let most = format!("{:?}", Admin::new().most_denied(20_000));
    assert!(most.contains("most_denied: 10000,"), "{most}");
}
