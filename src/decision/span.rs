//! The outcome of a check in the fields of the current span of `tracing`.

use std::time::Duration;

use tracing::{Span, level_filters::LevelFilter};

use crate::observe::metrics::PolicyOutcome;

const OUTCOME: &str = "rate_limit.outcome";
const POLICY: &str = "rate_limit.policy";
const LIMIT: &str = "rate_limit.limit";
const REMAINING: &str = "rate_limit.remaining";
const RETRY_AFTER: &str = "rate_limit.retry_after";

/// What remains of a limit, and the wait of a denial.
pub(super) struct Remaining {
    pub(super) limit: u64,
    pub(super) remaining: u64,
    pub(super) retry_after: Option<Duration>,
}

/// Whether there may be spans: without a subscriber there are none.
#[inline]
pub(super) fn are_recorded() -> bool {
    LevelFilter::current() != LevelFilter::OFF
}

/// Records what has been done with a request, and by which policy. A span has only the fields that it declares.
#[inline]
pub(super) fn record(outcome: PolicyOutcome, policy: Option<&str>, remaining: Option<Remaining>) {
    if !are_recorded() {
        return;
    }
    let span = Span::current();
    if span.is_none() {
        return;
    }
    span.record(OUTCOME, outcome.name());
    // No value can be removed from a span that has one of an earlier check.
    span.record(POLICY, policy.unwrap_or_default());
    if let Some(remaining) = remaining {
        span.record(LIMIT, remaining.limit);
        span.record(REMAINING, remaining.remaining);
        if let Some(wait) = remaining.retry_after {
            span.record(RETRY_AFTER, wait.as_secs_f64());
        }
    }
}
