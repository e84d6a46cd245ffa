use std::{fmt, marker::PhantomData, sync::Arc};

use http::request::Parts;

#[cfg(feature = "axum")]
use super::Route;
use super::{Constant, Extension, Header, Ip, Key, KeyError, KeyExtractor, Method, Path};

/// A [`KeyExtractor`] with another one behind it, made by [`or`](KeyExtractor::or).
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Or<A, B> {
    pub(super) first: A,
    pub(super) second: B,
}

impl<A, B> KeyExtractor for Or<A, B>
where
    A: KeyExtractor,
    B: KeyExtractor,
{
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        match self.first.extract(parts) {
            Ok(None) => self.second.extract(parts),
            Err(error) if error.is_absent() => self.second.extract(parts),
            found => found,
        }
    }
}

/// The method `or`, without the trait in scope.
macro_rules! or_else {
    ($($ty:ident $(<$($param:ident),+>)?),+ $(,)?) => {$(
        impl $(<$($param),+>)? $ty $(<$($param),+>)?
        where
            Self: KeyExtractor,
        {
            /// The key of `other`, where this extractor finds none.
            ///
            /// It catches what is absent, never what is malformed.
            pub fn or<Other: KeyExtractor>(self, other: Other) -> Or<Self, Other> {
                KeyExtractor::or(self, other)
            }
        }
    )+};
}

or_else!(Constant, Extension<T>, FromFn<F, R>, Header, Ip, Method, Or<A, B>, Path);
#[cfg(feature = "axum")]
or_else!(Route);

/// Tuples mean "and". If one of them does not apply, none does.
macro_rules! tuples {
    ($($name:ident)+) => {
        impl<$($name),+> KeyExtractor for ($($name,)+)
        where
            $($name: KeyExtractor,)+
        {
            fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
                #[allow(non_snake_case)]
                let ($($name,)+) = self;
                let mut key = Key::empty();
                $(
                    match $name.extract(parts)? {
                        Some(more) => key.push(&more),
                        None => return Ok(None),
                    }
                )+
                Ok(Some(key))
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

impl<E: KeyExtractor + ?Sized> KeyExtractor for Arc<E> {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        (**self).extract(parts)
    }
}

/// A key found by a function of the request.
///
/// It returns a `String` or a [`Key`], an [`Option`] of one (`None`: the policy does not apply), or a [`Result`] of either
/// with a [`KeyError`].
///
/// Whatever the client chooses is no identity, such as the host of the URI, and `None` is a way past the limit if the client
/// can bring it about.
///
/// ```
/// use http::{Request, request::Parts};
/// use tower_quota::{key::{self, KeyError}, KeyExtractor};
///
/// /// The account that authentication found.
/// #[derive(Clone)]
/// struct Account {
///     tenant: u64,
///     tester: bool,
/// }
///
/// // All users of a tenant together; tests are not limited.
/// let tenant = key::from_fn(|parts: &Parts| match parts.extensions.get::<Account>() {
///     Some(account) => Ok((!account.tester).then(|| format!("tenant {}", account.tenant))),
///     None => Err(KeyError::misconfigured("no account on the request; add the limit inside of authentication")),
/// });
///
/// let of = |account| Request::get("/").extension(account).body(()).map(|request| request.into_parts().0);
/// let parts = of(Account { tenant: 42, tester: false })?;
/// assert_eq!(tenant.extract(&parts)?.unwrap().to_string(), "key=tenant^2042");
/// let parts = of(Account { tenant: 42, tester: true })?;
/// assert!(tenant.extract(&parts)?.is_none());
///
/// // No request gets past the limit by leaving something out.
/// let (parts, ()) = Request::get("/").body(())?.into_parts();
/// assert!(tenant.extract(&parts).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn from_fn<F, R>(f: F) -> FromFn<F, R>
where
    F: Fn(&Parts) -> R + Send + Sync + 'static,
    R: IntoExtracted + 'static,
{
    FromFn { f, result: PhantomData }
}

/// A [`KeyExtractor`] made by [`from_fn`].
#[must_use]
pub struct FromFn<F, R> {
    f: F,
    result: PhantomData<fn() -> R>,
}

impl<F, R> KeyExtractor for FromFn<F, R>
where
    F: Fn(&Parts) -> R + Send + Sync + 'static,
    R: IntoExtracted + 'static,
{
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        (self.f)(parts).into_extracted()
    }
}

impl<F: Clone, R> Clone for FromFn<F, R> {
    fn clone(&self) -> Self {
        Self {
            f: self.f.clone(),
            result: PhantomData,
        }
    }
}

impl<F, R> fmt::Debug for FromFn<F, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FromFn(<fn>)")
    }
}

/// The return type of a function given to [`from_fn`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a key",
    note = "return a `Key`, a string, an `Option` of one, or a `Result` of either with a `KeyError`"
)]
pub trait IntoExtracted {
    /// The key that the function found.
    ///
    /// # Errors
    ///
    /// If the request has no key and must not pass without.
    fn into_extracted(self) -> Result<Option<Key>, KeyError>;
}

impl IntoExtracted for Key {
    fn into_extracted(self) -> Result<Option<Key>, KeyError> {
        Ok(Some(self))
    }
}

impl IntoExtracted for String {
    fn into_extracted(self) -> Result<Option<Key>, KeyError> {
        Ok(Some(self.into()))
    }
}

impl IntoExtracted for &str {
    fn into_extracted(self) -> Result<Option<Key>, KeyError> {
        Ok(Some(self.into()))
    }
}

impl<T: IntoExtracted> IntoExtracted for Option<T> {
    fn into_extracted(self) -> Result<Option<Key>, KeyError> {
        self.map_or(Ok(None), T::into_extracted)
    }
}

impl<T: IntoExtracted> IntoExtracted for Result<T, KeyError> {
    fn into_extracted(self) -> Result<Option<Key>, KeyError> {
        self?.into_extracted()
    }
}
