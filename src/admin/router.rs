//! The routes of the router, and what all responses have in common.

use std::sync::Arc;

use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Query, Request, State, rejection::QueryRejection},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header, request::Parts},
    middleware,
    response::Response,
    routing::{get, post},
};
use serde::{Deserialize, Serialize};

use super::{
    cross_origin,
    error::AdminError,
    json::json,
    page,
    report::{self, DeniedSubject},
    subject::{self, Counts},
    subjects::SubjectNames,
    watched::{Watched, WatchedPolicy},
};
use crate::{Key, denials::DenialWatch, store::StoreId};

/// What the routes share.
pub(super) struct Shared {
    pub(super) watched: Vec<Watched>,
    pub(super) names: SubjectNames,
    /// Denials are counted for as long as there is a router.
    pub(super) _denials: Vec<DenialWatch>,
}

/// The most bytes of a body. A key has at most some thousands.
const MOST: usize = 16 << 10;

pub(super) fn router(shared: Shared) -> Router {
    Router::new()
        .route("/", get(page::page))
        .route("/report", get(report))
        .route("/subject", get(subject).post(subject_of_body))
        .route("/reset", post(reset))
        .fallback(async |uri: Uri| {
            AdminError::new(
                StatusCode::NOT_FOUND,
                format!(
                    "there is no `{}`; the routes are `/`, `/report`, `/subject` and `/reset`",
                    uri.path()
                ),
            )
        })
        .method_not_allowed_fallback(async |method: Method| {
            AdminError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("`{method}` is not a method of this route; use `POST` for `/reset` and `GET` for the others"),
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
        (header::CONTENT_SECURITY_POLICY, page::CONTENT_POLICY),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn report(_: OwnOrigin, State(shared): State<Arc<Shared>>) -> Response {
    json(&report::report(&shared.watched, &shared.names).await)
}

/// A subject of a policy, as a query or a body.
#[derive(Deserialize)]
struct Selection {
    policy: Option<String>,
    key: Option<String>,
    /// The number of the store in the report.
    store: Option<usize>,
}

/// A request that another site has not made.
struct OwnOrigin;

impl OwnOrigin {
    fn of(method: &Method, headers: &HeaderMap, uri: &Uri) -> Result<Self, AdminError> {
        let verified = cross_origin::verify(method, headers, uri);
        verified.map(|()| Self).map_err(|_| {
            AdminError::new(
                StatusCode::FORBIDDEN,
                "a page of another origin has made the request; use the page of this router",
            )
        })
    }
}

impl<S: Sync> FromRequestParts<S> for OwnOrigin {
    type Rejection = AdminError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, AdminError> {
        Self::of(&parts.method, &parts.headers, &parts.uri)
    }
}

/// The selection in the body of a request that another site has not made.
struct Posted(Selection);

impl<S: Send + Sync> FromRequest<S> for Posted {
    type Rejection = AdminError;

    async fn from_request(request: Request, state: &S) -> Result<Self, AdminError> {
        OwnOrigin::of(request.method(), request.headers(), request.uri())?;
        // A form of another site cannot send this type without a preflight request (Fetch, section 4.9), which is not
        // answered.
        let content_type = request.headers().get(header::CONTENT_TYPE);
        let media_type = content_type.and_then(|value| value.to_str().ok()?.split(';').next());
        if !media_type.is_some_and(|value| value.trim().eq_ignore_ascii_case("application/json")) {
            return Err(AdminError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "the body is JSON, with `content-type: application/json`",
            ));
        }
        let body = Bytes::from_request(request, state).await;
        let body = body.map_err(|error| AdminError::new(error.status(), error.body_text()))?;
        let selection = serde_json::from_slice(&body).map_err(|error| {
            AdminError::bad_request(format!(
                r#"the body is not a subject: {error}; one looks like {{"policy":"api","key":"ip=203.0.113.7"}}"#
            ))
        })?;
        Ok(Self(selection))
    }
}

/// The response to `/subject` and `POST /reset`.
#[derive(Serialize)]
struct Subject {
    policy: String,
    store: usize,
    key: String,
    /// The name in the lists of the report.
    subject: String,
    /// None if it is not listed.
    denied: Option<DeniedSubject>,
    counts: Vec<Counts>,
}

async fn subject(
    _: OwnOrigin,
    State(shared): State<Arc<Shared>>,
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
async fn subject_of_body(State(shared): State<Arc<Shared>>, Posted(selection): Posted) -> Result<Response, AdminError> {
    let selected = Selected::find(&shared, selection)?;
    Ok(json(&selected.peek(&shared).await?))
}

async fn reset(State(shared): State<Arc<Shared>>, Posted(selection): Posted) -> Result<Response, AdminError> {
    let selected = Selected::find(&shared, selection)?;
    // Before the reset, which may take effect although its reply is lost or the operator leaves.
    #[cfg(feature = "tracing")]
    tracing::info!(
        policy = selected.policy.name,
        subject = shared.names.hash(&selected.key),
        "an operator resets the counts of a subject"
    );
    subject::reset(
        &shared.watched,
        &selected.policy.name,
        selected.store_id(),
        &selected.key,
    )
    .await?;
    Ok(json(&selected.peek(&shared).await?))
}

/// A key of a policy in a store.
struct Selected {
    policy: WatchedPolicy,
    store: usize,
    key: Key,
    policies: Vec<WatchedPolicy>,
}

impl Selected {
    fn find(shared: &Shared, selection: Selection) -> Result<Self, AdminError> {
        let missing =
            |name, example| AdminError::bad_request(format!("the request has no `{name}`, such as `{example}`"));
        let name = selection.policy.ok_or_else(|| missing("policy", "api"))?;
        let text = selection.key.ok_or_else(|| missing("key", "ip=203.0.113.7"))?;
        let mut key = Key::parse(text.trim())?;
        key.bound();

        let policies: Vec<_> = shared.watched.iter().flat_map(Watched::policies).collect();
        let numbered: Vec<_> = (1..).zip(report::stores(&policies)).collect();
        let has_policy = |store: Option<StoreId>| {
            let is_it = |policy: &&WatchedPolicy| policy.name == name && policy.store() == store;
            policies.iter().find(is_it)
        };
        let of_name = numbered
            .iter()
            .filter_map(|(number, store)| Some((*number, has_policy(*store)?)));
        let of_name: Vec<_> = of_name.collect();
        let found = match (&of_name[..], selection.store) {
            ([], _) => {
                let mut names: Vec<_> = policies.iter().map(|policy| policy.name.as_str()).collect();
                names.sort_unstable();
                names.dedup();
                return Err(AdminError::new(
                    StatusCode::NOT_FOUND,
                    format!("there is no policy of this name; those are `{}`", names.join("`, `")),
                ));
            }
            ([only], None) => Some(only),
            (several, Some(number)) => several.iter().find(|(other, _)| *other == number),
            (_, None) => None,
        };
        let Some((store, policy)) = found else {
            let numbers: Vec<_> = of_name.iter().map(|(number, _)| number.to_string()).collect();
            return Err(AdminError::bad_request(format!(
                "select the store of this policy by its number in the report, as in `store={}`",
                numbers.join("` or `store=")
            )));
        };
        let (store, policy) = (*store, (*policy).clone());
        Ok(Self {
            policy,
            store,
            key,
            policies,
        })
    }

    fn store_id(&self) -> Option<StoreId> {
        self.policy.store()
    }

    async fn peek(&self, shared: &Shared) -> Result<Subject, AdminError> {
        let counts = subject::peek(&shared.watched, &self.policy.name, self.store_id(), &self.key).await?;
        let denials = report::denials(&self.policies, &self.policy);
        Ok(Subject {
            policy: self.policy.name.clone(),
            store: self.store,
            key: self.key.to_string(),
            subject: shared.names.name(&self.key),
            denied: denials.and_then(|(_, summary)| report::denied_subject(&shared.names, &summary, &self.key)),
            counts,
        })
    }
}
