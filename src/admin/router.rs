//! The page and the routes of the router.

use std::sync::{Arc, LazyLock};

use super::{
    NamesOfUnused,
    audit::{Audited, FindActor, audit},
    message::{AdminError, NewOverride, OwnOrigin, Posted, ReportSize, SearchText, Selection, json},
    report, selected,
    selected::{Selected, Watched},
    subject,
    subject::SubjectNames,
};
use crate::decision::DenialWatch;
use axum::{
    Extension, Router,
    extract::{DefaultBodyLimit, Query, State, rejection::QueryRejection},
    http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    middleware,
    response::{Html, Response},
    routing::{get, post},
};

/// What the routes share.
pub(super) struct AdminState {
    pub(super) watched: Vec<Watched>,
    /// The names of unused policies of each file.
    pub(super) files: Vec<NamesOfUnused>,
    pub(super) instance: String,
    pub(super) names: SubjectNames,
    pub(super) actor: FindActor,
    /// Denials are counted for as long as there is a router.
    pub(super) _denials: Vec<DenialWatch>,
}

/// The most bytes of a body. A key has at most some thousands.
const MOST: usize = 16 << 10;

pub(super) fn router(shared: AdminState) -> Router {
    let shared = Arc::new(shared);
    let changes = Router::new()
        .route("/reset", post(reset))
        .route("/override", post(set_override))
        .route("/end-override", post(end_override))
        .route_layer(middleware::from_fn_with_state(shared.clone(), audit));
    Router::new()
        .route("/", get(page))
        .route("/report", get(report))
        .route("/subject", get(subject).post(subject_of_body))
        .route("/search", post(search))
        .merge(changes)
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
        .with_state(shared)
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

async fn report(
    _: OwnOrigin,
    State(shared): State<Arc<AdminState>>,
    query: Result<Query<ReportSize>, QueryRejection>,
) -> Result<Response, AdminError> {
    let Query(size) =
        query.map_err(|error| AdminError::bad_request(format!("{error}; one looks like `/report?subjects=50`")))?;
    Ok(json(&report::report(&shared, &size).await))
}

async fn subject(
    _: OwnOrigin,
    State(shared): State<Arc<AdminState>>,
    query: Result<Query<Selection>, QueryRejection>,
) -> Result<Response, AdminError> {
    let Query(selection) = query.map_err(|error| {
        AdminError::bad_request(format!(
            "{error}; one looks like `/subject?policy=api&key=ip%3D203.0.113.7`"
        ))
    })?;
    let selected = Selected::find(&shared, selection)?;
    Ok(json(&selected.peek(&shared).await?))
}

/// The same with the selection in the body, so that no log of requests has the key.
async fn subject_of_body(
    State(shared): State<Arc<AdminState>>,
    Posted(selection): Posted<Selection>,
) -> Result<Response, AdminError> {
    let selected = Selected::find(&shared, selection)?;
    Ok(json(&selected.peek(&shared).await?))
}

async fn search(
    State(shared): State<Arc<AdminState>>,
    Posted(text): Posted<SearchText>,
) -> Result<Response, AdminError> {
    Ok(json(&selected::search(&shared, &text).await?))
}

async fn reset(
    State(shared): State<Arc<AdminState>>,
    Extension(audited): Extension<Audited>,
    Posted(selection): Posted<Selection>,
) -> Result<Response, AdminError> {
    let selected = Selected::find(&shared, selection)?;
    audited.is_of(&shared, &selected);
    subject::reset(&selected).await?;
    Ok(json(&selected.peek(&shared).await?))
}

async fn set_override(
    State(shared): State<Arc<AdminState>>,
    Extension(audited): Extension<Audited>,
    Posted(new): Posted<NewOverride>,
) -> Result<Response, AdminError> {
    let setting = new.limit();
    if let Ok((limit, lasts)) = &setting {
        audited.sets(format!("{limit} for {} s", lasts.as_secs()));
    }
    let selected = Selected::find(&shared, new.selection)?;
    audited.is_of(&shared, &selected);
    let (limit, lasts) = setting?;
    subject::set_override(&selected, Some((limit, lasts))).await?;
    Ok(json(&selected.peek(&shared).await?))
}

async fn end_override(
    State(shared): State<Arc<AdminState>>,
    Extension(audited): Extension<Audited>,
    Posted(selection): Posted<Selection>,
) -> Result<Response, AdminError> {
    let selected = Selected::find(&shared, selection)?;
    audited.is_of(&shared, &selected);
    subject::set_override(&selected, None).await?;
    Ok(json(&selected.peek(&shared).await?))
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
