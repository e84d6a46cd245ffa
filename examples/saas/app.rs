//! The routes of the application, and their limits.

use std::time::Duration;

use axum::{
    Extension, Json, Router,
    extract::{DefaultBodyLimit, FromRequest, Request, State},
    http::{HeaderMap, StatusCode, header, request::Parts},
    middleware::{Next, from_fn},
    response::{IntoResponse, Response, Result},
    routing::post,
};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde::Deserialize;
use tokio::time::timeout;
use tower_quota::{
    Admin, ConfigError, FixedWindow, Headers, Limit, Policies, Policy, RateLimitLayer, key, limit::Calendar,
    store::Store,
};

use crate::webhooks::{self, Receivers, Webhooks};

/// What authentication inserts into the extensions of a request.
#[derive(Clone)]
struct User {
    id: u64,
    tenant: u64,
    plan: &'static str,
    zone: &'static str,
}

impl User {
    /// A table in place of a database.
    fn of(headers: &HeaderMap) -> Option<Self> {
        let fields = headers.get_all(header::COOKIE).iter();
        let mut cookies = fields
            .filter_map(|field| field.to_str().ok())
            .flat_map(|field| field.split("; "));
        let (id, tenant, plan, zone) = match cookies.find_map(|cookie| cookie.strip_prefix("session="))? {
            "5f2d" => (1, 10, "free", "Europe/Berlin"),
            "91c7" => (2, 20, "pro", "Asia/Tokyo"),
            "e03b" => (3, 0, "staff", "UTC"),
            _ => return None,
        };
        Some(Self { id, tenant, plan, zone })
    }
}

/// The body of a login.
#[derive(Clone, Deserialize)]
struct Credentials {
    name: String,
    password: String,
}

pub(crate) fn app(store: impl Store + Clone, file: &str, receivers: Receivers) -> Result<Router, ConfigError> {
    let policies = Policies::from_file(file)?
        .with_extension("account", |login: &Credentials| login.name.clone())
        .with_extension("tenant", |user: &User| user.tenant)
        .with_extension("plan", |user: &User| user.plan);
    policies.reload_on_change(Duration::from_secs(1))?;

    let logins = [policies.get("logins")?, policies.get("addresses")?].map(|policy| {
        policy.refund_if(|completion| completion.is_success() || completion.is_server_error()) // so failed ones count
    });
    let logins = RateLimitLayer::try_new(store.clone(), logins)?;
    let orders = policies.layer(store.clone(), ["orders"])?;
    let mails = Policy::with_limit_fn("mails", mails_per_day).key(key::extension("user", |user: &User| user.id));
    let mails = RateLimitLayer::new(store.clone(), mails);
    let webhooks = webhooks::policy(policies.unkeyed("webhooks")?);
    let webhooks = RateLimitLayer::try_new(store, webhooks)?.headers(Headers::None);
    let calls = Webhooks::new(&webhooks, Client::builder(TokioExecutor::new()).build_http(), receivers);

    let admin = Admin::new()
        .layer(&logins)
        .layer(&orders)
        .layer(&mails)
        .layer(&webhooks)
        .policies(&policies)
        .show_keys(true)
        .actor(|parts| Some(parts.extensions.get::<User>()?.id.to_string()))
        .router_behind_authentication()
        .layer(from_fn(require_staff));

    let behind_login = Router::new()
        .route(
            "/orders",
            post(order).route_layer((orders, DefaultBodyLimit::max(LARGEST_ORDER))),
        )
        .route("/mails", post(async || "sent\n").route_layer(mails))
        .nest("/admin", admin.with_state(()))
        .layer(from_fn(authenticate));
    Ok(Router::new()
        .route("/login", post(login).route_layer((from_fn(read_credentials), logins)))
        .merge(behind_login)
        .with_state(calls))
}

/// Mails of a user in each calendar day of its own time zone.
fn mails_per_day(parts: &Parts) -> Limit {
    let zone = parts.extensions.get::<User>().map_or("UTC", |user| user.zone);
    FixedWindow::calendar(2, Calendar::Day, zone).map_or(Limit::DenyAll, Limit::from)
}

/// Reads the body, within bounds, so that the limits know the account.
async fn read_credentials(request: Request, next: Next) -> Result<Response> {
    let (mut parts, body) = request.into_parts();
    let body = timeout(Duration::from_secs(10), Limited::new(body, 4 << 10).collect()).await;
    let body = body.map_err(|_| StatusCode::REQUEST_TIMEOUT)?;
    let body = body.map_err(|error| match error.is::<LengthLimitError>() {
        true => StatusCode::PAYLOAD_TOO_LARGE,
        false => StatusCode::BAD_REQUEST,
    });
    let body = body?.to_bytes();
    // The extractor refuses other types of content, as which a form of another site could send a login.
    let request = Request::from_parts(parts.clone(), body.clone().into());
    let Json(credentials) = Json::<Credentials>::from_request(request, &()).await?;
    parts.extensions.insert(credentials);
    Ok(next.run(Request::from_parts(parts, body.into())).await)
}

async fn login(Extension(login): Extension<Credentials>) -> Result<impl IntoResponse, StatusCode> {
    let session = match (&*login.name, &*login.password) {
        ("ada", "lovelace") => "session=5f2d",
        ("kei", "sakura") => "session=91c7",
        ("root", "change-me") => "session=e03b",
        _ => return Err(StatusCode::UNAUTHORIZED),
    };
    // With TLS also `Secure`.
    let cookie = format!("{session}; HttpOnly; SameSite=Strict; Path=/");
    Ok(([(header::SET_COOKIE, cookie)], "welcome\n"))
}

async fn authenticate(mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let user = User::of(request.headers()).ok_or(StatusCode::UNAUTHORIZED)?;
    request.extensions_mut().insert(user);
    Ok(next.run(request).await)
}

async fn require_staff(user: Extension<User>, request: Request, next: Next) -> Result<Response, StatusCode> {
    match user.plan {
        "staff" => Ok(next.run(request).await),
        _ => Err(StatusCode::FORBIDDEN),
    }
}

/// Accepts an order, which the server of the tenant receives as an event, unless too many wait for that server.
async fn order(State(webhooks): State<Webhooks>, user: Extension<User>, order: String) -> StatusCode {
    let Ok(place) = webhooks.place(user.tenant) else {
        return StatusCode::SERVICE_UNAVAILABLE;
    };
    tokio::spawn(async move {
        webhooks.deliver(user.tenant, order).await;
        drop(place);
    });
    StatusCode::CREATED
}

/// In bytes. Each is in memory until it is delivered.
const LARGEST_ORDER: usize = 16 << 10;
