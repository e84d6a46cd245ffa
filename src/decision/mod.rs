mod context;
mod policy;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use smallvec::SmallVec;

pub(crate) use self::context::{CheckContext, Rendered};
pub use self::policy::{Denial, PolicyDecision};

use crate::{
    Key,
    store::{Outcome, Quota, Store, StoreError, StoreResponse},
};

/// What came of a check.
///
/// The layer leaves one in the extensions of the request, for the service behind it, and of the response. It is cheap to
/// clone. Of several policies, [`limit`](Self::limit), [`remaining`](Self::remaining) and
/// [`reset_after`](Self::reset_after) are those of the one that matters most to the caller: the one with the longest wait
/// if the request was denied, else the one with the least left for its limit.
#[derive(Clone)]
#[must_use]
pub struct Decision(Arc<Inner>);

struct Inner {
    allowed: bool,
    server_time: Duration,
    policies: PolicyDecisions,
    /// Why the store did not decide.
    store_error: Option<Box<StoreError>>,
    /// Whether there is nothing to give back, or somebody has the receipt.
    receipt_taken: AtomicBool,
    /// The decisions of an outer and an inner layer, if this one joins them.
    joined: Option<[Decision; 2]>,
}

/// Questions.
impl Decision {
    /// Whether the request may pass.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.0.allowed
    }

    /// How many requests of cost 1 the policy admits at once when nothing was used yet.
    ///
    /// 0 if no policy applied.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.foremost().map_or(0, PolicyDecision::limit)
    }

    /// How many more requests of cost 1 would be admitted right now.
    ///
    /// Of 10 per second with 6 admitted in the last second, this one included, 4 remain. A denied request takes nothing,
    /// so 3 remain 3 when a request of cost 5 was denied.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.foremost().map_or(0, PolicyDecision::remaining)
    }

    /// How long until the same request will be admitted, if nobody else is meanwhile.
    ///
    /// `None` if it was admitted, and if waiting does not help. In a denial by a layer it includes the
    /// [jitter](crate::RateLimitLayer::retry_jitter), as the response does.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.policies().filter_map(PolicyDecision::retry_after).max()
    }

    /// How long until nothing counts against the caller anymore, if it stays away; zero if nothing does.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        self.foremost().map_or(Duration::ZERO, PolicyDecision::reset_after)
    }

    /// The time of the decision by the clock of the store, since the Unix epoch; 0 if the store was not asked.
    #[must_use]
    pub fn server_time(&self) -> Duration {
        self.0.server_time
    }

    /// The failure of the store, if it did not decide: this process counted by itself, or no policy was counted.
    ///
    /// What happens then is defined by the policies' [`FailureMode`](crate::FailureMode).
    #[must_use]
    pub fn store_error(&self) -> Option<&StoreError> {
        self.0.store_error.as_deref()
    }

    /// What each policy said, in the order in which they were given.
    pub fn policies(&self) -> impl Iterator<Item = &PolicyDecision> {
        self.0.policies.iter()
    }

    /// What this request was charged, to give it back with [`Limiter::refund`](crate::Limiter::refund).
    ///
    /// There is one for a decision and all its clones; `None` if it was taken, or nothing was charged.
    #[must_use]
    pub fn receipt(&self) -> Option<Receipt> {
        if let Some(layers) = &self.0.joined {
            let receipts = layers.iter().filter_map(Self::receipt);
            let charged: SmallVec<[Self; 1]> = receipts.flat_map(|receipt| receipt.charged).collect();
            return (!charged.is_empty()).then_some(Receipt { charged });
        }
        if self.0.receipt_taken.swap(true, Ordering::Relaxed) {
            return None;
        }
        Some(Receipt {
            charged: [self.clone()].into(),
        })
    }

    pub(crate) fn as_slice(&self) -> &[PolicyDecision] {
        &self.0.policies
    }

    /// What outer layers have charged to the same key of the same policy, in the same store.
    pub(crate) fn charged(&self, store: &Arc<dyn Store>, quota: &Quota, key: &Key) -> u64 {
        let same = self
            .policies()
            .filter(|policy| policy.quota() == quota && policy.key == *key && policy.context.store.id() == store.id());
        same.fold(0, |charged, policy| charged.saturating_add(policy.cost))
    }

    #[inline]
    pub(crate) fn foremost(&self) -> Option<&PolicyDecision> {
        if let [only] = &self.0.policies[..] {
            return Some(only);
        }

        let denier = self
            .policies()
            .filter(|policy| policy.denies())
            .max_by_key(|policy| policy.retry_after());

        // remaining / limit, compared without dividing
        denier.or_else(|| {
            self.policies().min_by(|a, b| {
                let (a_share, b_share) = (
                    u128::from(a.remaining()) * u128::from(b.limit()),
                    u128::from(b.remaining()) * u128::from(a.limit()),
                );
                a_share.cmp(&b_share)
            })
        })
    }
}

