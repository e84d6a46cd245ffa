//! Spellings of paths over real connections, through every order of what stands around a handler: a handler that is reached has
//! met the limits and blocks of its route, and is skipped only by its own.

use std::{collections::BTreeSet, convert::Infallible};

use axum::{
    Router,
    body::Body,
    extract::OriginalUri,
    routing::{MethodRouter, any},
};
use http::{HeaderValue, Request, Response, StatusCode, Uri};
use hyper::{body::Incoming, server::conn::http1};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tower::{Layer, ServiceExt, util::BoxCloneSyncService};
use tower_http::normalize_path::NormalizePath;
use tower_quota::{MemoryStore, Policies, RateLimitLayer};

use crate::support::{get, send};

/// What stands around the handlers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    /// The layer, by `Router::layer` if it is around a router.
    Limit,
    /// The layer around a service.
    LimitAround,
    Trim,
    Append,
    /// A service that takes all spellings for one path.
    Lenient,
    /// A service that removes dot segments, and takes nothing else for syntax.
    Strict,
    Nest,
    Fallback,
    Rest,
}

type Served = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

/// A part of a stack.
enum Stage {
    Router(Router),
    Service(Served),
}

impl Stage {
    fn service(self) -> Served {
        match self {
            Self::Router(router) => BoxCloneSyncService::new(router),
            Self::Service(service) => service,
        }
    }

    fn within(self, part: Part, limit: &RateLimitLayer) -> Self {
        match (part, self) {
            (Part::Limit, Self::Router(router)) => Self::Router(router.layer(limit.clone())),
            (Part::Nest, Self::Router(router)) => Self::Router(Router::new().nest("/api", router)),
            (Part::Limit | Part::LimitAround, stage) => {
                let service = limit.layer(stage.service());
                Self::Service(BoxCloneSyncService::new(
                    service.map_response(|response| response.map(Body::new)),
                ))
            }
            (Part::Trim, stage) => Self::Service(BoxCloneSyncService::new(NormalizePath::trim_trailing_slash(
                stage.service(),
            ))),
            (Part::Append, stage) => Self::Service(BoxCloneSyncService::new(NormalizePath::append_trailing_slash(
                stage.service(),
            ))),
            (Part::Lenient, stage) => Self::Service(BoxCloneSyncService::new(stage.service().map_request(leniently))),
            (Part::Strict, stage) => Self::Service(BoxCloneSyncService::new(stage.service().map_request(strictly))),
            (Part::Nest, stage) => Self::Router(Router::new().nest_service("/api", stage.service())),
            (Part::Fallback, stage) => Self::Router(Router::new().fallback_service(stage.service())),
            (Part::Rest, stage) => Self::Router(Router::new().route_service("/{*rest}", stage.service())),
        }
    }
}

fn leniently(mut request: Request<Body>) -> Request<Body> {
    let text = request.uri().path();
    let mut decoded = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let escaped = text_of(rest.get(1..3)).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        let (byte, after) = match escaped.filter(|_| *first == b'%') {
            Some(byte) => (byte, &rest[3..]),
            None => (*first, tail),
        };
        decoded.push(byte);
        rest = after;
    }
    let path = String::from_utf8(decoded)
        .expect("text")
        .to_lowercase()
        .replace('\\', "/");
    let mut segments = Vec::new();
    for segment in path
        .split('/')
        .map(|segment| segment.split(';').next().expect("a part"))
    {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    let path: Uri = format!("/{}", segments.join("/")).parse().expect("a path");
    *request.uri_mut() = path;
    request
}

