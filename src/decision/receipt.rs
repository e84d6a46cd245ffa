use std::fmt;

use smallvec::SmallVec;

use super::settlement::{ChargedPolicy, Settlement};
use crate::store::{Owed, OwedKind, StoreError};

/// The charges of an admitted request, to settle or refund them.
///
/// [`Decision::take_receipt`](crate::Decision::take_receipt) returns it. Dropping it leaves the charges as they are.
///
/// A cost that is not yet known at the check is estimated there and [settled](Self::settle) later: the tokens of a language
/// model, the bytes of a response, the rows of a query.
#[must_use = "a receipt does nothing unless `settle` or `refund` is called"]
pub struct Receipt {
    charges: Vec<ChargedPolicy>,
    owed: SmallVec<[Owed; 1]>,
}

impl Receipt {
    pub(super) fn new(charges: Vec<ChargedPolicy>) -> Self {
        let mut owed: SmallVec<[Owed; 1]> = SmallVec::new();
        for charge in &charges {
            let outstanding = &charge.policy.context.outstanding;
            if !owed.iter().any(|owed| owed.is_to(outstanding)) {
                owed.push(outstanding.owe(OwedKind::Settlement));
            }
        }
        Self { charges, owed }
    }
}

impl Receipt {
    /// Replaces the cost that was charged to each policy by the actual cost, in units of the limits.
    ///
    /// If the actual cost is higher, the difference is charged now, also above the limit; later requests wait for it. If it
    /// is lower, the difference is refunded, as [`refund`](Self::refund) does; 0 refunds everything. Without a settlement
    /// the estimate stays charged.
    ///
    /// Each policy is settled where it was counted: in its store or, if the store failed, in this process. All policies that
    /// were counted in one store are settled at one instant, in one call. To settle one of several policies, take
    /// [its receipt](crate::Decision::take_receipt_of).
    ///
    /// An actual cost of 0 refunds the request. The largest one is 999,999,999,999,999; a larger one counts as that.
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let tokens = Limiter::new(MemoryStore::new(), Policy::new("tokens", SlidingLog::per_minute(1_000)));
    ///
    /// for (actual, remaining) in [(120, 880), (500, 380), (700, 0)] {
    ///     let decision = tokens.check_n("42", 300).await?; // the estimate
    ///     assert!(decision.is_allowed());
    ///     if let Some(receipt) = decision.take_receipt() {
    ///         receipt.settle(actual).await?;
    ///     }
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
    /// returned. The settlement is not repeated.
    pub async fn settle(self, actual: u64) -> Result<(), StoreError> {
        let responses = Settlement::new(self.charges, actual).send();
        drop(self.owed);
        responses.await
    }

    /// Refunds the charges of all policies, each where it was counted.
    ///
    /// A refund removes at most what still counts, and nothing once the charge has expired. Tokens of a
    /// [`TokenBucket`](crate::TokenBucket#refunds) that have been restored meanwhile are not refunded a second time. It does not
    /// remove later charges, with one exception: algorithms that store only numbers cannot distinguish charges, so a refund after
    /// a [`reset`](crate::Limiter::reset) may remove later ones.
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
    /// If a store fails; its charges may be refunded or not. Those in other stores are refunded, and the first error is
    /// returned. The refund is not repeated.
    pub async fn refund(self) -> Result<(), StoreError> {
        self.settle(0).await
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let policies = self.charges.iter().map(|charge| charge.policy.name());
        f.debug_list().entries(policies).finish()
    }
}
