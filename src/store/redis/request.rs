use hashbrown::HashTable;
use smallvec::SmallVec;

use super::{
    key_format::{KeyFormat, RedisKey},
    rules::merges,
};
use crate::{
    Ban, Limit,
    limit::Arrival,
    store::{ChargeLine, LeaseId, Operation, Outcome, StoreError, StoreRequest},
};

/// A store request with the hash of each charge.
pub(super) struct HashedRequest<'a> {
    pub(super) request: StoreRequest<'a>,
    pub(super) hashes: SmallVec<[u64; 1]>,
}

/// A store request that can wait: it owns its keys in Redis, each of which it charges once.
#[derive(Clone, Debug)]
pub(super) struct OwnedRequest {
    pub(super) operation: Operation,
    pub(super) charges: SmallVec<[OwnedCharge; 1]>,
    /// How many equal requests it stands for.
    pub(super) units: u32,
    /// Whether its failure is none of the requests beside it.
    pub(super) is_optional: bool,
    /// Those that stand in the line of a charge, of which the first are decided.
    pub(super) waiting: Option<Box<[Arrival]>>,
}

/// A cost on one key in Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnedCharge {
    pub(super) key: RedisKey,
    /// The hash of the charge by [`KeyFormat::hash`].
    pub(super) hash: u64,
    pub(super) limit: Limit,
    pub(super) cost: u64,
    pub(super) bans: Option<Box<OwnedBans>>,
    pub(super) line: Option<Box<OwnedLine>>,
    pub(super) lease: Option<LeaseId>,
}

/// The bans of a charge, on a key of their own in the same slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnedBans {
    pub(super) key: RedisKey,
    pub(super) ban: Ban,
}

/// The line of a charge, on a key of its own in the same slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnedLine {
    pub(super) key: RedisKey,
    pub(super) line: ChargeLine,
}

/// What a request reads in Redis, in the order of the keys of a call: the bans of a charge come before its count.
#[derive(Clone, Copy)]
pub(super) enum Entry<'a> {
    Bans(&'a OwnedBans),
    Count(&'a OwnedCharge),
}

impl<'a> Entry<'a> {
    pub(super) fn key(self) -> &'a RedisKey {
        match self {
            Self::Bans(bans) => &bans.key,
            Self::Count(charge) => &charge.key,
        }
    }

    /// The limit of a count.
    pub(super) fn limit(self) -> Option<&'a Limit> {
        match self {
            Self::Bans(_) => None,
            Self::Count(charge) => Some(&charge.limit),
        }
    }
}

impl<'a> HashedRequest<'a> {
    pub(super) fn new(key_format: &KeyFormat, request: &StoreRequest<'a>) -> Self {
        Self {
            request: *request,
            hashes: request.charges().iter().map(|charge| key_format.hash(charge)).collect(),
        }
    }
}

impl OwnedRequest {
    pub(super) fn new(key_format: &KeyFormat, request: HashedRequest<'_>) -> Self {
        let HashedRequest { request, hashes } = request;
        let mut charges = SmallVec::new();
        for (charge, hash) in request.charges().iter().zip(hashes) {
            charges.push(OwnedCharge {
                key: key_format.redis_key(charge),
                hash,
                limit: charge.limit().clone(),
                cost: charge.cost(),
                bans: charge.ban_for(request.operation()).map(|ban| {
                    let key = key_format.key_of_bans(charge);
                    Box::new(OwnedBans { key, ban: *ban })
                }),
                line: charge.line_for(request.operation()).map(|line| {
                    let key = key_format.key_of_line(charge);
                    Box::new(OwnedLine { key, line })
                }),
                lease: charge.lease_id(),
            });
        }
        Self {
            operation: request.operation(),
            charges,
            units: request.unit_count(),
            is_optional: request.is_optional(),
            waiting: request.waiting().map(Into::into),
        }
    }

    pub(super) fn of(key_format: &KeyFormat, request: &StoreRequest<'_>) -> Self {
        Self::new(key_format, HashedRequest::new(key_format, request))
    }

    /// An operation on the charges at these positions.
    pub(super) fn part(&self, operation: Operation, positions: &[usize]) -> Self {
        Self {
            operation,
            charges: positions
                .iter()
                .map(|position| self.charges[*position].clone())
                .collect(),
            // Of requests that wait, the others are checked after this one.
            units: self.units.min(1),
            is_optional: false,
            waiting: self
                .waiting
                .clone()
                .filter(|_| matches!(operation, Operation::Wait | Operation::Peek)),
        }
    }

