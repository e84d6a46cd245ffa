//! Secrets of the operator, for keyed hashes.

use std::fmt;
#[cfg(feature = "admin")]
use std::{
    array,
    hash::{BuildHasher, RandomState},
};

use crate::ConfigError;

/// A key for keyed hashes, derived from the secret of the operator for one purpose.
#[derive(Clone)]
pub(crate) struct Secret([u8; 32]);

#[cfg(feature = "admin")]
const SUBJECTS: &str = "tower-quota 2026 hashes of subjects";

/// The shortest secret, in bytes: 128 bits, the length of a digest.
const MIN_SECRET: usize = 16;

impl Secret {
    /// The secret for keys in a store.
    #[cfg(feature = "_redis")]
    pub(crate) fn for_stored_keys(secret: impl AsRef<[u8]>) -> Result<Self, ConfigError> {
        Self::derive("tower-quota 2026 keys of callers", secret.as_ref())
    }

    /// The secret for partition keys in header fields, which callers receive.
    pub(crate) fn for_partition_keys(secret: impl AsRef<[u8]>) -> Result<Self, ConfigError> {
        Self::derive("tower-quota 2026 partition keys in header fields", secret.as_ref())
    }

    /// The secret for the names of subjects that operators see.
    #[cfg(feature = "admin")]
    pub(crate) fn for_subjects(secret: impl AsRef<[u8]>) -> Result<Self, ConfigError> {
        Self::derive(SUBJECTS, secret.as_ref())
    }

    /// A secret of this process alone for the same, so that no hash of a key can be made elsewhere.
    #[cfg(feature = "admin")]
    pub(crate) fn random_for_subjects() -> Self {
        // The keys of `RandomState` are from the entropy of the operating system.
        let words: [u64; 4] = array::from_fn(|word| RandomState::new().hash_one(word));
        Self(blake3::derive_key(SUBJECTS, &words.map(u64::to_ne_bytes).concat()))
    }

    /// With one secret for several purposes, the contexts still make the digest that a caller receives differ from the stored one.
    fn derive(context: &'static str, secret: &[u8]) -> Result<Self, ConfigError> {
        if secret.len() < MIN_SECRET {
            return Err(ConfigError::new(format!(
                "a secret has at least {MIN_SECRET} bytes, not {}; generate a random one, such as with `openssl rand -hex 32`",
                secret.len(),
            )));
        }
        Ok(Self(blake3::derive_key(context, secret)))
    }

    /// 128 bits of a keyed hash.
    pub(crate) fn digest(&self, bytes: &[u8]) -> [u8; 16] {
        let hash = blake3::keyed_hash(&self.0, bytes);
        let mut digest = [0; 16];
        digest.copy_from_slice(&hash.as_bytes()[..16]);
        digest
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<secret>")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_of_fewer_than_16_bytes_is_refused_with_the_fix() {
        assert!(Secret::for_partition_keys([7; 16]).is_ok());
        for secret in [&b""[..], b"secret", &[7; 15]] {
            let error = Secret::for_partition_keys(secret).unwrap_err().to_string();
            assert!(
                error.contains("at least 16 bytes") && error.contains("openssl rand -hex 32"),
                "{error}"
            );
        }
    }

    #[cfg(feature = "_redis")]
    #[test]
    fn each_purpose_has_digests_of_its_own() {
        let secret = "0123456789abcdef";
        let stored = Secret::for_stored_keys(secret).unwrap();
        let partition = Secret::for_partition_keys(secret).unwrap();
        assert_ne!(stored.digest(b"ip=192.0.2.1"), partition.digest(b"ip=192.0.2.1"));
        #[cfg(feature = "admin")]
        {
            let subjects = Secret::for_subjects(secret).unwrap().digest(b"ip=192.0.2.1");
            assert_ne!(stored.digest(b"ip=192.0.2.1"), subjects);
            assert_ne!(partition.digest(b"ip=192.0.2.1"), subjects);
        }
    }
}
