//! Keys of requests over a connection and their keys in Redis, row by row of `tests/vectors/keys.md`.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc};

use axum::{
    Router,
    body::Body,
    extract::{ConnectInfo, Path},
    middleware::{Next, from_fn},
    routing::{any, get},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use fastrand::Rng;
use http::{HeaderValue, Method, Request, Response, StatusCode, Version, request::Builder};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tonic::transport::server::UdsConnectInfo;
use tower_quota::{
    FixedWindow, Key, KeyExtractor, Limiter, MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog,
    key::{self, ClientIpSource, UnixPeer},
    store::Store,
};

use crate::support::{self, Redis, connected, get_from, patient, send};

async fn patient_store(redis: &Redis) -> RedisStore {
    connected(patient(), &redis.url()).await
}

/// Adds the key of each request to its response, in the field `x-key`.
fn reporting(router: Router, extractor: impl KeyExtractor) -> Router {
    let extractor = Arc::new(extractor);
    router.layer(from_fn(move |request: Request<Body>, next: Next| {
        let extractor = extractor.clone();
        async move {
            let (parts, body) = request.into_parts();
            let key = match extractor.extract(&parts) {
                Ok(key) => key.expect("the extractor applies"),
                Err(error) => {
                    let mut refused = Response::new(Body::from(error.to_string()));
                    *refused.status_mut() = match error.is_misconfigured() {
                        true => StatusCode::INTERNAL_SERVER_ERROR,
                        false => StatusCode::BAD_REQUEST,
                    };
                    return refused;
                }
            };
            let mut response = next.run(Request::from_parts(parts, body)).await;
            let text = HeaderValue::from_str(key.as_str()).expect("a key is printable");
            response.headers_mut().insert("x-key", text);
            response
        }
    }))
}

/// A server on a port of its own.
struct Server(SocketAddr);

impl Server {
    async fn on(addr: &str, app: Router) -> Option<Self> {
        let listener = TcpListener::bind(addr).await.ok()?;
        let addr = listener.local_addr().expect("a bound port");
        let service = app.into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async { axum::serve(listener, service).await });
        Some(Self(addr))
    }

    /// A server that answers every request with its key.
    async fn reporting(extractor: impl KeyExtractor) -> Self {
        Self::routing(Router::new().fallback(async || "hi"), extractor).await
    }

    async fn routing(router: Router, extractor: impl KeyExtractor) -> Self {
        Self::on("127.0.0.1:0", reporting(router, extractor))
            .await
            .expect("a free port")
    }

    /// The status and the key of a request in these bytes.
    async fn send(&self, request: &[u8]) -> (u16, Option<String>) {
        send_bytes(self.0, request).await
    }

    async fn key(&self, target: &str, fields: &[(&str, &[u8])]) -> String {
        self.key_with("GET", target, fields).await
    }

    async fn key_with(&self, method: &str, target: &str, fields: &[(&str, &[u8])]) -> String {
        let (status, key) = self.send(&request(method, target, fields)).await;
        key.unwrap_or_else(|| panic!("{method} {target} has no key: {status}"))
    }
}

fn request(method: &str, target: &str, fields: &[(&str, &[u8])]) -> Vec<u8> {
    let mut request = format!("{method} {target} HTTP/1.1\r\nhost: localhost\r\n").into_bytes();
    for (name, value) in fields {
        request.extend_from_slice(format!("{name}: ").as_bytes());
        request.extend_from_slice(value);
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"\r\n");
    request
}

async fn send_bytes(addr: SocketAddr, request: &[u8]) -> (u16, Option<String>) {
    let mut connection = TcpStream::connect(addr).await.expect("the server accepts");
    connection.write_all(request).await.expect("the server reads");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(connection.read_u8().await.expect("the server answers"));
    }
    let head = String::from_utf8(head).expect("fields are text");
    let status = head[9..12].parse().expect("a status");
    let key = head.lines().find_map(|line| line.strip_prefix("x-key: "));
    (status, key.map(str::to_owned))
}

/// The key of a user in the vectors.
fn user_and_path() -> impl KeyExtractor {
    (key::header("x-user"), key::path())
}

type UserAndPath = (&'static [u8], &'static str);

#[tokio::test]
async fn ky_02_ky_04_ky_06_ky_09_ky_17_two_lists_of_components_are_two_keys() {
    let server = Server::reporting(user_and_path()).await;
    let rows: [(&str, UserAndPath, UserAndPath); 8] = [
        ("KY-02", (b"a:/x", "/y"), (b"a", "/x:/y")),
        ("KY-04", (b"a:b", "/c"), (b"a", "/:b/c")),
        (
            "KY-02 with our own delimiters",
            (b"a|path=/x", "/y"),
            (b"a", "/x|path=/y"),
        ),
        (
            "KY-02 with our own escapes",
            (b"a^7Cpath=/x", "/y"),
            (b"a|path=/x", "/y"),
        ),
        ("KY-06", (b"{x}", "/"), (b"{x}y", "/")),
        ("KY-09", (b"a\xff", "/"), (b"a\xfe", "/")),
        (
            "KY-09 with the lossy replacement",
            (b"a\xff", "/"),
            ("a\u{fffd}".as_bytes(), "/"),
        ),
        ("KY-17", (b"a, b", "/"), (b"a", "/")),
    ];
    for (id, (user_a, path_a), (user_b, path_b)) in rows {
        let a = server.key(path_a, &[("X-User", user_a)]).await;
        let b = server.key(path_b, &[("X-User", user_b)]).await;
        assert_ne!(a, b, "{id}");
        assert!(!a.contains(['{', '}']) && !b.contains(['{', '}']), "{id}: {a} and {b}");
    }

    // No server accepts the bytes of KY-04 as a target.
    let of = |user, path| Key::header("x-user", user).and(Key::path(path));
    assert_ne!(of("a:b", "/c"), of("a", ":b/c"));
}

