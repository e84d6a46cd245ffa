//! Limits without HTTP: checks, waits and bans by code of the application.

mod acquire;
mod ban;
mod operations;
mod overrides;
mod request;
mod settings;

use std::fmt;

use crate::{
    ConfigError, Decision, IntoPolicies, Limit, Policy, PolicyDecision, check,
    check::Check,
    decision::{Ticket, Undecided},
    observe::{Observer, metrics::PolicyOutcome},
    policy::{Basis, PolicySet, Unkeyed},
    store::{Operation, Store, StoreError, Waiting},
};

pub use self::{
    acquire::{Acquire, AcquireError, Permit},
    ban::BanError,
    request::LimiterRequest,
};

/// A rate limiter without HTTP: for a job, a mail sender or a GraphQL resolver.
///
/// It shares its counts with all limiters and layers that have the same store and policy name. All policies count under the
/// key that a method is given, unless a [`request`](Self::request) has others; the keys of the policies are not used.
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
    pub(crate) policies: PolicySet<Unkeyed>,
    on_decision: Observer<Decision>,
    on_failure: Observer<StoreError>,
}

/// Constructors.
impl Limiter {
    /// A limiter that counts in this store for one policy, or for several that are decided together.
    ///
    /// Of several, a request is counted by all or, if one denies it, by none. An empty list admits everything. [`request`](Self::request)
    /// gives single policies keys of their own, such as an account and an address.
    ///
    /// # Panics
    ///
    /// If two policies have the same name, or one has a setting that needs an HTTP request:
    /// [`limit::by`](crate::limit::by()), [`cost_fn`](Policy::cost_fn), [`apply_if`](Policy::apply_if),
    /// [`once_per`](Policy::once_per), [`refund_if`](Policy::refund_if), [`charge_if`](Policy::charge_if),
    /// [`learn_from_responses`](Policy::learn_from_responses), or `plans`, `routes` or `methods` in its file.
    /// [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub fn new<K>(store: impl Store, policies: impl IntoPolicies<K>) -> Self {
        match Self::try_new(store, policies) {
            Ok(limiter) => limiter,
            Err(error) => panic!("{error}"),
        }
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
    /// For the policies for which [`new`](Self::new) panics. The error names what to use in place of such a setting.
    pub fn try_new<K>(store: impl Store, policies: impl IntoPolicies<K>) -> Result<Self, ConfigError> {
        let policies = policies.into_policies().into_iter().map(Policy::without_key);
        Ok(Self {
            policies: PolicySet::new(store, policies.collect())?,
            on_decision: Observer::default(),
            on_failure: Observer::default(),
        })
    }
}

/// The path of an operation.
impl Limiter {
    /// Notifies the callbacks.
    fn observe(&self, operation: Operation, decision: Result<Decision, StoreError>) -> Result<Decision, StoreError> {
        if let Some(error) = failure(&decision) {
            self.on_failure.notify(error);
        }

        let decision = decision?;
        if operation.counts() && !decision.as_slice().is_empty() {
            self.on_decision.notify(&decision);
        }
        Ok(decision)
    }

    fn begin(
        &self,
        operation: Operation,
        request: &LimiterRequest<'_>,
        wait: impl Fn(Waiting) -> Waiting,
    ) -> Result<Check, StoreError> {
        let basis = self.policies.newest();
        request.validate(&basis)?;
        Ok(check::begin(operation, undecided_by(&basis, operation, request, wait)))
    }
}

/// The policies that apply to a request, with their keys and costs.
fn undecided_by(
    basis: &Basis<Unkeyed>,
    operation: Operation,
    request: &LimiterRequest<'_>,
    wait: impl Fn(Waiting) -> Waiting,
) -> Undecided {
    let Basis {
        policies,
        context,
        plans,
        ..
    } = basis;
    let plan = plans.as_ref().map_or(0, |plans| request.plan_among(plans));
    let policies = policies
        .iter()
        .enumerate()
        .filter(|(_, policy)| policy.is_of_plan(plan));
    let undecided = policies.map(|(position, policy)| {
        let settings = &context.policies[position].settings;
        let key = request.key_for(policy.name());
        let cost = request.cost_for(policy.name()).or(settings.fixed_cost()).unwrap_or(1);
        let mut undecided = PolicyDecision::undecided(context.clone(), position, key.clone(), cost);
        undecided.chosen = policy.overriding(context, &undecided.named().limit, key);
        let id = request.request_id();
        let marker = id.and_then(|id| settings.marker((&undecided.named().limit, cost), key, id));
        let waiting = match undecided.is_observed() {
            true => Waiting::NONE,
            false => wait(undecided.waiting),
        };
        let lease = Ticket::of(&undecided.named().limit);
        PolicyDecision {
            marker,
            waiting,
            lease,
            ..undecided
        }
    });
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "a policy applies by its cost, whatever the algorithm"
    )]
    let applies = |policy: &PolicyDecision| match policy.named().limit {
        Limit::Unlimited => false,
        Limit::DenyAll if !operation.requires_room() => false,
        _ => policy.cost > 0,
    };
    let applying = undecided.filter(|policy| {
        let applies = applies(policy);
        if !applies && operation.decides() {
            policy.count(PolicyOutcome::Skipped);
        }
        applies
    });
    Undecided::new(applying.collect()).of_units(request.units)
}

/// The failure of the store, even if this process decided.
fn failure(decision: &Result<Decision, StoreError>) -> Option<&StoreError> {
    match decision {
        Ok(decision) => decision.store_error(),
        Err(error) => Some(error),
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("policies", &self.policies.newest().policies)
            .finish_non_exhaustive()
    }
}
