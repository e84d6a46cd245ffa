//! An API with a limit by the plan of the user, and a login with a limit on failures by account and address.

use std::{env, error::Error, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, StatusCode, header::AUTHORIZATION},
    middleware::{Next, from_fn},
    response::Response,
    routing::{get, post},
};
use serde::Deserialize;
use tokio::net::TcpListener;
use tower_quota::{Key, Limiter, Policy, RateLimitLayer, RedisStore, SlidingLog, key, store::Store}; // limits

/// The user that authentication found.
#[derive(Clone)]
struct User {
    id: String,
    pro: bool,
}

/// A placeholder for real authentication.
async fn authenticate(headers: HeaderMap, mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let token = headers.get(AUTHORIZATION).and_then(|token| token.to_str().ok());
    let token = token.and_then(|token| token.strip_prefix("Bearer ")?.split_once('-'));
    let (plan, id) = token.ok_or(StatusCode::UNAUTHORIZED)?;
    let (id, pro) = (id.to_owned(), plan == "pro");
    request.extensions_mut().insert(User { id, pro });
    Ok(next.run(request).await)
}

#[derive(Deserialize)]
struct Form {
    account: String,
    password: String,
}

async fn login(
    State(logins): State<Arc<Limiter>>,         // limits
    ConnectInfo(peer): ConnectInfo<SocketAddr>, // limits
    Json(form): Json<Form>,
) -> axum::response::Result<StatusCode> {
    // limits
    let decision = logins.check(Key::from(form.account).and(Key::ip(peer.ip()))).await?;
    decision.require()?;
    // rest
    if form.password != "correct" {
        return Ok(StatusCode::UNAUTHORIZED);
    }
    // limits
    decision.take_receipt().refund().await?;
    // rest
    Ok(StatusCode::OK)
}

pub(crate) fn app(store: impl Store + Clone) -> Router {
    // limits
    let api = Policy::with_limit_fn("api", |parts| match parts.extensions.get::<User>() {
        Some(user) if user.pro => SlidingLog::per_minute(1_000),
        _ => SlidingLog::per_minute(100),
    });
    let api = api.key(key::extension("user", |user: &User| user.id.clone()));
    let api = RateLimitLayer::new(store.clone(), api);
    let logins = Policy::new("logins", SlidingLog::new(5, Duration::from_secs(15 * 60)));
    let logins = Arc::new(Limiter::new(store, logins));
    // rest
    let search = get(async || "results\n");
    Router::new()
        .route("/search", search.layer((from_fn(authenticate), api))) // limits
        .route("/login", post(login))
        .with_state(logins) // limits
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = RedisStore::connect(&env::var("REDIS_URL")?).await?; // limits
    let service = app(store).into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(TcpListener::bind("127.0.0.1:3000").await?, service).await?;
    Ok(())
}