#[tokio::test]
async fn ky_11_ky_12_an_absent_header_is_no_value_that_a_client_can_send() {
    let or_anonymous = || key::header("x-user").or(key::constant("anonymous"));
    let server = Server::reporting(or_anonymous()).await;
    let absent = server.key("/", &[]).await;
    assert_eq!(absent, "const=anonymous");

    let literals: [(&str, &[u8]); 7] = [
        ("KY-11", b""),
        ("KY-12", b"anonymous"),
        ("KY-12", b"-"),
        ("KY-12", b"none"),
        ("KY-12", b"null"),
        ("KY-12", b"unknown"),
        ("KY-12 in our own spelling", b"const=anonymous"),
    ];
    let mut seen = BTreeSet::from([absent]);
    for (id, literal) in literals {
        let key = server.key("/", &[("X-User", literal)]).await;
        assert!(seen.insert(key.clone()), "{id}: {key} is another literal's key");
    }

    let strict = Server::reporting(key::header("x-user")).await;
    assert_eq!(
        strict.send(&request("GET", "/", &[])).await,
        (400, None),
        "without `.or(..)`"
    );
    assert_eq!(strict.key("/", &[("X-User", b"")]).await, "header:x-user=");
}

/// A template of a client sends the header of a secret that is not set with an empty value.
#[tokio::test]
async fn an_empty_credential_is_absent() {
    let server = Server::reporting(key::header("x-api-key").or(key::constant("anonymous"))).await;
    for fields in [&[][..], &[("X-Api-Key", b"".as_slice())], &[("X-Api-Key", b" \t ")]] {
        assert_eq!(server.key("/", fields).await, "const=anonymous", "{fields:?}");
    }
    let twofold = request("GET", "/", &[("X-Api-Key", b""), ("X-Api-Key", b"sk-42")]);
    assert_eq!(server.send(&twofold).await, (400, None));

    let strict = Server::reporting(key::header("x-api-key")).await;
    assert_eq!(
        strict.send(&request("GET", "/", &[("X-Api-Key", b"")])).await,
        (400, None)
    );
}

#[tokio::test]
async fn ky_13_ky_15_spellings_of_one_header_are_one_key() {
    let server = Server::reporting(key::header("X-USER-ID")).await;
    let alice = server.key("/", &[("x-user-id", b"alice")]).await;
    assert_eq!(alice, server.key("/", &[("x-user-id", b" \t alice \t")]).await, "KY-13");
    assert_eq!(alice, server.key("/", &[("X-User-Id", b"alice")]).await, "KY-15");

    let lower = Server::reporting(key::header("x-user-id")).await;
    assert_eq!(alice, lower.key("/", &[("X-USER-ID", b"alice")]).await, "KY-15");
    assert_eq!(alice, Key::header("X-User-ID", " alice ").to_string());
    assert_ne!(
        alice,
        lower.key("/", &[("x-user-id", b"Alice")]).await,
        "values keep their case"
    );
}

#[tokio::test]
async fn ky_16_two_lines_of_a_header_are_malformed() {
    for lines in [[b"a", b"b"], [b"b", b"a"], [b"a", b"a"]] {
        let fields = lines.map(|line| ("X-User", line.as_slice()));
        let twofold = request("GET", "/", &fields);
        let strict = Server::reporting(key::header("x-user")).await;
        assert_eq!(strict.send(&twofold).await, (400, None));
        let lenient = Server::reporting(key::header("x-user").or(key::constant("anonymous"))).await;
        assert_eq!(
            lenient.send(&twofold).await,
            (400, None),
            "`.or(..)` does not catch what is malformed"
        );
    }
}

/// RFC 9113 §8.2.3: a client of HTTP/2 may send each cookie in a line of its own.
#[test]
fn the_lines_of_cookies_are_one_value_from_http_2_on() {
    let extract = |name, version, lines: &[&str]| {
        let mut request = Request::get("/").version(version);
        for line in lines {
            request = request.header(name, *line);
        }
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        let key = key::header(name).extract(&parts);
        key.map(|key| key.expect("it is there"))
            .map_err(|error| error.to_string())
    };
    let long = |length| "a".repeat(length);
    for version in [Version::HTTP_2, Version::HTTP_3] {
        let cookies = |lines: &[&str]| extract("cookie", version, lines);
        for lines in [&["a=1; b=2; c=3"][..], &["a=1", "b=2", "c=3"], &["a=1; b=2", "c=3"]] {
            assert_eq!(cookies(lines), Ok(Key::header("cookie", "a=1; b=2; c=3")), "{lines:?}");
        }
        assert_eq!(cookies(&["b=2", "a=1"]), Ok(Key::header("cookie", "b=2; a=1")));

        let longest = format!("{}; {}", long(2_047), long(2_047));
        assert_eq!(
            cookies(&[&long(2_047), &long(2_047)]),
            Ok(Key::header("cookie", longest))
        );
        for lines in [[&long(2_047), &long(2_048), ""], [&long(4_095), "", "s=1"]] {
            let error = cookies(&lines).expect_err("it is too long");
            assert!(error.contains("longer than 4096 bytes"), "{error}");
        }
        assert!(extract("x-user", version, &["a", "b"]).is_err());
    }
    // RFC 6265 §5.4: a client of HTTP/1.1 sends one line, whatever the number of cookies.
    for version in [Version::HTTP_10, Version::HTTP_11] {
        assert!(extract("cookie", version, &["a=1", "b=2"]).is_err());
    }
}

