use std::fmt;

use http::{HeaderName, request::Parts};

use super::{Key, KeyError, KeyExtractor};

/// The value of a request header, byte for byte, without the white space around it.
///
/// A request without the header is refused with 400, unless [`or`](KeyExtractor::or) has an alternative; so is one
/// with more than one line of it, or a value of more than 4 KiB. An empty value is a value.
///
/// A header that the client can set is no identity. With such a key, alone or together with [`ip`](super::ip()), each new
/// value is a new quota. Use it for a header that a proxy in front sets and removes from what clients send, and add a policy
/// that counts the address alone; or use an [`extension`](super::extension()) that authentication sets.
///
/// Headers in which proxies record the client address, such as `X-Forwarded-For`, belong to
/// [`client_ip`](super::client_ip), which reads what the proxy wrote and not what the client sent.
///
/// # Panics
///
/// If the name is not a header name, as in `key::header("x user")`.
///
/// ```
/// use http::Request;
/// use tower_quota::{key, KeyExtractor};
///
/// // The gateway in front sets it, whatever the client sends.
/// let user = key::header("X-Gateway-User");
///
/// let (parts, ()) = Request::get("/").header("x-gateway-user", " 42 ").body(())?.into_parts();
/// assert_eq!(user.extract(&parts)?.unwrap().to_string(), "header:x-gateway-user=42");
///
/// let (parts, ()) = Request::get("/").body(())?.into_parts();
/// assert_eq!(user.extract(&parts).unwrap_err().to_string(), "the request has no header `x-gateway-user`");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[track_caller]
pub fn header<N>(name: N) -> Header
where
    N: TryInto<HeaderName>,
    N::Error: fmt::Display,
{
    match name.try_into() {
        Ok(name) => Header(name),
        Err(error) => panic!("{error}, as in `key::header(\"x-user-id\")`"),
    }
}

/// A [`KeyExtractor`] made by [`header`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Header(HeaderName);

const MAX_VALUE: usize = 4_096;

impl KeyExtractor for Header {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        let name = &self.0;
        let mut lines = parts.headers.get_all(name).iter();
        let Some(value) = lines.next() else {
            return Err(KeyError::absent(format!("the request has no header `{name}`")));
        };
        if lines.next().is_some() {
            // A proxy in front may have meant the first line, or the last: neither can be trusted.
            return Err(KeyError::malformed(format!(
                "the request has more than one header `{name}`"
            )));
        }

        let value = trim(value.as_bytes());
        if value.len() > MAX_VALUE {
            return Err(KeyError::malformed(format!(
                "the header `{name}` is longer than {MAX_VALUE} bytes"
            )));
        }
        Ok(Some(Key::component("header:", name.as_str().as_bytes(), value)))
    }
}

/// Without optional white space (RFC 9110 §5.6.3).
pub(super) fn trim(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}
