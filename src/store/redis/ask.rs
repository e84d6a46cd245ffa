use std::{borrow::Cow, fmt, hash::RandomState, time::Duration};

use bytes::Bytes;
use smallvec::SmallVec;

use crate::{
    Key, Limit,
    key::Secret,
    store::{
        Charge, Operation, StoreRequest,
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
    /// Of the charge, by the hasher of the store.
    pub(super) hash: u64,
    pub(super) limit: Limit,
    pub(super) cost: u64,
}

pub(super) type RedisKey = SmallVec<[u8; 96]>;

impl Ask {
    pub(super) fn new(names: &Names, request: &StoreRequest<'_>) -> Self {
        let Folded {
            operation,
            charges,
            folds,
        } = fold(request);
        let mut debits = SmallVec::new();
        for charge in &*charges {
            debits.push(Debit {
                key: names.redis_key(charge),
                hash: names.hash(charge),
                limit: charge.limit().clone(),
                cost: charge.cost(),
            });
        }
        Self {
            operation,
            debits,
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
            folds: Folds::default(),
        }
    }

    pub(super) fn is_check(&self) -> bool {
        self.operation == Operation::Check
    }

    /// Whether asking this after `other` is asking the same twice, and one answer tells what each of many is told.
    pub(super) fn merges_with(&self, other: &Self) -> bool {
        self.is_check() && other.is_check() && self.debits == other.debits && self.debits.iter().all(Debit::merges)
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
    prefix: Box<str>,
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
            prefix: prefix.into(),
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
        let mut key = RedisKey::new();
        for part in self.parts(charge, &self.subject(charge)) {
            key.extend_from_slice(part);
        }
        key
    }

    /// `quota:1:trial:{0}`, the key of a trial in the slot of this hash tag.
    pub(super) fn trial_key(&self, tag: &str) -> Bytes {
        format!("{}trial:{{{tag}}}", self.head).into()
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Whether a charge is stored under this key.
    pub(super) fn are_of(&self, key: &[u8], charge: &Charge<'_>) -> bool {
        let subject = self.subject(charge);
        let rest = self
            .parts(charge, &subject)
            .into_iter()
            .try_fold(key, <[u8]>::strip_prefix);
        rest.is_some_and(<[u8]>::is_empty)
    }

    /// The hash of a charge in the tables of the store.
    pub(super) fn hash(&self, charge: &Charge<'_>) -> u64 {
        charge.hash(&self.hasher)
    }

    fn subject<'a>(&self, charge: &Charge<'a>) -> Cow<'a, Key> {
        match &self.secret {
            Some(secret) => Cow::Owned(charge.key().hashed(secret)),
            None => Cow::Borrowed(charge.key()),
        }
    }

    fn parts<'a>(&'a self, charge: &Charge<'a>, subject: &'a Key) -> [&'a [u8]; 7] {
        let algorithm = charge.limit().algorithm().as_bytes();
        let (head, policy) = (self.head.as_bytes(), charge.policy().as_bytes());
        [head, algorithm, b":", policy, b":{", subject.as_bytes(), b"}"]
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let subject = if self.secret.is_some() { "<hash>" } else { "<key>" };
        write!(f, "{}<algorithm>:<policy>:{{{subject}}}", self.head)
    }
}
