use super::Decision;
use crate::store::StoreError;

/// Settling and refunding at once, as handlers do. A [receipt](Decision::take_receipt) is for later, such as the end of a
/// stream, and for one of several policies.
impl Decision {
    /// Replaces the cost that was charged to each policy by the actual cost, in units of the limits.
    ///
    /// It is [`Receipt::settle`](crate::Receipt::settle) of the receipt that [`take_receipt`](Self::take_receipt) returns, and
    /// nothing if there is none: if nothing was charged, or if the receipt was taken.
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let rows = Limiter::new(MemoryStore::new(), Policy::new("rows", SlidingLog::per_minute(1_000)));
    ///
    /// let decision = rows.check_n("42", 300).await?; // the estimate
    /// assert!(decision.is_allowed());
    /// decision.settle(120).await?;
    /// assert_eq!(rows.peek("42").await?.remaining(), 880);
    ///
    /// decision.settle(500).await?; // it was settled already
    /// assert_eq!(rows.peek("42").await?.remaining(), 880);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If a store fails, as for [`Receipt::settle`](crate::Receipt::settle).
    pub async fn settle(&self, actual: u64) -> Result<(), StoreError> {
        match self.take_receipt() {
            Some(receipt) => receipt.settle(actual).await,
            None => Ok(()),
        }
    }

    /// Refunds the charges of all policies.
    ///
    /// It is [`Receipt::refund`](crate::Receipt::refund) of the receipt that [`take_receipt`](Self::take_receipt) returns, and
    /// nothing if there is none: if nothing was charged, or if the receipt was taken.
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
    /// decision.refund().await?;
    /// assert_eq!(mails.peek("42").await?.remaining(), 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If a store fails, as for [`Receipt::refund`](crate::Receipt::refund).
    pub async fn refund(&self) -> Result<(), StoreError> {
        self.settle(0).await
    }
}
