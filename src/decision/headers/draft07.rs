//! Draft -07: a dictionary for one policy, the one that matters most.

use http::{HeaderMap, HeaderValue};

use super::{
    dialect::{RATELIMIT, RATELIMIT_POLICY},
    draft06::single_policy,
    values::{Text, append, ceil_secs, keep_one_line, least_remaining, remaining, standing},
};
use crate::PolicyDecision;

pub(super) fn write(policy: &PolicyDecision, headers: &mut HeaderMap) {
    append(headers, || RATELIMIT_POLICY, single_policy(policy));
    write_dictionary(policy, headers);
}

/// `limit=2, remaining=1, reset=30`, unless what is there, a dictionary or the list of a later draft, has less left.
fn write_dictionary(policy: &PolicyDecision, headers: &mut HeaderMap) {
    let is_list = |line: &HeaderValue| line.as_bytes().starts_with(b"\"");
    let theirs = match headers.get(RATELIMIT).is_some_and(is_list) {
        // Its lines are one value.
        true => least_remaining(headers.get_all(RATELIMIT)),
        false => keep_one_line(headers, [&RATELIMIT], &RATELIMIT, remaining),
    };
    let (remaining, reset) = standing(policy);
    if theirs.is_some_and(|theirs| theirs <= remaining) {
        return;
    }

    let mut value = Text::new();
    value.text("limit=").number(policy.limit());
    value.text(", remaining=").number(remaining);
    if let Some(reset) = reset {
        value.text(", reset=").number(ceil_secs(reset));
    }
    headers.insert(RATELIMIT, value.into());
}
