//! The routes of the gateway, and their limits.

use std::{iter, mem, sync::Arc, time::Duration};

use axum::{
    Extension, Json, Router,
    body::Body,
    extract::{Request, State},
    http::{
        HeaderMap, HeaderValue, Response, StatusCode,
        header::{AUTHORIZATION, CONTENT_TYPE, WWW_AUTHENTICATE},
        request::Parts,
    },
    middleware::{Next, from_fn, from_fn_with_state},
    response::IntoResponse,
    routing::{get, post},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tokio_stream::StreamExt;
use tower_quota::{
    Admin, Concurrency, Decision, Headers, Plans, Policy, RateLimitLayer, Receipt, SlidingLog, key,
    response::Rejection, store::Store,
};

/// The customer that an API key belongs to.
#[derive(Clone)]
struct Account {
    id: u64,
    plan: &'static str,
}

impl Account {
    /// A table in place of a database.
    fn of(headers: &HeaderMap) -> Option<Self> {
        let credentials = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ');
        let (_, api_key) = credentials.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))?;
        let (id, plan) = match api_key {
            "sk-free" => (1, "free"),
            "sk-pro" => (2, "pro"),
            _ => return None,
        };
        Some(Self { id, plan })
    }
}

/// A request for a completion, as far as the gateway reads it.
#[derive(Clone, Deserialize)]
struct Completion {
    max_tokens: u64,
}

/// What each plan has: requests, tokens, and streams at once, which others wait for.
fn plans() -> Plans {
    let plan = |requests, tokens, streams| {
        let account = || key::extension("account", |account: &Account| account.id);
        let requested = |parts: &Parts| {
            parts
                .extensions
                .get::<Completion>()
                .map_or(1, |body| body.max_tokens.max(1))
        };
        [
            Policy::new("requests", SlidingLog::per_minute(requests)).key(account()),
            Policy::new("tokens", SlidingLog::per_minute(tokens))
                .key(account())
                .cost_fn(requested),
            Policy::new("streams", Concurrency::new(streams))
                .key(account())
                .wait_up_to(Duration::from_secs(3)),
        ]
    };
    Plans::new("free", plan(3, 1_000, 1))
        .plan("pro", plan(100, 100_000, 2))
        .by(|parts| parts.extensions.get::<Account>().map(|account| account.plan))
}

/// The routes of customers, and those for an address that only operators reach.
pub(crate) struct Gateway {
    pub(crate) customers: Router,
    pub(crate) operators: Router,
}

/// A recorder with the buckets of histograms, without which the queries and the dashboard have no values.
pub(crate) fn prometheus() -> Result<PrometheusBuilder, BuildError> {
    let seconds = [
        0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
    ];
    let waits = [0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];
    let requests = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_duration_seconds".into()), &seconds)?
        .set_buckets_for_metric(Matcher::Full("tower_quota_wait_duration_seconds".into()), &waits)?
        .set_buckets_for_metric(Matcher::Suffix("_call_requests".into()), &requests)
}

/// Its streams are cut off when the sender of `stopped` is dropped.
pub(crate) fn gateway(store: impl Store, stopped: watch::Receiver<()>) -> Gateway {
    let limits = RateLimitLayer::new(store, plans())
        .headers(Headers::custom(fields))
        .format(error)
        .drain_body(LONGEST_BODY as u64, SLOWEST_BODY); // it is read, so the connection stays open
    let operators = Admin::new().layer(&limits).router_behind_authentication();
    let complete = post(async move |decision: Decision, body| complete(&decision, body, stopped.clone()));
    let complete = complete.route_layer((from_fn(read_body), limits.clone()));
    let customers = Router::new()
        .route("/v1/chat/completions", complete)
        .route(
            "/v1/usage",
            get(async move |account, head| show_usage(&limits, account, head).await),
        )
        .layer(from_fn(authenticate));
    Gateway { customers, operators }
}

/// The routes for the user `operator` with this password. An address of their own is no authentication: any page that is open in the
/// browser of an operator can send requests to it.
pub(crate) fn behind_password(routes: Router, password: &str) -> Router {
    let credentials = format!("Basic {}", STANDARD.encode(format!("operator:{password}")));
    let credentials: Arc<str> = credentials.into();
    routes.layer(from_fn_with_state(credentials, require_operator))
}

