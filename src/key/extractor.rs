use std::{borrow::Cow, error::Error, fmt, sync::Arc};

use http::request::Parts;

use super::{form::KeyForm, ip::Ip, key::Key, path::Path};
use crate::observe::NeverFound;

/// Extracts the key that a request is counted under.
///
/// | result | meaning |
/// | --- | --- |
/// | `Ok(Some(key))` | the request is counted under this key |
/// | `Ok(None)` | the policy does not apply to the request |
/// | `Err(error)` | the request is refused with the status of the [error](KeyError) |
///
/// Tuples of up to six extractors are extractors: their key is the keys of all, in order. If one of them returns `Ok(None)`,
/// so does the tuple. `Arc<dyn KeyExtractor>` and `Box<dyn KeyExtractor>` are extractors as well.
///
/// For a closure, use [`from_fn`](super::from_fn()); for a type of your own:
///
/// ```
/// use http::{Request, request::Parts};
/// use tower_quota::{Key, KeyExtractor, key::KeyError};
///
/// /// The account that authentication found.
/// #[derive(Clone)]
/// struct Account {
///     tenant: u64,
/// }
///
/// struct Tenant;
///
/// impl KeyExtractor for Tenant {
///     fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
///         match parts.extensions.get::<Account>() {
///             Some(account) => Ok(Some(Key::from(account.tenant))),
///             None => Err(KeyError::misconfigured("no account on the request; add the limit inside of authentication")),
///         }
///     }
/// }
///
/// let (parts, ()) = Request::get("/").extension(Account { tenant: 42 }).body(())?.into_parts();
/// assert_eq!(Tenant.extract(&parts)?, Some(Key::from(42)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a key extractor",
    note = "use `key::ip()`, `key::extension(..)` or another function of `tower_quota::key`, a tuple of them, or `key::from_fn(|parts| ..)`",
    note = "`key::client_ip(..)` requires the networks of your proxies: `key::client_ip(..).trusted([\"10.0.0.0/8\"])?`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// Returns the key of a request, or `Ok(None)` if the policy does not apply to it.
    ///
    /// # Errors
    ///
    /// If the request has no key and must not pass without one.
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError>;

    /// Returns what the keys are made of, for the page of an `Admin`; only extractors of this crate do.
    #[doc(hidden)]
    fn form(&self) -> KeyForm {
        KeyForm::Any
    }

    /// Uses another extractor for requests that have no key here.
    ///
    /// The alternative applies after `Ok(None)` and after every error except a [malformed](KeyError::malformed) key: a caller
    /// could otherwise send a malformed key to choose the alternative. If the server has provided what the first key reads to none of
    /// the first 1,000 requests, such as an extension whose layer is inside of this one, that is logged.
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::{Key, KeyExtractor, key::{self, PeerAddr}};
    ///
    /// #[derive(Clone)]
    /// struct UserId(u64);
    ///
    /// let user_or_address = key::extension("user", |user: &UserId| user.0).or(key::ip());
    ///
    /// let peer = PeerAddr("203.0.113.7:4711".parse()?);
    /// let (parts, ()) = Request::get("/").extension(peer).body(())?.into_parts();
    /// assert_eq!(user_or_address.extract(&parts)?, Some(Key::ip("203.0.113.7".parse()?)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    fn or<E>(self, other: E) -> Extractor
    where
        Self: Sized,
        E: KeyExtractor,
    {
        Extractor::first(vec![Arc::new(self), Arc::new(other)])
    }
}

/// A [`KeyExtractor`] made by a function of [`key`](crate::key), or by [`or`](KeyExtractor::or).
#[derive(Clone)]
#[must_use]
pub struct Extractor {
    extract: Arc<Extract>,
    form: KeyForm,
}

type Extract = dyn Fn(&Parts) -> Result<Option<Key>, KeyError> + Send + Sync;

impl Extractor {
    pub(super) fn new(
        form: KeyForm,
        extract: impl Fn(&Parts) -> Result<Option<Key>, KeyError> + Send + Sync + 'static,
    ) -> Self {
        Self {
            extract: Arc::new(extract),
            form,
        }
    }

    /// The key of the first extractor that has one. By a malformed key, a caller must not choose another one.
    pub(super) fn first(alternatives: Vec<Arc<dyn KeyExtractor>>) -> Self {
        let form = KeyForm::first(alternatives.iter().map(|extractor| extractor.form()));
        let never = NeverFound::default();
        Self::new(form, move |parts| {
            let mut result = Ok(None);
            for (position, extractor) in alternatives.iter().enumerate() {
                result = extractor.extract(parts);
                if position == 0 {
                    warn_if_never_found(&never, &result);
                }
                match &result {
                    Ok(None) => {}
                    Err(error) if !error.is_malformed() => {}
                    Ok(Some(_)) | Err(_) => break,
                }
            }
            result
        })
    }

    /// The keys of all extractors, as a tuple of any length.
    #[cfg(feature = "serde")]
    pub(super) fn all(extractors: Vec<Arc<dyn KeyExtractor>>) -> Self {
        let form = KeyForm::all(extractors.iter().map(|extractor| extractor.form()));
        Self::new(form, move |parts| {
            extract_all(extractors.iter().map(|extractor| &**extractor), parts)
        })
    }
}

/// Warns of the first of several extractors if what it reads is in no request.
fn warn_if_never_found(never: &NeverFound, result: &Result<Option<Key>, KeyError>) {
    match result {
        Err(error) if error.is_misconfigured() && never.note(false) => tracing::warn!(
            error = error.to_string(),
            requests = NeverFound::LOGGED_AT,
            "no request yet had the first key, all have its alternative"
        ),
        Ok(Some(_)) => _ = never.note(true),
        Ok(None) | Err(_) => {}
    }
}

