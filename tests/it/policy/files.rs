//! Files of limits.

use std::{
    process::Command,
    sync::{Arc, Mutex},
};

use axum::{Router, body::Body, routing::any};
use http::{Request, StatusCode};
use http_body_util::Empty;
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    Decision, FailureMode, Limit, MemoryStore, Policies, Policy, RateLimitLayer, SlidingLog,
    key::{PeerAddr, UnixPeer},
    store::{self, Store, StoreFuture},
};

const FILE: &str = r#"
[policies.say-hi]
limit = "sliding-log 2/30s"
key = ["header:x-user-id or constant:none", "path"]
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
async fn a_malformed_key_is_refused_instead_of_replaced_by_the_alternative_in_the_file() {
    let policies = Policies::from_toml(FILE).unwrap();
    let too_long = "a".repeat(4_097);
    assert_eq!(statuses(&policies, &[&too_long]).await, [StatusCode::BAD_REQUEST]);
}

#[tokio::test]
async fn a_cost_from_a_file_counts() {
    let policies = Policies::from_toml(&format!("{FILE}cost = 2\n")).unwrap();
    assert_eq!(statuses(&policies, &["a", "a"]).await, [OK, TOO_MANY]);
}

#[tokio::test]
async fn a_policy_that_observes_in_a_file_denies_nothing() {
    let mode = |mode| Policies::from_toml(&format!("{FILE}mode = \"{mode}\"\n")).unwrap();
    assert_eq!(statuses(&mode("observe"), &["a", "a", "a"]).await, [OK, OK, OK]);
    assert_eq!(statuses(&mode("enforce"), &["a", "a", "a"]).await, [OK, OK, TOO_MANY]);
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
        let decision = request.extensions().get::<Decision>().unwrap();
        assert_eq!((decision.is_allowed(), decision.policies().count()), (true, 0));
        Ok::<_, std::convert::Infallible>(http::Response::new(Empty::<bytes::Bytes>::new()))
    }));

    let response = service.oneshot(Request::new(Empty::new())).await.unwrap();
    assert_eq!(response.status(), OK);
}

#[test]
fn json_is_read_as_toml_is() {
    let json = r#"{"policies": {"say-hi": {"limit": "sliding-log 2/30s", "key": "ip", "failure-mode": "closed"}}}"#;
    let policies = Policies::from_json(json).unwrap();
    let limit = SlidingLog::new(2, std::time::Duration::from_secs(30));
    assert_eq!(policies.get("say-hi").unwrap().limit(), Some(&Limit::from(limit)));
}

#[test]
fn a_wrong_line_is_shown() {
    for (wrong, shown, taught) in [
        ("limit = \"sliding-log 2/30 t\"", "2/30 t", "`sliding-log 100/min`"),
        ("limit = \"2 in a minute\"", "^^^^", "`sliding-log 100/min`"),
        ("limit = \"10/s, 100/min\"", "^^^^", "a layer has several policies"),
        ("limit = [\"10/s\", \"100/min\"]", "^^^", "several are several policies"),
        ("limit = 100", "^^^", "one limit such as \"sliding-log 100/min\""),
        (
            "limit = \"100001/s\"",
            "100001/s",
            "`sliding-log 100001/s precision 1000`",
        ),
        ("limit = \"sliding-log 2/30s\"\nkeys = \"ip\"", "keys", "unknown field"),
        (
            "limit = \"sliding-log 2/30s\"\nkey = \"address\"",
            "address",
            "`constant:all`",
        ),
        (
            "limit = \"sliding-log 2/30s\"\nkey = \"ip, route\"",
            "ip, route",
            "`[\"ip\", \"path\"]`",
        ),
        ("limit = \"sliding-log 2/30s\"\nkey = []", "[]", "`constant:all`"),
        (
            "limit = \"sliding-log 2/30s\"\nkey = [[\"ip\"]]",
            "[[\"ip\"]]",
            "expected a string",
        ),
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
        (
            "limit = \"sliding-log 2/30s\"\nmode = \"watch\"",
            "watch",
            "expected `enforce` or `observe`",
        ),
        ("key = \"ip\"", "line 2", "missing field `limit`"),
    ] {
        let file = format!("# limits\n[policies.say-hi]\n{wrong}\n");
        let error = Policies::from_toml(&file).unwrap_err().to_string();
        for expected in [shown, taught, "^"] {
            assert!(error.contains(expected), "`{expected}` is not in:\n{error}");
        }
        assert!(!error.ends_with('\n'), "{error:?}");
        assert_same_fix_in_json(&file, taught);
    }
}

