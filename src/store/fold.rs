use std::borrow::Cow;

use super::{Charge, ChargeState, Operation, StoreRequest};

/// A request in which no two charges are on the same key.
pub(super) struct Folded<'a> {
    pub(super) operation: Operation,
    pub(super) charges: Cow<'a, [Charge<'a>]>,
    pub(super) folds: Folds,
    pub(super) units: u32,
}

/// The position of each charge among the folded ones; `None` if no charges were folded.
#[derive(Clone, Debug, Default)]
pub(super) struct Folds(Option<Box<[usize]>>);

/// Adds up the charges of a request that are on one key of one policy.
pub(super) fn fold<'a>(request: &StoreRequest<'a>) -> Folded<'a> {
    let charges = request.charges();
    let repeats =
        |(position, charge): (usize, &Charge<'_>)| charges[..position].iter().any(|earlier| earlier.same_key(charge));
    let (charges, folds) = match charges.iter().enumerate().any(repeats) {
        true => add_up(charges),
        false => (Cow::Borrowed(charges), Folds::default()),
    };
    Folded {
        operation: request.operation(),
        charges,
        folds,
        units: request.unit_count(),
    }
}

#[cold]
fn add_up<'a>(charges: &[Charge<'a>]) -> (Cow<'a, [Charge<'a>]>, Folds) {
    let mut folded = Vec::<Charge<'_>>::new();
    let mut places = Vec::new();
    for charge in charges {
        let place = folded.iter().position(|earlier| earlier.same_key(charge));
        match place {
            Some(place) => folded[place] = folded[place].plus(charge),
            None => folded.push(*charge),
        }
        places.push(place.unwrap_or(folded.len() - 1));
    }
    (Cow::Owned(folded), Folds(Some(places.into())))
}

impl Folds {
    /// The charge states of a request, from those of its folded charges.
    pub(super) fn unfold(&self, states: &[ChargeState]) -> impl Iterator<Item = ChargeState> {
        let places = self.0.as_deref();
        let charges = places.map_or(states.len(), <[usize]>::len);
        (0..charges).filter_map(move |charge| {
            let place = places.map_or(charge, |places| places[charge]);
            states.get(place).copied()
        })
    }
}
