use std::{fmt, sync::Arc, time::Duration};

use super::context::{CheckContext, Rendered};
use crate::{
    FailureMode, Key,
    store::{ChargeState, Quota},
};

/// What one policy said.
#[derive(Clone)]
pub struct PolicyDecision {
    pub(crate) context: Arc<CheckContext>,
    /// Which of the policies it is.
    pub(crate) position: usize,
    pub(crate) key: Key,
    pub(crate) cost: u64,
    pub(crate) decided_at: Duration,
    pub(crate) denial: Option<Denial>,
    pub(crate) remaining: u64,
    pub(crate) retry_after: Option<Duration>,
    pub(crate) reset_after: Duration,
}

/// Questions.
impl PolicyDecision {
    /// The name of the policy.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.quota().name
    }

    /// Whether this policy denied the request.
    #[must_use]
    pub fn denies(&self) -> bool {
        self.denial.is_some()
    }

    /// Why this policy denied the request, if it did.
    #[must_use]
    pub fn denial(&self) -> Option<Denial> {
        self.denial
    }

    /// How many requests of cost 1 are admitted at once when nothing was used yet.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.quota().limit.quota()
    }

    /// How many more requests of cost 1 would be admitted right now.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// How long until this policy would admit the request; `None` if it did not deny it, or if waiting does not help.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// How long until nothing counts anymore.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        self.reset_after
    }

    /// The length of the window that the limit is for; `None` for windows of a calendar.
    #[must_use]
    pub fn window(&self) -> Option<Duration> {
        self.quota().limit.window()
    }

    #[inline]
    pub(crate) fn failure_mode(&self) -> FailureMode {
        self.context.failure_modes[self.position]
    }

    #[inline]
    pub(crate) fn quota(&self) -> &Quota {
        &self.context.quotas[self.position]
    }

    #[inline]
    pub(crate) fn rendered(&self) -> &Rendered {
        &self.context.rendered[self.position]
    }
}

impl PolicyDecision {
    /// What a policy is asked.
    #[inline]
    pub(crate) fn undecided(context: Arc<CheckContext>, position: usize, key: Key, cost: u64) -> Self {
        Self {
            context,
            position,
            key,
            cost,
            decided_at: Duration::ZERO,
            denial: None,
            remaining: 0,
            retry_after: None,
            reset_after: Duration::ZERO,
        }
    }

    pub(super) fn settle(&mut self, verdict: &ChargeState, server_time: Duration) {
        self.decided_at = verdict.decided_at.unwrap_or(server_time);
        self.denial = verdict.retry_after.map(|_| Denial::QuotaExceeded);
        self.remaining = verdict.remaining;
        self.retry_after = verdict.retry_after;
        self.reset_after = verdict.reset_after;
    }
}

impl fmt::Debug for PolicyDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the key: it may hold an address or a user.
        f.debug_struct("PolicyDecision")
            .field("name", &self.name())
            .field("denial", &self.denial)
            .field("limit", &self.limit())
            .field("remaining", &self.remaining)
            .field("retry_after", &self.retry_after)
            .field("reset_after", &self.reset_after)
            .finish()
    }
}

/// Why a policy denied a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Denial {
    /// There is no room for it now.
    QuotaExceeded,
    /// It costs more than the limit, so it is never admitted.
    CostAboveLimit,
    /// The limit is [`Limit::DenyAll`](crate::Limit::DenyAll).
    DenyAll,
}