/// Serde would take the fields in their order.
#[test]
fn a_list_is_no_table() {
    for (list, expected) in [
        ("policies.api = ['1/s']", "a table with a `limit`"),
        ("[[policies.api]]\nlimit = '1/s'", "a table with a `limit`"),
        (
            "policies.api = { limit = '1/s', ban = [10, '1h'] }",
            "a table such as { after = 10, within = \"1h\" }",
        ),
        (
            "client-ip = ['x-real-ip', 'any-peer']\npolicies = {}",
            "a table with `header` and `trusted`",
        ),
        (
            "block = [['unknown']]\npolicies = {}",
            "a table with `networks`, `routes` or `methods`",
        ),
    ] {
        let error = Policies::from_toml(list).unwrap_err().to_string();
        let fault = format!("invalid type: sequence, expected {expected}");
        assert!(error.contains("line ") && error.contains(&fault), "{list}: {error}");
        assert_same_fix_in_json(list, &fault);
    }
    let error = Policies::from_json("[true]").unwrap_err().to_string();
    assert!(error.contains("expected a table with `policies`"), "{error}");
}

/// The configuration of an application.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    port: u16,
    limits: Policies,
}

#[tokio::test]
async fn policies_are_a_part_of_the_configuration_of_an_application() {
    let in_toml = "port = 3000\n\n[limits.client-ip]\nheader = \"x-forwarded-for\"\ntrusted = [\"10.0.0.0/8\"]\n\n\
                   [limits.policies.login]\nlimit = \"sliding-log 1/h\"\nkey = \"client-ip\"\n";
    let in_json = r#"{"port": 3000, "limits": {
        "client-ip": {"header": "x-forwarded-for", "trusted": ["10.0.0.0/8"]},
        "policies": {"login": {"limit": "sliding-log 1/h", "key": "client-ip"}}}}"#;
    let configs: [Config; 2] = [toml::from_str(in_toml).unwrap(), serde_json::from_str(in_json).unwrap()];
    for config in configs {
        assert_eq!(config.port, 3000);
        let fields = [("x-forwarded-for", "198.51.100.9")];
        assert_eq!(key_of(&config.limits, "10.0.0.2", &fields).await, "ip=198.51.100.9");
    }
}

#[test]
fn a_failure_mode_is_read_from_its_text() {
    let mode: FailureMode = serde_json::from_str("\"local 1/4\"").expect("a mode");
    assert_eq!(mode, FailureMode::local_share(1, 4));
    assert_eq!(serde_json::to_string(&mode).expect("a text"), "\"local 1/4\"");
    let error = serde_json::from_str::<FailureMode>("\"closd\"")
        .unwrap_err()
        .to_string();
    assert!(error.contains("closd") && error.contains("line 1"), "{error}");
}

#[test]
fn an_error_in_the_configuration_of_an_application_shows_its_place() {
    for (policy, expected) in [
        (
            "limit = \"sliding-log 2/30\"",
            ["line 3", "`sliding-log 100/min`", "2/30"],
        ),
        (
            "limit = \"unlimited\"\nkey = \"client-ip\"",
            ["line 2", "the policy `login`", "the table `client-ip`"],
        ),
        (
            "limit = \"unlimited\"\nkees = \"ip\"",
            ["line 4", "unknown field `kees`", "`key`"],
        ),
    ] {
        let text = format!("port = 3000\n[limits.policies.login]\n{policy}\n");
        let error = toml::from_str::<Config>(&text).unwrap_err().to_string();
        for expected in expected {
            assert!(error.contains(expected), "`{expected}` is not in:\n{error}");
        }
    }

    let error = serde_json::from_str::<Config>("{\"port\": 3000,\n\"limits\": 3}")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("line 2") && error.contains("a table with `policies`"),
        "{error}"
    );
}

