//! The slots of a decision.

use std::sync::{Arc, Mutex, PoisonError};

use super::{Decision, PolicyDecision};
use crate::{
    slots::{Lease, Place, Slots},
    store::{LocalCharge, OwedKind},
};

impl Decision {
    /// Takes the slots that the request holds of policies with a limit of [`Concurrency`](crate::Concurrency), to release them
    /// when work has ended that continues after the response.
    ///
    /// There are slots once for a decision and all its clones; `None` if they were taken or released, or if no such policy
    /// applies. Slots that are not taken are released when the response body ends or, of a decision of a
    /// [`Limiter`](crate::Limiter), when its last clone is dropped.
    ///
    /// ```
    /// use tower_quota::{Concurrency, Limiter, MemoryStore, Policy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let exports = Limiter::new(MemoryStore::new(), Policy::new("exports", Concurrency::new(1)));
    ///
    /// let slots = exports.check("42").await?.take_slots();
    /// assert!(slots.is_some());
    /// assert!(!exports.check("42").await?.is_allowed());
    ///
    /// drop(slots);
    /// assert!(exports.check("42").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn take_slots(&self) -> Option<Slots> {
        let mut slots = Slots::default();
        self.take_slots_into(&mut slots);
        (!slots.is_empty()).then_some(slots)
    }

    fn take_slots_into(&self, slots: &mut Slots) {
        if let Some([outer, inner]) = &self.0.joined {
            outer.take_slots_into(slots);
            inner.take_slots_into(slots);
        }
        if let Some(untaken) = &self.0.slots {
            let mut untaken = untaken.lock().unwrap_or_else(PoisonError::into_inner);
            slots.append(std::mem::take(&mut untaken));
        }
    }

    /// Whether the decision of this layer or limiter has slots, which may have been taken.
    #[inline]
    pub(crate) fn has_slots(&self) -> bool {
        self.0.slots.is_some()
    }

    /// Whether a policy takes slots.
    #[inline]
    pub(crate) fn has_leases(&self) -> bool {
        self.as_slice().iter().any(|policy| policy.lease.is_some())
    }

    /// Holds the slots that were taken, before there are clones. Those of policies that observe a denied request are released
    /// at once. The local charges are those of the policies that this process has counted, since the store failed.
    #[cold]
    pub(crate) fn hold_slots(&mut self, local: Option<&[Option<LocalCharge>]>) {
        let mut slots = Slots::default();
        for (position, policy) in self.as_slice().iter().enumerate() {
            let local = local.and_then(|local| local.get(position)?.as_ref());
            policy.hold_slots_in(&mut slots, local);
        }
        if let (true, false, Some(inner)) = (self.is_allowed(), slots.is_empty(), Arc::get_mut(&mut self.0)) {
            inner.slots = Some(Box::new(Mutex::new(slots)));
        }
    }
}

impl PolicyDecision {
    /// Releases the slots that the store may have taken, since the outcome is unknown.
    #[cold]
    pub(crate) fn release_unknown(&self) {
        let mut slots = Slots::default();
        self.hold_slots_in(&mut slots, None);
        drop(slots);
    }

    fn hold_slots_in(&self, slots: &mut Slots, local: Option<&LocalCharge>) {
        let Some(ticket) = self.lease.as_ref().filter(|_| self.denial.is_none()) else {
            return;
        };
        let (named, context) = (self.named(), &self.context);
        let (place, limit) = match local {
            Some(local) => (Place::Process(context.failover.clone()), local.limit().clone()),
            None => (Place::Store(context.store.clone()), named.limit.clone()),
        };
        let lease = Lease::new(place, (named.name.clone(), limit), self.key.clone(), self.cost, ticket);
        if let Some(lease) = lease {
            let lease = lease.owing(context.outstanding.owe(OwedKind::Release));
            slots.push(lease, &context.keeper, self.hold());
        }
    }
}
