//! The field `RateLimit-Degree`: an integer of RFC 9651 §3.3.1.

use http::HeaderMap;

use super::names::RATELIMIT_DEGREE;
use crate::Decision;

/// Writes the degree of a decision, unless an inner layer has written a larger one.
pub(super) fn write(decision: &Decision, headers: &mut HeaderMap) {
    if !decision.has_thresholds() {
        return;
    }
    let inner = headers.get(RATELIMIT_DEGREE).and_then(|degree| degree.to_str().ok());
    let inner = inner.and_then(|degree| degree.parse().ok());
    let degree = decision.degree().max(inner.unwrap_or(0));
    headers.insert(RATELIMIT_DEGREE, degree.into());
}
