use std::{borrow::Cow, fmt};

use bytes::Bytes;
use crc16::{State, XMODEM};

use super::request::{Entry, OwnedRequest};

#[cfg(doc)]
use crate::Limit;
use crate::{
    Ban, Key,
    key::Secret,
    store::{Charge, StoreRequest},
};

/// The layout of the keys of a store in Redis, and their hashes in the tables of this process.
#[derive(Clone)]
pub(super) struct KeyFormat {
    pub(super) prefix: Box<str>,
    /// The prefix of the store and the version of the layout.
    head: Box<str>,
    /// With it, the keys of callers are hashed.
    secret: Option<Secret>,
}

/// The version of the layout, which changes if the script no longer reads what is stored under such a key.
const LAYOUT: u32 = 1;

impl KeyFormat {
    pub(super) fn new(prefix: &str, secret: Option<Secret>) -> Self {
        Self {
            prefix: prefix.into(),
            head: format!("{prefix}:{LAYOUT}:").into(),
            secret,
        }
    }

    /// The parts of the key of a count, such as `quota:1:log/30s:say-hi:{ip=203.0.113.7|path=/hello/sayHi}`.
    ///
    /// It has the [shape](Limit::shape) of the limit, so that no state is read under another window or rate. The braces are the hash
    /// tag of Redis Cluster: all policies of one caller lie in one slot. There are no other braces.
    pub(super) fn of_count<'a>(&'a self, charge: &'a Charge) -> [&'a [u8]; 8] {
        self.parts("", charge.shape_text(), charge)
    }

    /// The parts of the key of what the script reads.
    pub(super) fn of_entry<'a>(&'a self, entry: Entry<'a>) -> [&'a [u8]; 8] {
        match entry {
            Entry::Bans(charge, _) => self.parts("", Ban::NAME, charge),
            Entry::Count(charge) => self.of_count(charge),
        }
    }

    /// The parts of the key of its line.
    pub(super) fn of_line<'a>(&'a self, charge: &'a Charge) -> [&'a [u8]; 8] {
        self.parts("line:", charge.shape_text(), charge)
    }

    /// The channel of a process, such as `quota:1:wake:4503599627370495`.
    pub(super) fn wake_channel(&self, process: u64) -> String {
        format!("{}wake:{process}", self.head)
    }

    /// The key of the overrides, such as `quota:1:overrides`.
    pub(super) fn overrides_key(&self) -> Bytes {
        format!("{}overrides", self.head).into()
    }

    /// The secret of the hashes that operators see, where keys are hashed: Redis is not to have it then.
    pub(super) fn secret_of_subjects(&self) -> Option<[u8; 32]> {
        Some(self.secret.as_ref()?.derived_for_subjects())
    }

    /// The key of the same where they are not, such as `quota:1:secret`.
    pub(super) fn secret_key(&self) -> Bytes {
        format!("{}secret", self.head).into()
    }

    /// The key of a trial in the slot of this hash tag, such as `quota:1:trial:{0}`.
    pub(super) fn trial_key(&self, tag: u32) -> Bytes {
        format!("{}trial:{{{tag}}}", self.head).into()
    }

    /// The request with the hashes of its keys, if keys are stored as these.
    pub(super) fn hashed(&self, request: &StoreRequest<'_>) -> Option<OwnedRequest> {
        let secret = self.secret.as_ref()?;
        Some(request.to_owned(|charge| charge.key = charge.key.hashed(secret)))
    }

    /// The key of a caller as it is stored.
    pub(super) fn stored_key<'a>(&self, key: &'a Key) -> Cow<'a, Key> {
        match &self.secret {
            Some(secret) => Cow::Owned(key.hashed(secret)),
            None => Cow::Borrowed(key),
        }
    }

    fn parts<'a>(&'a self, kind: &'a str, shape: &'a str, charge: &'a Charge) -> [&'a [u8]; 8] {
        let texts = [
            &self.head,
            kind,
            shape,
            ":",
            charge.policy(),
            ":{",
            charge.key.as_str(),
            "}",
        ];
        texts.map(str::as_bytes)
    }
}

impl fmt::Debug for KeyFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = if self.secret.is_some() { "<hash>" } else { "<key>" };
        write!(f, "{}<algorithm>/<shape>:<policy>:{{{key}}}", self.head)
    }
}

/// The slot of a charge in a cluster: that of its key in braces.
pub(super) fn slot_of_charge(charge: &Charge) -> u16 {
    slot_of_tag(charge.key.as_bytes())
}

/// The slot of the first charge of requests.
pub(super) fn slot_of_first(requests: &[OwnedRequest]) -> u16 {
    let mut charges = requests.iter().flat_map(OwnedRequest::charges);
    charges.next().map_or(0, slot_of_charge)
}

