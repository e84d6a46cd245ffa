use http::request::Parts;

use super::{
    error::KeyError,
    extractor::{KeyExtractor, inherent_or},
    key::Key,
};

/// The method of the request.
///
/// There are ten keys: one for each method of RFC 9110 §9 and for `PATCH` (RFC 5789), and one for all others, since callers
/// can make up methods.
///
/// ```
/// use http::{Method, Request};
/// use tower_quota::{Key, KeyExtractor, key};
///
/// let (parts, ()) = Request::post("/").body(())?.into_parts();
/// assert_eq!(key::method().extract(&parts)?, Some(Key::method(&Method::POST)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn method() -> Method {
    Method(())
}

/// A [`KeyExtractor`] made by [`method`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Method(());

inherent_or!(Method);

impl KeyExtractor for Method {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        Ok(Some(Key::method(&parts.method)))
    }
}

impl Key {
    /// The key that [`method`] returns for a request.
    ///
    /// ```
    /// use http::Method;
    /// use tower_quota::Key;
    ///
    /// assert_eq!(Key::method(&Method::GET).to_string(), "method=GET");
    /// assert_eq!(Key::method(&"MADE-UP".parse()?).to_string(), "other-method=");
    /// # Ok::<(), http::method::InvalidMethod>(())
    /// ```
    pub fn method(method: &http::Method) -> Self {
        use http::Method;

        const STANDARD: [Method; 9] = [
            Method::CONNECT,
            Method::DELETE,
            Method::GET,
            Method::HEAD,
            Method::OPTIONS,
            Method::PATCH,
            Method::POST,
            Method::PUT,
            Method::TRACE,
        ];
        match STANDARD.contains(method) {
            true => Self::plain("method", method),
            false => Self::plain("other-method", ""),
        }
    }
}
