use std::collections::VecDeque;

use crate::limit::rule::BOUND;

/// The admissions of one key, oldest first.
#[derive(Debug)]
pub(crate) struct Log {
    pub(super) entries: VecDeque<Entry>,
    /// The weight that counts.
    pub(super) total: u64,
    /// Whether an entry heavier than 1 was added since the log was last empty.
    pub(super) weighted: bool,
    /// Whether a reservation was added whose turn has not come since. Then the log is weighted.
    pub(super) reserved: bool,
    /// The number of entries at the front that have expired and are not removed yet.
    pub(super) late: usize,
    /// The number of entries at the back that a clock which was set back has left, and that are not removed yet.
    pub(super) gone: usize,
    /// The number of entries that this call may still read or remove.
    pub(super) budget: usize,
}

/// Ordered like the members in Redis, whose names decide where the times are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Entry {
    pub(super) at: u64,
    /// When a reservation was made, which is counted at a later time; else [`PLAIN`] or [`BEYOND`].
    pub(super) made: u64,
    pub(super) weight: u64,
}

/// The entry of an admission.
pub(super) const PLAIN: u64 = 0;

/// The entry of charges beyond the limit.
pub(super) const BEYOND: u64 = u64::MAX;

impl Entry {
    pub(super) fn is_beyond(&self) -> bool {
        self.made == BEYOND
    }

    /// Whether it is a reservation that was made until then.
    pub(super) fn is_reserved_until(&self, latest: u64) -> bool {
        self.made > PLAIN && self.made <= latest
    }
}

/// The budget of a charge. It keeps some for the ends of a log, which are read one by one: the oldest entry, and the newest one
/// before and after a removal.
pub(crate) const BUDGET: usize = BOUND - 3;

impl Default for Log {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            total: 0,
            weighted: false,
            reserved: false,
            late: 0,
            gone: 0,
            budget: BUDGET,
        }
    }
}

impl Log {
    /// The number of entries that are earlier than `at`.
    pub(super) fn before(&self, at: u64) -> usize {
        self.entries.partition_point(|entry| entry.at < at)
    }

    /// The number of entries that are not later than `at`.
    pub(super) fn until(&self, at: u64) -> usize {
        self.entries.partition_point(|entry| entry.at <= at)
    }

    /// Subtracts an entry that was removed.
    pub(super) fn forget(&mut self, entry: Option<Entry>) {
        let weight = entry.map_or(0, |entry| entry.weight);
        self.total = self.total.saturating_sub(weight);
        self.budget -= 1;
    }

    /// Corrects the total after entries were removed. While all entries weigh 1, it is their number. A reservation whose turn
    /// has come is an admission like others.
    pub(super) fn recount(&mut self, exact: bool, now: u64) {
        if self.reserved && self.entries.back().is_some_and(|newest| newest.at <= now) {
            self.reserved = false;
        }
        if exact && !self.entries.is_empty() && self.total == self.entries.len() as u64 && !self.reserved {
            self.weighted = false;
        }
        if !self.weighted {
            self.total = (self.entries.len() - self.late - self.gone) as u64;
        }
    }

    /// Removes the entries after `ahead` that a clock which was set back has left, newest first, and keeps those that were
    /// reserved by this clock.
    #[cold]
    pub(super) fn remove_gone(&mut self, ahead: u64) {
        let first = self.until(ahead);
        let is_reserved = |entry: Option<&Entry>| entry.is_some_and(|entry| entry.is_reserved_until(ahead));
        // Where both ends belong to this clock, none is looked for between them: a long queue would be read each time.
        if is_reserved(self.entries.back()) && is_reserved(self.entries.get(first)) {
            self.gone = 0;
            return;
        }
        let reads = self.gone.min(self.budget - 2);
        let read = self.entries.split_off(self.entries.len() - reads);
        self.budget -= reads;
        self.gone -= reads;
        let (kept, gone): (VecDeque<_>, VecDeque<_>) = read.into_iter().partition(|entry| is_reserved(Some(entry)));
        self.total = gone
            .iter()
            .fold(self.total, |total, entry| total.saturating_sub(entry.weight));
        if !kept.is_empty() {
            self.gone = 0;
        }
        self.entries.extend(kept);
    }