#[tokio::test]
async fn ky_19_ky_21_ky_23_ky_25_ky_26_which_spellings_of_a_path_are_one_key() {
    let plain = Server::reporting(key::path()).await;
    let stripping = Server::reporting(key::path().strip_trailing_slash()).await;
    let collapsing = Server::reporting(key::path().collapse_slashes()).await;
    let dots = Server::reporting(key::path().remove_dot_segments()).await;
    let folding = Server::reporting(key::path().ignore_case()).await;

    for (id, server, a, b, equal) in [
        ("KY-19", &plain, "/a?x=1", "/a?x=2", true),
        ("KY-19", &plain, "/a?", "/a", true),
        ("KY-21", &plain, "/users/1", "/users/%31", true),
        ("KY-21", &plain, "/%7ea", "/~%61", true),
        ("KY-21, nothing twice", &plain, "/%2531", "/1", false),
        ("KY-21, nothing twice", &plain, "/%25%32%46", "/%2F", false),
        ("KY-21, invalid escapes are kept", &plain, "/%zz", "/%ZZ", false),
        ("KY-21, invalid escapes are kept", &plain, "/%zz", "/%25zz", true),
        ("KY-21, no escape is made", &plain, "/%%341", "/%41", false),
        (
            "reserved characters",
            &plain,
            "/o'b+x@a.com",
            "/o%27b%2bx%40a.com",
            true,
        ),
        ("characters outside ASCII", &plain, "/caf%c3%A9", "/caf%C3%a9", true),
        ("KY-23", &plain, "/a%2Fb", "/a/b", false),
        ("KY-23", &plain, "/a%2fb", "/a%2Fb", true),
        ("KY-25", &plain, "/a/", "/a", false),
        ("KY-25", &stripping, "/a/", "/a", true),
        ("KY-25", &stripping, "/", "//", true),
        ("KY-26", &plain, "//a//b", "/a/b", false),
        ("KY-26", &plain, "/a/./b", "/a/b", false),
        ("KY-26", &plain, "/a/c/../b", "/a/b", false),
        ("KY-26", &collapsing, "//a//b", "/a/b", true),
        ("KY-26", &collapsing, "/a/./b", "/a/b", false),
        ("KY-26", &dots, "/a/./b", "/a/b", true),
        ("KY-26", &dots, "/a/c/../b", "/a/b", true),
        ("KY-26", &dots, "/a/c/%2E%2e/b", "/a/b", true),
        ("KY-26", &dots, "/../../a", "/a", true),
        ("KY-26", &dots, "//a//b", "/a/b", false),
        ("case", &plain, "/A", "/a", false),
        ("case", &folding, "/A", "/a", true),
    ] {
        let (key_a, key_b) = (server.key(a, &[]).await, server.key(b, &[]).await);
        assert_eq!(key_a == key_b, equal, "{id}: {a} is {key_a}, {b} is {key_b}");
    }
}

#[tokio::test]
async fn a_parameter_that_axum_decodes_from_many_spellings_has_one_quota() {
    let redis = Redis::start();
    let stores: [Arc<dyn Store>; 2] = [Arc::new(patient_store(&redis).await), Arc::new(MemoryStore::new())];
    for store in stores {
        let policy = Policy::new("reset", SlidingLog::per_hour(1)).key(key::path());
        let echo = get(async |Path(user): Path<String>| user).layer(RateLimitLayer::new(store, policy));
        let app = Router::new().route("/reset/{user}", echo);
        let mut admitted = Vec::new();
        for user in [
            "o'b+x@a.com",
            "o%27b+x@a.com",
            "o'b%2Bx@a.com",
            "o'b%2bx%40a.com",
            "%6F'b+x@a%2Ecom",
        ] {
            let response = send(&app, support::get(&format!("/reset/{user}"))).await;
            if response.status == StatusCode::OK {
                admitted.push(user);
            }
        }
        assert_eq!(admitted, ["o'b+x@a.com"]);
    }
}

#[test]
fn every_character_that_a_path_may_hold_has_one_key_in_every_spelling() {
    let key_of = |path: &str| {
        let request = Request::get(path).body(()).ok()?;
        Some(
            key::path()
                .extract(&request.into_parts().0)
                .expect("a key")
                .expect("a key"),
        )
    };
    let mut reserved = 0;
    for character in ('!'..='~').chain(['é', '€', '😀']) {
        let mut buffer = [0; 4];
        let bytes = character.encode_utf8(&mut buffer).bytes();
        let escaped: String = bytes.map(|byte| format!("%{byte:02X}")).collect();
        let escaped = [format!("/a{escaped}b"), format!("/a{}b", escaped.to_lowercase())];
        let keys = escaped.map(|path| key_of(&path).expect("a URI"));
        assert_eq!(keys[0], keys[1], "{character}");
        let Some(plain) = key_of(&format!("/a{character}b")).filter(|_| !matches!(character, '?' | '#')) else {
            continue;
        };
        assert_eq!(plain == keys[0], character != '/', "{character}");
        reserved += usize::from(!character.is_alphanumeric() && !"-._~".contains(character));
    }
    assert!(reserved >= 21, "{reserved}");
}

#[tokio::test]
async fn ky_28_requests_without_a_path_have_two_keys() {
    let server = Server::reporting((key::method(), key::path())).await;
    assert_eq!(server.key_with("OPTIONS", "*", &[]).await, "method=OPTIONS|path=*");
    assert_eq!(server.key_with("CONNECT", "h:443", &[]).await, "method=CONNECT|path=");

    let by_path = Server::reporting(key::path()).await;
    let options = by_path.key_with("OPTIONS", "*", &[]).await;
    let connect = by_path.key_with("CONNECT", "h:443", &[]).await;
    assert_ne!(options, connect);
    assert_ne!(connect, by_path.key("/", &[]).await);
    let all = key::path()
        .strip_trailing_slash()
        .collapse_slashes()
        .remove_dot_segments()
        .ignore_case();
    let lenient = Server::reporting(all).await;
    assert_eq!(options, lenient.key_with("OPTIONS", "*", &[]).await);
    assert_eq!(connect, lenient.key_with("CONNECT", "h:443", &[]).await);

    let by_route = Server::routing(Router::new().route("/", get(async || "hi")), key::route()).await;
    assert_eq!(by_route.key_with("OPTIONS", "*", &[]).await, "unmatched=");
    assert_eq!(by_route.key_with("CONNECT", "h:443", &[]).await, "unmatched=");
}

