//! gRPC-Web calls that are denied, in headless Chromium.

use std::{
    convert::Infallible,
    pin::Pin,
    process::Stdio,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Json, Router,
    response::Html,
    routing::{get, post},
};
use http::{Request, Response};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    net::TcpListener,
    process::{Child, Command},
    sync::mpsc,
};
use tonic::{
    Status,
    body::Body,
    server::{Grpc, NamedService},
    transport::{Server, server::TcpIncoming},
};
use tonic_prost::ProstCodec;
use tonic_web::GrpcWebLayer;
use tower::{Service, service_fn};
use tower_http::cors::{Any, CorsLayer};
use tower_quota::{Headers, MemoryStore, Policy, RateLimitLayer, SlidingLog, key};

use crate::file;

pub async fn run() {
    let mut servers = Vec::new();
    for (cors, exposed) in [("exposed", true), ("hidden", false)] {
        for (place, outside) in [("outside", true), ("inside", false)] {
            let url = serve(outside, exposed).await;
            servers.push(json!({ "cors": cors, "place": place, "url": url }));
        }
    }

    let (results, mut received) = mpsc::unbounded_channel();
    let page = page(json!(servers), results).await;
    let mut browser = open(&page);

    println!("| client | call | layer | fields | first call | denied call |");
    println!("| --- | --- | --- | --- | --- | --- |");
    loop {
        let result = tokio::time::timeout(Duration::from_secs(60), received.recv()).await;
        match result
            .expect("the browser reports a result")
            .expect("the page is served")
        {
            Value::Null => break,
            row => println!("{}", row.as_str().expect("a row")),
        }
    }
    browser.kill().await;
}

/// Chromium without a window, with the folder of its profile.
pub struct Browser {
    process: Child,
    _profile: TempDir,
}

impl Browser {
    pub async fn kill(&mut self) {
        self.process.kill().await.expect("the browser ends");
    }
}

/// Opens a page.
pub fn open(page: &str) -> Browser {
    let profile = tempfile::tempdir().expect("a folder for the browser");
    let process = Command::new("chromium")
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
        ])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(page)
        // What it leaves there when it is killed is deleted with the profile.
        .env("TMPDIR", profile.path())
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("chromium runs");
    Browser {
        process,
        _profile: profile,
    }
}

/// Serves the page with the clients, and returns its URL.
async fn page(servers: Value, results: mpsc::UnboundedSender<Value>) -> String {
    let script = std::fs::read_to_string(file("browser/node_modules/page.js"))
        .expect("the bundle; `npm run bundle` in the folder `browser` makes it");
    let html = format!("<script>const servers = {servers};\n{script}</script>");
    let html: Arc<str> = html.into();
    let app = Router::new()
        .route("/", get(async move || Html(html.to_string())))
        .route(
            "/result",
            post(async move |Json(result): Json<Value>| {
                let _ = results.send(result);
            }),
        );
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    tokio::spawn(async { axum::serve(listener, app).await });
    format!("http://{addr}/")
}

/// Serves one call an hour for each value of `x-case`.
async fn serve(outside: bool, exposed: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    let incoming = TcpIncoming::from(listener);

    let policy = Policy::new("case", SlidingLog::per_hour(1)).key(key::header("x-case"));
    let limit = RateLimitLayer::new(MemoryStore::new(), policy);
    let cors = CorsLayer::new().allow_origin(Any).allow_headers(Any);
    let cors = match exposed {
        true => cors.expose_headers(Headers::names()),
        false => cors,
    };
    let server = Server::builder().accept_http1(true).layer(cors);
    match outside {
        true => tokio::spawn(
            server
                .layer(limit)
                .layer(GrpcWebLayer::new())
                .add_service(Echo)
                .serve_with_incoming(incoming),
        ),
        false => tokio::spawn(
            server
                .layer(GrpcWebLayer::new())
                .layer(limit)
                .add_service(Echo)
                .serve_with_incoming(incoming),
        ),
    };
    format!("http://{addr}")
}

#[derive(Clone, PartialEq, prost::Message)]
struct Text {
    #[prost(string, tag = "1")]
    text: String,
}

/// Sends everything back, once or twice.
#[derive(Clone)]
pub struct Echo;

impl NamedService for Echo {
    const NAME: &'static str = "test.Echo";
}

impl Service<Request<Body>> for Echo {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = Grpc::new(ProstCodec::<Text, Text>::default());
            let response = match request.uri().path() {
                "/test.Echo/Once" => grpc.unary(service_fn(once), request).await,
                "/test.Echo/Twice" => grpc.server_streaming(service_fn(twice), request).await,
                path => Status::unimplemented(path).into_http(),
            };
            Ok(response)
        })
    }
}

async fn once(request: tonic::Request<Text>) -> Result<tonic::Response<Text>, Status> {
    Ok(tonic::Response::new(request.into_inner()))
}

type Texts = tokio_stream::Iter<std::array::IntoIter<Result<Text, Status>, 2>>;

async fn twice(request: tonic::Request<Text>) -> Result<tonic::Response<Texts>, Status> {
    let text = request.into_inner();
    Ok(tonic::Response::new(tokio_stream::iter([Ok(text.clone()), Ok(text)])))
}
