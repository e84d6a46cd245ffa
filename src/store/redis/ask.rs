use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use smallvec::SmallVec;

use crate::{
    Limit,
    key::Secret,
    store::{
        Charge, Operation, Request,
        fold::{Folded, Folds, fold},
    },
};

/// A request that can wait for its turn: it owns what it asks, and names each key once.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) operation: Operation,
    pub(super) debits: SmallVec<[Debit; 1]>,
    /// Which of the debits each charge is part of.
    pub(super) folds: Folds,
}

/// What a request puts on one key of Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Debit {
    pub(super) key: RedisKey,
    /// Of the key, by the hasher of the store.
    pub(super) hash: u64,
    pub(super) limit: Limit,
    pub(super) cost: u64,
}

pub(super) type RedisKey = SmallVec<[u8; 96]>;

impl Ask {
    pub(super) fn new(names: &Names, request: &Request<'_>) -> Self {
        let Folded {
            operation,
            charges,
            folds,
        } = fold(request);
        let debits = charges.iter().map(|charge| {
            let key = names.redis_key(charge);
            Debit {
                hash: names.hasher.hash_one(&key),
                key,
                limit: charge.limit().clone(),
                cost: charge.cost(),
            }
        });
        Self {
            operation,
            debits: debits.collect(),
            folds,
        }
    }

    /// The same operation, or another one, on some of the debits.
    pub(super) fn part(&self, operation: Operation, positions: &[usize]) -> Self {
        Self {
            operation,
            debits: positions
                .iter()
                .map(|position| self.debits[*position].clone())
                .collect(),
            folds: Folds::none(positions.len()),
        }
    }

    /// Whether asking this after `other` is asking the same twice, and one answer tells what each of many is told.
    pub(super) fn merges_with(&self, other: &Self) -> bool {
        self.operation == Operation::Check
            && other.operation == Operation::Check
            && self.debits == other.debits
            && self.debits.iter().all(Debit::merges)
    }
}

impl Debit {
    /// Whether what is said of the last of several equal requests tells what each of them would be told alone.
    fn merges(&self) -> bool {
        match &self.limit {
            // Each token takes a whole number of microseconds to come.
            Limit::TokenBucket(bucket) => bucket.reduced().0 == 1,
            _ => true,
        }
    }

    /// How much later all is restored by this weight, where something counts already.
    pub(super) fn delay(&self, weight: u64) -> Duration {
        match &self.limit {
            Limit::TokenBucket(bucket) => Duration::from_micros(bucket.time(weight)),
            _ => Duration::ZERO,
        }
    }
}

/// How the keys of a store are named, and found again in its own tables.
#[derive(Clone)]
pub(super) struct Names {
    /// What all keys begin with: the prefix, and the version of what lies in Redis.
    head: Box<str>,
    secret: Option<Secret>,
    hasher: RandomState,
}

/// The version of what lies in Redis.
const LAYOUT: u32 = 1;

impl Names {
    pub(super) fn new(prefix: &str, secret: Option<Secret>) -> Self {
        Self {
            head: format!("{prefix}:{LAYOUT}:").into(),
            secret,
            hasher: RandomState::new(),
        }
    }

    /// `quota:1:log:say-hi:{ip=203.0.113.7|path=/hello/sayHi}`
    ///
    /// The braces are the hash tag of Redis Cluster: all policies of one subject lie in one slot. Nothing within them, nor
    /// before them, can hold a brace.
    pub(super) fn redis_key(&self, charge: &Charge<'_>) -> RedisKey {
        let hashed = self.secret.as_ref().map(|secret| charge.key().hashed(secret));
        let subject = hashed.as_ref().unwrap_or(charge.key());

        let mut key = RedisKey::new();
        let algorithm = charge.limit().algorithm();
        for part in [&self.head, algorithm, ":", charge.policy(), ":{", subject.as_str(), "}"] {
            key.extend_from_slice(part.as_bytes());
        }
        key
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let subject = if self.secret.is_some() { "<hash>" } else { "<key>" };
        write!(f, "{}<algorithm>:<policy>:{{{subject}}}", self.head)
    }
}
