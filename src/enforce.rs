//! The path of a request: keys, check, response.
//!
//! ```text
//! check(request)     no policy applies  -> admit
//!                    no key             -> reject: refused
//!                    else charge the keys in the store, now or later
//! act_on(decision)   admitted           -> admit; annotate(response) when the inner service has responded
//!                    denied             -> reject: limited
//!                    store failed       -> reject: failed, if a policy is `Closed`
//! ```
//!
//! The body of the request and the inner service are in the hands of [`RateLimit`](crate::RateLimit) and its future.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::{
    HeaderValue, Method, Response,
    header::{CACHE_CONTROL, CONTENT_LENGTH, RETRY_AFTER},
    request::Parts,
};
use smallvec::SmallVec;

#[cfg(feature = "serde")]
use crate::policy::{Keyed, Renewals};
use crate::{
    Decision, Key, Policy, PolicyDecision,
    check::{self, Check, PendingCheck},
    decision::{CheckContext, PolicyDecisions},
    headers::{Fields, retry_after},
    key::KeyError,
    observer::Observer,
    rejected::Rejected,
    response::{Rejection, ResponseFormat},
    store::{Operation, StoreError},
};

/// What a layer and its services share.
#[derive(Clone)]
pub(crate) struct Enforcer {
    pub(crate) policies: Arc<[Policy]>,
    pub(crate) context: Arc<CheckContext>,
    /// The policies after a reload of their file, if they follow one.
    #[cfg(feature = "serde")]
    pub(crate) renewals: Option<Renewals<Keyed>>,
    pub(crate) format: Arc<dyn ResponseFormat>,
    pub(crate) fields: Fields,
    /// Whether decisions are left in extensions.
    pub(crate) extensions: bool,
    pub(crate) jitter: Duration,
    pub(crate) on_decision: Observer<Decision>,
    pub(crate) on_failure: Observer<StoreError>,
    pub(crate) warned: Arc<Warned>,
}

/// Which warnings were logged.
#[derive(Debug, Default)]
pub(crate) struct Warned {
    key: AtomicBool,
    repetition: AtomicBool,
}

/// The progress of a check.
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

/// The decisions about an admitted request.
pub(crate) struct Admitted {
    /// That of this layer.
    own: Decision,
    /// That of this layer and of those around it, if there are any.
    joined: Option<Decision>,
}

/// The path of a request, in its order.
impl Enforcer {
    /// Extracts the keys and checks them in the store.
    pub(crate) fn check(&self, parts: &mut Parts) -> Progress {
        let undecided = match self.undecided(parts) {
            Ok(Some(undecided)) => undecided,
            Ok(None) => return Progress::Done(self.admit_uncounted(Decision::empty(), parts)),
            Err(error) => return Progress::Done(self.refuse(&error, parts)),
        };
        match check::begin(Operation::Check, undecided) {
            Check::Decided(decision) => Progress::Done(self.act_on(decision, parts)),
            Check::Pending(check) => Progress::Pending(check),
        }
    }

    /// The policies that apply to the request, with its keys and costs.
    #[inline(always)]
    fn undecided(&self, parts: &Parts) -> Result<Option<Decision>, KeyError> {
        #[cfg(feature = "serde")]
        if let Some(renewals) = &self.renewals {
            return renewals.apply(&self.policies, &self.context, |policies, context| {
                self.undecided_by(policies, context, parts)
            });
        }
        self.undecided_by(&self.policies, &self.context, parts)
    }

    #[inline(always)]
    fn undecided_by(
        &self,
        policies: &[Policy],
        context: &Arc<CheckContext>,
        parts: &Parts,
    ) -> Result<Option<Decision>, KeyError> {
        // Most layers have one policy. Going through a list costs such a request a twelfth more.
        if let [policy] = policies {
            let charge = self.charge_by(policy, parts)?;
            return Ok(charge.map(|(key, cost)| {
                let undecided = PolicyDecision::undecided(context.clone(), 0, key, cost);
                Decision::new(false, SmallVec::from_buf([undecided]))
            }));
        }

        let mut undecided = PolicyDecisions::new();
        for (position, policy) in policies.iter().enumerate() {
            if let Some((key, cost)) = self.charge_by(policy, parts)? {
                undecided.push(PolicyDecision::undecided(context.clone(), position, key, cost));
            }
        }
        Ok((!undecided.is_empty()).then(|| Decision::new(false, undecided)))
    }

    /// The key and the cost of the request by this policy, if the policy applies.
    #[inline(always)]
    fn charge_by(&self, policy: &Policy, parts: &Parts) -> Result<Option<(Key, u64)>, KeyError> {
        let cost = policy.cost_of(parts);
        if cost == 0 {
            return Ok(None);
        }
        let Some(mut key) = policy.extractor().extract(parts)? else {
            return Ok(None);
        };
        key.bound();
        let earlier = parts.extensions.get::<Decision>();
        match earlier.map_or(0, |earlier| earlier.charged(&self.context.store, policy.quota(), &key)) {
            0 => Ok(Some((key, cost))),
            charged => Ok(self.rest_of(cost, charged, policy).map(|rest| (key, rest))),
        }
    }

    /// The rest of a cost of which outer layers have charged a part.
    #[cold]
    fn rest_of(&self, cost: u64, charged: u64, policy: &Policy) -> Option<u64> {
        self.warn_of_repetition(policy);
        // A cost above the limit is never admitted, however it is divided between layers.
        let rest = if cost > policy.limit().quota() {
            cost
        } else {
            cost.saturating_sub(charged)
        };
        (rest > 0).then_some(rest)
    }

