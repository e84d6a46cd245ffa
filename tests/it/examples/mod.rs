//! The responses that the README and the examples show are those that the examples send.

mod comparison;
mod incident;
mod sizes;

use std::{
    convert::Infallible,
    fmt::{Debug, Write},
    fs,
    net::SocketAddr,
    time::Duration,
};

use axum::{body::Body, extract::ConnectInfo};
use base64::{Engine as _, prelude::BASE64_STANDARD as STANDARD};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::BodyExt;
use tokio::task::yield_now;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{MemoryStore, RedisStore, key::PeerAddr};

use crate::support::get;

#[path = "../../../examples/access.rs"]
#[allow(dead_code)]
mod access_example;
#[path = "../../../examples/admin.rs"]
#[allow(dead_code)]
pub(crate) mod admin_example;
#[path = "../../../examples/axum_per_route.rs"]
#[allow(dead_code)]
mod axum_per_route;
#[path = "../../../examples/bans.rs"]
#[allow(dead_code)]
mod bans;
#[path = "../../../examples/client.rs"]
#[allow(dead_code)]
pub(crate) mod client;
#[path = "../../../examples/concurrency.rs"]
#[allow(dead_code)]
mod concurrency;
#[path = "../../../examples/degrade.rs"]
#[allow(dead_code)]
mod degrade;
#[path = "../../../examples/export.rs"]
#[allow(dead_code)]
pub(crate) mod export;
#[path = "../../../examples/handler.rs"]
#[allow(dead_code)]
mod handler;
#[path = "../../../examples/hello.rs"]
#[allow(dead_code)]
pub(crate) mod hello;
#[path = "../../../examples/hyper.rs"]
#[allow(dead_code)]
mod hyper_example;
#[path = "../../../examples/limits_file.rs"]
#[allow(dead_code)]
mod limits_file;
#[path = "../../../examples/login_form.rs"]
#[allow(dead_code)]
mod login_form;
#[path = "../../../examples/logins.rs"]
#[allow(dead_code)]
mod logins;
#[path = "../../../examples/observe.rs"]
#[allow(dead_code)]
mod observe;
#[path = "../../../examples/pictures.rs"]
#[allow(dead_code)]
mod pictures;
#[path = "../../../examples/plans.rs"]
#[allow(dead_code)]
mod plans;
#[path = "../../../examples/reload.rs"]
#[allow(dead_code)]
mod reload_example;
#[path = "../../../examples/reqwest.rs"]
#[allow(dead_code)]
mod reqwest_example;
#[path = "../../../examples/sizing.rs"]
#[allow(dead_code)]
mod sizing;
#[path = "../../../examples/testing.rs"]
#[allow(dead_code)]
mod testing;
#[path = "../../../examples/tokens.rs"]
#[allow(dead_code)]
mod tokens;
#[path = "../../../examples/tonic.rs"]
#[allow(dead_code)]
mod tonic_example;
#[path = "../../../examples/users.rs"]
#[allow(dead_code)]
mod users;
#[path = "../../../examples/wait.rs"]
#[allow(dead_code)]
mod wait;

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

    /// Asserts that the response has each line that is shown, but for the date.
    fn verify(&self, status: StatusCode, headers: &HeaderMap, body: &[u8]) {
        let mut response = format!("{:?} {status}\n", Version::HTTP_11);
        for (name, value) in headers {
            writeln!(response, "{name}: {}", value.to_str().expect("text")).expect("a string");
        }
        response.push_str(std::str::from_utf8(body).expect("text"));

        let shown = self.shown.iter().filter(|line| !line.starts_with("date: "));
        for line in shown {
            let found = response.lines().any(|of_response| of_response == line);
            assert!(found, "{}: no line `{line}` in\n{response}", self.arguments.join(" "));
        }
    }
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
async fn axum_per_route_sends_what_it_shows() {
    shows(
        include_str!("../../../examples/axum_per_route.rs"),
        axum_per_route::app(),
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

#[tokio::test(start_paused = true)]
async fn plans_sends_what_it_shows() {
    shows(include_str!("../../../examples/plans.rs"), plans::app()).await;
}

#[tokio::test(start_paused = true)]
async fn users_sends_what_it_shows() {
    shows(include_str!("../../../examples/users.rs"), users::app()).await;
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
async fn handler_sends_what_it_shows() {
    shows(include_str!("../../../examples/handler.rs"), handler::app()).await;
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
async fn login_form_sends_what_it_shows() {
    shows(include_str!("../../../examples/login_form.rs"), login_form::app()).await;
}

#[tokio::test(start_paused = true)]
async fn testing_sends_what_it_shows() {
    shows(
        include_str!("../../../examples/testing.rs"),
        testing::app(MemoryStore::new()),
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn reload_sends_what_it_shows() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("limits-of-search.toml");
    reload_example::write_limits(&file).expect("a file");
    let app = reload_example::app(&file).expect("the file has the policy");

    let [before, after] = &calls(include_str!("../../../examples/reload.rs"))[..] else {
        panic!("a call before the change and one after it")
    };
    shows_one(before, &app).await;
    let limits = fs::read_to_string(&file).expect("the file");
    fs::write(&file, limits.replace("3/min", "10/min")).expect("a file");
    tokio::time::sleep(Duration::from_millis(3_500)).await;
    shows_one(after, &app).await;
}

#[tokio::test(start_paused = true)]
async fn logins_sends_what_it_shows() {
    shows(include_str!("../../../examples/logins.rs"), logins::app()).await;
}

#[tokio::test(start_paused = true)]
async fn tokens_sends_what_it_shows() {
    shows(
        include_str!("../../../examples/tokens.rs"),
        tokens::app(MemoryStore::new()),
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn tokens_settles_what_was_streamed_before_the_client_left() {
    let app = tokens::app(MemoryStore::new());
    let complete = async |length: u64| {
        let request = get(&format!("/complete/{length}")).method(Method::POST);
        let request = request.body(Body::empty()).expect("a request");
        app.clone().oneshot(request).await.expect("a response")
    };

    let mut stream = complete(50).await.into_body();
    for _ in 0..3 {
        let token = stream.frame().await.expect("a token").expect("no error");
        assert_eq!(token.into_data().expect("text"), "token ");
    }
    drop(stream);
    yield_now().await;
    // Of 100, 3 were settled and 30 are charged for this response.
    let response = complete(1).await;
    let fields = &response.headers()["ratelimit"];
    assert_eq!(fields, r#""requests";r=3;t=60, "tokens";r=67;t=60"#);
}

#[tokio::test(start_paused = true)]
async fn concurrency_sends_what_it_shows() {
    let page = include_str!("../../../examples/concurrency.rs");
    shows(page, concurrency::app(MemoryStore::new())).await;

    // Four at once, of which the first then leaves.
    let app = concurrency::app(MemoryStore::new());
    let send = async || {
        app.clone()
            .oneshot(get("/export").body(Body::empty()).expect("a request"))
            .await
    };
    let [first, second, third] =
        [send().await, send().await, send().await].map(|response| response.expect("a response"));
    assert_eq!(third.headers()["ratelimit"], r#""exports";r=0;t=10"#);
    let denied = send().await.expect("a response");
    for line in [r#"ratelimit: "exports";r=0;t=1"#, "retry-after: 1"] {
        let (name, value) = line.split_once(": ").expect("a field");
        assert_eq!(denied.headers()[name], value);
        assert!(page.contains(&format!("//! {line}\n")), "the page shows {line}");
    }
    drop(first);
    assert_eq!(send().await.expect("a response").status(), StatusCode::OK);
    let rows = second.into_body().collect().await.expect("rows").to_bytes();
    assert!(rows.ends_with(b"Radia\n"));
}

#[tokio::test(start_paused = true)]
async fn limits_file_sends_what_it_shows() {
    let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/limits.toml");
    let app = limits_file::app(limits).expect("the file has the policies");
    shows(include_str!("../../../examples/limits_file.rs"), app).await;
}

/// Port 1 is reserved, so no server is there.
#[tokio::test(start_paused = true)]
async fn degrade_sends_what_it_shows() {
    let redis = RedisStore::connect_lazy("redis://127.0.0.1:1").expect("a store");
    shows(include_str!("../../../examples/degrade.rs"), degrade::app(&redis)).await;
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
async fn reqwest_sends_as_many_requests_as_the_api_admits() {
    let took = reqwest_example::run().await.expect("each request waits");
    assert!(took >= Duration::from_millis(2_200), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn wait_sends_as_many_mails_as_it_asserts() {
    let took = wait::run().await.expect("it may wait");
    assert_eq!(took.as_secs(), 2);
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
