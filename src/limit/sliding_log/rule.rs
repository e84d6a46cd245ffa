use std::{collections::VecDeque, ops::RangeInclusive};

use super::SlidingLog;
use crate::limit::rule::{BOUND, MAX_TOTAL, Rule, SLACK};

/// The admissions of one key, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Log {
    entries: VecDeque<Entry>,
    /// Whether some entries do not weigh 1: then Redis stores the weight of all beside them, and a call reads what has expired.
    is_weighted: bool,
    /// The weight that counts.
    total: u64,
    /// The number of entries at the front that have expired and are not in the total.
    skipped: usize,
    /// The time of the newest entry that was added or read.
    newest: Option<u64>,
    /// How many entries the charge may still read or remove.
    budget: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    at: u64,
    weight: u64,
    /// How much earlier the first of several admissions was. Charges beyond the limit have it also if they are of one time.
    span: Option<u64>,
}

impl Entry {
    fn first_at(&self) -> u64 {
        self.at - self.span.unwrap_or(0)
    }
}

/// The most callers of one check that are an entry each.
pub(crate) const FEW: u64 = 32;

/// How many entries a charge may read or remove. It reads a few others one by one.
pub(crate) const BUDGET: usize = BOUND - 3;

impl Log {
    /// The number of entries that are earlier than `at`.
    fn before(&self, at: u64) -> usize {
        self.entries.partition_point(|entry| entry.at < at)
    }

    fn back(&self) -> Option<u64> {
        self.entries.back().map(|entry| entry.at)
    }

    /// Removes the entries that are not younger than this window, as many as the charge may: windows are half-open.
    fn remove_expired(&mut self, window: u64, now: u64) {
        let expired = now.checked_sub(window).map_or(0, |expired| self.before(expired + 1));
        let removed = expired.min(self.budget - 2);
        self.budget -= removed;
        let weight: u64 = self.entries.drain(..removed).map(|entry| entry.weight).sum();
        // A key in use does not keep the memory of its largest burst.
        if self.entries.capacity() > 4 * self.entries.len() + 64 {
            self.entries.shrink_to(2 * self.entries.len());
        }
        self.skipped = 0;
        self.total = match self.is_weighted {
            true => self.total.saturating_sub(weight),
            // Equal entries are counted without reading them.
            false => {
                self.skipped = expired - removed;
                (self.entries.len() - self.skipped) as u64
            }
        };
    }

    /// Removes what belongs to a clock that is gone, as much as the charge may.
    #[cold]
    fn remove_gone(&mut self, ahead: u64, now: u64) {
        let gone = (self.entries.len() - self.before(ahead + 1)).min(self.budget.saturating_sub(2));
        self.budget -= gone;
        let kept = self.entries.len() - gone;
        let weight: u64 = self.entries.drain(kept..).map(|entry| entry.weight).sum();
        self.total = self.total.saturating_sub(weight);
        self.newest = Some(self.back().filter(|_| self.total > 0).unwrap_or(now));
    }

    /// Inserts an entry. Where the clock was set back, entries ahead of it stay behind this one.
    fn insert(&mut self, entry: Entry) {
        let place = match self.back() {
            Some(newest) if newest > entry.at => self.before(entry.at + 1),
            _ => self.entries.len(),
        };
        self.entries.insert(place, entry);
    }

    /// Adds weight, merged with the last entry since the time `begin`; charges beyond the limit with others of them only.
    fn merge(&mut self, now: u64, weight: u64, begin: u64, is_beyond: bool) {
        let weight = weight.min(MAX_TOTAL.saturating_sub(self.total)).max(1);
        // What has expired and is left counts until it is removed.
        self.total += weight + std::mem::take(&mut self.skipped) as u64;
        let end = self.before(now + 1);
        let mut entry = Entry {
            at: now,
            weight,
            span: is_beyond.then_some(0),
        };
        if let Some(last) = end.checked_sub(1)
            && let merged = self.entries[last]
            && merged.at >= begin
            && (merged.span.is_some() || !is_beyond)
        {
            let span = now - merged.first_at();
            entry.weight += merged.weight;
            entry.span = (is_beyond || merged.span.is_some() || span > 0).then_some(span);
            self.entries.remove(last);
        }
        self.insert(entry);
        self.is_weighted = true;
        self.newest = Some(now);
    }

