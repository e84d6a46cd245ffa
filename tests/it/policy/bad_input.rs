//! Settings that cannot work are errors when they are built, with messages that name the fix.

use std::{sync::Arc, time::Duration};

use http::{HeaderName, Request};
use tower_quota::{
    Ban, FailureMode, Key, KeyExtractor, Limiter, MemoryStore, Plans, Policies, Policy, RateLimitLayer, RedisStore,
    SlidingLog, TokenBucket,
    key::{self, ClientIpSource},
    limit::Limit,
};

use crate::support::Log;

fn policy(name: &'static str) -> Policy {
    Policy::new(name, SlidingLog::per_minute(5)).key(key::ip())
}

#[track_caller]
fn assert_contains(error: impl std::fmt::Display, words: &[&str]) {
    let error = error.to_string();
    for word in words {
        assert!(error.contains(word), "`{word}` is not in: {error}");
    }
}

#[test]
fn two_policies_of_one_name_in_a_layer() {
    let error = RateLimitLayer::try_new(MemoryStore::new(), [policy("a"), policy("b"), policy("a")]).unwrap_err();
    assert_contains(error, &["two policies are named `a`", "each policy needs its own"]);
}

#[test]
#[should_panic(expected = "two policies are named `a`")]
fn two_policies_of_one_name_in_a_layer_that_cannot_fail() {
    let _ = RateLimitLayer::new(MemoryStore::new(), vec![policy("a"), policy("a")]);
}

#[test]
fn two_policies_of_one_name_in_a_limiter() {
    let error = Limiter::try_new(MemoryStore::new(), [policy("a"), policy("a")]).unwrap_err();
    assert_contains(error, &["two policies are named `a`", "each policy needs its own"]);
}

#[test]
fn a_window_of_no_length() {
    let error = SlidingLog::try_new(5, Duration::ZERO).unwrap_err();
    assert_contains(
        error,
        &[
            "between 1 ms and 10 years",
            "`SlidingLog::new(100, Duration::from_secs(60))`",
        ],
    );
}

#[test]
fn a_limit_of_nothing() {
    let error = SlidingLog::try_new(0, Duration::from_secs(60)).unwrap_err();
    assert_contains(
        error,
        &["at least 1", "`SlidingLog::new(100, Duration::from_secs(60))`"],
    );
}

#[test]
fn a_limit_as_text() {
    let of_text = Policy::new("api", "100/min").key(key::constant("all"));
    assert_eq!(of_text.limit(), Some(&SlidingLog::per_minute(100).into()));
    let wrong = std::panic::catch_unwind(|| Policy::new("api", "100")).unwrap_err();
    let message = wrong.downcast_ref::<String>().expect("a message");
    assert!(
        message.contains("`100/min`") || message.contains("`sliding-log 100/min`"),
        "{message}"
    );
}

#[test]
#[should_panic(expected = "costs at least 1; a policy with the limit `unlimited`")]
fn a_request_that_costs_nothing() {
    assert!(policy("five").cost(5).validate().is_ok());
    let _ = policy("free").cost(0);
}

#[test]
fn a_cost_above_the_limit() {
    let words = &[
        "the policy `export`",
        "costs 6",
        "`sliding-log 5/min`",
        "at most 5",
        "`Limit::DenyAll`",
    ];
    for wrong in [policy("export").cost(6), policy("export").cost(6).observe_only()] {
        assert_contains(wrong.validate().unwrap_err(), words);
        assert_contains(Limiter::try_new(MemoryStore::new(), wrong.clone()).unwrap_err(), words);
        assert_contains(
            RateLimitLayer::try_new(MemoryStore::new(), wrong.clone()).unwrap_err(),
            words,
        );
        let plans = Plans::new("free", wrong).plan("pro", policy("export"));
        assert_contains(RateLimitLayer::try_new(MemoryStore::new(), plans).unwrap_err(), words);
    }

    for right in [
        policy("export").cost(5),
        // Each request has another cost or another limit.
        policy("export").cost_fn(|_| 6),
        Policy::with_limit_fn("export", |_| SlidingLog::per_minute(5))
            .key(key::ip())
            .cost(6),
        // No request is admitted, and each one.
        Policy::new("export", Limit::DenyAll).key(key::ip()).cost(6),
        Policy::new("export", Limit::Unlimited).key(key::ip()).cost(6),
    ] {
        assert!(right.validate().is_ok(), "{right:?}");
    }
}

