use crate::Decision;

/// Releases the slots of a decision when it is dropped, even if the decision has clones. Slots that a handler has taken stay.
pub(crate) struct Release(Decision);

impl Release {
    /// The release of a decision with slots.
    #[inline]
    pub(crate) fn of(decision: &Decision) -> Option<Self> {
        decision.has_slots().then(|| Self(decision.clone()))
    }

    /// Releases the slots now.
    #[cold]
    pub(crate) fn now(&self) {
        drop(self.0.take_slots());
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        self.now();
    }
}
