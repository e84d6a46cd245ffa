//! Plans as sets of policies, in code and in files.

use std::time::Duration;

use axum::{Router, routing::get as route};
use http::StatusCode;
use tower_quota::{
    Ban, Decision, FailureMode, IntoPolicies, Limiter, MemoryStore, Plans, Policies, Policy, RateLimitLayer,
    SlidingLog, TokenBucket, key, store::ErrorKind,
};

use crate::support::{Broken, Clock, Log, Received, get, send};

fn requests(quota: u64) -> Policy {
    Policy::new("requests", SlidingLog::per_hour(quota)).key(key::header("user"))
}

/// Chosen by a header.
fn by_header(plans: Plans) -> Plans {
    plans.by(|parts| parts.headers.get("plan")?.to_str().ok())
}

fn app(layer: RateLimitLayer) -> Router {
    let show = async |decision: Decision| format!("{:?}", decision.plan());
    Router::new().route("/", route(show).layer(layer))
}

async fn request(app: &Router, plan: &str) -> Received {
    send(app, get("/").header("user", "42").header("plan", plan)).await
}

#[tokio::test]
async fn a_request_meets_the_policies_of_its_plan_and_those_of_all() {
    let total = Policy::new("total", SlidingLog::per_hour(100)).key(key::constant("all"));
    let exports = Policy::new("exports", SlidingLog::per_hour(3)).key(key::header("user"));
    let plans = Plans::new("free", requests(4))
        .plan("pro", [requests(10), exports])
        .in_each(total);
    let app = app(RateLimitLayer::new(Clock::new().memory_store(), by_header(plans)));

    for (plan, chosen, state) in [
        ("free", "free", r#""requests";r=3;t=3600, "total";r=99;t=3600"#),
        (
            "pro",
            "pro",
            r#""requests";r=8;t=3600, "exports";r=2;t=3600, "total";r=98;t=3600"#,
        ),
        ("gold", "free", r#""requests";r=1;t=3600, "total";r=97;t=3600"#),
        ("", "free", r#""requests";r=0;t=3600, "total";r=96;t=3600"#),
    ] {
        let response = request(&app, plan).await;
        assert_eq!(response.body, format!("Some({chosen:?})"), "{plan}");
        assert_eq!(response.field("ratelimit"), Some(state), "{plan}");
    }
    assert_eq!(request(&app, "free").await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(request(&app, "pro").await.status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn all_settings_of_a_policy_are_those_of_its_plan() {
    let waits = TokenBucket::per_second(1);
    let plans = Plans::new("free", requests(2).cost(2))
        .plan(
            "waits",
            Policy::new("steady", waits)
                .key(key::header("user"))
                .wait_up_to(Duration::from_secs(9)),
        )
        .plan(
            "strict",
            requests(2).ban(Ban::after(1, Duration::from_secs(60)).first(Duration::from_secs(7_200))),
        );
    let app = app(RateLimitLayer::new(MemoryStore::new(), by_header(plans)));

    for (plan, status) in [
        ("free", 200),
        ("free", 429),
        ("waits", 200),
        ("waits", 200),
        ("strict", 429),
        ("free", 429),
    ] {
        assert_eq!(request(&app, plan).await.status, status, "{plan}");
    }
    // The ban is one of its plan, and outlasts the window.
    let banned = request(&app, "strict").await;
    assert_eq!(banned.field("retry-after"), Some("7200"));

    let plans = Plans::new("free", requests(9)).plan("closed", requests(9).failure_mode(FailureMode::Closed));
    let app = self::app(RateLimitLayer::new(Broken::default(), by_header(plans)));
    assert_eq!(request(&app, "free").await.status, StatusCode::OK);
    assert_eq!(request(&app, "closed").await.status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn plans_that_limit_nothing_have_their_names() {
    let burst = Policy::new("burst", SlidingLog::per_second(5));
    let plans = Plans::new("free", vec![]).plan("pro", vec![]).in_each(burst);
    let limiter = Limiter::new(MemoryStore::new(), plans);
    let check = async |plan: &'static str| limiter.request("42").plan(plan).check().await;

    assert_eq!(check("pro").await.expect("a decision").remaining(), 4);
    assert!(check("gold").await.unwrap_err().to_string().contains("`free`, `pro`"));
}

#[tokio::test]
async fn an_empty_plan_limits_nothing_and_one_with_one_policy_limits_no_other() {
    let plans = Plans::new("free", vec![]).plan("pro", requests(1));
    let app = app(RateLimitLayer::new(MemoryStore::new(), by_header(plans)));
    for (plan, status) in [("free", 200), ("pro", 200), ("pro", 429), ("free", 200)] {
        assert_eq!(request(&app, plan).await.status, status, "{plan}");
    }
    assert_eq!(request(&app, "free").await.body, "None");
}

#[tokio::test]
async fn nested_layers_with_the_same_plans_charge_a_request_once() {
    let store = Clock::new().memory_store();
    let layer = || {
        RateLimitLayer::new(
            store.clone(),
            by_header(Plans::new("free", requests(4)).plan("pro", requests(9))),
        )
    };
    let app = Router::new()
        .route("/", route(async || "hi"))
        .layer(layer())
        .layer(layer());
    assert_eq!(
        request(&app, "pro").await.field("ratelimit"),
        Some(r#""requests";r=8;t=3600"#)
    );
}

#[test]
fn a_name_is_once_in_a_plan_and_in_any_number_of_plans() {
    let layer = |plans: Plans| RateLimitLayer::try_new(MemoryStore::new(), by_header(plans)).map(drop);
    assert!(layer(Plans::new("free", requests(1)).plan("pro", requests(2))).is_ok());
    for two in [
        Plans::new("free", requests(1)).plan("free", requests(2)),
        Plans::new("pro", requests(1))
            .plan("free", requests(2))
            .plan("free", []),
    ] {
        let error = layer(two).unwrap_err().to_string();
        assert!(error.starts_with("two plans are named `free`; give one"), "{error}");
    }
    for twice in [
        Plans::new("free", [requests(1), requests(2)]),
        Plans::new("free", requests(1)).in_each(requests(2)),
    ] {
        let error = layer(twice).unwrap_err().to_string();
        assert!(error.contains("two policies are named `requests`"), "{error}");
    }
}

#[test]
fn the_policies_of_a_layer_are_of_one_set_of_plans() {
    let regions = || {
        let exports = |quota| Policy::new("exports", SlidingLog::per_hour(quota)).key(key::header("user"));
        by_header(Plans::new("eu", exports(1)).plan("us", exports(2)))
    };
    let plans = || by_header(Plans::new("free", requests(1)).plan("pro", requests(2)));
    for several in [
        [plans().into_policies(), regions().into_policies()].concat(),
        plans().in_each(regions()).into_policies(),
        plans().plan("max", regions()).into_policies(),
        by_header(Plans::new("free", regions()).plan("none", vec![])).into_policies(),
    ] {
        let error = RateLimitLayer::try_new(MemoryStore::new(), several)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("two `Plans`") && error.contains("make one `Plans`"),
            "{error}"
        );
    }
    let total = Policy::new("total", SlidingLog::per_hour(9)).key(key::constant("all"));
    let beside = [plans().into_policies(), vec![total]].concat();
    assert!(RateLimitLayer::try_new(MemoryStore::new(), beside).is_ok());
}

#[tokio::test]
async fn a_limiter_takes_plans_and_their_receipts() {
    let mails = |quota| Policy::new("mails", SlidingLog::per_hour(quota));
    let limiter = Limiter::new(
        Clock::new().memory_store(),
        Plans::new("free", mails(1)).plan("pro", mails(5)),
    );

    let first = limiter.request("42").plan("pro").check().await.expect("a decision");
    assert_eq!((first.plan(), first.remaining()), (Some("pro"), 4));
    assert!(!limiter.check("42").await.expect("a decision").is_allowed());
    first.take_receipt().settle(3).await.expect("the store replies");
    let left = limiter.request("42").plan("pro").peek().await.expect("a decision");
    assert_eq!(left.remaining(), 2);
}

#[test]
fn a_layer_of_several_plans_needs_to_know_that_of_a_request() {
    let layer = |plans: Plans| RateLimitLayer::try_new(MemoryStore::new(), plans).map(drop);
    let plans = Plans::new("free", requests(1)).plan("pro", requests(2));
    let error = layer(plans).unwrap_err().to_string();
    assert!(
        error.contains("`free`, `pro`") && error.contains("set `.by("),
        "{error}"
    );
    assert!(
        layer(Plans::new("free", requests(1))).is_ok(),
        "all requests have the only plan"
    );
}

#[tokio::test]
async fn each_plan_of_a_request_that_does_not_exist_is_logged_once() {
    let plans = by_header(Plans::new("free", requests(9)).plan("pro", requests(9)));
    let app = app(RateLimitLayer::new(MemoryStore::new(), plans));
    let logs = Log::capture();
    for plan in ["pro", "glod", "silver", "glod"] {
        assert_eq!(request(&app, plan).await.status, StatusCode::OK, "{plan}");
    }
    let logs = logs.text();
    assert_eq!(logs.matches("plan that does not exist").count(), 2, "{logs}");
    assert!(
        logs.contains("glod") && logs.contains("silver") && logs.contains("`free`, `pro`"),
        "{logs}"
    );

    let logs = Log::capture();
    for number in 0..40 {
        request(&app, &format!("plan-{number}-{}", "x".repeat(1_000))).await;
    }
    let logs = logs.text();
    assert!(!logs.contains(&"x".repeat(64)), "{logs}");
    assert_eq!(logs.matches("plan that does not exist").count(), 16 - 2, "{logs}");
}

#[tokio::test]
async fn that_no_request_has_a_plan_is_logged() {
    let free = || Plans::new("free", requests(9_999));
    let both = || free().plan("pro", requests(9_999));
    for (plans, has_plan, logged) in [(both(), false, 1), (both(), true, 0), (free(), false, 0)] {
        let plans = plans.by(|parts| parts.extensions.get::<&'static str>().copied());
        let app = app(RateLimitLayer::new(MemoryStore::new(), plans));
        let logs = Log::capture();
        for nth in 0..2_000 {
            let request = get("/").header("user", "42");
            let request = if has_plan && nth == 900 {
                request.extension("pro")
            } else {
                request
            };
            send(&app, request).await;
        }
        let logs = logs.text();
        assert_eq!(logs.matches("no request yet had a plan").count(), logged, "{logs}");
    }
}

#[tokio::test]
async fn a_limiter_refuses_a_plan_that_does_not_exist() {
    let mails = |quota| Policy::new("mails", SlidingLog::per_hour(quota));
    let plans = Plans::new("free", mails(1)).plan("pro", mails(5));
    let limiter = Limiter::new(MemoryStore::new(), plans);
    let error = limiter
        .request("42")
        .plan("glod")
        .check()
        .await
        .expect_err("no such plan");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(
        error.to_string(),
        "the limiter has no plan `glod`; it has `free`, `pro`"
    );

    let limiter = Limiter::new(MemoryStore::new(), mails(1));
    let error = limiter.request("42").plan("pro").check().await.expect_err("no plans");
    assert_eq!(error.to_string(), "the limiter has no plan `pro`; it has no plans");
}

#[tokio::test]
async fn a_reset_is_one_of_all_plans() {
    let free = Policy::new("mails", SlidingLog::per_hour(3));
    let pro = Policy::new("mails", TokenBucket::per_hour(5));
    let limiter = Limiter::new(Clock::new().memory_store(), Plans::new("free", free).plan("pro", pro));
    let left = async |plan| {
        limiter
            .request("42")
            .plan(plan)
            .peek()
            .await
            .expect("a decision")
            .remaining()
    };
    for plan in ["free", "pro"] {
        let _ = limiter.request("42").plan(plan).check().await.expect("a decision");
    }
    assert_eq!((left("free").await, left("pro").await), (2, 4));
    limiter.reset("42").await.expect("the store replies");
    assert_eq!((left("free").await, left("pro").await), (3, 5));
}

#[tokio::test]
async fn a_reset_ends_a_ban_that_only_one_of_the_plans_has() {
    let free = Policy::new("mails", SlidingLog::per_hour(3));
    let pro = Policy::new("mails", SlidingLog::per_hour(5)).ban(Ban::by_hand());
    let limiter = Limiter::new(MemoryStore::new(), Plans::new("free", free).plan("pro", pro));
    limiter.ban("42", Duration::from_secs(60)).await.expect("it has bans");
    limiter.reset("42").await.expect("the store replies");
    let pro = limiter.request("42").plan("pro").check().await;
    assert!(pro.expect("a decision").is_allowed());
}

const FILE: &str = r#"
plan = "header:plan"

[policies.requests]
limit = "sliding-log 4/h"
key = "header:user"
methods = "GET"

[plans.pro.requests]
limit = "sliding-log 10/h"

[plans.pro.exports]
limit = "sliding-log 30/h"
key = "header:user"
cost = 2
"#;

#[tokio::test]
async fn the_plans_of_a_file_are_those_of_its_layers_and_follow_it() {
    let live = Policies::from_toml(FILE).unwrap();
    assert_eq!(live.names(), ["requests"]);
    assert_eq!(live.unused(), ["pro/exports", "pro/requests", "requests"]);
    let layer = live
        .layer(Clock::new().memory_store(), ["requests", "exports"])
        .unwrap();
    assert!(live.unused().is_empty());
    let app = app(layer);

    let free = r#""requests";r=3;t=3600"#;
    assert_eq!(request(&app, "free").await.field("ratelimit"), Some(free));
    let pro = r#""requests";r=8;t=3600, "exports";r=28;t=3600"#;
    assert_eq!(request(&app, "pro").await.field("ratelimit"), Some(pro));
    let post = get("/").method("POST").header("user", "43").header("plan", "pro");
    let exports = r#""exports";r=28;t=3600"#;
    assert_eq!(send(&app, post).await.field("ratelimit"), Some(exports));

    for (from, to, state) in [
        ("10/h", "20/h", r#""requests";r=17;t=3600, "exports";r=26;t=3600"#),
        // What is no part of the plan anymore is as for all.
        (
            "[plans.pro.requests]",
            "[plans.gold.requests]",
            r#""requests";r=0;t=3600, "exports";r=24;t=3600"#,
        ),
    ] {
        live.replace(&Policies::from_toml(&FILE.replace(from, to)).unwrap())
            .unwrap();
        assert_eq!(request(&app, "pro").await.field("ratelimit"), Some(state), "{to}");
    }
}

#[tokio::test]
async fn a_policy_that_a_reload_adds_to_a_plan_applies_as_after_a_start() {
    let file = "plan = 'header:plan'
        policies.a = { limit = 'sliding-log 20/min', key = 'header:user' }
        policies.b = { limit = 'sliding-log 20/h', key = 'header:user' }";
    for (before, after) in [
        (
            "plans.pro.a.limit = 'sliding-log 30/min'",
            "plans.pro.b.limit = 'sliding-log 200/h'",
        ),
        // A layer of a file without plans follows its plan of requests without one.
        ("", "plans.default.b.limit = 'sliding-log 200/h'"),
    ] {
        let plan = if before.is_empty() { "" } else { "pro" };
        let read = |lines: &str| {
            let file = file.replace(
                "plan = 'header:plan'",
                if lines.is_empty() { "" } else { "plan = 'header:plan'" },
            );
            Policies::from_toml(&format!("{file}\n{lines}")).unwrap()
        };
        let live = read(before);
        let reloaded = app(live.layer(MemoryStore::new(), ["a", "b"]).unwrap());
        let changed = format!("{before}\n{after}");
        live.replace(&read(&changed)).unwrap();
        assert!(
            live.unused().iter().all(|place| place == "b" && plan.is_empty()),
            "{after}"
        );
        let started = app(read(&changed).layer(MemoryStore::new(), ["a", "b"]).unwrap());
        for app in [reloaded, started] {
            let response = request(&app, plan).await;
            let announced = response.field("ratelimit-policy").expect("policies");
            assert!(announced.contains("\"b\";q=200;w=3600"), "{after}: {announced}");
        }
    }

    let mails = "policies.mails.limit = 'sliding-log 3/h'\nplans.pro.exports.limit = 'sliding-log 5/h'";
    let live = Policies::from_toml(mails).unwrap();
    let limiter = Limiter::new(MemoryStore::new(), live.unkeyed_plans(["mails", "exports"]).unwrap());
    live.replace(&Policies::from_toml(&format!("{mails}\nplans.pro.mails.limit = 'sliding-log 9/h'")).unwrap())
        .unwrap();
    let decision = limiter.request("42").plan("pro").check().await.expect("a decision");
    let limits: Vec<_> = decision.policies().map(|policy| policy.limit()).collect();
    assert_eq!(limits, [9, 5]);
}

#[tokio::test]
async fn requests_of_a_plan_that_a_reload_removes_are_those_of_the_default_as_after_a_start() {
    let kept = "plan = 'header:plan'
        policies.a = { limit = 'sliding-log 20/min', key = 'header:user' }
        policies.b = { limit = 'sliding-log 30/h', key = 'header:user' }
        plans.default.a.limit = 'sliding-log 2/min'";
    let read = |file: &str| Policies::from_toml(file).unwrap();
    let live = read(&format!("{kept}\nplans.pro.a.limit = 'sliding-log 200/min'"));
    let reloaded = app(live.layer(MemoryStore::new(), ["a", "b"]).unwrap());
    live.replace(&read(kept)).unwrap();
    let started = app(read(kept).layer(MemoryStore::new(), ["a", "b"]).unwrap());
    for app in [reloaded, started] {
        let response = request(&app, "pro").await;
        assert_eq!(
            response.field("ratelimit-policy"),
            Some(r#""a";q=2;w=60, "b";q=30;w=3600"#)
        );
    }
}

#[test]
fn a_policy_is_found_by_its_name_alone() {
    let live = Policies::from_toml(FILE).unwrap();
    for name in [
        "free/requests",
        "default/requests",
        "pro/imports",
        "pro/exports",
        "exports",
    ] {
        let error = live.get(name).map(drop).unwrap_err().to_string();
        assert!(error.contains("there is no policy"), "{name}: {error}");
        assert!(live.unkeyed(name).is_err(), "{name}");
    }
    let error = live
        .layer(MemoryStore::new(), ["requests", "pro/exports"])
        .map(drop)
        .unwrap_err();
    assert!(
        error.to_string().contains("there is no policy `pro/exports`"),
        "{error}"
    );
}

#[tokio::test]
async fn what_is_settled_after_a_reload_is_settled_by_the_plan() {
    let file = "policies.mails.limit = 'sliding-log 3/h'\nplans.pro.mails.limit = 'sliding-log 10/h'";
    let live = Policies::from_toml(file).unwrap();
    let limiter = Limiter::new(Clock::new().memory_store(), live.unkeyed_plans(["mails"]).unwrap());
    let decision = limiter.request("42").plan("pro").check().await.expect("a decision");

    live.replace(&Policies::from_toml(&file.replace("10/h", "20/h")).unwrap())
        .unwrap();
    decision.take_receipt().settle(5).await.expect("the store replies");
    let left = limiter.request("42").plan("pro").peek().await.expect("a decision");
    assert_eq!((left.limit(), left.remaining()), (20, 15));
}

#[test]
fn plans_of_a_file_that_cannot_work_are_errors_with_the_fix() {
    for (from, to, fix) in [
        (
            "plan = \"header:plan\"",
            "",
            "`plans` need a `plan` at the top of the file",
        ),
        ("header:plan", "extension:plan", "`with_extension(\"plan\","),
        ("[plans.pro.exports]", "[plans.'a/b'.exports]", "contains no `/`"),
        ("cost = 2", "costs = 2", "unknown field `costs`"),
        (
            "[policies.requests]",
            "[policies.others]",
            "the policy `pro/requests` has no key",
        ),
    ] {
        let policies = Policies::from_toml(&FILE.replace(from, to));
        let layer = policies.and_then(|policies| policies.layer(MemoryStore::new(), ["requests", "exports"]));
        let error = layer.unwrap_err().to_string();
        assert!(error.contains(fix), "{to}: {error}");
    }
    let policies = Policies::from_toml(FILE).unwrap();
    let error = policies.plans(["imports"]).unwrap_err().to_string();
    assert!(
        error.contains("there is no policy `imports`; there are `requests`"),
        "{error}"
    );
}
