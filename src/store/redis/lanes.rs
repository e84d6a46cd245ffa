use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::{ask::Ask, commit::Lane, slot::slot_of};

/// The lanes of a store: one to a single server, or one to each slot of a cluster that was ever asked.
pub(super) enum Lanes {
    Server(Arc<Lane>),
    Slots(Mutex<HashMap<u16, Arc<Lane>>>),
}

impl Lanes {
    pub(super) fn new(clustered: bool) -> Self {
        match clustered {
            true => Self::Slots(Mutex::default()),
            false => Self::Server(Arc::default()),
        }
    }

    /// The lane for all of these, unless their keys lie in several slots.
    pub(super) fn of(&self, asks: &[Ask]) -> Option<Arc<Lane>> {
        if let Self::Server(lane) = self {
            return Some(lane.clone());
        }
        let mut slots = asks.iter().flat_map(|ask| &ask.debits).map(|debit| slot_of(&debit.key));
        let slot = slots.next().unwrap_or_default();
        slots.all(|other| other == slot).then(|| self.at(slot))
    }

    /// The lane to a slot.
    pub(super) fn at(&self, slot: u16) -> Arc<Lane> {
        match self {
            Self::Server(lane) => lane.clone(),
            Self::Slots(lanes) => {
                // Nothing panics while they are locked.
                let mut lanes = lanes.lock().unwrap_or_else(PoisonError::into_inner);
                lanes.entry(slot).or_default().clone()
            }
        }
    }
}
