use std::sync::Arc;

use super::Policy;
use crate::{access::Access, decision::CheckContext};

/// What a layer or a limiter decides requests by. A reload replaces all of it at once.
pub(crate) struct Basis<'a, K> {
    pub(crate) policies: &'a [Policy<K>],
    pub(crate) context: &'a Arc<CheckContext>,
    /// What is decided without the policies, if anything is.
    pub(crate) access: Option<&'a Access>,
}

impl<K> Clone for Basis<'_, K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Basis<'_, K> {}