/// RFC 3986 §5.2.4.
fn strictly(mut request: Request<Body>) -> Request<Body> {
    let mut segments = Vec::new();
    let path = request.uri().path();
    let mut rest = path.strip_prefix('/').unwrap_or(path).split('/').peekable();
    while let Some(segment) = rest.next() {
        match segment {
            "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
        if rest.peek().is_none() && matches!(segment, "." | "..") {
            segments.push("");
        }
    }
    let path: Uri = format!("/{}", segments.join("/")).parse().expect("a path");
    *request.uri_mut() = path;
    request
}

fn text_of(bytes: Option<&[u8]>) -> Option<&str> {
    std::str::from_utf8(bytes?).ok()
}

/// A handler that names its route in the response.
fn handler(route: &'static str) -> MethodRouter {
    any(async move || [("x-handler", HeaderValue::from_static(route))])
}

const ROUTES: [&str; 6] = [
    "/login",
    "/private",
    "/health",
    "/users/{id}",
    "/files/{*rest}",
    "/{top}",
];

/// The handlers within these parts, the first of which is the innermost.
fn stack(parts: &[Part]) -> Served {
    let prefix = if parts.contains(&Part::Nest) { "/api" } else { "" };
    let file = format!(
        "
        skip.routes = '{prefix}/health'
        block.routes = '{prefix}/private'
        [policies.login]
        routes = '{prefix}/login'
        [policies.users]
        routes = '{prefix}/users/{{id}}'
        [policies.files]
        routes = '{prefix}/files/{{*rest}}'
        [policies.top]
        routes = '{prefix}/{{top}}'
        [policies.all]
        "
    );
    let file = file.replace("]\n", "]\nlimit = 'fixed-window 1000000/min'\nkey = 'constant:all'\n");
    let policies = Policies::from_toml(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
    let names = ["login", "users", "files", "top", "all"];
    let limit = policies.layer(MemoryStore::new(), names).expect("policies");

    let slash = if parts.contains(&Part::Append) { "/" } else { "" };
    let mut router = Router::new().fallback(handler("none"));
    for route in ROUTES {
        let slash = if route.contains('*') { "" } else { slash };
        router = router.route(&format!("{route}{slash}"), handler(route));
    }
    let stage = parts
        .iter()
        .fold(Stage::Router(router), |stage, part| stage.within(*part, &limit));
    stage.service()
}

/// Orders of up to three parts, the layer among them.
fn orders() -> Vec<Vec<Part>> {
    let others = [
        Part::Trim,
        Part::Append,
        Part::Lenient,
        Part::Strict,
        Part::Nest,
        Part::Fallback,
        Part::Rest,
    ];
    let singles = others.iter().map(|one| vec![*one]);
    let pairs = others.iter().flat_map(|one| others.map(|other| vec![*one, other]));
    let around = std::iter::once(vec![])
        .chain(singles)
        .chain(pairs)
        .filter(|around| !is_odd(around));
    let with_limits = around.flat_map(|around| {
        (0..=around.len()).flat_map(move |position| {
            let is_service = around[..position]
                .last()
                .is_some_and(|part| matches!(part, Part::Trim | Part::Append | Part::Lenient | Part::Strict));
            let limits = if is_service {
                &[Part::LimitAround][..]
            } else {
                &[Part::Limit, Part::LimitAround]
            };
            let around = around.clone();
            limits.iter().map(move |limit| {
                let mut order = around.clone();
                order.insert(position, *limit);
                order
            })
        })
    });
    with_limits.collect()
}

fn is_odd(around: &[Part]) -> bool {
    match around {
        [one, other] if one == other => true,
        // They contradict each other.
        [Part::Append, Part::Trim | Part::Lenient] | [Part::Trim | Part::Lenient, Part::Append] => true,
        // axum asserts that there is none.
        [Part::Nest, Part::Rest] => true,
        _ => false,
    }
}

/// Request targets for each route, in all spellings.
fn targets(prefix: &str) -> Vec<String> {
    let fixed = ["/", "http://host", "http://host?x", "HTTP://host:80/login//", "/other"];
    let mut targets: Vec<_> = fixed.map(str::to_owned).into();
    // A rest of slashes only.
    targets.extend(["files//", "x/../files//", "FILES//"].map(|path| format!("{prefix}/{path}")));
    for name in ["login", "private", "health", "users/root", "files/a/b"] {
        let path = format!("{prefix}/{name}");
        let (first, others) = name.split_at(1);
        targets.extend([
            path.clone(),
            format!("{path}/"),
            format!("/{path}"),
            format!("{path}?to=/health"),
            format!("{path}/."),
            format!("{path}/x/.."),
            format!("{prefix}/./{name}"),
            format!("{prefix}//{name}"),
            format!("{prefix}/x/../{name}"),
            format!("{prefix}/health/..;/{name}"),
            format!("{prefix}/health%2f..%2F{name}"),
            format!("{prefix}/health/%2e%2E/{name}"),
            format!("{prefix}/files/..\\{name}"),
            format!("{prefix}/x//../{name}"),
            format!("/x/..{path}"),
            format!("{prefix}/x%2Fy/../{name}"),
            format!("{prefix}/x%5Cy/../{name}"),
            format!("{prefix}/x\\y/../{name}"),
            format!("{prefix}/x%3F/../{name}"),
            format!("{prefix}/health/%2F/../../{name}"),
            format!("{prefix}/x;%2Fy/../{name}"),
            format!("{prefix}/%{:02x}{others}", first.as_bytes()[0]),
            format!("{prefix}/{}", name.to_uppercase()),
            format!("{path};v=1"),
            format!("{path};v=1/"),
            format!("{path};%2Fx"),
            format!("{path}%2F"),
            format!("{prefix}/%2F{name}"),
            format!("/{}", path[1..].replace('/', "%2F")),
            format!("{path}%3F"),
            format!("http://host{path}"),
            format!("http://host/{path}/"),
        ]);
    }
    targets
}

/// Sends requests with these lines over one connection, and returns the heads of the responses.
async fn heads(service: Served, lines: &[String]) -> Vec<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("a connection");
        let service = service.map_request(|request: Request<Incoming>| request.map(Body::new));
        http1::Builder::new()
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
            .await
    });

    let mut text = String::new();
    for (position, line) in lines.iter().enumerate() {
        let last = if position + 1 == lines.len() {
            "connection: close\r\n"
        } else {
            ""
        };
        text.push_str(&format!("{line} HTTP/1.1\r\nhost: host\r\n{last}\r\n"));
    }
    let (mut reader, mut writer) = TcpStream::connect(addr).await.expect("a server").into_split();
    let mut received = String::new();
    let (written, read) = tokio::join!(writer.write_all(text.as_bytes()), reader.read_to_string(&mut received));
    written.expect("the server reads");
    read.expect("the server replies");
    let heads: Vec<_> = received.split_terminator("\r\n\r\n").map(str::to_owned).collect();
    assert_eq!(heads.len(), lines.len(), "responses have no content: {heads:#?}");
    heads
}

fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

/// The policy that is missing, if one is.
fn missing(head: &str) -> Option<&'static str> {
    let reached = field(head, "x-handler")?;
    let policies = field(head, "ratelimit-policy").unwrap_or_default();
    let needed = match reached {
        "/private" => return Some("[block]"),
        "/health" => return None,
        "/login" => "login",
        "/users/{id}" => "users",
        "/files/{*rest}" => "files",
        "/{top}" => "top",
        _ => "all",
    };
    let is_met = |policy: &str| policies.contains(&format!("\"{policy}\";"));
    [needed, "all"].into_iter().find(|policy| !is_met(policy))
}

#[tokio::test]
async fn a_handler_that_is_reached_has_met_its_policies_in_every_order_and_spelling() {
    let mut wrong = Vec::new();
    let mut reached = BTreeSet::new();
    for parts in orders() {
        let prefix = if parts.contains(&Part::Nest) { "/api" } else { "" };
        let targets = targets(prefix);
        let mut lines: Vec<_> = targets.iter().map(|target| format!("GET {target}")).collect();
        lines.push("OPTIONS *".to_owned());
        let mut heads = heads(stack(&parts), &lines).await;
        lines.push("CONNECT host:443".to_owned());
        heads.extend(self::heads(stack(&parts), &lines[lines.len() - 1..]).await);

        for (line, head) in lines.iter().zip(&heads) {
            if let Some(policy) = missing(head) {
                wrong.push(format!("{parts:?}: {line}: {policy}: {head:?}"));
            }
            reached.extend(field(head, "x-handler").map(str::to_owned));
        }

        // As they are written, they are what they look like.
        let head_of = |name: &str| {
            let line = format!("GET {prefix}/{name}");
            let position = lines.iter().position(|other| *other == line);
            &heads[position.unwrap_or_else(|| panic!("{line}"))]
        };
        assert_eq!(field(head_of("login"), "x-handler"), Some("/login"), "{parts:?}");
        assert!(head_of("private").starts_with("HTTP/1.1 403"), "{parts:?}");
        assert_eq!(field(head_of("health"), "x-handler"), Some("/health"), "{parts:?}");
        let is_skipped = field(head_of("health"), "ratelimit").is_none();
        assert!(is_skipped || parts.contains(&Part::Append), "{parts:?}");
    }
    let first = &wrong[..wrong.len().min(20)];
    assert!(
        wrong.is_empty(),
        "{} handlers without their policies, such as {first:#?}",
        wrong.len()
    );
    let expected = ["/files/{*rest}", "/health", "/login", "/users/{id}", "/{top}", "none"];
    assert_eq!(reached.iter().map(String::as_str).collect::<Vec<_>>(), expected);
}

