//! `X-RateLimit-*`: three single values for one policy, the one that matters most.

use http::{HeaderMap, HeaderName};

use super::{
    dialect::{ResetFormat, X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET},
    values::{Text, ceil_secs, count, keep_one_line, standing},
};
use crate::PolicyDecision;

pub(super) fn write(policy: &PolicyDecision, reset_format: ResetFormat, headers: &mut HeaderMap) {
    let names = [X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET];
    write_triple(policy, names, reset_format, headers);
}

/// Writes three single values, unless those that are there have less left.
pub(super) fn write_triple(
    policy: &PolicyDecision,
    [limit_name, remaining_name, reset_name]: [HeaderName; 3],
    reset_format: ResetFormat,
    headers: &mut HeaderMap,
) {
    let names = [&limit_name, &remaining_name, &reset_name];
    let theirs = keep_one_line(headers, names, &remaining_name, |line| count(line.trim()));
    let (remaining, reset) = standing(policy);
    if theirs.is_some_and(|theirs| theirs <= remaining) {
        return;
    }

    headers.insert(limit_name, Text::from(policy.limit()).into());
    headers.insert(remaining_name, Text::from(remaining).into());
    headers.remove(&reset_name);
    if let Some(reset) = reset {
        let seconds = match reset_format {
            ResetFormat::DeltaSeconds => ceil_secs(reset),
            ResetFormat::EpochSeconds => ceil_secs(policy.decided_at.saturating_add(reset)),
        };
        headers.insert(reset_name, Text::from(seconds).into());
    }
}
