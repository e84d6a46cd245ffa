//! The requests that a layer does not limit, and those that it blocks.

use std::sync::Arc;

use http::request::Parts;

/// A condition on requests.
pub(crate) type Condition = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

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
}
