//! From policies and a subject to a decision, and what follows from it.
//!
//! A request of a layer, a limiter or an `Admin` is a list of policies with their keys and costs, [`Undecided`]. [`begin`] sends
//! it to the store, alone or, if it [waits](line), with others. The reply, or the failure mode of each policy, makes it a
//! [`Decision`]. It holds what the request may give back or release later: receipts, slots, and refunds at its completion.

mod check;
mod completion;
mod composite;
mod context;
#[cfg(feature = "admin")]
mod denials;
mod failing;
mod group;
mod leaving;
mod line;
mod nested;
mod outcome;
mod per_thread;
mod policy_decision;
mod receipt;
mod settings;
mod slots;
mod store_replies;
mod undecided;
mod usage;
mod waiting;

use std::{
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};

use smallvec::SmallVec;

use crate::store::{LostSettlements, Owed, OwedKind, StoreError};

#[cfg(feature = "admin")]
pub(crate) use self::denials::{Count, DenialWatch, Denials, Summary};
#[cfg(feature = "admin")]
pub(crate) use self::line::report::waiting_by_key;
#[cfg(all(test, feature = "shuttle"))]
pub(crate) use self::slots::Keeper;
pub(crate) use self::{
    check::{Check, PendingCheck, begin, send_bans},
    completion::{End, GRPC, GRPC_STATUS, awaits_trailers, caught, grpc_content_type, grpc_status_in},
    context::{CheckContext, PolicyContext, PolicyFile},
    per_thread::PerThread,
    receipt::Settlement,
    settings::{Condition, Cost, EnforcedShare, LongestWait, POSSIBLE_WAITING, Settings, Waiting, turn_key},
    slots::{Release, release_unknown},
    store_replies::Responses,
    undecided::Undecided,
    usage::OnSettled,
};
pub use self::{
    completion::Completion,
    policy_decision::{Denial, PolicyDecision},
    receipt::Receipt,
    slots::Slots,
    usage::Usage,
};