/// `/users/root` is a path of the route `/users/{id}`, and `/users/me` has a route of its own.
#[tokio::test]
async fn a_template_within_the_matched_route_applies_to_its_path() {
    let app = |file: &str| {
        let policies = Policies::from_toml(&format!(
            "{file}\n[policies.api]\nlimit = '1/h'\nkey = 'constant:all'\nroutes = '/users/root'\n"
        ));
        let layer = policies
            .expect(file)
            .layer(MemoryStore::new(), ["api"])
            .expect("a policy");
        let routes = Router::new()
            .route("/users/{id}", handler("/users/{id}"))
            .route("/users/me", handler("/users/me"))
            .route("/user-{id}", handler("/user-{id}"))
            .route("/admin/logs", handler("/admin/logs"));
        [
            routes.clone().layer(layer.clone()),
            Router::new().fallback_service(layer.layer(routes)),
        ]
    };
    for (file, path, [inside, around]) in [
        ("block.routes = '/users/root'", "/users/root", [403, 403]),
        ("block.routes = '/users/root'", "/users/ROOT", [403, 403]),
        ("block.routes = '/users/root'", "/users/42", [200, 200]),
        ("block.routes = '/{any}/root'", "/users/root", [403, 403]),
        (
            "block = { routes = '/users/root', methods = 'POST' }",
            "/users/42",
            [200, 200],
        ),
        // The route itself, and what is within a template.
        ("block.routes = '/users/{id}'", "/users/root", [403, 403]),
        ("block.routes = '/users/{name}'", "/users/root", [403, 403]),
        ("block.routes = '/users/{id}'", "/users/me", [200, 403]),
        ("block.routes = '/users/me'", "/users/me", [403, 403]),
        ("block.routes = '/user-{name}'", "/user-42", [403, 403]),
        ("block.routes = '/user-42'", "/user-42", [403, 403]),
        ("block.routes = '/admin/{*rest}'", "/admin/logs", [403, 403]),
        // The policy.
        ("", "/users/root", [429, 429]),
        ("", "/users/ROOT", [429, 429]),
        ("", "/users/42", [200, 200]),
        ("skip.routes = '/users/root'", "/users/root", [200, 200]),
        ("skip.routes = '/users/root'", "/users/ROOT", [429, 429]),
    ] {
        for (app, expected) in app(file).iter().zip([inside, around]) {
            let _ = send(app, get(path)).await;
            assert_eq!(send(app, get(path)).await.status.as_u16(), expected, "{file} {path}");
        }
    }
}

fn without_prefix(mut request: Request<Body>) -> Request<Body> {
    let path = request.uri().path();
    let rest = path.strip_prefix("/en").map(|rest| rest.parse().expect("a path"));
    *request.uri_mut() = rest.unwrap_or_else(|| request.uri().clone());
    request
}