#[test]
fn a_client_that_is_to_obey_a_server_without_a_limit() {
    let unlimited = || Policy::new("remote", Limit::Unlimited).key(key::ip());
    let error = RateLimitLayer::try_new(MemoryStore::new(), unlimited().learn_from_responses()).unwrap_err();
    assert_contains(
        error,
        &["`remote`", "`Limit::Unlimited`", "`FixedWindow::per_second(1_000_000)`"],
    );
    assert_eq!(unlimited().ban(Ban::by_hand()).validate(), Ok(()));
    // The switch of a file may turn one off.
    let file = "enabled = false\npolicies.remote = { limit = 'sliding-log 5/min', key = 'ip' }";
    let of_a_file = Policies::from_toml(file).unwrap().get("remote").unwrap();
    assert_eq!(of_a_file.learn_from_responses().validate(), Ok(()));
}

#[test]
fn an_order_of_waiting_without_waits() {
    for (wrong, setting) in [
        (policy("export").fair_by(key::ip()), "`.fair_by(..)`"),
        (policy("export").priority_fn(|_| 1), "`.priority_fn(..)`"),
        (policy("export").max_waiting(9), "`.max_waiting(..)`"),
    ] {
        let error = RateLimitLayer::try_new(MemoryStore::new(), wrong.clone()).unwrap_err();
        assert_contains(error, &["the policy `export`", setting, "`.wait_up_to(..)`"]);
        let right = wrong.wait_up_to(Duration::from_secs(60));
        assert!(RateLimitLayer::try_new(MemoryStore::new(), right).is_ok());
    }
    let costly = |most| {
        policy("export")
            .cost(5)
            .wait_up_to(Duration::from_secs(60))
            .max_waiting(most)
    };
    assert_contains(
        costly(4).validate().unwrap_err(),
        &["`export`", "`max-waiting`", "at least 5"],
    );
    assert!(costly(5).validate().is_ok());
    let off = Policy::new("off", Limit::Unlimited).cost(5);
    assert!(
        off.wait_up_to(Duration::from_secs(60))
            .max_waiting(4)
            .validate()
            .is_ok()
    );
    // Its requests wait by `acquire`.
    assert!(Limiter::try_new(MemoryStore::new(), policy("export").max_waiting(9)).is_ok());
}

#[test]
fn units_taken_ahead_of_a_policy_that_redis_decides() {
    let ahead = TokenBucket::per_second(500).prefetch(Duration::from_millis(5));
    let ahead = || Policy::new("export", ahead).key(key::ip());
    assert!(ahead().validate().is_ok());
    for wrong in [
        ahead().wait_up_to(Duration::from_secs(1)),
        ahead().wait_up_to_fn(|_| Duration::from_secs(1)),
        ahead().ban(Ban::by_hand()),
        ahead().learn_from_responses(),
    ] {
        assert_contains(
            wrong.validate().unwrap_err(),
            &["`prefetch` of the policy `export`", "waits or bans"],
        );
    }
}

#[test]
fn waits_and_units_taken_ahead_in_a_file() {
    let layer = |settings: &str| {
        let file = format!("policies.export = {{ limit = 'token-bucket 500/s prefetch 5ms', key = 'ip'{settings} }}");
        let policies = Policies::from_toml(&file).expect("a good file");
        RateLimitLayer::try_new(MemoryStore::new(), policies.get("export").expect("the policy"))
    };
    assert!(layer("").is_ok());
    assert_contains(layer(", wait = '1s'").unwrap_err(), &["`prefetch`", "waits or bans"]);
    assert_contains(
        layer(", max-waiting = 9").unwrap_err(),
        &["`max-waiting`", "add", "`wait`"],
    );
}

#[test]
#[should_panic(expected = "`FailureMode::local_share(1, 4)`")]
fn a_share_that_is_none() {
    let _ = FailureMode::local_share(5, 4);
}

#[test]
#[should_panic(expected = "\"x user id\" is not a header name")]
fn a_header_name_that_is_none() {
    let _ = key::header("x user id");
}

#[test]
fn a_key_of_a_header_that_clients_can_set_is_logged() {
    for (name, logged) in [("X-Forwarded-For", 1), ("x-user-id", 0)] {
        let log = Log::capture();
        let _ = key::header(name);
        let line = "clients can set the header of this key; use `key::client_ip(..)` header=\"x-forwarded-for\"";
        assert_eq!(log.text().matches(line).count(), logged, "{}", log.text());
    }
}

#[test]
fn a_header_name_is_text_or_bytes() {
    let name = HeaderName::from_static("x-user");
    let keys = [
        key::header("x-user"),
        key::header("x-user".to_owned()),
        key::header(b"x-user".as_slice()),
        key::header(&name),
        key::header(name),
    ];
    let (parts, ()) = Request::get("/").header("x-user", "42").body(()).unwrap().into_parts();
    for key in keys {
        assert_eq!(key.extract(&parts).unwrap(), Some(Key::header("x-user", "42")));
    }
}