    /// Takes back weight that was added at the time `at` from the entries of these times, as many as a charge may read. Returns what is
    /// left to take.
    fn take_back(&mut self, at: u64, times: RangeInclusive<u64>, mut left: u64) -> u64 {
        let first = self.before(*times.start());
        let found = self.before(times.end() + 1).saturating_sub(first).min(self.budget - 1);
        for entry in self.entries.range_mut(first..first + found) {
            if entry.first_at() <= at {
                let taken = entry.weight.min(left);
                entry.weight -= taken;
                left -= taken;
                self.total = self.total.saturating_sub(taken);
            }
        }
        let mut position = first;
        for _ in 0..found {
            match self.entries[position].weight {
                0 => drop(self.entries.remove(position)),
                _ => position += 1,
            }
        }
        left
    }

    /// The time of the entry whose expiry frees this much weight. Past the budget it is that of the last entry that was read.
    fn freed_at(&self, need: u64, now: u64) -> u64 {
        if !self.is_weighted {
            let entry = self.entries.get(self.skipped + need as usize - 1);
            return entry.map_or(0, |entry| entry.at);
        }
        let (mut freed, mut last) = (0, now);
        for entry in self.entries.iter().take(self.budget - 1) {
            last = entry.at;
            freed += entry.weight;
            if freed >= need {
                return last;
            }
        }
        last
    }
}

/// The counterpart of `lua/log.lua` and `lua/precise.lua`.
impl Rule for SlidingLog {
    type State = Log;

    fn read(&self, log: &mut Log, now: u64, needed: u64) -> u64 {
        let window = self.window_us();
        let ahead = now + SLACK.min(window);
        // With a precision the last entry decides whether any counts.
        let counts = |newest| newest + window > now && newest <= ahead;
        if self.grain_us() > 0 && !log.back().is_some_and(counts) {
            *log = Log::default();
        }
        (log.newest, log.budget) = (None, BUDGET);
        log.remove_expired(window, now);
        if log.total.saturating_add(needed) > self.quota {
            log.newest = Some(log.back().filter(|_| log.total > 0).unwrap_or(now));
            if log.newest > Some(ahead) {
                log.remove_gone(ahead, now);
            }
        }
        self.quota.saturating_sub(log.total)
    }

    fn add(&self, log: &mut Log, now: u64, weight: u64, count: u64) {
        let grain = self.grain_us();
        if grain > 0 {
            // Where the clock was set back, the last entry goes on.
            let time = log.back().map_or(now, |newest| newest.max(now));
            return log.merge(time, weight, time - time % grain, false);
        }
        let is_beyond = log.total > 0 && log.total >= self.quota;
        let are_alike = weight == count && count <= FEW && (!log.is_weighted || log.total == 0);
        if is_beyond || !are_alike {
            // Of charges beyond the limit, those of a step are one entry, so that a flood of them is few.
            let begin = if is_beyond { now - now % self.step() } else { now };
            return log.merge(now, weight, begin, is_beyond);
        }
        log.is_weighted = false;
        log.total += count;
        log.newest = Some(now);
        for _ in 0..count {
            log.insert(Entry {
                at: now,
                weight: 1,
                span: None,
            });
        }
    }

    fn wait(&self, log: &Log, now: u64, cost: u64) -> u64 {
        let (window, total) = (self.window_us(), log.total);
        let need = (total + cost).saturating_sub(self.quota).min(total);
        if need == 0 {
            return if total == 0 { window } else { 1 };
        }
        let wait = (log.freed_at(need, now) + window).saturating_sub(now);
        // An entry that is further ahead is of a clock that is gone.
        wait.clamp(1, window + SLACK)
    }

    fn reset(&self, log: &Log, now: u64) -> u64 {
        let window = self.window_us();
        match log.newest.or_else(|| log.back()) {
            Some(newest) if log.total > 0 => (newest + window).saturating_sub(now).min(window),
            _ => 0,
        }
    }

    fn give_back(&self, log: &mut Log, now: u64, at: u64, weight: u64, _: u64) -> bool {
        let expired = now.checked_sub(self.window_us());
        let counts = expired.is_none_or(|expired| at > expired);
        let step = self.step();
        log.newest = None;
        let left = match self.grain_us() {
            0 if !counts => weight,
            0 => match log.take_back(at, at..=at, weight) {
                0 => 0,
                left => log.take_back(at, at + 1..=at - at % step + step - 1, left),
            },
            // An admission that is older than the window may count in an entry that is not.
            _ => {
                let from = expired.map_or(at, |expired| at.max(expired + 1));
                let entry = log.entries.get(log.before(from));
                log.take_back(at, from..=entry.map_or(from, |entry| entry.at), weight)
            }
        };
        left < weight
    }
}