/// The outcome of a check.
///
/// A [`Limiter`](crate::Limiter) returns it. A layer leaves it in the [extensions](crate::RateLimitLayer::extensions) of the
/// request, for the inner service, and of the response to a request that it denies. A clone is cheap.
///
/// If no policy applies to a request, its decision is allowed and has no policies: nothing limits the request, so
/// [`limit`](Self::limit) and [`remaining`](Self::remaining) are `u64::MAX`, and [`reset_after`](Self::reset_after) is zero.
///
/// Of several policies, [`limit`](Self::limit), [`remaining`](Self::remaining) and [`reset_after`](Self::reset_after) are
/// those of one policy: the one with the longest wait if the request was denied, else the one with the smallest share of its
/// limit remaining. [`policies`](Self::policies) has all of them.
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), tower_quota::store::StoreError> {
/// let limiter = Limiter::new(MemoryStore::new(), [
///     Policy::new("burst", SlidingLog::per_second(2)),
///     Policy::new("daily", SlidingLog::per_day(100)),
/// ]);
///
/// let admitted = limiter.check("42").await?;
/// assert!(admitted.is_allowed());
/// assert_eq!((admitted.limit(), admitted.remaining()), (2, 1));
/// assert_eq!(admitted.reset_after(), Duration::from_secs(1));
/// assert_eq!(admitted.retry_after(), None);
/// assert!(admitted.store_error().is_none() && admitted.server_time() > Duration::ZERO);
///
/// let denied = limiter.request("42").cost(2).check().await?;
/// assert!(!denied.is_allowed());
/// assert_eq!(denied.retry_after(), Some(Duration::from_secs(1)));
/// let remaining: Vec<_> = denied.policies().map(|policy| (policy.name(), policy.remaining())).collect();
/// assert_eq!(remaining, [("burst", 1), ("daily", 99)]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a denial by `check` is not an error: look at `is_allowed()`, or return the error of `require()`; bind it as `_permit` \
              while the work lasts, since dropping it, also by `let _ =`, releases its slots"]
pub struct Decision(Arc<Inner>);

struct Inner {
    allowed: bool,
    /// How many units are asked for; when it is decided, how many are admitted if it is allowed.
    units: u32,
    server_time: Duration,
    /// How long the request has waited before.
    waited: Duration,
    policies: PolicyDecisions,
    /// The failure of the store, if it did not decide.
    store_error: Option<Box<StoreError>>,
    /// The decisions of an outer and an inner layer, if this one joins them.
    joined: Option<[Decision; 2]>,
    /// Whether an inner layer has decided about the request too.
    followed: AtomicBool,
    /// Whether an inner layer has added its fields to the response.
    has_inner_fields: AtomicBool,
    /// The pause that the response to an admitted request asks for, in microseconds; 0 for none.
    requested_pause: AtomicU64,
    /// The slots of an admitted request, until they are taken or the last clone is dropped.
    slots: Option<Box<Mutex<Slots>>>,
}

/// The decisions of the policies of a request. Most requests have one policy.
pub(crate) type PolicyDecisions = SmallVec<[PolicyDecision; 1]>;

/// Accessors.
impl Decision {
    /// Whether the request is admitted.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.0.allowed
    }

    /// How many times [`take_up_to`](crate::LimiterRequest::take_up_to) has counted the costs; of other decisions 1 if the request is
    /// admitted, else 0.
    #[must_use]
    pub fn taken(&self) -> u32 {
        if self.0.allowed { self.0.units } else { 0 }
    }

    /// The number of requests of cost 1 that the policy admits at once from empty counts; `u64::MAX` if no policy applies.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.foremost().map_or(u64::MAX, PolicyDecision::limit)
    }

    /// The number of requests of cost 1 that would be admitted now; `u64::MAX` if no policy applies.
    ///
    /// Of 10 per second with 6 admitted in the last second, this one included, 4 remain. A denied request counts nothing:
    /// if 3 remain and a request of cost 5 is denied, 3 still remain. The [type](Self) has an example of all of these numbers.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.foremost().map_or(u64::MAX, PolicyDecision::remaining)
    }

    /// The time until the same request is admitted, if no other request is admitted meanwhile.
    ///
    /// `None` if the request was admitted, or if waiting does not help, since one of the policies never admits it. In a denial by
    /// a layer it includes the [jitter](crate::RateLimitLayer::retry_jitter), as the response does. For slots it is 1 s, since their
    /// end is not known.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        let waits = self.deniers().map(PolicyDecision::retry_after);
        waits.reduce(|longest, wait| Some(longest?.max(wait?))).flatten()
    }

    /// The time until the quota is fully restored, if no further request is admitted; zero if nothing counts. If the request
    /// has [waited](Self::waited), it is counted from its admission. Of slots it is the rest of the leases.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        self.foremost().map_or(Duration::ZERO, PolicyDecision::reset_after)
    }

    /// The time of the decision by the clock of the store, since the Unix epoch; zero if no store was used.
    #[must_use]
    pub fn server_time(&self) -> Duration {
        self.0.server_time
    }

    /// The [plan](crate::Plans) of the request; `None` if no policy of a plan applies to it.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Plans, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = |n| Policy::new("mails", SlidingLog::per_day(n));
    /// let mails = Limiter::new(MemoryStore::new(), Plans::new("free", mails(3)).plan("pro", mails(100)));
    /// assert_eq!(mails.check("42").await?.plan(), Some("free"));
    /// assert_eq!(mails.request("42").plan("pro").check().await?.plan(), Some("pro"));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn plan(&self) -> Option<&str> {
        self.policies().find_map(PolicyDecision::plan_name)
    }

    /// The failure of the store, if it did not decide: this process counted, or no policy was counted.
    ///
    /// The policies' [`FailureMode`](crate::FailureMode)s define what happens then.
    #[must_use]
    pub fn store_error(&self) -> Option<&StoreError> {
        self.0.store_error.as_deref()
    }

    /// The time for which the request has [waited](crate::Policy::wait_up_to) until it was admitted or denied. Zero for a request that
    /// does not wait.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_quota::AcquireError> {
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_second(1)));
    /// for seconds in [0, 1] {
    ///     let decision = mails.request("42").wait_up_to(Duration::from_secs(5)).acquire().await?;
    ///     assert_eq!(decision.waited(), Duration::from_secs(seconds));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.0.waited
    }

    /// The decisions of the policies, in the order in which the policies were given.
    ///
    /// Policies that [only observe](PolicyDecision::is_observed) are included. They determine none of the numbers of the decision,
    /// and its receipt includes what they have counted. Policies that do not apply to the request are not included, nor are those
    /// that are [`Open`](crate::FailureMode::Open) while the store fails.
    pub fn policies(&self) -> impl Iterator<Item = &PolicyDecision> {
        self.0.policies.iter()
    }

    /// Counts what the request may have to send to its store at its end.
    pub(crate) fn owe(&self, kind: OwedKind) -> Option<Owed> {
        let first = self.0.policies.first()?;
        Some(first.context.outstanding.owe(kind))
    }

    /// The counter of lost settlements, if a policy depends on how the request ends.
    pub(crate) fn lost_settlements(&self) -> Option<&Arc<LostSettlements>> {
        self.0.policies.first()?.context.lost.as_ref()
    }

    pub(crate) fn as_slice(&self) -> &[PolicyDecision] {
        &self.0.policies
    }

    /// The policies that deny the request.
    pub(crate) fn deniers(&self) -> impl Iterator<Item = &PolicyDecision> {
        self.policies().filter(|policy| policy.denies())
    }

    /// The policies that do not only observe.
    pub(crate) fn enforced(&self) -> impl Iterator<Item = &PolicyDecision> {
        self.policies().filter(|policy| !policy.is_observed())
    }

    /// The policy that [`limit`](Self::limit) and its siblings are those of.
    #[inline]
    pub(crate) fn foremost(&self) -> Option<&PolicyDecision> {
        if let [only] = &self.0.policies[..] {
            return Some(only).filter(|policy| !policy.is_observed());
        }

        let wait = |policy: &&PolicyDecision| policy.retry_after().unwrap_or(Duration::MAX);
        // remaining / limit, compared without dividing
        let share = |a: &PolicyDecision, b: &PolicyDecision| u128::from(a.remaining()) * u128::from(b.limit());
        let denier = self.deniers().max_by_key(wait);
        denier.or_else(|| self.enforced().min_by(|a, b| share(a, b).cmp(&share(b, a))))
    }
}

