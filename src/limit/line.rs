use smallvec::SmallVec;

use super::MAX_QUOTA;

/// How long the place of a process in a line is held after it was replaced, in microseconds.
pub(crate) const PLACE_US: u64 = 1_500_000;

/// The most requests of a process that its place contains.
pub(crate) const PLACE_SIZE: usize = 32;

/// The longest wait that is told, in microseconds.
pub(crate) const LONGEST_WAIT_US: u64 = MAX_QUOTA;

/// The wait of a request that fits as soon as those before it are admitted, in microseconds. Mostly a message wakes it earlier.
pub(crate) const SOON_US: u64 = 10_000;

/// A request that waits for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// By the clock of the store, in microseconds.
    pub at: u64,
    /// Its cost.
    pub weight: u64,
}

/// The line of a charge, for which requests may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChargeLine {
    /// Identifies it in this process.
    pub number: u64,
    /// How long a request that has just arrived may wait, in microseconds.
    pub longest_us: u64,
    /// The cost of the requests of this process that come before one which has just arrived, or is checked for the last time, less that
    /// of those which come before it by the place of the process.
    pub ahead: i64,
    /// If this is the line in which the requests that are decided are the first of their process: the newest arrival in it that the
    /// process knows. The replies to those that stand in its place since then are under way.
    pub leads: Option<u64>,
    /// Whether that line is in another slot of a cluster, or the request has just arrived and has keys in other slots: whether it may
    /// wait for all of them is known in none, so it stands in no line.
    pub leads_elsewhere: bool,
}

/// The requests that wait for one key; the counterpart of `lua/line.lua`.
///
/// Nothing is counted for them. Each process has one place, with the arrivals of the first of its requests. A check admits only what
/// fits after all that have arrived before.
#[derive(Clone, Debug, Default)]
pub(crate) struct Line(Vec<Place>);

#[derive(Clone, Debug)]
struct Place {
    /// The number of the line in its process.
    owner: u64,
    until: u64,
    waiting: SmallVec<[Arrival; 4]>,
}

/// The equal requests of a process that a check decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing<'a> {
    pub(crate) charge: ChargeLine,
    /// The requests of the place that is replaced, of which the first ones are decided; `None` for one that has just arrived.
    pub(crate) waiting: Option<&'a [Arrival]>,
    /// How many are decided.
    pub(crate) units: usize,
}

impl<'a> Standing<'a> {
    fn decided(&self) -> &'a [Arrival] {
        let waiting = self.waiting.unwrap_or_default();
        &waiting[..self.units.min(waiting.len())]
    }
}

impl Line {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The same without the places that have expired, and those of a clock that is gone.
    pub(crate) fn live(&self, now: u64) -> Self {
        let is_live = |place: &&Place| now < place.until && place.until <= now + PLACE_US;
        Self(self.0.iter().filter(is_live).cloned().collect())
    }

    pub(crate) fn weight(&self) -> u64 {
        self.weight_of(|_, _| true)
    }

    fn weight_of(&self, counts: impl Fn(&Place, &Arrival) -> bool) -> u64 {
        let places = self.0.iter();
        let waiting = places.flat_map(|place| place.waiting.iter().map(move |one| (place, one)));
        let counted = waiting.filter(|(place, one)| counts(place, one));
        counted.fold(0, |weight, (_, one)| weight.saturating_add(one.weight))
    }

    /// The weight that comes before the nth of the requests that are decided. The order of the requests of one process in the line
    /// that they lead is that of the process.
    pub(crate) fn before(&self, standing: &Standing<'_>, nth: usize) -> u64 {
        let waiting = standing.waiting.unwrap_or_default();
        let Some(own) = waiting.get(nth) else {
            return self.weight().saturating_add_signed(standing.charge.ahead);
        };
        let weight = self.weight_of(|place, one| {
            let is_own = place.owner == standing.charge.number
                && (standing.charge.leads.is_some() || standing.decided().iter().any(|decided| decided.at == one.at));
            one.at < own.at && !is_own
        });
        weight.saturating_add_signed(standing.charge.ahead)
    }

    /// What remains of the room for a request that has just arrived: behind those that wait here, and those of its process that come
    /// before it beyond the place.
    pub(crate) fn remaining(&self, standing: &Standing<'_>, room: u64) -> u64 {
        let ahead = standing.charge.ahead.max(0);
        room.saturating_sub(self.weight().saturating_add_signed(ahead))
    }

