use std::{
    fmt, mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use smallvec::SmallVec;

use crate::{
    ConfigError, Decision, IntoPolicies, Key,
    decision::PolicyDecision,
    policy::{Policy, Quota, Unkeyed, validate_names},
    store::{Answer, Charge, ErrorKind, Operation, Reply, Request, Store, StoreError, Verdict},
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
    store: Arc<dyn Store>,
    policies: Arc<[Policy<Unkeyed>]>,
}

/// Constructors.
impl Limiter {
    /// A limiter that counts for these policies in this store.
    ///
    /// # Panics
    ///
    /// If two policies have the same name. [`try_new`](Self::try_new) returns an error instead.
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
    /// If two policies have the same name.
    pub fn try_new<K>(store: impl Store, policies: impl IntoPolicies<K>) -> Result<Self, ConfigError> {
        let policies: Vec<_> = policies.into_policies().into_iter().map(Policy::without_key).collect();
        validate_names(&policies)?;
        Ok(Self {
            store: Arc::new(store),
            policies: policies.into(),
        })
    }
}

/// Operations.
impl Limiter {
    /// Counts one use by `key` if there is room for it.
    ///
    /// A string is a key; [`Key::header`] and its siblings make the keys that a layer makes.
    ///
    /// # Errors
    ///
    /// If the store does not answer. That is no decision: whether to go on is up to you.
    pub async fn check(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        let key = key.into();
        let claims = self
            .policies
            .iter()
            .map(|policy| Claim::new(policy, key.clone()))
            .collect();

        match ask(&*self.store, Operation::Check, claims) {
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

/// What one policy is asked for one key.
pub(crate) struct Claim {
    quota: Arc<Quota>,
    key: Key,
    cost: u64,
}

impl Claim {
    pub(crate) fn new<K>(policy: &Policy<K>, key: Key) -> Self {
        Self {
            quota: policy.quota().clone(),
            key: key.bounded(),
            cost: policy.price(),
        }
    }

    /// Whether an outer layer has counted it.
    pub(crate) fn is_in(&self, decision: &Decision) -> bool {
        decision
            .policies()
            .any(|policy| policy.name() == self.quota.name && policy.key == self.key)
    }

    fn charge(&self) -> Charge<'_> {
        Charge::new(&self.quota.name, &self.quota.limit, &self.key, self.cost)
    }

    /// No wait makes room for more than the limit.
    fn is_hopeless(&self) -> bool {
        self.cost > self.quota.limit.quota()
    }

    fn decided(self, verdict: Verdict) -> PolicyDecision {
        PolicyDecision {
            denies: verdict.retry_after.is_some(),
            quota: self.quota,
            key: self.key,
            remaining: verdict.remaining,
            retry_after: verdict.retry_after,
            reset_after: verdict.reset_after,
        }
    }

    /// Denied without asking the store, so the rest is not known.
    fn denied_for_good(self) -> PolicyDecision {
        PolicyDecision {
            denies: true,
            quota: self.quota,
            key: self.key,
            remaining: 0,
            retry_after: None,
            reset_after: Duration::ZERO,
        }
    }
}

pub(crate) type Claims = SmallVec<[Claim; 1]>;

/// What became of a question to the store.
pub(crate) enum Asked {
    Decided(Result<Decision, StoreError>),
    Pending(Pending),
}

/// Asks the store about all claims at once.
pub(crate) fn ask(store: &dyn Store, operation: Operation, claims: Claims) -> Asked {
    if claims.is_empty() {
        return Asked::Decided(Ok(Decision::new(true, Duration::ZERO, [])));
    }
    if claims.iter().any(Claim::is_hopeless) {
        let hopeless = claims
            .into_iter()
            .filter(Claim::is_hopeless)
            .map(Claim::denied_for_good);
        return Asked::Decided(Ok(Decision::new(false, Duration::ZERO, hopeless)));
    }

    let reply = {
        let charges: SmallVec<[Charge<'_>; 4]> = claims.iter().map(Claim::charge).collect();
        store.decide(&[Request::new(operation, &charges)])
    };
    match reply {
        Reply::Ready(answer) => Asked::Decided(conclude(answer, claims)),
        Reply::Pending(answer) => Asked::Pending(Pending { answer, claims }),
    }
}

/// A decision on its way.
pub(crate) struct Pending {
    answer: Pin<Box<dyn Future<Output = Result<Answer, StoreError>> + Send>>,
    claims: Claims,
}

impl Future for Pending {
    type Output = Result<Decision, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(self.answer.as_mut().poll(cx));
        Poll::Ready(conclude(answer, mem::take(&mut self.claims)))
    }
}

fn conclude(answer: Result<Answer, StoreError>, claims: Claims) -> Result<Decision, StoreError> {
    let answer = answer?;
    let outcome = match answer.outcomes.into_iter().next() {
        Some(outcome) if outcome.verdicts.len() == claims.len() => outcome,
        _ => {
            return Err(StoreError::new(
                ErrorKind::Protocol,
                "the store answered another question",
            ));
        }
    };

    let policies = claims
        .into_iter()
        .zip(outcome.verdicts)
        .map(|(claim, verdict)| claim.decided(verdict));
    Ok(Decision::new(outcome.allowed, answer.server_time, policies))
}
