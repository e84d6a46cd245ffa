//! Draft -06: three single values for one policy, the one that matters most.

use http::{HeaderMap, HeaderValue};

use super::{
    dialect::{RATELIMIT_LIMIT, RATELIMIT_POLICY, RATELIMIT_REMAINING, RATELIMIT_RESET, ResetFormat},
    legacy::write_triple,
    values::{Text, append, ceil_secs},
};
use crate::PolicyDecision;

pub(super) fn write(policy: &PolicyDecision, headers: &mut HeaderMap) {
    append(headers, || RATELIMIT_POLICY, single_policy(policy));
    let names = [RATELIMIT_LIMIT, RATELIMIT_REMAINING, RATELIMIT_RESET];
    write_triple(policy, names, ResetFormat::DeltaSeconds, headers);
}

/// `2;w=30`, as in the drafts -06 and -07.
pub(super) fn single_policy(policy: &PolicyDecision) -> HeaderValue {
    let mut value = Text::from(policy.limit());
    if let Some(window) = policy.window() {
        value.text(";w=").number(ceil_secs(window).max(1));
    }
    value.into()
}
