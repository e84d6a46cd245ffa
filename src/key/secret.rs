use std::fmt;

/// What only the operator knows, to hash keys with.
#[derive(Clone)]
pub(crate) struct Secret([u8; 32]);

impl Secret {
    pub(crate) fn new(secret: impl AsRef<[u8]>) -> Self {
        Self(blake3::derive_key("tower-quota 2026 keys of callers", secret.as_ref()))
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
