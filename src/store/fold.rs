use smallvec::SmallVec;

use super::{Charge, Operation, Request, Verdict};
use crate::limit::MAX_QUOTA;

/// A request in which no two charges are on the same key.
pub(super) struct Folded<'a> {
    pub(super) operation: Operation,
    pub(super) charges: SmallVec<[Charge<'a>; 1]>,
    pub(super) folds: Folds,
}

/// Which of the folded charges each charge became part of.
#[derive(Clone, Debug)]
pub(super) struct Folds(SmallVec<[usize; 2]>);

/// Adds up the charges that a request has on one key.
pub(super) fn fold<'a>(request: &Request<'a>) -> Folded<'a> {
    let mut charges: SmallVec<[Charge<'a>; 1]> = SmallVec::new();
    let mut folds = SmallVec::new();
    for charge in request.charges() {
        let place = charges.iter().position(|earlier| earlier.same_key(charge));
        match place {
            Some(place) => charges[place].cost = (charges[place].cost + charge.cost).min(MAX_QUOTA),
            None => charges.push(*charge),
        }
        folds.push(place.unwrap_or(charges.len() - 1));
    }
    Folded {
        operation: request.operation(),
        charges,
        folds: Folds(folds),
    }
}

impl Folds {
    /// Where no two charges are on one key.
    #[cfg(any(feature = "fred", feature = "redis-rs"))]
    pub(super) fn none(charges: usize) -> Self {
        Self((0..charges).collect())
    }

    /// A verdict for each charge, from those for each key.
    pub(super) fn unfold(&self, verdicts: &[Verdict]) -> impl Iterator<Item = Verdict> {
        self.0.iter().filter_map(|place| verdicts.get(*place).copied())
    }
}
