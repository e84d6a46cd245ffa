use crate::{
    Key, Limit,
    store::{Charge, ChargeState},
};

/// The marker of a request with an id, so that its repetitions are not counted.
#[derive(Debug)]
pub(crate) struct Marker {
    limit: Limit,
    key: Key,
}

impl Marker {
    pub(crate) fn new(limit: Limit, key: Key) -> Self {
        Self { limit, key }
    }

    /// The charge before the one that it marks.
    pub(super) fn charge<'a>(&'a self, marked: &Charge<'a>) -> Charge<'a> {
        marked.marker(&self.limit, &self.key, 1)
    }

    /// The charge with which a refund removes it.
    pub(super) fn removal<'a>(&'a self, marked: &Charge<'a>) -> Charge<'a> {
        marked.marker(&self.limit, &self.key, u64::MAX)
    }

    /// Whether the request is a repetition, from the state of the marker, which was counted or not.
    pub(super) fn is_of_repetition(&self, state: &ChargeState, counted: bool) -> bool {
        state.is_of_repetition(self.limit.quota(), counted.into())
    }
}
