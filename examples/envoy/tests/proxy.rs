//! Envoy itself, with `envoy.yaml` of the example: in front of a service, and as a client of the rate limit service.
//!
//! `cargo test` ignores it. `.ci/suite` downloads an Envoy and runs it; where that fails it is skipped, unless the environment
//! variable `CI` is set.

#[path = "../../envoy.rs"]
#[allow(dead_code)]
mod envoy;

use std::{
    env,
    error::Error,
    future::pending,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use axum::{Router, extract::Request};
use reqwest::{Client, Response, StatusCode};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Builder,
    time::{Instant, sleep},
};
use tower_quota::{
    KeyExtractor, MemoryStore, Policy, RateLimitLayer, SlidingLog,
    key::{self, ClientIpSource},
};

const FOLDER: &str = env!("CARGO_MANIFEST_DIR");

/// The Envoy that is installed, or that `.ci/suite` has downloaded.
fn binary() -> Option<PathBuf> {
    let downloaded = PathBuf::from(FOLDER).join("../../target/servers/envoy/_bin/envoy");
    let candidates = ["envoy".into(), downloaded];
    let is_installed = |path: &PathBuf| Command::new(path).arg("--version").output().is_ok();
    let binary = candidates.into_iter().find(is_installed);
    if binary.is_none() {
        assert!(env::var_os("CI").is_none(), "no Envoy is installed; `CI` requires one");
        eprintln!("skipped: no Envoy is installed");
    }
    binary
}

/// An Envoy that ends with the test.
struct Envoy {
    process: Child,
    addr: SocketAddr,
}

impl Envoy {
    /// Starts it between this shop and these limits, and waits until it listens.
    async fn start(binary: PathBuf, shop: SocketAddr, limits: SocketAddr) -> Self {
        let addr = listener().await.local_addr().expect("a bound port");
        let mut config = include_str!("../envoy.yaml").to_owned();
        for (documented, port) in [(10_000, addr.port()), (3_000, shop.port()), (8_081, limits.port())] {
            let documented = format!("port_value: {documented} ");
            assert_eq!(config.matches(&documented).count(), 1, "{documented}");
            config = config.replace(&documented, &format!("port_value: {port} "));
        }
        let process = Command::new(binary)
            .args(["--config-yaml", &config])
            .args(["--log-level", "error", "--disable-hot-restart", "--concurrency", "1"])
            .stdin(Stdio::null())
            .spawn()
            .expect("Envoy runs");

        let mut envoy = Self { process, addr };
        let deadline = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(addr).await.is_err() {
            assert!(Instant::now() < deadline, "Envoy listens within a minute");
            assert!(matches!(envoy.process.try_wait(), Ok(None)), "Envoy runs");
            sleep(Duration::from_millis(20)).await;
        }
        envoy
    }

    /// Sends a request of this client, which claims to be another.
    async fn send(&self, client: &str, path: &str) -> Result<Response, Box<dyn Error>> {
        let client: IpAddr = client.parse()?;
        let client = Client::builder().no_proxy().local_address(client).build()?;
        let request = client.get(format!("http://{}{path}", self.addr));
        let forged = request.header("x-forwarded-for", "192.0.2.66, 127.0.0.1");
        Ok(forged.send().await?)
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.expect("a free port")
}

/// Serves a shop that responds with the address of the client, of which each has three requests an hour.
async fn shop() -> SocketAddr {
    let client_ip = || {
        key::client_ip(ClientIpSource::XForwardedFor)
            .trusted(["127.0.0.1"])
            .unwrap()
    };
    let policy = Policy::new("clients", SlidingLog::per_hour(3)).key(client_ip());
    let extractor = client_ip();
    let show_client = async move |request: Request| {
        let key = extractor.extract(&request.into_parts().0).expect("a peer");
        key.expect("a key").to_string()
    };
    let app = Router::new()
        .fallback(show_client)
        .layer(RateLimitLayer::new(MemoryStore::new(), policy));
    let listener = listener().await;
    let addr = listener.local_addr().expect("a bound port");
    tokio::spawn(async move { axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await });
    addr
}

#[tokio::test]
#[ignore = "needs Envoy: `.ci/test`"]
async fn envoy_limits_logins_and_names_the_client_to_the_service() -> Result<(), Box<dyn Error>> {
    // Other systems have not all addresses of 127.0.0.0/8.
    if !cfg!(target_os = "linux") {
        return Ok(());
    }
    let Some(binary) = binary() else { return Ok(()) };
    let limits = listener().await;
    let addr = limits.local_addr()?;
    let file = format!("{FOLDER}/limits.toml");
    // A runtime of its own, whose end closes the connections too.
    let service = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    service.spawn(async move {
        let served = envoy::serve(&file, MemoryStore::new(), limits, pending()).await;
        served.map_err(|error| error.to_string())
    });
    let envoy = Envoy::start(binary, shop().await, addr).await;

    // The limit of the rate limit service: two logins a minute for each address.
    for client in ["127.0.0.2", "127.0.0.3"] {
        for _ in 0..2 {
            let response = envoy.send(client, "/login").await?;
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(response.text().await?, format!("ip={client}"));
        }
        // Other texts of this path do not avoid its limit.
        for path in ["//login", "/%6Cogin", "/x/..%2Flogin"] {
            let denied = envoy.send(client, path).await?;
            assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS, "{path}");
        }
        let denied = envoy.send(client, "/login").await?;
        assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
        let field = |name| denied.headers().get(name).and_then(|value| value.to_str().ok());
        let wait: u64 = field("retry-after").ok_or("a wait")?.parse()?;
        assert!((1..=60).contains(&wait), "{wait} s");
        assert_eq!(
            field("ratelimit-policy"),
            Some(r#""shop.login.remote_address";q=2;w=60"#)
        );
        assert!(field("ratelimit").is_some_and(|value| value.contains(";r=0")));
    }

    // The limit of the shop: three requests an hour for each address, of which two were the logins.
    for client in ["127.0.0.2", "127.0.0.3"] {
        for status in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
            let response = envoy.send(client, "/").await?;
            assert_eq!(response.status(), status, "{client}");
        }
    }

    // Without the rate limit service Envoy admits all requests, since `failure_mode_deny` is false. The limit of the shop
    // remains.
    service.shutdown_background();
    for status in [
        StatusCode::OK,
        StatusCode::OK,
        StatusCode::OK,
        StatusCode::TOO_MANY_REQUESTS,
    ] {
        let response = envoy.send("127.0.0.4", "/login").await?;
        assert_eq!(response.status(), status);
    }
    Ok(())
}

#[test]
fn the_guide_shows_lines_of_this_configuration() {
    let page = include_str!("../../../docs/proxies.md");
    let config: Vec<_> = include_str!("../envoy.yaml").lines().map(str::trim).collect();
    let (_, lines) = page.split_once("```text\nhttp_filters:").expect("the lines of Envoy");
    let (lines, _) = lines.split_once("```").expect("their end");
    let shown = lines.lines().map(str::trim).filter(|line| !line.is_empty());
    let missing: Vec<_> = shown.filter(|line| !config.contains(line)).collect();
    assert!(missing.is_empty(), "{missing:#?}");
}
