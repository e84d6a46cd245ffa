use std::collections::BTreeMap;

use super::{
    leases::{Lease, LeaseId},
    rule::BOUND,
};

/// How long a place in the queue for slots is held after it was refreshed, in microseconds.
pub(crate) const PLACE_US: u64 = 3_000_000;

/// Added to the time of arrival in the scores of places in Redis, so that they follow the leases. Times are below it until the
/// year 2112.
pub(crate) const QUEUE_AT: u64 = 1 << 52;

/// The requests that wait for slots of one key; the counterpart of `lua/slot_queue.lua`.
#[derive(Debug, Default)]
pub(super) struct SlotQueue {
    /// By their order, with those that have ended since the charge that is decided was read.
    places: BTreeMap<u64, Place>,
    orders: BTreeMap<Lease, u64>,
    /// The orders of those that have ended since then.
    ended: Vec<u64>,
    /// The room when the charge that is decided was read, unless it is only read.
    room_stored: Option<i128>,
    /// The requests whose places fit since the last decision.
    woken: Vec<LeaseId>,
}

#[derive(Debug)]
struct Place {
    id: LeaseId,
    weight: u64,
    is_ended: bool,
}

impl SlotQueue {
    /// Begins a decision.
    pub(super) fn begin(&mut self, room_stored: i128) {
        for order in self.ended.drain(..) {
            self.places.remove(&order);
        }
        self.room_stored = Some(room_stored);
    }

    /// Whether no request waits.
    pub(super) fn is_empty(&self) -> bool {
        self.orders.is_empty()
    }

    /// Adds a place behind the others, unless it is there.
    pub(super) fn enter(&mut self, place: Lease, now: u64) {
        let last = self.places.last_key_value();
        let order = (now + QUEUE_AT).max(last.map_or(0, |(last, _)| last + 1));
        self.orders.entry(place).or_insert_with(|| {
            let (id, weight) = (place.id, place.weight);
            self.places.insert(
                order,
                Place {
                    id,
                    weight,
                    is_ended: false,
                },
            );
            order
        });
    }

    pub(super) fn leave(&mut self, place: &Lease) {
        let order = self.orders.remove(place);
        if let Some(order) = order
            && let Some(place) = self.places.get_mut(&order)
        {
            place.is_ended = true;
            self.ended.push(order);
        }
    }

    /// What is left of the room behind all places, or for the request with this place among them. Places that are to end do not
    /// count.
    pub(super) fn room(&self, room: u64, own: Option<&Lease>, ends: impl Fn(&LeaseId) -> bool) -> u64 {
        let own = own.and_then(|own| self.orders.get(own));
        let before = self.places.iter().take(BOUND);
        let before = before.take_while(|(order, _)| Some(*order) != own);
        let counted = before.filter(|(_, place)| !place.is_ended && !ends(&place.id));
        counted.fold(room, |room, (_, place)| room.saturating_sub(place.weight))
    }

    /// Whether one more request of this weight may enter, if at most so many units wait.
    pub(super) fn has_room(&self, weight: u64, most: u64) -> bool {
        let places = self.places.values().take(BOUND);
        let units: u64 = places.filter(|place| !place.is_ended).map(|place| place.weight).sum();
        self.places.len() < BOUND && units + weight <= most
    }

    /// Finds the requests whose places fit now and did not fit as it was stored.
    pub(super) fn wake(&mut self, room: u64) {
        let Some(mut room_stored) = self.room_stored.take() else {
            return;
        };
        let mut room = i128::from(room);
        for place in self.places.values().take(BOUND) {
            room_stored -= i128::from(place.weight);
            if !place.is_ended {
                room -= i128::from(place.weight);
                if room >= 0 && room_stored < 0 {
                    self.woken.push(place.id);
                }
            }
            if room <= 0 {
                return;
            }
        }
    }

    pub(super) fn take_woken(&mut self) -> Vec<LeaseId> {
        std::mem::take(&mut self.woken)
    }
}
