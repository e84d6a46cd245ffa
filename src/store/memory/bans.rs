use std::time::Duration;

use super::charging::Kept;
use crate::{
    Ban,
    limit::{Banned, State},
    store::ChargeState,
};

/// The bans of a charge, advanced to now.
pub(super) struct AdvancedBans<'a> {
    ban: &'a Ban,
    state: &'a mut State,
    banned: Banned,
    now: u64,
}

impl<'a> AdvancedBans<'a> {
    pub(super) fn new(ban: &'a Ban, state: &'a mut State, now: u64) -> Self {
        let mut banned = Banned::default();
        if let State::Banned(stored) = state {
            banned = *stored;
        }
        ban.advance(&mut banned, now);
        Self {
            ban,
            state,
            banned,
            now,
        }
    }

    pub(super) fn is_in_force(&self) -> bool {
        self.banned.rest(self.now) > 0
    }

    /// Begins a ban of this length, if it is above 0.
    pub(super) fn begin(mut self, length: u64) -> (ChargeState, Kept) {
        if length > 0 {
            self.ban.begin(&mut self.banned, self.now, length);
        }
        let room = self.ban.room(&self.banned, self.now);
        let reset = Duration::from_micros(self.ban.reset(&self.banned, self.now));
        let (rest, kept) = self.keep(length > 0);
        (ChargeState::new(room, None, reset).banned(rest), kept)
    }

    /// Counts a denial of the charge, if there was one.
    pub(super) fn decide(mut self, denies: bool) -> (Duration, Kept) {
        let changed = denies && self.ban.deny(&mut self.banned, self.now);
        self.keep(changed)
    }

    /// Stores what has changed, and returns the rest of the ban.
    fn keep(mut self, changed: bool) -> (Duration, Kept) {
        let rest = self.banned.rest(self.now);
        let kept = Kept {
            expires_at: changed.then(|| self.ban.keep(&mut self.banned, self.now)),
            denies_until: self.now + rest,
            cost: 0,
        };
        if changed {
            *self.state = State::Banned(self.banned);
        }
        (Duration::from_micros(rest), kept)
    }
}
