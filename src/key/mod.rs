//! Whom a request counts against.
//!
//! A [`KeyExtractor`] finds the [`Key`] of a request. The functions of this module make the usual ones, a tuple of
//! extractors means all of them together, and `.or(..)` says what to use instead of what is absent:
//!
//! ```
//! use http::Request;
//! use tower_quota::{key, KeyExtractor};
//!
//! let per_user_and_path = (key::header("x-user-id").or(key::constant("anonymous")), key::path());
//!
//! let (parts, ()) = Request::get("/hello?lang=en").header("x-user-id", "42").body(())?.into_parts();
//! let key = per_user_and_path.extract(&parts)?.unwrap();
//! assert_eq!(key.to_string(), "header:x-user-id=42|path=/hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What makes a good key
//!
//! A caller that chooses its key chooses its quota. A header that the client can set is no identity: pair it with the
//! address, or use [`extension`] with what your authentication found. [`path`] is whatever the client asked for, so on a
//! wildcard route every URL is a quota of its own; [`route`] is the template that matched.

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
pub use self::{
    combine::{FromFn, IntoExtracted, Or, from_fn},
    header::{Header, header},
    ip::{ClientIp, ClientIpSource, Ip, PeerAddr, UnixPeer, client_ip, ip},
    request::{Constant, Extension, Method, Path, constant, extension, method, path},
    text::Key,
};

/// Finds whom a request counts against.
///
/// `Ok(None)` means that the policy does not apply to the request, an error that the request is refused.
///
/// ```
/// use http::request::Parts;
/// use tower_quota::{Key, KeyExtractor, key::KeyError};
///
/// struct Tenant;
///
/// impl KeyExtractor for Tenant {
///     fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
///         match parts.uri.host().and_then(|host| host.split('.').next()) {
///             Some(tenant) => Ok(Some(Key::from(tenant))),
///             None => Err(KeyError::malformed("the request names no host")),
///         }
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say whom a request counts against",
    note = "use `key::ip()`, `key::header(\"x-user-id\")` or another function of `tower_quota::key`, a tuple of them, or `key::from_fn(|parts| ..)`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// The key of a request.
    ///
    /// # Errors
    ///
    /// If the request has none and must not pass without.
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError>;

    /// What `other` finds, where this finds nothing.
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

    fn is_absent(&self) -> bool {
        self.kind != Kind::Malformed
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for KeyError {}