/// The keys of all extractors together; none if one of them does not apply.
fn extract_all<'a>(
    extractors: impl IntoIterator<Item = &'a dyn KeyExtractor>,
    parts: &Parts,
) -> Result<Option<Key>, KeyError> {
    let mut all = Key::empty();
    for extractor in extractors {
        match extractor.extract(parts)? {
            Some(key) => all.push(&key),
            None => return Ok(None),
        }
    }
    Ok(Some(all))
}

impl KeyExtractor for Extractor {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        (self.extract)(parts)
    }

    fn form(&self) -> KeyForm {
        self.form.clone()
    }
}

impl fmt::Debug for Extractor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extractor({}, <fn>)", self.form)
    }
}

/// The method `or` of an extractor, for callers without the trait in scope.
macro_rules! inherent_or {
    ($($ty:ident)+) => {
        $(
            impl $ty {
                /// Uses another extractor for requests that have no key here.
                ///
                /// See [`KeyExtractor::or`].
                pub fn or(self, other: impl KeyExtractor) -> Extractor {
                    KeyExtractor::or(self, other)
                }
            }
        )+
    };
}

inherent_or!(Extractor Ip Path);

/// Tuples mean "and".
macro_rules! tuples {
    ($($name:ident)+) => {
        impl<$($name),+> KeyExtractor for ($($name,)+)
        where
            $($name: KeyExtractor,)+
        {
            fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
                #[allow(non_snake_case)]
                let ($($name,)+) = self;
                extract_all([$($name as &dyn KeyExtractor),+], parts)
            }

            fn form(&self) -> KeyForm {
                #[allow(non_snake_case)]
                let ($($name,)+) = self;
                KeyForm::all([$($name.form()),+])
            }
        }
    };
}

tuples!(A);
tuples!(A B);
tuples!(A B C);
tuples!(A B C D);
tuples!(A B C D E);
tuples!(A B C D E F);

macro_rules! pointers {
    ($($pointer:ident)+) => {
        $(
            impl<E: KeyExtractor + ?Sized> KeyExtractor for $pointer<E> {
                fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
                    (**self).extract(parts)
                }

                fn form(&self) -> KeyForm {
                    (**self).form()
                }
            }
        )+
    };
}

pointers!(Arc Box);

/// The reason why a request has no key.
///
/// | error | status | [`or`](super::KeyExtractor::or) |
/// | --- | --- | --- |
/// | [`absent`](Self::absent) | `400 Bad Request` | uses the alternative |
/// | [`malformed`](Self::malformed) | `400 Bad Request` | returns the error |
/// | [`misconfigured`](Self::misconfigured) | `500 Internal Server Error` | uses the alternative |
///
/// ```
/// use http::Request;
/// use tower_quota::{key, KeyExtractor};
///
/// let (parts, ()) = Request::get("/").body(())?.into_parts();
/// let error = key::ip().extract(&parts).unwrap_err();
/// assert!(error.is_misconfigured());
/// assert!(error.to_string().starts_with("no peer address on the request"));
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct KeyError {
    kind: Kind,
    message: Cow<'static, str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Absent,
    Malformed,
    Misconfigured,
}

/// Constructors.
impl KeyError {
    /// The request lacks the value that the key is made of.
    ///
    /// The request is refused with `400 Bad Request`, or [`or`](super::KeyExtractor::or) uses its alternative.
    /// The message is sent to the caller, so it must not contain a secret.
    ///
    /// ```
    /// use tower_quota::key::KeyError;
    ///
    /// let error = KeyError::absent("the request has no query parameter `tenant`");
    /// assert!(error.is_absent());
    /// ```
    pub fn absent(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Kind::Absent, message)
    }

    /// The value that the key is made of is present, but its form cannot be trusted.
    ///
    /// The request is refused with `400 Bad Request`, with and without [`or`](super::KeyExtractor::or): a caller could
    /// otherwise choose the alternative. The message is sent to the caller, so it must not contain a secret.
    pub fn malformed(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Kind::Malformed, message)
    }

    /// The server does not provide the value that the key is made of.
    ///
    /// The request is refused with `500 Internal Server Error`, and the first such message of a policy is logged; none is sent. Or
    /// [`or`](super::KeyExtractor::or) uses its alternative. The message should name the fix.
    ///
    /// ```
    /// use tower_quota::key::KeyError;
    ///
    /// let error = KeyError::misconfigured("no account on the request; add the limit inside of authentication");
    /// assert!(error.is_misconfigured());
    /// ```
    pub fn misconfigured(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Kind::Misconfigured, message)
    }

    fn new(kind: Kind, message: impl Into<Cow<'static, str>>) -> Self {
        let message = message.into();
        Self { kind, message }
    }
}

/// Accessors.
impl KeyError {
    /// Whether the error was made by [`absent`](Self::absent): the request lacks the key.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.kind == Kind::Absent
    }

    /// Whether the error was made by [`malformed`](Self::malformed): the request has something that is no key.
    #[must_use]
    pub fn is_malformed(&self) -> bool {
        self.kind == Kind::Malformed
    }

    /// Whether the error was made by [`misconfigured`](Self::misconfigured): the fault is the server's, not the caller's.
    #[must_use]
    pub fn is_misconfigured(&self) -> bool {
        self.kind == Kind::Misconfigured
    }
}

impl_error!(KeyError, error => &error.message);
