use std::borrow::Cow;

use axum::{
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Serialize;

use super::json::json;
use crate::{ConfigError, store::StoreError};

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
