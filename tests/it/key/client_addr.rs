//! The address of the client in a handler of axum.

use axum::{Extension, Router, routing::get as route};
use http::StatusCode;
use tower_quota::{
    KeyExtractor, Policies,
    key::{self, ClientAddr, ClientIpSource, Ip, UnixPeer},
};

use crate::support::{Log, get, get_from, send};

fn app() -> Router {
    Router::new()
        .route("/", route(async |ClientAddr(address): ClientAddr| address.to_string()))
        .route(
            "/option",
            route(async |address: Option<ClientAddr>| format!("{address:?}")),
        )
}

/// As a file describes it.
fn of_file() -> Ip {
    let file = r#"{"policies": {}, "client-ip": {"header": "x-forwarded-for", "trusted": ["10.0.0.0/8"]}}"#;
    serde_json::from_str::<Policies>(file).expect("a good file").client_ip()
}

#[tokio::test]
async fn the_address_is_the_one_that_is_counted() {
    let of_code = key::client_ip(ClientIpSource::XForwardedFor).trusted(["10.0.0.0/8"]);
    let of_code = of_code.expect("a network");
    let peer: Policies = serde_json::from_str(r#"{"policies": {}}"#).expect("a good file");
    for (rule, peer, address) in [
        (of_code.clone(), "10.0.0.2", "198.51.100.9"),
        (of_code, "203.0.113.7", "203.0.113.7"),
        (of_file(), "10.0.0.2", "198.51.100.9"),
        (key::ip(), "10.0.0.2", "10.0.0.2"),
        (peer.client_ip(), "::ffff:10.0.0.2", "10.0.0.2"),
    ] {
        let request = || get_from(peer, "/").header("x-forwarded-for", "192.0.2.66, 198.51.100.9");
        let received = send(&app().layer(Extension(rule.clone())), request()).await;
        assert_eq!(received.body, address);

        let (parts, ()) = request().body(()).expect("a good request").into_parts();
        let key = rule.extract(&parts).expect("a peer").expect("a key");
        assert_eq!(key, rule.key_of(address.parse().expect("an address")));
    }
}

#[tokio::test]
async fn without_a_rule_or_a_peer_the_response_names_the_fix() {
    let log = Log::capture();
    for path in ["/", "/option"] {
        let received = send(&app(), get(path)).await;
        assert_eq!(received.status, StatusCode::INTERNAL_SERVER_ERROR);
        let text = String::from_utf8_lossy(&received.body).into_owned();
        assert!(text.contains("add `.layer(axum::Extension(key::ip()))`"), "{text}");

        let without_peer = http::Request::get(path);
        let received = send(&app().layer(Extension(key::ip())), without_peer).await;
        assert_eq!(received.status, StatusCode::INTERNAL_SERVER_ERROR);
        let text = String::from_utf8_lossy(&received.body).into_owned();
        assert!(text.contains("into_make_service_with_connect_info"), "{text}");
    }
    // The log has it once; without nextest, another test of the process may have logged it before.
    let least = usize::from(std::env::var_os("NEXTEST").is_some());
    let logged = log.text().matches("a handler cannot run").count();
    assert!((least..=1).contains(&logged), "{}", log.text());
}

#[tokio::test]
async fn a_peer_on_a_unix_socket_has_no_address_unless_a_proxy_recorded_one() {
    let unix = |path: &str| http::Request::get(path).extension(UnixPeer);
    let app = |rule: Ip| app().layer(Extension(rule));
    let received = send(&app(key::ip()), unix("/")).await;
    assert_eq!(received.status, StatusCode::BAD_REQUEST);
    assert_eq!(send(&app(key::ip()), unix("/option")).await.body, "None");

    let rule = key::client_ip(ClientIpSource::XForwardedFor).trusted(["10.0.0.0/8"]);
    let rule = rule.expect("a network").trust_unix_peer();
    let forwarded = unix("/").header("x-forwarded-for", "198.51.100.9");
    assert_eq!(send(&app(rule), forwarded).await.body, "198.51.100.9");
}
