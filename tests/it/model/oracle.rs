//! What each algorithm counts, by its docs: plain lists of all admissions that are added up, and a bucket in exact fractions.

use super::world::{Algorithm, Terms};

/// Bounds of a number. Where the docs give the number, both are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) least: u64,
    pub(crate) most: u64,
}

impl Span {
    fn exactly(number: u64) -> Self {
        Self {
            least: number,
            most: number,
        }
    }

    /// What is left of a quota.
    fn left_of(self, quota: u64) -> Self {
        Self {
            least: quota.saturating_sub(self.most),
            most: quota.saturating_sub(self.least),
        }
    }

    pub(crate) fn minus(self, number: u64) -> Self {
        Self {
            least: self.least.saturating_sub(number),
            most: self.most.saturating_sub(number),
        }
    }

    pub(crate) fn contains(self, number: u64) -> bool {
        (self.least..=self.most).contains(&number)
    }
}

/// What is counted on one key of one policy. Times are in microseconds since the epoch.
#[derive(Debug)]
pub(crate) enum Oracle {
    Log(Log),
    Counter(List),
    Anchored { opened: u64, list: List },
    Aligned(List),
    Bucket(Bucket),
}

impl Oracle {
    /// The count of a key that nothing was counted on.
    pub(crate) fn new(terms: &Terms) -> Self {
        match terms.algorithm {
            Algorithm::Log => Self::Log(Log::default()),
            Algorithm::Counter => Self::Counter(List::default()),
            Algorithm::Anchored => Self::Anchored {
                opened: 0,
                list: List::default(),
            },
            Algorithm::Aligned | Algorithm::Hours => Self::Aligned(List::default()),
            Algorithm::Bucket => Self::Bucket(Bucket::default()),
        }
    }

    /// Lets the time pass until now.
    pub(crate) fn advance(&mut self, terms: &Terms, now: u64) {
        match self {
            Self::Log(log) => log.advance(terms, now),
            Self::Bucket(bucket) => bucket.advance(terms, now),
            Self::Anchored { opened, list } if now >= *opened + terms.window => list.0.clear(),
            Self::Anchored { .. } => {}
            // What no window can contain.
            Self::Counter(list) | Self::Aligned(list) => list.0.retain(|(at, _)| at + 2 * terms.window > now),
        }
    }

    /// How much fits.
    pub(crate) fn room(&self, terms: &Terms, now: u64) -> Span {
        let used = match self {
            Self::Log(log) => Span::exactly(log.used(terms, now)),
            Self::Counter(list) => Span::exactly(list.weighted(terms.window, now)),
            Self::Anchored { list, .. } => Span::exactly(list.since(0)),
            Self::Aligned(list) => Span::exactly(list.since(now - now % terms.window)),
            Self::Bucket(bucket) => return bucket.room(terms),
        };
        used.left_of(terms.quota)
    }

    pub(crate) fn add(&mut self, terms: &Terms, now: u64, weight: u64) {
        match self {
            Self::Log(log) => log.add(terms, now, weight),
            Self::Counter(list) | Self::Aligned(list) => list.0.push((now, weight)),
            Self::Anchored { opened, list } => {
                if list.since(0) == 0 {
                    *opened = now;
                }
                list.0.push((now, weight));
            }
            Self::Bucket(bucket) => bucket.add(terms, now, weight),
        }
    }

    /// Takes back weight that was counted at this time.
    pub(crate) fn refund(&mut self, terms: &Terms, now: u64, at: u64, weight: u64) {
        match self {
            Self::Log(log) => log.refund(terms, now, at, weight),
            Self::Counter(list) | Self::Aligned(list) | Self::Anchored { list, .. } => list.refund(at, weight),
            Self::Bucket(bucket) => bucket.refund(terms, now, at, weight),
        }
    }

