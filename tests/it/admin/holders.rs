//! The numbers of a report: slots, bans, decisions, and the subjects of many policies.

use std::time::Duration;

use axum::{Router, routing::get as route};
use http::{Request, StatusCode};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tower_quota::{
    Admin, Ban, Concurrency, Limiter, MemoryStore, Plans, Policies, Policy, RateLimitLayer, SlidingLog, key,
    store::Store,
};

use super::router::{MINUTE, Operator};
use crate::support::{Broken, Counted, Redis, connected, eventually, get_from, patient, send};

/// The report of a limiter, with the keys.
fn of(limiter: &Limiter) -> Operator {
    Operator(
        Admin::new()
            .limiter(limiter)
            .show_keys(true)
            .router_behind_authentication(),
    )
}

async fn lists_slots_and_bans(store: impl Store + Clone) {
    let policies = [
        Policy::new("exports", Concurrency::new(9)),
        // The limit denies for longer than a ban.
        Policy::new("mails", SlidingLog::per_hour(2)).ban(Ban::after(2, MINUTE).first(10 * MINUTE)),
    ];
    let limiter = Limiter::new(store, policies);
    let operator = of(&limiter);
    let list = async |position: usize, list: &str| operator.report().await["policies"][position][list].take();
    assert_eq!(
        (list(0, "slots").await, list(0, "bans").await),
        (json!([]), Value::Null)
    );
    assert_eq!(
        (list(1, "slots").await, list(1, "bans").await),
        (Value::Null, json!([]))
    );

    let mut held = Vec::new();
    for key in ["42", "43", "42"] {
        held.push(limiter.check(key).await.expect("the store replies"));
    }
    for (key, times) in [("44", 6), ("45", 3)] {
        for _ in 0..times {
            drop(limiter.check(key).await.expect("the store replies"));
        }
    }
    let slots = list(0, "slots").await;
    let holders: Vec<_> = slots
        .as_array()
        .expect("a list")
        .iter()
        .map(|of| (&of["subject"], &of["slots"]))
        .collect();
    assert_eq!(holders, [(&json!("key=42"), &json!(2)), (&json!("key=43"), &json!(1))]);
    assert!(
        slots[0]["longest_seconds"].as_f64() >= slots[1]["longest_seconds"].as_f64(),
        "{slots}"
    );
    // The other subject was denied once, and a ban is after two denials.
    let bans = list(1, "bans").await;
    assert_eq!(
        (bans.as_array().map(Vec::len), &bans[0]["subject"]),
        (Some(1), &json!("key=44")),
        "{bans}"
    );
    let rest = operator.counts("mails", "key=44").await;
    for (of, name) in [(&bans[0], "ends_after_seconds"), (&rest, "banned_for_seconds")] {
        let ends = of[name].as_f64().expect("a number");
        assert!((590.0..=600.0).contains(&ends), "{of}");
    }
    assert!(rest["retry_after_seconds"].as_f64() > Some(3_500.0), "{rest}");
    assert_eq!(
        operator.counts("mails", "key=45").await["banned_for_seconds"],
        Value::Null
    );

    for key in 0..30_u64 {
        held.push(limiter.check(key).await.expect("the store replies"));
    }
    assert_eq!(list(0, "slots").await.as_array().map(Vec::len), Some(20));
    drop(held);
    assert_eq!(list(0, "slots").await, json!([]));
    operator.reset("mails", "key=44").await;
    assert_eq!(list(1, "bans").await, json!([]));
}

#[tokio::test(start_paused = true)]
async fn slots_and_bans_are_listed_in_memory() {
    lists_slots_and_bans(MemoryStore::new()).await;
}

#[tokio::test]
async fn slots_and_bans_are_listed_in_redis() {
    let redis = Redis::start();
    lists_slots_and_bans(connected(patient(), &redis.url()).await).await;
}

