use smallvec::SmallVec;

use super::{
    SlidingLog,
    entries::{Entry, Kind, Log, Mark, View},
};
use crate::limit::rule::{MAX_TOTAL, Rule, SLACK};

/// The counterpart of `lua/sliding_log.lua`, `lua/coarse_log.lua` and `lua/weighted_log.lua`, as [`Log`] is that of `lua/log_*.lua`.
impl Rule for SlidingLog {
    type State = Log;

    fn advance(&self, log: &mut Log, now: u64, weight: u64, reads_only: bool) {
        let (window, exact) = (self.window_us(), self.precision == 0);
        log.view = View {
            longest: log.windows.longest(now).max(window),
            ..View::default()
        };
        if !reads_only {
            log.windows.expire(now);
            log.remove_expired(now, exact);
        }
        log.view.total = log.weight;
        if reads_only || log.view.longest > window || log.kind == Kind::Plain {
            log.skip_older_than(window, now);
        }

        // A request that fits does not remove entries that are ahead of the clock.
        if self.room(log, now) >= weight {
            return;
        }
        let ahead = log.ahead(now);
        log.view.gone = log.entries.len() - log.until(ahead);
        match log.kind {
            _ if log.view.gone == 0 => {}
            Kind::Weighted if reads_only => log.skip_gone(),
            Kind::Weighted => log.remove_gone(exact),
            Kind::Plain if reads_only => {}
            Kind::Plain => log.remove_gone(exact),
        }
        if log.kind == Kind::Plain && log.view.gone > 0 {
            log.view.total = log.weight;
            log.skip_older_than(window, now);
            log.view.total = log.view.total.saturating_sub(log.view.gone as u64);
        }
    }

    fn room(&self, log: &Log, _: u64) -> u64 {
        self.quota.saturating_sub(log.view.total)
    }

    fn add(&self, log: &mut Log, now: u64, weight: u64) {
        let newest = log.newest();
        // Only charges go beyond the limit. Those of one step are one entry, so that a flood of them adds few entries.
        let beyond = self.precision == 0 && newest.is_some() && log.view.total >= self.quota;
        if (weight > 1 || self.precision > 0 || beyond) && log.kind == Kind::Plain {
            log.kind = Kind::Weighted;
        }
        // A debt is bounded. What fits is stored in full beside a debt under a longer window.
        let weight = match weight <= self.room(log, now) {
            true => weight,
            false => weight.min(MAX_TOTAL.saturating_sub(log.weight)).max(1),
        };
        log.weight += weight;
        log.view.total += weight;

        // An entry ahead of the clock is of a clock that is gone.
        let (step, end) = (self.step_around(now).0, log.until(now));
        let candidates = match (self.precision, beyond) {
            (0, false) => 0,
            (0, true) => 1,
            _ => log.view.budget - 1,
        };
        let begin = log.before(step).max(end.saturating_sub(candidates));
        let (mut weight, mut first_at) = (weight, now);
        let candidates: SmallVec<[Entry; 2]> = log.entries.drain(begin.min(end)..end).collect();
        for entry in candidates {
            // An entry of another precision may begin before the step: merged, it would expire too late.
            if entry.first_at() < step || beyond && !entry.is_beyond() {
                log.insert(entry);
                continue;
            }
            weight += entry.weight;
            first_at = first_at.min(entry.first_at());
        }
        let mark = match now - first_at {
            span if beyond => Mark::Beyond(span),
            0 => Mark::Plain,
            span => Mark::Merged(span),
        };
        log.insert(Entry { at: now, mark, weight });
        log.windows.store(self.window_us(), now, newest, now);
    }

    fn wait(&self, log: &Log, now: u64, cost: u64) -> u64 {
        let (window, total) = (self.window_us(), log.view.total);
        let need = (total + cost).saturating_sub(self.quota).min(total);
        if need == 0 {
            return window;
        }

        let wait = (log.freed_at(need, now) + window).saturating_sub(now).max(1);
        // An entry that is further ahead is of a clock that is gone.
        wait.min(window + SLACK)
    }

    fn reset(&self, log: &Log, now: u64) -> u64 {
        let counted = log.entries.len() - log.view.gone;
        let Some(newest) = counted.checked_sub(1).and_then(|last| log.entries.get(last)) else {
            return 0;
        };
        (newest.at + self.window_us()).saturating_sub(now).min(self.window_us())
    }

    fn lasts(&self, log: &Log, now: u64) -> u64 {
        self.reset(log, now).max(log.windows.longer_until().saturating_sub(now))
    }

    fn refund(&self, log: &mut Log, now: u64, at: u64, weight: u64) -> bool {
        // The clock may be younger than the window: then all entries count.
        let valid_from = now.checked_sub(self.window_us()).map_or(0, |expired| expired + 1);
        let (exact, counts, step_end) = (self.precision == 0, at >= valid_from, self.step_around(at).1);
        let left = match exact {
            false => log.take_back(at.max(valid_from)..=step_end, at, counts, weight),
            true if !counts => weight,
            true => match log.take_back(at..=at, at, true, weight) {
                0 => 0,
                // Charges beyond the limit, and admissions under a limit with a precision, may be merged with later ones.
                left => log.take_back(at + 1..=step_end, at, true, left),
            },
        };
        left < weight
    }
}

impl Log {
    /// The latest time of an entry that belongs to the clock which is `now`.
    fn ahead(&self, now: u64) -> u64 {
        now + SLACK.min(self.view.longest)
    }
}
