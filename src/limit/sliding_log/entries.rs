use std::{collections::VecDeque, ops::RangeInclusive};

use crate::limit::rule::BOUND;

/// The admissions of one key, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(super) entries: VecDeque<Entry>,
    pub(super) kind: Kind,
    /// What all entries weigh.
    pub(super) weight: u64,
    pub(super) windows: Windows,
    pub(super) view: View,
}

/// How a log is stored in Redis, which decides what a call has to read of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Kind {
    /// All entries weigh 1, so that it is enough to count them.
    #[default]
    Plain,
    /// The weight of all entries is stored beside them.
    Weighted,
}

/// What of a log counts for the charge that is decided.
#[derive(Debug)]
pub(super) struct View {
    /// The weight that counts.
    pub(super) total: u64,
    /// The number of entries at the front that are stored and not in the total.
    pub(super) skipped: usize,
    /// The number of entries that no longer count and may be in the total, since there are too many to read.
    pub(super) late: usize,
    /// The number of entries at the back that a clock which was set back has left, and that are not removed.
    pub(super) gone: usize,
    /// The longest window under which entries that count were stored, that of the charge included.
    pub(super) longest: u64,
    /// The number of entries that this charge may still read or remove.
    pub(super) budget: usize,
}

impl Default for View {
    fn default() -> Self {
        Self {
            total: 0,
            skipped: 0,
            late: 0,
            gone: 0,
            longest: 0,
            budget: BUDGET,
        }
    }
}

/// Ordered like the members in Redis, whose names decide where the times are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Entry {
    pub(super) at: u64,
    pub(super) mark: Mark,
    pub(super) weight: u64,
}

/// What an entry consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Mark {
    /// Admissions of one time.
    Plain,
    /// Admissions of one grain, the first of them this much earlier.
    Merged(u64),
    /// Charges beyond the limit, the first of them this much earlier.
    Beyond(u64),
}

impl Entry {
    /// The time of its first admission.
    pub(super) fn first_at(&self) -> u64 {
        match self.mark {
            Mark::Merged(span) | Mark::Beyond(span) => self.at - span,
            Mark::Plain => self.at,
        }
    }

    pub(super) fn is_beyond(&self) -> bool {
        matches!(self.mark, Mark::Beyond(_))
    }
}

/// The budget of a charge. It keeps some for the ends of a log, which are read one by one.
pub(crate) const BUDGET: usize = BOUND - 3;

impl Log {
    /// The number of entries that are earlier than `at`.
    pub(super) fn before(&self, at: u64) -> usize {
        self.entries.partition_point(|entry| entry.at < at)
    }

    /// The number of entries that are not later than `at`.
    pub(super) fn until(&self, at: u64) -> usize {
        self.entries.partition_point(|entry| entry.at <= at)
    }

    /// The number of entries that are not younger than this window: windows are half-open.
    pub(super) fn older_than(&self, window: u64, now: u64) -> usize {
        now.checked_sub(window).map_or(0, |expired| self.until(expired))
    }

    pub(super) fn newest(&self) -> Option<u64> {
        self.entries.back().map(|entry| entry.at)
    }

    /// Removes entries that have expired under all windows, oldest first, as many as the charge may.
    pub(super) fn remove_expired(&mut self, now: u64, exact: bool) {
        let expired = self.older_than(self.view.longest, now);
        let removed = expired.min(self.view.budget - 2);
        for entry in self.entries.drain(..removed) {
            self.weight = self.weight.saturating_sub(entry.weight);
        }
        self.view.budget -= removed;
        self.view.late = expired - removed;
        if removed > 0 {
            self.simplify(exact);
        }
    }

    /// Subtracts from the total the entries that a clock which was set back has left.
    #[cold]
    pub(super) fn skip_gone(&mut self) {
        let reads = self.view.gone.min(self.view.budget - 2);
        let gone = self.entries.range(self.entries.len() - reads..);
        let weight = gone.map(|entry| entry.weight).sum();
        self.view.total = self.view.total.saturating_sub(weight);
        self.view.budget -= reads;
    }