async fn require_operator(State(credentials): State<Arc<str>>, request: Request, next: Next) -> Response<Body> {
    let given = request.headers().get(AUTHORIZATION);
    if given.is_some_and(|given| *given == *credentials) {
        return next.run(request).await;
    }
    let challenge = [(WWW_AUTHENTICATE, r#"Basic realm="operators""#)];
    (StatusCode::UNAUTHORIZED, challenge).into_response()
}

async fn authenticate(mut request: Request, next: Next) -> Response<Body> {
    let Some(account) = Account::of(request.headers()) else {
        return (
            StatusCode::UNAUTHORIZED,
            [(WWW_AUTHENTICATE, "Bearer")],
            Json(shape("invalid_api_key", "The API key is not valid.")),
        )
            .into_response();
    };
    request.extensions_mut().insert(account);
    next.run(request).await
}

const LONGEST_BODY: usize = 64 << 10;
const SLOWEST_BODY: Duration = Duration::from_secs(10);

/// Reads the body, within bounds, so that the limits know how many tokens are requested.
async fn read_body(request: Request, next: Next) -> Response<Body> {
    let invalid = |status, message: &str| (status, Json(shape("invalid_request_error", message))).into_response();
    let (mut parts, body) = request.into_parts();
    let body = match timeout(SLOWEST_BODY, Limited::new(body, LONGEST_BODY).collect()).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            return invalid(StatusCode::PAYLOAD_TOO_LARGE, &error.to_string());
        }
        Ok(Err(error)) => return invalid(StatusCode::BAD_REQUEST, &error.to_string()),
        Err(late) => return invalid(StatusCode::REQUEST_TIMEOUT, &late.to_string()),
    };
    match Json::<Completion>::from_bytes(&body) {
        Ok(Json(completion)) => parts.extensions.insert(completion),
        Err(rejection) => return invalid(rejection.status(), &rejection.body_text()),
    };
    next.run(Request::from_parts(parts, body.into())).await
}

const TOKEN: &str = "data: {\"token\":\"tick\"}\n\n";
const END: &str = "data: [DONE]\n\n";

/// Streams tokens, as a language model would, and settles their number when the stream ends, its client leaves or the gateway stops.
fn complete(
    decision: &Decision,
    Extension(completion): Extension<Completion>,
    stopped: watch::Receiver<()>,
) -> Response<Body> {
    let mut used = Used {
        tokens: 0,
        receipt: decision.take_receipt_of("tokens"),
    };
    // Its request has waited for a stream.
    if stopped.has_changed().is_err() {
        let stops = shape("server_error", "The gateway stops. Try again.");
        return (StatusCode::SERVICE_UNAVAILABLE, Json(stops)).into_response();
    }
    // The model stops early.
    let length = usize::try_from(completion.max_tokens / 2).unwrap_or(usize::MAX);
    let events = iter::repeat_n(TOKEN, length).chain([END]);
    let model = tokio_stream::iter(events).then(move |event| {
        let mut stopped = stopped.clone();
        async move {
            tokio::select! {
                () = sleep(Duration::from_millis(20)) => Ok(event),
                // Closes the connection, so that a client does not take the part for the whole.
                _ = stopped.changed() => Err("the gateway stops"),
            }
        }
    });
    let stream = Body::from_stream(model.map(move |event| {
        if event == Ok(TOKEN) {
            used.count();
        }
        event
    }));
    ([(CONTENT_TYPE, "text/event-stream")], stream).into_response()
}

/// The tokens that were streamed.
struct Used {
    tokens: u64,
    receipt: Receipt,
}

impl Used {
    fn count(&mut self) {
        self.tokens += 1;
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        tokio::spawn(mem::take(&mut self.receipt).settle(self.tokens));
    }
}

/// What is left for the account.
async fn show_usage(limits: &RateLimitLayer, Extension(account): Extension<Account>, head: Parts) -> Response<Body> {
    match limits.peek(&head).await {
        Ok(decision) => {
            let left = decision.policies().map(|policy| {
                let left = json!({ "limit": policy.limit(), "remaining": policy.remaining() });
                (policy.name().to_owned(), left)
            });
            Json(json!({ "plan": account.plan, "left": left.collect::<serde_json::Map<_, _>>() })).into_response()
        }
        Err(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// The fields that clients of OpenAI read.
fn fields(decision: &Decision, headers: &mut HeaderMap) {
    for policy in decision.policies() {
        let names = match policy.name() {
            "requests" => [
                "x-ratelimit-limit-requests",
                "x-ratelimit-remaining-requests",
                "x-ratelimit-reset-requests",
            ],
            "tokens" => [
                "x-ratelimit-limit-tokens",
                "x-ratelimit-remaining-tokens",
                "x-ratelimit-reset-tokens",
            ],
            _ => continue,
        };
        let reset = format!("{}ms", policy.reset_after().as_micros().div_ceil(1_000));
        let reset = HeaderValue::try_from(reset).expect("digits and letters");
        for (name, value) in names
            .into_iter()
            .zip([policy.limit().into(), policy.remaining().into(), reset])
        {
            headers.insert(name, value);
        }
    }
}

/// The error shape that clients of OpenAI read.
fn error(rejection: Rejection<'_>, _: &Parts) -> Response<Bytes> {
    let (code, message) = match rejection {
        Rejection::Limited(decision) => {
            let denied = decision.policies().filter(|policy| policy.denies());
            let names = denied.map(|policy| policy.name()).collect::<Vec<_>>().join(", ");
            let advice = match decision.retry_after() {
                Some(_) => "try again after the time in `retry-after`",
                None => "the request needs more than the limit",
            };
            ("rate_limit_exceeded", format!("Limit of {names}: {advice}."))
        }
        _ => (
            "server_error",
            "The request could not be checked. Try again.".to_owned(),
        ),
    };
    let mut response = Response::new(Bytes::from(shape(code, &message).to_string()));
    *response.status_mut() = rejection.status();
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

fn shape(code: &str, message: &str) -> Value {
    json!({ "error": { "type": code, "code": code, "message": message, "param": null } })
}
