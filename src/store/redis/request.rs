use smallvec::SmallVec;

use super::{
    call,
    key_format::{KeyFormat, RedisKey},
};
use crate::{
    Limit,
    store::{
        ChargeRole, LeaseId, Operation, Outcome, StoreError, StoreRequest, Waiting,
        fold::{Folded, Folds, fold},
    },
};

/// A store request whose charges on one key are added up, with the hash of each charge.
pub(super) struct HashedRequest<'a> {
    pub(super) folded: Folded<'a>,
    pub(super) hashes: SmallVec<[u64; 1]>,
    is_optional: bool,
}

/// A store request that can wait: it owns its keys in Redis, each of which it charges once.
#[derive(Clone, Debug)]
pub(super) struct OwnedRequest {
    pub(super) operation: Operation,
    pub(super) charges: SmallVec<[OwnedCharge; 1]>,
    /// Which of the owned charges each charge of the store request is part of.
    pub(super) folds: Folds,
    /// How many equal requests it stands for.
    pub(super) units: u32,
    /// Whether its failure is none of the requests beside it.
    pub(super) is_optional: bool,
}

/// A cost on one key in Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnedCharge {
    pub(super) key: RedisKey,
    /// The hash of the charge by [`KeyFormat::hash`].
    pub(super) hash: u64,
    pub(super) limit: Limit,
    pub(super) cost: u64,
    pub(super) role: ChargeRole,
    pub(super) waiting: Waiting,
    pub(super) lease: Option<LeaseId>,
}

impl<'a> HashedRequest<'a> {
    pub(super) fn new(key_format: &KeyFormat, request: &StoreRequest<'a>) -> Self {
        let folded = fold(request);
        let hashes = folded.charges.iter().map(|charge| key_format.hash(charge)).collect();
        Self {
            folded,
            hashes,
            is_optional: request.is_optional(),
        }
    }
}

impl OwnedRequest {
    pub(super) fn new(key_format: &KeyFormat, request: HashedRequest<'_>) -> Self {
        let HashedRequest {
            folded,
            hashes,
            is_optional,
        } = request;
        let mut charges = SmallVec::new();
        for (charge, hash) in folded.charges.iter().zip(hashes) {
            charges.push(OwnedCharge {
                key: key_format.redis_key(charge),
                hash,
                limit: charge.limit().clone(),
                cost: charge.cost(),
                role: charge.role(),
                waiting: charge.waits(),
                lease: charge.lease_id(),
            });
        }
        Self {
            operation: folded.operation,
            charges,
            units: folded.units,
            folds: folded.folds,
            is_optional,
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
            folds: Folds::default(),
            units: self.units,
            is_optional: false,
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

    /// Whether one of the charges is a marker.
    pub(super) fn has_marker(&self) -> bool {
        self.charges.iter().any(|charge| charge.role == ChargeRole::Once)
    }

    /// Whether one of the charges is a ban.
    pub(super) fn has_ban(&self) -> bool {
        self.charges.iter().any(|charge| charge.role == ChargeRole::Ban)
    }

    /// Whether one of the charges takes slots, which can be free at any time.
    pub(super) fn has_slots(&self) -> bool {
        self.charges.iter().any(|charge| charge.limit.is_held())
    }

    /// Whether both are the same check, and the outcome of each of several can be computed from that of the last one.
    pub(super) fn merges_with(&self, other: &Self) -> bool {
        self.is_check()
            && other.is_check()
            && self.units == 1
            && other.units == 1
            && self.charges == other.charges
            && !self.has_marker()
            && self.charges.iter().all(|charge| call::merges(&charge.limit))
    }
}
