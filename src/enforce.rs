//! The path of a request, from its keys to the answer, apart from its body and from the service behind.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderValue, Method, Response,
    header::{CACHE_CONTROL, CONTENT_LENGTH, RETRY_AFTER},
    request::Parts,
};
use smallvec::SmallVec;

use crate::{
    Decision, Key, Policy, PolicyDecision,
    check::{Asked, Pending, ask},
    decision::{CheckContext, PolicyDecisions},
    drain::Rejected,
    headers::{Fields, retry_after},
    key::KeyError,
    observer::OnFailure,
    response::{Rejection, ResponseFormat},
    store::{Operation, StoreError},
};

/// What a layer and its services share.
#[derive(Clone)]
pub(crate) struct Enforcer {
    pub(crate) policies: Arc<[Policy]>,
    pub(crate) context: Arc<CheckContext>,
    /// The rate limit fields of responses.
    pub(crate) fields: Fields,
    /// Whether decisions are left in extensions.
    pub(crate) extensions: bool,
    pub(crate) format: Arc<dyn ResponseFormat>,
    pub(crate) jitter: Duration,
    pub(crate) on_failure: OnFailure,
    pub(crate) warned: Arc<Warned>,
}

/// What there were warnings of.
#[derive(Debug, Default)]
pub(crate) struct Warned {
    key: AtomicBool,
    repetition: AtomicBool,
}

/// How far a request got.
pub(crate) enum Progress {
    Done(Verdict),
    Asking(Pending),
}

/// What becomes of a request.
pub(crate) enum Verdict {
    /// It goes to the service behind; its response tells of the decision, if it was counted.
    Pass(Option<Counted>),
    /// The layer responds to it.
    Reject(Rejected),
}

/// What the response to a request that passes tells.
pub(crate) struct Counted {
    /// What this layer decided: its part of the fields.
    own: Decision,
    /// What it and the layers around it decided, if there are any.
    joined: Option<Decision>,
}

impl Enforcer {
    /// Finds the keys and asks the store.
    pub(crate) fn begin(&self, parts: &mut Parts) -> Progress {
        let undecided = match self.undecided(parts) {
            Ok(Some(undecided)) => undecided,
            Ok(None) => return Progress::Done(Verdict::Pass(None)),
            Err(error) => return Progress::Done(self.refuse(&error, parts)),
        };
        match ask(Operation::Check, undecided) {
            Asked::Decided(decision) => Progress::Done(self.conclude(decision, parts)),
            Asked::Pending(decision) => Progress::Asking(decision),
        }
    }

    /// Decides what becomes of the request, now that the store has answered.
    #[inline]
    pub(crate) fn conclude(&self, decision: Result<Decision, StoreError>, parts: &mut Parts) -> Verdict {
        let decision = match decision {
            Ok(decision) => decision,
            Err(error) => return self.fail(&error, parts),
        };
        if let Some(error) = decision.store_error() {
            self.on_failure.observe(error);
            if decision.as_slice().is_empty() {
                return Verdict::Pass(None);
            }
        }

        if !decision.is_allowed() {
            return self.limit(decision, parts);
        }
        let mut joined = None;
        if self.extensions {
            let earlier = parts.extensions.insert(decision.clone());
            joined = earlier.map(|earlier| earlier.followed_by(&decision));
            if let Some(joined) = &joined {
                parts.extensions.insert(joined.clone());
            }
        }
        Verdict::Pass(Some(Counted { own: decision, joined }))
    }

    /// What is to be decided, if a policy applies.
    #[inline(always)]
    fn undecided(&self, parts: &Parts) -> Result<Option<Decision>, KeyError> {
        // Most layers have one policy. Going through a list costs such a request a twelfth more.
        if let [policy] = &*self.policies {
            let found = self.charge_by(policy, parts)?;
            return Ok(found.map(|(key, cost)| {
                let undecided = PolicyDecision::undecided(self.context.clone(), 0, key, cost);
                Decision::new(false, SmallVec::from_buf([undecided]))
            }));
        }

        let mut undecided = PolicyDecisions::new();
        for (position, policy) in self.policies.iter().enumerate() {
            if let Some((key, cost)) = self.charge_by(policy, parts)? {
                undecided.push(PolicyDecision::undecided(self.context.clone(), position, key, cost));
            }
        }
        Ok((!undecided.is_empty()).then(|| Decision::new(false, undecided)))
    }

    /// Whom the request counts against by this policy, and what it costs, if the policy applies.
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

    /// What is left to charge for a policy that outer layers have charged already.
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

    fn limit(&self, decision: Decision, parts: &mut Parts) -> Verdict {
        let decision = decision.delayed(self.random_delay());
        let mut rejected = self.respond(Rejection::Limited(&decision), parts);
        self.leave(decision, rejected.response_mut(), parts);
        Verdict::Reject(rejected)
    }

    /// Leaves the decision in the extensions of a denial.
    fn leave(&self, decision: Decision, response: &mut Response<Bytes>, parts: &mut Parts) {
        if !self.extensions {
            return;
        }
        if response.extensions().is_empty() {
            // Nobody sees those of the request anymore, and they have a table.
            let mut table = mem::take(&mut parts.extensions);
            table.clear();
            *response.extensions_mut() = table;
        }
        response.extensions_mut().insert(decision);
    }

    fn refuse(&self, error: &KeyError, parts: &Parts) -> Verdict {
        if error.is_misconfigured() {
            self.warn_of_key(error);
        }
        Verdict::Reject(self.respond(Rejection::Refused(error), parts))
    }

    fn fail(&self, error: &StoreError, parts: &Parts) -> Verdict {
        self.on_failure.observe(error);
        let retry_after = RETRY_AFTER_FAILURE.saturating_add(self.random_delay());
        Verdict::Reject(self.respond(Rejection::Failed { error, retry_after }, parts))
    }

    /// Builds the response to a request that is not admitted.
    ///
    /// Every response of the layer comes from here, so its rules hold for every format and status. `Connection` is added
    /// when the response leaves, since it depends on the content of the request.
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Rejected {
        let mut response = self.format.respond(rejection, parts);
        let status = response.status();
        // RFC 9110 §9.3.2: no content in the response to HEAD; §8.6: its length, if said, is that of the response to GET.
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

    /// Adds the decision to the response of the inner service: its fields and its extension.
    pub(crate) fn report<B>(&self, counted: Counted, response: &mut Response<B>) {
        let Counted { own, joined } = counted;
        self.fields.write(&own, response.status(), response.headers_mut());
        if self.extensions {
            // The decision of an inner layer contains this one's policies already.
            response.extensions_mut().get_or_insert_with(|| joined.unwrap_or(own));
        }
    }
}

impl Enforcer {
    /// The jitter of one response.
    fn random_delay(&self) -> Duration {
        match self.jitter {
            Duration::ZERO => Duration::ZERO,
            most => most.mul_f64(fastrand::f64()),
        }
    }
}

/// The wait in a response to a request that the store has failed.
const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(1);

/// Warnings, each once per change of state.
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