const USERS: &str = "/users/{id}";

#[tokio::test]
async fn ky_20_ky_30_a_route_is_its_template() {
    let router = Router::new().route(USERS, get(async || "hi"));
    let server = Server::routing(router, key::route()).await;

    let one = server.key("/users/1", &[]).await;
    assert_eq!(one, "route=/users/^7Bid^7D");
    for path in ["/users/2", "/users/%31", "/users/1?x=2"] {
        assert_eq!(one, server.key(path, &[]).await, "KY-20: {path}");
    }
    assert_eq!(
        one,
        server.key_with("DELETE", "/users/1", &[]).await,
        "405 is of the route"
    );
    for path in ["/rand1", "/rand2", "/users", "/users/1/", "/%7Bid%7D"] {
        assert_eq!(server.key(path, &[]).await, "unmatched=", "KY-30: {path}");
    }
}

/// Routers that answer `/api/users/{id}`, with the layer inside or outside of nested routers.
fn nested(extractor: &(impl KeyExtractor + Clone)) -> [(&'static str, Router); 9] {
    let inner = || Router::new().route(USERS, get(async || "hi"));
    let with_fallback = || inner().fallback(async || "none");
    let around = |router| reporting(router, extractor.clone());
    let within = |router| reporting(router, extractor.clone());
    let (a, b) = (Router::new().route("/a", get(async || "hi")), with_fallback());
    [
        ("around a nest", around(Router::new().nest("/api", inner()))),
        (
            "around a nest with a fallback",
            around(Router::new().nest("/api", with_fallback())),
        ),
        (
            "within a nest with a fallback",
            Router::new().nest("/api", within(with_fallback())),
        ),
        (
            "between two nests",
            Router::new().nest("/api", {
                let users = Router::new()
                    .route("/{id}", get(async || "hi"))
                    .fallback(async || "none");
                within(Router::new().nest("/users", users).fallback(async || "none"))
            }),
        ),
        (
            "within a nested service",
            Router::new().nest_service("/api", within(with_fallback())),
        ),
        (
            "around merged routers",
            around(Router::new().nest("/api", a.clone().merge(b.clone()))),
        ),
        (
            "within one of merged routers",
            Router::new().nest("/api", a.merge(within(b))),
        ),
        (
            "within a fallback service",
            Router::new().fallback_service(within(Router::new().nest("/api", with_fallback()))),
        ),
        (
            "around two nests",
            around(Router::new().nest(
                "/api",
                Router::new().nest("/users", {
                    Router::new()
                        .route("/{id}", get(async || "hi"))
                        .fallback(async || "none")
                }),
            )),
        ),
    ]
}

#[tokio::test]
async fn ky_20_ky_30_in_every_nest_a_route_is_the_whole_template() {
    for (what, app) in nested(&key::route()) {
        let server = Server::on("127.0.0.1:0", app).await.expect("a free port");
        for path in ["/api/users/1", "/api/users/2", "/api/users/%31"] {
            assert_eq!(
                server.key(path, &[]).await,
                "route=/api/users/^7Bid^7D",
                "{what}: {path}"
            );
        }
        for path in ["/api/none", "/api/none/at/all", "/api/users/1/2"] {
            assert_eq!(server.key(path, &[]).await, "unmatched=", "{what}: {path}");
        }
    }
}

#[tokio::test]
async fn a_template_is_unknown_outside_of_a_nested_service() {
    let inner = Router::new().route(USERS, get(async || "hi")).fallback(async || "none");
    let around = Server::routing(Router::new().nest_service("/api", inner), key::route()).await;
    // The template is known inside of the nested service only.
    assert_eq!(around.key("/api/users/1", &[]).await, "unmatched=");
    assert_eq!(around.key("/api/none", &[]).await, "unmatched=");
    assert_eq!(around.key("/api", &[]).await, "route=/api");
}

#[tokio::test]
async fn ky_21_in_every_nest_a_path_is_the_whole_path() {
    for (what, app) in nested(&key::path()) {
        let server = Server::on("127.0.0.1:0", app).await.expect("a free port");
        for (path, key) in [
            ("/api/users/%31?x=1", "path=/api/users/1"),
            ("/api/none", "path=/api/none"),
            ("/api/users/1/2", "path=/api/users/1/2"),
        ] {
            assert_eq!(server.key(path, &[]).await, key, "{what}");
        }
    }
}

/// A handler calls another server with the extensions of its request.
#[test]
fn the_path_of_a_request_that_is_sent_on_is_the_one_that_is_sent() {
    let key_of = |original: &'static str, sent: &'static str| {
        let original = axum::extract::OriginalUri(original.parse().expect("a URI"));
        let (parts, ()) = Request::get(sent)
            .extension(original)
            .body(())
            .expect("a request")
            .into_parts();
        key::path().extract(&parts).expect("a key").expect("a path").to_string()
    };
    assert_eq!(
        key_of("/a", "http://upstream/v1/search"),
        key_of("/b", "http://upstream/v1/search")
    );
    assert_eq!(key_of("/a", "http://upstream/"), key_of("/b", "http://upstream/"));
    assert_eq!(key_of("/a", "/v1/search"), "path=/v1/search");
    // What a nest leaves.
    for (original, rest) in [("/api/users", "/users"), ("/api", "/"), ("/api/", "/")] {
        assert_eq!(key_of(original, rest), key_of(original, original));
    }
    assert_eq!(key_of("http://host/api/users", "http://host/users"), "path=/api/users");
}

#[tokio::test]
async fn a_wildcard_route_is_one_route_and_any_number_of_paths() {
    let files = || Router::new().route("/files/{*rest}", any(async || "hi"));
    let routes = Server::routing(files(), key::route()).await;
    let paths = Server::routing(files(), key::path()).await;
    assert_eq!(routes.key("/files/a", &[]).await, routes.key("/files/b/c", &[]).await);
    assert_ne!(paths.key("/files/a", &[]).await, paths.key("/files/b/c", &[]).await);
}

/// A router under a limit that no test exhausts.
fn under(store: RedisStore, key: impl KeyExtractor) -> Router {
    let policy = Policy::new("default", FixedWindow::per_day(1_000_000)).key(key);
    let app = Router::new().route(USERS, get(async || "hi")).fallback(async || "none");
    app.layer(RateLimitLayer::new(store, policy))
}

/// The keys in Redis after these requests, in order.
async fn left_by(app: &Router, redis: &Redis, requests: impl IntoIterator<Item = Builder>) -> Vec<String> {
    let _: () = redis.command("FLUSHALL", [""; 0]).await;
    for request in requests {
        assert_eq!(send(app, request).await.status, StatusCode::OK);
    }
    let mut keys: Vec<String> = redis.command("KEYS", ["*"]).await;
    keys.sort();
    keys
}

/// The hash tag of Redis Cluster; panics unless the key has exactly one pair of braces, around the tag.
#[track_caller]
fn tag(redis_key: &str) -> &str {
    assert_eq!(redis_key.matches('{').count(), 1, "{redis_key}");
    assert_eq!(redis_key.matches('}').count(), 1, "{redis_key}");
    let (_, tag) = redis_key.split_once(":{").expect("a tag");
    let tag = tag.strip_suffix('}').expect("the tag is the end");
    assert!(!tag.is_empty(), "an empty tag is none");
    tag
}

#[tokio::test]
async fn ky_06_ky_07_ky_09_no_caller_chooses_a_slot() {
    let redis = Redis::start();
    let store = patient_store(&redis).await;

    let app = under(store.clone(), key::header("x-user"));
    let users: [&[u8]; 8] = [b"{x}", b"{x}y", b"{", b"}", b"}{", b"a}{b}", b"a\xff", b"a\xfe"];
    let requests = users.map(|user| Request::get("/").header("x-user", user));
    let keys = left_by(&app, &redis, requests).await;
    assert_eq!(keys.len(), users.len(), "{keys:?}");
    let tags: BTreeSet<_> = keys.iter().map(|key| tag(key)).collect();
    assert_eq!(tags.len(), users.len(), "{keys:?}");

    let app = under(store, (key::ip(), key::path()));
    let requests = [get_from("1.2.3.4", "/a/{x}/b"), get_from("5.6.7.8", "/{x}")];
    let keys = left_by(&app, &redis, requests).await;
    assert_eq!(keys.len(), 2, "KY-07");
    assert_ne!(tag(&keys[0]), tag(&keys[1]), "KY-07");
}

#[tokio::test]
async fn ky_31_ten_thousand_random_paths_are_one_redis_key() {
    let redis = Redis::start();
    let store = patient();
    let store = store.url(&redis.url()).connect().await.expect("a store");
    let app = under(store, key::route());
    let _: () = redis.command("FLUSHALL", [""; 0]).await;

    let mut random = Rng::with_seed(31);
    for _ in 0..100 {
        let paths = (0..100).map(|_| {
            let letters: String = (0..random.usize(1..40)).map(|_| random.alphanumeric()).collect();
            format!("/{letters}/{}", random.u64(..))
        });
        let calls: Vec<_> = paths
            .map(|path| {
                let app = app.clone();
                tokio::spawn(async move { send(&app, support::get(&path)).await.status })
            })
            .collect();
        for call in calls {
            assert_eq!(call.await.expect("an answer"), StatusCode::OK);
        }
    }

    let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
    assert_eq!(keys, ["quota:1:fixed/1d:default:{unmatched=}"]);
    let last = send(&app, support::get("/one-more")).await;
    assert!(
        last.field("ratelimit").expect("the field").contains("r=989999;"),
        "all of them were counted: {:?}",
        last.headers
    );
}

#[tokio::test]
async fn ky_33_policies_count_apart() {
    let redis = Redis::start();
    let store = patient_store(&redis).await;
    let policy = |name: &'static str| Policy::new(name, SlidingLog::per_minute(5)).key(key::ip());
    let layer = RateLimitLayer::new(store, [policy("burst"), policy("daily")]);
    let app = Router::new().fallback(async || "hi").layer(layer);

    let keys = left_by(&app, &redis, [support::get("/")]).await;
    assert_eq!(
        keys,
        [
            "quota:1:log/1min:burst:{ip=203.0.113.7}",
            "quota:1:log/1min:daily:{ip=203.0.113.7}"
        ]
    );
}

#[tokio::test]
async fn hashed_keys_reveal_nothing_without_the_secret() {
    let redis = Redis::start();
    let extractor = || (key::ip(), key::header("x-user"), key::path());
    let requests = || ["/account/1", "/account/2"].map(|path| support::get(path).header("x-user", "alice@example.org"));
    let keys_under = async |secret: &'static str| {
        let store = patient()
            .hash_keys(secret)
            .expect("a long secret")
            .url(&redis.url())
            .connect()
            .await;
        left_by(&under(store.expect("a store"), extractor()), &redis, requests()).await
    };

    let keys = keys_under("the one secret of 26 bytes").await;
    assert_eq!(keys.len(), 2, "{keys:?}");
    for key in &keys {
        let hash = tag(key).strip_prefix("keyed=").expect("a keyed hash");
        assert_eq!(hash.len(), 32, "128 bits");
        assert!(hash.bytes().all(|byte| byte.is_ascii_hexdigit()), "{key}");
        let (name, _) = key.split_once('{').expect("a tag");
        assert_eq!(
            name, "quota:1:fixed/1d:default:",
            "the rest holds no value of the request"
        );
    }
    assert_eq!(
        keys,
        keys_under("the one secret of 26 bytes").await,
        "the same secret, the same keys"
    );
    let others = keys_under("another secret of 26 bytes").await;
    assert_eq!(others.len(), 2);
    assert!(
        others.iter().all(|other| !keys.contains(other)),
        "another secret, other keys"
    );

    let plain = under(patient_store(&redis).await, extractor());
    let plain = left_by(&plain, &redis, requests()).await;
    assert!(
        plain
            .iter()
            .all(|key| key.contains("203.0.113.7") && key.contains("alice")),
        "{plain:?}"
    );
}

