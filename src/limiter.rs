use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use smallvec::SmallVec;

use crate::{
    ConfigError, Decision, Denial, IntoPolicies, Key, Limit, PolicyDecision, Receipt,
    policy::{Policy, Terms, Unkeyed, validate_names},
    store::{Answer, Charge, ErrorKind, Operation, Reply, Request, Store, StoreError},
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
/// let phone = Key::from("+49 30 901820");
/// assert!(codes.check(phone.clone()).await?.is_allowed());
/// assert!(!codes.check(phone).await?.is_allowed());
/// assert!(codes.check("+49 30 901821").await?.is_allowed());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct Limiter {
    policies: Arc<[Policy<Unkeyed>]>,
    terms: Arc<Terms>,
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
            terms: Arc::new(Terms::new(store, &policies)),
            policies: policies.into(),
        })
    }
}

/// Operations.
///
/// A string is a key; [`Key::header`] and its siblings make the keys that a layer makes. All of these return an error if
/// the store does not answer. That is no decision: whether to go on is up to you.
impl Limiter {
    /// Counts one use by `key` if there is room for it.
    ///
    /// # Errors
    ///
    /// If the store does not answer.
    pub async fn check(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        self.perform(Operation::Check, key.into(), None).await
    }

    /// Counts a use that costs `cost`, whatever the policies say, if there is room for it.
    ///
    /// A cost above the limit is denied with [`Denial::CostAboveLimit`], without asking the store; with a cost of 0 all is
    /// allowed and nothing counted.
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
    /// If the store does not answer.
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
    /// If the store does not answer.
    pub async fn charge(&self, key: impl Into<Key>, cost: u64) -> Result<Decision, StoreError> {
        self.perform(Operation::Charge, key.into(), Some(cost)).await
    }

    /// Says what [`check`](Self::check) would, and counts nothing.
    ///
    /// # Errors
    ///
    /// If the store does not answer.
    pub async fn peek(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        self.perform(Operation::Peek, key.into(), None).await
    }

    /// Forgets all that was counted for `key`.
    ///
    /// # Errors
    ///
    /// If the store does not answer.
    pub async fn reset(&self, key: impl Into<Key>) -> Result<(), StoreError> {
        self.perform(Operation::Reset, key.into(), None).await.map(drop)
    }

    /// Gives back what an admitted request was charged, by whatever layer or limiter, in the store where it was charged.
    ///
    /// It gives back at most what still counts, to each policy its own, and nothing once the charge has expired. Algorithms
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
                let refund = Operation::Refund {
                    admitted_at: policy.decided_at,
                };
                // The receipt knows better than this limiter where the request was charged.
                let store = decision.store_of(policy);
                store.decide(&[Request::new(refund, &[policy.charge()])]).await?;
            }
        }
        Ok(())
    }

    async fn perform(&self, operation: Operation, mut key: Key, cost: Option<u64>) -> Result<Decision, StoreError> {
        key.bound();
        let undecided = self.policies.iter().enumerate().map(|(position, policy)| {
            let cost = cost.or(policy.price()).unwrap_or(1);
            PolicyDecision::undecided(self.terms.clone(), position, key.clone(), cost)
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

impl PolicyDecision {
    fn charge(&self) -> Charge<'_> {
        Charge::on(self.quota(), &self.key, self.cost)
    }

    /// Whether there is anything to decide.
    fn applies(&self) -> bool {
        self.cost > 0 && self.quota().limit != Limit::Unlimited
    }

    /// Whether a store holds anything for it.
    fn counts(&self) -> bool {
        self.quota().limit != Limit::DenyAll
    }

    /// Why no wait makes room for it.
    fn hopeless(&self) -> Option<Denial> {
        match &self.quota().limit {
            Limit::DenyAll => Some(Denial::DenyAll),
            limit if self.cost > limit.quota() => Some(Denial::CostAboveLimit),
            _ => None,
        }
    }
}

/// What became of a question to the store.
pub(crate) enum Asked {
    Decided(Result<Decision, StoreError>),
    Pending(Pending),
}

/// A decision on its way.
pub(crate) struct Pending {
    answer: Pin<Box<dyn Future<Output = Result<Answer, StoreError>> + Send>>,
    operation: Operation,
    undecided: Option<Decision>,
}

/// Asks the store about all policies at once, if there are any.
#[inline]
pub(crate) fn ask(operation: Operation, undecided: Decision) -> Asked {
    let policies = undecided.as_slice();
    if asks(operation) && policies.iter().any(|policy| policy.hopeless().is_some()) {
        return Asked::Decided(Ok(deny_hopeless(policies)));
    }

    let reply = match policies {
        [] => return Asked::Decided(Ok(undecided)),
        [policy] => policy
            .terms
            .store
            .decide(&[Request::new(operation, &[policy.charge()])]),
        several => {
            let charges: SmallVec<[Charge<'_>; 4]> = several.iter().map(PolicyDecision::charge).collect();
            several[0].terms.store.decide(&[Request::new(operation, &charges)])
        }
    };
    match reply {
        Reply::Ready(Ok(ref answer)) => Asked::Decided(conclude(answer, operation, undecided)),
        Reply::Ready(Err(error)) => Asked::Decided(Err(error)),
        Reply::Pending(answer) => Asked::Pending(Pending {
            answer,
            operation,
            undecided: Some(undecided),
        }),
    }
}

/// Whether an operation asks for room.
fn asks(operation: Operation) -> bool {
    matches!(operation, Operation::Check | Operation::Peek)
}

/// The denial by the policies that no wait makes room for.
#[cold]
fn deny_hopeless(policies: &[PolicyDecision]) -> Decision {
    // The store is not asked, so what the others would say is not known.
    let denials = policies.iter().filter_map(|policy| {
        let denial = Some(policy.hopeless()?);
        Some(PolicyDecision {
            denial,
            ..policy.clone()
        })
    });
    Decision::new(false, denials.collect())
}

impl Future for Pending {
    type Output = Result<Decision, StoreError>;

    /// # Panics
    ///
    /// If it is polled again after it was ready, like most futures.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(self.answer.as_mut().poll(cx));
        let undecided = self.undecided.take().expect("polled after it was ready");
        Poll::Ready(answer.and_then(|answer| conclude(&answer, self.operation, undecided)))
    }
}

#[inline]
fn conclude(answer: &Answer, operation: Operation, mut undecided: Decision) -> Result<Decision, StoreError> {
    match answer.outcomes.first() {
        Some(outcome) if outcome.verdicts.len() == undecided.as_slice().len() => {
            let charged = outcome.allowed && matches!(operation, Operation::Check | Operation::Charge);
            undecided.settle(answer, outcome, charged);
            Ok(undecided)
        }
        _ => Err(StoreError::new(
            ErrorKind::Protocol,
            "the store answered another question",
        )),
    }
}
