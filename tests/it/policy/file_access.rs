//! Requests that a file skips or blocks, and routes that no other policy of it is for.

use std::convert::Infallible;

use axum::{
    Extension, Router,
    body::Body,
    routing::{any, get as route},
};
use bytes::Bytes;
use http::{Request, Response, request::Builder};
use http_body_util::Empty;
use hyper::ext::Protocol;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    service::TowerToHyperService,
};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{Limiter, MemoryStore, Policies, Policy, RateLimitLayer, SlidingLog, key, key::PeerAddr};

use crate::support::{Clock, Counted, Log, get, get_from, send};

/// One request an hour for each address, after these lines.
fn file(lines: &str) -> String {
    format!("{lines}\n[policies.api]\nlimit = \"sliding-log 1/h\"\nkey = \"ip\"\n")
}

fn described(lines: &str) -> Policies {
    Policies::from_toml(&file(lines)).unwrap_or_else(|error| panic!("{lines}: {error}"))
}

fn app(layer: RateLimitLayer) -> Router {
    Router::new()
        .route("/health", route(async || "well"))
        .route("/users/{id}", route(async || "a user").post(async || "a user"))
        .fallback(async || "hi")
        .layer(layer)
}

/// The statuses of two of the same requests: `[200, 200]` if it is skipped, `[200, 429]` if it is limited.
async fn statuses(app: &Router, request: impl Fn() -> Builder) -> [u16; 2] {
    [
        send(app, request()).await.status.as_u16(),
        send(app, request()).await.status.as_u16(),
    ]
}

const SKIPPED: [u16; 2] = [200, 200];
const BLOCKED: [u16; 2] = [403, 403];
const LIMITED: [u16; 2] = [200, 429];

#[tokio::test]
async fn all_fields_of_a_table_hold_and_several_tables_are_alternatives() {
    let policies = described(
        "[[skip]]\nroutes = [\"/health\", \"/users/{id}\"]\nmethods = \"GET\"\n[[skip]]\nnetworks = [\"10.0.0.0/8\", \
         \"192.0.2.7\"]\n[[block]]\nnetworks = \"198.51.100.0/24\"\n[[block]]\nroutes = \"/users/{id}\"\nmethods = \
         [\"DELETE\", \"PUT\"]\n",
    );
    let store = Counted::new(MemoryStore::new());
    let app = app(policies.layer(store.clone(), ["api"]).unwrap());
    for (address, method, path, expected) in [
        ("203.0.113.1", "GET", "/health", SKIPPED),
        ("203.0.113.1", "HEAD", "/users/42", SKIPPED),
        ("10.1.2.3", "POST", "/", SKIPPED),
        ("192.0.2.7", "GET", "/", SKIPPED),
        ("198.51.100.9", "GET", "/", BLOCKED),
        // Blocked rather than skipped.
        ("198.51.100.9", "GET", "/health", BLOCKED),
        ("10.1.2.3", "DELETE", "/users/42", BLOCKED),
    ] {
        let request = || get_from(address, path).method(method);
        assert_eq!(statuses(&app, request).await, expected, "{address} {method} {path}");
    }
    assert_eq!(store.calls(), 0);
    for (address, method, path) in [
        ("203.0.113.2", "POST", "/users/42"),
        ("203.0.113.3", "GET", "/users"),
        ("192.0.2.8", "GET", "/"),
        ("198.51.101.9", "GET", "/"),
    ] {
        let request = || get_from(address, path).method(method);
        assert_eq!(statuses(&app, request).await, LIMITED, "{address} {method} {path}");
    }
}

#[tokio::test]
async fn a_layer_of_several_files_has_the_lists_of_each() {
    let of_api = described("[block]\nroutes = \"/admin\"\n[skip]\nroutes = \"/health\"");
    let of_other = "[block]\nroutes = \"/debug\"\n[skip]\nroutes = \"/ready\"\n[policies.other]\nlimit = \"sliding-log 9/h\"\n\
                    key = \"ip\"\n";
    let of_other = Policies::from_toml(of_other).unwrap();
    let policies = [of_api.get("api").unwrap(), of_other.get("other").unwrap()];
    let app = app(RateLimitLayer::new(MemoryStore::new(), policies));
    for (path, expected) in [
        ("/admin", BLOCKED),
        ("/debug", BLOCKED),
        ("/health", SKIPPED),
        ("/ready", SKIPPED),
        ("/", LIMITED),
    ] {
        assert_eq!(
            statuses(&app, || get_from("203.0.113.1", path)).await,
            expected,
            "{path}"
        );
    }
}

