//! Keys that operators enter, and the policies in which they can be.

use axum::{Router, routing::get as route};
use http::{Request, StatusCode};
use serde_json::{Value, json};
use tower_quota::{
    Admin, FailureMode, Key, KeyExtractor, Limiter, MemoryStore, Policies, Policy, RateLimitLayer, SlidingLog, key,
};

use super::router::{MINUTE, Operator};
use crate::support::{Broken, get_from, send};

/// The user that authentication has found.
#[derive(Clone)]
struct User(&'static str);

fn policy(name: &'static str, key: impl KeyExtractor) -> Policy {
    Policy::new(name, SlidingLog::per_minute(2)).key(key)
}

fn user() -> impl KeyExtractor {
    key::extension("user", |user: &User| user.0)
}

fn policies() -> Vec<Policy> {
    vec![
        policy("by-header", key::header("X-Tenant")),
        policy("by-user", user()),
        policy("by-network", key::ip().ipv6_prefix(56)),
        policy("by-either", user().or(key::ip())),
        policy("by-both", (key::ip(), key::path().ignore_case())),
        policy("by-method", (key::constant("all"), key::method())),
        policy("by-route", (user(), key::route())),
        policy("in-all", key::constant("all")),
        policy("by-name", key::extension("用户", |user: &User| user.0)),
    ]
}

fn operator() -> Operator {
    Operator::of(&RateLimitLayer::new(MemoryStore::new(), policies()))
}

impl Operator {
    async fn search(&self, text: &str) -> Value {
        let response = self.post("/search", &json!({ "text": text }).to_string(), &[]).await;
        assert_eq!(response.status, StatusCode::OK, "{}", response.json());
        response.json()
    }

    /// The policies and keys of a search, complete or not.
    async fn keys(&self, text: &str, list: &str) -> Vec<String> {
        let found = self.search(text).await;
        let keys = found[list].as_array().expect("a list").iter();
        keys.map(|key| format!("{} {}", key["policy"].as_str().unwrap(), key["key"].as_str().unwrap()))
            .collect()
    }
}

#[tokio::test(start_paused = true)]
async fn the_report_has_what_the_keys_of_a_policy_are_made_of() {
    let report = operator().report().await;
    let policies = report["policies"].as_array().expect("a list").iter();
    let forms: Vec<_> = policies.map(|policy| policy["key"].as_str().expect("text")).collect();
    assert_eq!(
        forms,
        [
            "header:x-tenant=..",
            "ext:user=..",
            "ip=..",
            "ext:user=.. or ip=..",
            "ip=..|path=/..",
            "const=all|(method=.. or other-method=)",
            "ext:user=..|(route=/.. or unmatched=)",
            "const=all",
            "ext:用户=..",
        ]
    );

    let limiter = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(3)));
    assert_eq!(Operator::of_limiter(&limiter).policy().await["key"], "any key");
}

#[tokio::test(start_paused = true)]
async fn the_keys_of_a_file_are_known_and_those_of_a_reload() {
    let text = |key: &str| format!("policies.api = {{ limit = 'sliding-log 3/h', key = {key} }}");
    let parse = |key: &str| Policies::from_toml(&text(key)).expect("a file");
    let policies = parse("['header:x-tenant or ip', 'path']");
    let layer = policies.layer(MemoryStore::new(), ["api"]).expect("a policy");
    let operator = Operator::of(&layer);
    assert_eq!(operator.policy().await["key"], "(header:x-tenant=.. or ip=..)|path=/..");
    policies.replace(&parse("'ip'")).expect("a file");
    assert_eq!(operator.policy().await["key"], "ip=..");
    assert_eq!(operator.get("api", "ip=192.0.2.1").await.status, StatusCode::OK);
    assert_eq!(
        operator.get("api", "ip=192.0.2.1|path=/").await.status,
        StatusCode::BAD_REQUEST
    );
}

