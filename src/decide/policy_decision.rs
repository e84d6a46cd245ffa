use std::{fmt, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Waiting,
    context::{CheckContext, PolicyContext},
    receipt::Untaken,
    usage::Account,
};
use crate::{
    FailureMode, Key, Limit,
    limit::{MAX_QUOTA, Share},
    store::{Charge, ChargeLine, ChargeState, LeaseId, NamedLimit, Operation, Store},
};

/// The decision of one policy.
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{Denial, Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), tower_quota::store::StoreError> {
/// let limiter = Limiter::new(MemoryStore::new(), Policy::new("login", SlidingLog::per_minute(5)));
/// let denied = limiter.request("42").cost(5).check().await.and(limiter.check("42").await)?;
///
/// let policy = denied.policies().next().expect("the limiter has a policy");
/// assert_eq!((policy.name(), policy.limit(), policy.window()), ("login", 5, Some(Duration::from_secs(60))));
/// assert!(policy.denies() && policy.denial() == Some(Denial::QuotaExceeded));
/// assert_eq!(policy.remaining(), 0);
/// assert_eq!(policy.retry_after(), Some(Duration::from_secs(60)));
/// assert_eq!(policy.reset_after(), Duration::from_secs(60));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PolicyDecision {
    pub(crate) context: Arc<CheckContext>,
    /// The position of the policy in the context.
    pub(crate) position: usize,
    pub(crate) charge: Charge,
    /// What this process has counted in place of the store.
    pub(crate) local: Option<Box<Charge>>,
    /// How long the request may wait for this policy.
    pub(crate) waiting: Waiting,
    pub(crate) decided_at: Duration,
    pub(crate) denial: Option<Denial>,
    pub(crate) remaining: u64,
    pub(crate) retry_after: Option<Duration>,
    pub(crate) reset_after: Duration,
    pub(crate) receipt: Untaken,
    pub(crate) account: Option<Arc<Account>>,
    /// When the lease was made, if the request takes slots. It does not expire earlier than its length after this.
    pub(crate) lease: Option<Instant>,
}

/// Accessors.
impl PolicyDecision {
    /// The name of the policy.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.named().name
    }

    /// Whether this policy denied the request. A policy that is [observed](Self::is_observed) never does.
    #[must_use]
    pub fn denies(&self) -> bool {
        self.denial.is_some() && !self.is_observed()
    }

    /// Whether this policy [only observes](crate::Policy::observe_only): it does not deny the request, whatever its
    /// [`denial`](Self::denial).
    #[must_use]
    pub fn is_observed(&self) -> bool {
        self.policy().observes(&self.charge.key)
    }

    /// The reason why this policy denied the request or, if it is [observed](Self::is_observed), would have denied it.
    #[must_use]
    pub fn denial(&self) -> Option<Denial> {
        self.denial
    }

    /// The number of requests of cost 1 that the policy admits at once from empty counts.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.named().limit.quota()
    }

    /// The number of requests of cost 1 that would be admitted now.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// The time until this policy admits the request; `None` without a [`denial`](Self::denial), or if waiting does not help.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// The time until the quota is fully restored, if no further request is admitted.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        self.reset_after
    }

    /// The length of the window of the limit; `None` for windows of a calendar, and for a limit that has no window.
    #[must_use]
    pub fn window(&self) -> Option<Duration> {
        self.named().limit.window()
    }
}

impl PolicyDecision {
    /// A decision that the store is to make.
    #[inline(always)]
    pub(crate) fn undecided(
        context: Arc<CheckContext>,
        position: usize,
        limit: Arc<NamedLimit>,
        (key, cost): (Key, u64),
        waiting: Waiting,
    ) -> Self {
        let policy = &context.policies[position];
        let (ban, waits) = (
            policy.ban.clone(),
            policy.waiting.longest_us > 0 || waiting.longest_us > 0,
        );
        let is_held = limit.limit.is_held();
        let mut undecided = Self {
            context,
            position,
            charge: Charge {
                ban,
                ..Charge::on(limit, key, cost)
            },
            local: None,
            waiting,
            decided_at: Duration::ZERO,
            denial: None,
            remaining: 0,
            retry_after: None,
            reset_after: Duration::ZERO,
            receipt: Untaken::default(),
            account: None,
            lease: None,
        };
        if is_held {
            undecided.renew_lease();
        }
        if waits {
            undecided.charge.line = Some(Box::new(ChargeLine {
                number: undecided.line_number(),
                longest_us: waiting.longest_us,
                ahead: 0,
                leads: None,
                leads_elsewhere: false,
            }));
        }
        undecided
    }