/// RFC 8441: a WebSocket of HTTP/2 is opened by `CONNECT` with a path, one of HTTP/1.1 by `GET`.
#[tokio::test]
async fn a_websocket_of_http2_is_a_get() {
    let policies = described("[block]\nroutes = \"/admin\"\nmethods = \"GET\"");
    let reads =
        Policies::from_toml("[policies.reads]\nlimit = \"sliding-log 2/h\"\nkey = \"ip\"\nmethods = \"GET\"").unwrap();
    let router = Router::new()
        .route("/admin", any(async || ()))
        .route("/socket", any(async || ()))
        .layer(policies.layer(MemoryStore::new(), ["api"]).unwrap())
        .layer(reads.layer(MemoryStore::new(), ["reads"]).unwrap())
        .layer(Extension(PeerAddr(([203, 0, 113, 7], 4711).into())));
    let (client, server) = tokio::io::duplex(65_536);
    let mut http2 = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    http2.enable_connect_protocol();
    tokio::spawn(http2.serve_connection(TokioIo::new(server), TowerToHyperService::new(router)));

    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(client));
    let (mut client, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    // The settings of the server have arrived with its response.
    let first = Request::get("http://localhost/admin")
        .body(Empty::<Bytes>::new())
        .unwrap();
    assert_eq!(client.send_request(first).await.unwrap().status(), 403);

    for (path, expected) in [("/admin", 403), ("/socket", 429)] {
        let open = Request::connect(format!("http://localhost{path}"))
            .extension(Protocol::from_static("websocket"))
            .body(Empty::new())
            .unwrap();
        assert_eq!(client.send_request(open).await.unwrap().status(), expected, "{path}");
    }
}

#[tokio::test]
async fn the_address_is_that_of_the_client_if_the_file_describes_it() {
    let lists = "[skip]\nnetworks = \"192.0.2.0/24\"\n[block]\nnetworks = \"198.51.100.0/24\"\n";
    let behind_proxy = format!("{lists}[client-ip]\nheader = \"x-forwarded-for\"\ntrusted = [\"10.0.0.0/8\"]\n");
    let [direct, behind_proxy] = [lists, &behind_proxy].map(|lists| {
        let policies = described(lists);
        app(policies.layer(Clock::new().memory_store(), ["api"]).unwrap())
    });
    for (peer, forwarded_for, of_direct, of_proxied) in [
        ("10.0.0.1", "192.0.2.7", LIMITED, SKIPPED),
        ("10.0.0.2", "198.51.100.9", LIMITED, BLOCKED),
        ("203.0.113.7", "192.0.2.7", LIMITED, LIMITED),
        ("198.51.100.9", "192.0.2.7", BLOCKED, BLOCKED),
    ] {
        let request = || get_from(peer, "/").header("x-forwarded-for", forwarded_for);
        assert_eq!(statuses(&direct, request).await, of_direct, "{peer} {forwarded_for}");
        assert_eq!(
            statuses(&behind_proxy, request).await,
            of_proxied,
            "{peer} {forwarded_for}"
        );
    }
}

#[tokio::test]
async fn an_unknown_client_is_skipped_by_no_network_and_blocked_by_choice() {
    let proxies =
        "[client-ip]\nheader = \"x-real-ip\"\ntrusted = [\"10.0.0.0/8\"]\n[skip]\nnetworks = \"10.0.0.0/8\"\n";
    let block = "[block]\nclients = \"unknown\"\nmethods = \"POST\"\n";
    for (lines, post) in [(proxies.to_owned(), LIMITED), (format!("{proxies}{block}"), BLOCKED)] {
        let app = app(described(&lines).layer(MemoryStore::new(), ["api"]).unwrap());
        let known = || get_from("10.0.0.2", "/").header("x-real-ip", "10.0.0.3");
        assert_eq!(statuses(&app, known).await, SKIPPED);
        let unknown = || get_from("10.0.0.2", "/");
        assert_eq!(statuses(&app, || unknown().method("POST")).await, post);
        let twice = || known().header("x-real-ip", "10.0.0.3");
        assert_eq!(send(&app, twice().method("POST")).await.status.as_u16(), post[1]);
        if post == BLOCKED {
            assert_eq!(statuses(&app, unknown).await, LIMITED);
        }
    }
}

