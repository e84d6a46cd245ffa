//! The names of subjects in responses: their keys, or hashes of them.

use std::{
    array,
    hash::{BuildHasher, RandomState},
};

use crate::Key;

/// Names subjects.
#[derive(Clone)]
pub(super) struct SubjectNames {
    /// Whether a name is the key itself.
    pub(super) show_keys: bool,
    /// Of this process alone, so that the hash of a key cannot be made elsewhere.
    secret: [u8; 32],
}

/// The length of a hash in a response. Two of a million subjects have one hash with a probability of 3 in 100 million.
const BYTES: usize = 8;

impl SubjectNames {
    pub(super) fn new() -> Self {
        // The keys of `RandomState` are from the entropy of the operating system.
        let words: [u64; 4] = array::from_fn(|word| RandomState::new().hash_one(word));
        let random = words.map(u64::to_ne_bytes).concat();
        Self {
            show_keys: false,
            secret: blake3::derive_key("tower-quota 2026 hashes of subjects", &random),
        }
    }

    /// The name of a key that is [bound](Key::bound).
    pub(super) fn name(&self, key: &Key) -> String {
        if self.show_keys {
            return key.to_string();
        }
        self.hash(key)
    }

    /// The hash of a key that is [bound](Key::bound).
    pub(super) fn hash(&self, key: &Key) -> String {
        let hash = blake3::keyed_hash(&self.secret, key.as_bytes()).to_hex();
        hash.as_str()[..2 * BYTES].to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_of_one_process_and_of_one_key() {
        let (names, others) = (SubjectNames::new(), SubjectNames::new());
        let (one, other) = (Key::from("1"), Key::from("2"));
        assert_eq!(names.name(&one), names.clone().name(&one));
        assert_ne!(names.name(&one), names.name(&other));
        assert_ne!(names.name(&one), others.name(&one));
        assert_eq!(names.name(&one).len(), 16);
    }
}
