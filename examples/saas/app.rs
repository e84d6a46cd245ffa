//! The routes of the application, and their limits.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Extension, Json, Router,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, Uri, header, request::Parts},
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tower_quota::{
    Admin, ConfigError, FixedWindow, Key, Limit, Limiter, Policies, Policy, RateLimitLayer, ReadBodyLayer, key,
    limit::{self, Calendar},
    store::{ErrorKind, Store},
};

use crate::webhooks::Webhooks;

/// What authentication inserts into the extensions of a request.
#[derive(Clone)]
struct User {
    id: u64,
    tenant: u64,
    plan: &'static str,
    zone: &'static str,
    is_staff: bool,
}

impl User {
    const fn new(id: u64, tenant: u64, plan: &'static str, zone: &'static str) -> Self {
        let is_staff = tenant == 0;
        Self {
            id,
            tenant,
            plan,
            zone,
            is_staff,
        }
    }
}

/// Name, password and session of each user: a table in place of a database.
const USERS: [(&str, &str, &str, User); 3] = [
    (
        "ada",
        "lovelace",
        "session=5f2d",
        User::new(1, 10, "free", "Europe/Berlin"),
    ),
    ("kei", "sakura", "session=91c7", User::new(2, 20, "pro", "Asia/Tokyo")),
    ("root", "change-me", "session=e03b", User::new(3, 0, "free", "UTC")),
];

/// The body of a login.
#[derive(Clone, Deserialize)]
struct Credentials {
    name: String,
    password: String,
}

#[derive(Clone)]
struct Services {
    /// The URL of each tenant: in place of a database, too.
    receivers: Arc<Mutex<HashMap<u64, Uri>>>,
    webhooks: Webhooks,
    /// The limit of the route `/orders` without HTTP, to override it.
    orders: Limiter,
}

pub(crate) fn app(store: impl Store + Clone, limits: impl AsRef<Path>) -> Result<Router, ConfigError> {
    let policies = Policies::watch(limits)?
        .with_extension("account", |login: &Credentials| login.name.clone())
        .with_extension("tenant", |user: &User| user.tenant)
        .with_extension("plan", |user: &User| user.plan);
    policies.reload_on_change(Duration::from_secs(1))?;

    let of_failures = |name| {
        let policy = policies.get(name)?;
        Ok(policy.refund_if(|completion| completion.is_success() || completion.is_server_error()))
    };
    let logins = RateLimitLayer::try_new(store.clone(), [of_failures("logins")?, of_failures("addresses")?])?;
    let orders = policies.layer(store.clone(), ["orders"])?;
    let mails = Policy::new("mails", limit::by(mails_per_day)).key(key::extension("user", |user: &User| user.id));
    let mails = RateLimitLayer::new(store.clone(), mails);
    let services = Services {
        receivers: Arc::default(),
        webhooks: Webhooks::new(store.clone(), policies.unkeyed("webhooks")?)?,
        orders: Limiter::try_new(store, policies.unkeyed_plans(["orders"])?)?,
    };

    let admin = Admin::new()
        .layer(&logins)
        .layer(&orders)
        .layer(&mails)
        .layer(&services.webhooks.limit)
        .live_policies(&policies)
        .show_keys(true)
        .router_behind_authentication();
    let overrides = get(list_overrides).post(override_orders).with_state(services.clone());
    let admin = admin.route("/overrides", overrides).layer(from_fn(require_staff));

    let credentials = ReadBodyLayer::json::<Credentials>(4 << 10, Duration::from_secs(10));
    let behind_login = Router::new()
        .route("/orders", post(order).layer(orders))
        .route("/mails", post(async || "sent\n").layer(mails))
        .route("/webhook", put(set_receiver))
        .nest("/admin", admin)
        .layer(from_fn(authenticate));
    Ok(Router::new()
        .route("/login", post(login).layer((credentials, logins)))
        .merge(behind_login)
        .with_state(services))
}

/// Mails of a user in each calendar day of its own time zone.
fn mails_per_day(parts: &Parts) -> Limit {
    let zone = parts.extensions.get::<User>().map_or("UTC", |user| user.zone);
    FixedWindow::calendar(2, Calendar::Day, zone).map_or(Limit::DenyAll, Limit::from)
}

async fn login(Json(login): Json<Credentials>) -> Result<impl IntoResponse, StatusCode> {
    let user = USERS
        .into_iter()
        .find(|(name, password, ..)| login.name == *name && login.password == *password);
    let (_, _, session, _) = user.ok_or(StatusCode::UNAUTHORIZED)?;
    // With TLS also `Secure`.
    let cookie = format!("{session}; HttpOnly; SameSite=Strict; Path=/");
    Ok(([(header::SET_COOKIE, cookie)], "welcome\n"))
}

async fn authenticate(mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let user = user_of(request.headers()).ok_or(StatusCode::UNAUTHORIZED)?;
    request.extensions_mut().insert(user);
    Ok(next.run(request).await)
}

fn user_of(headers: &HeaderMap) -> Option<User> {
    let cookie = headers.get(header::COOKIE)?;
    let user = USERS.into_iter().find(|(_, _, session, _)| cookie == session);
    user.map(|(.., user)| user)
}

async fn require_staff(Extension(user): Extension<User>, request: Request, next: Next) -> Result<Response, StatusCode> {
    match user.is_staff {
        true => Ok(next.run(request).await),
        false => Err(StatusCode::FORBIDDEN),
    }
}

/// Accepts an order, and tells the server of the tenant.
async fn order(State(services): State<Services>, Extension(user): Extension<User>, order: String) -> StatusCode {
    let receiver = services
        .receivers
        .lock()
        .expect("no thread panics with it")
        .get(&user.tenant)
        .cloned();
    if let Some(receiver) = receiver {
        tokio::spawn(services.webhooks.deliver(receiver, order));
    }
    StatusCode::CREATED
}

/// Sets the URL of a tenant. A real one must not lead into the network of the service.
async fn set_receiver(State(services): State<Services>, Extension(user): Extension<User>, url: String) -> StatusCode {
    match url.parse::<Uri>() {
        Ok(url) if url.scheme_str() == Some("http") => {
            services
                .receivers
                .lock()
                .expect("no thread panics with it")
                .insert(user.tenant, url);
            StatusCode::NO_CONTENT
        }
        _ => StatusCode::BAD_REQUEST,
    }
}

/// Another limit of orders for one tenant.
#[derive(Deserialize)]
struct NewOverride {
    tenant: u64,
    limit: Limit,
    hours: u64,
}

async fn override_orders(State(services): State<Services>, Json(new): Json<NewOverride>) -> Response {
    let lasts = Duration::from_secs(new.hours.saturating_mul(3_600));
    let tenant = Key::extension("tenant", new.tenant);
    match services.orders.override_limit("orders", tenant, new.limit, lasts).await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) if error.kind() == ErrorKind::Refused => {
            (StatusCode::BAD_REQUEST, error.to_string()).into_response()
        }
        Err(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

async fn list_overrides(State(services): State<Services>) -> Json<Value> {
    let overrides = services.orders.overrides();
    let shown = overrides.iter().map(|one| {
        json!({ "key": one.key().as_str(), "limit": one.limit().to_string(), "until": one.expires_at().as_secs() })
    });
    Json(shown.collect())
}
