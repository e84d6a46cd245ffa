//! The page and the routes of the router.

use std::sync::{Arc, LazyLock};

use super::{
    Admin,
    audit::change,
    message::{AdminError, Input, json},
    report, selected,
    selected::Selected,
};
use axum::{
    Router,
    extract::{DefaultBodyLimit, State},
    http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    middleware,
    response::{Html, Response},
    routing::{get, post},
};

/// The most bytes of a body. A key has at most some thousands.
const MOST: usize = 16 << 10;

pub(super) fn router(shared: Admin) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/report", get(report))
        // In a body, so that no log of requests has the key.
        .route("/subject", get(subject).post(subject))
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
    json(&report::report(&shared, &input).await)
}

async fn subject(State(shared): State<Arc<Admin>>, input: Input) -> Result<Response, AdminError> {
    let selected = Selected::find(&shared, &input)?;
    Ok(json(&selected.peek(&shared).await?))
}

async fn search(State(shared): State<Arc<Admin>>, input: Input) -> Result<Response, AdminError> {
    Ok(json(&selected::search(&shared, &input).await?))
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
     script-src 'sha256-KCrBwbhUa175FDH0JxRKLra7uWhYf307kivsyqju4P0='; \
     style-src 'sha256-k0VNUIy1yMJmIDXYrZhJGcJn2byIuXiK5flNaqswe7s='; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

static PAGE: LazyLock<String> = LazyLock::new(|| {
    let page = include_str!("page.html");
    page.replace("{style}", STYLE).replace("{script}", SCRIPT)
});

/// The page, in one file: wherever the router is nested, it has no address of another file to find.
async fn page() -> Html<&'static str> {
    Html(PAGE.as_str())
}
