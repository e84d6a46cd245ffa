//! The responses that the README and the examples show are those that the examples send.

mod incident;
mod sizes;

use std::{
    convert::Infallible,
    fmt::{Debug, Write},
    fs,
    net::SocketAddr,
};

use axum::{body::Body, extract::ConnectInfo};
use base64::{Engine as _, prelude::BASE64_STANDARD as STANDARD};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::BodyExt;
use tokio::task::yield_now;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{MemoryStore, key::PeerAddr};

#[path = "../../../examples/access.rs"]
#[allow(dead_code)]
mod access_example;
#[path = "../../../examples/admin.rs"]
#[allow(dead_code)]
pub(crate) mod admin_example;
#[path = "../../../examples/bans.rs"]
#[allow(dead_code)]
mod bans;
#[path = "../../../examples/client.rs"]
#[allow(dead_code)]
pub(crate) mod client;
#[path = "../../../examples/export.rs"]
#[allow(dead_code)]
pub(crate) mod export;
#[path = "../../../examples/hello.rs"]
#[allow(dead_code)]
pub(crate) mod hello;
#[path = "../../../examples/hyper.rs"]
#[allow(dead_code)]
mod hyper_example;
#[path = "../../../examples/limits_file.rs"]
#[allow(dead_code)]
mod limits_file;
#[path = "../../../examples/observe.rs"]
#[allow(dead_code)]
mod observe;
#[path = "../../../examples/pictures.rs"]
#[allow(dead_code)]
mod pictures;
#[path = "../../../examples/sizing.rs"]
#[allow(dead_code)]
mod sizing;
#[path = "../../../examples/tonic.rs"]
#[allow(dead_code)]
mod tonic_example;

/// A call of curl in a page, with the lines that are shown of its response.
struct Call {
    arguments: Vec<String>,
    shown: Vec<String>,
}

/// The calls of curl in the `console` blocks of a page.
fn calls(page: &str) -> Vec<Call> {
    let mut calls = Vec::<Call>::new();
    let (mut in_block, mut in_call) = (false, false);
    for line in page.lines() {
        let line = line.strip_prefix("//!").unwrap_or(line);
        let line = line.strip_prefix(' ').unwrap_or(line);
        if line.starts_with("```") {
            (in_block, in_call) = (line == "```console", false);
        } else if let (true, Some(command)) = (in_block, line.strip_prefix("$ ")) {
            in_call = command.starts_with("curl ");
            if in_call {
                let (arguments, shown) = (words(command), Vec::new());
                calls.push(Call { arguments, shown });
            }
        } else if let (true, Some(call)) = (in_call && !line.is_empty(), calls.last_mut()) {
            call.shown.push(line.to_owned());
        }
    }
    assert!(!calls.is_empty(), "the page calls curl");
    calls
}

/// The words of a command, of which some are in single quotes.
fn words(command: &str) -> Vec<String> {
    let parts = command.split('\'').enumerate();
    let words = parts.flat_map(|(number, part)| match number % 2 {
        0 => part.split_whitespace().map(str::to_owned).collect(),
        _ => vec![part.to_owned()],
    });
    words.collect()
}

impl Call {
    fn request(&self) -> Request<Body> {
        let (mut request, mut body) = (Request::builder(), Body::empty());
        let mut arguments = self.arguments.iter().skip(1);
        while let Some(argument) = arguments.next() {
            request = match argument.as_str() {
                "-i" | "-s" => request,
                "-X" => request.method(arguments.next().expect("a method").as_str()),
                "-H" => {
                    let field = arguments.next().expect("a field");
                    let (name, value) = field.split_once(": ").expect("a name and a value");
                    request.header(name, value)
                }
                "-u" => {
                    let credentials = STANDARD.encode(arguments.next().expect("a user and a password"));
                    request.header("authorization", format!("Basic {credentials}"))
                }
                "-d" => {
                    body = arguments.next().expect("a body").clone().into();
                    request.method(Method::POST)
                }
                url => {
                    let url: Uri = url.parse().expect("a URL");
                    request.uri(url.path_and_query().expect("a path").as_str())
                }
            };
        }
        let peer = SocketAddr::from(([127, 0, 0, 1], 40_000));
        let request = request.extension(ConnectInfo(peer)).extension(PeerAddr(peer));
        request.body(body).expect("a request")
    }

    /// Asserts that the response has each line that is shown, but for dates.
    fn verify(&self, status: StatusCode, headers: &HeaderMap, body: &[u8]) {
        let mut response = format!("{:?} {status}\n", Version::HTTP_11);
        for (name, value) in headers {
            writeln!(response, "{name}: {}", value.to_str().expect("text")).expect("a string");
        }
        response.push_str(std::str::from_utf8(body).expect("text"));

        let shown = self.shown.iter().filter(|line| !line.starts_with("date: "));
        for line in shown {
            let found = response.lines().any(|other| without_date(other) == without_date(line));
            assert!(found, "{}: no line `{line}` in\n{response}", self.arguments.join(" "));
        }
    }
}

