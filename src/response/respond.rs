//! The rules that hold for the responses of every format.

use std::{mem, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Response, StatusCode,
    header::{CACHE_CONTROL, CONTENT_LENGTH, RETRY_AFTER},
    request::Parts,
};

use super::{
    format::ResponseFormat,
    problem::Problem,
    rejection::{OwnRejection, Rejection},
};
use crate::{Decision, decision::SharedFormat, headers::retry_after};

/// The wait in a response to a request for which the store failed.
pub(crate) const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(1);

/// Builds the response to a request that is not admitted.
///
/// Every such response is built here, so its rules hold for every format and status. A layer adds `Connection` when it sends
/// the response, since that depends on the content of the request.
pub(crate) fn respond(format: &dyn ResponseFormat, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
    let mut response = format.respond(rejection, parts);
    let status = response.status();
    // RFC 9110 §9.3.2: no content in the response to HEAD; §8.6: a Content-Length is that of the response to GET.
    if parts.method == Method::HEAD {
        let length = mem::take(response.body_mut()).len();
        response.headers_mut().entry(CONTENT_LENGTH).or_insert(length.into());
    }

    let headers = response.headers_mut();
    // RFC 6585 §4: a 429 must not be stored. RFC 9111 §4.2.2: a 200 without this field may be, and gRPC sends its errors as
    // 200.
    headers
        .entry(CACHE_CONTROL)
        .or_insert(const { HeaderValue::from_static("no-store") });
    // In gRPC the wait is part of the status.
    if let Some(wait) = rejection.retry_after().filter(|_| !status.is_success()) {
        headers.entry(RETRY_AFTER).or_insert_with(|| retry_after(wait));
    }
    match rejection {
        Rejection::Limited(decision) => write_fields(decision, status, headers),
        Rejection::Failed { .. } => {
            response.extensions_mut().insert(OwnRejection { is_denial: false });
        }
        _ => {}
    }
    response
}

/// Adds the rate limit fields of a decision; those of nested layers as these add them, the inner one first.
pub(crate) fn write_fields(decision: &Decision, status: StatusCode, headers: &mut HeaderMap) {
    if let Some([outer, inner]) = decision.joined() {
        write_fields(inner, status, headers);
        write_fields(outer, status, headers);
    } else if let Some(policy) = decision.as_slice().first() {
        policy.context.fields.write(decision, status, headers);
    }
}

impl SharedFormat {
    pub(crate) fn new(format: impl ResponseFormat) -> Self {
        let format: Box<dyn ResponseFormat> = Box::new(format);
        Self(Arc::new(format))
    }

    pub(crate) fn get(&self) -> &dyn ResponseFormat {
        // `new` alone makes one.
        self.0
            .downcast_ref::<Box<dyn ResponseFormat>>()
            .map_or(&Problem, |format| &**format)
    }
}
