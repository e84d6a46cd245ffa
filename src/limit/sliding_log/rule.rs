use super::{
    SlidingLog,
    entries::{BEYOND, BUDGET, Entry, Log, PLAIN},
};
use crate::limit::rule::{MAX_TOTAL, Rule, Turn};

impl Rule for SlidingLog {
    type State = Log;

    fn advance(&self, log: &mut Log, now: u64, weight: u64) {
        log.budget = BUDGET;
        log.gone = 0;

        // Windows are half-open: an admission one whole window ago no longer counts.
        log.late = now
            .checked_sub(self.window_us())
            .map_or(0, |expired| log.until(expired));
        for _ in 0..log.late.min(log.budget - 2) {
            let oldest = log.entries.pop_front();
            log.forget(oldest);
            log.late -= 1;
        }
        log.recount(self.precision == 0, now);

        // A request that fits does not remove entries that are ahead of the clock.
        if self.room(log, now) >= weight {
            return;
        }
        let ahead = self.ahead(now);
        log.gone = log.entries.len() - log.until(ahead);
        if log.reserved {
            if log.gone > 0 {
                log.remove_gone(ahead);
                log.recount(true, now);
            }
            return;
        }
        for _ in 0..log.gone.min(log.budget - 2) {
            let newest = log.entries.pop_back();
            log.forget(newest);
            log.gone -= 1;
        }
        log.recount(self.precision == 0, now);
    }

    fn room(&self, log: &Log, _: u64) -> u64 {
        self.quota.saturating_sub(log.total)
    }

    fn add(&self, log: &mut Log, now: u64, weight: u64) {
        // Only charges go beyond the limit. Those of one step are one entry, so that a flood of them adds few entries.
        let beyond = self.precision == 0 && !log.entries.is_empty() && log.total >= self.quota;
        if (weight > 1 || self.precision > 0 || beyond) && !log.weighted {
            log.weighted = true;
            log.total = log.entries.len() as u64;
        }
        let weight = weight.min(MAX_TOTAL.saturating_sub(log.total)).max(1);
        log.total += weight;

        let mut entry = Entry {
            at: now,
            made: if beyond { BEYOND } else { PLAIN },
            weight,
        };
        let merging = match (self.precision, beyond) {
            (0, false) => 0..0,
            (0, true) => {
                let newest = log.until(self.step_around(now).1);
                let merges =
                    |newest: &Entry| newest.is_beyond() && self.step_around(newest.at) == self.step_around(now);
                let merges = newest > 0 && log.entries.get(newest - 1).is_some_and(merges);
                newest - usize::from(merges)..newest
            }
            _ => {
                let (first, last) = self.step_around(now);
                let end = log.until(last);
                let start = log.before(first);
                start.max(end.saturating_sub(log.budget - 1))..end
            }
        };
        for merged in log.entries.drain(merging) {
            entry.at = entry.at.max(merged.at);
            entry.weight += merged.weight;
        }
        log.insert(entry);
    }

    fn wait(&self, log: &Log, now: u64, cost: u64) -> u64 {
        let need = (log.total + cost).saturating_sub(self.quota).min(log.total);
        if need == 0 {
            return self.window_us();
        }

        let (at, _) = log.freed_at(need, now, log.budget);
        (at + self.window_us()).saturating_sub(now).max(1)
    }

    fn turn(&self, log: &Log, now: u64, cost: u64, most: u64) -> Option<u64> {
        let need = (log.total + cost).saturating_sub(self.quota);
        let is_whole = log.late == 0 && log.gone == 0;
        if !is_whole || self.precision > 0 || cost > self.quota || need == 0 || need > most {
            return None;
        }
        // In Redis the turn is found by a charge of its own.
        let (at, is_known) = log.freed_at(need, now, BUDGET);
        is_known.then(|| (at + self.window_us()).max(now + 1))
    }

    fn reserve(&self, log: &mut Log, now: u64, turn: Turn, weight: u64) -> u64 {
        if self.precision > 0 {
            self.add(log, now, weight);
            return now;
        }
        if !log.weighted {
            log.weighted = true;
            log.total = log.entries.len() as u64;
        }
        log.reserved = true;
        log.total += weight;
        log.insert(Entry {
            at: turn.joint,
            made: now,
            weight,
        });
        turn.joint
    }

    fn reset(&self, log: &Log, now: u64) -> u64 {
        let counted = log.entries.len() - log.gone;
        if counted <= log.late {
            return 0;
        }
        let Some(newest) = log.entries.get(counted - 1) else {
            return 0;
        };
        let reset = (newest.at + self.window_us()).saturating_sub(now);
        match log.reserved && newest.is_reserved_until(self.ahead(now)) {
            true => reset,
            false => reset.min(self.window_us()),
        }
    }

    fn refund(&self, log: &mut Log, now: u64, at: u64, weight: u64) -> bool {
        // The clock may be younger than the window: then all entries count.
        let valid_from = now.checked_sub(self.window_us()).map_or(0, |expired| expired + 1);
        let exact = self.precision == 0;
        let step = self.step_around(at);
        let (from, upto) = if exact { (at, at) } else { step };

        let first = log.before(from.max(valid_from));
        let found = log.until(upto).saturating_sub(first).min(log.budget - 1);
        let mut left = weight;
        let mut position = first;
        for _ in 0..found {
            position += usize::from(!log.take_back(position, &mut left));
        }

        // A charge beyond the limit may be merged with later ones.
        if exact && left > 0 {
            let reads = log.budget - 1 - found;
            let end = log.until(step.1);
            let first = log.before(valid_from.max(at + 1)).max(end.saturating_sub(reads));
            for position in (first..end).rev() {
                if log.entries.get(position).is_some_and(Entry::is_beyond) {
                    log.take_back(position, &mut left);
                }
            }
        }
        left < weight
    }
}
