use hashbrown::HashTable;

use super::script::merges;
use crate::{
    Ban, Limit,
    store::{Charge, Operation, Outcome, StoreError, StoreRequest},
};

/// A request that waits to be sent.
pub(super) type OwnedRequest = StoreRequest<'static>;

/// What the script reads for a request.
#[derive(Clone, Copy)]
pub(super) enum Entry<'a> {
    /// The bans of the charge that follows.
    Bans(&'a Charge, &'a Ban),
    Count(&'a Charge),
}

impl<'a> Entry<'a> {
    /// The limit that is counted.
    pub(super) fn limit(self) -> Option<&'a Limit> {
        match self {
            Self::Bans(..) => None,
            Self::Count(charge) => Some(charge.limit()),
        }
    }
}

impl StoreRequest<'_> {
    /// Another operation on some of the charges.
    pub(super) fn part(&self, operation: Operation, positions: &[usize]) -> OwnedRequest {
        let is_whole = positions.len() == self.charge_count();
        let leads = |charge: &Charge| charge.line.as_ref().is_some_and(|line| line.leads.is_some());
        let is_new = operation == Operation::Wait && self.waiting.is_none() && !is_whole;
        let leads_elsewhere =
            is_new || self.charges().any(leads) && !positions.iter().any(|position| leads(self.charge(*position)));
        let charges = positions.iter().map(|position| {
            let mut charge = self.charge(*position).clone();
            if let Some(line) = &mut charge.line {
                line.leads_elsewhere = leads_elsewhere;
            }
            charge
        });
        let mut part = self.with(operation, charges);
        part.is_optional = false;
        if !is_whole {
            // Of requests that wait, the others are checked after this one.
            part.units = self.units.min(1);
        }
        if !matches!(operation, Operation::Wait | Operation::Peek) {
            part.waiting = None;
        }
        part
    }

    /// Another operation on the bans of one charge alone: on one key.
    pub(super) fn part_of_bans(&self, operation: Operation, position: usize) -> OwnedRequest {
        let mut part = self.part(operation, &[position]);
        (part.units, part.is_of_bans) = (1, true);
        part
    }

    /// Another operation at another cost on a request of one charge.
    pub(super) fn at_cost(&self, operation: Operation, cost: u64) -> OwnedRequest {
        let charges = self.charges().cloned();
        self.with(operation, charges.map(|charge| Charge { cost, ..charge }))
    }

    /// The outcome, where an optional request may fail.
    pub(super) fn outcome(&self, result: Result<Outcome, StoreError>) -> Result<Outcome, StoreError> {
        match result {
            Err(_) if self.is_optional => Ok(Outcome::unknown()),
            result => result,
        }
    }

    pub(super) fn is_check(&self) -> bool {
        self.operation == Operation::Check
    }

    /// What the script reads, in its order.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        let counts = !self.is_of_bans && !matches!(self.operation, Operation::Ban { .. });
        self.charges().flat_map(move |charge| {
            let bans = charge.ban_for(self.operation).map(|ban| Entry::Bans(charge, ban));
            bans.into_iter().chain(counts.then_some(Entry::Count(charge)))
        })
    }

    /// Whether a denial may be another one before its wait is over: there may be room, or another state of a charge that never fits.
    pub(super) fn may_change_early(&self) -> bool {
        self.charges().any(|charge| {
            let limit = charge.limit();
            limit.is_held() || charge.cost > limit.quota() || charge.line_for(self.operation).is_some()
        })
    }

    /// Whether both are the same check, of whose outcomes each can be computed from that of the last one.
    pub(super) fn merges_with(&self, other: &Self) -> bool {
        self.is_check()
            && other.is_check()
            && self.units == 1
            && other.units == 1
            && self.charges().eq(other.charges())
            && self
                .charges()
                .all(|charge| charge.ban_for(self.operation).is_none() && merges(charge.limit()))
    }
}

/// Equal checks that are sent once with their number, or one other request.
#[derive(Clone, Copy, Debug)]
pub(super) struct MergedRequest<'a> {
    pub(super) request: &'a OwnedRequest,
    /// The number of requests.
    pub(super) times: u64,
}

impl MergedRequest<'_> {
    /// The number of requests of callers: one that takes several units is one, and those that wait in a line are one each.
    pub(super) fn callers(&self) -> u64 {
        let takes_units = self.request.operation != Operation::Wait && self.request.units > 1;
        if takes_units { 1 } else { self.times }
    }
}

/// Where a request is in a call: its merged request, and how many requests of that come before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchPosition {
    pub(super) merged: usize,
    pub(super) nth: u64,
}

impl BatchPosition {
    pub(super) const FIRST: Self = Self { merged: 0, nth: 0 };
}

