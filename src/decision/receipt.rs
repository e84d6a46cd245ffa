use std::fmt;

use super::policy::PolicyDecision;
use crate::store::{LocalCharge, Operation, StoreError, StoreFuture, StoreRequest};

/// The charges of an admitted request, to refund them.
///
/// [`Decision::take_receipt`](crate::Decision::take_receipt) returns it. Dropping it leaves the charges as they are.
#[must_use = "a receipt does nothing unless `refund` is called"]
pub struct Receipt {
    pub(super) charges: Vec<Refundable>,
}

/// A charge, and where it was counted.
pub(super) struct Refundable {
    pub(super) policy: PolicyDecision,
    /// Whether this process counted it, since the store failed.
    pub(super) locally: bool,
}

impl Receipt {
    /// Refunds the charges of all policies, each in the store that counted it.
    ///
    /// A refund removes at most what still counts, and nothing once the charge has expired. It does not remove later
    /// charges, with two exceptions: tokens of a [`TokenBucket`](crate::TokenBucket#refunds) that were restored meanwhile are
    /// not refunded a second time, and algorithms that store only numbers cannot distinguish charges, so that a refund after
    /// a [`reset`](crate::Limiter::reset) may remove what was charged since.
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
    /// if let Some(receipt) = decision.take_receipt() {
    ///     receipt.refund().await?;
    /// }
    /// assert_eq!(mails.peek("42").await?.remaining(), 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If a store fails; its charge may be refunded or not. The charges in other stores are refunded, and the first error is
    /// returned. The refund cannot be repeated.
    pub async fn refund(self) -> Result<(), StoreError> {
        let mut refunded = Ok(());
        for charge in &self.charges {
            let response = charge.refund().await;
            refunded = refunded.and(response.map(drop));
        }
        refunded
    }
}

impl Refundable {
    fn refund(&self) -> StoreFuture {
        let (policy, charge) = (&self.policy, self.policy.charge());
        let operation = Operation::Refund {
            admitted_at: policy.decided_at,
        };
        let local = self
            .locally
            .then(|| LocalCharge::new(policy.failure_mode(), operation, &charge));
        match local.flatten() {
            Some(local) => policy.context.failover.decide(operation, &[local.charge(&charge)]),
            None => policy.context.store.decide(&[StoreRequest::new(operation, &[charge])]),
        }
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let policies = self.charges.iter().map(|charge| charge.policy.name());
        f.debug_list().entries(policies).finish()
    }
}
