//! `X-RateLimit-*`: three single values for one policy, the one that matters most.

use http::HeaderMap;

use super::{
    dialect::ResetFormat,
    names::{X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET},
    triple::write_triple,
};
use crate::PolicyDecision;

pub(super) fn write(policy: &PolicyDecision, reset_format: ResetFormat, headers: &mut HeaderMap) {
    let names = [X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET];
    write_triple(policy, names, reset_format, headers);
}