async fn lists_lines(store: impl Store + Clone) {
    let policies = [
        Policy::new("exports", Concurrency::new(9)),
        Policy::new("mails", SlidingLog::per_minute(1)).wait_up_to(10 * MINUTE),
    ];
    let limiter = Limiter::new(store, policies.clone());
    let operator = of(&limiter);
    let other = of(&Limiter::new(MemoryStore::new(), policies));
    let report = async |operator: &Operator, position: usize| {
        let mut policy = operator.report().await["policies"][position].take();
        (policy["waiting"].take(), policy["lines"].take())
    };
    let empty = (json!(0), json!([]));
    assert_eq!(report(&operator, 1).await, empty);

    let keys = [42, 43, 43].into_iter().chain(0..30);
    let mut calls = JoinSet::new();
    for key in keys.clone().chain(keys) {
        let limiter = limiter.clone();
        calls.spawn(async move { limiter.acquire(key).await.map(drop) });
    }
    eventually("all wait but the first of each key", async || {
        report(&operator, 1).await.0 == 34
    })
    .await;
    let (_, lines) = report(&operator, 1).await;
    let lines = lines.as_array().expect("a list");
    assert_eq!(lines.len(), 20, "{lines:?}");
    assert_eq!(
        lines[..2],
        [
            json!({ "subject": "key=43", "requests": 3 }),
            json!({ "subject": "key=0", "requests": 1 })
        ]
    );
    for report in [report(&operator, 0).await, report(&other, 1).await] {
        assert_eq!(report, empty);
    }

    calls.shutdown().await;
    assert_eq!(report(&operator, 1).await, empty);
}

#[tokio::test(start_paused = true)]
async fn lines_are_listed_in_memory() {
    lists_lines(MemoryStore::new()).await;
    // A store without an identity.
    lists_lines(Counted::new(MemoryStore::new())).await;
}

#[tokio::test]
async fn lines_are_listed_in_redis() {
    let redis = Redis::start();
    lists_lines(connected(patient(), &redis.url()).await).await;
}

/// The store has the places of 32 of them.
#[tokio::test(start_paused = true)]
async fn the_wait_of_a_subject_is_that_behind_all_that_wait_in_this_process() {
    let policy = Policy::new("mails", SlidingLog::per_minute(1)).wait_up_to(100 * MINUTE);
    let limiter = Limiter::new(MemoryStore::new(), policy);
    let (operator, mut calls) = (of(&limiter), JoinSet::new());
    for _ in 0..41 {
        let limiter = limiter.clone();
        calls.spawn(async move { limiter.acquire("42").await.map(drop) });
    }
    eventually("all wait but the first", async || {
        operator.policy().await["waiting"] == 40
    })
    .await;
    let counts = operator.counts("mails", "key=42").await;
    assert!(counts["retry_after_seconds"].as_f64() > Some(2_400.0), "{counts}");
}

#[tokio::test(start_paused = true)]
async fn decisions_are_counted_by_policy_while_there_is_a_router() {
    let requests = |quota| Policy::new("api", SlidingLog::per_hour(quota)).key(key::ip());
    let plans = Plans::new("free", requests(1)).plan("pro", requests(2));
    let layer = RateLimitLayer::new(
        MemoryStore::new(),
        plans.by(|parts| parts.headers.get("plan")?.to_str().ok()),
    );
    let app = Router::new().route("/", route(async || "hi")).layer(layer.clone());
    let call = async |address, plan, times| {
        for _ in 0..times {
            send(&app, get_from(address, "/").header("plan", plan)).await;
        }
    };
    call("192.0.2.1", "free", 3).await;
    let operator = Operator::of(&layer);
    assert_eq!(operator.policy().await["decisions"], 0);
    call("192.0.2.1", "free", 3).await;
    call("192.0.2.2", "pro", 3).await;
    let report = operator.report().await;
    let of = |plan: usize| {
        let policy = &report["policies"][plan];
        (policy["decisions"].clone(), policy["denials"]["total"].clone())
    };
    assert_eq!([of(0), of(1)], [(json!(3), json!(3)), (json!(3), json!(1))]);
    drop(operator);
    let later = Operator::of(&layer);
    assert_eq!(later.policy().await["decisions"], 0);
}