#[test]
#[should_panic(expected = "`XForwardedForHop(1)`")]
fn a_chain_of_no_proxies() {
    let _ = key::client_ip(ClientIpSource::XForwardedForHop(0));
}

#[test]
#[should_panic(expected = "use `ClientIpSource::Forwarded`")]
fn a_list_of_proxies_as_one_address() {
    let _ = key::client_ip(ClientIpSource::Header(http::header::FORWARDED));
}

#[tokio::test]
async fn a_redis_url_that_does_not_parse() {
    for url in ["", "localhost", "http://127.0.0.1:6379", "redis//127.0.0.1"] {
        let error = RedisStore::connect(url).await.unwrap_err();
        assert_contains(error, &["redis://:password@127.0.0.1:6379/0"]);
    }
}

#[tokio::test]
async fn a_redis_url_with_a_bad_port_shows_no_password() {
    let error = RedisStore::connect("redis://:secret@127.0.0.1:port").await.unwrap_err();
    let chain = format!("{error} {:?} {error:?}", std::error::Error::source(&error));
    assert!(chain.contains("URL"), "{chain}");
    assert!(!chain.contains("secret"), "{chain}");
}

#[tokio::test]
async fn a_parameter_that_no_redis_url_has_is_logged_unless_it_may_be_a_password() {
    for (url, logged) in [
        ("redis://127.0.0.1:1/0?deadline=5", 1),
        ("redis://127.0.0.1:1/3?client=a@b", 0),
        ("redis-cluster://127.0.0.1:1?node=127.0.0.1:2", 0),
    ] {
        let log = Log::capture();
        let store = RedisStore::builder().url(url).connect_lazy();
        drop(store.expect("a good URL"));
        let text = log.text();
        for part in ["this parameter of the Redis URL is ignored", "parameter=\"deadline\""] {
            assert_eq!(text.matches(part).count(), logged, "{url}: {text}");
        }
    }
}

#[test]
#[should_panic(expected = "\"quota{a}\" is not a prefix")]
fn a_prefix_that_could_forge_a_key() {
    let _ = RedisStore::builder().prefix("quota{a}");
}

#[test]
#[should_panic(expected = "leave that out")]
fn a_prefix_that_hides_where_a_line_begins() {
    let _ = RedisStore::builder().prefix("a:1:line:b");
}

#[test]
#[should_panic(expected = "leave that out")]
fn a_prefix_that_ends_as_a_line_begins() {
    let _ = RedisStore::builder().prefix("a:1:line");
}

#[test]
fn a_request_without_a_peer_address() {
    let (parts, ()) = Request::new(()).into_parts();
    let error = key::ip().extract(&parts).unwrap_err();
    assert!(error.is_misconfigured());
    assert_contains(
        error,
        &[
            "into_make_service_with_connect_info::<SocketAddr>()",
            "tower_quota::key::PeerAddr",
        ],
    );
}

#[test]
fn a_request_without_the_extension_that_it_should_have() {
    struct User;

    let (parts, ()) = Request::new(()).into_parts();
    let error = key::extension("user", |_: &User| "").extract(&parts).unwrap_err();
    assert!(error.is_misconfigured());
    assert_contains(error, &["User", "outside of this one", "`.or(..)`"]);
}

#[test]
fn an_alternative_that_all_of_the_first_thousand_requests_have_is_logged() {
    #[derive(Clone)]
    struct User;

    let user = || key::extension("user", |_: &User| "42").or(key::constant("all"));
    let (without, ()) = Request::new(()).into_parts();
    let (with, ()) = Request::builder()
        .extension(User)
        .body(())
        .expect("a request")
        .into_parts();
    // How often it is logged that no request had a user, of which the first so many have none.
    let logged = |absent: usize| {
        let log = Log::capture();
        let key = user();
        for parts in vec![&without; absent]
            .into_iter()
            .chain([&with])
            .chain(vec![&without; 2_000])
        {
            let _ = key.extract(parts).expect("a key");
        }
        assert!(
            log.text().is_empty() || log.text().contains("add it after this one"),
            "{}",
            log.text()
        );
        log.text().matches("no request yet had the first key").count()
    };
    assert_eq!((logged(0), logged(999), logged(1_000), logged(3_000)), (0, 0, 1, 1));
}

#[test]
fn what_is_printed_for_debugging_holds_no_key() {
    let key = Key::header("x-user-id", "secret");
    assert!(!format!("{key:?}").contains("secret"));

    let policy = Policy::new("p", Limit::from(SlidingLog::per_minute(5))).key(key::constant("secret"));
    let layer = RateLimitLayer::new(Arc::new(MemoryStore::new()), policy);
    let printed = format!("{layer:?}");
    assert!(printed.contains("\"p\"") && !printed.contains("secret"), "{printed}");
}
