use crate::Decision;

/// The permission to go on, of a request that [`Limiter::acquire`](crate::Limiter::acquire) has admitted.
///
/// It may be dropped at once, unless a policy limits [`Concurrency`](crate::Concurrency): its slots are released with the permit.
///
/// ```
/// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_quota::AcquireError> {
/// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(3)));
/// let permit = mails.acquire("42").await?;
/// assert_eq!(permit.decision().remaining(), 2);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
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
