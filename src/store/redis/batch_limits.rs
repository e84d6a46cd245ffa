/// How many requests are sent in a call, and how many calls are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchLimits {
    /// The most requests in a call.
    pub(super) max_requests: usize,
    /// The most calls in flight below `low_load` requests in flight.
    pub(super) max_calls: usize,
    /// From this many requests in flight on, at most two calls are: Redis executes one while the callers of the other
    /// continue. More calls would only contain fewer requests each.
    pub(super) low_load: usize,
}

impl BatchLimits {
    pub(super) const GROUP_COMMIT: Self = Self {
        max_requests: 256,
        max_calls: 8,
        low_load: 16,
    };
    /// Each request is sent at once, in a call of its own.
    pub(super) const NO_BATCHES: Self = Self {
        max_requests: 1,
        max_calls: usize::MAX,
        low_load: usize::MAX,
    };
}