#[tokio::test(start_paused = true)]
async fn a_key_that_no_request_of_the_policy_has_is_refused_with_the_fix() {
    let operator = operator();
    for (policy, key, fix) in [
        ("by-header", "ip=203.0.113.7", "are made of `header:x-tenant=..`"),
        ("by-header", "header:x-other=1", "are made of `header:x-tenant=..`"),
        (
            "by-header",
            "header:x-tenant=1|path=/",
            "are made of `header:x-tenant=..`",
        ),
        ("by-user", "key=alice", "are made of `ext:user=..`"),
        ("by-network", "ip=2001:db8:1:2::/64", "; use `ip=2001:db8:1::/56`"),
        (
            "by-both",
            "ip=203.0.113.7",
            "; use one such as `ip=203.0.113.7|path=/..`",
        ),
        ("by-both", "path=/|ip=203.0.113.7", "; use `ip=203.0.113.7|path=/`"),
        (
            "by-method",
            "const=some|method=GET",
            "are made of `const=all|(method=.. or other-method=)`",
        ),
    ] {
        for response in [
            operator.get(policy, key).await,
            operator.reset(policy, key).await,
            operator.set_override(policy, key, "sliding-log 5/min", "3d").await,
        ] {
            assert_eq!(response.status, StatusCode::BAD_REQUEST, "{policy}: {key}");
            let error = response.json();
            let text = error["error"].as_str().expect("text");
            assert!(text.contains(fix) && text.contains(policy), "{text}");
        }
    }
    for (policy, key) in [
        ("by-header", "header:x-tenant=1"),
        ("by-header", "hash=0123456789abcdef0123456789abcdef"),
        ("by-either", "ip=203.0.113.7"),
        ("by-either", "ext:user=7"),
        ("by-network", "ip=2001:db8:1::/56"),
        ("by-network", "ip=unix"),
        ("by-method", "const=all|other-method="),
        ("by-route", "ext:user=7|unmatched="),
        ("in-all", "const=all"),
    ] {
        assert_eq!(
            operator.get(policy, key).await.status,
            StatusCode::OK,
            "{policy}: {key}"
        );
    }
}