#[tokio::test]
async fn a_partition_key_is_not_the_hash_in_redis() {
    let redis = Redis::start();
    let secret = "one secret for both purposes";
    let store = patient()
        .hash_keys(secret)
        .expect("a long secret")
        .url(&redis.url())
        .connect()
        .await
        .expect("a store");
    let policy = Policy::new("default", SlidingLog::per_minute(5)).key(key::ip());
    let layer = RateLimitLayer::new(store, policy).partition_key(secret).unwrap();
    let app = Router::new().fallback(async || "hi").layer(layer);

    let admitted = send(&app, support::get("/")).await;
    let (_, seen) = admitted
        .field("ratelimit")
        .expect("the field")
        .split_once(";pk=:")
        .expect("a partition key");
    let seen = STANDARD.decode(seen.trim_end_matches(':')).expect("base64");
    let seen: String = seen.iter().map(|byte| format!("{byte:02x}")).collect();
    let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
    assert_eq!(tag(&keys[0]).len(), "keyed=".len() + seen.len());
    assert!(!keys[0].contains(&seen), "{keys:?} and {seen}");
}

#[test]
fn a_short_secret_is_refused_when_the_store_is_built() {
    for secret in ["", "secret", "fifteen bytes.."] {
        let error = RedisStore::builder().hash_keys(secret);
        let error = error.expect_err("the secret is short").to_string();
        assert!(
            error.contains("at least 16 bytes") && error.contains("`openssl rand -hex 32`"),
            "{error}"
        );
    }
}

