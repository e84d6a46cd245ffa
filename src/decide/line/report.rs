//! The lines of this process, as an `Admin` shows them.

use std::collections::HashMap;

use super::LINES;
use crate::{Key, store::StoreId, sync::lock};

/// How many requests of this process wait for a policy of a store, by key.
pub(crate) fn waiting_by_key(store: Option<StoreId>, policy: &str) -> HashMap<Key, usize> {
    let mut waiting = HashMap::new();
    for line in lock(&LINES).values() {
        let (counted_in, counted_by, key) = &line.subject;
        if *counted_in == store && **counted_by == *policy {
            *waiting.entry(key.clone()).or_default() += line.state().waiting.len();
        }
    }
    waiting.retain(|_, requests| *requests > 0);
    waiting
}
