//! A decision until it is made.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{Arc, LazyLock, Mutex},
    time::Duration,
};

use super::{
    Decision, Inner, PolicyDecision, PolicyDecisions, group::Led, receipt::Untaken, slots::Slots, usage::Account,
};
use crate::{
    Denial,
    store::{Operation, Outcome, Owed, OwedKind, StoreRequest, StoreResponse},
};

/// The policies that apply to a request, with its keys and costs, and what a store replies about them.
///
/// It has the memory of the [`Decision`] that it becomes once.
pub(crate) struct Undecided {
    decision: Decision,
    pub(super) led: Option<Box<Led>>,
    /// Whether the request may not wait since too much waits already.
    pub(crate) is_line_full: bool,
    /// Whether it is completed as a cancelled request if its caller leaves.
    pub(crate) is_of_http: bool,
}

impl Undecided {
    #[inline(always)]
    pub(crate) fn new(policies: PolicyDecisions) -> Self {
        Self {
            decision: Decision::new(false, policies),
            led: None,
            is_line_full: false,
            is_of_http: true,
        }
    }

    /// The decision, which was recorded.
    #[inline(always)]
    pub(crate) fn decided(mut self) -> Decision {
        let mut policies = self.as_slice().iter();
        if policies.next().is_some_and(|first| first.context.on_settled.is_some()) {
            Account::open(&mut self.inner().policies);
        }
        match self.is_line_full {
            true => self.decision.for_a_full_line(),
            false => self.decision,
        }
    }

    /// The same for so many units, of which some may be admitted.
    pub(crate) fn of_units(mut self, units: u32) -> Self {
        self.inner().units = units;
        self
    }

    #[inline]
    pub(crate) fn units(&self) -> u32 {
        self.decision.0.units
    }

    #[inline]
    pub(super) fn inner(&mut self) -> &mut Inner {
        Arc::get_mut(&mut self.decision.0).expect("it is not shared before it is decided")
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[PolicyDecision] {
        self.decision.as_slice()
    }

    /// Whether a policy only observes, so that the charges are not sent as one request.
    #[inline]
    pub(crate) fn is_composite(&self) -> bool {
        self.as_slice()
            .first()
            .is_some_and(|policy| policy.context.is_composite)
    }

    /// Whether a policy takes slots.
    #[inline]
    pub(crate) fn has_leases(&self) -> bool {
        self.as_slice().iter().any(|policy| policy.lease.is_some())
    }

    pub(crate) fn owe(&self, kind: OwedKind) -> Option<Owed> {
        self.decision.owe(kind)
    }

    /// Whether requests wait for one of the policies.
    #[inline]
    pub(crate) fn waits(&self) -> bool {
        self.as_slice().iter().any(|policy| policy.charge.line.is_some())
    }

    /// Dates its leases from now on, when it is about to be checked again.
    pub(crate) fn renew_tickets(&mut self) {
        for policy in &mut self.inner().policies {
            if policy.lease.is_some() {
                policy.renew_lease();
            }
        }
    }

    /// The request to a store for all policies.
    #[inline(always)]
    pub(crate) fn request(&self, operation: Operation) -> StoreRequest<'_> {
        match self.as_slice() {
            [policy] => self.of_request(StoreRequest::of_one(
                operation.of_waiting(self.waits()),
                policy.counted(),
            )),
            policies => self.request_for(operation, policies),
        }
    }

    /// The request to a store for some of the policies, which it decides together.
    pub(crate) fn request_for<'a>(
        &'a self,
        operation: Operation,
        policies: impl IntoIterator<Item = &'a PolicyDecision>,
    ) -> StoreRequest<'a> {
        let charges = policies.into_iter().map(PolicyDecision::counted);
        self.of_request(StoreRequest::new(operation.of_waiting(self.waits()), charges))
    }

    #[inline(always)]
    fn of_request<'a>(&'a self, request: StoreRequest<'a>) -> StoreRequest<'a> {
        match &self.led {
            None => request.units(self.units()),
            Some(led) => request.standing(Some(&led.waiting), self.units()),
        }
    }

    /// The same for the request of another one: its units, and its line.
    pub(crate) fn in_place_of(mut self, other: &Self) -> Self {
        self.led.clone_from(&other.led);
        (self.is_line_full, self.is_of_http) = (other.is_line_full, other.is_of_http);
        self.of_units(other.units())
    }

    /// Whether both are the same check, so that the store can decide them together.
    pub(crate) fn merges_with(&self, other: &Self) -> bool {
        !self.has_leases() && self.is_equal(other)
    }

    /// The same, though slots have leases of their own.
    pub(crate) fn is_equal(&self, other: &Self) -> bool {
        let same = |(one, other): (&PolicyDecision, &PolicyDecision)| {
            one.context.is_same(&other.context)
                && one.position == other.position
                && one.charge.cost == other.charge.cost
                && one.named() == other.named()
                && one.charge.key == other.charge.key
        };
        let (policies, others) = (self.as_slice(), other.as_slice());
        !self.is_composite() && policies.len() == others.len() && policies.iter().zip(others).all(same)
    }

    /// Takes the limits that overrides and reloads of a file have set since the request was denied.
    pub(crate) fn follow_limits(&mut self) {
        self.inner().policies.iter_mut().for_each(PolicyDecision::follow_limit);
    }

    /// The same request again, without the policies that observe.
    pub(crate) fn again(&self) -> Self {
        self.decision.again()
    }

    /// Records the outcome of one request for all policies.
    #[inline(always)]
    pub(crate) fn record(&mut self, operation: Operation, response: &StoreResponse, outcome: &Outcome) {
        let inner = self.inner();
        inner.allowed = outcome.allowed;
        inner.server_time = response.server_time;
        let charged = outcome.allowed && operation.counts();
        let mut states = outcome.states().iter();
        for policy in &mut inner.policies {
            policy.record(&mut states, response.server_time, charged);
        }
        if inner.units > 1 {
            self.take(outcome.units);
        }
    }

    /// Records how many units the enforced policies have admitted, which is their cost.
    #[cold]
    pub(super) fn take(&mut self, units: u32) {
        let inner = self.inner();
        inner.units = units;
        for policy in inner.policies.iter_mut().filter(|policy| !policy.is_observed()) {
            policy.multiply(units.max(1));
        }
    }

    /// Admits the request if no policy denies it, unless the outcome of a store is recorded after this.
    pub(crate) fn admit_unless_denied(&mut self) {
        let inner = self.inner();
        inner.allowed = !inner.policies.iter().any(PolicyDecision::denies);
    }

    /// Holds the slots that were taken. Those of policies that observe a denied request are released at once.
    #[cold]
    pub(crate) fn hold_slots(&mut self) {
        let slots = Slots::of(self.as_slice());
        if self.decision.is_allowed() && !slots.is_empty() {
            self.inner().slots = Some(Box::new(Mutex::new(slots)));
        }
    }
}

