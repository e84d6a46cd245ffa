//! What a request to the router contains, whether the page of the router has made it, and what all responses have in common.

use std::{
    borrow::Cow,
    fmt,
    time::{Duration, SystemTime},
};

use axum::{
    body::Bytes,
    extract::{FromRequest, Query, Request},
    http::{HeaderMap, Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    ConfigError, Limit,
    limit::parse_length,
    store::{LONGEST_OVERRIDE, StoreError},
};

/// What a request contains, as its query or its body. Each route reads some of it.
#[derive(Deserialize)]
pub(super) struct Input {
    pub(super) policy: Option<String>,
    pub(super) key: Option<String>,
    /// The number of the store in the report.
    pub(super) store: Option<usize>,
    /// The most denied subjects of each policy in a report.
    pub(super) subjects: Option<usize>,
    /// What an operator looks for.
    text: Option<String>,
    /// That of an override.
    limit: Option<String>,
    /// A number of seconds, or text.
    lasts: Option<Value>,
    /// When it ends, in seconds since the Unix epoch.
    until: Option<Value>,
}

impl Input {
    pub(super) fn text(&self) -> Result<&str, AdminError> {
        self.text.as_deref().ok_or_else(|| missing("text", "203.0.113.7"))
    }

    /// The limit of an override, and its length.
    pub(super) fn new_limit(&self) -> Result<(Limit, Duration), AdminError> {
        let limit = self
            .limit
            .as_ref()
            .ok_or_else(|| missing("limit", "sliding-log 50/d"))?;
        Ok((limit.parse()?, self.length()?))
    }

    fn length(&self) -> Result<Duration, AdminError> {
        let seconds = |text: &str| text.parse().ok().map(Duration::from_secs);
        let text = |value: &Value| {
            let text = value.as_str().map(|text| text.trim().to_owned());
            text.unwrap_or_else(|| value.to_string())
        };
        let (length, fix) = match (self.lasts.as_ref().map(text), self.until.as_ref().map(text)) {
            (None, None) => return Err(missing("lasts", "3d")),
            (Some(lasts), None) => (
                seconds(&lasts).or_else(|| parse_length(&lasts)),
                "`lasts` is not a length of time above 0 and up to 31 years; use one such as `3d`, `12h`, or a number of seconds, or \
                 an end as `until`, in seconds since the Unix epoch",
            ),
            (None, Some(until)) => {
                let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
                (
                    seconds(&until).map(|until| until.saturating_sub(now)),
                    "`until` is not a time of the next 31 years as a number; use the seconds since the Unix epoch of a later time",
                )
            }
            (Some(_), Some(_)) => (None, "`lasts` and `until` exclude each other; use one of them"),
        };
        let length = length.filter(|length| !length.is_zero() && *length <= LONGEST_OVERRIDE);
        length.ok_or_else(|| AdminError::bad_request(fix))
    }
}

impl<S: Sync> FromRequest<S> for Input {
    type Rejection = AdminError;

    async fn from_request(request: Request, _: &S) -> Result<Self, AdminError> {
        let (method, headers, uri) = (request.method(), request.headers(), request.uri());
        if !is_of_own_origin(method, headers, uri) {
            return Err(AdminError::new(
                StatusCode::FORBIDDEN,
                "a page of another origin has made the request; use the page of this router",
            ));
        }
        if method.is_safe() {
            let example = match uri.path() {
                "/report" => "/report?subjects=50",
                _ => "/subject?policy=api&key=ip%3D203.0.113.7",
            };
            let query = Query::try_from_uri(uri).map(|Query(input)| input);
            return query.map_err(|error| AdminError::bad_request(format!("{error}; one looks like `{example}`")));
        }

        // A form of another site cannot send this type without a preflight request (Fetch, section 4.9), which is not
        // answered.
        let content_type = headers.get(header::CONTENT_TYPE);
        let media_type = content_type.and_then(|value| value.to_str().ok()?.split(';').next());
        if !media_type.is_some_and(|value| value.trim().eq_ignore_ascii_case("application/json")) {
            return Err(AdminError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "the body is JSON, with `content-type: application/json`",
            ));
        }
        let (name, example) = match uri.path() {
            "/search" => ("a search", r#"{"text":"203.0.113.7"}"#),
            "/override" => (
                "an override",
                r#"{"policy":"api","key":"ip=203.0.113.7","limit":"sliding-log 50/d","lasts":"3d"}"#,
            ),
            _ => ("a subject", r#"{"policy":"api","key":"ip=203.0.113.7"}"#),
        };
        let body = Bytes::from_request(request, &()).await;
        let body = body.map_err(|error| match error.status() {
            StatusCode::PAYLOAD_TOO_LARGE => AdminError::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "the body has more than 16 KiB; send a shorter one: a subject can be selected by its hash in the report",
            ),
            status => AdminError::new(status, error.body_text()),
        })?;
        serde_json::from_slice(&body).map_err(|error| {
            AdminError::bad_request(format!("the body is not {name}: {error}; one looks like {example}"))
                .logged_as(format!("the body is not {name}"))
        })
    }
}

pub(super) fn missing(name: &str, example: &str) -> AdminError {
    AdminError::bad_request(format!("the request has no `{name}`, such as `{example}`"))
}

/// Whether no page of another origin has made the request.
///
/// Browsers send `Sec-Fetch-Site` to HTTPS and to localhost (W3C Fetch Metadata, section 2.3), and otherwise at least `Origin`
/// with each `POST` (Fetch, section 3.1). A client that sends neither is not a browser, so it carries no credentials of
/// an operator without the operator's doing. Both names are forbidden to scripts (Fetch, section 2.2.2).
///
/// To an address that an operator enters, the browser sends `Sec-Fetch-Site: none`, which is a `GET`. A `GET` for an image of
/// another page has no `Origin`, but the page as `Referer`, unless it has suppressed that.
fn is_of_own_origin(method: &Method, headers: &HeaderMap, uri: &Uri) -> bool {
    if let Some(site) = headers.get("sec-fetch-site") {
        return match site.as_bytes() {
            b"same-origin" => true,
            b"none" => method.is_safe(),
            _ => false,
        };
    }
    let referer = headers.get(header::REFERER).filter(|_| method.is_safe());
    let Some(origin) = headers.get(header::ORIGIN).or(referer) else {
        return true;
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
    origin
        .zip(host)
        .is_some_and(|(origin, host)| origin.eq_ignore_ascii_case(host))
}

/// An error as the response to a request: a status, and a message that contains the fix.
#[derive(Debug)]
pub(super) struct AdminError {
    pub(super) status: StatusCode,
    message: Cow<'static, str>,
    /// The same without the input of the operator, which may be the key of a subject.
    logged: Option<Cow<'static, str>>,
}

impl AdminError {
    pub(super) fn new(status: StatusCode, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            status,
            message: message.into(),
            logged: None,
        }
    }

    /// Has another message in logs, which do not show the subject.
    pub(super) fn logged_as(self, logged: impl Into<Cow<'static, str>>) -> Self {
        Self {
            logged: Some(logged.into()),
            ..self
        }
    }

    pub(super) fn logged(&self) -> &str {
        self.logged.as_ref().unwrap_or(&self.message)
    }

    /// Another process may know the subject.
    pub(super) fn unknown_hash(instance: &str) -> Self {
        let known = "it knows those that it has denied lately, and those with slots, waiting requests or overrides";
        let message = format!("{instance} knows no subject of the policy by this hash: {known}");
        Self::new(StatusCode::NOT_FOUND, message)
    }

    pub(super) fn bad_request(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }
}

impl fmt::Display for AdminError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Of a key or a limit.
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
        let body = serde_json::json!({ "error": self.message });
        (self.status, json(&body)).into_response()
    }
}

/// A response in JSON.
pub(super) fn json(body: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

/// The seconds since the Unix epoch.
pub(super) fn unix_seconds(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or(Duration::ZERO).as_secs()
}
