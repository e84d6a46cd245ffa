//! nginx in front of the layer: as a shared cache, which stores every response that it may, and as a proxy that appends the
//! address of the client, by the lines in `docs/proxies.md`.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use axum::{Router, body::Body};
use http::{Method, Request, Response, StatusCode, request::Parts};
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpSocket, UnixStream},
};
use tower_quota::{
    FailureMode, KeyExtractor, Limit, MemoryStore, Policy, RateLimitLayer, SlidingLog,
    key::{self, ClientIpSource},
    response::{Grpc, Rejection, text},
    store::Store,
};

use crate::support::{Broken, Fixed, Process, Received, eventually, free_port, serve};

/// An nginx of the test's own, which listens on a Unix socket in its folder and ends with it.
struct Nginx {
    _process: Process,
    folder: TempDir,
}

impl Nginx {
    /// Starts it with these lines about its server, and waits until it listens.
    async fn start(server: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder for nginx");
        std::fs::write(folder.path().join("nginx.conf"), config(server)).expect("a file");
        let process = Command::new("nginx")
            .args(["-e", "stderr", "-c", "nginx.conf", "-p"])
            .arg(folder.path())
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .spawn();
        let process = Process(process.expect("nginx runs; this test needs it on the PATH"));

        let nginx = Self {
            _process: process,
            folder,
        };
        eventually("nginx listens", async || {
            UnixStream::connect(nginx.socket()).await.is_ok()
        })
        .await;
        nginx
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("nginx.sock")
    }

    /// The response to a request, and whether it comes from the cache.
    async fn send(&self, request: Request<Body>) -> (Received, bool) {
        let stream = UnixStream::connect(self.socket()).await.expect("nginx listens");
        let received = send(stream, request).await;
        let hit = received.field("x-cache") == Some("HIT");
        (received, hit)
    }
}

/// Sends a request through a connection to nginx.
async fn send(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, request: Request<Body>) -> Received {
    let (mut client, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .expect("a connection");
    tokio::spawn(connection);
    let response = client.send_request(request).await.expect("nginx answers");
    Received::read(response).await
}

fn config(server: &str) -> String {
    let temporary =
        ["client_body", "fastcgi", "proxy", "scgi", "uwsgi"].map(|kind| format!("{kind}_temp_path {kind};\n"));
    format!(
        "daemon off;
        master_process off;
        pid nginx.pid;
        events {{}}
        http {{
            access_log off;
            {}
            proxy_cache_path cache keys_zone=cache:1m;
            server {{
                listen unix:nginx.sock;
                {server}
            }}
        }}",
        temporary.concat(),
    )
}

/// A cache in front of this server. Responses of every status and method are stored, with one entry a path.
fn cache(upstream: &str) -> String {
    format!(
        "location / {{
            proxy_pass {upstream};
            proxy_http_version 1.1;
            proxy_cache cache;
            proxy_cache_key $uri;
            proxy_cache_methods GET HEAD POST;
            proxy_cache_valid any 10m;
            add_header x-cache $upstream_cache_status always;
        }}"
    )
}

/// The caller whose requests are rejected.
const ATTACKER: &str = "attacker";

fn from_the_attacker(parts: &Parts) -> bool {
    parts.headers.contains_key(ATTACKER)
}

fn request(method: Method, content_type: &str) -> http::request::Builder {
    Request::builder()
        .method(method)
        .uri("/app.js")
        .header("host", "example.com")
        .header("content-type", content_type)
}

/// A server whose cache meets this request of the attacker first, and then those of other callers.
async fn the_cache_has_no_response_of(layer: RateLimitLayer, method: Method, content_type: &str, status: u16) {
    let upstream = serve(Router::new().fallback(async || "the page").layer(layer)).await;
    let nginx = Nginx::start(&cache(&upstream)).await;

    let attack = request(method.clone(), content_type).header(ATTACKER, "1");
    let (rejected, _) = nginx.send(attack.body(Body::empty()).expect("a good request")).await;
    assert_eq!(rejected.status, status);
    assert_ne!(rejected.body, "the page", "the layer responds");

    for cached in [false, true] {
        let other = request(Method::GET, "text/plain");
        let (received, hit) = nginx.send(other.body(Body::empty()).expect("a good request")).await;
        assert_eq!(
            (received.status, &received.body[..]),
            (StatusCode::OK, &b"the page"[..]),
            "after {status} to {method} {content_type}"
        );
        // The second response shows that the cache works.
        assert_eq!(hit, cached, "after {status} to {method} {content_type}");
    }
}

fn layer(store: impl Store, limit: impl Into<Limit>, key: Arc<dyn KeyExtractor>) -> RateLimitLayer {
    let policy = Policy::new("attacker", limit).key(key).apply_if(from_the_attacker);
    RateLimitLayer::new(store, policy.failure_mode(FailureMode::Closed))
}

