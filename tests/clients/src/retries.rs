//! Which clients wait and retry by themselves when a call is denied, and what they show of the response.

use std::{
    process::Stdio,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use axum::{Router, extract::Path, response::Html, routing::get};
use tokio::{net::TcpListener, process::Command, sync::mpsc, time::sleep};
use tonic::transport::{Server, server::TcpIncoming};
use tower_http::cors::{Any, CorsLayer};
use tower_quota::{Decision, Headers, KeyExtractor, MemoryStore, Policy, RateLimitLayer, SlidingLog, key};

use crate::{
    browser::{self, Echo},
    file,
};

/// The limit is one call in each.
const WINDOW: Duration = Duration::from_secs(5);

const CURL: [(&str, &[&str]); 4] = [
    ("curl", &[]),
    ("curl `--retry 3`", &["--retry", "3"]),
    ("curl `--retry 3`, `POST`", &["--retry", "3", "--data", "hi"]),
    (
        "curl `--retry 3 --retry-max-time 3`",
        &["--retry", "3", "--retry-max-time", "3"],
    ),
];
const PYTHON: [&str; 6] = [
    "requests",
    "requests, `Retry(3)`",
    "requests, `Retry(3)`, `POST`",
    "requests, `Retry(3, allowed_methods=None)`, `POST`",
    "requests, `Retry(3, retry_after_max=2)`",
    "requests, `Retry(3, status_forcelist=[429], respect_retry_after_header=False)`",
];
const NODE: [&str; 10] = [
    "fetch",
    "axios",
    "axios-retry",
    "axios-retry, `retryCondition`",
    "axios-retry, `retryCondition`, `POST`",
    "axios-retry, `retryCondition` by `retry-after`",
    "got",
    "got, `maxRetryAfter: 2000`",
    "got, `POST`",
    "got, `methods: [\"POST\"]`, `POST`",
];

/// When each decision was made.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<Instant>>>);

impl Seen {
    fn add(&self, _: &Decision) {
        self.0.lock().expect("no panic").push(Instant::now());
    }

    /// The number of requests since the last call, and the times between them.
    fn take(&self) -> String {
        let times = std::mem::take(&mut *self.0.lock().expect("no panic"));
        let waits: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let waits: Vec<_> = waits
            .iter()
            .map(|wait| format!("{:.1} s", wait.as_secs_f64()))
            .collect();
        match waits.is_empty() {
            true => format!("{} | ", times.len()),
            false => format!("{} | {}", times.len(), waits.join(", ")),
        }
    }
}

pub async fn run() {
    let seen = Seen::default();
    let python = file("retries/node_modules/python/bin/python").display().to_string();
    let scripts = ["client.py", "client.mjs"].map(|name| file(&format!("retries/{name}")).display().to_string());
    let folder = tempfile::tempdir().expect("a folder");
    // curl cannot truncate `/dev/null` before it retries.
    let body = folder.path().join("body").display().to_string();

    for (case, cost) in [("denied until `Retry-After`", 1), ("never admitted", 2)] {
        let http = serve(seen.clone(), cost).await;
        let grpc = serve_grpc(seen.clone(), cost).await;
        println!("\n{case}:\n\n| client | status | wait that it shows | requests | waits |");
        println!("| --- | --- | --- | --- | --- |");
        for (client, options) in CURL {
            let write = ["-sS", "-o", &body, "-w", "%{http_code} %header{retry-after}"];
            let arguments = [&write, options, &[&http]].concat();
            measure(&seen, client, cost, || ("curl", arguments.clone())).await;
        }
        for client in PYTHON {
            measure(&seen, client, cost, || (&python, vec![&scripts[0], client, &http, ""])).await;
        }
        for client in NODE {
            measure(&seen, client, cost, || ("node", vec![&scripts[1], client, &http, ""])).await;
        }
        for client in ["grpcio", "grpcio, `retryPolicy`", "grpcio, `retryPolicy`, `timeout=2`"] {
            measure(&seen, client, cost, || (&python, vec![&scripts[0], client, &grpc, "a"])).await;
        }
        let grpc = format!("dns:{grpc}");
        for client in ["grpc-js", "grpc-js, `retryPolicy`"] {
            measure(&seen, client, cost, || ("node", vec![&scripts[1], client, &grpc, "a"])).await;
        }
    }
    println!();
    in_browser(&seen).await;
}

/// Makes a call with a client that is denied, and prints what became of it.
async fn measure<'a>(seen: &Seen, client: &str, cost: u64, command: impl Fn() -> (&'a str, Vec<&'a str>)) {
    if cost == 1 {
        let first = output(command()).await;
        assert!(first.starts_with("200") || first.starts_with("OK"), "{client}: {first}");
        assert!(seen.take().starts_with("1 "), "{client}: one request is admitted");
    }
    let shown = output(command()).await;
    let (status, wait) = shown.split_once(' ').unwrap_or((&shown, "-"));
    println!("| {client} | {status} | {wait} | {} |", seen.take());
    if cost == 1 {
        sleep(WINDOW).await;
    }
}

