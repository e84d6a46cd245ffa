//! Key extractors.
//!
//! A [`KeyExtractor`] extracts the [`Key`] that a request is counted under. A tuple of extractors means all of them
//! together; [`or`](KeyExtractor::or) adds an alternative for requests that lack the key.
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
//! let user_or_address = key::extension("user", |user: &UserId| user.0).or(key::ip());
//! let per_route = (user_or_address, key::route());
//!
//! let peer = PeerAddr("203.0.113.7:4711".parse()?);
//! let (mut parts, ()) = Request::get("/hello").extension(peer).body(())?.into_parts();
//! assert_eq!(per_route.extract(&parts)?.unwrap().to_string(), "ip=203.0.113.7|unmatched=");
//!
//! parts.extensions.insert(UserId(42));
//! assert_eq!(per_route.extract(&parts)?.unwrap().to_string(), "ext:user=42|unmatched=");
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Which key to choose
//!
//! A caller that chooses its key chooses its quota: with a new key in each request it is never limited.
//!
//! | extractor | source of the key | what an attacker can do |
//! | --- | --- | --- |
//! | [`ip`](ip()) | the address of the transport peer | use many addresses, such as those of [an IPv6 network](ip#ipv6-networks) |
//! | [`client_ip`] | the address that a trusted proxy recorded | the same; and choose any address, if it reaches the service from a trusted network |
//! | [`extension`](extension()) | a value that an earlier layer inserted, such as the user | what that layer lets it do: create many accounts, for example |
//! | [`route`](fn@route) (feature `axum`) | the template of the matched route | nothing: the number of routes is fixed |
//! | [`method`](method()) | the method | nothing: there are ten keys |
//! | [`path`](path()) | the path | choose a new key in each request, on a route with a wildcard or a parameter |
//! | [`header`](fn@header) | a request header | choose a new key in each request, unless a proxy in front sets the header and removes it from what the client sends |
//! | [`constant`](constant()) | none: one key for all requests | exhaust the limit for all callers |
//! | [`from_fn`] | a function of the request | depends on what the function reads |
//!
//! * Count by address or by authenticated user. Count the requests before authentication by address, or guesses of passwords
//!   and tokens are not limited.
//! * Where a value that the client chooses belongs to the key, such as the path, a header or the host of the URI, add a policy
//!   that counts the address alone.
//!
//! # Keys made by hand
//!
//! Each extractor has a constructor of [`Key`] that makes the same key, such as [`Key::ip`] for [`ip`](ip()). With it a
//! [`Limiter`](crate::Limiter) reads or resets a count of a layer.

mod address;
#[cfg(feature = "axum")]
mod client_addr;
mod client_ip;
mod extractor;
mod form;
mod forwarded;
mod from_fn;
mod header;
mod ip;
#[expect(clippy::module_inception, reason = "the type `Key` is where a reader looks for it")]
mod key;
#[cfg_attr(
    not(feature = "serde"),
    expect(dead_code, reason = "files of policies compare paths")
)]
mod nested_path;
#[cfg_attr(
    not(feature = "serde"),
    expect(dead_code, reason = "files of policies compare spellings")
)]
mod normalize;
mod path;
mod proxy_watch;
#[cfg(feature = "admin")]
mod search;
#[cfg(feature = "serde")]
mod text;

#[cfg(feature = "admin")]
pub(crate) use self::search::{FoundKey, Search};
pub use self::{
    address::{PeerAddr, UnixPeer},
    client_ip::{ClientIp, ClientIpSource, client_ip},
    extractor::{Extractor, KeyError, KeyExtractor},
    from_fn::{IntoKey, constant, extension, from_fn},
    header::{header, method},
    ip::{Ip, ip},
    key::Key,
    path::{Path, path},
};
#[cfg(feature = "axum")]
pub use self::{client_addr::ClientAddr, path::route};
pub(crate) use self::{form::KeyForm, key::Secret};
#[cfg(feature = "serde")]
pub(crate) use self::{
    header::STANDARD_METHODS,
    nested_path::RoutedPaths,
    normalize::{Form, Forms, PathBytes, any_spelling, decoded, has_dot_segment, normal_forms, trimmed},
    text::{KeySpec, one_or_several},
};
