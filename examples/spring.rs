//! The port of a Spring application with `@RateLimit` and `@CurrentLimiting`.
//!
//! The limits are in `examples/spring/limits.toml`, or in the file that `LIMITS` names, and one layer on the whole router
//! applies them. `examples/spring/README.md` has the line here for each annotation, and the responses. Requests are counted in
//! Redis if `REDIS_URL` is set, as in `REDIS_URL=redis://127.0.0.1:6379`, and otherwise in memory.
//!
//! ```console
//! $ cargo run --example spring --features axum
//!
//! $ curl -i http://127.0.0.1:3000/hello/sayHi
//! ```

use std::{env, error::Error, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Bytes,
    extract::Request,
    http::{
        Response, StatusCode,
        header::{AUTHORIZATION, WWW_AUTHENTICATE},
        request::Parts,
    },
    middleware::{Next, from_fn},
    response::IntoResponse,
    routing::{get, post},
};
use tokio::{
    net::TcpListener,
    signal::{
        ctrl_c,
        unix::{SignalKind, signal},
    },
    sync::oneshot,
    time::sleep,
};
use tower_quota::{
    ConfigError, Decision, KeyExtractor, MemoryStore, Policies, Policy, RateLimitLayer, RedisStore, SlidingLog, key,
    response::{Problem, Rejection, ResponseFormat},
    store::{Store, StoreError},
};

/// The user that authentication has found.
#[derive(Clone)]
struct UserId(u64);

/// The security filter. Requests without a token are anonymous, and are counted by address.
async fn authenticate(mut request: Request, next: Next) -> axum::response::Response {
    let Some(credentials) = request.headers().get(AUTHORIZATION) else {
        return next.run(request).await;
    };
    let credentials = credentials.to_str().unwrap_or_default().split_once(' ');
    let user = match credentials.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")) {
        Some((_, "alice")) => UserId(1),
        Some((_, "bob")) => UserId(2),
        _ => return (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, "Bearer")]).into_response(),
    };
    request.extensions_mut().insert(user);
    next.run(request).await
}

/// The degrade callback of the policy `search`, and the error callback of those that are closed while Redis is down.
fn callbacks(rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
    match rejection {
        Rejection::Limited(decision) if denies(decision, "search") => Response::new("results of yesterday\n".into()),
        Rejection::Failed { .. } => {
            let mut response = Response::new("payments are closed for a moment\n".into());
            *response.status_mut() = rejection.status();
            response
        }
        other => Problem.respond(other, parts),
    }
}

fn denies(decision: &Decision, name: &str) -> bool {
    decision
        .policies()
        .any(|policy| policy.name() == name && policy.denies())
}

/// The error callback that observes: it runs also where requests are admitted while Redis is down.
fn log(error: &StoreError) {
    tracing::error!(kind = ?error.kind(), %error, "Redis does not count");
}

/// Sends less before the limit denies.
async fn search(decision: Option<Decision>) -> &'static str {
    match decision.is_some_and(|decision| decision.remaining() <= decision.limit() / 10) {
        false => "all results\n",
        true => "the first results\n",
    }
}

/// `limit:<user>:<uri>`. The route is the URI without its variables, which a caller can make up.
fn user_and_route() -> impl KeyExtractor {
    (
        key::extension("user", |user: &UserId| user.0).or(key::ip()),
        key::route(),
    )
}

pub(crate) fn app(store: Arc<dyn Store>, file: &str) -> Result<Router, ConfigError> {
    let policies = Policies::from_file(file)?.with_extension("user", |user: &UserId| user.0);

    // The aspect: all policies of the file with `routes`.
    let limits = policies
        .layer(store.clone(), ["say-hi", "calendar-hour", "any-hour", "search", "pay"])?
        .format(callbacks)
        .on_failure(log);

    // An annotation on one method: with its numbers, and with the name of a policy.
    let bye = Policy::new("say-bye", SlidingLog::new(2, Duration::from_secs(30))).key(user_and_route());
    let say_bye = get(async || "bye\n").layer(RateLimitLayer::new(store.clone(), bye).on_failure(log));
    let news = get(async || "the news\n").layer(policies.layer(store, ["news"])?.on_failure(log));
    policies.warn_of_unused();

    Ok(Router::new()
        .route("/hello/sayHi", get(async || "hi\n"))
        .route("/hello/sayGoodMorning", get(async || "good morning\n"))
        .route("/hello/sayBye", say_bye)
        .route("/news", news)
        .route("/reports/calendarHour", get(async || "a report\n"))
        .route("/reports/anyHour", get(async || "a report\n"))
        .route("/search", get(search))
        .route("/pay", post(async || "paid\n"))
        .layer(limits)
        .layer(from_fn(authenticate)))
}

/// The store of this URL of Redis, and without a URL one in this process.
pub(crate) async fn store(url: Option<String>) -> Result<Arc<dyn Store>, StoreError> {
    let Some(url) = url else {
        tracing::warn!("REDIS_URL is not set: requests are counted in this process alone");
        return Ok(Arc::new(MemoryStore::new()));
    };
    Ok(Arc::new(RedisStore::connect(&url).await?))
}

/// Serves until `end`, and then the requests in flight for up to 20 s. Else one that is never complete would keep the process.
pub(crate) async fn serve(
    listener: TcpListener,
    app: Router,
    end: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    // Provides the address of the peer to the key `ip`.
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    let (ending, ended) = oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async {
        end.await;
        drop(ending);
    });
    tokio::select! {
        served = server => served,
        () = async { drop(ended.await); sleep(Duration::from_secs(20)).await } => Ok(()),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().init();
    let file = env::var("LIMITS").unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/limits.toml").into());
    let store = store(env::var("REDIS_URL").ok()).await?;
    let app = app(store.clone(), &file)?;
    let mut terminated = signal(SignalKind::terminate())?;

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    tracing::info!("listening on http://{}", listener.local_addr()?);
    let end = async move {
        tokio::select! {
            _ = terminated.recv() => {}
            _ = ctrl_c() => {}
        }
    };
    serve(listener, app, end).await?;
    store.drained(Duration::from_secs(5)).await?; // what the last requests send to Redis
    Ok(())
}