/// A line without the time of a last denial.
fn without_date(line: &str) -> String {
    let parts = line.split("\"last_at\":");
    parts
        .map(|part| part.trim_start_matches(|c: char| c.is_ascii_digit()))
        .collect()
}

/// Sends the requests of a page to a service, at one instant.
async fn shows<S, C>(page: &str, service: S)
where
    S: Service<Request<Body>, Response = Response<C>, Error = Infallible> + Clone,
    C: http_body::Body<Data = Bytes, Error: Debug>,
{
    for call in calls(page) {
        shows_one(&call, &service).await;
    }
}

async fn shows_one<S, C>(call: &Call, service: &S)
where
    S: Service<Request<Body>, Response = Response<C>, Error = Infallible> + Clone,
    C: http_body::Body<Data = Bytes, Error: Debug>,
{
    let Ok(response) = service.clone().oneshot(call.request()).await;
    let (parts, body) = response.into_parts();
    let body = body.collect().await.expect("a body").to_bytes();
    call.verify(parts.status, &parts.headers, &body);
    // What the end of the body has spawned.
    yield_now().await;
}

#[tokio::test(start_paused = true)]
async fn hello_sends_what_the_readme_shows() {
    shows(include_str!("../../../README.md"), hello::app(MemoryStore::new())).await;
}

#[tokio::test(start_paused = true)]
async fn hello_sends_what_it_shows() {
    shows(
        include_str!("../../../examples/hello.rs"),
        hello::app(MemoryStore::new()),
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn observe_sends_what_it_shows() {
    shows(include_str!("../../../examples/observe.rs"), observe::app()).await;
}

#[tokio::test(start_paused = true)]
async fn admin_sends_what_it_shows() {
    shows(include_str!("../../../examples/admin.rs"), admin_example::app()).await;
}

#[tokio::test(start_paused = true)]
async fn bans_sends_what_it_shows() {
    shows(include_str!("../../../examples/bans.rs"), bans::app()).await;
}

/// Forms that the browser of the visitor sends.
#[tokio::test(start_paused = true)]
async fn the_page_of_another_site_bans_none_of_its_visitors() {
    let app = bans::app();
    let login = |site: &str| {
        crate::support::get_from("203.0.113.7", "/login")
            .method("POST")
            .header("sec-fetch-site", site)
    };
    for _ in 0..5 {
        assert_eq!(crate::support::send(&app, login("cross-site")).await.status, 403);
    }
    let own = login("same-origin").header("x-password", "lovelace");
    assert_eq!(crate::support::send(&app, own).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn export_sends_what_it_shows() {
    shows(
        include_str!("../../../examples/export.rs"),
        export::app(MemoryStore::new()),
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn access_sends_what_it_shows() {
    shows(
        include_str!("../../../examples/access.rs"),
        access_example::app().unwrap(),
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn limits_file_sends_what_it_shows() {
    let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/limits.toml");
    let app = limits_file::app(limits).expect("the file has the policies");
    shows(include_str!("../../../examples/limits_file.rs"), app).await;
}

#[tokio::test(start_paused = true)]
async fn hyper_sends_what_it_shows() {
    let service = hyper_example::limit().layer(service_fn(hyper_example::hello));
    shows(include_str!("../../../examples/hyper.rs"), service).await;
}

#[tokio::test]
async fn tonic_receives_what_it_asserts() {
    let example = tokio::task::spawn_blocking(|| tonic_example::main().map_err(|error| error.to_string()));
    assert_eq!(example.await.expect("no panic"), Ok(()));
}

#[tokio::test]
async fn pictures_draws_those_of_the_documentation() {
    for (name, text) in pictures::pictures().await.expect("a store that does not fail") {
        let file = format!("{}/docs/pictures/{name}", env!("CARGO_MANIFEST_DIR"));
        let drawn = fs::read_to_string(file).is_ok_and(|old| old == text);
        assert!(
            drawn,
            "docs/pictures/{name} is not what `cargo run --example pictures` draws"
        );
    }
}

/// tonic-prost-build makes `examples/generated/hello.rs` of it.
#[test]
fn the_generated_module_has_each_method_of_the_proto() {
    let proto = include_str!("../../../examples/hello.proto");
    let generated = include_str!("../../../examples/generated/hello.rs");
    let methods = proto.lines().filter_map(|line| line.trim().strip_prefix("rpc "));
    let methods: Vec<_> = methods.filter_map(|method| method.split('(').next()).collect();
    assert!(!methods.is_empty());
    for method in methods {
        assert!(generated.contains(&format!("/hello.Greeter/{method}\"")), "{method}");
    }
}