    /// The time of the entry whose expiry frees this much weight, and whether it is known: past the budget it is that of the
    /// last entry that was read.
    pub(super) fn freed_at(&self, need: u64, now: u64, budget: usize) -> (u64, bool) {
        let at = |position| self.entries.get(position).map_or(now, |entry: &Entry| entry.at);
        if !self.weighted {
            return (at(self.late + need as usize - 1), true);
        }
        if self.total == self.entries.len() as u64 {
            return (at(need as usize - 1), true);
        }
        let (mut freed, mut last) = (0, now);
        for entry in self.entries.iter().take(budget - 1) {
            last = entry.at;
            freed += entry.weight;
            if freed >= need {
                return (last, true);
            }
        }
        (last, false)
    }

    /// Subtracts weight from an entry. Returns whether nothing is left of it, and the entry is removed.
    pub(super) fn take_back(&mut self, position: usize, left: &mut u64) -> bool {
        let Some(mut entry) = self.entries.get(position).copied().filter(|_| *left > 0) else {
            return false;
        };
        let taken = entry.weight.min(*left);
        *left -= taken;
        self.total = self.total.saturating_sub(taken);
        self.entries.remove(position);
        entry.weight -= taken;
        if entry.weight > 0 {
            self.insert(entry);
        }
        entry.weight == 0
    }

    pub(super) fn insert(&mut self, entry: Entry) {
        // Where the clock was set back, entries ahead of it stay behind this one.
        let place = match self.entries.back() {
            Some(newest) if *newest > entry => self.entries.partition_point(|other| *other <= entry),
            _ => self.entries.len(),
        };
        self.entries.insert(place, entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        SlidingLog,
        limit::rule::{Rule, Turn},
    };

    #[test]
    fn admissions_of_the_first_grain_since_the_epoch_are_one_entry() {
        let (limit, mut log) = (SlidingLog::per_minute(10).precision(4), Log::default());
        for now in [0, 0, 1, 14_999_999] {
            limit.advance(&mut log, now, 1);
            limit.add(&mut log, now, 1);
        }
        assert_eq!((log.entries.len(), log.total), (1, 4));
    }

    #[test]
    fn a_turn_is_found_also_after_many_entries_have_expired() {
        let (limit, mut log) = (SlidingLog::per_second(2_000), Log::default());
        let mut add = |now, weight| {
            limit.advance(&mut log, now, weight);
            limit.add(&mut log, now, weight);
        };
        (0..200).for_each(|now| add(now, 1));
        (0..990).for_each(|nth| add(500_000 + nth, 1));
        add(600_000, 2);

        // The weight of the first 950 entries that count.
        let (now, cost) = (1_000_300, 2_000 - 992 + 950);
        limit.advance(&mut log, now, cost);
        assert_eq!(limit.turn(&log, now, cost, u64::MAX), Some(1_500_949));
    }

    #[test]
    fn of_many_entries_that_a_clock_set_back_has_left_none_counts_for_a_reset_or_a_turn() {
        const HOUR: u64 = 3_600_000_000;

        let quota = 2 * BUDGET as u64;
        let (limit, mut log) = (SlidingLog::per_minute(quota), Log::default());
        for later in 0..quota {
            limit.add(&mut log, 2 * HOUR + later, 1);
        }
        let (own, joint) = (Some(2 * HOUR + 60_000_000), 2 * HOUR + 60_000_000);
        limit.reserve(&mut log, 2 * HOUR + quota, Turn { own, joint }, 1);

        limit.advance(&mut log, HOUR, 1);
        assert!(!log.entries.is_empty(), "one call removes no more than the budget");
        assert_eq!(limit.reset(&log, HOUR), 0);
        assert_eq!(limit.turn(&log, HOUR, 1, quota), None);
    }
}