#[test]
fn a_name_that_occurs_twice_is_an_error_with_its_place() {
    let twice = format!("{FILE}[policies.say-hi]\nlimit = \"unlimited\"\n");
    let error = Policies::from_toml(&twice).unwrap_err().to_string();
    assert!(error.contains("duplicate") && error.contains("line 5"), "{error}");

    let twice = "{\"policies\": {\n\"a\": {\"limit\": \"unlimited\"},\n\"a\": {\"limit\": \"unlimited\"}}}";
    let error = Policies::from_json(twice).unwrap_err().to_string();
    assert!(
        error.contains("`a` occurs twice") && error.contains("line 3"),
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
    let none = Policies::from_toml("policies = {}").unwrap();
    assert_eq!(
        none.get("login").unwrap_err().to_string(),
        "there is no policy `login`; the file has none"
    );
}

#[test]
fn a_policy_without_a_key_is_for_code_that_has_one() {
    let policies = Policies::from_toml("policies.mail.limit = \"token-bucket 1/s\"").unwrap();
    assert!(
        policies
            .get("mail")
            .unwrap_err()
            .to_string()
            .contains("a `key` such as `\"ip\"`")
    );
    assert!(policies.unkeyed("mail").is_ok());
}

#[test]
fn a_file_that_is_not_there_is_named() {
    for path in ["no/such/limits.toml", "limits.yaml"] {
        let error = Policies::from_file(path).unwrap_err().to_string();
        assert!(error.contains(path), "{error}");
    }
}

/// A FIFO would be waited for, and a device never ends.
#[test]
fn a_file_that_is_not_regular_or_is_large_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (make, fault)) in [
        ("mkfifo", "not a regular file"),
        ("mkdir", "not a regular file"),
        ("ln -s /dev/null", "not a regular file"),
        ("truncate -s 1048577", "more than 1 MiB"),
        ("truncate -s 1048576", "expected value"),
    ]
    .into_iter()
    .enumerate()
    {
        let path = folder.path().join(format!("{number}.json"));
        let mut words = make.split(' ');
        let made = Command::new(words.next().unwrap()).args(words).arg(&path).status();
        assert!(made.unwrap().success(), "{make}");
        let error = Policies::from_file(&path).unwrap_err().to_string();
        assert!(
            error.contains(fault) && error.contains(path.to_str().unwrap()),
            "{make}: {error}"
        );
    }
}

