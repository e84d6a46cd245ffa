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
    pub(crate) fn new(versions: &[Terms]) -> Self {
        match versions[0].algorithm {
            Algorithm::Log => Self::Log(Log::new(versions)),
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
            Self::Log(log) => log.advance(now),
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
            Self::Log(log) => log.used(terms.window, now),
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
            Self::Log(log) => log.refund(terms.window, now, at, weight),
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
            Self::Log(log) => log.reset(terms.window, now),
            Self::Counter(list) if list.since(opened) > 0 => until(opened + 2 * terms.window),
            Self::Counter(list) if list.since(opened - terms.window) > 0 => until(opened + terms.window),
            Self::Aligned(list) if list.since(opened) > 0 => until(opened + terms.window),
            Self::Anchored { opened, list } if list.since(0) > 0 => until(opened + terms.window),
            Self::Counter(_) | Self::Aligned(_) | Self::Anchored { .. } => until(now),
            Self::Bucket(bucket) => bucket.reset(terms),
        }
    }

    /// The time until which the count is needed, whatever version comes next.
    pub(super) fn needed_until(&self, terms: &[Terms], now: u64) -> u64 {
        match self {
            Self::Log(log) => log.needed_until(),
            Self::Bucket(bucket) => bucket.advanced + bucket.reset(&terms[0]).least,
            // The numbers of all versions are those of one window.
            _ => now + self.reset(&terms[0], now).least,
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

/// An admission of a log, or several of one grain.
#[derive(Clone, Copy, Debug)]
struct Entry {
    at: u64,
    /// It may be counted as if it had been admitted so late.
    late: u64,
    weight: u64,
    /// The window under which it was stored.
    window: u64,
    /// Whether it was not removed for sure. An entry that is older than the longest window of those that are alive may be.
    is_kept: bool,
}

/// An entry counts for a window if it is younger, whatever window it was stored under. An entry is removed when it is older than
/// the longest window under which an entry was stored that is younger than its own.
#[derive(Debug)]
pub(crate) struct Log {
    entries: Vec<Entry>,
    /// The time within which all versions merge admissions; `None` without a precision, and where versions differ.
    grain: Option<u64>,
    /// Whether versions differ in it: then an admission may be merged with any of one grain.
    mixes_grains: bool,
    /// The lengths of the steps in which admissions may be merged.
    steps: Vec<u64>,
    /// The longest window of all versions.
    longest: u64,
}

impl Log {
    fn new(versions: &[Terms]) -> Self {
        let grain = |terms: &Terms| (terms.precision > 0).then(|| terms.grain());
        let first = grain(&versions[0]);
        let mixes_grains = versions.iter().any(|terms| grain(terms) != first);
        Self {
            entries: Vec::new(),
            grain: first.filter(|_| !mixes_grains),
            mixes_grains,
            steps: versions.iter().map(Terms::grain).collect(),
            longest: versions.iter().map(|terms| terms.window).max().unwrap_or(0),
        }
    }

    fn advance(&mut self, now: u64) {
        self.entries.retain(|entry| entry.late + self.longest > now);
        let alive = self.entries.iter();
        let alive = alive.filter(|entry| entry.is_kept && entry.at + entry.window > now);
        let longest = alive.map(|entry| entry.window).max().unwrap_or(0);
        for entry in &mut self.entries {
            entry.is_kept &= entry.at + longest > now;
        }
    }

    fn used(&self, window: u64, now: u64) -> Span {
        let mut used = Span::exactly(0);
        for entry in &self.entries {
            if entry.is_kept && entry.at + window > now {
                used.least += entry.weight;
            }
            if entry.late + window > now {
                used.most += entry.weight;
            }
        }
        used
    }

    /// The last time until which an admission may be counted that is merged with others.
    fn latest(&self, at: u64) -> u64 {
        let ends = self.steps.iter().map(|step| at - at % step + step - 1);
        ends.max().unwrap_or(at)
    }

    fn add(&mut self, terms: &Terms, now: u64, weight: u64) {
        let mut entry = Entry {
            at: now,
            late: now,
            weight,
            window: terms.window,
            is_kept: true,
        };
        if let Some(grain) = self.grain {
            // An entry counts until the last of its admissions is one window old.
            self.entries.retain(|merged| {
                let is_of_grain = merged.at / grain == now / grain;
                if is_of_grain {
                    entry.weight += merged.weight;
                    entry.window = entry.window.min(merged.window);
                }
                !is_of_grain
            });
        } else if self.mixes_grains || self.used(terms.window, now).most >= terms.quota {
            entry.late = self.latest(now);
        }
        self.entries.push(entry);
    }

    fn refund(&mut self, window: u64, now: u64, at: u64, mut weight: u64) {
        let is_same = |entry: &Entry| match self.grain {
            Some(grain) => entry.at / grain == at / grain,
            None => entry.at == at,
        };
        // Entries of one time are given back in any order.
        let same = self.entries.iter().filter(|entry| is_same(entry));
        let late = same.clone().map(|entry| entry.late).max();
        let stored_under = same.map(|entry| entry.window).min();
        let mut perhaps_left = Vec::new();
        self.entries.sort_by_key(|entry| !entry.is_kept);
        for entry in self.entries.iter_mut().filter(|entry| is_same(entry)) {
            (entry.late, entry.window) = (late.unwrap_or(entry.late), stored_under.unwrap_or(entry.window));
            if entry.at + window <= now {
                // It counts no more for this window, and may for another.
                entry.is_kept = false;
                continue;
            }
            let taken = weight.min(entry.weight);
            (entry.weight, weight) = (entry.weight - taken, weight - taken);
            // Merged under other numbers, it may be in an entry that is not found.
            if entry.late > entry.at && self.steps.iter().any(|step| *step != self.steps[0]) {
                perhaps_left.push(Entry {
                    weight: taken,
                    is_kept: false,
                    ..*entry
                });
            }
        }
        self.entries.extend(perhaps_left);
        self.entries.retain(|entry| entry.weight > 0);
    }

    fn wait(&self, terms: &Terms, now: u64, cost: u64) -> Span {
        // Nothing is freed but at the end of an entry.
        let ends = self.entries.iter().flat_map(|entry| [entry.at, entry.late]);
        let mut ends: Vec<u64> = ends.map(|at| at + terms.window).filter(|end| *end > now).collect();
        ends.sort_unstable();
        let first = |fits: &dyn Fn(Span) -> bool| {
            let end = ends.iter().find(|end| fits(self.used(terms.window, **end)));
            end.map_or(terms.window, |end| end - now)
        };
        let used = self.used(terms.window, now);
        Span {
            least: match used.least + cost <= terms.quota {
                true => 1,
                false => first(&|used| used.least + cost <= terms.quota),
            },
            most: first(&|used| used.most + cost <= terms.quota),
        }
    }

    fn reset(&self, window: u64, now: u64) -> Span {
        let kept = self.entries.iter().filter(|entry| entry.is_kept).map(|entry| entry.at);
        let all = self.entries.iter().map(|entry| entry.late);
        let until = |newest: Option<u64>| newest.map_or(0, |at| (at + window).saturating_sub(now).min(window));
        Span {
            least: until(kept.max()),
            most: until(all.max()),
        }
    }

    fn needed_until(&self) -> u64 {
        let kept = self.entries.iter().filter(|entry| entry.is_kept);
        kept.map(|entry| entry.at + entry.window).max().unwrap_or(0)
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
