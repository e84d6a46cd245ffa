use crate::Decision;

/// The permission to continue, of a request that [`Limiter::acquire`](crate::Limiter::acquire) has admitted.
///
/// With a limit of [`Concurrency`](crate::Concurrency) it holds the slots of the request: dropping it, and each clone of its
/// decision, releases them.
///
/// ```
/// use tower_quota::{Concurrency, Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_quota::AcquireError> {
/// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(3)));
/// let permit = mails.acquire("42").await?;
/// assert_eq!(permit.decision().remaining(), 2);
///
/// let exports = Limiter::new(MemoryStore::new(), Policy::new("exports", Concurrency::new(1)));
/// let permit = exports.acquire("42").await?;
/// assert!(exports.acquire("42").await.is_err());
/// drop(permit);
/// assert!(exports.acquire("42").await.is_ok());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "dropping the permit releases its slots"]
pub struct Permit {
    decision: Decision,
}

impl Permit {
    pub(super) fn new(decision: Decision) -> Self {
        Self { decision }
    }

    /// The decision, which is [allowed](Decision::is_allowed). Its numbers are those of the check, before the wait.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }
}
