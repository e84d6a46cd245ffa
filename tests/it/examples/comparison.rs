//! The applications of `docs/comparison.md`, and the lines that the page states for each.

use std::{fs, net::SocketAddr, path::Path, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Request, connect_info::MockConnectInfo},
    http::{HeaderValue, StatusCode, header::AUTHORIZATION, uri::PathAndQuery},
    response::Response,
};
use tempfile::tempdir;
use tokio::{
    net::TcpListener,
    time::{sleep, timeout},
};
use tonic::{
    Code, Status,
    client::Grpc,
    service::Routes,
    transport::{Channel, Endpoint, Server, server::TcpIncoming},
};
use tonic_prost::ProstCodec;
use tonic_types::StatusExt;
use tower::ServiceExt;
use tower_quota::Policies;

use crate::support::{Clock, PATIENCE};

#[path = "../../comparison/tower-quota/grpc.rs"]
#[allow(dead_code)]
mod grpc;
#[path = "../../comparison/tower-quota/migration.rs"]
#[allow(dead_code)]
mod migration;
#[path = "../../comparison/tower-quota/reload.rs"]
#[allow(dead_code)]
mod reload;
#[path = "../../comparison/tower-quota/saas.rs"]
#[allow(dead_code)]
mod saas;
#[path = "../../comparison/tower-quota/worker.rs"]
#[allow(dead_code)]
mod worker;

/// The application as requests from one address see it.
fn from_one_address(app: Router) -> Router {
    app.layer(MockConnectInfo(SocketAddr::from(([203, 0, 113, 7], 4711))))
}

async fn call(app: &Router, request: Request) -> Response {
    app.clone().oneshot(request).await.expect("a response")
}

async fn get(app: &Router, path: &str) -> Response {
    call(app, Request::get(path).body(Body::empty()).expect("a request")).await
}

async fn search(app: &Router, token: &str) -> Response {
    let request = Request::get("/search").header(AUTHORIZATION, format!("Bearer {token}"));
    call(app, request.body(Body::empty()).expect("a request")).await
}

async fn login(app: &Router, account: &str, password: &str) -> Response {
    let body = format!(r#"{{"account":"{account}","password":"{password}"}}"#);
    let request = Request::post("/login").header("content-type", "application/json");
    call(app, request.body(body.into()).expect("a request")).await
}

#[tokio::test]
async fn a_user_that_upgrades_keeps_the_count_on_all_replicas() {
    let store = Clock::new().memory_store();
    let (app, replica) = (saas::app(store.clone()), saas::app(store));

    for _ in 0..50 {
        assert_eq!(search(&app, "free-42").await.status(), StatusCode::OK);
        assert_eq!(search(&replica, "free-42").await.status(), StatusCode::OK);
    }
    let denied = search(&replica, "free-42").await;
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.headers()["retry-after"], "60");
    assert_eq!(denied.headers()["ratelimit-policy"], r#""api";q=100;w=60"#);

    let upgraded = search(&app, "pro-42").await;
    assert_eq!(upgraded.status(), StatusCode::OK);
    assert_eq!(upgraded.headers()["ratelimit"], r#""api";r=899;t=60"#);
}

#[tokio::test]
async fn five_failed_logins_are_admitted_and_successful_ones_are_free() {
    let app = from_one_address(saas::app(Clock::new().memory_store()));

    for _ in 0..10 {
        assert_eq!(login(&app, "ada", "correct").await.status(), StatusCode::OK);
    }
    for _ in 0..5 {
        assert_eq!(login(&app, "ada", "wrong").await.status(), StatusCode::UNAUTHORIZED);
    }
    let denied = login(&app, "ada", "correct").await;
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.headers()["ratelimit-policy"], r#""logins";q=5;w=900"#);
    assert_eq!(login(&app, "grace", "correct").await.status(), StatusCode::OK);
}

/// The status of a call to a server that has no services, so that each admitted call is `UNIMPLEMENTED`.
async fn status(channel: &Channel, path: &'static str) -> Status {
    let mut grpc = Grpc::new(channel.clone());
    grpc.ready().await.expect("the connection lives");
    let codec = ProstCodec::<(), ()>::default();
    let path = PathAndQuery::from_static(path);
    grpc.unary(tonic::Request::new(()), path, codec)
        .await
        .expect_err("no service")
}

#[tokio::test]
async fn a_method_has_a_limit_of_its_own_and_a_denied_call_has_retry_info() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("a bound port"));
    let limits = grpc::limits(Clock::new().memory_store());
    let server = Server::builder().layer(limits).add_routes(Routes::default());
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let endpoint = Endpoint::try_from(url).expect("a good address");
    let channel = endpoint.connect().await.expect("the server listens");

    for _ in 0..5 {
        assert_eq!(status(&channel, "/app.Users/SignUp").await.code(), Code::Unimplemented);
    }
    let denied = status(&channel, "/app.Users/SignUp").await;
    assert_eq!(denied.code(), Code::ResourceExhausted);
    let wait = denied.get_details_retry_info().and_then(|info| info.retry_delay);
    assert_eq!(wait, Some(Duration::from_secs(3_600)));
    for _ in 0..6 {
        assert_eq!(status(&channel, "/app.Users/Find").await.code(), Code::Unimplemented);
    }
}

