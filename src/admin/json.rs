use std::time::{Duration, SystemTime};

use axum::{
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use serde::Serialize;

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
