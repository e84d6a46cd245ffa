//! A limit by plan. A user that changes plan has a new count. Failed logins cannot be counted: nothing is given back.

use std::{net::SocketAddr, thread, time::Duration};

use axum::{
    Router,
    http::{HeaderMap, StatusCode},
    middleware::{Next, from_fn},
    response::Response,
    routing::get,
};
// limits
use axum::{body::Body, extract::Request, routing::Route};
use tower::{Layer, Service, layer::layer_fn, service_fn};
use tower_governor::{GovernorError, GovernorLayer, governor::GovernorConfigBuilder, key_extractor::KeyExtractor};

#[derive(Clone)]
struct UserKey;

impl KeyExtractor for UserKey {
    type Key = String;

    fn extract<T>(&self, request: &http::Request<T>) -> Result<String, GovernorError> {
        let user = request.extensions().get::<User>();
        Ok(user.ok_or(GovernorError::UnableToExtractKey)?.id.clone())
    }
}
// rest

#[derive(Clone)]
struct User {
    id: String,
    pro: bool,
}

async fn authenticate(headers: HeaderMap, mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let token = headers.get("authorization").and_then(|token| token.to_str().ok());
    let token = token.and_then(|token| token.strip_prefix("Bearer ")?.split_once('-'));
    let (plan, id) = token.ok_or(StatusCode::UNAUTHORIZED)?;
    let user = User {
        id: id.to_owned(),
        pro: plan == "pro",
    };
    request.extensions_mut().insert(user);
    Ok(next.run(request).await)
}

#[tokio::main]
async fn main() {
    // limits
    let plan = |limit: u32| {
        let config = GovernorConfigBuilder::default()
            .period(Duration::from_secs(60) / limit)
            .burst_size(limit)
            .key_extractor(UserKey)
            .use_headers()
            .finish()
            .expect("a limit above 0");
        let limiter = config.limiter().clone();
        thread::spawn(move || {
            loop {
                thread::sleep(Duration::from_secs(60));
                limiter.retain_recent();
            }
        });
        GovernorLayer::<_, _, Body>::new(config)
    };
    let (free, pro) = (plan(100), plan(1_000));
    let api = layer_fn(move |inner: Route| {
        let (mut free, mut pro) = (free.layer(inner.clone()), pro.layer(inner));
        service_fn(move |request: Request| match request.extensions().get::<User>() {
            Some(user) if user.pro => pro.call(request),
            _ => free.call(request),
        })
    });
    // rest
    let search = get(async || "results\n");
    let app = Router::new().route("/search", search.layer((from_fn(authenticate), api))); // limits
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000")
        .await
        .expect("the port is free");
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await.expect("the server runs");
}
