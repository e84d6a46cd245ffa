//! Requests that a layer skips or blocks.

use std::{net::SocketAddr, sync::Arc};

use axum::Router;
use bytes::Bytes;
use http::{Method, Response, StatusCode, request::Parts};
use tower_quota::{
    Decision, Headers, MemoryStore, Policy, RateLimitLayer, SlidingLog,
    key::{self, ClientIpSource, PeerAddr, UnixPeer},
    response::{Grpc, Rejection, html, json, text},
};

use crate::support::{Counted, Log, get, get_from, send};

/// One an hour for each address.
fn hourly() -> Policy {
    Policy::new("api", SlidingLog::per_hour(1)).key(key::ip())
}

fn layer() -> RateLimitLayer {
    RateLimitLayer::new(MemoryStore::new(), hourly())
}

fn app(layer: RateLimitLayer) -> Router {
    let handler =
        async |decision: Option<Decision>| decision.map_or(0, |decision| decision.policies().count()).to_string();
    Router::new().fallback(handler).layer(layer)
}

fn is(path: &'static str) -> impl Fn(&Parts) -> bool + Send + Sync {
    move |parts| parts.uri.path() == path
}

#[tokio::test]
async fn a_skipped_request_is_admitted_uncounted_by_all_policies() {
    let store = Counted::new(MemoryStore::new());
    let by_user = Policy::new("users", SlidingLog::per_hour(1)).key(key::header("user"));
    let app = app(RateLimitLayer::new(store.clone(), [hourly(), by_user]).skip(is("/health")));
    for _ in 0..3 {
        // It has no user either.
        let skipped = send(&app, get("/health")).await;
        assert_eq!((skipped.status, &skipped.body[..]), (StatusCode::OK, &b"0"[..]));
        skipped.assert_silent();
    }
    assert_eq!(store.calls(), 0);
    assert_eq!(send(&app, get("/")).await.status, StatusCode::BAD_REQUEST);
    assert_eq!(send(&app, get("/").header("user", "42")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn several_conditions_are_alternatives() {
    let app = app(layer().skip(is("/a")).skip(is("/b")).block(is("/c")).block(is("/d")));
    for (path, statuses) in [
        ("/a", [200, 200]),
        ("/b", [200, 200]),
        ("/c", [403, 403]),
        ("/d", [403, 403]),
        ("/e", [200, 429]),
    ] {
        for status in statuses {
            assert_eq!(send(&app, get(path)).await.status.as_u16(), status, "{path}");
        }
    }
}

#[tokio::test]
async fn a_blocked_request_gets_403_without_a_call_of_the_store() {
    let store = Counted::new(MemoryStore::new());
    let layer = RateLimitLayer::new(store.clone(), hourly()).block(is("/"));
    let app = app(layer.on_decision(|_| panic!("a blocked request is no decision")));
    for method in [Method::GET, Method::POST, Method::HEAD] {
        let blocked = send(&app, get("/").method(&method)).await;
        assert_eq!(blocked.status, StatusCode::FORBIDDEN);
        blocked.assert_silent();
        assert_eq!(blocked.field("cache-control"), Some("no-store"));
        assert_eq!(blocked.field("content-type"), Some("application/problem+json"));
        assert!(blocked.extensions.get::<Decision>().is_none());
        if method == Method::HEAD {
            assert!(blocked.body.is_empty());
        } else {
            let problem = serde_json::json!({ "type": "about:blank", "title": "Forbidden", "status": 403 });
            assert_eq!(blocked.json(), problem);
        }
    }
    assert_eq!(store.calls(), 0);
}

#[tokio::test]
async fn a_blocked_grpc_call_gets_permission_denied() {
    let app = app(layer().block(is("/shop.Accounts/SignUp")));
    let call = get("/shop.Accounts/SignUp")
        .method(Method::POST)
        .header("content-type", "application/grpc");
    let blocked = send(&app, call).await;
    assert_eq!(blocked.status, StatusCode::OK);
    for (name, value) in [
        ("grpc-status", "7"),
        ("grpc-message", "permission denied"),
        ("grpc-retry-pushback-ms", "-1"),
    ] {
        assert_eq!(blocked.field(name), Some(value));
    }
    assert_eq!(blocked.field("grpc-status-details-bin"), None);
    blocked.assert_silent();
}

#[tokio::test]
async fn each_format_has_a_response_to_a_blocked_request() {
    let hidden = |rejection: Rejection<'_>, _: &Parts| {
        let mut response = Response::new(Bytes::from_static(b"nothing here"));
        *response.status_mut() = match rejection {
            Rejection::Blocked => StatusCode::NOT_FOUND,
            other => other.status(),
        };
        response
    };
    let json = json(|rejection, _| serde_json::json!({ "code": rejection.status().as_u16() }));
    let html = html(|rejection, _| format!("<p>{}</p>", rejection.status()));
    for (layer, status, body) in [
        (layer().format(Grpc::new()), 403, ""),
        (layer().format(Grpc::new().or(text(|_, _| "hidden"))), 403, "hidden"),
        (layer().format(json), 403, r#"{"code":403}"#),
        (layer().format(html), 403, "<p>403 Forbidden</p>"),
        (layer().format(hidden), 404, "nothing here"),
    ] {
        let blocked = send(&app(layer.block(|_| true)), get("/")).await;
        assert_eq!((blocked.status.as_u16(), &blocked.body[..]), (status, body.as_bytes()));
    }
}

#[tokio::test]
async fn a_request_that_is_also_skipped_is_blocked() {
    for layer in [
        layer().skip(|_| true).block(is("/")),
        layer().block(is("/")).skip(|_| true),
    ] {
        assert_eq!(send(&app(layer), get("/")).await.status, StatusCode::FORBIDDEN);
    }
}

#[tokio::test]
async fn a_layer_without_policies_blocks() {
    let app = app(RateLimitLayer::new(MemoryStore::new(), []).block(is("/a")));
    assert_eq!(send(&app, get("/a")).await.status, StatusCode::FORBIDDEN);
    assert_eq!(send(&app, get("/b")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_block_of_an_inner_layer_leaves_what_the_outer_one_has_counted() {
    let inner = RateLimitLayer::new(MemoryStore::new(), []).block(|_| true);
    let app = app(inner).layer(layer().headers(Headers::Draft08));
    let blocked = send(&app, get("/")).await;
    assert_eq!(blocked.status, StatusCode::FORBIDDEN);
    assert_eq!(blocked.field("ratelimit-policy"), Some(r#""api";q=1;w=3600"#));
    assert_eq!(send(&app, get("/")).await.status, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn a_condition_of_networks_is_on_the_address_of_the_peer() {
    let networks = ["10.0.0.0/8", "192.0.2.7", "2001:db8::/32"];
    let app = app(layer().block(key::ip().within(networks).unwrap()));
    for (address, status) in [
        ("10.255.0.1", 403),
        ("11.0.0.1", 200),
        ("192.0.2.7", 403),
        ("192.0.2.8", 200),
        ("2001:db8:1::1", 403),
        ("2001:db9::1", 200),
        // IPv4 in the forms of IPv6.
        ("::ffff:10.0.0.1", 403),
        ("64:ff9b::10.0.0.1", 403),
    ] {
        assert_eq!(
            send(&app, get_from(address, "/")).await.status.as_u16(),
            status,
            "{address}"
        );
    }
}

#[test]
fn a_list_may_have_the_form_of_a_nat64_network() {
    let within = key::ip()
        .nat64_prefixes(["2001:db8:64::/96"])
        .unwrap()
        .within(["2001:db8:64::10.0.0.0/104"])
        .unwrap();
    for (peer, is_listed) in [
        ("10.1.2.3:80", true),
        ("[2001:db8:64::10.1.2.3]:80", true),
        ("11.1.2.3:80", false),
        ("[2001:db8:65::10.1.2.3]:80", false),
    ] {
        let request = http::Request::get("/").extension(key::PeerAddr(peer.parse().expect("an address")));
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        assert_eq!(within(&parts), is_listed, "{peer}");
    }
}

#[tokio::test]
async fn networks_in_the_form_of_ipv6_contain_ipv4_addresses() {
    let app = app(layer().block(key::ip().within(["::ffff:10.0.0.0/104"]).unwrap()));
    assert_eq!(
        send(&app, get_from("10.0.0.1", "/")).await.status,
        StatusCode::FORBIDDEN
    );
}

#[tokio::test]
async fn the_whole_address_is_compared_also_where_networks_share_a_key() {
    let app = app(layer().block(
        key::ip()
            .ipv4_prefix(24)
            .ipv6_prefix(48)
            .within(["192.0.2.7", "2001:db8::7"])
            .unwrap(),
    ));
    for (address, status) in [
        ("192.0.2.7", 403),
        ("192.0.2.8", 200),
        ("2001:db8::7", 403),
        ("2001:db8::8", 200),
    ] {
        assert_eq!(
            send(&app, get_from(address, "/")).await.status.as_u16(),
            status,
            "{address}"
        );
    }
}

#[tokio::test]
async fn a_condition_of_networks_is_on_the_client_behind_trusted_proxies_only() {
    let client = key::client_ip(ClientIpSource::XForwardedFor)
        .trusted(["10.0.0.0/8"])
        .unwrap();
    let app = app(layer().block(client.within(["198.51.100.0/24"]).unwrap()));
    for (peer, forwarded_for, status) in [
        ("10.0.0.2", "198.51.100.9", 403),
        ("10.0.0.2", "203.0.113.1, 198.51.100.9", 403),
        ("10.0.0.2", "198.51.100.9, 203.0.113.1", 200),
        ("203.0.113.7", "198.51.100.9", 200),
        ("198.51.100.9", "203.0.113.7", 403),
    ] {
        let request = get_from(peer, "/").header("x-forwarded-for", forwarded_for);
        assert_eq!(
            send(&app, request).await.status.as_u16(),
            status,
            "{peer} {forwarded_for}"
        );
    }
}

/// Each kind of source, with what a proxy sends that leaves the client unknown, and what does not.
#[tokio::test]
async fn an_unknown_client_counts_as_its_proxy_but_is_in_no_network() {
    let single = || ClientIpSource::Header(http::HeaderName::from_static("x-real-ip"));
    let x_forwarded_for = "x-forwarded-for";
    let too_long = ["10.0.0.9"; 33].join(", ");
    let longest = ["10.0.0.9"; 32].join(", ");
    for (source, header, values, is_unknown) in [
        (ClientIpSource::XForwardedFor, x_forwarded_for, &[][..], true),
        (ClientIpSource::XForwardedFor, x_forwarded_for, &[""], true),
        (ClientIpSource::XForwardedFor, x_forwarded_for, &[" , ", ","], true),
        (ClientIpSource::XForwardedFor, x_forwarded_for, &["unknown"], true),
        (
            ClientIpSource::XForwardedFor,
            x_forwarded_for,
            &["198.51.100.9, _x"],
            true,
        ),
        (
            ClientIpSource::XForwardedFor,
            x_forwarded_for,
            &["198.51.100.9, é, 10.0.0.9"],
            true,
        ),
        (ClientIpSource::XForwardedFor, x_forwarded_for, &[&too_long], true),
        (ClientIpSource::XForwardedFor, x_forwarded_for, &[&longest], false),
        (ClientIpSource::XForwardedFor, x_forwarded_for, &["10.0.0.9"], false),
        (ClientIpSource::XForwardedFor, x_forwarded_for, &["10.0.0.9", ""], false),
        (ClientIpSource::Forwarded, x_forwarded_for, &["10.0.0.9"], true),
        (ClientIpSource::Forwarded, "forwarded", &["for=unknown"], true),
        (ClientIpSource::Forwarded, "forwarded", &["proto=https"], true),
        (ClientIpSource::Forwarded, "forwarded", &["for=10.0.0.9"], false),
        (
            ClientIpSource::XForwardedForHop(2),
            x_forwarded_for,
            &["10.0.0.9"],
            true,
        ),
        (
            ClientIpSource::XForwardedForHop(1),
            x_forwarded_for,
            &["10.0.0.9, x"],
            true,
        ),
        (
            ClientIpSource::XForwardedForHop(2),
            x_forwarded_for,
            &["10.0.0.9, x"],
            false,
        ),
        (single(), "x-real-ip", &[], true),
        (single(), "x-real-ip", &["10.0.0.9", "10.0.0.9"], true),
        (single(), "x-real-ip", &["10.0.0.9, 10.0.0.9"], true),
        (single(), "x-real-ip", &["10.0.0.9"], false),
    ] {
        let client = || key::client_ip(source.clone()).trusted(["10.0.0.0/8"]).unwrap();
        let networks = || client().within(["10.0.0.0/8"]).unwrap();
        let limited = |layer: fn(RateLimitLayer) -> RateLimitLayer| {
            let by_client = Policy::new("api", SlidingLog::per_hour(1)).key(client());
            app(layer(RateLimitLayer::new(MemoryStore::new(), by_client)).skip(networks()))
        };
        let request = || {
            values.iter().fold(get_from("10.0.0.2", "/"), |request, value| {
                request.header(header, *value)
            })
        };

        let app = limited(|layer| layer);
        let statuses = [send(&app, request()).await.status, send(&app, request()).await.status];
        let expected = if is_unknown { [200, 429] } else { [200, 200] };
        assert_eq!(statuses.map(|status| status.as_u16()), expected, "{header}: {values:?}");

        let (parts, ()) = request().body(()).unwrap().into_parts();
        assert_eq!(client().unknown()(&parts), is_unknown, "{header}: {values:?}");
        assert!(!key::ip().unknown()(&parts));
    }
}

#[tokio::test]
async fn an_unknown_client_is_blocked_by_choice() {
    let client = || {
        key::client_ip(ClientIpSource::XForwardedFor)
            .trusted(["10.0.0.0/8"])
            .unwrap()
            .trust_unix_peer()
    };
    let app = app(layer().block(client().unknown()));
    for (request, status) in [
        (get_from("10.0.0.2", "/"), 403),
        (get_from("10.0.0.2", "/").header("x-forwarded-for", "unknown"), 403),
        (get_from("10.0.0.2", "/").header("x-forwarded-for", "198.51.100.9"), 200),
        (get_from("203.0.113.7", "/").header("x-forwarded-for", "unknown"), 200),
        (http::Request::get("/").extension(UnixPeer), 403),
    ] {
        assert_eq!(send(&app, request).await.status.as_u16(), status);
    }

    let log = Log::capture();
    let unknown = client().unknown();
    for _ in 0..3 {
        assert!(unknown(&http::Request::new(()).into_parts().0), "no peer");
    }
    assert_eq!(
        log.text().matches("no peer address on the request").count(),
        1,
        "{}",
        log.text()
    );
}

#[test]
fn a_request_without_a_peer_is_in_no_network_and_is_logged_once() {
    let log = Log::capture();
    let within = key::ip().within(["10.0.0.0/8"]).unwrap();
    for _ in 0..3 {
        assert!(!within(&http::Request::new(()).into_parts().0));
    }
    assert_eq!(
        log.text().matches("no peer address on the request").count(),
        1,
        "{}",
        log.text()
    );

    let unix = http::Request::get("/").extension(UnixPeer).body(()).unwrap();
    assert!(!within(&unix.into_parts().0));
}

#[test]
fn a_list_of_networks_may_be_borrowed_and_shared() {
    let networks = vec!["10.0.0.0/8".to_owned()];
    let within = Arc::new(key::ip().within(&networks).unwrap());
    drop(networks);
    let peer = PeerAddr(SocketAddr::from(([10, 0, 0, 1], 80)));
    let request = http::Request::get("/").extension(peer).body(()).unwrap();
    assert!(within(&request.into_parts().0));
    let _ = layer().skip(move |parts| within(parts));
}

#[test]
fn a_wrong_network_is_an_error_with_a_right_one() {
    for (text, expected) in [
        ("10.0.0.0/33", "one looks like `10.0.0.0/8`"),
        ("ten", "one looks like `10.0.0.0/8`"),
        ("0.0.0.0/0", "contains every address"),
        ("::/0", "contains every address"),
    ] {
        let error = key::ip().within([text]).err().expect("an error").to_string();
        assert!(error.contains(text) && error.contains(expected), "{error}");
        assert!(!error.contains("trust"), "{error}");
    }
}

#[tokio::test]
async fn grpc_services_are_skipped_by_their_full_names() {
    let app = app(layer().skip_services(["grpc.health.v1.Health", "b.B"]));
    for (path, statuses) in [
        ("/grpc.health.v1.Health/Check", [200, 200]),
        ("/grpc.health.v1.Health/", [200, 200]),
        ("/b.B/M", [200, 200]),
        ("/b.B/Of_2", [200, 200]),
        ("/grpc.health.v1.Health", [200, 429]),
        ("/b.B/../M", [429, 429]),
        ("/b.B/M/x", [429, 429]),
        ("/b.B/%2e%2e", [429, 429]),
        ("/grpc.health.v1.Healthy/Check", [429, 429]),
        ("/grpc.health.v1.health/Check", [429, 429]),
        ("//grpc.health.v1.Health/Check", [429, 429]),
        ("/a/grpc.health.v1.Health/Check", [429, 429]),
        ("/", [429, 429]),
    ] {
        for status in statuses {
            assert_eq!(send(&app, get(path)).await.status.as_u16(), status, "{path}");
        }
    }
    for name in ["", "/b.B", "b.B/M"] {
        let skipped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| layer().skip_services([name])));
        assert!(skipped.is_err(), "{name}");
    }
}