/// Merges equal checks, and returns the position of each request.
///
/// A check is merged into an earlier one only if no other request between them has one of its keys, so the outcomes are those
/// of the requests one after the other.
pub(super) fn merge<'a>(
    requests: impl ExactSizeIterator<Item = &'a [OwnedRequest]>,
) -> (Vec<MergedRequest<'a>>, Vec<BatchPosition>) {
    let count = requests.len();
    let mut merged = Vec::<MergedRequest<'_>>::with_capacity(count);
    let mut positions = Vec::with_capacity(count);
    // The last merged request with each key.
    let mut latest = HashTable::<(&Charge, usize)>::with_capacity(count);

    for request in requests.flatten() {
        let mut earlier = request.charges().map(|charge| {
            let same_key = latest.find(charge.hash, |(other, _)| other.counts_with(charge));
            same_key.map(|(_, index)| *index)
        });
        let equal = earlier
            .next()
            .flatten()
            .filter(|index| earlier.all(|other| other == Some(*index)) && request.merges_with(merged[*index].request));
        let index = equal.unwrap_or_else(|| {
            for charge in request.charges() {
                let same_key = |(other, _): &(&Charge, usize)| other.counts_with(charge);
                let entry = latest.entry(charge.hash, same_key, |(other, _)| other.hash);
                entry.insert((charge, merged.len()));
            }
            merged.push(MergedRequest { request, times: 0 });
            merged.len() - 1
        });

        let nth = merged[index].times;
        positions.push(BatchPosition { merged: index, nth });
        merged[index].times += u64::from(request.units);
    }
    (merged, positions)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        Key, Limit, SlidingLog, TokenBucket,
        store::{Charge, Operation, StoreRequest},
    };

    /// A request that charges these keys of one policy.
    fn request_of(operation: Operation, limit: &Limit, keys: &[&str]) -> OwnedRequest {
        let keys: Vec<_> = keys.iter().map(|key| Key::from(*key)).collect();
        let charges: Vec<_> = keys.iter().map(|key| Charge::new("p", limit, key, 1)).collect();
        StoreRequest::new(operation, &charges).to_owned(|_| {})
    }

    /// For each request its merged request, and the number of requests in each merged request.
    fn merged(requests: &[OwnedRequest]) -> (Vec<usize>, Vec<u64>) {
        let (merged, positions) = merge(requests.chunks(1));
        (
            positions.iter().map(|position| position.merged).collect(),
            merged.iter().map(|merged| merged.times).collect(),
        )
    }

    #[test]
    fn equal_checks_are_merged() {
        let limit = SlidingLog::per_minute(5).into();
        let [a, b] = ["a", "b"].map(|key| move |limit: &Limit| request_of(Operation::Check, limit, &[key]));
        let requests = [a(&limit), b(&limit), a(&limit), a(&limit), b(&limit)];
        assert_eq!(merged(&requests), (vec![0, 1, 0, 0, 1], vec![3, 2]));
        let (_, positions) = merge(requests.chunks(1));
        assert_eq!(positions[3], BatchPosition { merged: 0, nth: 2 });
    }

    #[test]
    fn checks_with_another_request_on_their_key_between_them_are_not_merged() {
        let limit = SlidingLog::per_minute(5).into();
        let check = |keys| request_of(Operation::Check, &limit, keys);
        for between in [
            request_of(Operation::Reset, &limit, &["a"]),
            check(&["a", "b"]),
            check(&["b", "a"]),
            request_of(Operation::Check, &SlidingLog::per_minute(6).into(), &["a"]),
        ] {
            let requests = [check(&["a"]), between, check(&["a"])];
            assert_eq!(merged(&requests), (vec![0, 1, 2], vec![1, 1, 1]));
        }

        let pairs = [check(&["a", "b"]), check(&["b"]), check(&["a", "b"])];
        assert_eq!(merged(&pairs), (vec![0, 1, 2], vec![1, 1, 1]));
        let pairs = [check(&["a", "b"]), check(&["c"]), check(&["a", "b"])];
        assert_eq!(merged(&pairs), (vec![0, 1, 0], vec![2, 1]));
    }

    #[test]
    fn units_of_one_caller_are_one_request() {
        let limit = SlidingLog::per_minute(5).into();
        let callers = |operation, units| {
            let requests = [0; 2].map(|_| request_of(operation, &limit, &["a"]).units(units));
            let (merged, _) = merge(requests.chunks(1));
            merged.iter().map(MergedRequest::callers).collect::<Vec<_>>()
        };
        assert_eq!(callers(Operation::Check, 1), [2]);
        assert_eq!(callers(Operation::Check, 40_000), [1, 1]);
        assert_eq!(callers(Operation::Wait, 3), [3, 3]);
    }

    #[test]
    fn only_checks_are_merged() {
        let limit = SlidingLog::per_minute(5).into();
        let refund = Operation::Refund {
            admitted_at: Duration::ZERO,
        };
        for operation in [Operation::Charge, Operation::Peek, Operation::Reset, refund] {
            let requests = [0; 2].map(|_| request_of(operation, &limit, &["a"]));
            assert_eq!(merged(&requests), (vec![0, 1], vec![1, 1]), "{operation:?}");
        }
    }

    #[test]
    fn checks_of_a_bucket_whose_tokens_take_fractions_of_microseconds_are_not_merged() {
        for (limit, count) in [(TokenBucket::per_second(7), 2), (TokenBucket::per_second(8), 1)] {
            let requests = [0; 2].map(|_| request_of(Operation::Check, &limit.into(), &["a"]));
            assert_eq!(merged(&requests).1.len(), count, "{limit}");
        }
    }

    #[test]
    fn requests_with_bans_are_not_merged() {
        let (limit, key, ban) = (SlidingLog::per_minute(5).into(), Key::from("a"), Ban::by_hand());
        let charge = Charge::new("p", &limit, &key, 1);
        for (charge, times) in [(charge.clone(), vec![2]), (charge.ban(&ban), vec![1, 1])] {
            let check = StoreRequest::new(Operation::Check, std::slice::from_ref(&charge));
            let twice = [0; 2].map(|_| check.clone().to_owned(|_| {}));
            assert_eq!(merged(&twice).1, times);
        }
    }

    #[test]
    fn a_part_of_an_optional_request_fails_and_the_request_does_not() {
        let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("a"));
        let charges = ["p", "q"].map(|policy| Charge::new(policy, &limit, &key, 1));
        let request = StoreRequest::new(Operation::Check, &charges).optional(true);
        let failure = || Err(StoreError::invalid("no"));
        assert!(request.part(Operation::Check, &[0]).outcome(failure()).is_err());
        assert!(request.outcome(failure()).is_ok_and(|outcome| outcome.is_unknown()));
    }
}