#[test]
fn a_short_secret_is_refused_when_the_layer_is_built() {
    let layer = || {
        RateLimitLayer::new(
            MemoryStore::new(),
            Policy::new("p", SlidingLog::per_minute(5)).key(key::ip()),
        )
    };
    let error = layer().partition_key("fifteen bytes..").unwrap_err().to_string();
    assert!(error.contains("at least 16 bytes"), "{error}");
    assert!(layer().partition_key("sixteen bytes...").is_ok());
}

#[tokio::test]
async fn long_keys_are_bounded_and_count_apart() {
    let redis = Redis::start();
    let secretive = patient()
        .hash_keys("a secret of 21 bytes.")
        .expect("a long secret")
        .url(&redis.url())
        .connect()
        .await;
    let open = patient_store(&redis).await;
    for store in [open, secretive.expect("a store")] {
        let app = under(store, (key::header("x-user"), key::path()));
        let call = |user: &str, path: &str| Request::get(path).header("x-user", user);
        let (long, path) = ("a".repeat(4_096), format!("/{}", "p".repeat(60_000)));
        let other = "a".repeat(4_095) + "b";
        let other_path = path.clone() + "q";

        let requests = [
            call(&long, "/"),
            call(&long, "/"),
            call(&other, "/"),
            call("a", &path),
            call("a", &path),
            call("a", &other_path),
        ];
        let keys = left_by(&app, &redis, requests).await;
        assert_eq!(keys.len(), 4, "{keys:?}");
        for key in &keys {
            tag(key);
            assert!(key.len() < 200, "{key}");
        }
        let third = send(&app, call(&long, "/")).await;
        assert!(third.field("ratelimit").expect("the field").contains("r=999997;"));
        let third = send(&app, call("a", &path)).await;
        assert!(third.field("ratelimit").expect("the field").contains("r=999997;"));
    }
}

#[tokio::test]
async fn a_key_made_of_a_long_path_is_bounded() {
    let redis = Redis::start();
    let store = patient_store(&redis).await;
    let limiter = Limiter::new(store, Policy::new("default", SlidingLog::per_minute(5)));
    let path = format!("/{}", "p".repeat(100_000));

    for remaining in [4, 3] {
        let decision = limiter.check(Key::path(&path)).await.expect("an answer");
        let policy = decision.policies().next().expect("a policy");
        assert_eq!(policy.remaining(), remaining);
    }
    let other = limiter.check(Key::path(&(path + "q"))).await;
    assert!(other.expect("an answer").is_allowed());
    let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
    assert_eq!(keys.len(), 2, "{keys:?}");
    assert!(keys.iter().all(|key| tag(key).len() == "hash=".len() + 32), "{keys:?}");
}

#[tokio::test]
async fn a_key_of_at_most_128_bytes_stays_readable() {
    let redis = Redis::start();
    let store = patient_store(&redis).await;
    let app = under(store, key::path());
    let fits = format!("/{}", "p".repeat(128 - "path=/".len()));
    let keys = left_by(&app, &redis, [Request::get(&fits)]).await;
    assert_eq!(tag(&keys[0]), format!("path={fits}"));
    let keys = left_by(&app, &redis, [Request::get(fits + "p")]).await;
    assert!(tag(&keys[0]).starts_with("hash="), "{keys:?}");
}

