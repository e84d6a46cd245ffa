//! The routes of the application, and their limits.

use std::{collections::BTreeMap, time::Duration};

use axum::{
    Extension, Json, Router,
    extract::{DefaultBodyLimit, FromRequest, Request, State},
    http::{HeaderMap, StatusCode, header, request::Parts},
    middleware::{Next, from_fn},
    response::{IntoResponse, Response, Result},
    routing::post,
};
use http_body_util::{BodyExt, Limited};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde::Deserialize;
use tokio::time::timeout;
use tower_quota::{
    Admin, ConfigError, FixedWindow, Headers, Key, Limit, Limiter, Policies, Policy, RateLimitLayer, key,
    limit::Calendar,
    store::{ErrorKind, Store},
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
        let (id, tenant, plan, zone) = match headers.get(header::COOKIE)?.to_str().ok()? {
            "session=5f2d" => (1, 10, "free", "Europe/Berlin"),
            "session=91c7" => (2, 20, "pro", "Asia/Tokyo"),
            "session=e03b" => (3, 0, "staff", "UTC"),
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

#[derive(Clone)]
struct Services {
    webhooks: Webhooks,
    /// The limit of the route `/orders` without HTTP, to override it.
    orders: Limiter,
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
    let webhooks = RateLimitLayer::try_new(store.clone(), webhooks)?.headers(Headers::None);
    let services = Services {
        webhooks: Webhooks::new(&webhooks, Client::builder(TokioExecutor::new()).build_http(), receivers),
        orders: Limiter::try_new(store, policies.unkeyed_plans(["orders"])?)?,
    };

    let admin = Admin::new()
        .layer(&logins)
        .layer(&orders)
        .layer(&mails)
        .layer(&webhooks)
        .policies(&policies)
        .show_keys(true)
        .actor(|parts| Some(parts.extensions.get::<User>()?.id.to_string()))
        .router_behind_authentication();
    let overrides = post(set_override).with_state(services.clone());
    let admin = admin.route("/overrides", overrides).layer(from_fn(require_staff));

    let behind_login = Router::new()
        .route(
            "/orders",
            post(order).layer((orders, DefaultBodyLimit::max(LARGEST_ORDER))),
        )
        .route("/mails", post(async || "sent\n").layer(mails))
        .nest("/admin", admin.with_state(()))
        .layer(from_fn(authenticate));
    Ok(Router::new()
        .route("/login", post(login).layer((from_fn(read_credentials), logins)))
        .merge(behind_login)
        .with_state(services))
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
    let body = body.map_err(|_| StatusCode::PAYLOAD_TOO_LARGE)?.to_bytes();
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
async fn order(State(services): State<Services>, user: Extension<User>, order: String) -> StatusCode {
    let Ok(place) = services.webhooks.place(user.tenant) else {
        return StatusCode::SERVICE_UNAVAILABLE;
    };
    tokio::spawn(async move {
        services.webhooks.deliver(user.tenant, order).await;
        drop(place);
    });
    StatusCode::CREATED
}

/// In bytes. Each is in memory until it is delivered.
const LARGEST_ORDER: usize = 16 << 10;

/// Another limit of orders for one tenant.
#[derive(Deserialize)]
struct NewOverride {
    tenant: u64,
    limit: Limit,
    hours: u64,
}

/// Responds with all overrides: the limit of each key.
async fn set_override(all: State<Services>, new: Json<NewOverride>) -> Result<impl IntoResponse, (StatusCode, String)> {
    let (orders, tenant) = (&all.orders, Key::extension("tenant", new.tenant));
    let lasts = Duration::from_secs(new.hours.saturating_mul(3_600));
    let set = orders.override_limit("orders", tenant, new.limit.clone(), lasts).await;
    set.map_err(|error| match error.kind() {
        ErrorKind::Invalid | ErrorKind::Refused => (StatusCode::BAD_REQUEST, error.to_string()),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "try again".to_owned()),
    })?;
    let shown = orders.overrides().into_iter();
    let shown = shown.map(|one| (one.key.to_string(), one.limit.to_string()));
    Ok(Json(shown.collect::<BTreeMap<_, _>>()))
}
