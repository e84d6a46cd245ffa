//! Limits without HTTP: checks, waits and bans by code of the application.

mod acquire;
mod exceptions;
mod of_layer;
mod request;
mod undecided;

use std::sync::Arc;

use self::undecided::all_counts;
pub use self::{acquire::AcquireError, request::LimiterRequest};
use crate::{
    ConfigError, Decision, Headers, IntoPolicies, Key, Policy, Usage,
    decide::{self, CheckContext},
    error::or_panic,
    http::{Presentation, response::ResponseFormat},
    observe::{Observer, notify},
    policy::{PlanChoice, PolicySet, validate_for_limiter},
    store::{ErrorKind, Operation, Store, StoreError},
};

/// A rate limiter without HTTP: for a job, a mail sender or a GraphQL resolver.
///
/// It shares its counts with all limiters and layers that have the same store and policy name. All policies count under the
/// key that a method is given, unless a [`request`](Self::request) has others; the keys of the policies are used by
/// [`request_of`](Self::request_of) alone.
///
/// ```
/// use tower_quota::{Key, Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_quota::store::StoreError> {
/// let codes = Limiter::new(MemoryStore::new(), Policy::new("sms-codes", SlidingLog::per_hour(1)));
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
    pub(crate) policies: PolicySet,
    /// Whether the policies are those of a layer, which have keys of requests.
    has_extractors: bool,
    on_decision: Observer<Decision>,
    on_failure: Observer<StoreError>,
}

/// Constructors.
impl Limiter {
    /// A limiter that counts in this store for one policy, or for several that are decided together.
    ///
    /// Of several, a request is counted by all or, if one denies it, by none. An empty list, such as that of
    /// `Limiter::new::<()>(store, [])`, admits everything. [`request`](Self::request) gives single policies keys of their own, such as
    /// an account and an address.
    ///
    /// # Panics
    ///
    /// If two policies have the same name, [`Plans`](crate::Plans) do not fit together, one is not [valid](Policy::validate), or one has
    /// a setting that needs an HTTP request: [`Policy::with_limit_fn`](crate::Policy::with_limit_fn), [`cost_fn`](Policy::cost_fn),
    /// [`apply_if`](Policy::apply_if), [`refund_if`](Policy::refund_if), [`wait_up_to_fn`](Policy::wait_up_to_fn), [`fair_by`](Policy::fair_by),
    /// [`priority_fn`](Policy::priority_fn), [`learn_from_responses`](Policy::learn_from_responses), or `plans`, `routes` or
    /// `methods` in its file. [`try_new`](Self::try_new) returns an error instead, and also one where this logs an error: for a
    /// name that has another limit elsewhere on the store.
    #[track_caller]
    pub fn new<K>(store: impl Store, policies: impl IntoPolicies<K>) -> Self {
        let limiter = or_panic(Self::build(store, policies));
        limiter.policies.newest().context.log_conflict();
        limiter
    }

    /// A limiter that counts in this store, or the reason why the policies do not fit together.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// let mails = || Policy::new("mails", SlidingLog::per_hour(3));
    /// assert!(Limiter::try_new(MemoryStore::new(), mails()).is_ok());
    /// assert!(Limiter::try_new(MemoryStore::new(), [mails(), mails()]).is_err());
    ///
    /// let error = Limiter::try_new(MemoryStore::new(), mails().cost_fn(|_| 2)).unwrap_err();
    /// assert!(error.to_string().contains("use `.cost(..)`"));
    /// ```
    ///
    /// # Errors
    ///
    /// For the policies for which [`new`](Self::new) panics; the error names what to use in place of such a setting. And if another
    /// layer or limiter on the store has one of the names with another limit, which `new` logs as an error.
    pub fn try_new<K>(store: impl Store, policies: impl IntoPolicies<K>) -> Result<Self, ConfigError> {
        let limiter = Self::build(store, policies)?;
        limiter.policies.newest().context.refuse_conflict()?;
        Ok(limiter)
    }

    fn build<K>(store: impl Store, policies: impl IntoPolicies<K>) -> Result<Self, ConfigError> {
        let policies = policies.into_policies().into_iter().map(Policy::for_limiter);
        Ok(Self {
            policies: PolicySet::new(store, policies.collect(), validate_for_limiter)?,
            has_extractors: false,
            on_decision: None,
            on_failure: None,
        })
    }
}

