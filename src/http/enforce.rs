//! The path of a request: keys, check, response.
//!
//! ```text
//! check(request)     blocked            -> reject: blocked
//!                    skipped, or no policy applies -> admit
//!                    no key             -> reject: refused
//!                    else charge the keys in the store, now or later
//! act_on(decision)   admitted           -> admit; annotate(response) when the inner service has responded
//!                    denied             -> reject: limited
//!                    store failed       -> reject: failed, if a policy is `Closed`
//! ```

use std::{
    collections::HashSet,
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::request::Parts;
use smallvec::SmallVec;

use super::{
    Presentation,
    admitted::Admitted,
    completed::AwaitedCompletion,
    drain::{Bounds, Rejected},
    response::{OwnRejection, RETRY_AFTER_FAILURE, Rejection, respond},
};
use crate::{
    Decision, Key, Limit, Policy, PolicyDecision,
    decide::{self, Check, CheckContext, PendingCheck, PolicyDecisions, Release, Undecided},
    key::KeyError,
    observe::{Observer, PolicyOutcome, notify},
    policy::{Basis, PolicySet},
    store::{NamedLimit, Operation, StoreError},
    sync::lock,
};

/// What a layer and its services share.
#[derive(Clone)]
pub(crate) struct Enforcer {
    pub(crate) policies: PolicySet,
    /// Whether decisions are left in the extensions of requests.
    pub(crate) extensions: bool,
    /// The same of the responses to admitted requests.
    pub(crate) response_extensions: bool,
    pub(crate) jitter: Duration,
    /// How much is read of the bodies of rejected requests.
    pub(crate) drain: Option<Bounds>,
    pub(crate) on_decision: Observer<Decision>,
    pub(crate) on_failure: Observer<StoreError>,
    pub(super) logged_once: Arc<LoggedOnce>,
}

/// What is logged once.
#[derive(Debug, Default)]
pub(super) struct LoggedOnce {
    /// The policies whose key or limit could not be determined.
    of_key: Mutex<HashSet<Arc<str>>>,
    of_repetition: AtomicBool,
    of_other_key: AtomicBool,
}

pub(crate) enum Progress {
    Done(Action),
    /// The store has not replied yet.
    Pending(PendingCheck),
}

/// What to do with a request.
pub(crate) enum Action {
    /// Call the inner service, and annotate its response if a policy applied.
    Admit(Option<Admitted>),
    /// Send this response.
    Reject(Rejected),
}

/// The path of a request, in its order.
impl Enforcer {
    /// Extracts the keys and checks them in the store.
    pub(crate) fn check(&self, parts: &mut Parts) -> Progress {
        let undecided = match self.undecided(parts, Operation::Check) {
            Ok(Some(undecided)) => undecided,
            Ok(None) => return Progress::Done(self.admit_uncounted(Decision::empty(), parts)),
            Err(refused) => {
                let rejection = refused.as_ref().map_or(Rejection::Blocked, Rejection::Refused);
                return Progress::Done(Action::Reject(self.reject(rejection, parts)));
            }
        };
        match decide::begin(Operation::Wait.of_waiting(undecided.waits()), undecided) {
            Check::Decided(decision) => Progress::Done(self.act_on(decision, parts)),
            Check::Pending(check) => Progress::Pending(check),
        }
    }

    /// The policies that apply to the request, with its keys and costs; `None` if there are none, or it is skipped. An error is why it
    /// has no key, or `None` if it is blocked.
    #[inline(always)]
    fn undecided(&self, parts: &Parts, operation: Operation) -> Result<Option<Undecided>, Option<KeyError>> {
        let basis: &Basis = &self.policies.newest();
        let context = basis.context.here();
        if let Some(access) = &basis.access {
            if access.blocks(parts) {
                if operation.counts() {
                    context.count_for_all(PolicyOutcome::Blocked);
                    context.record(PolicyOutcome::Blocked, None);
                }
                return Err(None);
            }
            if access.skips(parts) {
                if operation.counts() {
                    context.count_for_all(PolicyOutcome::Skipped);
                }
                return Ok(None);
            }
        }

        // Most layers have one policy. Going through a list costs such a request a twelfth more.
        if let ([policy], None) = (&basis.policies[..], &basis.plans) {
            let outcome = match self.undecided_by(policy, (context, 0), parts, operation) {
                Ok(Some(undecided)) => return Ok(Some(Undecided::new(SmallVec::from_buf([undecided])))),
                Ok(None) => PolicyOutcome::Skipped,
                Err(error) => self.without_key((context, 0), error, operation)?,
            };
            if operation.counts() {
                context.count(0, outcome);
            }
            return Ok(None);
        }

        let plan = basis.plans.as_ref().map_or(0, |plans| plans.of(parts));
        let mut undecided = PolicyDecisions::new();
        let policies = basis.policies.iter().enumerate();
        for (position, policy) in policies.filter(|(_, policy)| policy.is_of_plan(plan)) {
            let outcome = match self.undecided_by(policy, (context, position), parts, operation) {
                Ok(Some(policy)) => {
                    undecided.push(policy);
                    continue;
                }
                Ok(None) => PolicyOutcome::Skipped,
                Err(error) => self.without_key((context, position), error, operation)?,
            };
            if operation.counts() {
                context.count(position, outcome);
            }
        }
        Ok((!undecided.is_empty()).then(|| Undecided::new(undecided)))
    }

    /// The plan, the cost and the key of the request by the policy at this position, if the policy applies.
    #[inline(always)]
    fn undecided_by(
        &self,
        policy: &Policy,
        (context, position): (&Arc<CheckContext>, usize),
        parts: &Parts,
        operation: Operation,
    ) -> Result<Option<PolicyDecision>, KeyError> {
        let settings = &context.policies[position].settings;
        if !settings.apply_to(parts) {
            return Ok(None);
        }
        let mut limit = match policy.choose_limit(parts)? {
            Some(chosen) => chosen,
            None => context.policies[position].limit.clone(),
        };
        if matches!(limit.limit, Limit::Unlimited) {
            return Ok(None);
        }
        let mut cost = settings.cost_of(parts);
        if cost == 0 {
            if operation.counts() {
                return Ok(None);
            }
            cost = 1;
        }
        let Some(mut key) = policy.extractor().extract(parts)? else {
            return Ok(None);
        };
        key.bound();
        if let Some(overriding) = policy.overriding(context, &limit.limit, &key) {
            limit = overriding;
            if matches!(limit.limit, Limit::Unlimited) {
                return Ok(None);
            }
        }

        if operation.counts()
            && let Some(earlier) = parts.extensions.get::<Decision>()
        {
            cost = self.rest_of(cost, earlier, (context, position), &limit, &key);
            if cost == 0 {
                return Ok(None);
            }
        }
        let waiting = settings.waiting_of(context.policies[position].waiting_of(&key), parts);
        let undecided = PolicyDecision::undecided(context.clone(), position, limit, (key, cost), waiting);
        Ok(Some(undecided))
    }

    /// The error of a policy that finds no key or limit, unless it only observes: then its outcome.
    #[cold]
    fn without_key(
        &self,
        (context, position): (&CheckContext, usize),
        error: KeyError,
        operation: Operation,
    ) -> Result<PolicyOutcome, KeyError> {
        let policy = &context.policies[position];
        if error.is_misconfigured() && lock(&self.logged_once.of_key).insert(policy.limit.name.clone()) {
            tracing::error!(
                policy = &*policy.limit.name,
                error = error.to_string(),
                "requests are refused, or pass where a policy only observes: their key or limit cannot be determined"
            );
        }
        if policy.settings.lets_pass(&error) {
            return Ok(PolicyOutcome::Observed);
        }
        if operation.counts() {
            context.count(position, PolicyOutcome::Refused);
            context.record(PolicyOutcome::Refused, Some(position));
        }
        Err(error)
    }

    /// The rest of a cost of which outer layers may have charged a part.
    fn rest_of(&self, cost: u64, earlier: &Decision, at: (&CheckContext, usize), named: &NamedLimit, key: &Key) -> u64 {
        let (charged, has_other_key) = earlier.charged(at, named, key);
        if has_other_key && !self.logged_once.of_other_key.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                policy = &*named.name,
                "nested layers count a policy under two keys of one request; give one of them another name"
            );
        }
        if charged > 0 && !self.logged_once.of_repetition.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                policy = &*named.name,
                "a policy is met twice on one request; only the larger cost is charged"
            );
        }
        // A cost above the limit is never admitted, however it is divided between layers.
        cost.saturating_sub(charged * u64::from(cost <= named.limit.quota()))
    }

    /// Admits or rejects the request by the decision.
    #[inline]
    pub(crate) fn act_on(&self, decision: Result<Decision, StoreError>, parts: &mut Parts) -> Action {
        let decision = match decision {
            Ok(decision) => decision,
            Err(error) => return self.fail(&error, parts),
        };
        if let Some(error) = decision.store_error() {
            notify(&self.on_failure, error);
            // Each policy is `Open`.
            if decision.as_slice().is_empty() {
                return self.admit_uncounted(decision, parts);
            }
        }
        if !decision.is_allowed() {
            return self.deny(decision, parts);
        }

        // The store is not drained while the decision is observed.
        let completion = AwaitedCompletion::of(&decision);
        notify(&self.on_decision, &decision);
        let earlier = match self.extensions {
            true => parts.extensions.insert(decision.clone()),
            false => parts.extensions.get::<Decision>().cloned(),
        };
        let joined = earlier.as_ref().and_then(|earlier| {
            earlier.follow();
            let is_kept = self.extensions || self.response_extensions;
            is_kept.then(|| earlier.followed_by(&decision)).flatten()
        });
        if self.extensions
            && let Some(joined) = &joined
        {
            parts.extensions.insert(joined.clone());
        }
        Action::Admit(Some(Admitted {
            learning: earlier.filter(Decision::learns),
            completion,
            release: Release::of(&decision, &parts.method),
            left: self
                .response_extensions
                .then(|| joined.unwrap_or_else(|| decision.clone())),
            own: decision,
        }))
    }

    /// Admits a request that nothing was counted for. Its decision, which has no policies, is for extractors, and tells beside an
    /// earlier one only that the store has failed.
    fn admit_uncounted(&self, decision: Decision, parts: &mut Parts) -> Action {
        let earlier = parts.extensions.get::<Decision>();
        if self.extensions && (earlier.is_none() || decision.store_error().is_some()) {
            let joined = earlier.and_then(|earlier| earlier.followed_by(&decision));
            parts.extensions.insert(joined.unwrap_or(decision));
        }
        Action::Admit(None)
    }
}

