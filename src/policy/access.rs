//! The requests that a layer does not limit, and those that it blocks.

use std::fmt;
#[cfg(feature = "serde")]
use std::sync::Arc;

use http::request::Parts;

use crate::decision::Condition;

/// The conditions under which a layer decides about a request without its policies.
#[derive(Clone, Default)]
pub(crate) struct Access {
    pub(crate) blocked: Vec<Condition>,
    pub(crate) skipped: Vec<Condition>,
}

impl Access {
    pub(crate) fn blocks(&self, parts: &Parts) -> bool {
        self.blocked.iter().any(|condition| condition(parts))
    }

    pub(crate) fn skips(&self, parts: &Parts) -> bool {
        self.skipped.iter().any(|condition| condition(parts))
    }

    /// These conditions and those of the files of policies; `None` if there are none.
    #[cfg(feature = "serde")]
    pub(crate) fn joined(&self, files: &[Arc<Self>]) -> Option<Self> {
        let mut all = self.clone();
        for file in files {
            all.blocked.extend_from_slice(&file.blocked);
            all.skipped.extend_from_slice(&file.skipped);
        }
        (!all.is_empty()).then_some(all)
    }

    #[cfg(feature = "serde")]
    pub(crate) fn is_empty(&self) -> bool {
        self.blocked.is_empty() && self.skipped.is_empty()
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access")
            .field("blocked", &self.blocked.len())
            .field("skipped", &self.skipped.len())
            .finish()
    }
}
