use http::request::Parts;

use super::{
    error::KeyError,
    extractor::{KeyExtractor, inherent_or},
    key::Key,
};

/// One key for all requests: a global limit.
///
/// A single caller can exhaust it for all others. Add a policy that counts each caller alone.
///
/// ```
/// use http::Request;
/// use tower_quota::{Key, KeyExtractor, key};
///
/// let (parts, ()) = Request::get("/").body(())?.into_parts();
/// assert_eq!(key::constant("all").extract(&parts)?, Some(Key::constant("all")));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn constant(value: &str) -> Constant {
    Constant(Key::constant(value))
}

/// A [`KeyExtractor`] made by [`constant`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Constant(Key);

inherent_or!(Constant);

impl KeyExtractor for Constant {
    fn extract(&self, _: &Parts) -> Result<Option<Key>, KeyError> {
        Ok(Some(self.0.clone()))
    }
}

impl Key {
    /// The key that [`constant`] makes of every request.
    ///
    /// ```
    /// use tower_quota::Key;
    ///
    /// assert_eq!(Key::constant("all").to_string(), "const=all");
    /// ```
    pub fn constant(value: &str) -> Self {
        Self::component("const", b"", value.as_bytes())
    }
}