/// The path of an operation.
impl Limiter {
    /// Notifies the callbacks.
    fn observe(&self, operation: Operation, decision: Result<Decision, StoreError>) -> Result<Decision, StoreError> {
        let failure = decision.as_ref().map_or_else(Some, Decision::store_error);
        let failure = failure.filter(|error| error.kind() != ErrorKind::Invalid);
        failure.inspect(|error| notify(&self.on_failure, error));
        let decision = decision?;
        if operation.counts() && !decision.as_slice().is_empty() {
            notify(&self.on_decision, &decision);
        }
        Ok(decision)
    }
}

#[cold]
fn unknown(policy: &str, context: &CheckContext) -> StoreError {
    let names = context.names().collect::<Vec<_>>().join("`, `");
    StoreError::invalid(format!("the limiter has no policy `{policy}`; it has `{names}`"))
}

#[cold]
fn unknown_plan(plan: &str, plans: Option<&PlanChoice>) -> StoreError {
    let known = plans.map_or("no plans".to_owned(), PlanChoice::list);
    StoreError::invalid(format!("the limiter has no plan `{plan}`; it has {known}"))
}

/// Operations.
///
/// A string is a key; [`Key::header`] and its siblings make the keys that a layer makes. While the store fails, the policies'
/// [`FailureMode`](crate::FailureMode)s apply to all of these but resets: by default this process counts, and
/// [`Decision::store_error`] returns the failure.
///
/// With a [`RedisStore`](crate::RedisStore), what a future has sent before it is dropped, such as by a timeout around it, may be
/// counted or changed all the same; only [`acquire`](Self::acquire) gives back what was counted.
impl Limiter {
    /// Counts the cost of the policies if it fits; the default cost is 1. A [`request`](Self::request) has other costs.
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn check(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        self.request(key).check().await
    }

    /// Returns what [`check`](Self::check) would return, and counts nothing.
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(3)));
    /// mails.check("42").await?;
    /// assert_eq!(mails.peek("42").await?.remaining(), 2);
    /// assert_eq!(mails.peek("42").await?.remaining(), 2);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn peek(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        self.request(key).peek().await
    }

    /// Removes all counts of the key in all [plans](crate::Plans), and its [bans](crate::Policy::ban).
    ///
    /// While an [override](Self::override_limit) applies, these are those of the limit of the policy too. Counts of a policy whose own
    /// limit is now [`Limit::Unlimited`](crate::Limit::Unlimited) or [`Limit::DenyAll`](crate::Limit::DenyAll) are not removed; they expire.
    /// Of limits that are [chosen](crate::Policy::with_limit_fn) for requests, those that were chosen in this process are known, and
    /// those of the plans of a file.
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let login = Limiter::new(MemoryStore::new(), Policy::new("login", SlidingLog::per_hour(1)));
    /// login.check("42").await?;
    /// assert!(!login.check("42").await?.is_allowed());
    /// // The user has reset the password.
    /// login.reset("42").await?;
    /// assert!(login.check("42").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store fails. The counts of this process are removed then too. And, with the kind [`Invalid`](ErrorKind::Invalid):
    ///
    /// * if the limiter is [that of a layer](Self::from), and no request has the key, such as a text or a number; then nothing is
    ///   removed;
    /// * if no limit of a policy was chosen in this process yet; then all else is removed.
    pub async fn reset(&self, key: impl Into<Key>) -> Result<(), StoreError> {
        let mut key = key.into();
        self.refuse_useless_key(&key, |_| true)?;
        key.bound();
        let (undecided, unknown) = {
            let basis = self.policies.newest();
            let unknown = basis.policies.iter().find(|policy| policy.known_limits().is_empty());
            (all_counts(&basis, &key), unknown.map(|policy| policy.name().to_owned()))
        };
        let reset = decide::begin(Operation::Reset, undecided).decided().await;
        self.observe(Operation::Reset, reset).map(drop)?;
        match unknown {
            None => Ok(()),
            Some(policy) => Err(StoreError::invalid(format!(
                "no limit of the policy `{policy}` is known, since no request has chosen one in this process yet, so its counts are not \
                 reset; bans and the counts of other policies are"
            ))),
        }
    }
}

impl_debug!(Limiter, limiter => policies: limiter.policies.newest().policies);

/// Responses of handlers.
///
/// They apply to [`Decision::headers`](crate::Decision::headers) and [`Decision::require`](crate::Decision::require).
impl Limiter {
    /// Sets the format of responses to requests that the limiter denies.
    ///
    /// The default is that of a [layer](crate::RateLimitLayer::format). See
    /// [`Denied::response_to`](crate::Denied::response_to) for an example.
    pub fn format(mut self, format: impl ResponseFormat) -> Self {
        self.policies
            .change_context(|context| Presentation::change(context, |shown| shown.format = Arc::new(format)));
        self
    }