/// Behind a service that makes `/login` of `/en/login`, a route is that of either path. In a nested service the path is the whole one.
#[tokio::test]
async fn a_prefix_that_a_service_removes_evades_nothing() {
    let apps = |file: &str| {
        let policies = format!(
            "{file}
            [policies.login]
            limit = '1000/h'
            key = 'constant:all'
            routes = '/login'
            [policies.rest]
            limit = '1000/h'
            key = 'constant:all'
            routes = 'others'
            "
        );
        let policies = Policies::from_toml(&policies).expect(file);
        let layer = policies.layer(MemoryStore::new(), ["login", "rest"]).expect("policies");
        let limited = layer.layer(Router::new().fallback(handler("any")));
        let stripped = limited.clone().map_request(without_prefix);
        let nested = Router::new().nest_service("/api", limited.clone());
        // Its own routes have no prefix.
        let inner = Router::new().route("/{page}", handler("any")).layer(layer);
        [
            Router::new().fallback_service(stripped.clone()),
            Router::new().route_service("/{*rest}", stripped),
            Router::new().nest_service("/en", limited.clone()),
            Router::new().fallback_service(inner.map_request(without_prefix)),
            Router::new().fallback_service(nested.map_request(without_prefix)),
        ]
    };
    for (file, path, expected) in [
        ("", "/en/login", ["login", "login", "rest", "login", ""]),
        (
            "",
            "/en/x/..;/LOGIN/",
            ["login rest", "login rest", "rest", "login rest", ""],
        ),
        ("", "/en/other", ["rest", "rest", "rest", "rest", ""]),
        ("", "/login", ["login", "login", "", "login", ""]),
        ("", "/en/api/login", ["rest"; 5]),
        (
            "block.routes = '/admin'",
            "/en/admin",
            ["403", "403", "rest", "403", ""],
        ),
        (
            "block.routes = '/en/admin'",
            "/en/admin",
            ["403", "403", "403", "403", ""],
        ),
        (
            "block.routes = '/api/admin'",
            "/en/api/admin",
            ["403", "403", "rest", "403", "403"],
        ),
        ("block.routes = '/admin'", "/en/api/admin", ["rest"; 5]),
        (
            "skip.routes = '/health'",
            "/en/health",
            ["rest", "rest", "rest", "rest", ""],
        ),
        ("skip.routes = '/en/health'", "/en/health", [""; 5]),
    ] {
        // In the absolute form, as over HTTP/2, a path that is set has no host anymore.
        let paths = [path.to_owned(), format!("https://example.com{path}")];
        let apps = apps(file);
        let all = apps.iter().zip(expected).enumerate();
        for (path, (position, (app, expected))) in paths.iter().flat_map(|path| all.clone().map(move |app| (path, app)))
        {
            let reply = send(app, get(path)).await;
            let policies = reply
                .headers
                .get("ratelimit-policy")
                .map(|policies| policies.to_str().unwrap_or_default());
            let is_met = |name: &&str| policies.is_some_and(|policies| policies.contains(&format!("\"{name}\";")));
            let met = match reply.status.as_u16() {
                403 => "403".to_owned(),
                _ => ["login", "rest"]
                    .into_iter()
                    .filter(is_met)
                    .collect::<Vec<_>>()
                    .join(" "),
            };
            assert_eq!(met, expected, "{file} {path} {position}");
        }
    }
}

fn with_path(mut request: Request<Body>, path: &str) -> Request<Body> {
    *request.uri_mut() = path.parse().expect("a path");
    request
}

fn without_first_segment(request: Request<Body>) -> Request<Body> {
    let rest = request.uri().path()[1..]
        .split_once('/')
        .map(|(_, rest)| format!("/{rest}"));
    match rest {
        Some(rest) => with_path(request, &rest),
        None => request,
    }
}

fn without_parameters(request: Request<Body>) -> Request<Body> {
    let segments = request.uri().path().split('/');
    let names: Vec<_> = segments
        .map(|segment| segment.split(';').next().expect("a name"))
        .collect();
    let path = names.join("/");
    with_path(request, &path)
}

/// As `new URL(request.url, base).pathname`.
fn as_reference(request: Request<Body>) -> Request<Body> {
    let reference = request.uri().path().strip_prefix("//");
    let path = reference.map(|reference| format!("/{}", reference.split_once('/').map_or("", |(_, path)| path)));
    match path {
        Some(path) => with_path(request, &path),
        None => request,
    }
}