    /// The same by the limit of the policy, for a request of cost 1 that does not wait.
    pub(crate) fn plain(context: &Arc<CheckContext>, position: usize, key: Key) -> Self {
        let limit = context.policies[position].limit.clone();
        Self::undecided(context.clone(), position, limit, (key, 1), Waiting::default())
    }

    /// Lets the request take slots by a new lease.
    #[cold]
    pub(super) fn renew_lease(&mut self) {
        self.lease = Some(Instant::now());
        self.charge.lease = Some(LeaseId::random());
    }

    /// Records the next state.
    #[inline(always)]
    pub(crate) fn record<'a>(
        &mut self,
        states: &mut impl Iterator<Item = &'a ChargeState>,
        server_time: Duration,
        charged: bool,
    ) {
        let Some(state) = states.next() else { return };
        self.decided_at = state.decided_at.unwrap_or(server_time);
        self.denial = state.retry_after.map(|_| Denial::QuotaExceeded);
        self.remaining = state.remaining;
        self.retry_after = state.retry_after;
        self.reset_after = state.reset_after;
        if let Some(rest) = state.banned_for() {
            self.deny_for(rest);
        }
        if self.denial.is_some() && self.charge.cost > self.named().limit.quota() {
            (self.denial, self.retry_after) = (Some(Denial::CostAboveLimit), None);
        }
        if self.lease.is_some() {
            // Slots are released, not refunded.
            if !charged || state.retry_after.is_some() {
                self.lease = None;
            }
            return;
        }
        self.receipt = Untaken::new(charged);
    }

    #[inline]
    pub(crate) fn policy(&self) -> &PolicyContext {
        &self.context.policies[self.position]
    }

    /// The name of the plan that the policy is of, if it is of one.
    pub(super) fn plan_name(&self) -> Option<&str> {
        self.policy().of_plan.as_deref()
    }

    #[inline]
    pub(crate) fn named(&self) -> &Arc<NamedLimit> {
        &self.charge.limit
    }

    /// Whether both charges are to one count by one limit, whose quota a reload between the decisions of two layers may have changed.
    pub(super) fn counts_as(&self, named: &NamedLimit, of: &PolicyContext) -> bool {
        let (own, policy) = (self.named(), self.policy());
        // Where limits are chosen, that of the policy has no counts.
        let are_of_policies = || own.has_counts_of(&policy.limit) && named.has_counts_of(&of.limit);
        let is_reloaded = || {
            let file = policy.file_number();
            let is_one = file.is_some() && file == of.file_number() && policy.of_plan == of.of_plan;
            is_one && own.has_counts_of(named) && are_of_policies()
        };
        **own == *named || is_reloaded()
    }

    #[inline]
    pub(crate) fn failure_mode(&self) -> FailureMode {
        self.policy().settings.failure_mode.unwrap_or_default()
    }

    /// What is counted, in the store or in its place.
    #[inline]
    pub(crate) fn counted(&self) -> &Charge {
        self.local.as_deref().unwrap_or(&self.charge)
    }

    /// Where it is counted.
    #[inline]
    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        match self.local {
            None => &self.context.store,
            Some(_) => self.context.failover.counts(),
        }
    }

    /// The charge as this process counts it while the store fails; `None` if it does not.
    pub(crate) fn local_charge(&self, operation: Operation) -> Option<Charge> {
        let share = self.failure_mode().share()?;
        let mut charge = self.charge.clone();
        if share != Share::WHOLE {
            charge.limit = Arc::new(charge.limit.scaled(share));
        }
        // What has happened counts in full.
        if operation.requires_room() && self.permanent_denial().is_none() {
            charge.cost = charge.cost().min(charge.limit().quota());
        }
        Some(charge)
    }

    /// Records that the request has taken so many units.
    #[cold]
    pub(crate) fn multiply(&mut self, units: u32) {
        for charge in [&mut self.charge].into_iter().chain(self.local.as_deref_mut()) {
            charge.cost = charge.cost.saturating_mul(units.into());
        }
    }

    /// Whether responses begin bans.
    pub(crate) fn learns(&self) -> bool {
        self.policy().settings.learns
    }

    /// Denies the request for the rest of a ban.
    #[cold]
    fn deny_for(&mut self, rest: Duration) {
        self.denial = Some(Denial::Banned);
        self.remaining = 0;
        self.retry_after = self.retry_after.max(Some(rest));
        self.reset_after = self.reset_after.max(rest);
    }

    /// The reason why the policy never admits the request, if there is one.
    #[inline]
    pub(crate) fn permanent_denial(&self) -> Option<Denial> {
        let limit = &self.named().limit;
        if matches!(limit, Limit::DenyAll) {
            return Some(Denial::DenyAll);
        }
        (self.charge.cost > limit.quota()).then_some(Denial::CostAboveLimit)
    }

    /// Whether it denies the request without a call of the store, which counts no limit that denies all, and takes a larger cost for
    /// the largest one.
    #[inline]
    pub(crate) fn denies_at_once(&self) -> bool {
        let limit = &self.named().limit;
        let is_clamped_to_fit = self.charge.cost > MAX_QUOTA && limit.quota() == MAX_QUOTA;
        is_clamped_to_fit || matches!(limit, Limit::DenyAll)
    }
}