/// Whether the keys of charges lie in several slots of a cluster.
pub(super) fn are_in_several_slots<'a>(mut charges: impl Iterator<Item = &'a Charge>) -> bool {
    let Some(first) = charges.next() else { return false };
    let mut slot = None;
    charges.any(|charge| slot_of_charge(charge) != *slot.get_or_insert_with(|| slot_of_charge(first)))
}

pub(super) const SLOTS: u16 = 16_384;

/// The slot of a key in Redis Cluster.
///
/// <https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#hash-tags>
pub(super) fn slot_of(key: &[u8]) -> u16 {
    slot_of_tag(hash_tag(key).unwrap_or(key))
}

/// The bytes between the first `{` and the first `}` after it, unless there are none.
fn hash_tag(key: &[u8]) -> Option<&[u8]> {
    let place = |bytes: &[u8], delimiter| bytes.iter().position(|byte| *byte == delimiter);
    let rest = &key[place(key, b'{')? + 1..];
    let tag = &rest[..place(rest, b'}')?];
    (!tag.is_empty()).then_some(tag)
}

fn slot_of_tag(tag: &[u8]) -> u16 {
    State::<XMODEM>::calculate(tag) % SLOTS
}

#[cfg(test)]
mod tests {
    use proptest::{
        prelude::{ProptestConfig, any, prop_assert, prop_assert_eq, proptest},
        sample,
    };

    use super::{slot_of, *};
    use crate::{FixedWindow, Limit, Policy, SlidingLog, store::Operation};

    /// The prefix, the algorithm, the policy and the key of the caller, read back from a Redis key.
    fn read_back(redis_key: &str) -> Option<(String, String, String, String)> {
        let (name, key) = redis_key.split_once(":{")?;
        let caller = key.strip_suffix('}')?;
        let mut parts = name.rsplitn(4, ':').map(str::to_owned);
        let (policy, algorithm, layout, prefix) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        (layout == "1").then_some((prefix, algorithm, policy, caller.to_owned()))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        #[test]
        fn a_redis_key_has_one_tag_and_can_be_read_back(
            prefix in "[A-Za-z0-9._:-]{1,12}|quota:1:log:a|1:log:a:1|:::",
            policy in "[a-z][a-z0-9_.-]{0,8}",
            name in ".{0,6}",
            value in any::<Vec<u8>>(),
            path in "[/{}|=^:]{0,9}|\\PC{0,9}",
            limit in sample::select(vec![Limit::from(SlidingLog::per_minute(5)), FixedWindow::per_minute(5).into()]),
            secret in proptest::option::of(any::<[u8; 16]>()),
        ) {
            assert!(Policy::new(policy.clone(), limit.clone()).validate().is_ok());
            let secret = secret.map(|secret| Secret::derive(Secret::STORED_KEYS, secret).unwrap());
            let format = KeyFormat::new(&prefix, secret.clone());
            let mut key = Key::header(&name, value).and(Key::path(&path));
            key.bound();

            let ban = Ban::by_hand();
            let charges = [policy.as_str(), "other"].map(|policy| Charge::new(policy, &limit, &key, 1).ban(&ban));
            let request = StoreRequest::new(Operation::Check, &charges);
            let request = format.hashed(&request).unwrap_or_else(|| request.to_owned(|_| {}));
            let keys: Vec<Vec<u8>> = request.entries().map(|entry| format.of_entry(entry).concat()).collect();
            for charge in request.charges() {
                prop_assert!(keys.iter().all(|key| slot_of(key) == slot_of_charge(charge)));
            }
            let redis_key = &keys[1];
            prop_assert_eq!(redis_key.last(), Some(&b'}'));

            let redis_key = std::str::from_utf8(redis_key).unwrap();
            prop_assert_eq!(redis_key.matches('{').count(), 1);
            prop_assert_eq!(redis_key.matches('}').count(), 1);
            let stored_key = secret.as_ref().map_or(key.clone(), |secret| key.hashed(secret)).to_string();
            let parts = (prefix, charges[0].shape_text().to_owned(), policy, stored_key);
            prop_assert_eq!(read_back(redis_key), Some(parts));
        }
    }

    #[test]
    fn the_checksum_is_that_of_the_specification() {
        assert_eq!(slot_of_tag(b"123456789"), 0x31c3 % SLOTS);
    }

    #[test]
    fn only_the_first_hash_tag_counts() {
        assert_eq!(slot_of(b"{user1000}.following"), slot_of(b"{user1000}.followers"));
        assert_eq!(slot_of(b"foo{{bar}}zap"), slot_of(b"{bar"));
        assert_eq!(slot_of(b"foo{bar}{zap}"), slot_of(b"bar"));
        assert_eq!(slot_of(b"foo{}{bar}"), slot_of_tag(b"foo{}{bar}"));
    }

    #[test]
    fn all_policies_of_one_caller_share_a_slot() {
        let (log, bucket) = ("quota:1:log:a:{ip=1|path=/x}", "quota:1:bucket:b:{ip=1|path=/x}");
        assert_eq!(slot_of(log.as_bytes()), slot_of(bucket.as_bytes()));
    }
}
