use std::{fmt, sync::Arc};

use smallvec::SmallVec;

use super::{Decision, policy_decision::PolicyDecision, store_replies::Responses};
use crate::{
    limit::MAX_QUOTA,
    store::{Charge, NamedLimit, Operation, Owed, OwedKind, StoreError, StoreId, StoreRequest},
    sync::atomic::{AtomicBool, Ordering},
};

/// The charges of an admitted request, to settle or refund them.
///
/// [`Decision::take_receipt`](crate::Decision::take_receipt) returns it. Dropping it leaves the charges as they are.
///
/// A cost that is not yet known at the check is estimated there and [settled](Self::settle) later: the tokens of a language
/// model, the bytes of a response, the rows of a query. The default is an [empty](Self::is_empty) receipt, to put in the place
/// of one that is settled in a `Drop`.
#[derive(Default)]
#[must_use = "a receipt does nothing unless `settle` or `refund` is called"]
pub struct Receipt {
    charges: Vec<PolicyDecision>,
    owed: SmallVec<[Owed; 1]>,
}

impl Receipt {
    pub(super) fn new(charges: Vec<PolicyDecision>) -> Self {
        let mut owed: SmallVec<[Owed; 1]> = SmallVec::new();
        for charge in &charges {
            let outstanding = &charge.context.outstanding;
            if !owed.iter().any(|owed| Arc::ptr_eq(&owed.outstanding, outstanding)) {
                owed.push(outstanding.owe(OwedKind::Settlement));
            }
        }
        Self { charges, owed }
    }
}

impl Receipt {
    /// Whether there is nothing to settle or refund.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.charges.is_empty()
    }

    /// Replaces the cost that was charged to each policy by the actual cost, in units of the limits.
    ///
    /// If the actual cost is higher, the difference is charged now, also above the limit; later requests wait for it. If it
    /// is lower, the difference is refunded, as [`refund`](Self::refund) does; 0 refunds everything. Without a settlement
    /// the estimate stays charged.
    ///
    /// Each policy is settled where it was counted: in its store or, if the store failed, in this process. All policies that
    /// were counted in one store are settled at one instant, in one call; in a cluster, in one for each primary. To settle one of
    /// several policies, take [its receipt](crate::Decision::take_receipt_of).
    ///
    /// An empty receipt settles nothing. The largest actual cost is 999,999,999,999,999; a larger one counts as that.
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let tokens = Limiter::new(MemoryStore::new(), Policy::new("tokens", SlidingLog::per_minute(1_000)));
    ///
    /// for (actual, remaining) in [(120, 880), (500, 380), (700, 0)] {
    ///     let decision = tokens.request("42").cost(300).check().await?; // the estimate
    ///     assert!(decision.is_allowed());
    ///     decision.take_receipt().settle(actual).await?;
    ///     assert_eq!(tokens.peek("42").await?.remaining(), remaining);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// When a response body ends, or is dropped because the caller has left, the settlement needs a task of its own:
    /// `tokio::spawn(receipt.settle(actual))`. One that was polled continues if its future is dropped.
    ///
    /// # Errors
    ///
    /// If a store fails; its charges may be settled or not. Those in other stores are settled, and the first error is
    /// returned. The settlement is not repeated. And, of the kind [`Invalid`](crate::store::ErrorKind::Invalid), if policies were charged
    /// different costs, such as a request and its tokens, unless the actual cost is 0: then all stays as it was.
    pub async fn settle(self, actual: u64) -> Result<(), StoreError> {
        if actual > 0 && !self.is_of_one_cost() {
            return Err(StoreError::invalid(
                "the policies of the receipt were charged different costs; settle each by `take_receipt_of(policy)`",
            ));
        }
        let responses = Settlement::new(&self.charges, actual).send();
        drop(self.owed);
        responses.await
    }

    /// Refunds the charges of all policies, each where it was counted.
    ///
    /// A refund removes at most what still counts, and nothing once the charge has expired. Tokens of a
    /// [`TokenBucket`](crate::TokenBucket#refunds) that have been restored meanwhile are not refunded a second time. It does not
    /// remove later charges, with one exception: algorithms that store only numbers cannot distinguish charges, so a refund after
    /// a [`reset`](crate::Limiter::reset), or after Redis has lost data, may remove later ones.
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(1)));
    ///
    /// let decision = mails.check("42").await?;
    /// assert_eq!(mails.peek("42").await?.remaining(), 0);
    ///
    /// // The mail could not be sent.
    /// decision.take_receipt().refund().await?;
    /// assert_eq!(mails.peek("42").await?.remaining(), 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If a store fails; its charges may be refunded or not. Those in other stores are refunded, and the first error is
    /// returned. The refund is not repeated.
    pub async fn refund(self) -> Result<(), StoreError> {
        self.settle(0).await
    }

    /// Whether the same was charged for all policies. Nested layers may have charged parts of it.
    fn is_of_one_cost(&self) -> bool {
        let charged = |charge: &PolicyDecision| {
            let same = self.charges.iter().filter(|other| other.same_count(charge));
            same.fold(0, |sum: u64, other| sum.saturating_add(other.charge.cost()))
        };
        let Some((first, others)) = self.charges.split_first() else {
            return true;
        };
        let is_alike = |other: &PolicyDecision| other.name() == first.name() || charged(other) == charged(first);
        others.iter().all(is_alike)
    }
}