#[test]
fn the_file_of_the_example_is_a_right_one() {
    let policies = Policies::from_file(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/limits.toml")).unwrap();
    let names = policies.names();
    assert_eq!(names, ["exports", "login", "say-hi", "search"]);
    for name in names {
        // The key of this one is a function of the example.
        assert_eq!(policies.get(&name).is_ok(), name != "exports", "{name}");
    }
}

const BEHIND_A_PROXY: &str = r#"
[client-ip]
header = "x-forwarded-for"
trusted = ["10.0.0.0/8"]

[policies.login]
limit = "sliding-log 1/h"
key = "client-ip"
"#;

/// Records the keys of its requests.
#[derive(Clone, Default)]
struct Recorded(Arc<Mutex<Vec<String>>>);

impl Store for Recorded {
    fn decide(&self, requests: &[store::StoreRequest<'_>]) -> StoreFuture {
        let keys = requests.iter().flat_map(store::StoreRequest::charges);
        self.0
            .lock()
            .unwrap()
            .extend(keys.map(|charge| charge.key().to_string()));
        MemoryStore::new().decide(requests)
    }
}

/// The key, under the first policy of a file, of a request from `peer`, which is an address or `unix`, with these fields.
async fn key_of(policies: &Policies, peer: &str, fields: &[(&str, &str)]) -> String {
    let mut request = match peer {
        "unix" => Request::get("/login").extension(UnixPeer),
        _ => Request::get("/login").extension(PeerAddr(format!("{peer}:4711").parse().unwrap())),
    };
    for (name, value) in fields {
        request = request.header(*name, *value);
    }

    let recorded = Recorded::default();
    let policy = policies.get(&policies.names()[0]).unwrap();
    let service =
        RateLimitLayer::new(recorded.clone(), policy).layer(service_fn(async |_: Request<Empty<bytes::Bytes>>| {
            Ok::<_, std::convert::Infallible>(http::Response::new(Empty::<bytes::Bytes>::new()))
        }));
    let response = service.oneshot(request.body(Empty::new()).unwrap()).await.unwrap();
    assert_eq!(response.status(), OK);
    let keys = recorded.0.lock().unwrap();
    keys.join(" ")
}

#[tokio::test]
async fn a_file_describes_the_client_address() {
    let file = |table: &str| {
        let policies =
            format!("[client-ip]\n{table}\n[policies.a]\nlimit = \"sliding-log 1/h\"\nkey = \"client-ip\"\n");
        Policies::from_toml(&policies).unwrap()
    };
    let xff = [("x-forwarded-for", "1.2.3.4, 198.51.100.9, 10.0.0.3")];
    for (table, peer, fields, key) in [
        (
            "header = \"X-Forwarded-For\"\ntrusted = [\"10.0.0.0/8\"]",
            "10.0.0.2",
            &xff[..],
            "ip=198.51.100.9",
        ),
        (
            "header = \"x-forwarded-for\"\ntrusted = [\"10.0.0.0/8\"]",
            "203.0.113.7",
            &xff,
            "ip=203.0.113.7",
        ),
        (
            "header = \"x-forwarded-for\"\ntrusted = [\"10.0.0.0/8\"]\nhops = 1",
            "10.0.0.2",
            &xff,
            "ip=10.0.0.3",
        ),
        (
            "header = \"x-forwarded-for\"\ntrusted = \"any-peer\"\nhops = 2",
            "203.0.113.7",
            &xff,
            "ip=198.51.100.9",
        ),
        (
            "header = \"x-forwarded-for\"\ntrusted = \"unix-peer\"",
            "unix",
            &xff[..1],
            "ip=10.0.0.3",
        ),
        (
            "header = \"forwarded\"\ntrusted = [\"10.0.0.2\", \"fd00::/8\"]",
            "10.0.0.2",
            &[("forwarded", "for=198.51.100.9")],
            "ip=198.51.100.9",
        ),
        (
            "header = \"cf-connecting-ip\"\ntrusted = [\"10.0.0.0/8\"]",
            "10.0.0.2",
            &[("cf-connecting-ip", "198.51.100.9"), ("x-forwarded-for", "1.2.3.4")],
            "ip=198.51.100.9",
        ),
    ] {
        assert_eq!(key_of(&file(table), peer, fields).await, key, "{table}");
    }
}

#[tokio::test]
async fn the_table_of_the_client_address_may_follow_the_policies_and_be_json() {
    let (table, policies) = BEHIND_A_PROXY.trim_start().split_once("\n\n").unwrap();
    let turned = Policies::from_toml(&format!("{policies}\n{table}")).unwrap();
    let json = r#"{"policies": {"login": {"limit": "sliding-log 1/h", "key": "client-ip"}},
        "client-ip": {"header": "x-forwarded-for", "trusted": ["10.0.0.0/8"]}}"#;
    for policies in [turned, Policies::from_json(json).unwrap()] {
        let fields = [("x-forwarded-for", "198.51.100.9")];
        assert_eq!(key_of(&policies, "10.0.0.2", &fields).await, "ip=198.51.100.9");
    }
}

/// Asserts that the same file in JSON has the same error, in the syntax of neither TOML nor code.
fn assert_same_fix_in_json(file: &str, fix: &str) {
    let json = serde_json::to_string(&file.parse::<toml::Table>().unwrap()).unwrap();
    let error = Policies::from_json(&json).unwrap_err().to_string();
    assert!(error.contains(fix), "`{fix}` is not in:\n{error}");
    for other in [" = ", "Limit::", "()", "`.", "`[client-ip]"] {
        assert!(
            !error.contains(other) || fix.contains(other),
            "`{other}` is in:\n{error}"
        );
    }
}

#[test]
fn a_client_address_that_cannot_be_trusted_is_an_error_that_names_the_fix() {
    const LIST: &str = "[\"10.0.0.0/8\"]";
    for (table, fix) in [
        ("header = \"x-forwarded-for\"", "missing field `trusted`"),
        ("trusted = [\"10.0.0.0/8\"]", "missing field `header`"),
        ("header = \"x-forwarded-for\"\ntrusted = []", LIST),
        ("header = \"x-forwarded-for\"\ntrusted = \"10.0.0.0/8\"", LIST),
        ("header = \"x-forwarded-for\"\ntrusted = true", LIST),
        (
            "header = \"x-forwarded-for\"\ntrusted = [\"10.0.0.0/33\"]",
            "`10.0.0.0/8`",
        ),
        (
            "header = \"x-forwarded-for\"\ntrusted = [\"0.0.0.0/0\"]",
            "`trusted` is `\"any-peer\"`",
        ),
        (
            "header = \"x-forwarded-for\"\ntrusted = [\"::/0\"]",
            "`trusted` is `\"any-peer\"`",
        ),
        (
            "header = \"x-forwarded-for\"\ntrusted = [\"10.0.0.0/8\"]\nhops = 0",
            "with 1 as `hops`",
        ),
        (
            "header = \"x-forwarded-for\"\ntrusted = [\"10.0.0.0/8\"]\nhops = -1",
            "hops = -1",
        ),
        (
            "header = \"x-real-ip\"\ntrusted = [\"10.0.0.0/8\"]\nhops = 1",
            "leave it out for `x-real-ip`",
        ),
        (
            "header = \"forwarded\"\ntrusted = [\"10.0.0.0/8\"]\nhops = 1",
            "leave it out for `forwarded`",
        ),
        (
            "header = \"x forwarded\"\ntrusted = [\"10.0.0.0/8\"]",
            "one looks like `\"x-forwarded-for\"`",
        ),
        (
            "headers = [\"forwarded\"]\ntrusted = [\"10.0.0.0/8\"]",
            "unknown field `headers`",
        ),
    ] {
        let file = format!("[client-ip]\n{table}\n[policies.a]\nlimit = \"sliding-log 1/h\"\nkey = \"client-ip\"\n");
        let error = Policies::from_toml(&file).unwrap_err().to_string();
        assert!(
            error.contains(fix) && error.contains("line "),
            "`{fix}` is not in:\n{error}"
        );
        if !fix.contains(" = ") {
            assert_same_fix_in_json(&file, fix);
        }
    }

    let error = Policies::from_toml("[policies.login]\nlimit = \"sliding-log 1/h\"\nkey = [\"client-ip\", \"path\"]")
        .unwrap_err()
        .to_string();
    for expected in ["`login`", "table `client-ip`", "`header` such as `\"x-forwarded-for\"`"] {
        assert!(error.contains(expected), "`{expected}` is not in:\n{error}");
    }
}

#[test]
fn a_forwarding_header_is_no_key() {
    for name in ["X-Forwarded-For", "x-real-ip"] {
        for key in [
            format!("\"header:{name}\""),
            format!("[\"ip\", \"method or header:{name} or ip\"]"),
        ] {
            let file = format!("[policies.login]\nlimit = \"sliding-log 1/h\"\nkey = {key}\n");
            let error = Policies::from_toml(&file).unwrap_err().to_string();
            let header = format!("`header` `\"{}\"`", name.to_lowercase());
            for expected in ["line 3", "`client-ip`", "table `client-ip`", "`trusted`", &header] {
                assert!(error.contains(expected), "`{expected}` is not in:\n{error}");
            }
        }
    }
}

#[test]
fn a_key_that_is_no_text_is_refused_with_the_forms_of_a_key() {
    for key in ["1", "true"] {
        let file = format!("[policies.login]\nlimit = \"sliding-log 1/h\"\nkey = {key}\n");
        let error = Policies::from_toml(&file).unwrap_err().to_string();
        for expected in ["line 3", "a key such as `\"ip\"`", "`[\"ip\", \"path\"]`"] {
            assert!(error.contains(expected), "`{expected}` is not in:\n{error}");
        }
    }
}

/// Each file would need more stack than a thread has if its parts were parsed, used or dropped one within another.
#[tokio::test]
async fn a_key_of_many_parts_is_an_error() {
    const MANY: usize = 100_000;
    let toml = |key: &str| format!("[policies.a]\nlimit = \"sliding-log 1/h\"\nkey = {key}\n");
    for (key, fault) in [
        (
            format!("\"{}\"", vec!["ip"; MANY].join(" or ")),
            "at most 16 alternatives",
        ),
        (
            format!("\"{}\"", vec!["ip"; 17].join(" or ")),
            "at most 16 alternatives",
        ),
        (format!("[{}]", vec!["\"ip\""; MANY].join(",")), "at most 16 keys"),
        (format!("[{}]", vec!["\"ip\""; 17].join(",")), "at most 16 keys"),
        (format!("{}\"ip\"{}", "[".repeat(MANY), "]".repeat(MANY)), ""),
        (format!("{}1{}", "{a=".repeat(MANY), "}".repeat(MANY)), ""),
        (format!("\"{}\"", vec!["ip"; MANY].join(" + ")), "is not a key"),
    ] {
        let error = Policies::from_toml(&toml(&key)).unwrap_err().to_string();
        assert!(
            error.contains(fault),
            "`{fault}` is not in:\n{}",
            &error[..error.len().min(1_000)]
        );
    }

    let nested = format!(
        "{{\"policies\": {{\"a\": {{\"limit\": \"unlimited\", \"key\": {}{}}}}}}}",
        "[".repeat(MANY),
        "]".repeat(MANY)
    );
    assert!(Policies::from_json(&nested).is_err());
    assert!(
        format!("unlimited{}", " unlimited".repeat(MANY))
            .parse::<Limit>()
            .is_err()
    );

    let most = Policies::from_toml(&toml(&format!(
        "[{}]",
        vec![format!("\"{}\"", vec!["ip"; 16].join(" or ")); 16].join(",")
    )));
    assert!(key_of(&most.unwrap(), "192.0.2.1", &[]).await.starts_with("hash="));
}

/// The files of limits in the docs and the examples.
fn example_files() -> Vec<(&'static str, String)> {
    let block_of = |text: &str, start: &str, end: &str| {
        let (_, block) = text.split_once(start).unwrap();
        block.split_once(end).unwrap().0.to_owned()
    };
    let recipes = include_str!("../../../docs/recipes.md");
    let docs = include_str!("../../../src/policy/file/mod.rs").replace("///", "");
    vec![
        ("docs/recipes.md", block_of(recipes, "```toml\n", "```")),
        ("src/policy/file/mod.rs", block_of(&docs, "from_toml(r#\"\n", "\"#")),
        (
            "examples/limits.toml",
            include_str!("../../../examples/limits.toml").to_owned(),
        ),
    ]
}

/// How many of 100 requests a policy admits when the client changes everything that it can choose, or nothing.
async fn admitted(policy: Policy, peer: &str, changing: bool) -> usize {
    let app = Router::new()
        .route("/search/{*rest}", any(async || "hi"))
        .layer(RateLimitLayer::new(MemoryStore::new(), policy));

    let mut admitted = 0;
    for n in 0..100 {
        let n = if changing { n } else { 0 };
        // The last address is from the proxy, and does not change.
        let forwarded_for = format!("198.51.100.{n}, 203.0.113.7");
        let request = Request::builder()
            .method(["GET", "POST", "OPTIONS"][n % 3])
            .uri(format!("http://host-{n}.example/search/{n}%{:02x}?{n}", 0x21 + n % 14))
            .extension(PeerAddr(format!("{peer}:{}", 1_024 + n).parse().unwrap()))
            .header("x-forwarded-for", forwarded_for);
        let names = [
            "host",
            "forwarded",
            "x-real-ip",
            "x-user-id",
            "cf-connecting-ip",
            "user-agent",
            "authorization",
        ];
        let request = names
            .iter()
            .fold(request, |request, name| request.header(*name, format!("192.0.2.{n}")));
        let response = app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        admitted += usize::from(response.status() == OK);
    }
    admitted
}

#[tokio::test(start_paused = true)]
async fn no_client_gets_past_a_limit_of_an_example_by_what_it_sends() {
    let mut tried = 0;
    for (file, text) in example_files() {
        let policies = Policies::from_toml(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
        for name in policies.names() {
            let Ok(policy) = policies.get(&name) else {
                continue;
            };
            // Directly, and through a proxy that all of them trust.
            for peer in ["203.0.113.7", "10.0.0.2"] {
                let right = admitted(policy.clone(), peer, false).await;
                assert!(right > 0 && right < 100, "{file}: {name} admits {right}");
                assert_eq!(admitted(policy.clone(), peer, true).await, right, "{file}: {name}");
                tried += 1;
            }
        }
    }
    assert!(tried >= 14, "{tried}");
}

#[test]
fn the_docs_show_the_error_of_a_wrong_line() {
    let (_, file) = example_files().swap_remove(0);
    let error = Policies::from_toml(&file.replace("10/s burst", "10/s bursts"))
        .unwrap_err()
        .to_string();
    let shown = format!("`limits.toml`: {}", error.trim_end());
    assert!(
        include_str!("../../../docs/recipes.md").contains(&shown),
        "docs/recipes.md does not show:\n{shown}"
    );
}
