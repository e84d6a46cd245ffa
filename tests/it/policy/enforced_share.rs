//! Policies that are enforced for a share of their keys, and observed for the others.

use std::time::Duration;

use axum::{Router, routing::get as route};
use http::{HeaderMap, HeaderValue, StatusCode};
use tower_quota::{
    Ban, Decision, Denial, Headers, Limiter, MemoryStore, Policies, Policy, RateLimitLayer, SlidingLog, key,
};

use crate::support::{Bench, each_store, get, get_from, send};

each_store! {
    the_keys_of_the_share_are_denied_and_the_others_observed
}

/// Keys of users of which the first is in the share of a half of the policy `mails`, and the second is not.
const ENFORCED: &str = "3";
const OBSERVED: &str = "1";

fn mails(quota: u64) -> Policy<()> {
    Policy::new("mails", SlidingLog::per_hour(quota))
}

async fn check(limiter: &Limiter, key: &str) -> Decision {
    limiter.check(key).await.expect("the store replies")
}

fn denial(decision: &Decision) -> (bool, Option<Denial>) {
    let policy = decision.policies().find(|policy| policy.name() == "mails");
    let policy = policy.expect("the policy applies");
    (policy.is_observed(), policy.denial())
}

async fn the_keys_of_the_share_are_denied_and_the_others_observed(bench: Bench) {
    let other = Policy::new("other", SlidingLog::per_hour(5));
    let limiter = Limiter::new(bench.store.clone(), [mails(1).enforce_share(0.5), other]);
    for _ in 0..2 {
        let _ = check(&limiter, ENFORCED).await;
        let _ = check(&limiter, OBSERVED).await;
    }
    let denied = check(&limiter, ENFORCED).await;
    assert!(!denied.is_allowed());
    assert_eq!(denial(&denied), (false, Some(Denial::QuotaExceeded)));
    // The other policy has not counted denied requests.
    assert_eq!(denied.policies().last().map(|policy| policy.remaining()), Some(4));

    let admitted = check(&limiter, OBSERVED).await;
    assert!(admitted.is_allowed());
    assert_eq!(denial(&admitted), (true, Some(Denial::QuotaExceeded)));
    assert_eq!((admitted.limit(), admitted.remaining()), (5, 2));
}