/// A path that a service within a router has set is blocked as the plain one is, whatever the service has read and wherever it stands.
#[tokio::test]
async fn a_path_that_a_service_sets_is_blocked_like_the_plain_one() {
    let inner = |route: &'static str, layer: RateLimitLayer| Router::new().route(route, handler("any")).layer(layer);
    let around = |layer: RateLimitLayer| layer.layer(Router::new().fallback(handler("any")));
    let fallback = |service: Served| Router::new().fallback_service(service);
    for (blocked, paths, app) in [
        // A lenient reading of the whole path looks like the route that is matched later.
        (
            "/users/root",
            &["/t1/users/root", "/users%2Fx%3F/users/root"][..],
            (&|layer| {
                fallback(BoxCloneSyncService::new(
                    inner("/users/{id}", layer).map_request(without_first_segment),
                ))
            }) as &dyn Fn(RateLimitLayer) -> Router,
        ),
        (
            "/{tenant}/admin",
            &["/en/x/admin", "/en/x%3F/admin", "/en/x%23/admin"],
            &|layer| {
                fallback(BoxCloneSyncService::new(
                    inner("/{a}/{b}", layer).map_request(without_prefix),
                ))
            },
        ),
        (
            "/acme/{file}",
            &["/en/acme/x", "/en/acme/x%2F..%2F..%2Fy", "/en/acme/x%5C..%5C..%5Cy"],
            &|layer| {
                fallback(BoxCloneSyncService::new(
                    inner("/{a}/{b}", layer).map_request(without_prefix),
                ))
            },
        ),
        // Other changes than the removal of a prefix, within a nested router and around it.
        ("/api/admin", &["/api/admin", "/api/admin;x"], &|layer| {
            Router::new().nest_service("/api", around(layer).map_request(without_parameters))
        }),
        (
            "/api/users/root",
            &["/api/users/root", "/api/users/root;x", "/api;x/users/root"],
            &|layer| {
                let nested = Router::new().nest("/api", inner("/users/{id}", layer));
                fallback(BoxCloneSyncService::new(nested.map_request(without_parameters)))
            },
        ),
        // Parameters of a nested router have their values.
        ("/acme/login", &["/acme/login", "/acme/en/login"], &|layer| {
            Router::new().nest_service("/{tenant}", around(layer).map_request(without_prefix))
        }),
        ("/acme/login", &["/acme/login", "/en/acme/login"], &|layer| {
            let nested = Router::new().nest("/{tenant}", inner("/login", layer));
            fallback(BoxCloneSyncService::new(nested.map_request(without_prefix)))
        }),
        ("/acme/login", &["/acme/login;x", "/acme;x/login"], &|layer| {
            Router::new().nest_service("/{tenant}", around(layer).map_request(without_parameters))
        }),
        // A whole path that is set again, and one for another server.
        ("/api/admin", &["/api/admin", "/api/Admin"], &|layer| {
            let normalized = around(layer).map_request(|request: Request<Body>| {
                let original = request
                    .extensions()
                    .get::<OriginalUri>()
                    .expect("that of a router")
                    .0
                    .path();
                let path = original.to_lowercase();
                with_path(request, &path)
            });
            Router::new().nest_service("/api", normalized)
        }),
        ("/v1/chat", &["/internal/ask"], &|layer| {
            let called = around(layer).map_request(|request| with_path(request, "/v1/chat"));
            Router::new().nest_service("/internal", called)
        }),
        // A prefix that a service adds.
        ("/api/login", &["/login"], &|layer| {
            let nested = Router::new().nest_service("/api", around(layer));
            fallback(BoxCloneSyncService::new(nested.map_request(
                |request: Request<Body>| {
                    let path = format!("/api{}", request.uri().path());
                    with_path(request, &path)
                },
            )))
        }),
        // References to other hosts.
        (
            "/admin",
            &["/admin", "//x/admin", "/;/x/admin", "//x/ADMIN/"],
            &|layer| {
                let service = Router::new().fallback(handler("any")).map_request(as_reference);
                let service = layer.layer(service.map_request(without_parameters));
                fallback(BoxCloneSyncService::new(
                    service.map_response(|response| response.map(Body::new)),
                ))
            },
        ),
    ] {
        let file = format!("block.routes = '{blocked}'\n[policies.all]\nlimit = '1000/h'\nkey = 'constant:all'");
        let policies = Policies::from_toml(&file).expect("policies");
        let app = app(policies.layer(MemoryStore::new(), ["all"]).expect("a policy"));
        for path in paths {
            assert_eq!(send(&app, get(path)).await.status, 403, "{blocked}: {path}");
        }
        assert_ne!(send(&app, get("/en/acme/other/x")).await.status, 403, "{blocked}");
    }
}