#[tokio::test]
async fn each_layer_with_a_policy_of_the_file_has_its_lists_beside_its_own() {
    let policies = described("skip.routes = \"/health\"\nblock.networks = \"198.51.100.0/24\"");
    let day = Policy::new("day", SlidingLog::per_day(1)).key(key::ip());
    let api = policies.get("api").unwrap();
    let without_key = policies.unkeyed("api").unwrap().key(key::constant("all"));
    for policies in [vec![api.clone()], vec![without_key], vec![day.clone(), api]] {
        let layer = RateLimitLayer::new(Clock::new().memory_store(), policies)
            .skip(|parts| parts.uri.path() == "/mine")
            .block(|parts| parts.uri.path() == "/none");
        let app = app(layer);
        assert_eq!(statuses(&app, || get_from("203.0.113.1", "/health")).await, SKIPPED);
        assert_eq!(statuses(&app, || get_from("203.0.113.1", "/mine")).await, SKIPPED);
        assert_eq!(statuses(&app, || get_from("198.51.100.9", "/mine")).await, BLOCKED);
        assert_eq!(statuses(&app, || get_from("203.0.113.1", "/none")).await, BLOCKED);
        assert_eq!(statuses(&app, || get_from("203.0.113.1", "/")).await, LIMITED);
    }

    let others = app(RateLimitLayer::new(Clock::new().memory_store(), day));
    assert_eq!(statuses(&others, || get_from("198.51.100.9", "/")).await, LIMITED);
    // A limiter has no requests.
    let limiter = Limiter::new(MemoryStore::new(), policies.unkeyed("api").unwrap());
    assert!(limiter.check("42").await.unwrap().is_allowed());
}

#[tokio::test]
async fn a_file_that_is_switched_off_blocks_nothing() {
    let policies = described("enabled = false\nblock.routes = \"/health\"");
    let app = app(policies.layer(MemoryStore::new(), ["api"]).unwrap());
    assert_eq!(statuses(&app, || get("/health")).await, [200, 200]);
}

#[tokio::test]
async fn the_lists_follow_the_file_and_conditions_in_code_stay() {
    let live = described("");
    let layer = live
        .layer(Clock::new().memory_store(), ["api"])
        .unwrap()
        .block(|parts| parts.uri.path() == "/none");
    let app = app(layer.clone());
    // Set after the layer has followed a reload.
    live.replace(&described("block.routes = \"/health\"")).unwrap();
    assert_eq!(statuses(&app, || get("/health")).await, BLOCKED);
    let later = self::app(layer.skip(|parts| parts.uri.path() == "/mine"));

    for (lines, health) in [
        ("block.routes = \"/health\"", BLOCKED),
        ("skip.routes = \"/health\"", SKIPPED),
        ("block.networks = \"203.0.113.0/24\"", BLOCKED),
        ("enabled = false\nblock.routes = \"/health\"", [200, 200]),
        ("", LIMITED),
    ] {
        live.replace(&described(lines)).unwrap();
        let request = || get_from("203.0.113.1", "/health");
        assert_eq!(statuses(&app, request).await, health, "{lines}");
        assert_eq!(statuses(&app, || get("/none")).await, BLOCKED, "{lines}");
        if !lines.contains("networks") {
            assert_eq!(statuses(&later, || get("/mine")).await, SKIPPED, "{lines}");
        }
    }

    // A policy that the file has no more is in a layer that has the lists of the file.
    live.replace(&Policies::from_toml("block.routes = \"/health\"\n[policies]").unwrap())
        .unwrap();
    assert_eq!(statuses(&app, || get("/health")).await, BLOCKED);

    // A file with a wrong line changes nothing.
    assert!(Policies::from_toml(&file("block.networks = \"ten\"")).is_err());
    assert_eq!(statuses(&app, || get("/health")).await, BLOCKED);
}

