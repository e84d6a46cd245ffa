//! The slots that this process holds, for operators.

use std::{collections::HashMap, time::Duration};

use super::Keeper;
use crate::Key;

/// The slots of a policy that requests of one key hold in this process.
#[derive(Clone, Copy)]
pub(crate) struct HeldByKey {
    pub(crate) slots: u64,
    /// The time since the first of them was taken.
    pub(crate) longest: Duration,
}

impl Keeper {
    /// The slots of a policy, by key.
    pub(crate) fn held_of(&self, policy: &str) -> HashMap<Key, HeldByKey> {
        let state = self.state();
        let leases = state.groups.values().flat_map(|group| group.held.values());
        let leases = leases.chain(state.orphans.values());
        let mut held: HashMap<Key, HeldByKey> = HashMap::new();
        for lease in leases.filter(|lease| lease.policy() == policy) {
            let of_key = held.entry(lease.key.clone()).or_insert(HeldByKey {
                slots: 0,
                longest: Duration::ZERO,
            });
            of_key.slots += lease.cost;
            of_key.longest = of_key.longest.max(lease.taken_at.elapsed());
        }
        held
    }
}
