//! The log of changes by operators.

use std::time::Duration;

use axum::{Router, body::Body};
use http::{Request, StatusCode};
use serde_json::json;
use tower::ServiceExt;
use tower_quota::{
    Admin, FailureMode, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog, key,
    store::{ErrorKind, Store, StoreError, StoreFuture, StoreRequest},
};

use super::router::Operator;
use crate::support::{Broken, Log, Redis, connected, patient, send};

fn mails(store: impl Store) -> Limiter {
    let mails = Policy::new("mails", SlidingLog::per_minute(2));
    Limiter::new(store, mails.failure_mode(FailureMode::Closed))
}

fn admin() -> Admin {
    Admin::new()
        .limiter(&mails(MemoryStore::new()))
        .show_keys(true)
        .instance("api-7")
}

#[tokio::test(start_paused = true)]
async fn a_change_by_an_operator_is_logged_without_the_key() {
    let log = Log::capture();
    let operator = Operator(admin().router_behind_authentication());
    operator.get("mails", "key=of-a-customer").await;
    assert_eq!(log.text(), "", "what only reads is not logged");
    operator.reset("mails", "key=of-a-customer").await;
    operator
        .set_override("mails", "key=of-a-customer", "sliding-log 9/min", "1h")
        .await;
    operator.end_override("mails", "key=of-a-customer").await;
    let text = log.text();
    for part in [
        "INFO tower_quota::audit: an operator resets the counts of a subject actor=\"not known\" outcome=\"done\" policy=\"mails\" \
         subject=\"",
        "INFO tower_quota::audit: an operator overrides the limit of a subject actor=\"not known\" outcome=\"done\"",
        "setting=\"sliding-log 9/min for 3600 s\" instance=\"api-7\"",
        "INFO tower_quota::audit: an operator ends the override of a subject actor=\"not known\" outcome=\"done\"",
    ] {
        assert!(text.contains(part), "no `{part}` in {text}");
    }
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(!text.contains("of-a-customer"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn the_actor_is_the_user_of_basic_authentication_or_that_of_the_application() {
    #[derive(Clone)]
    struct User(&'static str);

    let log = Log::capture();
    let reset = |router: Router, fields: &[(&str, &str)]| {
        let mut request = Request::post("/reset").header("content-type", "application/json");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let body = json!({ "policy": "mails", "key": "key=1" }).to_string();
        router.oneshot(
            request
                .extension(User("bob"))
                .body(Body::from(body))
                .expect("a request"),
        )
    };
    let of_basic = admin().router_behind_authentication();
    // `alice:secret`
    for scheme in ["Basic", "basic"] {
        let credentials = format!("{scheme} YWxpY2U6c2VjcmV0");
        let _ = reset(of_basic.clone(), &[("authorization", &credentials)]).await;
    }
    let _ = reset(of_basic.clone(), &[("authorization", "Basic ???")]).await;
    let _ = reset(of_basic, &[("authorization", "Bearer YWxpY2U6c2VjcmV0")]).await;
    let own = admin().actor(|parts| Some(parts.extensions.get::<User>()?.0.to_owned()));
    let _ = reset(
        own.router_behind_authentication(),
        &[("authorization", "Basic YWxpY2U6c2VjcmV0")],
    )
    .await;
    let text = log.text();
    let actors = text.lines().map(|line| {
        line.split("actor=")
            .nth(1)
            .expect("an actor")
            .split(' ')
            .next()
            .unwrap()
    });
    assert_eq!(
        actors.collect::<Vec<_>>(),
        ["\"alice\"", "\"alice\"", "\"not", "\"not", "\"bob\""],
        "{text}"
    );
    assert!(!text.contains("secret"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_change_that_is_refused_is_logged_with_the_reason() {
    let log = Log::capture();
    let operator = Operator(admin().router_behind_authentication());
    for (path, body, fields, error) in [
        (
            "/reset",
            r#"{"policy":"mails","key":"alice@example.org"}"#,
            &[][..],
            "the text is not a key",
        ),
        ("/reset", r#"{"key":["alice"]}"#, &[], "the body is not a subject"),
        (
            "/reset",
            r#"{"key":"key=2","store":"alice"}"#,
            &[],
            "the body is not a subject",
        ),
        (
            "/reset",
            r#"{"policy":"other","key":"key=1"}"#,
            &[],
            "there is no policy of this name",
        ),
        ("/reset", "{", &[], "the body is not a subject"),
        ("/reset", "{}", &[("content-type", "text/plain")], "the body is JSON"),
        (
            "/reset",
            "{}",
            &[("sec-fetch-site", "cross-site")],
            "a page of another origin",
        ),
        (
            "/override",
            r#"{"policy":"mails","key":"key=1","limit":"token-bucket 1/s","lasts":"1h"}"#,
            &[],
            "use the same algorithm",
        ),
        (
            "/override",
            r#"{"policy":"mails","key":"key=1","limit":"sliding-log 9/min","lasts":"soon"}"#,
            &[],
            "`lasts` is not a length of time",
        ),
        (
            "/end-override",
            r#"{"policy":"mails"}"#,
            &[],
            "the request has no `key`",
        ),
    ] {
        let before = log.text().len();
        let response = operator.post(path, body, fields).await;
        assert!(response.status.is_client_error(), "{body}");
        let text = log.text().split_off(before);
        assert!(text.contains("WARN tower_quota::audit: an operator "), "{text}");
        assert!(
            text.contains("outcome=\"refused\"") && text.contains(error),
            "{body}: {text}"
        );
        assert!(!text.contains("alice"), "{body}: {text}");
        let is_selected = body.contains("key=1") && !body.contains("other");
        // The policy that the operator has named.
        for policy in ["mails", "other"] {
            let is_named = body.contains(&format!("\"policy\":\"{policy}\""));
            assert_eq!(
                text.contains(&format!("policy=\"{policy}\"")),
                is_named,
                "{body}: {text}"
            );
        }
        assert_eq!(!text.contains("subject=\"\""), is_selected, "{body}: {text}");
    }
    assert!(
        log.text().contains("setting=\"token-bucket 1/s for 3600 s\""),
        "{}",
        log.text()
    );

    let wrong_method = send(&operator.0, Request::get("/reset")).await;
    assert_eq!(wrong_method.status, StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test(start_paused = true)]
async fn a_key_that_no_request_has_is_in_the_response_alone() {
    let log = Log::capture();
    let policy = Policy::new("mails", SlidingLog::per_minute(2)).key(key::ip());
    let layer = RateLimitLayer::new(MemoryStore::new(), policy);
    let operator = Operator(
        Admin::new()
            .layer(&layer)
            .show_keys(true)
            .router_behind_authentication(),
    );
    let refused = operator.reset("mails", "header:x-user=alice").await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert!(
        refused.json()["error"].to_string().contains("alice"),
        "{}",
        refused.json()
    );
    let text = log.text();
    assert!(
        text.contains("no request has this key in the policy `mails`: its keys are made of `ip=..`"),
        "{text}"
    );
    assert!(!text.contains("alice"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn no_input_of_an_operator_forges_a_line_or_a_field() {
    const TAINT: &str = "x\u{1b}[2K\r\n\0\u{9b}2K\u{2028}\u{202e}  INFO tower_quota::audit: an operator \
                         actor=\"alice\" outcome=\"done\" policy=\"mails\"";
    let log = Log::capture();
    let operator = Operator(admin().instance(TAINT).router_behind_authentication());
    let user = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, format!("{TAINT}:secret"));
    let actor = format!("Basic {user}");
    let inputs = ["policy", "key", "limit", "lasts", "store"];
    for path in ["/reset", "/override", "/end-override"] {
        for tainted in inputs.map(Some).into_iter().chain([None]) {
            let mut body = json!({
                "policy": "mails", "key": "key=1", "limit": "sliding-log 9/min", "lasts": "1h", "store": 1
            });
            if let Some(input) = tainted {
                body[input] = TAINT.into();
            }
            let before = log.text().len();
            operator
                .post(path, &body.to_string(), &[("authorization", &actor)])
                .await;
            let line = log.text().split_off(before);
            assert_eq!(
                line.matches(|char: char| char.is_control()).collect::<Vec<_>>(),
                ["\n"],
                "{line:?}"
            );
            assert!(!line.contains(['\u{2028}', '\u{202e}']), "{line:?}");
            // Each quotation mark of the text is escaped, so that it ends no value.
            assert!(!line.contains(" actor=\"alice\""), "{line:?}");
        }
    }
}

#[tokio::test]
async fn a_reset_that_the_store_has_not_confirmed_is_logged_as_failed() {
    let log = Log::capture();
    let operator = Operator::of_limiter(&mails(Broken::default()));
    assert_eq!(
        operator.reset("mails", "key=1").await.status,
        StatusCode::SERVICE_UNAVAILABLE
    );
    let text = log.text();
    let line = text
        .lines()
        .find(|line| line.contains("tower_quota::audit"))
        .expect("a line");
    for part in [
        "WARN",
        "outcome=\"failed\"",
        "the store of the counts fails",
        "policy=\"mails\"",
        "subject=\"",
    ] {
        assert!(line.contains(part), "no `{part}` in {line}");
    }
}

#[tokio::test]
async fn a_reset_whose_response_is_not_awaited_is_logged_too() {
    let log = Log::capture();
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let operator = Operator::of_limiter(&mails(store));
    let frozen = redis.freeze();
    let reset = operator.reset("mails", "key=1");
    let left = tokio::time::timeout(Duration::from_millis(50), reset).await;
    drop(frozen);
    assert!(left.is_err(), "the operator has left before");
    let text = log.text();
    assert!(
        text.contains("WARN tower_quota::audit") && text.contains("outcome=\"unknown\" policy=\"mails\""),
        "{text}"
    );
}

#[tokio::test]
async fn an_override_that_is_one_too_many_is_logged_as_refused() {
    let redis = Redis::start();
    redis.add_overrides(10_000).await;
    let store = connected(patient().overrides(true), &redis.url()).await;
    let log = Log::capture();
    let operator = Operator::of_limiter(&mails(store));
    let response = operator
        .set_override("mails", "key=another", "sliding-log 9/min", "1h")
        .await;
    assert_eq!(response.status, StatusCode::CONFLICT);
    let text = log.text();
    for text in [&text, &response.json()["error"].to_string()] {
        assert!(text.contains("a store has at most 10000 overrides"), "{text}");
        assert!(!text.contains("confirmed"), "{text}");
    }
    assert!(text.contains("outcome=\"refused\""), "{text}");
    let replaced = operator.set_override("mails", "key=1", "sliding-log 9/min", "1h");
    assert_eq!(replaced.await.status, StatusCode::OK);
}

/// Has overrides, and no counts.
struct Countless(MemoryStore);

impl Store for Countless {
    fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
        StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "the counts are away")))
    }

    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.0)
    }
}

#[tokio::test]
async fn a_change_that_is_confirmed_is_logged_as_done_also_if_no_counts_are_read_after_it() {
    let log = Log::capture();
    let limiter = mails(Countless(MemoryStore::new()));
    let operator = Operator::of_limiter(&limiter);
    for ends in [false, true] {
        let before = log.text().len();
        let response = match ends {
            true => operator.end_override("mails", "key=1").await,
            false => operator.set_override("mails", "key=1", "sliding-log 9/min", "1h").await,
        };
        assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(
            response.json()["error"],
            "the change is done, but its counts cannot be read: the store of the counts fails: the counts are away"
        );
        assert_eq!(limiter.overrides().is_empty(), ends, "it is changed");
        let text = log.text().split_off(before);
        let line = text.lines().find(|line| line.contains("tower_quota::audit"));
        let line = line.expect("a line");
        assert!(line.contains("INFO") && line.contains("outcome=\"done\""), "{line}");
    }
}