#[tokio::test]
async fn a_layer_that_is_built_after_a_reload_has_its_lists() {
    let live = described("block.routes = \"/health\"");
    let policy = live.get("api").unwrap();
    live.replace(&described("skip.routes = \"/health\"")).unwrap();
    let app = app(RateLimitLayer::new(MemoryStore::new(), policy));
    assert_eq!(statuses(&app, || get("/health")).await, SKIPPED);
}

#[test]
fn a_layer_needs_the_name_of_a_policy() {
    let (fixed, live) = (described(""), described(""));
    for names in [&["api"][..], &["search"], &["api", "api"], &[]] {
        let [fixed, live] = [
            fixed.layer(MemoryStore::new(), names),
            live.layer(MemoryStore::new(), names),
        ]
        .map(|layer| layer.map(drop).map_err(|error| error.to_string()));
        let expected = match names {
            ["api"] => None,
            ["search"] => Some("there is no policy `search`"),
            [] => Some("at least one of its policies"),
            _ => Some("two policies are named `api`"),
        };
        assert_eq!(fixed, live);
        match expected {
            None => assert_eq!(fixed, Ok(())),
            Some(expected) => assert!(fixed.unwrap_err().contains(expected), "{names:?}"),
        }
    }
}

#[test]
fn lists_that_cannot_be_meant_are_errors_with_their_place_and_the_fix() {
    for (lines, place, fix) in [
        (
            "skip.networks = \"10.0.0.0/33\"",
            "line 1",
            "one looks like `10.0.0.0/8`",
        ),
        (
            "[block]\nnetworks = [\"10.0.0.1\", \"ten\"]",
            "line 2",
            "`ten` is not a network",
        ),
        (
            "skip.networks = [\"10.0.0.1\", \"10.0.0.1/8\"]",
            "line 1",
            "write the network `10.0.0.0/8`, or the address `10.0.0.1` alone",
        ),
        (
            "block.networks = \"2001:db8::1/32\"",
            "line 1",
            "write the network `2001:db8::/32`",
        ),
        (
            "block.networks = \"0.0.0.0/0\"",
            "line 1",
            "list the networks of the clients",
        ),
        ("skip.networks = [\"::/0\"]", "line 1", "`::/0` contains every address"),
        ("skip.networks = []", "line 1", "an empty list"),
        ("skip = []", "line 1", "leave it out"),
        (
            "skip = true",
            "line 1",
            "a table with `networks`, `routes` or `methods`",
        ),
        ("[block]", "line 1", "these would be all requests"),
        ("block.routes = \"others\"", "line 1", "list the routes"),
        ("[skip]\nnetwork = \"10.0.0.0/8\"", "line 2", "`networks`"),
        ("[skip]\nroutes = \"health\"", "line 2", "one looks like `/login`"),
        ("block.clients = \"known\"", "line 1", "`unknown`"),
        (
            "block.clients = \"unknown\"",
            "`[block]`: ",
            "`[client-ip]` describes the proxies",
        ),
        ("skip.clients = \"unknown\"", "`[skip]`: ", "never skipped"),
        (
            "[block]\nclients = \"unknown\"\nnetworks = \"10.0.0.1\"",
            "line 1",
            "two tables",
        ),
        (
            "[[skip]]\nroutes = \"/a\"\n[[skip]]\nmethods = \"get\"",
            "line 4",
            "`POST`",
        ),
    ] {
        let error = Policies::from_toml(&file(lines)).unwrap_err().to_string();
        assert!(error.contains(place) && error.contains(fix), "{lines}: {error}");
        let json = serde_json::to_string(&file(lines).parse::<toml::Table>().unwrap()).unwrap();
        let error = Policies::from_json(&json).unwrap_err().to_string();
        assert!(error.contains(fix), "{json}: {error}");
    }
}

