use std::{any::type_name, fmt, sync::Arc};

use http::request::Parts;

use super::{
    error::KeyError,
    extractor::{KeyExtractor, inherent_or},
    key::Key,
};

/// A value in the extensions of the request, such as the authenticated user.
///
/// The layer that inserts the value is trusted: the key is as good as its authentication.
///
/// A request without the value is refused with 500, since the layer that inserts it is missing or runs later;
/// [`or`](KeyExtractor::or) counts it under another key. The key contains the path of the type `T`, so counts start at zero
/// when the type moves to another module.
///
/// ```
/// use http::Request;
/// use tower_quota::{Key, KeyExtractor, key};
///
/// #[derive(Clone)]
/// struct UserId(u64);
///
/// let user = key::extension::<UserId>(|user| user.0.to_string());
///
/// let (parts, ()) = Request::get("/").extension(UserId(42)).body(())?.into_parts();
/// assert_eq!(user.extract(&parts)?, Some(Key::extension::<UserId>("42")));
///
/// let (parts, ()) = Request::get("/").body(())?.into_parts();
/// assert!(user.extract(&parts).unwrap_err().is_misconfigured());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn extension<T>(f: impl Fn(&T) -> String + Send + Sync + 'static) -> Extension<T>
where
    T: Send + Sync + 'static,
{
    Extension(Arc::new(f))
}

/// A [`KeyExtractor`] made by [`extension`].
#[must_use]
pub struct Extension<T>(Arc<dyn Fn(&T) -> String + Send + Sync>);

inherent_or!(Extension<T>);

impl<T> KeyExtractor for Extension<T>
where
    T: Send + Sync + 'static,
{
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        match parts.extensions.get::<T>() {
            Some(value) => Ok(Some(Key::extension::<T>(&(self.0)(value)))),
            None => Err(KeyError::misconfigured(format!(
                "no `{}` in the extensions of the request; put the layer that inserts it outside of this one, or add \
                 an alternative with `.or(..)`",
                type_name::<T>(),
            ))),
        }
    }
}

impl<T> Clone for Extension<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> fmt::Debug for Extension<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extension<{}>(<fn>)", type_name::<T>())
    }
}

impl Key {
    /// The key that [`extension`] makes of a request, where `value` is the result of its function.
    ///
    /// ```
    /// use tower_quota::Key;
    ///
    /// struct UserId(u64);
    ///
    /// let key = Key::extension::<UserId>("42");
    /// assert!(key.as_str().starts_with("ext:") && key.as_str().ends_with("UserId=42"));
    /// ```
    pub fn extension<T>(value: &str) -> Self {
        Self::component("ext:", type_name::<T>().as_bytes(), value.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use super::*;

    #[test]
    fn the_name_of_a_type_forges_no_delimiter() {
        struct Odd<T>(PhantomData<T>);
        type User = Odd<Box<dyn Iterator<Item = [u8; 3]> + Send>>;

        let key = Key::extension::<User>("{x}|");
        assert_eq!(key.as_str().matches('=').count(), 1, "{key}");
        assert!(!key.as_str().contains([' ', '{', '|']), "{key}");
        assert_ne!(key, Key::extension::<Odd<()>>("{x}|"));
    }
}