#[tokio::test]
async fn a_header_over_4_kib_is_malformed() {
    let strict = Server::reporting(key::header("x-user")).await;
    let lenient = Server::reporting(key::header("x-user").or(key::constant("anonymous"))).await;
    for server in [strict, lenient] {
        let padded = " ".repeat(100) + &"a".repeat(4_096);
        assert!(server.key("/", &[("x-user", padded.as_bytes())]).await.ends_with("aaa"));
        let long = request("GET", "/", &[("x-user", "a".repeat(4_097).as_bytes())]);
        assert_eq!(server.send(&long).await, (400, None));
    }

    let layer = RateLimitLayer::new(
        MemoryStore::new(),
        Policy::new("default", SlidingLog::per_minute(5)).key(key::header("x-user")),
    );
    let app = Router::new().fallback(async || "hi").layer(layer);
    let refused = send(&app, Request::get("/").header("x-user", "a".repeat(4_097))).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert_eq!(
        refused.json()["detail"],
        "the header `x-user` is longer than 4096 bytes"
    );
}

/// The peer as the listener reports it, and the key.
async fn through(port: u16, caller: &str, app: &'static str) -> (String, String) {
    let addr = SocketAddr::new(caller.parse().expect("an address"), port);
    let fields = [("x-forwarded-for", b"198.51.100.9".as_slice())];
    let (status, key) = send_bytes(addr, &request("GET", app, &fields)).await;
    assert_eq!(status, 200);
    let key = key.expect("a key");
    let (seen, key) = key.split_once("|ip=").expect("two components");
    (seen.to_owned(), key.to_owned())
}

#[tokio::test]
async fn a_caller_has_one_key_on_a_dual_stack_listener() {
    let seen = || {
        key::from_fn(|parts| {
            let ConnectInfo(peer) = parts.extensions.get::<ConnectInfo<SocketAddr>>()?;
            Some(peer.ip().to_string())
        })
    };
    let trusting = || {
        key::client_ip(ClientIpSource::XForwardedFor)
            .trusted(["127.0.0.0/8"])
            .unwrap()
    };
    let app = || {
        let direct = reporting(Router::new().route("/direct", get(async || "hi")), (seen(), key::ip()));
        let proxied = reporting(
            Router::new().route("/proxied", get(async || "hi")),
            (seen(), trusting()),
        );
        direct.merge(proxied)
    };
    let Some(Server(dual)) = Server::on("[::]:0", app()).await else {
        eprintln!("there is no IPv6 here");
        return;
    };
    let Server(plain) = Server::on("127.0.0.1:0", app()).await.expect("a free port");

    let of = |seen: &str, key: &str| (seen.to_owned(), key.to_owned());
    assert_eq!(
        through(plain.port(), "127.0.0.1", "/direct").await,
        of("key=127.0.0.1", "127.0.0.1")
    );
    assert_eq!(
        through(dual.port(), "127.0.0.1", "/direct").await,
        of("key=::ffff:127.0.0.1", "127.0.0.1")
    );
    assert_eq!(through(dual.port(), "::1", "/direct").await, of("key=::1", "::/64"));

    assert_eq!(
        through(dual.port(), "127.0.0.1", "/proxied").await,
        of("key=::ffff:127.0.0.1", "198.51.100.9"),
        "the proxy is trusted in either form"
    );
    assert_eq!(through(dual.port(), "::1", "/proxied").await, of("key=::1", "::/64"));
}

/// An extractor, a request, and the key of the request made by hand.
struct Twin {
    name: &'static str,
    extractor: Box<dyn KeyExtractor>,
    request: fn() -> Builder,
    key: Key,
}

impl Twin {
    fn new(name: &'static str, extractor: impl KeyExtractor, request: fn() -> Builder, key: impl Into<Key>) -> Self {
        Self {
            name,
            extractor: Box::new(extractor),
            request,
            key: key.into(),
        }
    }
}

/// The extractors that read the address.
fn twins_of_addresses() -> Vec<Twin> {
    let address = |text: &str| text.parse().expect("an address");
    let ipv6 = || get_from("2001:db8:1:2::3", "/");
    let proxied = || support::get("/").header("x-forwarded-for", "1.2.3.4, 198.51.100.9");
    let client_ip = || key::client_ip(ClientIpSource::XForwardedFor);
    let mapped = || get_from("64:ff9b::198.51.100.9", "/");

    let (by_24, by_56) = (key::ip().ipv4_prefix(24), key::ip().ipv6_prefix(56));
    let proxied_by_24 = client_ip().trust_any_peer().ipv4_prefix(24);
    let (key_by_24, key_by_56) = (
        by_24.key_of(address("203.0.113.9")),
        by_56.key_of(address("2001:db8:1:ff::")),
    );
    let key_of_client_by_24 = proxied_by_24.key_of(address("198.51.100.1"));
    vec![
        Twin::new("ip", key::ip(), || support::get("/"), Key::ip(address("203.0.113.7"))),
        Twin::new("ip of IPv6", key::ip(), ipv6, Key::ip(address("2001:db8:1:2::4"))),
        Twin::new("ip by /24", by_24, || support::get("/"), key_by_24),
        Twin::new("ip by /56", by_56, ipv6, key_by_56),
        Twin::new("ip behind NAT64", key::ip(), mapped, Key::ip(address("198.51.100.9"))),
        Twin::new(
            "ip of a Unix socket",
            key::ip(),
            || Request::get("/").extension(UnixPeer),
            Key::unix_peer(),
        ),
        Twin::new(
            "ip of a Unix socket of tonic",
            key::ip(),
            || {
                Request::get("/").extension(UdsConnectInfo {
                    peer_addr: None,
                    peer_cred: None,
                })
            },
            Key::unix_peer(),
        ),
        Twin::new(
            "client_ip",
            client_ip().trusted(["203.0.113.0/24"]).unwrap(),
            proxied,
            Key::ip(address("198.51.100.9")),
        ),
        Twin::new("client_ip by /24", proxied_by_24, proxied, key_of_client_by_24),
        Twin::new(
            "client_ip of an untrusted peer",
            client_ip().trusted(["10.0.0.0/8"]).unwrap(),
            proxied,
            Key::ip(address("203.0.113.7")),
        ),
        Twin::new(
            "client_ip of a proxy on a Unix socket",
            client_ip().trust_unix_peer(),
            || {
                Request::get("/")
                    .extension(UnixPeer)
                    .header("x-forwarded-for", "unknown")
            },
            Key::unix_peer(),
        ),
    ]
}