#[tokio::test]
async fn a_template_that_is_one_of_several_in_the_route_or_has_a_rest_is_skipped_by_the_path() {
    for (template, route_template, path, expected) in [
        ("/health/{*rest}", "/health/live", "/health/live", SKIPPED),
        ("/static/{*rest}", "/static/{file}", "/static/app.css", SKIPPED),
        ("/users/root", "/users/{id}", "/users/root", SKIPPED),
        ("/health", "/{page}", "/health", SKIPPED),
        ("/health", "/{page}", "/Health", LIMITED),
        // As axum prefers the route to this template.
        ("/users/{id}", "/users/me", "/users/me", LIMITED),
    ] {
        let policies = described(&format!("skip.routes = \"{template}\""));
        let layer = RateLimitLayer::new(MemoryStore::new(), policies.get("api").unwrap());
        let app = Router::new().route(route_template, route(async || "hi")).layer(layer);
        assert_eq!(
            statuses(&app, || get(path)).await,
            expected,
            "{template}, {route_template}"
        );
    }
}

/// In the syntax of other routers, globs, patterns and misspellings, they would block nothing.
#[test]
fn a_route_that_matches_none_of_the_paths_that_it_looks_like_is_an_error_with_the_fix() {
    for (route, fix) in [
        ("/admin/*", "`{*rest}`"),
        ("/admin/**", "`{*rest}`"),
        ("/admin/*rest", "`{*rest}`"),
        ("/admin*", "`{*rest}`"),
        ("/admin/{*rest}/logs", "at the end of the route"),
        ("/admin/{*rest", "`{*rest}`"),
        ("/admin/{rest*}", "`{*rest}`"),
        ("/admin/{*}", "`{*rest}`"),
        ("/admin/{**rest}", "`{*rest}`"),
        ("/a{*rest}", "`{*rest}`"),
        ("/users/:id", "`{id}`"),
        ("/users/<id>", "`{id}`"),
        ("/users/<int:id>", "`{id}`"),
        ("/users/[id]", "`{id}`"),
        ("/users/{}", "`{id}`"),
        ("/users/{id", "`{id}`"),
        ("/users/id}", "`{id}`"),
        ("/users/{{id}}", "`{id}`"),
        ("/users/{id:[0-9]+}", "`{id}`"),
        ("/users/{id?}", "`{id}`"),
        ("/users/{id}.json", "at the end of a segment"),
        ("/users/${id}", "`{id}`"),
        ("/users/(\\d+)", "`{id}`"),
        ("/users/(.+)", "`{id}`"),
        ("/(users)/me", "`{id}`"),
        ("/users|/me", "several routes are a list"),
        ("/users,/me", "several routes are a list"),
        (
            "/shop.Accounts",
            "all methods of a gRPC service are `/shop.Accounts/{*rest}`",
        ),
        (
            "/shop.Accounts/",
            "all methods of a gRPC service are `/shop.Accounts/{*rest}`",
        ),
        ("/users/\\d+", "`{id}`"),
        ("/users/%7Bid%7D", "a brace"),
        ("/users ", "white space"),
        (" /users", "begin it with `/`"),
        ("/users\n", "white space"),
        ("/my users", "`%20`"),
        ("/users?all", "query"),
        ("/users#top", "fragment"),
        ("users", "begin it with `/`"),
        ("", "begin it with `/`"),
        ("^/users", "begin it with `/`"),
        ("https://example.com/users", "begin it with `/`"),
    ] {
        for list in ["block", "skip", "policies.of"] {
            let limit = if list == "policies.of" {
                "limit = '1/h'"
            } else {
                "methods = 'GET'"
            };
            let lines = format!("[{list}]\n{limit}\nroutes = {}", serde_json::json!([route, "/"]));
            let error = Policies::from_toml(&file(&lines)).map(drop).unwrap_err().to_string();
            assert!(
                error.contains(fix) && error.contains("is not a route"),
                "{route}: {error}"
            );
        }
    }
    let routes =
        "/ /a(b) /v1/users:batchGet /a//b/ /caf%C3%A9 /café /$count /@me /a,b /users/{user-id}/{*a_b} /user-{id}";
    for route in routes.split(' ') {
        let _ = described(&format!("block.routes = '{route}'"));
    }
}