    /// The outcome of this request, where the one of an optional request for which Redis has failed is unknown.
    pub(super) fn outcome(&self, result: Result<Outcome, StoreError>) -> Result<Outcome, StoreError> {
        match result {
            Err(_) if self.is_optional => Ok(Outcome::unknown()),
            result => result,
        }
    }

    pub(super) fn is_check(&self) -> bool {
        self.operation == Operation::Check
    }

    /// The lines of the charges that it decides about.
    pub(super) fn lines(&self) -> impl Iterator<Item = &OwnedLine> {
        self.charges.iter().filter_map(|charge| charge.line.as_deref())
    }

    /// What it reads in Redis.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        let (regards_bans, counts) = (
            self.operation.regards_bans(),
            !matches!(self.operation, Operation::Ban { .. }),
        );
        self.charges.iter().flat_map(move |charge| {
            let bans = charge.bans.as_deref().filter(|_| regards_bans);
            let count = counts.then_some(Entry::Count(charge));
            bans.map(Entry::Bans).into_iter().chain(count)
        })
    }

    /// Whether one of the charges has bans.
    pub(super) fn has_bans(&self) -> bool {
        self.charges.iter().any(|charge| charge.bans.is_some())
    }

    /// Whether one of the charges can have room at any time: one that takes slots, or has a line, which requests can leave.
    pub(super) fn can_fit_early(&self) -> bool {
        let mut charges = self.charges.iter();
        charges.any(|charge| charge.limit.is_held() || charge.line.is_some())
    }

    /// Whether both are the same check, and the outcome of each of several can be computed from that of the last one.
    pub(super) fn merges_with(&self, other: &Self) -> bool {
        self.is_check()
            && other.is_check()
            && self.units == 1
            && other.units == 1
            && self.charges == other.charges
            && self
                .charges
                .iter()
                .all(|charge| charge.bans.is_none() && merges(&charge.limit))
    }
}

/// Equal checks that are sent once with their number, or one other request.
#[derive(Clone, Copy, Debug)]
pub(super) struct MergedRequest<'a> {
    pub(super) request: &'a OwnedRequest,
    /// The number of requests.
    pub(super) times: u64,
}

/// Where a request is in a call: its merged request, and how many requests of that come before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchPosition {
    pub(super) merged: usize,
    pub(super) nth: u64,
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
    let mut latest = HashTable::<(&OwnedCharge, usize)>::with_capacity(count);

    for request in requests.flatten() {
        let mut earlier = request.charges.iter().map(|charge| {
            let same_key = latest.find(charge.hash, |(other, _)| other.key == charge.key);
            same_key.map(|(_, index)| *index)
        });
        let equal = earlier
            .next()
            .flatten()
            .filter(|index| earlier.all(|other| other == Some(*index)) && request.merges_with(merged[*index].request));
        let index = equal.unwrap_or_else(|| {
            for charge in &request.charges {
                let same_key = |(other, _): &(&OwnedCharge, usize)| other.key == charge.key;
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
    use std::{sync::LazyLock, time::Duration};

    use super::*;
    use crate::{
        Key, Limit, SlidingLog, TokenBucket,
        store::{Charge, Operation, StoreRequest, redis::key_format::KeyFormat},
    };

    static KEY_FORMAT: LazyLock<KeyFormat> = LazyLock::new(|| KeyFormat::new("quota", None));

    /// A request that charges these keys of one policy.
    fn request_of(operation: Operation, limit: &Limit, keys: &[&str]) -> OwnedRequest {
        let keys: Vec<_> = keys.iter().map(|key| Key::from(*key)).collect();
        let charges: Vec<_> = keys.iter().map(|key| Charge::new("p", limit, key, 1)).collect();
        OwnedRequest::of(&KEY_FORMAT, &StoreRequest::new(operation, &charges))
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
        for (charge, times) in [(charge, vec![2]), (charge.ban(&ban), vec![1, 1])] {
            let check = StoreRequest::new(Operation::Check, std::slice::from_ref(&charge));
            let twice = [0; 2].map(|_| OwnedRequest::of(&KEY_FORMAT, &check));
            assert_eq!(merged(&twice).1, times);
        }
    }
}