/// What remains for a caller.
impl Enforcer {
    /// What the check of such a request would return. Charges of earlier layers are not regarded.
    pub(super) async fn peek(&self, parts: &Parts) -> Result<Decision, StoreError> {
        let undecided = self.undecided(parts, Operation::Peek);
        let Some(mut undecided) = undecided.map_err(StoreError::of_refusal)? else {
            return Ok(Decision::empty());
        };
        undecided.enter_lines();
        let decision = decide::begin(Operation::Peek, undecided).decided().await;
        let failure = decision.as_ref().map_or_else(Some, Decision::store_error);
        failure.inspect(|error| notify(&self.on_failure, error));
        decision
    }
}

/// The ways to reject a request that is not blocked.
impl Enforcer {
    fn deny(&self, decision: Decision, parts: &mut Parts) -> Action {
        let decision = decision.delayed(self.random_delay());
        notify(&self.on_decision, &decision);
        let mut rejected = self.reject(Rejection::Limited(&decision), parts);
        let earlier = parts.extensions.get::<Decision>();
        let joined = earlier.and_then(|earlier| earlier.followed_by(&decision));
        let left = self.extensions.then(|| joined.unwrap_or(decision));
        let extensions = rejected.response.extensions_mut();
        if extensions.is_empty() {
            // Those of the request are not needed anymore, and their table is allocated.
            *extensions = mem::take(&mut parts.extensions);
            extensions.clear();
        }
        match left {
            Some(decision) => drop(extensions.insert(decision)),
            None => drop(extensions.insert(OwnRejection)),
        }
        Action::Reject(rejected)
    }

    fn fail(&self, error: &StoreError, parts: &Parts) -> Action {
        notify(&self.on_failure, error);
        let retry_after = RETRY_AFTER_FAILURE.saturating_add(self.random_delay());
        Action::Reject(self.reject(Rejection::Failed { error, retry_after }, parts))
    }

    fn reject(&self, rejection: Rejection<'_>, parts: &Parts) -> Rejected {
        let response = respond(
            &*Presentation::of(&self.policies.newest().context).format,
            rejection,
            parts,
        );
        Rejected::new(response, parts)
    }

    /// The jitter of one response.
    fn random_delay(&self) -> Duration {
        match self.jitter {
            Duration::ZERO => Duration::ZERO,
            most => most.mul_f64(fastrand::f64()),
        }
    }
}
