use super::leases::LeaseId;

/// The contract of an algorithm: how it changes what is stored for one key.
///
/// A store calls [`advance`](Self::advance), compares [`room`](Self::room) with the cost, calls [`add`](Self::add) if the
/// request is admitted, and reports [`wait`](Self::wait) and [`reset`](Self::reset). Times are microseconds since the Unix
/// epoch, lengths of time are microseconds. From one `advance` to the next a rule reads or removes at most [`BOUND`] entries.
pub(crate) trait Rule {
    /// What is stored for one key. The default is the state of a key that nothing was counted on.
    type State: Default;

    /// Finds what counts at `now`, and removes what no longer does.
    ///
    /// Entries that are ahead of the clock, because it was set back, are removed if `weight` does not fit beside them. With
    /// `reads_only` nothing is removed, or the store restores the state afterwards.
    fn advance(&self, state: &mut Self::State, now: u64, weight: u64, reads_only: bool);

    /// The weight that fits.
    fn room(&self, state: &Self::State, now: u64) -> u64;

    /// The weight that fits for the request of this lease, which may have a place in a queue.
    fn own_room(&self, state: &Self::State, now: u64, _weight: u64, _: Option<LeaseId>) -> u64 {
        self.room(state, now)
    }

    /// Whether a request that does not fit may enter the queue, or stay in it, if at most `most` units wait.
    fn may_queue(&self, _: &Self::State, _weight: u64, _: Option<LeaseId>, _most: u64) -> bool {
        false
    }

    /// Adds weight, whether it fits or not.
    fn add(&self, state: &mut Self::State, now: u64, weight: u64);

    /// Time until `cost`, which does not fit now, fits if nothing else is added; at least 1.
    fn wait(&self, state: &Self::State, now: u64, cost: u64) -> u64;

    /// The time at which `cost`, which does not fit now, fits if nothing else is added, so that it can be reserved.
    ///
    /// `None` if at most `most` units would not be enough for those that wait, if the time is not known, and for an algorithm
    /// that stores nothing about later times.
    fn turn(&self, _state: &Self::State, _now: u64, _cost: u64, _most: u64) -> Option<u64> {
        None
    }

    /// Adds weight that is admitted later. Its own turn is the [`turn`](Self::turn) of this limit, if it has one, and that of
    /// the request is the latest of all of its limits. Returns the time at which it counts.
    fn reserve(&self, state: &mut Self::State, now: u64, _turn: Turn, weight: u64) -> u64 {
        self.add(state, now, weight);
        now
    }

    /// Time until nothing counts, if nothing else is added.
    fn reset(&self, state: &Self::State, now: u64) -> u64;

    /// Time for which the state is stored, if nothing else is added: at least until the [`reset`](Self::reset).
    fn lasts(&self, state: &Self::State, now: u64) -> u64 {
        self.reset(state, now)
    }

    /// Subtracts weight that was added at the time `at`, as far as it still counts. Returns whether the state changed.
    fn refund(&self, state: &mut Self::State, now: u64, at: u64, weight: u64) -> bool;

    /// Counts a denial of the charge that the state guards, and returns whether the state changed. Only a ban does.
    fn deny(&self, _: &mut Self::State, _now: u64) -> bool {
        false
    }

    /// Whether the slots of this lease are held.
    fn holds(&self, _: &Self::State, _weight: u64, _: Option<LeaseId>) -> bool {
        false
    }

    /// Makes a change of this weight, for an algorithm with leases that of this lease. Returns the time at which it counts, if
    /// the state changed.
    #[inline(always)]
    fn change(
        &self,
        state: &mut Self::State,
        now: u64,
        change: Change,
        weight: u64,
        _: Option<LeaseId>,
    ) -> Option<u64> {
        let changed = match change {
            Change::Nothing | Change::Renew | Change::End | Change::Queue | Change::Leave => false,
            Change::Add => {
                self.add(state, now, weight);
                true
            }
            Change::Reserve(turn) => return Some(self.reserve(state, now, turn, weight)),
            Change::Deny => self.deny(state, now),
            Change::Refund { at } => self.refund(state, now, at, weight),
        };
        changed.then_some(now)
    }
}

/// What a decision does to a state.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Nothing,
    Add,
    /// Adds what is admitted later.
    Reserve(Turn),
    /// Counts a denial of the charge that a ban guards.
    Deny,
    /// Subtracts what was added at that time, or ends the lease.
    Refund {
        at: u64,
    },
    /// Renews a lease, or adds it again.
    Renew,
    /// Ends a lease, or removes the request from the queue.
    End,
    /// Adds the request to the queue, or refreshes its place.
    Queue,
    /// Removes the request from the queue.
    Leave,
}

/// When a request that waits is admitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// When it fits this limit; `None` if that is now.
    pub(crate) own: Option<u64>,
    /// When it fits all limits.
    pub(crate) joint: u64,
}

/// The most entries that one charge reads or removes.
pub(crate) const BOUND: usize = 1_000;

/// The largest time by which an entry may be ahead of the clock and still belong to it, in microseconds.
pub(crate) const SLACK: u64 = 1_000_000;

/// The largest quota: the largest integer of a structured field (RFC 9651 §3.3.1).
pub(crate) const MAX_QUOTA: u64 = 999_999_999_999_999;

/// Numbers in Lua are exact below this.
pub(crate) const MAX_EXACT: u64 = 1 << 53;

/// The largest weight that is stored for one key, at which Lua still has halves. A larger debt makes no difference.
pub(crate) const MAX_TOTAL: u64 = MAX_EXACT / 4;