    /// Admits or rejects the request by the decision.
    #[inline]
    pub(crate) fn act_on(&self, decision: Result<Decision, StoreError>, parts: &mut Parts) -> Action {
        let decision = match decision {
            Ok(decision) => decision,
            Err(error) => return self.fail(&error, parts),
        };
        if let Some(error) = decision.store_error() {
            self.on_failure.notify(error);
            // Each policy is `Open`.
            if decision.as_slice().is_empty() {
                return self.admit_uncounted(decision, parts);
            }
        }
        if !decision.is_allowed() {
            return self.limit(decision, parts);
        }

        self.on_decision.notify(&decision);
        let mut joined = None;
        if self.extensions {
            let earlier = parts.extensions.insert(decision.clone());
            let earlier = earlier.filter(|earlier| !earlier.is_empty());
            joined = earlier.map(|earlier| earlier.followed_by(&decision));
            if let Some(joined) = &joined {
                parts.extensions.insert(joined.clone());
            }
        }
        Action::Admit(Some(Admitted { own: decision, joined }))
    }

    /// Admits a request that nothing was counted for. Its decision, which has no policies, is for extractors.
    fn admit_uncounted(&self, decision: Decision, parts: &mut Parts) -> Action {
        if self.extensions && parts.extensions.get::<Decision>().is_none() {
            parts.extensions.insert(decision);
        }
        Action::Admit(None)
    }

    /// Adds the fields and the decision to the response of the inner service.
    pub(crate) fn annotate<B>(&self, response: &mut Response<B>, Admitted { own, joined }: Admitted) {
        self.fields.write(&own, response.status(), response.headers_mut());
        if self.extensions {
            // The decision of an inner layer has the policies of this one too.
            response.extensions_mut().get_or_insert_with(|| joined.unwrap_or(own));
        }
    }
}

/// The three ways to reject a request.
impl Enforcer {
    fn limit(&self, decision: Decision, parts: &mut Parts) -> Action {
        let decision = decision.delayed(self.random_delay());
        self.on_decision.notify(&decision);
        let mut rejected = self.reject(Rejection::Limited(&decision), parts);
        if self.extensions {
            let earlier = parts.extensions.get::<Decision>().filter(|earlier| !earlier.is_empty());
            let decision = match earlier {
                Some(earlier) => earlier.followed_by(&decision),
                None => decision,
            };
            let response = rejected.response_mut();
            if response.extensions().is_empty() {
                // The extensions of the request are not needed anymore, and their table is allocated.
                let mut table = mem::take(&mut parts.extensions);
                table.clear();
                *response.extensions_mut() = table;
            }
            response.extensions_mut().insert(decision);
        }
        Action::Reject(rejected)
    }

    fn refuse(&self, error: &KeyError, parts: &Parts) -> Action {
        if error.is_misconfigured() {
            self.warn_of_key(error);
        }
        Action::Reject(self.reject(Rejection::Refused(error), parts))
    }

    fn fail(&self, error: &StoreError, parts: &Parts) -> Action {
        self.on_failure.notify(error);
        let retry_after = RETRY_AFTER_FAILURE.saturating_add(self.random_delay());
        Action::Reject(self.reject(Rejection::Failed { error, retry_after }, parts))
    }

    /// Builds the response to a request that is not admitted.
    ///
    /// Every response of the layer is built here, so its rules hold for every format and status. `Connection` is added when
    /// the response is sent, since it depends on the content of the request.
    fn reject(&self, rejection: Rejection<'_>, parts: &Parts) -> Rejected {
        let mut response = self.format.respond(rejection, parts);
        let status = response.status();
        // RFC 9110 §9.3.2: no content in the response to HEAD; §8.6: a Content-Length is that of the response to GET.
        if parts.method == Method::HEAD {
            let length = mem::take(response.body_mut()).len();
            response.headers_mut().entry(CONTENT_LENGTH).or_insert(length.into());
        }

        let headers = response.headers_mut();
        // RFC 6585 §4: a 429 must not be stored. RFC 9111 §4.2.2: a 200 without this field may be, and gRPC sends its
        // errors as 200.
        headers
            .entry(CACHE_CONTROL)
            .or_insert(const { HeaderValue::from_static("no-store") });
        // In gRPC the wait is part of the status.
        if let Some(wait) = rejection.retry_after().filter(|_| !status.is_success()) {
            headers.entry(RETRY_AFTER).or_insert_with(|| retry_after(wait));
        }
        if let Rejection::Limited(decision) = rejection {
            self.fields.write(decision, status, headers);
        }
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

/// The wait in a response to a request for which the store failed.
const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(1);

/// Warnings, each logged once for a layer and its clones.
impl Enforcer {
    fn warn_of_key(&self, error: &KeyError) {
        if !self.warned.key.swap(true, Ordering::Relaxed) {
            #[cfg(feature = "tracing")]
            tracing::error!(%error, "requests are refused: they have no key");
        }
        let _ = error;
    }

    fn warn_of_repetition(&self, policy: &Policy) {
        if !self.warned.repetition.swap(true, Ordering::Relaxed) {
            #[cfg(feature = "tracing")]
            tracing::warn!(
                policy = policy.name(),
                "a policy is met twice on one request; only the larger cost is charged"
            );
        }
        let _ = policy;
    }
}
