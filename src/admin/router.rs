//! The routes of the router, and what all responses have in common.

use std::{
    borrow::Cow,
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Query, Request, State, rejection::QueryRejection},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header, header::CONTENT_TYPE, request::Parts},
    middleware,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::{Deserialize, Serialize};

use super::{
    NamesOfUnused, page, report,
    report::DeniedSubject,
    subject,
    subject::{Counts, SubjectNames},
    watched::{Watched, WatchedPolicy},
};
use crate::{
    ConfigError, Key,
    decision::DenialWatch,
    store::{StoreError, StoreId},
};

/// What the routes share.
pub(super) struct Shared {
    pub(super) watched: Vec<Watched>,
    /// The names of unused policies of each file.
    pub(super) files: Vec<NamesOfUnused>,
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
    let unused = shared.files.iter().flat_map(|unused| unused()).collect();
    json(&report::report(&shared.watched, unused, &shared.names).await)
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
        let verified = verify(method, headers, uri);
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

/// Refuses a request that a page of another origin has made.
///
/// Browsers send `Sec-Fetch-Site` to HTTPS and to localhost (W3C Fetch Metadata, section 2.3), and otherwise at least `Origin`
/// with each `POST` (Fetch, section 3.1). A client that sends neither is not a browser, so it carries no credentials of
/// an operator without the operator's doing. Both names are forbidden to scripts (Fetch, section 2.2.2).
///
/// To an address that an operator enters, the browser sends `Sec-Fetch-Site: none`, which is a `GET`. A `GET` for an image of
/// another page has no `Origin`, but the page as `Referer`, unless it has suppressed that.
pub(super) fn verify(method: &Method, headers: &HeaderMap, uri: &Uri) -> Result<(), CrossOrigin> {
    if let Some(site) = headers.get("sec-fetch-site") {
        return match site.as_bytes() {
            b"same-origin" => Ok(()),
            b"none" if method.is_safe() => Ok(()),
            _ => Err(CrossOrigin),
        };
    }
    let referer = headers.get(header::REFERER).filter(|_| method.is_safe());
    let Some(origin) = headers.get(header::ORIGIN).or(referer) else {
        return Ok(());
    };
    // RFC 6454 section 7: `null`, or a scheme with a host and its port; a `Referer` goes on with the path.
    let origin = origin.to_str().ok().and_then(|origin| {
        let (_, rest) = origin.split_once("://")?;
        rest.split('/').next()
    });
    let host = match headers.get(header::HOST) {
        Some(host) => host.to_str().ok(),
        None => uri.authority().map(|authority| authority.as_str()), // HTTP/2
    };
    match origin.zip(host) {
        Some((origin, host)) if origin.eq_ignore_ascii_case(host) => Ok(()),
        _ => Err(CrossOrigin),
    }
}

/// A page of another origin has made the request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CrossOrigin;

/// An error as the response to a request: a status, and a message that contains the fix.
#[derive(Debug)]
pub(super) struct AdminError {
    status: StatusCode,
    message: Cow<'static, str>,
}

#[derive(Serialize)]
struct Body<'a> {
    error: &'a str,
}

impl AdminError {
    pub(super) fn new(status: StatusCode, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    pub(super) fn bad_request(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }
}

/// Of a key.
impl From<ConfigError> for AdminError {
    fn from(error: ConfigError) -> Self {
        Self::bad_request(error.to_string())
    }
}

impl From<StoreError> for AdminError {
    fn from(error: StoreError) -> Self {
        let message = format!("the store of the counts fails: {error}");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        let body = Body { error: &self.message };
        (self.status, json(&body)).into_response()
    }
}

/// A response in JSON.
pub(super) fn json(body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(body) => ([(CONTENT_TYPE, "application/json")], body).into_response(),
        // The bodies have neither keys that are no text nor fallible parts.
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// What has failed, and when.
#[derive(Clone, Serialize)]
pub(super) struct Failure {
    since: u64,
    error: String,
}

impl Failure {
    #[cfg_attr(not(feature = "serde"), expect(dead_code, reason = "reloads fail"))]
    pub(super) fn new(since: SystemTime, error: &impl ToString) -> Self {
        Self {
            since: unix_seconds(since),
            error: error.to_string(),
        }
    }
}

/// The seconds since the Unix epoch.
pub(super) fn unix_seconds(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or(Duration::ZERO).as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verify_fields(fields: &[(&'static str, &'static str)], uri: &'static str) -> Result<(), CrossOrigin> {
        verify_as(&Method::POST, fields, uri)
    }

    fn verify_as(
        method: &Method,
        fields: &[(&'static str, &'static str)],
        uri: &'static str,
    ) -> Result<(), CrossOrigin> {
        let fields = fields.iter().map(|(name, value)| {
            let name: axum::http::HeaderName = name.parse().unwrap();
            (name, value.parse().unwrap())
        });
        verify(method, &fields.collect(), &Uri::from_static(uri))
    }

    #[test]
    fn a_get_is_made_by_the_page_by_hand_or_by_another_program() {
        let host = ("host", "a.example");
        for (fields, expected) in [
            (&[host][..], Ok(())),
            (&[host, ("sec-fetch-site", "same-origin")], Ok(())),
            (&[host, ("sec-fetch-site", "none")], Ok(())),
            (&[host, ("referer", "https://a.example/admin?x=//y")], Ok(())),
            (&[host, ("sec-fetch-site", "cross-site")], Err(CrossOrigin)),
            (&[host, ("sec-fetch-site", "same-site")], Err(CrossOrigin)),
            (&[host, ("origin", "http://evil.example")], Err(CrossOrigin)),
            (&[host, ("referer", "http://evil.example/a.example")], Err(CrossOrigin)),
            (&[host, ("referer", "http://evil.example")], Err(CrossOrigin)),
        ] {
            for method in [Method::GET, Method::HEAD] {
                assert_eq!(verify_as(&method, fields, "/subject"), expected, "{fields:?}");
            }
        }
    }

    #[test]
    fn requests_of_the_page_and_of_other_programs_pass() {
        for fields in [
            &[("host", "a.example")][..],
            &[("host", "a.example"), ("sec-fetch-site", "same-origin")],
            // A proxy has replaced `Host`.
            &[
                ("host", "10.0.0.1"),
                ("sec-fetch-site", "same-origin"),
                ("origin", "https://a.example"),
            ],
            &[("host", "a.example:3000"), ("origin", "http://a.example:3000")],
            &[("host", "a.example"), ("origin", "http://A.example")],
        ] {
            assert_eq!(verify_fields(fields, "/reset"), Ok(()), "{fields:?}");
        }
        assert_eq!(
            verify_fields(&[("origin", "https://a.example")], "https://a.example/reset"),
            Ok(())
        );
    }

    #[test]
    fn requests_of_other_sites_do_not() {
        for fields in [
            &[("host", "a.example"), ("sec-fetch-site", "cross-site")][..],
            &[
                ("host", "a.example"),
                ("sec-fetch-site", "same-site"),
                ("origin", "http://a.example"),
            ],
            &[("host", "a.example"), ("sec-fetch-site", "none")],
            &[("host", "a.example"), ("origin", "http://evil.example")],
            &[("host", "a.example"), ("origin", "http://a.example:81")],
            &[("host", "a.example"), ("origin", "null")],
            &[("host", "a.example"), ("origin", "a.example")],
            &[("origin", "http://a.example")],
        ] {
            assert_eq!(verify_fields(fields, "/reset"), Err(CrossOrigin), "{fields:?}");
        }
    }
}
