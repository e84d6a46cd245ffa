//! What files say about policies: routes, methods, plans, extensions.

use std::convert::Infallible;

use axum::{Router, body::Body, routing::get as route};
use http::{Method, Request, Response, StatusCode, request::Builder};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{Denial, Key, Limiter, MemoryStore, Policies, Policy, RateLimitLayer, store::Store};

use crate::support::{Broken, Clock, Received, get, send};

/// The policy `api` with these lines, by the address.
fn described(lines: &str) -> Policies {
    Policies::from_toml(&file(lines)).unwrap_or_else(|error| panic!("{lines}: {error}"))
}

fn file(lines: &str) -> String {
    format!("[policies.api]\nlimit = \"sliding-log 10/min\"\nkey = \"ip\"\n{lines}\n")
}

fn layer(policy: Policy) -> RateLimitLayer {
    RateLimitLayer::new(Clock::new().memory_store(), policy)
}

/// Whether the policy applies to a request, in a service without routes.
async fn applies(policies: &Policies, request: Builder) -> bool {
    let service = layer(policies.get("api").unwrap()).layer(service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    let Ok(response) = service.oneshot(request.body(Body::empty()).unwrap()).await;
    Received::read(response).await.field("ratelimit").is_some()
}

fn all_routes(layer: RateLimitLayer) -> Router {
    let users = Router::new().route("/{id}", route(async || "a user").post(async || "a user"));
    Router::new()
        .route("/login", route(async || "welcome").post(async || "welcome"))
        .nest("/users", users)
        .layer(layer)
}

#[tokio::test]
async fn a_policy_is_for_the_routes_that_axum_has_matched() {
    let policy = described("routes = [\"/login\", \"/users/{id}\"]").get("api").unwrap();
    let app = all_routes(layer(policy));
    for (path, remaining) in [
        ("/login", Some(9)),
        ("/users/42", Some(8)),
        ("/users/%34%32", Some(7)),
        ("/%6Cogin", Some(6)),
        ("/users", None),
        ("/other", None),
    ] {
        let state = remaining.map(|remaining| format!("\"api\";r={remaining};t=60"));
        assert_eq!(
            send(&app, get(path)).await.field("ratelimit"),
            state.as_deref(),
            "{path}"
        );
    }

    // Of a template within that of the route, the path is compared.
    let policy = described("routes = \"/users/42\"").get("api").unwrap();
    let app = all_routes(layer(policy));
    send(&app, get("/users/43")).await.assert_silent();
    assert_eq!(
        send(&app, get("/users/42")).await.field("ratelimit"),
        Some("\"api\";r=9;t=60")
    );
}

#[tokio::test]
async fn a_policy_is_for_paths_where_no_route_was_matched() {
    let policies = described("routes = [\"/login\", \"/users/{id}\", \"/test.Echo/{method}\"]");
    for (path, expected) in [
        ("/login", true),
        ("/%6cogin?next=/", true),
        ("/users/42", true),
        ("/users/42/posts", false),
        ("/test.Echo/Once", true),
        ("/test.Other/Once", false),
    ] {
        assert_eq!(applies(&policies, get(path)).await, expected, "{path}");
    }
}

#[tokio::test]
async fn a_policy_is_for_methods() {
    for (methods, applied) in [
        ("\"POST\"", &[Method::POST][..]),
        ("[\"POST\", \"PUT\"]", &[Method::POST, Method::PUT]),
        ("[\"GET\"]", &[Method::GET, Method::HEAD]),
    ] {
        let policies = described(&format!("methods = {methods}"));
        for method in [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::DELETE] {
            let request = get("/").method(method.clone());
            let expected = applied.contains(&method);
            assert_eq!(applies(&policies, request).await, expected, "{methods}: {method}");
        }
    }
}

#[tokio::test]
async fn routes_methods_and_a_condition_in_code_all_hold() {
    let policies = described("routes = \"/login\"\nmethods = \"POST\"");
    let policy = policies
        .get("api")
        .unwrap()
        .apply_if(|parts| parts.headers.contains_key("x-new"));
    let app = all_routes(layer(policy));
    for (request, expected) in [
        (get("/login").method("POST").header("x-new", "1"), true),
        (get("/login").method("POST"), false),
        (get("/login").header("x-new", "1"), false),
        (get("/users/42").method("POST").header("x-new", "1"), false),
    ] {
        assert_eq!(send(&app, request).await.field("ratelimit").is_some(), expected);
    }
}

#[test]
fn a_setting_that_cannot_work_is_an_error_with_its_place_and_the_fix() {
    for (lines, place, fix) in [
        ("routes = \"login\"", "line 4", "one looks like `/login`"),
        ("routes = [\"/a\", \"b\"]", "line 4", "`b` is not a route"),
        ("routes = []", "line 4", "an empty list is for no request"),
        ("routes = 3", "line 4", "a text, or a list of texts"),
        ("methods = \"post\"", "line 4", "one looks like `POST`"),
        ("methods = [\"GET\", \"A B\"]", "line 4", "`A B` is not a method"),
        ("methods = []", "line 4", "an empty list is for no request"),
        ("methods = '*'", "line 4", "without `methods` all are meant"),
        ("methods = 'ANY'", "line 4", "without `methods` all are meant"),
        ("methods = 'ALL'", "line 4", "without `methods` all are meant"),
        ("methods = [\"GTE\"]", "line 4", "is `GET` meant?"),
        ("methods = \"POSTS\"", "line 4", "is `POST` meant?"),
        ("methods = \"PACH\"", "line 4", "is `PATCH` meant?"),
        ("enforce-share = \"10%\"", "line 4", "such as 0.1"),
        ("enforce-share = 0.1\nmode = \"observe\"", "line 1", "leave out `mode`"),
        ("ban = { after = 3 }", "line 4", "such as \"1h\""),
        ("ban = { after = 0, within = \"1h\" }", "line 4", "denials, such as 10"),
        (
            "ban = { after = 3, within = \"1h\", longest = \"30s\" }",
            "line 4",
            "lasts 1min, longer than the longest one of 30s",
        ),
        ("enforce-share = 2", "line 4", "from 0 to 1, such as 0.1"),
        ("formerly = \"api\"", "", "another name"),
        ("wait = 2", "line 4", "a length of time such as \"10min\""),
        ("wait = \"2 moons\"", "line 4", "one looks like `10min` or `500ms`"),
        (
            "ban = { after = 3, within = 60 }",
            "line 4",
            "a length of time such as \"10min\"",
        ),
        (
            "plan = \"tier\"\nplans = { pro = \"1/s\" }",
            "line 4",
            "`extension:plan` or `header:x-plan`",
        ),
        (
            "plan = \"header:x plan\"\nplans = { pro = \"1/s\" }",
            "line 4",
            "`header:x-plan`",
        ),
        (
            "plan = \"extension:plan\"",
            "line 1",
            "`plans`, which are limits by name",
        ),
        ("plans = { pro = \"1/s\" }", "line 1", "such as `\"extension:plan\"`"),
        (
            "plan = \"extension:plan\"\nplans = { pro = \"1 in s\" }",
            "line 5",
            "`sliding-log 100/min`",
        ),
    ] {
        let error = Policies::from_toml(&file(lines)).unwrap_err().to_string();
        assert!(error.contains(place) && error.contains(fix), "{lines}: {error}");
        let json = serde_json::to_string(&file(lines).parse::<toml::Table>().unwrap()).unwrap();
        let error = Policies::from_json(&json).unwrap_err().to_string();
        assert!(error.contains(fix) && !error.contains(" = "), "{json}: {error}");
    }
    // Methods of extensions of HTTP.
    for method in [
        "PURGE", "TRACK", "BDELETE", "QUERY", "PROPFIND", "MKCOL", "LOCK", "SEARCH",
    ] {
        let policies = Policies::from_toml(&file(&format!("methods = \"{method}\"")));
        assert!(policies.is_ok(), "{method}: {policies:?}");
    }
    let banning = file("ban = { after = 3, within = \"1h\" }\nplan = \"header:x-plan\"\nplans = { pro = \"9/s\" }");
    for limit in ["unlimited", "deny-all"] {
        let counting = banning.replace("sliding-log 10/min", limit);
        assert!(Policies::from_toml(&counting).is_ok(), "the plan has bans");
        let error = Policies::from_toml(&counting.replace("9/s", "unlimited"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("line 1") && error.contains("leave it out"), "{error}");
    }
    let without_plans = format!("plan = \"extension:plan\"\n{}", file(""));
    let error = Policies::from_toml(&without_plans).unwrap_err().to_string();
    assert!(error.contains("one of its `plans`, and there are none"), "{error}");
    let twice =
        r#"{"policies": {"api": {"limit": "1/s", "plan": "header:x-plan", "plans": {"a": "2/s", "a": "3/s"}}}}"#;
    let error = Policies::from_json(twice).unwrap_err().to_string();
    assert!(error.contains("`a` occurs twice"), "{error}");
}

/// What authentication has found.
#[derive(Clone)]
struct User {
    id: u64,
    plan: &'static str,
}

const PLANS: &str = "
[policies.api]
limit = \"sliding-log 10/min\"
key = \"extension:user\"
plan = \"extension:plan\"

[policies.api.plans]
pro = \"sliding-log 100/min\"
internal = \"unlimited\"
";

fn registered(policies: Policies) -> Policies {
    policies
        .with_extension("user", |user: &User| user.id)
        .with_extension("plan", |user: &User| user.plan.to_owned())
}

/// The policy and the state of a request.
async fn announced(app: &Router, request: Builder) -> Option<String> {
    let response = send(app, request).await;
    let [policy, state] = ["ratelimit-policy", "ratelimit"].map(|name| response.field(name).map(str::to_owned));
    Some(format!("{} {}", policy?, state?))
}

#[tokio::test]
async fn a_plan_is_that_of_an_extension_or_of_a_header() {
    let by_extension = registered(Policies::from_toml(PLANS).unwrap());
    let app = all_routes(layer(by_extension.get("api").unwrap()));
    let of = |plan| get("/login").extension(User { id: 42, plan });
    for (plan, expected) in [
        ("free", Some("\"api\";q=10;w=60 \"api\";r=9;t=60")),
        ("pro", Some("\"api\";q=100;w=60 \"api\";r=98;t=60")),
        ("", Some("\"api\";q=10;w=60 \"api\";r=7;t=60")),
        ("internal", None),
    ] {
        assert_eq!(announced(&app, of(plan)).await.as_deref(), expected, "{plan}");
    }

    let by_header = PLANS
        .replace("extension:plan", "header:x-plan")
        .replace("extension:user", "constant:all");
    let app = all_routes(layer(Policies::from_toml(&by_header).unwrap().get("api").unwrap()));
    for (request, expected) in [
        (
            get("/login").header("x-plan", "pro"),
            Some("\"api\";q=100;w=60 \"api\";r=99;t=60"),
        ),
        (get("/login"), Some("\"api\";q=10;w=60 \"api\";r=8;t=60")),
        (
            get("/login").header("x-plan", "internal").header("x-plan", "pro"),
            Some("\"api\";q=10;w=60 \"api\";r=7;t=60"),
        ),
        (get("/login").header("x-plan", "internal"), None),
    ] {
        assert_eq!(announced(&app, request).await.as_deref(), expected);
    }
}

#[tokio::test]
async fn plans_and_routes_follow_the_file() {
    let live = Policies::from_toml(PLANS)
        .unwrap()
        .with_extension("user", |user: &User| user.id)
        .with_extension("plan", |user: &User| user.plan.to_owned());
    let app = all_routes(layer(live.get("api").unwrap()));
    let pro = || get("/login").extension(User { id: 42, plan: "pro" });
    assert_eq!(
        announced(&app, pro()).await.as_deref(),
        Some("\"api\";q=100;w=60 \"api\";r=99;t=60")
    );

    for (from, to, expected) in [
        ("100/min", "200/min", Some("\"api\";q=200;w=60 \"api\";r=198;t=60")),
        ("pro =", "gold =", Some("\"api\";q=10;w=60 \"api\";r=7;t=60")),
        (
            "plan = \"extension:plan\"",
            "plan = \"extension:plan\"\nroutes = \"/users/{id}\"",
            None,
        ),
        ("[policies.api]", "enabled = false\n[policies.api]", None),
    ] {
        live.replace(&Policies::from_toml(&PLANS.replace(from, to)).unwrap())
            .unwrap();
        assert_eq!(announced(&app, pro()).await.as_deref(), expected, "{to}");
    }
}

/// The outcomes of four requests of a plan with two an hour, whose policy outside of plans and in the plan have these settings.
async fn of_plan(store: impl Store, common: &str, own: &str) -> Vec<&'static str> {
    let file = format!("[policies.api]\nlimit = '3/h'\n{common}\n[plans.pro.api]\nlimit = '2/h'\n{own}");
    let policies = Policies::from_toml(&file).expect(&file).unkeyed_plans(["api"]);
    let limiter = Limiter::new(store, policies.expect(&file));
    let mut outcomes = Vec::new();
    for _ in 0..4 {
        outcomes.push(match limiter.request("42").plan("pro").check().await {
            Ok(decision) if decision.is_allowed() => "admitted",
            Ok(decision)
                if decision
                    .policies()
                    .any(|policy| policy.denial() == Some(Denial::Banned)) =>
            {
                "banned"
            }
            Ok(_) => "denied",
            Err(_) => "failed",
        });
    }
    outcomes
}

#[tokio::test(start_paused = true)]
async fn what_a_plan_does_not_set_is_as_outside_of_plans() {
    let (admitted, denied, banned, failed) = ("admitted", "denied", "banned", "failed");
    let by_limit = [admitted, admitted, denied, denied];
    for (common, own, expected) in [
        ("", "", by_limit),
        ("cost = 2", "", [admitted, denied, denied, denied]),
        ("cost = 2", "cost = 1", by_limit),
        ("mode = 'observe'", "", [admitted; 4]),
        ("mode = 'observe'", "mode = 'enforce'", by_limit),
        ("enforce-share = 0.0", "", [admitted; 4]),
        ("mode = 'observe'", "enforce-share = 1.0", by_limit),
        ("enabled = false", "", [admitted; 4]),
        ("enabled = false", "enabled = true", by_limit),
        (
            "ban = { after = 1, within = '1h' }",
            "",
            [admitted, admitted, banned, banned],
        ),
        (
            "ban = { after = 1, within = '1h' }",
            "ban = { after = 9, within = '1h' }",
            by_limit,
        ),
    ] {
        assert_eq!(
            of_plan(MemoryStore::new(), common, own).await,
            expected,
            "{common}: {own}"
        );
    }
    for (common, own, expected) in [
        ("", "", by_limit),
        ("failure-mode = 'closed'", "", [failed; 4]),
        ("failure-mode = 'closed'", "failure-mode = 'open'", [admitted; 4]),
    ] {
        assert_eq!(
            of_plan(Broken::default(), common, own).await,
            expected,
            "{common}: {own}"
        );
    }
}

#[test]
fn a_plan_that_takes_units_ahead_inherits_no_wait() {
    for common in [
        "wait = '2s'",
        "wait = '2s'\nmax-waiting = 5",
        "ban = { after = 1, within = '1h' }",
    ] {
        let file = format!(
            "plan = 'header:plan'\n[policies.api]\nlimit = '10/s'\nkey = 'constant:all'\n{common}\n\
             [plans.pro.api]\nlimit = '1000/s prefetch 50ms'"
        );
        let layer = Policies::from_toml(&file).and_then(|policies| policies.layer(MemoryStore::new(), ["api"]));
        assert!(layer.is_ok(), "{common}: {:?}", layer.err());
    }
}

#[test]
fn a_setting_that_is_null_is_an_error() {
    let is_refused = |json: &str| Policies::from_json(json).is_err();
    assert!(!is_refused(r#"{"policies": {"api": {"limit": "5/min", "key": "ip"}}}"#));
    for setting in [
        "ban",
        "cost",
        "enabled",
        "enforce-share",
        "failure-mode",
        "formerly",
        "key",
        "max-waiting",
        "methods",
        "mode",
        "plan",
        "plans",
        "routes",
        "wait",
    ] {
        let json = format!(r#"{{"policies": {{"api": {{"limit": "5/min", "{setting}": null}}}}}}"#);
        assert!(is_refused(&json), "{setting}");
    }
    for setting in ["block", "client-ip", "enabled", "plan", "plans", "skip"] {
        assert!(
            is_refused(&format!(r#"{{"policies": {{}}, "{setting}": null}}"#)),
            "{setting}"
        );
    }
    for (table, setting) in [
        (r#""skip": {"routes": "/a""#, "clients"),
        (r#""skip": {"routes": "/a""#, "networks"),
        (
            r#""client-ip": {"header": "x-forwarded-for", "trusted": "any-peer""#,
            "hops",
        ),
    ] {
        let with = |rest: &str| format!(r#"{{"policies": {{}}, {table}{rest}}}}}"#);
        assert!(!is_refused(&with("")), "{table}");
        assert!(
            is_refused(&with(&format!(r#", "{setting}": null"#))),
            "{table}: {setting}"
        );
    }
    for setting in ["first", "longest"] {
        let ban = format!(r#"{{"after": 9, "within": "1h", "{setting}": null}}"#);
        let json = format!(r#"{{"policies": {{"api": {{"limit": "5/min", "ban": {ban}}}}}}}"#);
        assert!(is_refused(&json) && !is_refused(&json.replace(&format!(r#", "{setting}": null"#), "")));
    }
}

#[test]
fn a_byte_order_mark_before_a_file_is_ignored() {
    let json = r#"{"policies": {"api": {"limit": "5/min", "key": "ip"}}}"#;
    let toml = "policies.api = { limit = '5/min', key = 'ip' }";
    assert_eq!(
        Policies::from_json(&format!("\u{feff}{json}"))
            .expect("policies")
            .names(),
        ["api"]
    );
    assert_eq!(
        Policies::from_toml(&format!("\u{feff}{toml}"))
            .expect("policies")
            .names(),
        ["api"]
    );
}

/// The application with plans by a header, and a policy with these settings outside of plans and in one with two an hour.
fn app_of_plans(common: &str, own: &str) -> Router {
    let file = format!(
        "plan = 'header:plan'\n[policies.api]\nlimit = '3/h'\nkey = 'constant:all'\n{common}\n\
         [plans.pro.api]\nlimit = '2/h'\n{own}"
    );
    let layer = Policies::from_toml(&file)
        .expect(&file)
        .layer(MemoryStore::new(), ["api"]);
    all_routes(layer.expect(&file))
}

#[tokio::test(start_paused = true)]
async fn requests_of_a_plan_wait_as_outside_of_plans_unless_it_says_otherwise() {
    let (ok, denied) = (StatusCode::OK, StatusCode::TOO_MANY_REQUESTS);
    for (common, own, expected) in [
        ("wait = '2h'", "", [ok, ok, ok, ok]),
        ("wait = '2h'", "wait = '0s'", [ok, ok, denied, denied]),
        ("wait = '2h'\nmax-waiting = 1", "", [ok, ok, ok, denied]),
        ("wait = '2h'\nmax-waiting = 1", "max-waiting = 9", [ok; 4]),
        ("wait = '2h'\nmax-waiting = 1", "wait = '0s'", [ok, ok, denied, denied]),
    ] {
        let app = app_of_plans(common, own);
        let request = async || send(&app, get("/login").header("plan", "pro")).await.status;
        let (a, b, c, d) = tokio::join!(request(), request(), request(), request());
        let mut statuses = [a, b, c, d];
        statuses.sort();
        assert_eq!(statuses, expected, "{common}: {own}");
    }
}

#[tokio::test]
async fn a_policy_of_a_plan_is_for_the_requests_that_it_is_for_outside_of_plans() {
    for (common, own, [get_login, post_login, get_user]) in [
        ("", "", [true; 3]),
        ("routes = '/login'", "", [true, true, false]),
        ("methods = 'POST'", "", [false, true, false]),
        ("routes = '/login'\nmethods = 'POST'", "", [false, true, false]),
        ("routes = '/login'", "routes = '/users/{id}'", [false, false, true]),
    ] {
        let app = app_of_plans(common, own);
        for (method, path, is_counted) in [
            (Method::GET, "/login", get_login),
            (Method::POST, "/login", post_login),
            (Method::GET, "/users/42", get_user),
        ] {
            let request = get(path).method(&method).header("plan", "pro");
            let is_met = send(&app, request).await.headers.contains_key("ratelimit");
            assert_eq!(is_met, is_counted, "{common}, {own}: {method} {path}");
        }
    }
}

/// Units are taken ahead of nothing that bans.
#[test]
fn a_ban_outside_of_plans_is_not_for_a_plan_that_takes_units_ahead() {
    let _ = app_of_plans("ban = { after = 1, within = '1h' }", "");
    let file = "plan = 'header:plan'\n[policies.api]\nlimit = '3/h'\nkey = 'ip'\nban = { after = 10, within = '1h' }\n\
                [plans.pro.api]\nlimit = '1000/s prefetch 50ms'";
    let policies = Policies::from_toml(file).expect(file);
    assert!(policies.layer(MemoryStore::new(), ["api"]).is_ok());
}

#[tokio::test]
async fn a_registered_extension_is_the_key_of_its_name() {
    let policies = registered(described("").clone());
    assert!(policies.get("api").is_ok(), "registered and not used");

    let policies = registered(Policies::from_toml(PLANS).unwrap());
    let store = MemoryStore::new();
    let app = all_routes(RateLimitLayer::new(store.clone(), policies.get("api").unwrap()));
    send(&app, get("/login").extension(User { id: 42, plan: "" })).await;

    let by_hand = Policy::new("api", tower_quota::SlidingLog::per_minute(10));
    let counted = Limiter::new(store, by_hand)
        .peek(Key::extension("user", 42))
        .await
        .unwrap();
    assert_eq!(counted.remaining(), 9);

    // As in code, a request without it is refused.
    assert_eq!(
        send(&app, get("/login")).await.status,
        StatusCode::INTERNAL_SERVER_ERROR
    );
}

#[test]
fn an_extension_that_is_not_registered_is_an_error_that_names_the_call() {
    let policies = Policies::from_toml(PLANS).unwrap();
    let error = policies.get("api").unwrap_err().to_string();
    assert!(
        error.contains("the policy `api`") && error.contains("`with_extension(\"user\","),
        "{error}"
    );
    let error = policies.unkeyed("api").unwrap_err().to_string();
    assert!(error.contains("`with_extension(\"plan\","), "{error}");
    let misspelled = Policies::from_toml("policies.api = { limit = '1/min', key = 'extension:usr' }").unwrap();
    let misspelled = misspelled.with_extension("user", |user: &User| user.id);
    let error = misspelled.get("api").unwrap_err().to_string();
    assert!(error.contains("(registered: `user`); correct the name"), "{error}");

    let live = described("");
    assert!(live.get("api").is_ok());
    let error = live
        .replace(&Policies::from_toml(PLANS).unwrap())
        .unwrap_err()
        .to_string();
    assert!(error.contains("`with_extension("), "{error}");
}

#[tokio::test]
async fn a_limiter_takes_no_routes_and_a_reload_that_adds_them_is_refused() {
    let scoped = || Policies::from_toml("policies.api = { limit = \"20/min\", routes = \"/login\" }").unwrap();
    let error = Limiter::try_new(MemoryStore::new(), scoped().unkeyed("api").unwrap()).unwrap_err();
    for part in ["`routes`", "`api`", "leave it out"] {
        assert!(error.to_string().contains(part), "{error}");
    }

    let live = described("");
    let limiter = Limiter::new(MemoryStore::new(), live.unkeyed("api").unwrap());
    let error = live.replace(&scoped()).unwrap_err();
    for part in ["`routes`", "`api`", "leave it out"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    for remaining in [9, 8] {
        assert_eq!(limiter.check("42").await.unwrap().remaining(), remaining);
    }

    live.replace(&Policies::from_toml("policies.api.limit = \"20/min\"").unwrap())
        .unwrap();
    assert_eq!(limiter.check("42").await.unwrap().remaining(), 17);
}