impl Decision {
    /// A decision that no store has made, or has made yet.
    #[inline]
    pub(crate) fn new(allowed: bool, policies: PolicyDecisions) -> Self {
        Self(Arc::new(Inner {
            allowed,
            server_time: Duration::ZERO,
            policies,
            store_error: None,
            receipt_taken: AtomicBool::new(true),
            joined: None,
        }))
    }

    /// Notes why the store did not decide, before there are clones.
    pub(crate) fn note_failure(&mut self, error: StoreError) {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.store_error = Some(Box::new(error));
        }
    }

    /// Notes what the store said, where it lies, before there are clones.
    #[inline]
    pub(crate) fn settle(&mut self, answer: &StoreResponse, outcome: &Outcome, charged: bool) {
        let Some(inner) = Arc::get_mut(&mut self.0) else {
            return;
        };
        inner.allowed = outcome.allowed;
        inner.server_time = answer.server_time;
        *inner.receipt_taken.get_mut() = !charged;
        for (policy, verdict) in inner.policies.iter_mut().zip(&outcome.states) {
            policy.settle(verdict, answer.server_time);
        }
    }

    /// The same denial with longer waits: each policy that denies adds the delay to its wait.
    pub(crate) fn delayed(self, delay: Duration) -> Self {
        if delay.is_zero() {
            return self;
        }
        let mut policies = self.0.policies.clone();
        for policy in &mut policies {
            policy.retry_after = policy.retry_after.map(|wait| wait.saturating_add(delay));
        }
        Self(Arc::new(Inner {
            allowed: self.0.allowed,
            server_time: self.0.server_time,
            policies,
            store_error: self.0.store_error.clone(),
            receipt_taken: AtomicBool::new(true),
            joined: None,
        }))
    }

    /// Both decisions, where each let the request pass.
    pub(crate) fn followed_by(&self, later: &Self) -> Self {
        Self(Arc::new(Inner {
            allowed: later.is_allowed(),
            server_time: later.server_time(),
            policies: self.policies().chain(later.policies()).cloned().collect(),
            store_error: self.0.store_error.clone().or_else(|| later.0.store_error.clone()),
            receipt_taken: AtomicBool::new(true),
            joined: Some([self.clone(), later.clone()]),
        }))
    }
}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decision")
            .field("allowed", &self.0.allowed)
            .field("server_time", &self.0.server_time)
            .field("policies", &self.0.policies)
            .finish()
    }
}

/// What each policy of a request said, or is asked. Most requests have one.
pub(crate) type PolicyDecisions = SmallVec<[PolicyDecision; 1]>;

/// What a request was charged, by all policies.
///
/// [`Limiter::refund`](crate::Limiter::refund) consumes it and gives back what still counts. Dropping it leaves the charge
/// as it is. It knows the store's time of the decision, so it does not take back what was charged later, except as
/// [`refund`](crate::Limiter::refund) says.
#[must_use]
pub struct Receipt {
    pub(crate) charged: SmallVec<[Decision; 1]>,
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receipt").field("charged", &self.charged).finish()
    }
}