/// Receipts.
impl Decision {
    /// Takes the receipt of the charges, to [settle](Receipt::settle) or [refund](Receipt::refund) them.
    ///
    /// There is one receipt for a decision and all its clones; it is [empty](Receipt::is_empty) if it was taken, or if nothing
    /// was charged to an admitted request. Policies whose [own receipt](Self::take_receipt_of) was taken are not in it.
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let limiter = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(1)));
    ///
    /// let admitted = limiter.check("42").await?;
    /// assert!(!admitted.take_receipt().is_empty());
    /// assert!(admitted.clone().take_receipt().is_empty());
    ///
    /// let denied = limiter.check("42").await?;
    /// assert!(denied.take_receipt().is_empty());
    /// # Ok(())
    /// # }
    /// ```
    pub fn take_receipt(&self) -> Receipt {
        self.receipt_of(|_| true)
    }

    /// Takes the receipt of the policy of this name, and leaves those of the others.
    ///
    /// It is empty if it was taken, or if nothing was charged to such a policy. If no policy that could apply to the request has the
    /// name, a warning with those that there are is logged once for each layer or limiter.
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let store = MemoryStore::new();
    /// let requests = Limiter::new(store.clone(), Policy::new("requests", SlidingLog::per_minute(60)));
    /// let tokens = Limiter::new(store.clone(), Policy::new("tokens", SlidingLog::per_minute(1_000)));
    /// let both = Limiter::new(store, [
    ///     Policy::new("requests", SlidingLog::per_minute(60)),
    ///     Policy::new("tokens", SlidingLog::per_minute(1_000)).cost(300),
    /// ]);
    ///
    /// let decision = both.check("42").await?;
    /// decision.take_receipt_of("tokens").settle(120).await?;
    /// assert_eq!(tokens.peek("42").await?.remaining(), 880);
    /// assert_eq!(requests.peek("42").await?.remaining(), 59);
    /// # Ok(())
    /// # }
    /// ```
    pub fn take_receipt_of(&self, policy: &str) -> Receipt {
        let receipt = self.receipt_of(|charged| charged.name() == policy);
        if receipt.is_empty() {
            self.warn_unless_known(policy);
        }
        receipt
    }

    /// Logs that no policy has this name, unless one of a layer or limiter that has decided has it.
    fn warn_unless_known(&self, name: &str) {
        let contexts = || self.policies().map(|policy| &policy.context);
        let Some(last) = contexts().last() else { return };
        let is_known = contexts()
            .flat_map(|context| context.names())
            .any(|known| known == name);
        if !is_known && !last.warned_of_receipt.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                policy = name,
                policies = ?last.names().collect::<Vec<_>>(),
                "the receipt of an unknown policy is empty: nothing is settled or refunded"
            );
        }
    }

    fn receipt_of(&self, select: impl Fn(&PolicyDecision) -> bool) -> Receipt {
        let mut charges = Vec::new();
        self.for_each_layer(&mut |layer| {
            let taken = layer
                .policies()
                .filter(|policy| select(policy) && policy.receipt.take());
            charges.extend(taken.cloned());
        });
        Receipt::new(charges)
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let policies = self.charges.iter().map(PolicyDecision::name);
        f.debug_list().entries(policies).finish()
    }
}

/// What is refunded or charged after a decision, where the policies were counted.
#[derive(Default)]
pub(crate) struct Settlement(SmallVec<[Adjustment; 1]>);

/// A refund or a charge of a cost.
struct Adjustment {
    policy: PolicyDecision,
    operation: Operation,
    charge: Charge,
}

impl PolicyDecision {
    /// Whether nested layers have charged both to one key of one policy.
    fn same_count(&self, other: &Self) -> bool {
        let is_one_count = self.counts_as(other.named(), other.policy());
        is_one_count && self.charge.key == other.charge.key && self.context.store_id() == other.context.store_id()
    }
}

