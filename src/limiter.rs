use std::{fmt, sync::Arc};

use crate::{
    ConfigError, Decision, IntoPolicies, Key, PolicyDecision, Receipt,
    check::{Asked, ask, asks, refund},
    decision::CheckContext,
    policy::{self, Policy, Unkeyed, validate_names},
    store::{Operation, Store, StoreError},
};

/// Counts without HTTP: for a job, a mail sender or a GraphQL resolver.
///
/// It shares its counts with every other limiter and layer that has the same store and policy name. All policies count
/// against the key that is given; their own, if they have one, is not used.
///
/// ```
/// use tower_quota::{Key, Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_quota::store::StoreError> {
/// let codes = Limiter::new(MemoryStore::new(), Policy::new("sms-codes", SlidingLog::per_hour(1)));
///
/// // In one form (E.164): each spelling of a number would have a limit of its own.
/// let phone = Key::from("+4930901820");
/// assert!(codes.check(phone.clone()).await?.is_allowed());
/// assert!(!codes.check(phone).await?.is_allowed());
/// assert!(codes.check("+4930901821").await?.is_allowed());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct Limiter {
    policies: Arc<[Policy<Unkeyed>]>,
    context: Arc<CheckContext>,
}

/// Constructors.
impl Limiter {
    /// A limiter that counts for these policies in this store.
    ///
    /// # Panics
    ///
    /// If two policies have the same name, or one computes its cost from a request. [`try_new`](Self::try_new) returns an
    /// error instead.
    #[track_caller]
    pub fn new<K>(store: impl Store, policies: impl IntoPolicies<K>) -> Self {
        match Self::try_new(store, policies) {
            Ok(limiter) => limiter,
            Err(error) => panic!("{error}"),
        }
    }

    /// A limiter that counts for these policies in this store.
    ///
    /// # Errors
    ///
    /// If two policies have the same name, or one computes its cost from a request.
    pub fn try_new<K>(store: impl Store, policies: impl IntoPolicies<K>) -> Result<Self, ConfigError> {
        let policies: Vec<_> = policies.into_policies().into_iter().map(Policy::without_key).collect();
        validate_names(&policies)?;
        if let Some(policy) = policies.iter().find(|policy| policy.price().is_none()) {
            return Err(ConfigError::new(format!(
                "the policy `{}` computes its cost from a request, and a limiter has none; say `.cost(..)`, and `check_n` \
                 for other costs",
                policy.name(),
            )));
        }

        Ok(Self {
            context: Arc::new(policy::context(store, &policies)),
            policies: policies.into(),
        })
    }
}

/// Operations.
///
/// A string is a key; [`Key::header`] and its siblings make the keys that a layer makes. While the store fails, the policies'
/// [`FailureMode`](crate::FailureMode)s apply to all of these but refunds and resets: by default this process counts by itself,
/// and [`Decision::store_error`] returns the failure. An error is returned if a policy is
/// [`Closed`](crate::FailureMode::Closed).
impl Limiter {
    /// Counts one use by `key` if there is room for it.
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn check(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        self.perform(Operation::Check, key.into(), None).await
    }

    /// Counts a use that costs `cost`, whatever the policies say, if there is room for it.
    ///
    /// A cost above the limit is denied with [`Denial::CostAboveLimit`](crate::Denial::CostAboveLimit), without a call of the
    /// store. With a cost of 0 all is allowed and nothing counted.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Denial, Limiter, MemoryStore, Policy, TokenBucket};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let rows = Limiter::new(MemoryStore::new(), Policy::new("rows", TokenBucket::per_minute(1_000)));
    ///
    /// assert_eq!(rows.check_n("42", 600).await?.remaining(), 400);
    /// assert_eq!(rows.check_n("42", 600).await?.retry_after(), Some(Duration::from_secs(12)));
    ///
    /// let never = rows.check_n("42", 2_000).await?;
    /// assert_eq!(never.retry_after(), None);
    /// assert_eq!(never.policies().next().and_then(|policy| policy.denial()), Some(Denial::CostAboveLimit));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn check_n(&self, key: impl Into<Key>, cost: u64) -> Result<Decision, StoreError> {
        self.perform(Operation::Check, key.into(), Some(cost)).await
    }

    /// Counts a use that has happened, whether there is room for it or not; later ones pay.
    ///
    /// The decision is always allowed. A cost above the limit counts too.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_quota::{Limiter, MemoryStore, Policy, TokenBucket};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let tokens = Limiter::new(MemoryStore::new(), Policy::new("tokens", TokenBucket::per_second(10)));
    ///
    /// // The answer turned out to be three times as long as the limit.
    /// assert!(tokens.charge("42", 30).await?.is_allowed());
    ///
    /// // 21 must come back before one more fits.
    /// assert_eq!(tokens.check("42").await?.retry_after(), Some(Duration::from_millis(2_100)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn charge(&self, key: impl Into<Key>, cost: u64) -> Result<Decision, StoreError> {
        self.perform(Operation::Charge, key.into(), Some(cost)).await
    }

    /// Says what [`check`](Self::check) would, and counts nothing.
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn peek(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        self.perform(Operation::Peek, key.into(), None).await
    }

    /// Forgets all that was counted for `key`.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn reset(&self, key: impl Into<Key>) -> Result<(), StoreError> {
        self.perform(Operation::Reset, key.into(), None).await.map(drop)
    }

    /// Gives back what an admitted request was charged, by whatever layer or limiter, in the store where it was charged.
    ///
    /// It gives back at most what still counts, to each policy its own, and nothing once the charge has expired. Tokens of a
    /// [`TokenBucket`](crate::TokenBucket#refunds) that have come back already are not given back a second time. Algorithms
    /// that keep only numbers cannot tell charges apart: with them a refund after a [`reset`](Self::reset) may give back
    /// what was charged since. A receipt is good for one refund, and one that fails is not tried again.
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
    /// if let Some(receipt) = decision.receipt() {
    ///     mails.refund(receipt).await?;
    /// }
    /// assert_eq!(mails.peek("42").await?.remaining(), 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store does not answer; the charge may stay or not.
    pub async fn refund(&self, receipt: Receipt) -> Result<(), StoreError> {
        for decision in receipt.charged {
            for policy in decision.policies() {
                refund(&decision, policy).await?;
            }
        }
        Ok(())
    }

    async fn perform(&self, operation: Operation, mut key: Key, cost: Option<u64>) -> Result<Decision, StoreError> {
        key.bound();
        let undecided = self.policies.iter().enumerate().map(|(position, policy)| {
            let cost = cost.or(policy.price()).unwrap_or(1);
            PolicyDecision::undecided(self.context.clone(), position, key.clone(), cost)
        });
        let undecided = undecided.filter(|policy| policy.applies() && (policy.counts() || asks(operation)));

        match ask(operation, Decision::new(true, undecided.collect())) {
            Asked::Decided(decision) => decision,
            Asked::Pending(decision) => decision.await,
        }
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("policies", &self.policies)
            .finish_non_exhaustive()
    }
}