impl Inner {
    #[inline(always)]
    fn new(allowed: bool, policies: PolicyDecisions) -> Self {
        Self {
            allowed,
            units: 1,
            server_time: Duration::ZERO,
            waited: Duration::ZERO,
            policies,
            store_error: None,
            joined: None,
            followed: AtomicBool::new(false),
            has_inner_fields: AtomicBool::new(false),
            requested_pause: AtomicU64::new(0),
            slots: None,
        }
    }
}

impl Decision {
    /// A decision without a store, or one that the store is to settle.
    #[inline(always)]
    pub(crate) fn new(allowed: bool, policies: PolicyDecisions) -> Self {
        Self(Arc::new(Inner::new(allowed, policies)))
    }

    /// The decision about a request that no policy applies to.
    pub(crate) fn empty() -> Self {
        static EMPTY: LazyLock<Decision> = LazyLock::new(|| Decision::new(true, PolicyDecisions::new()));
        EMPTY.clone()
    }

    /// Whether there was nothing to decide, and no failure.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.policies.is_empty() && self.0.store_error.is_none()
    }

    /// The same denial, which nothing else refers to, with longer waits: the jitter is added to that of each policy that denies.
    pub(crate) fn delayed(mut self, jitter: Duration) -> Self {
        if !jitter.is_zero()
            && let Some(inner) = Arc::get_mut(&mut self.0)
        {
            for policy in inner.policies.iter_mut().filter(|policy| policy.denies()) {
                policy.retry_after = policy.retry_after.map(|wait| wait.saturating_add(jitter));
            }
        }
        self
    }
}

impl_debug!(Decision, own => allowed: own.0.allowed, server_time: own.0.server_time, policies: own.0.policies);