#[test]
fn a_request_without_an_address_is_in_no_list_and_is_logged() {
    let policies = described("block.networks = \"10.0.0.0/8\"");
    let layer = policies.layer(MemoryStore::new(), ["api"]).unwrap();
    let service = layer.layer(service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    let log = Log::capture();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let Ok(response) = runtime.block_on(service.oneshot(Request::new(Body::empty())));
    // The key of the policy is missing, too.
    assert_eq!(response.status().as_u16(), 500);
    assert!(
        log.text().contains("the client of a request is unknown"),
        "{}",
        log.text()
    );
}

/// A file in which each policy has another limit, by which a response shows it.
const OTHERS: &str = "
[policies.login]
limit = \"sliding-log 1/h\"
key = \"ip\"
routes = \"/login\"

[policies.writes]
limit = \"sliding-log 2/h\"
key = \"ip\"
methods = [\"POST\", \"PUT\"]

[policies.reports]
limit = \"sliding-log 3/h\"
key = \"ip\"
routes = \"/reports/{*rest}\"
methods = \"GET\"

[policies.rest]
limit = \"sliding-log 4/h\"
key = \"ip\"
routes = \"others\"

[policies.all]
limit = \"sliding-log 5/h\"
key = \"ip\"
";

/// The policies that apply to a request.
async fn applied(app: &Router, method: &str, path: &str) -> String {
    let response = send(app, get(path).method(method)).await;
    let policies = response.field("ratelimit-policy").unwrap_or_default();
    let names = policies.split('"').skip(1).step_by(2);
    names.collect::<Vec<_>>().join(" ")
}

#[tokio::test]
async fn the_others_are_those_that_no_other_policy_is_for() {
    let policies = Policies::from_toml(OTHERS).unwrap();
    let all = ["login", "writes", "reports", "rest", "all"];
    let app = |layer| Router::new().fallback(async || "hi").layer(layer);
    let together = app(policies.layer(MemoryStore::new(), all).unwrap());
    // Also where the other policies are in other layers.
    let alone = app(policies.layer(MemoryStore::new(), ["rest"]).unwrap());
    for (method, path, expected) in [
        ("GET", "/login", "login all"),
        ("POST", "/login", "login writes all"),
        ("PUT", "/", "writes all"),
        ("GET", "/reports/a/b", "reports all"),
        ("HEAD", "/reports/a", "reports all"),
        ("DELETE", "/reports/a", "rest all"),
        ("GET", "/", "rest all"),
    ] {
        assert_eq!(applied(&together, method, path).await, expected, "{method} {path}");
        let rest = if expected.contains("rest") { "rest" } else { "" };
        assert_eq!(applied(&alone, method, path).await, rest, "{method} {path}");
    }

    let of_methods = OTHERS.replace("routes = \"others\"", "routes = \"others\"\nmethods = \"DELETE\"");
    let policies = Policies::from_toml(&of_methods).unwrap();
    let alone = app(policies.layer(MemoryStore::new(), ["rest"]).unwrap());
    assert_eq!(applied(&alone, "GET", "/").await, "");
    assert_eq!(applied(&alone, "DELETE", "/").await, "rest");
}

#[tokio::test]
async fn the_others_follow_the_file() {
    let live = Policies::from_toml(OTHERS).unwrap();
    let layer = live.layer(MemoryStore::new(), ["rest"]).unwrap();
    let app = Router::new().fallback(async || "hi").layer(layer);
    assert_eq!(applied(&app, "GET", "/login").await, "");
    assert_eq!(applied(&app, "GET", "/new").await, "rest");

    live.replace(&Policies::from_toml(&OTHERS.replace("\"/login\"", "\"/new\"")).unwrap())
        .unwrap();
    assert_eq!(applied(&app, "GET", "/login").await, "rest");
    assert_eq!(applied(&app, "GET", "/new").await, "");
}

#[tokio::test]
async fn the_others_include_the_requests_of_a_policy_that_a_load_adds_until_something_uses_it() {
    let rest = "plan = 'header:plan'
        policies.rest = { limit = 'sliding-log 40/h', key = 'ip', routes = 'others' }
        plans.pro.rest = { limit = 'sliding-log 50/h', routes = 'others' }";
    let app = |layer| Router::new().fallback(async || "hi").layer(layer);
    for added in ["policies", "plans.pro"] {
        let added = format!("{rest}\n{added}.login = {{ limit = 'sliding-log 60/h', key = 'ip', routes = '/login' }}");
        let read = |file: &str| Policies::from_toml(file).unwrap();
        let applied = async |app: &Router| {
            let response = send(app, get("/login").header("plan", "pro")).await;
            let policy = response.field("ratelimit-policy").unwrap_or_default();
            policy.split('"').nth(1).unwrap_or_default().to_owned()
        };

        let live = read(rest);
        let running = app(live.layer(MemoryStore::new(), ["rest"]).unwrap());
        for _ in 0..2 {
            live.replace(&read(&added)).unwrap();
            assert_eq!(applied(&running).await, "rest", "{added}");
        }
        let other = app(live.layer(MemoryStore::new(), ["login"]).unwrap());
        live.replace(&read(&added)).unwrap();
        assert_eq!(
            [applied(&running).await, applied(&other).await],
            ["", "login"],
            "{added}"
        );

        // A layer that is built later has each of its policies for its own requests, in either order.
        for names in [["rest", "login"], ["login", "rest"]] {
            let live = read(&format!(
                "{rest}\npolicies.mails = {{ limit = 'sliding-log 9/h', key = 'ip' }}"
            ));
            let _mails = live.layer(MemoryStore::new(), ["mails"]).unwrap();
            live.replace(&read(&format!(
                "{added}\npolicies.mails = {{ limit = 'sliding-log 9/h', key = 'ip' }}"
            )))
            .unwrap();
            let later = app(live.layer(MemoryStore::new(), names).unwrap());
            assert_eq!(applied(&later).await, "login", "{added} {names:?}");
        }

        // A load before the layers is that of their start.
        let live = read(rest);
        live.replace(&read(&added)).unwrap();
        let started = app(live.layer(MemoryStore::new(), ["rest", "login"]).unwrap());
        assert_eq!(applied(&started).await, "login", "{added}");
    }
}

#[tokio::test]
async fn the_others_are_those_of_the_plan_of_a_request() {
    let policies = Policies::from_toml(
        "plan = 'header:plan'
        policies.rest = { limit = 'sliding-log 40/h', key = 'ip', routes = 'others' }
        policies.login = { limit = 'sliding-log 50/h', key = 'ip', routes = '/login' }
        plans.pro.login = { limit = 'sliding-log 50/h', routes = '/sign-in' }
        plans.pro.search = { limit = 'sliding-log 60/h', key = 'ip', routes = '/search' }",
    )
    .unwrap();
    let app = |layer| Router::new().fallback(async || "hi").layer(layer);
    let of_plans = app(policies.layer(MemoryStore::new(), ["rest", "login", "search"]).unwrap());
    let without_plans = app(RateLimitLayer::new(MemoryStore::new(), policies.get("rest").unwrap()));
    for (plan, path, expected) in [
        ("free", "/search", "rest"),
        ("free", "/login", "login"),
        ("free", "/sign-in", "rest"),
        ("pro", "/search", "search"),
        ("pro", "/login", "rest"),
        ("pro", "/sign-in", "login"),
    ] {
        let applied = async |app: &Router| {
            let response = send(app, get(path).header("plan", plan)).await;
            let policy = response.field("ratelimit-policy").unwrap_or_default();
            policy.split('"').nth(1).unwrap_or_default().to_owned()
        };
        assert_eq!(applied(&of_plans).await, expected, "{plan} {path}");
        let alone = if path == "/login" { "" } else { "rest" };
        assert_eq!(applied(&without_plans).await, alone, "{plan} {path}");
    }
}

#[test]
fn others_stand_alone() {
    for routes in ["[\"others\", \"/a\"]", "\"other\""] {
        let text = OTHERS.replace("\"others\"", routes);
        let error = Policies::from_toml(&text).unwrap_err().to_string();
        assert!(error.contains("`others` alone"), "{error}");
    }
}