    /// The time until this cost, which is within the quota and does not fit, fits.
    pub(super) fn wait(&self, terms: &Terms, now: u64, cost: u64) -> Span {
        match self {
            Self::Log(log) => log.wait(terms, now, cost),
            Self::Counter(list) => {
                // From one microsecond to the next, no more is used.
                let fits = |after: u64| list.weighted(terms.window, now + after) + cost <= terms.quota;
                let (mut early, mut late) = (0, 2 * terms.window);
                while late - early > 1 {
                    let middle = early.midpoint(late);
                    match fits(middle) {
                        true => late = middle,
                        false => early = middle,
                    }
                }
                Span::exactly(late)
            }
            Self::Anchored { opened, .. } => Span::exactly(opened + terms.window - now),
            Self::Aligned(_) => Span::exactly(terms.window - now % terms.window),
            Self::Bucket(bucket) => bucket.wait(terms, cost),
        }
    }

    /// The time until nothing counts.
    pub(super) fn reset(&self, terms: &Terms, now: u64) -> Span {
        let until = |end: u64| Span::exactly(end.saturating_sub(now));
        let opened = now - now % terms.window;
        match self {
            Self::Log(log) => log.reset(terms, now),
            Self::Counter(list) if list.since(opened) > 0 => until(opened + 2 * terms.window),
            Self::Counter(list) if list.since(opened - terms.window) > 0 => until(opened + terms.window),
            Self::Aligned(list) if list.since(opened) > 0 => until(opened + terms.window),
            Self::Anchored { opened, list } if list.since(0) > 0 => until(opened + terms.window),
            Self::Counter(_) | Self::Aligned(_) | Self::Anchored { .. } => until(now),
            Self::Bucket(bucket) => bucket.reset(terms),
        }
    }

    /// The time until which the count is needed.
    pub(super) fn needed_until(&self, terms: &Terms, now: u64) -> u64 {
        match self {
            Self::Bucket(bucket) => bucket.advanced + bucket.reset(terms).least,
            _ => now + self.reset(terms, now).least,
        }
    }
}

/// Admissions: their times and weights.
#[derive(Debug, Default)]
pub(crate) struct List(Vec<(u64, u64)>);

impl List {
    fn since(&self, from: u64) -> u64 {
        self.within(from, u64::MAX)
    }

    fn within(&self, from: u64, before: u64) -> u64 {
        let counted = self.0.iter().filter(|(at, _)| (from..before).contains(at));
        counted.map(|(_, weight)| weight).sum()
    }

    /// The count of this window, and of the previous one the part that the last window still covers, rounded up.
    fn weighted(&self, window: u64, now: u64) -> u64 {
        let opened = now - now % window;
        let previous = self.within(opened - window, opened);
        self.since(opened) + (previous * (opened + window - now)).div_ceil(window)
    }

    fn refund(&mut self, at: u64, mut weight: u64) {
        for (_, counted) in self.0.iter_mut().filter(|(time, _)| *time == at) {
            let taken = weight.min(*counted);
            (*counted, weight) = (*counted - taken, weight - taken);
        }
    }
}

/// An admission of a log, or several that count as one.
#[derive(Debug)]
struct Entry {
    at: u64,
    first: u64,
    weight: u64,
    is_beyond: bool,
}

/// The admissions of a log, in their order. With a precision those of a grain are one entry. Without one, charges beyond the limit one
/// after the other within a thousandth of the window are one. An entry counts until the last of its admissions is one window old.
#[derive(Debug, Default)]
pub(crate) struct Log(Vec<Entry>);

impl Log {
    fn advance(&mut self, terms: &Terms, now: u64) {
        self.0.retain(|entry| entry.weight > 0 && entry.at + terms.window > now);
    }

    fn used(&self, terms: &Terms, now: u64) -> u64 {
        let counted = self.0.iter().filter(|entry| entry.at + terms.window > now);
        counted.map(|entry| entry.weight).sum()
    }

    fn add(&mut self, terms: &Terms, now: u64, weight: u64) {
        let used = self.used(terms, now);
        let is_beyond = terms.precision == 0 && used > 0 && used >= terms.quota;
        let merges = |newest: &mut Entry| match terms.precision {
            // What is counted at the time of such a charge is counted with it.
            0 if newest.is_beyond => newest.at == now || is_beyond && newest.at >= now - now % terms.grain(),
            0 => false,
            _ => newest.at >= now - now % terms.grain(),
        };
        let merged = self.0.pop_if(merges);
        self.0.push(Entry {
            at: now,
            first: merged.as_ref().map_or(now, |merged| merged.first),
            weight: weight + merged.as_ref().map_or(0, |merged| merged.weight),
            is_beyond: is_beyond || merged.is_some_and(|merged| merged.is_beyond),
        });
    }