/// What is skipped is the whole path, and a path that a service sets is not known to be.
#[tokio::test]
async fn a_path_that_a_service_sets_in_a_nested_router_is_not_skipped_as_another_one() {
    let uri = |text: &str| Some(text.parse::<Uri>().expect("a URI"));
    for (skipped, set, paths) in [
        ("/health", None, &[("/api/health", false), ("/api/health;x", false)][..]),
        ("/api/health", None, &[("/api/health", true), ("/api/health;x", false)]),
        // The URI of a client within a handler, of this host and of another one.
        ("/api/{*rest}", uri("/v1/chat"), &[("/api/ask", false)]),
        ("/v1/chat", uri("/v1/chat"), &[("/api/ask", false)]),
        ("/v1/chat", uri("http://elsewhere/v1/chat"), &[("/api/ask", true)]),
    ] {
        let file = format!("skip.routes = '{skipped}'\n[policies.all]\nlimit = '1000/h'\nkey = 'constant:all'");
        let policies = Policies::from_toml(&file).expect("policies");
        let layer = policies.layer(MemoryStore::new(), ["all"]).expect("a policy");
        let limited = layer.layer(Router::new().fallback(handler("any")));
        let sets = move |request: Request<Body>| {
            let mut request = without_parameters(request);
            if let Some(set) = &set {
                *request.uri_mut() = set.clone();
            }
            request
        };
        let app = Router::new().nest_service("/api", limited.map_request(sets));
        for (path, is_skipped) in paths {
            let reply = send(&app, get(path)).await;
            assert_eq!(
                !reply.headers.contains_key("ratelimit"),
                *is_skipped,
                "{skipped}: {path}"
            );
        }
    }
}

#[tokio::test]
async fn what_a_service_leaves_of_a_path_that_axum_has_matched_is_not_compared() {
    let file = "[policies.login]\nroutes = '/login'\nlimit = '1000/h'\nkey = 'constant:all'";
    let policies = Policies::from_toml(file).expect(file);
    let limited = policies.layer(MemoryStore::new(), ["login"]).expect("a policy");
    let stripped = limited
        .layer(Router::new().fallback(handler("any")))
        .map_request(without_prefix);
    for (route, is_counted) in [("/en/{page}", false), ("/{*rest}", true)] {
        let app = Router::new().route_service(route, stripped.clone());
        let reply = send(&app, get("/en/login")).await;
        assert_eq!(reply.headers.contains_key("ratelimit"), is_counted, "{route}");
    }
}

/// The path that a service sets is the end of the path of the client too, so that a router may have left it.
#[tokio::test]
async fn a_path_that_a_service_sets_is_compared_though_the_path_of_the_client_ends_with_it() {
    for (lists, expected) in [
        ("block.routes = '/v1/chat'", StatusCode::FORBIDDEN),
        ("skip.routes = '/internal/{*rest}'", StatusCode::OK),
        ("skip.routes = ['/internal/{*rest}', '/v1/chat']", StatusCode::OK),
    ] {
        let file = format!("{lists}\n[policies.all]\nlimit = '1000/h'\nkey = 'constant:all'");
        let policies = Policies::from_toml(&file).expect(&file);
        let limited = policies.layer(MemoryStore::new(), ["all"]).expect("a policy");
        let limited = limited.layer(Router::new().fallback(handler("any")));
        let sets = limited.map_request(|mut request: Request<Body>| {
            *request.uri_mut() = "/v1/chat".parse().expect("a path");
            request
        });
        let app = Router::new().nest_service("/internal", sets);
        for path in ["/internal/ask", "/internal/ask/v1/chat", "/internal/a/b/v1/chat/"] {
            let reply = send(&app, get(path)).await;
            assert_eq!(reply.status, expected, "{lists}: {path}");
            let is_counted = expected == StatusCode::OK && !lists.contains("chat");
            assert_eq!(reply.headers.contains_key("ratelimit"), is_counted, "{lists}: {path}");
        }
    }
}