#[tokio::test]
async fn a_mail_that_is_not_sent_does_not_count() {
    let worker = worker::Worker::new(Clock::new().memory_store());

    for _ in 0..5 {
        let failed = worker.mail("ada", async || Err("no route".into())).await;
        assert_eq!(failed.unwrap_err().to_string(), "no route");
    }
    for _ in 0..3 {
        worker.mail("ada", async || Ok(())).await.expect("admitted");
    }
    let denied = worker.mail("ada", async || unreachable!("denied")).await.unwrap_err();
    assert!(denied.to_string().starts_with("rate limit exceeded: mails"), "{denied}");
}

#[tokio::test]
async fn the_actual_cost_replaces_the_estimate() {
    let worker = worker::Worker::new(Clock::new().memory_store());

    // 300 and 9,000 are estimates. 9,900 are used, so that 100 remain.
    for (estimate, tokens) in [(300, 900), (9_000, 9_000)] {
        let answer = worker
            .complete("ada", estimate, async || ("an answer".into(), tokens))
            .await;
        assert_eq!(answer.expect("admitted"), "an answer");
    }
    let denied = worker.complete("ada", 101, async || unreachable!("denied")).await;
    assert!(
        denied
            .unwrap_err()
            .to_string()
            .starts_with("rate limit exceeded: tokens")
    );
    let answer = worker.complete("ada", 100, async || ("short".into(), 10)).await;
    assert_eq!(answer.expect("admitted"), "short");
}

/// The field `RateLimit-Policy` of a response.
async fn policy(app: &Router) -> HeaderValue {
    get(app, "/search").await.headers()["ratelimit-policy"].clone()
}

async fn until_policy(app: &Router, expected: &str) {
    let changed = timeout(PATIENCE, async {
        while policy(app).await != expected {
            sleep(Duration::from_millis(5)).await;
        }
    });
    changed.await.expect("the file is read again");
}

#[tokio::test]
async fn a_file_that_changes_is_applied_and_a_broken_one_is_not() {
    let folder = tempdir().expect("a folder");
    let file = folder.path().join("limits.toml");
    let write = |limit: &str| {
        let search = format!("[policies.search]\nlimit = '{limit}'\nkey = 'ip'\n");
        let login = "[policies.login]\nlimit = 'sliding-log 5/min'\nkey = 'ip'\n";
        fs::write(&file, search + login).expect("the file is written");
    };

    write("sliding-log 100/min");
    let policies = Policies::from_file(&file).expect("a valid file");
    policies.reload_on_change(Duration::from_millis(5)).expect("a task");
    let app = reload::app(&Clock::new().memory_store(), &policies).expect("an application");
    let app = from_one_address(app);
    assert_eq!(policy(&app).await, r#""search";q=100;w=60"#);
    write("sliding-log 200/h");
    until_policy(&app, r#""search";q=200;w=3600"#).await;
    write("sliding-log 300");
    assert!(policies.reload().is_err());
    assert_eq!(policy(&app).await, r#""search";q=200;w=3600"#);
}

#[tokio::test]
async fn a_burst_of_five_is_admitted_and_one_every_two_seconds_after_it() {
    let clock = Clock::new();
    let store = clock.memory_store();
    let app = from_one_address(migration::app(store.clone()));
    let replica = from_one_address(migration::app(store));

    for app in [&app, &replica, &app, &replica, &app] {
        assert_eq!(get(app, "/").await.status(), StatusCode::OK);
    }
    let denied = get(&replica, "/").await;
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.headers()["retry-after"], "2");

    clock.advance(Duration::from_secs(2));
    assert_eq!(get(&replica, "/").await.status(), StatusCode::OK);
    assert_eq!(get(&app, "/").await.status(), StatusCode::TOO_MANY_REQUESTS);
}

/// The counted lines of a file, and how many of them are imports.
fn lines(file: &Path) -> (usize, usize) {
    let text = fs::read_to_string(file).expect("the application");
    let (mut counts, mut in_import, mut all, mut imports) = (false, false, 0, 0);
    for line in text.lines().map(str::trim) {
        match line {
            "// limits" => counts = true,
            "// rest" => counts = false,
            line if line.is_empty() || line.starts_with("//") => {}
            line if counts || line.ends_with("// limits") => {
                in_import |= line.starts_with("use ") || line.starts_with("import ");
                all += 1;
                imports += usize::from(in_import);
                in_import &= !line.contains(';');
            }
            _ => {}
        }
    }
    (all, imports)
}

#[test]
fn the_page_has_the_lines_of_each_application() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/comparison.md")).expect("the page");
    for application in ["saas", "grpc", "worker", "reload", "migration"] {
        let row = page.lines().find(|line| line.contains(&format!("(`{application}`)")));
        let row = row.unwrap_or_else(|| panic!("no row of `{application}`"));
        let cells = row.split('|').skip(2).map(str::trim);
        let libraries = [
            ("tower-quota", "rs"),
            ("express-rate-limit", "mjs"),
            ("bucket4j", "java"),
            ("tower_governor/src/bin", "rs"),
        ];
        for ((library, extension), cell) in libraries.into_iter().zip(cells) {
            let folder = root.join("tests/comparison").join(library);
            let mut file = folder.join(application).with_extension(extension);
            if extension == "java" {
                let name = application[..1].to_uppercase() + &application[1..];
                file = folder.join(name).with_extension(extension);
            }
            if !file.exists() {
                assert!(cell.starts_with('—'), "{library}, {application}: {cell}");
                continue;
            }
            let (mut all, mut imports) = lines(&file);
            if extension == "java" {
                let shared = lines(&folder.join("Limits.java"));
                (all, imports) = (all + shared.0, imports + shared.1);
            }
            assert!(
                cell.starts_with(&format!("{all} ({imports})")),
                "{library}, {application}: {all} ({imports}) lines, {cell}"
            );
        }
    }
}