impl Decision {
    /// The same decision about a request that has waited, with those of the policies that observe, which were made before.
    pub(crate) fn after_waiting(mut self, waited: Duration, mut observed: PolicyDecisions) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.waited += waited;
            // What they have counted is that of an admitted request now.
            for policy in &mut observed {
                let counted = inner.allowed && policy.denial.is_none() && !policy.named().limit.is_held();
                policy.receipt = Untaken::new(counted);
            }
            inner.policies.extend(observed);
            inner.policies.sort_by_key(|policy| policy.position);
        }
        self
    }

    /// The request, without the policies that observe, which are decided once.
    pub(crate) fn again(&self) -> Undecided {
        let enforced = self.as_slice().iter().filter(|policy| !policy.is_observed());
        Undecided::new(enforced.map(PolicyDecision::again).collect())
    }

    /// The policies that observe.
    pub(crate) fn observed(&self) -> PolicyDecisions {
        let observed = self.as_slice().iter().filter(|policy| policy.is_observed());
        observed.cloned().collect()
    }

    /// The denial since too much waits in the line of a policy.
    pub(crate) fn for_a_full_line(mut self) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            let policies = inner.policies.iter_mut();
            for policy in policies.filter(|policy| policy.denial == Some(Denial::QuotaExceeded) && policy.waits()) {
                policy.denial = Some(Denial::LineFull);
            }
        }
        self
    }
}

impl PolicyDecision {
    /// Whether the request may wait for this policy at all.
    pub(crate) fn waits(&self) -> bool {
        self.waiting.longest_us > 0
    }

    /// Whether the request, which this policy denies, may wait as long as is known to be necessary.
    pub(crate) fn may_wait(&self) -> bool {
        let longest = Duration::from_micros(self.waiting.longest_us);
        // When slots will be free is not known.
        let is_known = !self.named().limit.is_held();
        self.may_stay_in_line(longest) && (!is_known || self.retry_after.is_some_and(|wait| wait <= longest))
    }

    /// Whether the request waits for what this policy denies it for: room, or the end of a pause that a response has asked for and
    /// which ends within this time.
    pub(crate) fn may_stay_in_line(&self, left: Duration) -> bool {
        let settings = &self.policy().settings;
        self.waits()
            && match self.denial {
                Some(Denial::QuotaExceeded) => true,
                Some(Denial::Banned) => {
                    settings.learns && settings.ban.is_none() && self.retry_after.is_some_and(|rest| rest <= left)
                }
                Some(Denial::CostAboveLimit | Denial::DenyAll | Denial::LineFull) | None => false,
            }
    }

    /// The number of the line in which requests wait for this policy.
    pub(crate) fn line(&self) -> Option<u64> {
        self.charge.line.as_ref().map(|line| line.number)
    }

    #[cold]
    pub(super) fn line_number(&self) -> u64 {
        static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

        let named = self.named();
        let hash = HASHER.hash_one((
            self.context.store_id(),
            named.shape,
            named.counted_as(),
            self.charge.key.as_bytes(),
        ));
        // A double holds it exactly.
        hash >> 11
    }

    /// Takes the limit of an override, or the newest one of the policy, in place of its own if both have the same counts. Where limits
    /// are chosen for each request, that of an override stays when it has ended.
    #[cold]
    fn follow_limit(&mut self) {
        let (own, policy) = (&self.charge.limit, self.policy());
        let overrides = self.context.overrides.as_ref();
        let newest = match overrides.and_then(|overrides| overrides.limit_of(own.counted_as(), &self.charge.key)) {
            Some(limit) if limit == own.limit => return,
            Some(limit) => Arc::new(own.with(limit)),
            None => {
                let of_file = policy.file.as_ref().and_then(|file| file.newest_limit());
                of_file.unwrap_or_else(|| policy.limit.clone())
            }
        };
        if newest != *own && newest.has_counts_of(own) {
            self.charge.limit = newest;
        }
    }

    /// The same policy for another check of the request.
    pub(crate) fn again(&self) -> Self {
        let (limit, key) = (self.charge.limit.clone(), self.charge.key.clone());
        let again = (key, self.charge.cost);
        Self::undecided(self.context.clone(), self.position, limit, again, self.waiting)
    }
}
