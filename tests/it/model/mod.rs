//! Random worlds against a model that is written from the docs, and not from the rules.
//!
//! A world has up to four policies. Each has up to three versions of its numbers, which meet on one key and in one request. Both
//! stores decide its timeline, and each decision must be the one of the [oracle]: to the unit and to the microsecond, or within
//! bounds where the docs leave something open. These are charges beyond a log's limit, logs under several precisions, and entries of
//! a log that are older than the window they were stored under.
//!
//! `TOWER_QUOTA_DECISIONS` sets the number of decisions of a test, and `TOWER_QUOTA_SEED` repeats a world. Calls that would read
//! more entries than a call may are left out, and the clock is not set back: `differential` has both.

mod oracle;
mod shrink;
mod slots;
mod trial;
mod world;

use std::{
    env,
    hash::{BuildHasher, RandomState},
};

use fastrand::Rng;

use self::{trial::Stores, world::World};

/// 2027-01-15 08:00:00 UTC.
const START: u64 = 1_800_000_000_000_000;

/// How many decisions each of the tests has.
const DECISIONS: usize = 20_000;

/// The number in this variable of the environment.
pub(crate) fn number(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.parse().expect("a number"))
}

async fn decide_as_the_model() {
    let stores = Stores::start().await;
    let decisions = number("TOWER_QUOTA_DECISIONS").map_or(DECISIONS, |decisions| decisions as usize);
    let first = number("TOWER_QUOTA_SEED");
    let mut seed = first.unwrap_or_else(|| RandomState::new().hash_one(0));
    let mut decided = 0;
    while decided < decisions {
        let world = World::random(&mut Rng::with_seed(seed));
        if let Err(failure) = stores.run(&world).await {
            let (world, failure) = shrink::shrunk(&stores, world, failure).await;
            panic!("{failure}\n\nTOWER_QUOTA_SEED={seed} is a longer history than\n{world}");
        }
        decided += world.requests();
        seed = seed.wrapping_add(1);
    }
}

// Each has random worlds of its own, so that they run on several processors.

#[tokio::test]
async fn both_stores_decide_as_the_model() {
    decide_as_the_model().await;
}

#[tokio::test]
async fn both_stores_decide_as_the_model_in_other_worlds() {
    decide_as_the_model().await;
}

#[tokio::test]
async fn both_stores_decide_as_the_model_in_further_worlds() {
    decide_as_the_model().await;
}

#[tokio::test]
async fn both_stores_decide_as_the_model_in_still_other_worlds() {
    decide_as_the_model().await;
}