async fn output((program, arguments): (&str, Vec<&str>)) -> String {
    let mut command = Command::new(program);
    let output = command.args(arguments).stdin(Stdio::null()).output().await;
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    match text.is_empty() {
        true => String::from_utf8_lossy(&output.stderr).into_owned(),
        false => text,
    }
}

fn limit(seen: Seen, key: impl KeyExtractor, cost: u64) -> RateLimitLayer {
    let policy = Policy::new("calls", SlidingLog::new(1, WINDOW)).key(key).cost(cost);
    RateLimitLayer::new(MemoryStore::new(), policy).on_decision(move |decision| seen.add(decision))
}

async fn serve(seen: Seen, cost: u64) -> String {
    let limit = limit(seen, key::constant("all"), cost);
    let app = Router::new().route("/", get(async || "hi").post(async || "hi").layer(limit));
    serve_router(app).await
}

async fn serve_router(app: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    tokio::spawn(async { axum::serve(listener, app).await });
    format!("http://{addr}/")
}

async fn serve_grpc(seen: Seen, cost: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    let server = Server::builder()
        .layer(limit(seen, key::header("x-case"), cost))
        .add_service(Echo);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    addr.to_string()
}

/// The page calls a server of another origin twice, whose CORS layer exposes the fields or does not.
async fn in_browser(seen: &Seen) {
    for (client, exposed) in [
        ("browser, fields exposed", true),
        ("browser, fields not exposed", false),
    ] {
        let cors = CorsLayer::new().allow_origin(Any);
        let cors = if exposed {
            cors.expose_headers(Headers::names())
        } else {
            cors
        };
        let limit = limit(seen.clone(), key::constant("all"), 1);
        let app = Router::new().route("/", get(async || "hi")).layer(limit).layer(cors);
        let url = serve_router(app).await;

        let (results, mut received) = mpsc::unbounded_channel();
        let script = format!(
            "const get = async () => {{ const r = await fetch('{url}'); return r.status + ' ' + (r.headers.get('retry-after') ?? '-'); }};
             (async () => {{ await get(); const shown = await get(); await fetch('/result/' + encodeURIComponent(shown)); }})();"
        );
        let html = format!("<script>{script}</script>");
        let page = Router::new().route("/", get(async move || Html(html))).route(
            "/result/{shown}",
            get(async move |Path(shown): Path<String>| {
                let _ = results.send(shown);
            }),
        );
        let mut browser = browser::open(&serve_router(page).await);
        let shown = tokio::time::timeout(Duration::from_secs(60), received.recv()).await;
        let shown = shown
            .expect("the browser reports a result")
            .expect("the page is served");
        let (status, wait) = shown.split_once(' ').expect("a status and a wait");
        let requests = seen.take();
        assert!(requests.starts_with("2 "), "both calls are one request: {requests}");
        println!("| {client} | {status} | {wait} | 1 | |");
        browser.kill().await;
    }
}