    /// Removes the entries that a clock which was set back has left, newest first.
    #[cold]
    pub(super) fn remove_gone(&mut self, exact: bool) {
        let removed = self.view.gone.min(self.view.budget - 2);
        let start = self.entries.len() - removed;
        let mut weight = 0;
        for entry in self.entries.drain(start..) {
            weight += entry.weight;
        }
        self.weight = self.weight.saturating_sub(weight);
        self.view.total = self.view.total.saturating_sub(weight);
        self.view.budget -= removed;
        self.view.gone -= removed;
        self.simplify(exact);
    }

    /// Finds, after a removal, whether the log is of a simpler kind now.
    fn simplify(&mut self, exact: bool) {
        let is_plain = exact && !self.entries.is_empty() && self.weight == self.entries.len() as u64;
        if self.kind == Kind::Weighted && is_plain {
            self.kind = Kind::Plain;
        }
    }

    /// Subtracts from the total the entries that are stored, but are older than the window of the charge.
    pub(super) fn skip_older_than(&mut self, window: u64, now: u64) {
        let old = self.older_than(window, now);
        let young = self.entries.len() - old;
        // Of a plain log the entries are counted; else the fewer of both are read.
        let reads = if self.kind == Kind::Plain { 0 } else { old.min(young) };
        if old == 0 || reads > self.view.budget - 2 {
            self.view.late = old;
            return;
        }
        let weight = match old <= young {
            true => self.entries.range(..old).map(|entry| entry.weight).sum(),
            false => {
                let young: u64 = self.entries.range(old..).map(|entry| entry.weight).sum();
                self.weight.saturating_sub(young)
            }
        };
        self.view.budget -= reads;
        self.view.total = self.weight.saturating_sub(weight);
        self.view.skipped = old;
        self.view.late = 0;
    }

    /// The time of the entry whose expiry frees this much weight. Past the budget it is that of the last entry that was read.
    pub(super) fn freed_at(&self, need: u64, now: u64) -> u64 {
        let skipped = self.view.skipped;
        if self.kind == Kind::Plain || self.weight == self.entries.len() as u64 {
            let entry = self.entries.get(skipped + need as usize - 1);
            return entry.map_or(now, |entry| entry.at);
        }
        let (mut freed, mut last) = (0, now);
        for entry in self.entries.iter().skip(skipped).take(self.view.budget - 1) {
            last = entry.at;
            freed += entry.weight;
            if freed >= need {
                return last;
            }
        }
        last
    }

    /// Takes weight back from the entries with these times that have an admission of the time `at`, as many as the charge may
    /// read. Returns how much is left to take.
    pub(super) fn take_back(&mut self, times: RangeInclusive<u64>, at: u64, beyond: bool, mut left: u64) -> u64 {
        let first = self.before(*times.start());
        let found = self.until(*times.end()).saturating_sub(first).min(self.view.budget - 1);
        self.view.budget -= found;
        let mut position = first;
        for _ in 0..found {
            let mut entry = self.entries[position];
            if left == 0 || entry.first_at() > at || entry.is_beyond() && !beyond {
                position += 1;
                continue;
            }
            let taken = entry.weight.min(left);
            left -= taken;
            self.weight = self.weight.saturating_sub(taken);
            self.view.total = self.view.total.saturating_sub(taken);
            self.entries.remove(position);
            entry.weight -= taken;
            if entry.weight > 0 {
                self.insert(entry);
                position += 1;
            }
        }
        left
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

/// The windows under which the entries of a log were stored.
///
/// A policy with several plans, and replicas with several versions of a limit, count on one key with different windows. An entry
/// is removed when it is older than the longest of those that are still needed, so that no charge removes what counts for
/// another.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// The shortest of them, under which the newest entry may have been stored; 0 if nothing was stored.
    shortest: u64,
    /// The others, longest first. Each one is needed longer than those before it.
    longer: Vec<Needed>,
}

/// A window with the time until which entries that were stored under it count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Needed {
    window: u64,
    until: u64,
}

/// The most longer windows that are told apart. With more of them, entries are kept for too long.
pub(crate) const LONGER_WINDOWS: usize = 4;

impl Windows {
    /// The longest window that is needed.
    pub(super) fn longest(&self, now: u64) -> u64 {
        let needed = self.longer.iter().find(|longer| longer.until > now);
        needed.map_or(self.shortest, |longer| longer.window)
    }

