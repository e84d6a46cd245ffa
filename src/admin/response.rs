//! What all responses have in common.

use std::{
    borrow::Cow,
    fmt,
    time::{Duration, SystemTime},
};

use axum::{
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use serde::Serialize;

use crate::{ConfigError, store::StoreError};

/// An error as the response to a request: a status, and a message that contains the fix.
#[derive(Debug)]
pub(super) struct AdminError {
    status: StatusCode,
    message: Cow<'static, str>,
}

/// The message of an error, in the extensions of its response.
#[derive(Clone)]
pub(super) struct ErrorText(pub(super) Cow<'static, str>);

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
        let mut response = (self.status, json(&body)).into_response();
        response.extensions_mut().insert(ErrorText(self.message));
        response
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
pub(super) struct RefusedReload {
    since: u64,
    error: String,
}

impl RefusedReload {
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
