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
/// The function returns what identifies the caller, as anything that implements [`Display`](fmt::Display), such as a number or
/// a [`String`]. The name is a part of the key, so counts start at zero when it changes. Keys of two types under one name are
/// equal if their values are.
///
/// A request without the value is refused with 500, since the layer that inserts it is missing or runs later;
/// [`or`](KeyExtractor::or) counts it under another key.
///
/// ```
/// use http::Request;
/// use tower_quota::{Key, KeyExtractor, key};
///
/// #[derive(Clone)]
/// struct UserId(u64);
///
/// let user = key::extension("user", |user: &UserId| user.0);
///
/// let (parts, ()) = Request::get("/").extension(UserId(42)).body(())?.into_parts();
/// assert_eq!(user.extract(&parts)?, Some(Key::extension("user", 42)));
///
/// let (parts, ()) = Request::get("/").body(())?.into_parts();
/// assert!(user.extract(&parts).unwrap_err().is_misconfigured());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn extension<T, V>(name: &str, f: impl Fn(&T) -> V + Send + Sync + 'static) -> Extension<T>
where
    T: Send + Sync + 'static,
    V: fmt::Display,
{
    let of_value = name.to_owned();
    Extension {
        name: name.into(),
        key: Arc::new(move |value| Key::extension(&of_value, f(value))),
    }
}

/// A [`KeyExtractor`] made by [`extension`].
#[must_use]
pub struct Extension<T> {
    name: Arc<str>,
    key: Arc<dyn Fn(&T) -> Key + Send + Sync>,
}

inherent_or!(Extension<T>);

impl<T> KeyExtractor for Extension<T>
where
    T: Send + Sync + 'static,
{
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        match parts.extensions.get::<T>() {
            Some(value) => Ok(Some((self.key)(value))),
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
        Self {
            name: self.name.clone(),
            key: self.key.clone(),
        }
    }
}

impl<T> fmt::Debug for Extension<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extension<{}>({:?}, <fn>)", type_name::<T>(), self.name)
    }
}

impl Key {
    /// The key that [`extension`] returns for a request, where `value` is the result of its function.
    ///
    /// ```
    /// use tower_quota::Key;
    ///
    /// assert_eq!(Key::extension("user", 42).to_string(), "ext:user=42");
    /// ```
    pub fn extension(name: &str, value: impl fmt::Display) -> Self {
        Self::formatted("ext:", name.as_bytes(), value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_forges_no_delimiter() {
        let key = Key::extension("a=b|{c}", "{x}|");
        assert_eq!(key.as_str().matches('=').count(), 1, "{key}");
        assert!(!key.as_str().contains([' ', '{', '|']), "{key}");
        assert_ne!(key, Key::extension("a", "b|{c}={x}|"));
    }

    #[test]
    fn a_formatted_value_is_escaped_as_its_text_is() {
        for text in ["", "42", "a|b=^{c} \u{e9}"] {
            let formatted = Key::extension("user", format_args!("{text}{text}"));
            assert_eq!(formatted, Key::component("ext:", b"user", text.repeat(2).as_bytes()));
        }
    }
}