    /// The latest time until which an entry under a longer window than the shortest counts; 0 if there is none.
    pub(super) fn longer_until(&self) -> u64 {
        self.longer.last().map_or(0, |longer| longer.until)
    }

    pub(super) fn expire(&mut self, now: u64) {
        if !self.longer.is_empty() {
            self.longer.retain(|longer| longer.until > now);
        }
    }

    /// Stores the window of an entry that is added at this time. `newest` is the time of the newest entry before it.
    #[inline]
    pub(super) fn store(&mut self, window: u64, at: u64, newest: Option<u64>, now: u64) {
        if window != self.shortest {
            self.store_other(window, at, newest, now);
        }
    }

    #[cold]
    fn store_other(&mut self, window: u64, at: u64, newest: Option<u64>, now: u64) {
        let mut all = std::mem::take(&mut self.longer);
        all.extend(newest.map(|newest| Needed {
            window: self.shortest,
            until: newest + self.shortest,
        }));
        let until = all.iter().filter(|needed| needed.window == window);
        let until = until.fold(at + window, |until, needed| until.max(needed.until));
        all.retain(|needed| needed.window != window);
        all.push(Needed { window, until });
        all.sort_unstable_by_key(|needed| std::cmp::Reverse(needed.window));
        // Each is needed that is the longest at some time, and that of this entry.
        let mut latest = now;
        all.retain(|needed| {
            let is_needed = needed.until > latest || needed.window == window;
            latest = latest.max(needed.until);
            is_needed
        });
        self.shortest = all.pop().map_or(window, |shortest| shortest.window);
        while all.len() > LONGER_WINDOWS {
            let until = all.remove(1).until;
            all[0].until = all[0].until.max(until);
        }
        self.longer = all;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SlidingLog, limit::rule::Rule};

    #[test]
    fn admissions_of_the_first_grain_since_the_epoch_are_one_entry() {
        let (limit, mut log) = (SlidingLog::per_minute(10).precision(4), Log::default());
        for now in [0, 0, 1, 14_999_999] {
            limit.advance(&mut log, now, 1, false);
            limit.add(&mut log, now, 1);
        }
        assert_eq!((log.entries.len(), log.weight), (1, 4));
    }

    #[test]
    fn of_many_entries_that_a_clock_set_back_has_left_none_counts_for_a_reset() {
        const HOUR: u64 = 3_600_000_000;

        let quota = 2 * BUDGET as u64;
        let (limit, mut log) = (SlidingLog::per_minute(quota), Log::default());
        for later in 0..quota {
            limit.add(&mut log, 2 * HOUR + later, 1);
        }

        limit.advance(&mut log, HOUR, 1, false);
        assert!(!log.entries.is_empty(), "one call removes no more than the budget");
        assert_eq!(limit.reset(&log, HOUR), 0);
    }

    fn stored(windows: &[(u64, u64)]) -> Windows {
        let (mut stored, mut newest) = (Windows::default(), None);
        for &(window, at) in windows {
            stored.store(window, at, newest, at);
            newest = Some(at);
        }
        stored
    }

    #[test]
    fn a_longer_window_is_needed_until_its_last_entry_has_expired() {
        let windows = stored(&[(100, 10), (100, 20), (7, 30), (7, 100)]);
        assert_eq!([31, 119, 120].map(|now| windows.longest(now)), [100, 100, 7]);
    }

    #[test]
    fn an_entry_under_the_longest_window_makes_the_others_needless() {
        let windows = stored(&[(100, 10), (50, 20), (7, 30), (100, 40)]);
        assert_eq!((windows.shortest, windows.longer.len()), (100, 0));
    }

    #[test]
    fn each_of_several_windows_is_needed_in_its_time() {
        let windows = stored(&[(100, 10), (95, 20), (7, 30)]);
        assert_eq!(
            [30, 109, 110, 114, 115].map(|now| windows.longest(now)),
            [100, 100, 95, 95, 7]
        );
    }

    #[test]
    fn of_too_many_windows_a_longer_one_is_kept() {
        let many: Vec<_> = (0..9).map(|n| (1_000 - 10 * n, 20 * n)).collect();
        let windows = stored(&many);
        assert_eq!(windows.longer.len(), LONGER_WINDOWS);
        for &(window, at) in &many {
            assert!(windows.longest(at + window - 1) >= window, "{window}");
        }
    }
}
