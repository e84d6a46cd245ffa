//! Key extractors: the identity that a request is counted under.
//!
//! A [`KeyExtractor`] finds the [`Key`] of a request. The functions of this module make the usual ones, a tuple of
//! extractors means all of them together, and `.or(..)` is the alternative to a key that is absent:
//!
//! ```
//! use http::Request;
//! use tower_quota::{key::{self, PeerAddr}, KeyExtractor};
//!
//! /// The user that authentication found.
//! #[derive(Clone)]
//! struct UserId(u64);
//!
//! # #[cfg(feature = "axum")] {
//! let user_or_address = key::extension::<UserId>(|user| user.0.to_string()).or(key::ip());
//! let per_route = (user_or_address, key::route());
//!
//! let peer = PeerAddr("203.0.113.7:4711".parse()?);
//! let (mut parts, ()) = Request::get("/hello").extension(peer).body(())?.into_parts();
//! assert_eq!(per_route.extract(&parts)?.unwrap().to_string(), "ip=203.0.113.7|unmatched=");
//!
//! parts.extensions.insert(UserId(42));
//! assert!(per_route.extract(&parts)?.unwrap().to_string().ends_with("UserId=42|unmatched="));
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What makes a good key
//!
//! A caller that chooses its key chooses its quota, and one that changes its key with every request is not limited.
//!
//! * The address is a good key: [`ip`](ip()), and [`client_ip`] behind a proxy.
//! * So is the user that authentication found, in an [`extension`]. Count the requests before authentication by address, or
//!   guesses of passwords and tokens are not limited.
//! * A header that the client can set is no identity, nor is the host of the URI. Where such a value belongs to the key, add
//!   a policy that counts the address alone.
//! * [`path`](path()) is whatever the client requested, so on a wildcard route every URL has a quota of its own.
//!   [`route`](fn@route) is the template that matched.

mod combine;
mod forwarded;
mod header;
mod ip;
mod network;
mod request;
mod secret;
mod text;

use std::{borrow::Cow, error::Error, fmt};

use http::request::Parts;

#[cfg(feature = "axum")]
pub use self::request::{Route, route};
pub(crate) use self::secret::Secret;
#[cfg(any(feature = "fred", feature = "redis"))]
pub(crate) use self::secret::ShortSecret;
pub use self::{
    combine::{FromFn, IntoExtracted, Or, from_fn},
    header::{Header, header},
    ip::{ClientIp, ClientIpSource, Ip, PeerAddr, UnixPeer, client_ip, ip},
    request::{Constant, Extension, Method, Path, constant, extension, method, path},
    text::Key,
};

/// Extracts the key that a request is counted under.
///
/// `Ok(None)` means that the policy does not apply to the request, an error that the request is refused.
///
/// ```
/// use http::request::Parts;
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
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a key extractor",
    note = "use `key::ip()`, `key::extension(..)` or another function of `tower_quota::key`, a tuple of them, or `key::from_fn(|parts| ..)`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// The key of a request.
    ///
    /// # Errors
    ///
    /// If the request has none and must not pass without.
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError>;

    /// The key of `other`, where this extractor finds none.
    ///
    /// It catches what is absent, never what is malformed.
    fn or<E>(self, other: E) -> Or<Self, E>
    where
        Self: Sized,
        E: KeyExtractor,
    {
        Or {
            first: self,
            second: other,
        }
    }
}

/// A request has no key.
#[derive(Debug)]
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

impl KeyError {
    /// The request lacks what the key is made of; it is refused with `400 Bad Request`.
    ///
    /// [`or`](KeyExtractor::or) catches this.
    pub fn absent(message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind: Kind::Absent,
            message: message.into(),
        }
    }

    /// The request has what the key is made of, but not in a form that can be trusted; it is refused with
    /// `400 Bad Request`.
    pub fn malformed(message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind: Kind::Malformed,
            message: message.into(),
        }
    }

    /// The server does not provide what the key is made of; the request is refused with `500 Internal Server Error`.
    ///
    /// [`or`](KeyExtractor::or) catches this.
    pub fn misconfigured(message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind: Kind::Misconfigured,
            message: message.into(),
        }
    }

    /// Whether the fault is the server's and not the caller's.
    #[must_use]
    pub fn is_misconfigured(&self) -> bool {
        self.kind == Kind::Misconfigured
    }

    pub(crate) fn is_absent(&self) -> bool {
        self.kind != Kind::Malformed
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for KeyError {}