    /// Sets the rate limit fields of decisions.
    ///
    /// The default is [`Headers::Draft08`].
    ///
    /// ```
    /// use tower_quota::{Headers, Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = Policy::new("mails", SlidingLog::per_hour(3));
    /// let mails = Limiter::new(MemoryStore::new(), mails).headers(Headers::Draft06);
    ///
    /// assert_eq!(mails.check("42").await?.headers()["ratelimit-remaining"], "2");
    /// # Ok(())
    /// # }
    /// ```
    pub fn headers(mut self, headers: Headers) -> Self {
        self.policies
            .change_context(|context| Presentation::change(context, |shown| shown.fields.dialect = headers));
        self
    }
}

/// Callbacks.
impl Limiter {
    /// Observes each decision of [`check`](Self::check) and [`acquire`](Self::acquire), whose admissions are observed after the
    /// wait, and of the same methods of a [`request`](Self::request), [`charge`](LimiterRequest::charge) and
    /// [`take_up_to`](LimiterRequest::take_up_to).
    ///
    /// [`peek`](Self::peek) is not observed. There is no call either if no policy applies (the cost is 0, or the limit is
    /// [`Limit::Unlimited`](crate::Limit::Unlimited)), or if the store fails and nothing was counted ([`FailureMode::Open`](crate::FailureMode::Open) and
    /// [`FailureMode::Closed`](crate::FailureMode::Closed)). The callback runs on the path of the check, so it must be quick, and a
    /// panic in it is a panic of the check. Setting it again replaces it. By default none is set.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// static DENIED: AtomicU64 = AtomicU64::new(0);
    ///
    /// let mails = Policy::new("mails", SlidingLog::per_hour(1));
    /// let limiter = Limiter::new(MemoryStore::new(), mails).on_decision(|decision| {
    ///     DENIED.fetch_add(u64::from(!decision.is_allowed()), Ordering::Relaxed);
    /// });
    /// for _ in 0..3 {
    ///     let _ = limiter.check("42").await?;
    /// }
    /// assert_eq!(DENIED.load(Ordering::Relaxed), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_decision(mut self, observe: impl Fn(&Decision) + Send + Sync + 'static) -> Self {
        self.on_decision = Some(Arc::new(observe));
        self
    }

    /// Observes what each policy has charged an admitted request in the end, as
    /// [`RateLimitLayer::on_settled`](crate::RateLimitLayer::on_settled), when its [`Decision`] and its [`Receipt`](crate::Receipt)
    /// are dropped. By default none is set; setting it again replaces it.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// static UNITS: AtomicU64 = AtomicU64::new(0);
    ///
    /// let mails = Policy::new("mails", SlidingLog::per_hour(3));
    /// let limiter = Limiter::new(MemoryStore::new(), mails).on_settled(|usage| {
    ///     UNITS.fetch_add(usage.units, Ordering::Relaxed);
    /// });
    /// drop(limiter.check("42").await?); // sent
    /// limiter.check("42").await?.take_receipt().refund().await?; // not sent
    /// assert_eq!(UNITS.load(Ordering::Relaxed), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_settled(mut self, observe: impl Fn(&Usage<'_>) + Send + Sync + 'static) -> Self {
        self.policies
            .change_context(|context| context.on_settled = Some(Arc::new(observe)));
        self
    }

    /// Observes each operation for which the store failed, in every failure mode.
    ///
    /// [`peek`](Self::peek) and [`reset`](Self::reset) are included. The refund of a [`Receipt`](crate::Receipt) returns its
    /// error and is not. The callback runs on the path of the operation, as that of [`on_decision`](Self::on_decision).
    /// Setting it again replaces it. By default none is set.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use tower_quota::{Limiter, Policy, SlidingLog};
    /// use tower_quota::store::{ErrorKind, Store, StoreError, StoreFuture, StoreRequest};
    ///
    /// /// A Redis that is down.
    /// struct Down;
    ///
    /// impl Store for Down {
    ///     fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
    ///         StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "connection refused")))
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), StoreError> {
    /// static FAILURES: AtomicU64 = AtomicU64::new(0);
    ///
    /// let limiter = Limiter::new(Down, Policy::new("mails", SlidingLog::per_hour(1))).on_failure(|error| {
    ///     assert_eq!(error.kind(), ErrorKind::Unreachable);
    ///     FAILURES.fetch_add(1, Ordering::Relaxed);
    /// });
    /// assert!(limiter.check("42").await?.is_allowed()); // counted in this process
    /// assert_eq!(FAILURES.load(Ordering::Relaxed), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_failure(mut self, observe: impl Fn(&StoreError) + Send + Sync + 'static) -> Self {
        self.on_failure = Some(Arc::new(observe));
        self
    }
}