#[tokio::test]
async fn a_share_has_the_same_keys_in_code_and_files_and_keeps_them_when_it_grows() {
    let file = |share: &str| {
        let text = format!(r#"{{"policies": {{"mails": {{"limit": "sliding-log 1/h", "enforce-share": {share}}}}}}}"#);
        serde_json::from_str::<Policies>(&text)
    };
    let of_file = |share| file(share).map(|policies| policies.unkeyed("mails").expect("the policy"));
    let limiters = [
        mails(1).enforce_share(0.2),
        of_file("0.2").expect("a good file"),
        // Of code and a file the smaller share holds.
        of_file("0.5").expect("a good file").enforce_share(0.2),
        of_file("0.2").expect("a good file").enforce_share(0.5),
        of_file("0.5").expect("a good file"),
        mails(1),
        mails(1).enforce_share(0.0),
    ];
    let limiters = limiters.map(|policy| Limiter::new(MemoryStore::new(), policy));
    let mut denied = [0; 7];
    for user in 0..500 {
        let key = user.to_string();
        let mut outcomes = [false; 7];
        for (outcome, limiter) in outcomes.iter_mut().zip(&limiters) {
            let _ = check(limiter, &key).await;
            *outcome = !check(limiter, &key).await.is_allowed();
        }
        let [code, file, both, reversed, half, whole, none] = outcomes;
        assert!(code == file && code == both && code == reversed, "{key}");
        assert!(half || !code, "{key}");
        assert!(whole && !none);
        (denied[0], denied[4]) = (denied[0] + usize::from(code), denied[4] + usize::from(half));
    }
    assert!(
        (70..130).contains(&denied[0]) && (210..290).contains(&denied[4]),
        "{denied:?}"
    );

    for share in ["1.5", "-1", "\"much\""] {
        file(share).expect_err("no share");
    }
}

#[test]
#[should_panic(expected = "1.5 is not a share of the keys")]
fn a_share_above_the_whole_is_none() {
    let _ = mails(1).enforce_share(1.5);
}

#[tokio::test(start_paused = true)]
async fn keys_outside_of_the_share_neither_wait_nor_are_banned() {
    let waits = mails(1).wait_up_to(Duration::from_secs(7_200)).enforce_share(0.5);
    let waits = Limiter::new(MemoryStore::new(), waits);
    for (key, hours) in [(ENFORCED, 1), (OBSERVED, 0)] {
        let _first = waits.acquire(key).await.expect("the first request");
        let second = waits.acquire(key).await.expect("it waits or is observed");
        assert_eq!(second.waited().as_secs().div_ceil(3_600), hours, "{key}");
    }

    let bans = mails(1).ban(Ban::after(1, Duration::from_secs(60))).enforce_share(0.5);
    let bans = Limiter::new(MemoryStore::new(), bans);
    for (key, allowed) in [(ENFORCED, false), (OBSERVED, true)] {
        for _ in 0..3 {
            let _ = check(&bans, key).await;
        }
        let decision = check(&bans, key).await;
        assert_eq!(decision.is_allowed(), allowed);
        assert_eq!(denial(&decision), (allowed, Some(Denial::Banned)));
    }
}

/// Else a caller that is denied would send its key on two lines.
#[tokio::test]
async fn a_request_with_a_malformed_key_is_refused_unless_all_are_observed() {
    let by_user = || Policy::new("users", SlidingLog::per_hour(1)).key(key::header("x-user").or(key::ip()));
    for (share, refused) in [(0.99, true), (0.01, true), (0.0, false)] {
        let layer = RateLimitLayer::new(MemoryStore::new(), by_user().enforce_share(share));
        let limiter = Limiter::from(&layer);
        let request = || get("/").header("x-user", "a").header("x-user", "b");
        let (parts, ()) = request().body(()).expect("a request").into_parts();
        assert_eq!(limiter.request_of(&parts).is_err(), refused, "{share}");
        let app = Router::new().fallback(async || "hi").layer(layer);
        let status = if refused {
            StatusCode::BAD_REQUEST
        } else {
            StatusCode::OK
        };
        assert_eq!(send(&app, request()).await.status, status, "{share}");
    }
}

#[tokio::test]
async fn a_request_without_its_key_is_observed() {
    let users = Policy::new("users", SlidingLog::per_hour(1)).key(key::header("x-user-id"));
    let app = |share| {
        let layer = RateLimitLayer::new(MemoryStore::new(), users.clone().enforce_share(share));
        Router::new().route("/", route(async || "hi").layer(layer))
    };
    assert_eq!(send(&app(1.0), get("/")).await.status, 400);
    assert_eq!(send(&app(0.5), get("/")).await.status, 200);
}

#[tokio::test]
async fn fields_are_those_of_enforced_keys() {
    let hello = Policy::new("hello", SlidingLog::per_hour(1)).key(key::ip());
    let layer = RateLimitLayer::new(MemoryStore::new(), hello.enforce_share(0.5)).headers(Headers::custom(
        |decision: &Decision, headers: &mut HeaderMap| {
            assert!(decision.policies().all(|policy| !policy.is_observed()));
            headers.insert("x-left", HeaderValue::from(decision.remaining()));
        },
    ));
    let app = Router::new().route("/", route(async || "hi").layer(layer));
    let mut enforced = 0;
    for host in 0..100 {
        let address = format!("198.51.100.{host}");
        let first = send(&app, get_from(&address, "/")).await;
        let second = send(&app, get_from(&address, "/")).await;
        match first.field("x-left") {
            Some(left) => {
                enforced += 1;
                assert_eq!((left, second.status.as_u16()), ("0", 429));
                assert_eq!((second.field("x-left"), second.field("ratelimit")), (Some("0"), None));
                assert_eq!(second.field("retry-after"), Some("3600"));
            }
            None => assert_eq!((second.status.as_u16(), second.field("x-left")), (200, None)),
        }
    }
    assert!((30..70).contains(&enforced), "{enforced}");
}

#[tokio::test(start_paused = true)]
async fn a_key_outside_of_the_share_does_not_wait() {
    let waits = Policy::new("mails", SlidingLog::per_minute(1)).key(key::header("user"));
    let waits = waits.wait_up_to(Duration::from_secs(120)).enforce_share(0.5);
    let show = async |decision: Decision| {
        let observed = decision.policies().any(|policy| policy.is_observed());
        format!("{observed} {}", decision.waited().as_secs())
    };
    let app = Router::new().route("/", route(show).layer(RateLimitLayer::new(MemoryStore::new(), waits)));
    let mut waited = 0;
    for user in 0..32 {
        let user = user.to_string();
        send(&app, get("/").header("user", &user)).await;
        let second = send(&app, get("/").header("user", &user)).await.body;
        match str::from_utf8(&second).expect("text") {
            "true 0" => {}
            "false 60" => waited += 1,
            other => panic!("{other}"),
        }
    }
    assert!((1..32).contains(&waited), "{waited}");
}
