use std::borrow::Cow;

use crate::Limit;

/// What a policy counts: a name and a limit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NamedLimit {
    pub(crate) name: Cow<'static, str>,
    pub(crate) limit: Limit,
    /// The hash of the name by [`hash_name`].
    pub(crate) name_hash: u64,
}

impl NamedLimit {
    pub(crate) fn new(name: Cow<'static, str>, limit: Limit) -> Self {
        Self {
            name_hash: hash_name(&name),
            name,
            limit,
        }
    }
}

/// The 64-bit FNV-1a hash of the name of a policy.
pub(crate) fn hash_name(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