/// A limiter on the same store has set it, and the operator sees it.
#[tokio::test(start_paused = true)]
async fn an_override_of_a_key_of_another_form_is_selected_and_ends() {
    for show_keys in [false, true] {
        let store = MemoryStore::new();
        let layer = RateLimitLayer::new(store.clone(), [policy("api", key::ip()), policy("other", key::ip())]);
        let limiter = Limiter::new(store, Policy::new("api", SlidingLog::per_minute(2)));
        let admin = Admin::new().layer(&layer).show_keys(show_keys);
        let operator = Operator(admin.router_behind_authentication());
        let set = async || {
            let set = limiter.override_limit("api", "alice", SlidingLog::per_minute(9), MINUTE);
            set.await.expect("a memory store replies");
            operator.report().await["overrides"][0]["subject"].take()
        };
        let subject = set().await;
        let subject = subject.as_str().expect("text");
        assert_eq!(subject == "key=alice", show_keys);
        assert_eq!(operator.counts("api", subject).await["quota"], 9, "{show_keys}");
        assert_eq!(operator.reset("api", subject).await.status, StatusCode::OK);
        let changed = operator.set_override("api", subject, "sliding-log 8/min", "1h").await;
        assert_eq!(changed.json()["counts"][0]["quota"], 8, "{show_keys}");
        assert_ne!(operator.get("other", subject).await.status, StatusCode::OK);
        assert_eq!(operator.end_override("api", subject).await.status, StatusCode::OK);
        assert!(limiter.overrides().is_empty());

        // By its key, which the operator knows: also one that this process does not have in its list yet.
        set().await;
        for _ in 0..2 {
            assert_eq!(operator.end_override("api", "key=alice").await.status, StatusCode::OK);
            assert!(limiter.overrides().is_empty());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_subject_of_before_a_reload_that_changed_the_keys_is_selected() {
    let parse = |key: &str| {
        let text = format!("policies.api = {{ limit = 'sliding-log 1/h', key = '{key}' }}");
        Policies::from_toml(&text).expect("a file")
    };
    let policies = parse("ip");
    let layer = policies.layer(MemoryStore::new(), ["api"]).expect("a policy");
    let operator = Operator::of(&layer);
    let app = Router::new().route("/", route(async || "hi")).layer(layer);
    for _ in 0..3 {
        send(&app, get_from("192.0.2.1", "/")).await;
    }
    policies.replace(&parse("header:x-tenant")).expect("a file");
    let hash = operator.policy().await["denials"]["subjects"][0]["subject"].take();
    let hash = hash.as_str().expect("text");
    let subject = operator.get("api", hash).await.json();
    assert_eq!(subject["denied"]["denials"], 2, "{subject}");
    assert_eq!(operator.keys(hash, "found").await, [format!("api {hash}")]);
    assert_eq!(operator.get("api", "ip=192.0.2.1").await.status, StatusCode::OK);
    let other = operator.get("api", "ip=192.0.2.2").await;
    assert_eq!(other.status, StatusCode::BAD_REQUEST);
}

#[tokio::test(start_paused = true)]
async fn a_key_of_any_form_fits_where_a_limiter_or_an_extractor_of_the_application_has_the_policy() {
    struct Own;
    impl KeyExtractor for Own {
        fn extract(&self, _: &http::request::Parts) -> Result<Option<Key>, key::KeyError> {
            Ok(Some(Key::from(42)))
        }
    }
    assert_eq!(Own.form().to_string(), "any key");

    let store = MemoryStore::new();
    let layer = RateLimitLayer::new(
        store.clone(),
        [policy("api", key::ip()), policy("own", (Own, key::ip()))],
    );
    let limiter = Limiter::new(store, Policy::new("api", SlidingLog::per_minute(2)));
    let of_both = Operator(
        Admin::new()
            .layer(&layer)
            .limiter(&limiter)
            .router_behind_authentication(),
    );
    assert_eq!(of_both.get("api", "key=42").await.status, StatusCode::OK);
    assert_eq!(of_both.get("own", "key=42|ip=192.0.2.1").await.status, StatusCode::OK);
    assert_eq!(of_both.get("own", "ip=192.0.2.1").await.status, StatusCode::BAD_REQUEST);
    assert_eq!(of_both.report().await["policies"][0]["key"], "any key or ip=..");
    assert_eq!(
        Operator::of(&layer).get("api", "key=42").await.status,
        StatusCode::BAD_REQUEST
    );
}

#[tokio::test(start_paused = true)]
async fn text_that_is_not_ascii_is_entered_and_shown_as_it_is() {
    let limiter = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(1)));
    let operator = Operator(
        Admin::new()
            .limiter(&limiter)
            .show_keys(true)
            .router_behind_authentication(),
    );
    for _ in 0..2 {
        let _ = limiter
            .check(Key::extension("用户", "张三"))
            .await
            .expect("a memory store replies");
    }
    let denied = &operator.policy().await["denials"]["subjects"][0]["subject"];
    assert_eq!(denied, "ext:用户=张三");
    for text in ["ext:用户=张三", "ext:^E7^94^A8^E6^88^B7=^E5^BC^A0^E4^B8^89"] {
        let subject = operator.get("mails", text).await.json();
        assert_eq!((&subject["key"], &subject["subject"]), (denied, denied));
        assert_eq!(subject["counts"][0]["remaining"], 0);
    }
    let overridden = operator
        .set_override("mails", "ext:用户=张三", "sliding-log 5/h", "3d")
        .await
        .json();
    assert_eq!(overridden["override"]["subject"], *denied);
    assert_eq!(operator.report().await["overrides"][0]["subject"], *denied);
    // Bytes that are no text.
    let _ = limiter
        .check(Key::header("x", b"\xE6\x9D"))
        .await
        .expect("a memory store replies");
    let subject = operator.get("mails", "header:x=^E6^9D").await.json();
    assert_eq!(
        (&subject["key"], &subject["counts"][0]["remaining"]),
        (&json!("header:x=^E6^9D"), &json!(0))
    );
}

#[tokio::test(start_paused = true)]
async fn a_search_finds_the_policies_whose_keys_can_be_made_of_a_value() {
    let operator = operator();
    for (text, found) in [
        (
            "alice",
            &[
                "by-header header:x-tenant=alice",
                "by-user ext:user=alice",
                "by-either ext:user=alice",
                "by-name ext:用户=alice",
            ][..],
        ),
        ("user=alice", &["by-user ext:user=alice", "by-either ext:user=alice"]),
        (
            "ext:user=alice",
            &["by-user ext:user=alice", "by-either ext:user=alice"],
        ),
        ("X-Tenant=alice", &["by-header header:x-tenant=alice"]),
        ("用户=张三", &["by-name ext:用户=张三"]),
        ("ext:用户=张 三", &["by-name ext:用户=张^20三"]),
        (
            "ip=203.0.113.7",
            &["by-network ip=203.0.113.7", "by-either ip=203.0.113.7"],
        ),
        (
            "ip=2001:db8:1:2::3",
            &["by-network ip=2001:db8:1::/56", "by-either ip=2001:db8:1:2::/64"],
        ),
        // A network of many keys is none of them.
        ("ip=203.0.113.0/24", &[]),
        ("ip=10.0.0.0/8", &[]),
        ("ip=2001:db8::/32", &[]),
        ("ip=2001:db8:1:2::/60", &["by-network ip=2001:db8:1::/56"]),
        (
            "ip=203.0.113.7/32",
            &["by-network ip=203.0.113.7", "by-either ip=203.0.113.7"],
        ),
        (
            " 203.0.113.7 | /Login ",
            &[
                "by-both ip=203.0.113.7|path=/login",
                "by-route ext:user=203.0.113.7|route=/Login",
            ],
        ),
        ("path=/Login|ip=203.0.113.7", &["by-both ip=203.0.113.7|path=/login"]),
        ("get", &[]),
        ("method=get", &["by-method const=all|method=GET"]),
        ("all", &[]),
        ("const=all", &["in-all const=all"]),
        ("ip=nowhere", &[]),
        ("header:x-other=alice", &[]),
        // No component has this name, so it is a part of the value.
        (
            "YWxpY2U=",
            &[
                "by-header header:x-tenant=YWxpY2U=",
                "by-user ext:user=YWxpY2U=",
                "by-either ext:user=YWxpY2U=",
                "by-name ext:用户=YWxpY2U=",
            ],
        ),
        (
            "auth0|5f7c",
            &[
                "by-header header:x-tenant=auth0^7C5f7c",
                "by-user ext:user=auth0^7C5f7c",
                "by-either ext:user=auth0^7C5f7c",
                "by-name ext:用户=auth0^7C5f7c",
            ],
        ),
    ] {
        let keys = operator.keys(text, "found").await;
        let expected = match text {
            // Names are text too.
            "get" | "all" => vec!["by-header", "by-user", "by-either", "by-name"],
            _ => Vec::new(),
        };
        if expected.is_empty() {
            assert_eq!(keys, found, "{text}");
        } else {
            for policy in expected {
                assert!(keys.iter().any(|key| key.starts_with(policy)), "{text}: {keys:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_denied_customer_is_found_by_a_value_with_delimiters_and_by_a_key_of_many_components() {
    let limiter = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_minute(1)));
    let operator = Operator::of_limiter(&limiter);
    let many = (0..11).fold(Key::from(""), |key, part| key.and(Key::from(part)));
    for key in [Key::from("q=1"), Key::from("auth0|5f7c"), many.clone()] {
        for _ in 0..2 {
            drop(limiter.check(key.clone()).await.expect("a memory store replies"));
        }
    }
    for (text, key) in [
        ("q=1", "key=q=1"),
        (" auth0|5f7c ", "key=auth0^7C5f7c"),
        (many.as_str(), many.as_str()),
    ] {
        let found = operator.search(text).await["found"].take();
        assert_eq!(found[0]["key"], key);
        assert_eq!(found[0]["denied"]["denials"], 1, "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_hash_finds_each_policy_with_such_keys() {
    let burst = Policy::new("burst", SlidingLog::per_minute(1)).key(key::ip());
    let layer = RateLimitLayer::new(
        MemoryStore::new(),
        [
            burst,
            policy("daily", key::ip()),
            policy("in-all", key::constant("all")),
        ],
    );
    let operator = Operator::of(&layer);
    let app = Router::new().route("/", route(async || "hi")).layer(layer);
    for _ in 0..2 {
        send(&app, get_from("192.0.2.1", "/")).await;
    }
    let hash = operator.policy().await["denials"]["subjects"][0]["subject"].take();
    let hash = hash.as_str().expect("text");
    assert_eq!(
        operator.keys(hash, "found").await,
        [format!("burst {hash}"), format!("daily {hash}")]
    );
    assert_eq!(operator.counts("daily", hash).await["remaining"], 1);
    assert_eq!(operator.get("in-all", hash).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test(start_paused = true)]
async fn a_search_names_what_else_a_key_is_made_of() {
    let operator = operator();
    assert_eq!(
        operator.keys("ip=203.0.113.7", "incomplete").await,
        ["by-both ip=203.0.113.7|path=/.."]
    );
    assert_eq!(
        operator.keys("user=alice", "incomplete").await,
        ["by-route ext:user=alice|(route=/.. or unmatched=)"]
    );
    assert_eq!(operator.keys("user=alice|/a", "incomplete").await, [""; 0]);
    assert_eq!(
        operator.keys("user=alice|/a", "found").await,
        ["by-route ext:user=alice|route=/a"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_complete_key_is_found_without_the_incomplete_ones_of_its_policy() {
    let policy = policy("by-user", user().or((user(), key::path())));
    let operator = Operator::of(&RateLimitLayer::new(MemoryStore::new(), policy));
    assert_eq!(operator.keys("alice", "found").await, ["by-user ext:user=alice"]);
    assert_eq!(operator.keys("alice", "incomplete").await, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_search_has_eight_values_and_finds_eight_keys_of_a_policy() {
    let header = |nth: u8| key::header(format!("x-{nth}"));
    let any = (1..10).fold(header(0), |key, nth| key.or(header(nth)));
    let operator = Operator::of(&RateLimitLayer::new(MemoryStore::new(), policy("by-any", any)));
    assert_eq!(operator.keys("alice", "found").await.len(), 8);

    operator.search("a|b|c|d|e|f|g|h").await;
    // More of them are a key, of another form.
    let key = vec!["key=x"; 40].join("|");
    assert_eq!(operator.keys(&key, "found").await, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_key_of_a_policy_that_two_layers_share_is_found_once() {
    let store = MemoryStore::new();
    let layers = [(); 2].map(|()| RateLimitLayer::new(store.clone(), policy("api", key::ip())));
    let admin = Admin::new().layer(&layers[0]).layer(&layers[1]);
    let operator = Operator(admin.router_behind_authentication());
    assert_eq!(operator.keys("192.0.2.1", "found").await, ["api ip=192.0.2.1"]);
}

#[tokio::test(start_paused = true)]
async fn a_search_has_the_state_of_each_key() {
    let layer = RateLimitLayer::new(MemoryStore::new(), policies().remove(1));
    let operator = Operator::of(&layer);
    let app = Router::new().route("/", route(async || "hi")).layer(layer);
    // A long key is counted by its hash.
    for user in ["alice", "x".repeat(400).leak()] {
        for _ in 0..3 {
            send(&app, Request::get("/").extension(User(user))).await;
        }
        let found = operator.search(user).await["found"][0].take();
        assert_eq!(found, operator.get("by-user", &format!("ext:user={user}")).await.json());
        assert_eq!(
            (&found["denied"]["denials"], &found["counts"][0]["allowed"]),
            (&json!(1), &json!(false))
        );
        assert_eq!(found["counts"][0]["retry_after_seconds"], MINUTE.as_secs_f64());
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_does_not_hide_the_other_policies_of_a_search() {
    let broken = Limiter::new(
        Broken::default(),
        Policy::new("broken", SlidingLog::per_minute(2)).failure_mode(FailureMode::Open),
    );
    let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_minute(2)));
    let operator = Operator(
        Admin::new()
            .limiter(&broken)
            .limiter(&mails)
            .router_behind_authentication(),
    );
    let result = operator.search("42").await;
    assert_eq!(result["found"][0]["policy"], "mails");
    let failed = &result["failed"][0];
    assert_eq!(
        (&failed["policy"], &failed["key"]),
        (&json!("broken"), &json!("key=42"))
    );
    assert!(
        failed["error"]
            .as_str()
            .is_some_and(|error| error.contains("the store of the counts fails")),
        "{failed}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_mistake_in_a_search_is_an_error_with_the_fix() {
    let operator = operator();
    for (body, fix) in [
        ("{}", "`text`, such as `203.0.113.7`"),
        (r#"{"text":"  "}"#, "`user=alice`"),
        (r#"{"text":"a|b|c|d|e|f|g|h|i"}"#, "at most 8 values"),
        (
            r#"{"text":"keyed=0123456789abcdef0123456789abcdef"}"#,
            "write the key itself",
        ),
        ("[]", r#"{"text":"203.0.113.7"}"#),
    ] {
        let response = operator.post("/search", body, &[]).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST, "{body}");
        let error = response.json();
        assert!(
            error["error"].as_str().is_some_and(|error| error.contains(fix)),
            "{error}"
        );
    }
}

/// Each of its parts could end the key of each function.
#[tokio::test(start_paused = true)]
async fn a_key_of_16_kb_holds() {
    let any = || key::from_fn(|_| Some(1));
    let policy = policy("by-any", (any(), any(), any()));
    let operator = Operator::of(&RateLimitLayer::new(MemoryStore::new(), policy));
    let body = json!({ "policy": "by-any", "key": vec!["key=x"; 2_600].join("|") }).to_string();
    for path in ["/subject", "/reset"] {
        let response = operator.post(path, &body, &[]).await;
        assert_eq!(response.status, StatusCode::OK, "{path}: {}", response.json());
    }
}

/// The time for which it is parsed and compared must not grow faster than its length, and the response does not repeat it.
#[tokio::test(start_paused = true)]
async fn a_search_of_16_kb_holds() {
    let operator = operator();
    for part in [
        "x",
        "|",
        "=",
        "x=",
        "x|",
        "ip=1|",
        "ip=203.0.113.7|path=/|",
        ":",
        "::1|",
        "%7c",
        "{",
        "用",
        "/../",
        "hash=0|",
        "\"",
        "\0",
        " or ",
    ] {
        let length = json!(part).to_string().len() - 2;
        let text = part.repeat(16_000 / length);
        let body = json!({ "text": text }).to_string();
        let response = operator.post("/search", &body, &[]).await;
        let is_key = response.status == StatusCode::OK;
        assert!(is_key || response.status == StatusCode::BAD_REQUEST, "{part}");
        let most = if is_key { 40 * text.len() } else { 1_000 };
        assert!(response.body.len() < most, "{part}: {} bytes", response.body.len());
    }
}