    fn refund(&mut self, terms: &Terms, now: u64, at: u64, mut weight: u64) {
        let end = at - at % terms.grain() + terms.grain();
        if terms.precision == 0 && at + terms.window <= now {
            return;
        }
        let counts =
            |entry: &&mut Entry| entry.first <= at && (at..end).contains(&entry.at) && entry.at + terms.window > now;
        for entry in self.0.iter_mut().filter(counts) {
            let taken = weight.min(entry.weight);
            (entry.weight, weight) = (entry.weight - taken, weight - taken);
        }
    }

    fn wait(&self, terms: &Terms, now: u64, cost: u64) -> Span {
        // Nothing is freed but at the end of an entry.
        let ends = self.0.iter().map(|entry| entry.at + terms.window);
        let fits = |end: &u64| self.used(terms, *end) + cost <= terms.quota;
        let first = ends.filter(|end| *end > now && fits(end)).min();
        Span::exactly(first.map_or(terms.window, |end| end - now))
    }

    fn reset(&self, terms: &Terms, now: u64) -> Span {
        let newest = self.0.iter().filter(|entry| entry.weight > 0);
        let newest = newest.map(|entry| entry.at + terms.window).max();
        Span::exactly(newest.map_or(0, |end| end.saturating_sub(now)))
    }
}

/// What is missing in a bucket, in parts of a token: as many as there are microseconds in its period. So in each microsecond the
/// number of parts comes that the rate has tokens.
#[derive(Debug, Default)]
pub(crate) struct Bucket {
    least: u128,
    most: u128,
    advanced: u64,
    /// When it was last charged.
    charged: u64,
}

impl Bucket {
    fn parts(terms: &Terms, tokens: u64) -> u128 {
        u128::from(tokens) * u128::from(terms.window)
    }

    fn come(terms: &Terms, time: u64) -> u128 {
        u128::from(time) * u128::from(terms.rate)
    }

    fn advance(&mut self, terms: &Terms, now: u64) {
        let come = Self::come(terms, now - self.advanced.min(now));
        self.least = self.least.saturating_sub(come);
        self.most = self.most.saturating_sub(come);
        self.advanced = now;
    }

    fn room(&self, terms: &Terms) -> Span {
        let left = |missing| (Self::parts(terms, terms.quota).saturating_sub(missing) / Self::parts(terms, 1)) as u64;
        Span {
            least: left(self.most),
            most: left(self.least),
        }
    }

    fn add(&mut self, terms: &Terms, now: u64, weight: u64) {
        let parts = Self::parts(terms, weight);
        (self.least, self.most, self.charged) = (self.least + parts, self.most + parts, now);
    }

    /// Of an earlier charge than the last, all tokens that came since then are taken for those of that charge, and the rate may be
    /// rounded up to a microsecond.
    fn refund(&mut self, terms: &Terms, now: u64, at: u64, weight: u64) {
        let is_last = at == self.charged;
        let come = if is_last { 0 } else { Self::come(terms, now - at) };
        let back = Self::parts(terms, weight).saturating_sub(come);
        let surplus = if is_last || back == 0 {
            0
        } else {
            u128::from(terms.rate) - 1
        };
        self.least = self.least.saturating_sub(back);
        self.most = self.most.saturating_sub(back.saturating_sub(surplus));
    }

    fn until(terms: &Terms, missing: u128, most: u128) -> u64 {
        missing.saturating_sub(most).div_ceil(u128::from(terms.rate)) as u64
    }

    fn wait(&self, terms: &Terms, cost: u64) -> Span {
        let most = Self::parts(terms, terms.quota) - Self::parts(terms, cost);
        Span {
            least: Self::until(terms, self.least, most).max(1),
            most: Self::until(terms, self.most, most).max(1),
        }
    }

    fn reset(&self, terms: &Terms) -> Span {
        Span {
            least: Self::until(terms, self.least, 0),
            most: Self::until(terms, self.most, 0),
        }
    }
}
