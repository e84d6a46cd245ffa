//! What the tests share.

mod clock;
mod http;
mod log;
mod redis;
mod stores;

pub(crate) use self::{clock::Clock, redis::Redis};

pub(crate) use self::{
    http::{Browser, Received, get, get_from, send, serve},
    log::Log,
    stores::{Broken, Gated, Later},
};

use tower_quota::{
    Key, Limit,
    store::{Charge, Operation, Outcome, Request, Store},
};

/// Asks a store for one operation on one key, and panics if it does not answer.
pub(crate) async fn decide(store: &impl Store, operation: Operation, limit: &Limit, key: &str, cost: u64) -> Outcome {
    let key = Key::from(key);
    let charges = [Charge::new("test", limit, &key, cost)];
    let answer = store
        .decide(&[Request::new(operation, &charges)])
        .await
        .expect("the store answers");
    answer.outcomes.into_iter().next().expect("one outcome for one request")
}