fn denied() -> RateLimitLayer {
    let all = Arc::new(key::constant("all"));
    layer(Fixed::denied(Duration::from_secs(30)), SlidingLog::per_minute(1), all)
}

#[tokio::test]
#[ignore = "needs nginx: `.ci/test`"]
async fn a_denial_of_a_request_that_looks_like_grpc_is_not_stored() {
    the_cache_has_no_response_of(denied(), Method::GET, "application/grpc", 429).await;
    the_cache_has_no_response_of(denied(), Method::POST, "application/grpc", 200).await;
    the_cache_has_no_response_of(denied(), Method::POST, "application/grpc-web+proto", 200).await;
    the_cache_has_no_response_of(denied().format(Grpc::new()), Method::GET, "application/grpc", 429).await;
}

#[tokio::test]
#[ignore = "needs nginx: `.ci/test`"]
async fn no_response_of_the_layer_is_stored() {
    struct User;

    let limit = SlidingLog::per_minute(1);
    let all = || Arc::new(key::constant("all"));
    let user = Arc::new(key::extension("user", |_: &User| ""));
    for (layer, status) in [
        (denied(), 429),
        (denied().format(text(|_, _| "later")), 429),
        (layer(Broken::default(), Limit::DenyAll, all()), 429),
        (layer(Broken::default(), limit, Arc::new(key::header("x-user-id"))), 400),
        (layer(Broken::default(), limit, user), 500),
        (layer(Broken::default(), limit, all()), 503),
        (
            denied().format(|_: Rejection<'_>, _: &Parts| Response::new("something less".into())),
            200,
        ),
    ] {
        the_cache_has_no_response_of(layer, Method::GET, "text/plain", status).await;
    }
}

/// The lines in `docs/proxies.md` for a proxy in front of this server.
fn documented(upstream: &str) -> String {
    let page = include_str!("../../docs/proxies.md");
    let (_, lines) = page.split_once("```text\nlocation / {").expect("the lines of nginx");
    let (lines, _) = lines.split_once("```").expect("their end");
    assert!(lines.contains("http://127.0.0.1:3000"), "{lines}");
    format!("location / {{{}", lines.replace("http://127.0.0.1:3000", upstream))
}

/// Sends a request with a header of the client from this address of the loopback network.
async fn send_from(client: IpAddr, proxy: SocketAddr, forged: (&str, &str)) -> Received {
    let mut stream = None;
    eventually("nginx listens on TCP", async || {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket
            .bind(SocketAddr::new(client, 0))
            .expect("an address of this host");
        stream = socket.connect(proxy).await.ok();
        stream.is_some()
    })
    .await;
    let request = Request::get("/")
        .header("host", "example.com")
        .header(forged.0, forged.1);
    send(
        stream.expect("a connection"),
        request.body(Body::empty()).expect("a request"),
    )
    .await
}

#[tokio::test]
#[ignore = "needs nginx: `.ci/test`"]
async fn a_client_that_sends_forwarding_headers_is_counted_by_its_own_address() {
    // Other systems have not all addresses of 127.0.0.0/8.
    if !cfg!(target_os = "linux") {
        return;
    }
    let client_ip = || {
        key::client_ip(ClientIpSource::XForwardedFor)
            .trusted(["127.0.0.1"])
            .unwrap()
    };
    let extractor = client_ip();
    let show_key = async move |request: Request<Body>| {
        let key = extractor.extract(&request.into_parts().0).expect("a peer");
        key.expect("a key").to_string()
    };
    let policy = Policy::new("clients", SlidingLog::per_hour(3)).key(client_ip());
    let app = Router::new()
        .fallback(show_key)
        .layer(RateLimitLayer::new(MemoryStore::new(), policy));
    let upstream = serve(app).await;
    let proxy = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let _nginx = Nginx::start(&format!("listen {proxy};\n{}", documented(&upstream))).await;

    let forged = [
        ("x-forwarded-for", "192.0.2.1"),
        ("x-forwarded-for", "192.0.2.2, 127.0.0.1"),
        ("forwarded", "for=192.0.2.3"),
    ];
    for client in ["127.0.0.2", "127.0.0.3"] {
        let address = client.parse().expect("an address");
        for header in forged {
            let received = send_from(address, proxy, header).await;
            assert_eq!(received.status, StatusCode::OK, "{client}, {header:?}");
            assert_eq!(received.body, format!("ip={client}"), "{header:?}");
        }
        let denied = send_from(address, proxy, ("x-real-ip", "192.0.2.4")).await;
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS, "{client}");
    }
}