/// All other extractors.
fn twins() -> Vec<Twin> {
    #[derive(Clone)]
    struct UserId(u64);

    let user = || key::extension("user", |user: &UserId| user.0);
    let with_user = || support::get("/users/1").extension(UserId(42));
    let folding = key::path().ignore_case().remove_dot_segments();
    let folded = folding.key_of("/users/./A");
    vec![
        Twin::new("path", key::path(), || Request::get("/%61?x=1"), Key::path("/a")),
        Twin::new(
            "path with settings",
            folding,
            || Request::get("/Users/b/../%41"),
            folded,
        ),
        Twin::new("route", key::route(), || Request::get("/users/1"), Key::route(USERS)),
        Twin::new("no route", key::route(), || Request::get("/1"), Key::unmatched_route()),
        Twin::new(
            "method",
            key::method(),
            || Request::delete("/"),
            Key::method(&Method::DELETE),
        ),
        Twin::new(
            "other method",
            key::method(),
            || Request::get("/").method("MADE-UP"),
            Key::method(&"OTHER".parse().expect("a method")),
        ),
        Twin::new(
            "header",
            key::header("X-User"),
            || Request::get("/").header("x-user", " a|b\u{ff} "),
            Key::header("x-USER", " a|b\u{ff}"),
        ),
        Twin::new(
            "constant",
            key::constant("all"),
            || Request::get("/"),
            Key::constant("all"),
        ),
        Twin::new("extension", user(), with_user, Key::extension("user", 42)),
        Twin::new(
            "from_fn of text",
            key::from_fn(|parts| parts.uri.path().to_owned()),
            || Request::get("/a"),
            "/a",
        ),
        Twin::new(
            "from_fn of a number",
            key::from_fn(|_| Some(42)),
            || Request::get("/"),
            42,
        ),
        Twin::new(
            "from_fn of an id",
            key::from_fn(|_| Some(-42_i64)),
            || Request::get("/"),
            "-42",
        ),
        Twin::new(
            "from_fn of a key",
            key::from_fn(|_| Ok(Key::constant("all"))),
            || Request::get("/"),
            Key::constant("all"),
        ),
        Twin::new(
            "or",
            user().or(key::route()),
            || Request::get("/1"),
            Key::unmatched_route(),
        ),
        Twin::new(
            "a tuple",
            (user(), key::route()),
            with_user,
            Key::extension("user", 42).and(Key::route(USERS)),
        ),
    ]
}

#[tokio::test]
async fn every_count_of_a_layer_can_be_reset_with_a_key_made_by_hand() {
    for twin in twins_of_addresses().into_iter().chain(twins()) {
        let (name, store) = (twin.name, MemoryStore::new());
        let policy = || Policy::new("default", SlidingLog::per_hour(1));
        let limiter = Limiter::new(store.clone(), policy());
        let layer = RateLimitLayer::new(store, policy().key(twin.extractor));
        let app = Router::new().route(USERS, any(async || "hi")).fallback(async || "none");
        let app = app.layer(layer);

        assert_eq!(send(&app, (twin.request)()).await.status, StatusCode::OK, "{name}");
        let denied = send(&app, (twin.request)()).await;
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS, "{name}");

        limiter.reset(Key::from("another")).await.expect("the store decides");
        let denied = send(&app, (twin.request)()).await;
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS, "{name}");
        limiter.reset(twin.key).await.expect("the store decides");
        assert_eq!(send(&app, (twin.request)()).await.status, StatusCode::OK, "{name}");
    }
}

/// Keys can be read in Redis, in `MONITOR`, in its slow log and in backups.
#[tokio::test]
async fn credentials_are_hashed_in_keys() {
    let secret = "Bearer sk-live-4242";
    for name in [
        "authorization",
        "proxy-authorization",
        "cookie",
        "x-api-key",
        "apikey",
        "x-access-token",
        "x-csrf-token",
        "client-secret",
        "x-session-id",
        "cf-access-jwt-assertion",
        "x-password",
        "ocp-apim-subscription-key",
        "x-amz-security-token",
        "x-auth",
        "x_auth",
        "service_key",
    ] {
        let server = Server::reporting(key::header(name)).await;
        let key = server.key("/", &[(name, secret.as_bytes())]).await;
        let hash = key.strip_prefix(&format!("header:{name}=hash:")).expect(&key);
        assert!(
            hash.len() == 32 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "{key}"
        );
        assert_eq!(
            key,
            Key::header(&name.to_ascii_uppercase(), format!(" {secret} ")).to_string()
        );
        assert_ne!(key, Key::header(name, format!("{secret}2")).to_string());
    }
    for name in ["x-user-id", "x-tenant", "x-monkey", "x-author"] {
        assert_eq!(Key::header(name, "42").to_string(), format!("header:{name}=42"));
    }
    // In a file too, and the bytes in Redis.
    let redis = Redis::start();
    let policies = tower_quota::Policies::from_toml(
        "[policies.api]\nlimit = '5/h'\nkey = ['header:cookie', 'header:x-api-key or ip']",
    );
    let layer = policies.unwrap().layer(patient_store(&redis).await, ["api"]).unwrap();
    let app = Router::new().fallback(async || "hi").layer(layer);
    let request = get_from("203.0.113.7", "/")
        .header("cookie", "id=sk-live-1")
        .header("x-api-key", "sk-live-2");
    assert_eq!(send(&app, request).await.status, StatusCode::OK);
    let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
    assert!(keys.iter().any(|key| key.contains("header:cookie=hash:")), "{keys:?}");
    assert!(!keys.concat().contains("sk-live"), "{keys:?}");
}
