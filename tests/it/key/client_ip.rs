//! The address of a client behind proxies, row by row of `tests/vectors/client-ip.json` (or the file in the environment
//! variable `CLIENT_IP_VECTORS`) and of `client-ip-more.json`.

use std::{collections::BTreeMap, net::SocketAddr};

use axum::extract::ConnectInfo;
use http::{HeaderName, HeaderValue, Request};
use serde::Deserialize;
use tower_quota::{
    KeyExtractor,
    key::{self, ClientIpSource, Ip, PeerAddr, UnixPeer},
};

use crate::support::{Log, get_from};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Vectors {
    profiles: BTreeMap<String, Profile>,
    grouping: Grouping,
    vectors: Vec<Vector>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Profile {
    source: String,
    #[serde(default)]
    trusted: Vec<String>,
    #[serde(default)]
    trust_unix: bool,
    n: Option<usize>,
    name: Option<String>,
    /// Instead of those of the grouping.
    nat64: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Grouping {
    ipv4: u8,
    ipv6: u8,
    nat64: Vec<String>,
    max_hops: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Vector {
    id: String,
    profile: String,
    peer: String,
    headers: Vec<Header>,
    client: String,
    key: String,
    why: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    name: String,
    value: Option<String>,
    value_hex: Option<String>,
}

impl Header {
    fn value(&self) -> HeaderValue {
        let bytes = match (&self.value, &self.value_hex) {
            (Some(value), None) => value.clone().into_bytes(),
            (None, Some(hex)) => {
                let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal digits");
                (0..hex.len()).step_by(2).map(byte).collect()
            }
            _ => panic!("a header has a value or a value_hex"),
        };
        HeaderValue::from_bytes(&bytes).expect("a header value")
    }
}

impl Profile {
    fn extractor(&self) -> Ip {
        let source = match self.source.as_str() {
            "peer" => return key::ip(),
            "xff" => ClientIpSource::XForwardedFor,
            "count" => ClientIpSource::XForwardedForHop(self.n.expect("a number of hops")),
            "forwarded" => ClientIpSource::Forwarded,
            "single" => {
                let name = self.name.as_deref().expect("the name of a header");
                ClientIpSource::Header(name.parse().expect("the name of a header"))
            }
            other => panic!("`{other}` is not a source"),
        };

        let client = key::client_ip(source);
        let ip = match self.trusted.is_empty() {
            true => client.trust_any_peer(),
            false => client.trusted(&self.trusted).unwrap(),
        };
        match self.trust_unix {
            true => ip.trust_unix_peer(),
            false => ip,
        }
    }
}

fn key_of(extractor: &Ip, vector: &Vector) -> String {
    let mut request = Request::get("/").body(()).expect("a request");
    match vector.peer.as_str() {
        "unix" => drop(request.extensions_mut().insert(UnixPeer)),
        address => {
            let peer = SocketAddr::new(address.parse().expect("an address"), 4711);
            request.extensions_mut().insert(PeerAddr(peer));
        }
    }
    for header in &vector.headers {
        let name: HeaderName = header.name.parse().expect("the name of a header");
        request.headers_mut().append(name, header.value());
    }

    let (parts, ()) = request.into_parts();
    let key = extractor.extract(&parts).expect("a key").expect("a key");
    match extractor.address(&parts) {
        Ok(address) => assert_eq!(extractor.key_of(address), key, "{}", vector.id),
        Err(error) => assert_eq!(
            (error.is_absent(), &*key.to_string()),
            (true, "ip=unix"),
            "{}",
            vector.id
        ),
    }
    key.to_string().strip_prefix("ip=").expect("an address").to_owned()
}

#[test]
fn every_row_of_the_client_ip_vectors_holds() {
    let own = std::env::var("CLIENT_IP_VECTORS").ok();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/client-ip.json");
    let rows = assert_every_row_holds(own.as_deref().unwrap_or(path));
    assert!(rows >= 50 || own.is_some(), "{path} has hardly any rows");
}

#[test]
fn every_row_of_the_further_client_ip_vectors_holds() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/client-ip-more.json");
    assert!(assert_every_row_holds(path) >= 50, "{path} has hardly any rows");
}

/// As the crate `client-ip` has it, addresses of IPv6 are without brackets.
#[test]
fn the_viewer_address_of_cloudfront_has_a_port() {
    const VIEWER: &str = "cloudfront-viewer-address";
    let viewer = ClientIpSource::Header(VIEWER.parse().expect("a name"));
    let extractor = key::client_ip(viewer).trust_any_peer();
    let key_of = |value: &str| {
        let request = get_from("10.0.0.2", "/").header(VIEWER, value);
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        extractor.extract(&parts).expect("a key").expect("a key").to_string()
    };
    for (value, key) in [
        ("198.51.100.10:46532", "ip=198.51.100.10"),
        ("2001:db8:1:2:3:4:5:6:46532", "ip=2001:db8:1:2::/64"),
        ("2001:db8:1:2:aaaa:4:5:7:443", "ip=2001:db8:1:2::/64"),
        ("2001:db8:9::1:46532", "ip=2001:db8:9::/64"),
        ("2001:db8:9:8:7:6:5:4653", "ip=10.0.0.2"),
        ("[2001:db8:9::1]:4653", "ip=2001:db8:9::/64"),
        ("198.51.100.10", "ip=198.51.100.10"),
        ("2001:db8:9::1:99999", "ip=10.0.0.2"),
    ] {
        assert_eq!(key_of(value), key, "{value}");
    }
}

#[test]
fn forwarded_requests_that_count_under_their_peer_are_logged_once() {
    let count = |extractor: &Ip, field: &str| {
        let log = Log::capture();
        for _ in 0..3 {
            let request = get_from("10.0.0.1", "/").header(field, "for=198.51.100.9");
            let (parts, ()) = request.body(()).unwrap().into_parts();
            extractor.extract(&parts).unwrap();
        }
        log.text().matches("a request has been forwarded").count()
    };
    for field in ["x-forwarded-for", "forwarded", "x-real-ip", "cf-connecting-ip"] {
        let ip = key::ip();
        assert_eq!(count(&ip, "via"), 0);
        assert_eq!(count(&ip, field), 1, "{field}");
        assert_eq!(count(&ip, field), 0, "{field}");
        let behind_a_proxy = key::client_ip(ClientIpSource::Forwarded).trusted(["10.0.0.1"]).unwrap();
        assert_eq!(count(&behind_a_proxy, field), 0, "{field}");
    }
    // A thousand requests are searched for all names.
    let ip = key::ip();
    let (parts, ()) = get_from("10.0.0.1", "/").body(()).unwrap().into_parts();
    for _ in 0..1_000 {
        ip.extract(&parts).unwrap();
    }
    assert_eq!(count(&ip, "x-real-ip"), 0);
    assert_eq!(count(&ip, "forwarded"), 1);
}

#[test]
fn a_proxy_that_records_clients_in_another_header_is_logged_once() {
    for (source, sent, logged) in [
        (
            ClientIpSource::Header("x-real-ip".parse().unwrap()),
            "x-forwarded-for",
            1,
        ),
        (ClientIpSource::Forwarded, "x-forwarded-for", 1),
        (ClientIpSource::XForwardedForHop(1), "forwarded", 1),
        (ClientIpSource::XForwardedFor, "via", 0),
        (ClientIpSource::Forwarded, "forwarded", 0),
    ] {
        let log = Log::capture();
        let ip = key::client_ip(source.clone()).trusted(["10.0.0.1"]).unwrap();
        for _ in 0..3 {
            let request = get_from("10.0.0.1", "/").header(sent, "nobody");
            let (parts, ()) = request.body(()).unwrap().into_parts();
            assert_eq!(ip.extract(&parts).unwrap().unwrap().to_string(), "ip=10.0.0.1");
        }
        let text = log.text();
        let found = text.matches("a trusted proxy has not sent the header").count();
        assert_eq!(found, logged, "{source:?}, {sent}: {text}");
    }
}

#[test]
fn the_peer_of_the_application_is_that_of_a_server() {
    let [own, of_the_server] =
        ["198.51.100.1:1", "203.0.113.1:1"].map(|peer| peer.parse::<SocketAddr>().expect("a peer"));
    let request = Request::get("/")
        .extension(PeerAddr(own))
        .extension(ConnectInfo(of_the_server));
    let (parts, ()) = request.body(()).expect("a request").into_parts();
    assert_eq!(key::ip().address(&parts).ok(), Some(own.ip()));

    let mapped = key::client_ip(ClientIpSource::XForwardedFor)
        .trusted(["10.0.0.0/8"])
        .expect("a network")
        .peer(|_| "::ffff:10.0.0.2".parse().ok());
    let request = Request::get("/").header("x-forwarded-for", "198.51.100.1");
    let (parts, ()) = request.body(()).expect("a request").into_parts();
    assert_eq!(mapped.address(&parts).ok(), Some(own.ip()));
}

#[test]
fn groups_that_are_too_large_or_longer_than_an_address_are_refused() {
    for group in [
        || key::ip().ipv4_prefix(7),
        || key::ip().ipv4_prefix(33),
        || key::ip().ipv6_prefix(31),
        || key::ip().ipv6_prefix(129),
    ] {
        assert!(std::panic::catch_unwind(group).is_err());
    }
}

#[test]
fn trusted_networks_follow_the_nat64_prefixes() {
    let client = |trusted: &str, prefixes: &[&str], peer: &str| {
        let proxies = key::client_ip(ClientIpSource::XForwardedFor)
            .trusted([trusted])
            .unwrap();
        let request = get_from(peer, "/").header("x-forwarded-for", "198.51.100.9");
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        let key = proxies
            .nat64_prefixes(prefixes)
            .unwrap()
            .extract(&parts)
            .expect("a peer");
        key.expect("an address").to_string()
    };
    // A network of the prefix is the IPv4 network, and only then.
    let own = ["2001:db8:64::/96"];
    assert_eq!(
        client("2001:db8:64::a00:0/104", &own, "2001:db8:64::a00:2"),
        "ip=198.51.100.9"
    );
    assert_eq!(client("2001:db8:64::a00:0/104", &own, "10.0.0.2"), "ip=198.51.100.9");
    assert_eq!(client("2001:db8:64::a00:0/104", &[], "10.0.0.2"), "ip=10.0.0.2");
    assert_eq!(client("64:ff9b::a00:0/104", &[], "10.0.0.2"), "ip=10.0.0.2");
    assert_eq!(client("64:ff9b::a00:0/104", &[], "64:ff9b::a00:2"), "ip=198.51.100.9");

    let host = ["2001:db8:64::1/96"];
    assert!(key::ip().nat64_prefixes(host).is_err());

    let all = key::client_ip(ClientIpSource::XForwardedFor).trusted(own).unwrap();
    let error = all.nat64_prefixes(own).expect_err("all of IPv4 is trusted").to_string();
    assert!(
        error.starts_with("`2001:db8:64::/96` contains every address"),
        "{error}"
    );
}

#[test]
fn a_forwarding_peer_that_is_not_trusted_is_logged_once_with_the_fix() {
    let log_of = |extractor: &Ip, request: http::request::Builder| {
        let log = Log::capture();
        let (parts, ()) = request.body(()).unwrap().into_parts();
        for _ in 0..3 {
            extractor.extract(&parts).unwrap();
        }
        log.text()
    };
    let real_ip = HeaderName::from_static("x-real-ip");
    for (source, field) in [
        (ClientIpSource::XForwardedFor, "x-forwarded-for"),
        (ClientIpSource::XForwardedFor, "forwarded"),
        (ClientIpSource::Forwarded, "forwarded"),
        (ClientIpSource::Header(real_ip), "x-real-ip"),
    ] {
        let client = key::client_ip(source).trusted(["10.0.0.1"]).unwrap();
        assert_eq!(log_of(&client, get_from("10.0.0.2", "/")), "");
        let forwarded = || get_from("10.0.0.2", "/").header(field, "198.51.100.9");
        let text = log_of(&client, forwarded());
        assert_eq!(
            text.matches("add its address to `trusted`").count(),
            1,
            "{field}: {text}"
        );
        assert!(text.contains("peer=\"10.0.0.2\""), "{text}");
        assert_eq!(log_of(&client, forwarded()), "", "{field}");
    }

    let client = key::client_ip(ClientIpSource::XForwardedFor)
        .trusted(["10.0.0.1"])
        .unwrap();
    let request = Request::get("/").extension(UnixPeer);
    let text = log_of(&client, request.header("x-forwarded-for", "198.51.100.9"));
    assert_eq!(text.matches("use `trust_unix_peer`").count(), 1, "{text}");
}

fn assert_every_row_holds(path: &str) -> usize {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let vectors: Vectors = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"));
    let Grouping {
        ipv4,
        ipv6,
        nat64,
        max_hops,
    } = &vectors.grouping;
    assert_eq!(*max_hops, 32);

    let mut wrong = Vec::new();
    for vector in &vectors.vectors {
        let profile = &vectors.profiles[&vector.profile];
        let nat64 = profile.nat64.as_ref().unwrap_or(nat64);
        let by_address = profile.extractor().nat64_prefixes(nat64).unwrap();
        let grouped = by_address.clone().ipv4_prefix(*ipv4).ipv6_prefix(*ipv6);
        let by_address = by_address.ipv4_prefix(32).ipv6_prefix(128);

        let (client, key) = (key_of(&by_address, vector), key_of(&grouped, vector));
        if (&client, &key) != (&vector.client, &vector.key) {
            let Vector {
                id,
                client: right_client,
                key: right_key,
                why,
                ..
            } = vector;
            wrong.push(format!(
                "{id}: {client} and {key}, not {right_client} and {right_key}: {why}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    vectors.vectors.len()
}
