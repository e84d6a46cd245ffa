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
