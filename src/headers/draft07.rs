//! Draft -07: a dictionary for one policy, the one that matters most.

use http::HeaderMap;

use super::{
    draft06::single_policy,
    line::{append, count, keep_one_line},
    names::{RATELIMIT, RATELIMIT_POLICY},
    text::Text,
    value::{ceil_secs, standing},
};
use crate::PolicyDecision;

pub(super) fn write(policy: &PolicyDecision, headers: &mut HeaderMap) {
    append(headers, || RATELIMIT_POLICY, single_policy(policy));
    write_dictionary(policy, headers);
}

/// `limit=2, remaining=1, reset=30`, unless the one that is there has less left, or is the list of a later draft.
fn write_dictionary(policy: &PolicyDecision, headers: &mut HeaderMap) {
    if headers
        .get(RATELIMIT)
        .is_some_and(|line| line.as_bytes().starts_with(b"\""))
    {
        return;
    }
    let theirs = keep_one_line(headers, [&RATELIMIT], &RATELIMIT, |line| {
        let members = line.split(',').map(str::trim);
        let mut numbers = members.filter_map(|member| {
            let remaining = member.strip_prefix("remaining=")?;
            // Without its parameters (RFC 9651 §3.2).
            count(remaining.split(';').next()?.trim_end())
        });
        numbers.next()
    });
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
