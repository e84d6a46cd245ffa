//! Files of limits.

use http::{Request, StatusCode};
use http_body_util::Empty;
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{Decision, Limit, MemoryStore, Policies, RateLimitLayer, SlidingLog};

const FILE: &str = r#"
[policies.say-hi]
limit = "sliding-log 2/30s"
key = ["header:x-user-id or constant:nobody", "path"]
"#;

/// The statuses of some requests for `/` by users, under the policy `say-hi` of a file.
async fn statuses(policies: &Policies, users: &[&str]) -> Vec<StatusCode> {
    let layer = RateLimitLayer::new(MemoryStore::new(), policies.get("say-hi").unwrap());
    let service = layer.layer(service_fn(async |_: Request<Empty<bytes::Bytes>>| {
        Ok::<_, std::convert::Infallible>(http::Response::new(Empty::<bytes::Bytes>::new()))
    }));

    let mut statuses = Vec::new();
    for user in users {
        let request = Request::get("/").header("x-user-id", *user).body(Empty::new()).unwrap();
        statuses.push(service.clone().oneshot(request).await.unwrap().status());
    }
    statuses
}

const OK: StatusCode = StatusCode::OK;
const TOO_MANY: StatusCode = StatusCode::TOO_MANY_REQUESTS;

#[tokio::test]
async fn a_policy_from_a_file_limits_by_its_key() {
    let policies = Policies::from_toml(FILE).unwrap();
    assert_eq!(statuses(&policies, &["a", "a", "a", "b"]).await, [OK, OK, TOO_MANY, OK]);
}

#[tokio::test]
async fn a_cost_from_a_file_counts() {
    let policies = Policies::from_toml(&format!("{FILE}cost = 2\n")).unwrap();
    assert_eq!(statuses(&policies, &["a", "a"]).await, [OK, TOO_MANY]);
}

#[tokio::test]
async fn the_switch_turns_all_of_it_off() {
    for file in [format!("enabled = false\n{FILE}"), format!("{FILE}enabled = false\n")] {
        let policies = Policies::from_toml(&file).unwrap();
        assert_eq!(statuses(&policies, &["a", "a", "a"]).await, [OK, OK, OK], "{file}");
    }
}

#[tokio::test]
async fn a_policy_that_is_off_asks_for_no_key() {
    let file = "enabled = false\n[policies.say-hi]\nlimit = \"sliding-log 2/30s\"\nkey = \"header:x-user-id\"\n";
    let policy = Policies::from_toml(file).unwrap().get("say-hi").unwrap();
    let layer = RateLimitLayer::new(MemoryStore::new(), policy);
    let service = layer.layer(service_fn(async |request: Request<Empty<bytes::Bytes>>| {
        // Nothing was checked, so nothing is said.
        assert!(request.extensions().get::<Decision>().is_none());
        Ok::<_, std::convert::Infallible>(http::Response::new(Empty::<bytes::Bytes>::new()))
    }));

    let response = service.oneshot(Request::new(Empty::new())).await.unwrap();
    assert_eq!(response.status(), OK);
}

#[test]
fn json_says_the_same_as_toml() {
    let json = r#"{"policies": {"say-hi": {"limit": "sliding-log 2/30s", "key": "ip", "failure-mode": "closed"}}}"#;
    let policies = Policies::from_json(json).unwrap();
    let limit = SlidingLog::new(2, std::time::Duration::from_secs(30));
    assert_eq!(policies.get("say-hi").unwrap().limit(), &Limit::from(limit));
}

#[test]
fn a_wrong_line_is_shown() {
    for (wrong, shown, taught) in [
        ("limit = \"sliding-log 2/30 s\"", "2/30 s", "`sliding-log 100/min`"),
        ("limit = \"2 per minute\"", "^^^^", "`sliding-log 100/min`"),
        ("limit = \"sliding-log 2/30s\"\nkeys = \"ip\"", "keys", "unknown field"),
        (
            "limit = \"sliding-log 2/30s\"\nkey = \"address\"",
            "address",
            "`constant:all`",
        ),
        ("limit = \"sliding-log 2/30s\"\nkey = []", "[]", "`constant:all`"),
        (
            "limit = \"sliding-log 2/30s\"\nkey = \"header:x user\"",
            "x user",
            "`header:x-user-id`",
        ),
        ("limit = \"sliding-log 2/30s\"\ncost = 0", "cost = 0", "at least 1"),
        (
            "limit = \"sliding-log 2/30s\"\nfailure-mode = \"ajar\"",
            "ajar",
            "`closed`",
        ),
        ("key = \"ip\"", "line 2", "missing field `limit`"),
    ] {
        let error = Policies::from_toml(&format!("# limits\n[policies.say-hi]\n{wrong}\n"))
            .unwrap_err()
            .to_string();
        for expected in [shown, taught, "^"] {
            assert!(error.contains(expected), "`{expected}` is not in:\n{error}");
        }
    }
}

#[test]
fn a_name_that_stands_twice_is_an_error_with_its_place() {
    let twice = format!("{FILE}[policies.say-hi]\nlimit = \"unlimited\"\n");
    let error = Policies::from_toml(&twice).unwrap_err().to_string();
    assert!(error.contains("duplicate") && error.contains("line 5"), "{error}");

    let twice = "{\"policies\": {\n\"a\": {\"limit\": \"unlimited\"},\n\"a\": {\"limit\": \"unlimited\"}}}";
    let error = Policies::from_json(twice).unwrap_err().to_string();
    assert!(
        error.contains("`a` stands twice") && error.contains("line 3"),
        "{error}"
    );
}

#[test]
fn a_name_that_is_none_is_an_error_with_its_place() {
    let error = Policies::from_toml("[policies.\"Say Hi\"]\nlimit = \"unlimited\"")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("such as `say-hi`") && error.contains("line 1"),
        "{error}"
    );
}

#[test]
fn a_policy_that_the_file_lacks_is_an_error_that_names_those_it_has() {
    let policies = Policies::from_toml(FILE).unwrap();
    assert_eq!(
        policies.get("login").unwrap_err().to_string(),
        "there is no policy `login`; there are `say-hi`"
    );
}

#[test]
fn a_policy_without_a_key_is_for_code_that_has_one() {
    let policies = Policies::from_toml("policies.mail.limit = \"token-bucket 1/s\"").unwrap();
    assert!(policies.get("mail").unwrap_err().to_string().contains("key = \"ip\""));
    assert!(policies.unkeyed("mail").is_ok());
}

#[test]
fn a_file_that_is_not_there_is_named() {
    for path in ["no/such/limits.toml", "limits.yaml"] {
        let error = Policies::from_file(path).unwrap_err().to_string();
        assert!(error.contains(path), "{error}");
    }
}

#[test]
fn the_file_of_the_example_is_a_right_one() {
    let policies = Policies::from_file(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/limits.toml")).unwrap();
    let names: Vec<_> = policies.names().collect();
    assert_eq!(names, ["leave-requests", "say-hi", "search"]);
    for name in names {
        assert!(policies.get(name).is_ok());
    }
}