impl Settlement {
    /// Replaces what was charged to each count by its actual cost.
    pub(super) fn new(charges: &[PolicyDecision], actual: u64) -> Self {
        let actual = actual.min(MAX_QUOTA);
        // Nested layers may have charged parts of one cost, of which the first ones are kept.
        let mut settlement = Self::default();
        for (position, charge) in charges.iter().enumerate() {
            let (earlier, later) = (&charges[..position], &charges[position + 1..]);
            let same = earlier.iter().filter(|other| other.same_count(charge));
            let before = same.fold(0, |sum: u64, other| sum.saturating_add(other.charge.cost()));
            let left = actual.saturating_sub(before);
            let last = !later.iter().any(|other| other.same_count(charge));
            settlement.replace(charge, if last { left } else { left.min(charge.charge.cost()) });
        }
        settlement
    }

    /// Refunds what was charged to these policies, unless their receipts were taken.
    pub(crate) fn refunding<'a>(policies: impl IntoIterator<Item = &'a PolicyDecision>) -> Self {
        let mut settlement = Self::default();
        for policy in policies {
            if policy.receipt.take() {
                settlement.replace(policy, 0);
            }
        }
        settlement
    }

    /// Replaces the cost that was charged to a policy.
    fn replace(&mut self, policy: &PolicyDecision, actual: u64) {
        let (cost, counted) = (policy.charge.cost(), policy.counted().cost());
        if let Some(account) = &policy.account {
            account.replace(cost, actual);
        }
        // A share of the limit counts less than the cost, if that is above it.
        let counts = actual.min(counted) + actual.saturating_sub(cost);
        let admitted_at = policy.decided_at;
        match counted.checked_sub(counts) {
            Some(0) => {}
            Some(refund) => self.push(policy, Operation::Refund { admitted_at }, refund, counts),
            None => self.push(policy, Operation::Charge, counts - counted, 0),
        }
    }

    fn push(&mut self, policy: &PolicyDecision, operation: Operation, cost: u64, kept: u64) {
        let mut charge = policy.counted().after_check(cost).keeping(kept);
        if policy.local.is_none() {
            charge.limit = newest_limit(policy);
        }
        self.0.push(Adjustment {
            policy: policy.clone(),
            operation,
            charge,
        });
    }

    /// Sends the adjustments, those of one store that follow one another together.
    pub(crate) fn send(&self) -> Responses {
        let mut responses = Responses::default();
        for together in self.0.chunk_by(|one, next| one.target() == next.target()) {
            let policy = &together[0].policy;
            let requests = together
                .iter()
                .map(|adjustment| StoreRequest::new(adjustment.operation, [&adjustment.charge]));
            let requests: SmallVec<[StoreRequest<'_>; 1]> = requests.collect();
            let mut owed = policy.context.outstanding.owe(OwedKind::Settlement);
            owed.count_if_lost(policy.context.lost.clone());
            responses.push(policy.store().decide(&requests), owed);
        }
        responses
    }
}

/// The limit of a policy that follows a file may have changed since the charge. Counts of another shape are not those that it
/// was charged to.
fn newest_limit(policy: &PolicyDecision) -> Arc<NamedLimit> {
    let (context, charged) = (policy.policy(), policy.named());
    // One that was chosen for the request stays.
    let file = context.file.as_ref().filter(|_| Arc::ptr_eq(charged, &context.limit));
    let newest = file.and_then(|file| file.newest_limit());
    let newest = newest.filter(|newest| newest.has_counts_of(charged));
    newest.unwrap_or_else(|| charged.clone())
}

impl Adjustment {
    fn target(&self) -> (Option<StoreId>, bool) {
        (self.policy.context.store_id(), self.policy.local.is_some())
    }
}

/// Whether a policy was charged, and its receipt is not taken. A clone has no receipt.
#[derive(Default)]
pub(crate) struct Untaken(AtomicBool);

impl Untaken {
    pub(super) fn new(charged: bool) -> Self {
        Self(AtomicBool::new(charged))
    }

    pub(super) fn is_untaken(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns whether this is the first call for a charged policy.
    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Clone for Untaken {
    fn clone(&self) -> Self {
        Self::default()
    }
}

#[cfg(test)]
#[cfg(feature = "loom")]
mod threads {
    use loom::{model, sync::Arc, thread::spawn};

    use super::*;

    #[test]
    fn one_of_several_threads_takes_a_receipt() {
        model(|| {
            let untaken = Arc::new(Untaken::new(true));
            let thread = spawn({
                let untaken = untaken.clone();
                move || untaken.take()
            });
            let own = untaken.take();
            assert!(own ^ thread.join().expect("no panic"));
        });
    }
}
