//! The page and the routes of the router, and a line of the log for each change that is requested, with its actor and outcome.

use std::sync::{Arc, LazyLock};

use axum::{
    Router,
    extract::{DefaultBodyLimit, FromRequest, Request, State},
    http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header, request::Parts},
    middleware,
    response::{Html, Response},
    routing::{get, post},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::Value;

use super::{
    Admin,
    message::{AdminError, Input, json},
    report, selected,
    selected::Selected,
    subject,
};

/// The most bytes of a body. A key has at most some thousands.
const MOST: usize = 16 << 10;

pub(super) fn router(shared: Admin) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/report", get(report))
        // In a body, so that no log of requests has the key.
        .route("/subject", get(show_subject).post(show_subject))
        .route("/search", post(search))
        .route("/reset", post(change))
        .route("/override", post(change))
        .route("/end-override", post(change))
        .fallback(async |uri: Uri| {
            AdminError::new(
                StatusCode::NOT_FOUND,
                format!(
                    "there is no `{}`; the routes are `/`, `/report`, `/subject`, `/search`, `/reset`, `/override` and \
                     `/end-override`",
                    uri.path()
                ),
            )
        })
        .method_not_allowed_fallback(async |method: Method| {
            AdminError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                format!(
                    "`{method}` is not a method of this route; use `POST` for `/reset`, `/override`, `/end-override` and \
                     `/search`, either for `/subject`, and `GET` for the others"
                ),
            )
        })
        .layer(DefaultBodyLimit::max(MOST))
        .layer(middleware::map_response(protect))
        .with_state(Arc::new(shared))
}

/// Adds the fields by which a browser keeps the content to the page and out of caches.
async fn protect(mut response: Response) -> Response {
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, CONTENT_POLICY),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn report(State(shared): State<Arc<Admin>>, input: Input) -> Response {
    shared.names.share_by(&shared).await;
    json(&report::report(&shared, &input).await)
}

async fn show_subject(State(shared): State<Arc<Admin>>, input: Input) -> Result<Response, AdminError> {
    shared.names.share_by(&shared).await;
    let selected = Selected::find(&shared, &input, false)?;
    Ok(json(&selected.peek(&shared).await?))
}

async fn search(State(shared): State<Arc<Admin>>, input: Input) -> Result<Response, AdminError> {
    shared.names.share_by(&shared).await;
    Ok(json(&selected::search(&shared, &input).await?))
}

/// The operator of a request, as the authentication of the application has found it.
pub(super) type FindActor = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

/// The user of Basic authentication (RFC 7617 section 2).
pub(super) fn basic_user(parts: &Parts) -> Option<String> {
    let value = parts.headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, credentials) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let credentials = String::from_utf8(BASE64_STANDARD.decode(credentials.trim()).ok()?).ok()?;
    let (user, _) = credentials.split_once(':')?;
    Some(user.to_owned())
}

/// The line of a change, which is logged when its response is made, or is not awaited anymore.
struct AuditLine {
    action: &'static str,
    actor: String,
    instance: String,
    policy: String,
    /// The hash of the key.
    subject: String,
    /// The limit of an override and its length.
    setting: Option<String>,
    outcome: &'static str,
    error: Option<String>,
}

/// The outcome of a change that the store has confirmed.
const DONE: &str = "done";

/// `POST /reset`, `/override` and `/end-override`.
async fn change(State(shared): State<Arc<Admin>>, request: Request) -> Result<Response, AdminError> {
    let (parts, body) = request.into_parts();
    let mut line = AuditLine {
        action: match parts.uri.path() {
            "/reset" => "an operator resets the counts of a subject",
            "/override" => "an operator overrides the limit of a subject",
            _ => "an operator ends the override of a subject",
        },
        actor: (shared.actor)(&parts).unwrap_or_else(|| "not known".to_owned()),
        instance: shared.instance.clone(),
        policy: String::new(),
        subject: String::new(),
        setting: None,
        // The client has closed its connection before the response.
        outcome: "unknown",
        error: None,
    };
    let changed = perform(&shared, Request::from_parts(parts, body), &mut line).await;
    if let Err(error) = &changed
        && line.outcome != DONE
    {
        line.error = Some(error.logged().to_owned());
        line.outcome = match error.status {
            // The change may have taken effect.
            StatusCode::SERVICE_UNAVAILABLE => "failed",
            // Nothing has changed.
            _ => "refused",
        };
    }
    changed.map(|subject| json(&subject))
}

async fn perform(shared: &Admin, request: Request, line: &mut AuditLine) -> Result<Value, AdminError> {
    let path = request.uri().path().to_owned();
    let input = Input::from_request(request, &()).await?;
    let new_limit = (path == "/override").then(|| input.new_limit());
    if let Some(Ok((limit, lasts))) = &new_limit {
        line.setting = Some(format!("{limit} for {} s", lasts.as_secs()));
    }
    line.policy = input.policy.clone().unwrap_or_default();
    shared.names.share_by(shared).await;
    // What ends may be an override of a key of another form, as by `Limiter::end_override`.
    let selected = Selected::find(shared, &input, path == "/end-override")?;
    line.subject = shared.names.hash(&selected.key);
    match path.as_str() {
        "/reset" => {
            let is_reset = subject::reset(&selected).await?;
            if is_reset {
                line.outcome = DONE;
            }
            subject::require_counts(&selected, is_reset)?;
        }
        _ => subject::set_override(&selected, new_limit.transpose()?, &line.actor).await?,
    }
    // Also if its counts cannot be read now, or the client leaves meanwhile.
    line.outcome = DONE;
    selected.peek(shared).await.map_err(|error| {
        let message = format!("the change is done, but its counts cannot be read: {error}");
        AdminError::new(error.status, message)
    })
}

impl Drop for AuditLine {
    fn drop(&mut self) {
        let (action, outcome, error) = (self.action, self.outcome, self.error.as_deref());
        let (actor, instance) = (&*self.actor, &*self.instance);
        let (policy, subject, setting) = (&*self.policy, &*self.subject, self.setting.as_deref());
        // The level of an event is a constant.
        if outcome == DONE {
            tracing::info!(target: "tower_quota::audit", actor, outcome, policy, subject, setting, instance, "{action}");
        } else {
            tracing::warn!(target: "tower_quota::audit", actor, outcome, error, policy, subject, setting, instance, "{action}");
        }
    }
}

/// Functions of one file may call those of the others.
const SCRIPT: &str = concat!(
    include_str!("page_search.js"),
    include_str!("page_chart.js"),
    include_str!("page.js")
);
const STYLE: &str = include_str!("page.css");

/// A browser runs this script and this style only, by their SHA-256, and sends requests to this server only. A test has the
/// hashes of the files.
const CONTENT_POLICY: &str = "default-src 'none'; \
     script-src 'sha256-+oTLMcxKVtE3fs9xOd8Co6cJwljFvamX+hTk2tV+pEQ='; \
     style-src 'sha256-4YBbFefwxl7e5zE87VfNQ3zrTqw7Dlh4Y52hNWgTFok='; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

static PAGE: LazyLock<String> = LazyLock::new(|| {
    let page = include_str!("page.html");
    page.replace("{style}", STYLE).replace("{script}", SCRIPT)
});

/// The page, in one file: wherever the router is nested, it has no address of another file to find.
async fn page() -> Html<&'static str> {
    Html(PAGE.as_str())
}