    /// How many of the decided requests fit into the room, each of this cost.
    pub(crate) fn fitting(&self, standing: &Standing<'_>, room: u64, cost: u64) -> usize {
        if standing.waiting.is_none() {
            let left = self.remaining(standing, room) / cost;
            return usize::try_from(left).map_or(standing.units, |left| left.min(standing.units));
        }
        let fits = |nth: &usize| {
            let needed = cost.saturating_mul(*nth as u64 + 1);
            self.before(standing, *nth).saturating_add(needed) <= room
        };
        (0..standing.units).take_while(fits).count()
    }

    /// Ends a decision that has admitted some of the requests of this cost. Those that are denied wait here if this key lacks room
    /// for them, unless they do not wait any longer, or may not. In a line that they do not lead they are inserted by their arrival.
    pub(crate) fn settle(
        &mut self,
        standing: &Standing<'_>,
        admitted: usize,
        lacks: bool,
        (cost, waits): (u64, bool),
        now: u64,
    ) {
        let place = standing.charge.number;
        let before = self.place_of(place);
        match (standing.waiting, standing.charge.leads) {
            (Some(waiting), Some(known)) => {
                let left = if lacks { admitted } else { standing.units };
                let mut waiting: SmallVec<[Arrival; 4]> = waiting.get(left..).unwrap_or_default().into();
                let is_under_way = |one: &&Arrival| known < one.at && now < one.at + PLACE_US;
                let under_way = before.iter().filter(is_under_way).copied();
                // If its reply is lost, a request is not held for longer.
                let held_from = match waiting.is_empty() {
                    true => under_way.clone().next_back().map_or(now, |last| last.at.min(now)),
                    false => now,
                };
                waiting.extend(under_way);
                waiting.truncate(PLACE_SIZE);
                self.replace(place, &waiting, held_from);
            }
            (Some(_), None) => {
                let decided = standing.decided();
                let mut waiting = before.clone();
                for decided in decided {
                    // Several may have arrived at once.
                    if let Some(position) = waiting.iter().position(|one| one.at == decided.at) {
                        waiting.remove(position);
                    }
                }
                if lacks && waits {
                    for denied in &decided[admitted.min(decided.len())..] {
                        let position = waiting.iter().take_while(|one| one.at <= denied.at).count();
                        waiting.insert(
                            position,
                            Arrival {
                                at: denied.at,
                                weight: cost,
                            },
                        );
                    }
                    waiting.truncate(PLACE_SIZE);
                }
                if waiting != before {
                    self.replace(place, &waiting, now);
                }
            }
            (None, _) if lacks && waits && !standing.charge.leads_elsewhere && before.len() < PLACE_SIZE => {
                let mut waiting = before;
                waiting.push(Arrival { at: now, weight: cost });
                self.replace(place, &waiting, now);
            }
            (None, _) => {}
        }
    }

    /// The requests in the place of a process.
    pub(crate) fn place_of(&self, owner: u64) -> SmallVec<[Arrival; 4]> {
        let own = self.0.iter().find(|place| place.owner == owner);
        own.map(|place| place.waiting.clone()).unwrap_or_default()
    }

    fn replace(&mut self, owner: u64, waiting: &[Arrival], now: u64) {
        self.0.retain(|place| place.owner != owner);
        if !waiting.is_empty() {
            self.0.push(Place {
                owner,
                until: now + PLACE_US,
                waiting: waiting.into(),
            });
        }
    }

    /// The places whose first requests fit into the room, except for one. After a refund also that of the first of all, which may fit
    /// earlier than it knows.
    pub(crate) fn ready(&self, room: u64, except: Option<u64>, is_refund: bool) -> impl Iterator<Item = u64> {
        let firsts = self.0.iter().filter_map(|place| Some(place.waiting.first()?.at));
        let of_all = firsts.min().filter(|_| is_refund);
        let others = self.0.iter().filter(move |place| Some(place.owner) != except);
        others.filter_map(move |place| {
            let first = place.waiting.first()?;
            let before = self.weight_of(|other, one| other.owner != place.owner && one.at < first.at);
            let fits = before.saturating_add(first.weight) <= room;
            (fits || of_all == Some(first.at)).then_some(place.owner)
        })
    }
}