#[tokio::test(start_paused = true)]
async fn the_plans_of_a_file_can_be_reset_before_a_request_and_after_a_reload() {
    let text = |pro: u64| {
        format!(
            "[policies.api]\nlimit = 'sliding-log 2/min'\nkey = 'ip'\nplan = 'header:x-plan'\n\
             [policies.api.plans]\npro = 'sliding-counter {pro}/min'\n"
        )
    };
    let parse = |pro| Policies::from_toml(&text(pro)).expect("a file");
    let policies = parse(3);
    let layer = policies.layer(MemoryStore::new(), ["api"]).expect("a policy");
    let app = Router::new().route("/", route(async || "hi")).layer(layer.clone());
    let operator = Operator::of(&layer);
    assert_eq!(operator.reset("api", "ip=192.0.2.1").await.status, StatusCode::OK);

    let call = async |plan| {
        send(&app, get_from("192.0.2.1", "/").header("x-plan", plan))
            .await
            .status
    };
    for plan in ["pro", "pro", "pro", "free", "free"] {
        assert_eq!(call(plan).await, StatusCode::OK);
    }
    policies.replace(&parse(4)).expect("a file");
    let limits = operator.policy().await["limits"].take();
    let limits: Vec<_> = limits
        .as_array()
        .expect("a list")
        .iter()
        .map(|limit| limit["limit"].clone())
        .collect();
    assert_eq!(limits, ["sliding-log 2/min", "sliding-counter 4/min"]);
    assert_eq!(call("free").await, StatusCode::TOO_MANY_REQUESTS);
    policies.replace(&parse(3)).expect("a file");
    let reset = operator.reset("api", "ip=192.0.2.1").await;
    assert_eq!(reset.status, StatusCode::OK, "{}", reset.json());
    for plan in ["pro", "pro", "pro", "free", "free"] {
        assert_eq!(call(plan).await, StatusCode::OK, "{plan}");
    }
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_overrides_hold() {
    let limiter = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(1)));
    let limit = SlidingLog::per_hour(2);
    for subject in 0..10_000_u64 {
        limiter
            .override_limit("mails", subject, limit, MINUTE)
            .await
            .expect("there is room");
    }
    let error = limiter
        .override_limit("mails", 10_000_u64, limit, MINUTE)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("at most 10000 overrides"), "{error}");
    let replaces = limiter.override_limit("mails", 1_u64, limit, MINUTE).await;
    replaces.expect("it replaces one");

    let operator = of(&limiter);
    assert_eq!(
        operator.report().await["overrides"].as_array().map(Vec::len),
        Some(10_000)
    );
    for (subject, quota) in [(9_999_u64, 2), (10_000, 1)] {
        assert_eq!(
            limiter.check(subject).await.expect("an answer").limit(),
            quota,
            "{subject}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn the_report_of_fifty_policies_and_ten_thousand_subjects_is_bounded() {
    let store = Counted::new(MemoryStore::new());
    let policies: Vec<_> = (0..50)
        .map(|number| {
            let ban = Ban::after(9, MINUTE).first(Duration::from_secs(9));
            Policy::new(format!("policy-{number}"), SlidingLog::per_hour(1)).ban(ban)
        })
        .collect();
    let limiter = Limiter::new(store.clone(), policies);
    let admin = Admin::new().limiter(&limiter).most_denied(10_000);
    let operator = Operator(admin.router_behind_authentication());
    // 200 subjects of each policy.
    for subject in 0..400_u64 {
        drop(limiter.check(subject % 200).await.expect("a memory store replies"));
    }
    let whole = operator.report().await;
    assert_eq!(
        whole["policies"][49]["denials"]["subjects"].as_array().map(Vec::len),
        Some(200)
    );

    let before = store.calls();
    let response = send(&operator.0, Request::get("/report?subjects=50")).await;
    // One for the store, and 10 for the bans of each policy.
    assert_eq!(store.calls() - before, 1 + 50 * 10);
    assert!(response.body.len() < 300_000, "{} bytes", response.body.len());
    let report = response.json();
    for policy in report["policies"].as_array().expect("a list") {
        let denials = &policy["denials"];
        assert_eq!(denials["subjects"].as_array().map(Vec::len), Some(50));
        assert_eq!(denials["total"], 200);
    }
    let mistake = send(&operator.0, Request::get("/report?subjects=many")).await;
    assert_eq!(mistake.status, StatusCode::BAD_REQUEST);
    assert!(
        mistake.json()["error"]
            .as_str()
            .is_some_and(|error| error.contains("/report?subjects=50"))
    );
}

#[tokio::test]
async fn while_the_store_fails_the_rest_of_a_ban_is_that_of_this_process() {
    let mails = Policy::new("mails", SlidingLog::per_day(1)).ban(Ban::after(1, 9 * MINUTE).first(10 * MINUTE));
    let limiter = Limiter::new(Broken::default(), mails);
    for _ in 0..2 {
        drop(limiter.check("42").await.expect("this process counts"));
    }
    let counts = of(&limiter).counts("mails", "key=42").await;
    let rest = counts["banned_for_seconds"].as_f64();
    assert!(rest.is_some_and(|rest| (500.0..=600.0).contains(&rest)), "{counts}");
}
