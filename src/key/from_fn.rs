use std::{any::type_name, fmt};

use http::request::Parts;

use super::{
    extractor::{Extractor, KeyError},
    form::{KeyForm, Value},
    key::Key,
};

/// A key that a function extracts from the request.
///
/// The function returns a [`Key`], a [`String`] or an integer, an [`Option`] of one (`None`: the policy does not apply), or a
/// [`Result`] of either with a [`KeyError`] (the request is refused). Text that is borrowed from the request is copied with
/// [`Key::from`].
///
/// What the function reads decides what an attacker can do: [a value that the client chooses](super#which-key-to-choose)
/// limits nothing. Where the request lacks the value, return an error. With `None` a request that omits it is not limited.
///
/// ```
/// use http::{Request, request::Parts};
/// use tower_quota::{Key, KeyExtractor, key::{self, KeyError}};
///
/// /// The account that authentication found.
/// #[derive(Clone)]
/// struct Account {
///     tenant: u64,
///     tester: bool,
/// }
///
/// // All users of a tenant together; tests are not limited.
/// let tenant = key::from_fn(|parts| match parts.extensions.get::<Account>() {
///     Some(account) => Ok((!account.tester).then_some(account.tenant)),
///     None => Err(KeyError::misconfigured("no account on the request; add the limit inside of authentication")),
/// });
///
/// let parts_of = |account| Request::get("/").extension(account).body(()).map(|request| request.into_parts().0);
/// let parts = parts_of(Account { tenant: 42, tester: false })?;
/// assert_eq!(tenant.extract(&parts)?, Some(Key::from(42)));
/// let parts = parts_of(Account { tenant: 42, tester: true })?;
/// assert_eq!(tenant.extract(&parts)?, None);
///
/// let (parts, ()) = Request::get("/").body(())?.into_parts();
/// assert!(tenant.extract(&parts).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
// Closures are not extractors themselves: the compiler infers the type of `parts` from the bound `Fn` of this function, and
// from an `impl KeyExtractor for F` it would not.
pub fn from_fn<F, R>(f: F) -> Extractor
where
    F: Fn(&Parts) -> R + Send + Sync + 'static,
    R: IntoKey,
{
    Extractor::new(KeyForm::Any, move |parts| f(parts).into_key())
}

/// The return types of functions for [`from_fn`].
///
/// Those are [`Key`], [`String`] and integers, and [`Option`] and [`Result`] of them.
///
/// ```
/// use http::Request;
/// use tower_quota::{Key, KeyExtractor, key};
///
/// let scheme = key::from_fn(|parts| parts.uri.scheme_str().map(Key::from));
///
/// let (parts, ()) = Request::get("https://example.com/").body(())?.into_parts();
/// assert_eq!(scheme.extract(&parts)?, Some(Key::from("https")));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Text that is borrowed from the request does not compile:
///
/// ```compile_fail,E0277
/// let scheme = tower_quota::key::from_fn(|parts| parts.uri.scheme_str());
/// ```
// Not for `&str`: with an impl, text borrowed from `parts` would fail with a lifetime error that does not name the fix.
#[diagnostic::on_unimplemented(
    message = "a function for `key::from_fn` cannot return `{Self}`",
    label = "`{Self}` is not a key",
    note = "return a `Key`, a `String` or an integer, an `Option` of one, or a `Result` of either with a `KeyError`",
    note = "copy text that is borrowed from the request with `Key::from(text)`"
)]
pub trait IntoKey: Sized {
    /// The key, or `Ok(None)` if the policy does not apply to the request.
    ///
    /// # Errors
    ///
    /// If the request is refused.
    fn into_key(self) -> Result<Option<Key>, KeyError>;
}

macro_rules! values {
    ($($ty:ident)+) => {
        $(
            impl IntoKey for $ty {
                fn into_key(self) -> Result<Option<Key>, KeyError> {
                    Ok(Some(self.into()))
                }
            }
        )+
    };
}

values!(Key String i8 i16 i32 i64 i128 isize u8 u16 u32 u64 u128 usize);

impl<T: IntoKey> IntoKey for Option<T> {
    fn into_key(self) -> Result<Option<Key>, KeyError> {
        self.map_or(Ok(None), T::into_key)
    }
}

impl<T: IntoKey> IntoKey for Result<T, KeyError> {
    fn into_key(self) -> Result<Option<Key>, KeyError> {
        self?.into_key()
    }
}

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
pub fn constant(value: &str) -> Extractor {
    let key = Key::constant(value);
    let value = key.as_str().split_once('=').map_or("", |(_, value)| value);
    let form = KeyForm::of("const", "", Value::Only(value.into()));
    Extractor::new(form, move |_| Ok(Some(key.clone())))
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

/// A value in the extensions of the request, such as the authenticated user.
///
/// The layer that inserts the value is trusted: the key is as good as its authentication.
///
/// The function returns what identifies the caller, as anything that implements [`Display`](fmt::Display), such as a number or a
/// [`String`]; text is cloned, as in `|user: &User| user.name.clone()`. The name is a part of the key, so counts start at zero
/// when it changes. Keys of two types under one name are equal if their values are.
///
/// A request without the value is refused with 500, since the layer that inserts it is missing or runs later;
/// [`or`](crate::KeyExtractor::or) counts it under another key.
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
pub fn extension<T, V>(name: &str, f: impl Fn(&T) -> V + Send + Sync + 'static) -> Extractor
where
    T: Send + Sync + 'static,
    V: fmt::Display,
{
    let form = KeyForm::of("ext:", name, Value::Text);
    let name = name.to_owned();
    Extractor::new(form, move |parts| match parts.extensions.get::<T>() {
        Some(value) => Ok(Some(Key::extension(&name, f(value)))),
        None => Err(KeyError::misconfigured(format!(
            "no `{}` in the extensions of the request; put the layer that inserts it outside of this one (in axum, add it after \
             this one), or add an alternative with `.or(..)`, in a file such as `extension:{name} or ip`",
            type_name::<T>(),
        ))),
    })
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