// Without the key, which may contain an address or a user.
impl_debug!(PolicyDecision, policy =>
    name: policy.name(),
    denial: policy.denial,
    observed: policy.is_observed(),
    limit: policy.limit(),
    remaining: policy.remaining,
    retry_after: policy.retry_after,
    reset_after: policy.reset_after
);

/// The reason why a policy denied a request.
///
/// ```
/// use tower_quota::{Denial, Limit, Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_quota::store::StoreError> {
/// for (limit, denial) in [
///     (SlidingLog::per_minute(1).into(), Denial::QuotaExceeded),
///     (SlidingLog::per_minute(1).into(), Denial::CostAboveLimit),
///     (Limit::DenyAll, Denial::DenyAll),
/// ] {
///     let limiter = Limiter::new(MemoryStore::new(), Policy::new("export", limit));
///     limiter.request("42").cost(1).charge().await?;
///     let cost = if denial == Denial::CostAboveLimit { 2 } else { 1 };
///     let denied = limiter.request("42").cost(cost).check().await?;
///     assert_eq!(denied.policies().next().and_then(|policy| policy.denial()), Some(denial));
/// }
/// assert_eq!(Denial::QuotaExceeded.to_string(), "quota exceeded");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Denial {
    /// The cost does not fit now.
    QuotaExceeded,
    /// The cost does not fit now, and too much [waits](crate::Policy::max_waiting) already in this process.
    LineFull,
    /// The cost is above the limit, so the request is never admitted.
    CostAboveLimit,
    /// The limit is [`Limit::DenyAll`].
    DenyAll,
    /// The key is banned for its denials, by hand or for a pause: [`Policy::ban`](crate::Policy::ban) describes bans.
    /// [`retry_after`](PolicyDecision::retry_after) includes the rest of the ban.
    Banned,
}

/// The reason in words, such as `quota exceeded`.
impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::QuotaExceeded => "quota exceeded",
            Self::LineFull => "line is full",
            Self::CostAboveLimit => "cost above limit",
            Self::DenyAll => "deny all",
            Self::Banned => "banned",
        })
    }
}
