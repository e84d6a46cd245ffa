use std::{borrow::Cow, fmt};

use http::{HeaderName, HeaderValue, Version, header::COOKIE};

use super::{
    extractor::{Extractor, KeyError},
    form::{KeyForm, Value},
    key::Key,
};

/// The value of a request header, byte for byte, without surrounding white space.
///
/// A request without the header is refused with 400, unless [`or`](super::KeyExtractor::or) adds an alternative. A request with
/// more than one line of the header, or with a value of more than 4,096 bytes, is always refused with 400; only the lines of `cookie`
/// are one value from HTTP/2 on, as clients may send each cookie in a line of its own there. An empty value is a
/// value, except of a header that holds credentials: there it is absent. The metadata of a gRPC call are headers too: `header("x-tenant")` is the value of
/// `metadata_mut().insert("x-tenant", ..)` of a tonic client.
///
/// The key of a header that holds credentials has a hash of the value, since the store keeps keys readable: of one whose name
/// contains `authorization`, `cookie`, `apikey`, `token`, `secret`, `password`, `passphrase`, `credential`, `bearer`, `session` or `jwt`,
/// or whose last word is `key` or `auth`, such as `x-api-key` or `api_key`. Short values can be guessed from a hash without a secret: `RedisStoreBuilder::hash_keys` has one. For another header
/// that holds credentials, make a key of a hash by [`from_fn`](super::from_fn()).
///
/// # What an attacker can do
///
/// A header that the client can set is not an identity. With such a key, alone or together with [`ip`](super::ip()), each new
/// value is a new quota. Use it for a header that a proxy in front sets and removes from what clients send, and add a policy
/// that counts the address alone; or use an [`extension`](super::extension()) that authentication inserts.
///
/// Headers in which proxies record the client address, such as `X-Forwarded-For`, are read by
/// [`client_ip`](super::client_ip()), which reads what the proxy wrote and not what the client sent. An extractor of such a
/// header logs a warning when it is built.
///
/// # Panics
///
/// If the name is not a header name, as in `key::header("x user")`.
/// Convert a name from configuration to a `HeaderName` first, which gives an error.
///
/// ```
/// use http::Request;
/// use tower_quota::{Key, KeyExtractor, key};
///
/// // The gateway in front sets it, whatever the client sends.
/// let user = key::header("X-Gateway-User");
///
/// let (parts, ()) = Request::get("/").header("x-gateway-user", " 42 ").body(())?.into_parts();
/// assert_eq!(user.extract(&parts)?, Some(Key::header("x-gateway-user", "42")));
///
/// let (parts, ()) = Request::get("/").body(())?.into_parts();
/// assert_eq!(user.extract(&parts).unwrap_err().to_string(), "the request has no header `x-gateway-user`");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[track_caller]
pub fn header<N>(name: N) -> Extractor
where
    N: TryInto<HeaderName> + AsRef<[u8]>,
    N::Error: fmt::Display,
{
    let shown = String::from_utf8_lossy(name.as_ref()).into_owned();
    match name.try_into() {
        Ok(name) => {
            if FORWARDING_HEADERS.contains(&name.as_str()) {
                tracing::warn!(
                    header = name.as_str(),
                    "clients can set the header of this key; use `key::client_ip(..)`"
                );
            }
            of_header(name)
        }
        Err(error) => panic!(
            "{shown:?} is not a header name ({error}); one has letters, digits and `-`, as in `key::header(\"x-user-id\")`"
        ),
    }
}

/// Headers in which proxies record the client address, and which a client can send too.
pub(super) const FORWARDING_HEADERS: [&str; 22] = [
    "cf-connecting-ip",
    "cf-connecting-ipv6",
    "client-ip",
    "cloudfront-viewer-address",
    "fastly-client-ip",
    "fly-client-ip",
    "forwarded",
    "forwarded-for",
    "true-client-ip",
    "x-appengine-user-ip",
    "x-azure-clientip",
    "x-azure-socketip",
    "x-client-ip",
    "x-cluster-client-ip",
    "x-envoy-external-address",
    "x-forwarded",
    "x-forwarded-for",
    "x-original-forwarded-for",
    "x-originating-ip",
    "x-real-ip",
    "x-remote-addr",
    "x-remote-ip",
];

/// The longest value, in bytes.
const MAX_VALUE: usize = 4_096;

pub(super) fn of_header(name: HeaderName) -> Extractor {
    let form = KeyForm::of("header:", name.as_str(), Value::Text);
    let is_credential = holds_credentials(name.as_str());
    Extractor::new(form, move |parts| {
        let absent = || Err(KeyError::absent(format!("the request has no header `{name}`")));
        let lines = parts.headers.get_all(&name);
        let mut others = lines.iter();
        let Some(value) = others.next() else {
            return absent();
        };
        let mut value = Cow::Borrowed(value.as_bytes());
        if others.next().is_some() {
            if name != COOKIE || parts.version < Version::HTTP_2 {
                // A proxy in front may have used the first line, or the last.
                return Err(KeyError::malformed(format!(
                    "the request has more than one header `{name}`"
                )));
            }
            // RFC 9113 §8.2.3: the lines of cookies are joined before they are passed on to HTTP/1.1 or an application. RFC 9114 §4.2.1
            // has the same for HTTP/3.
            let lines: Vec<_> = lines.iter().map(HeaderValue::as_bytes).collect();
            value = Cow::Owned(lines.join(&b"; "[..]));
        }

        // Optional white space (RFC 9110 §5.6.3).
        let value = value.trim_ascii();
        if value.len() > MAX_VALUE {
            return Err(KeyError::malformed(format!(
                "the header `{name}` is longer than {MAX_VALUE} bytes"
            )));
        }
        if value.is_empty() && is_credential {
            return absent();
        }
        Ok(Some(Key::of_header(name.as_str(), value)))
    })
}

impl Key {
    /// The key that [`header`](fn@super::header) returns for a request.
    ///
    /// The case of the name and the white space around the value do not matter. Credentials are hashed, as of a request.
    ///
    /// ```
    /// use tower_quota::Key;
    ///
    /// let key = Key::header("X-Gateway-User", " 42 ");
    /// assert_eq!(key.to_string(), "header:x-gateway-user=42");
    ///
    /// let key = Key::header("x-api-key", "sk-42");
    /// assert!(key.to_string().starts_with("header:x-api-key=hash:"));
    /// ```
    pub fn header(name: &str, value: impl AsRef<[u8]>) -> Self {
        Self::of_header(&name.to_ascii_lowercase(), value.as_ref().trim_ascii())
    }

    /// The key of a header whose name is in lower case.
    pub(super) fn of_header(name: &str, value: &[u8]) -> Self {
        if !holds_credentials(name) {
            return Self::component("header:", name.as_bytes(), value);
        }
        let hash = blake3::hash(value).to_hex();
        Self::formatted("header:", name.as_bytes(), format_args!("{HASH}{}", &hash[..32]))
    }
}

/// Begins the value of a header that holds credentials.
const HASH: &str = "hash:";

/// Whether a key has the hash of the value of such a header: a store keeps keys readable, in memory and in backups, and shows
/// them to its operators, as in `MONITOR`.
fn holds_credentials(name: &str) -> bool {
    const WORDS: [&str; 11] = [
        "authorization",
        "cookie",
        "apikey",
        "token",
        "secret",
        "password",
        "session",
        "jwt",
        "bearer",
        "credential",
        "passphrase",
    ];
    // The last words of a name.
    let is_last = |word| {
        let before: Option<&str> = name.strip_suffix(word);
        before.is_some_and(|before| before.is_empty() || before.ends_with(['-', '_']))
    };
    WORDS.iter().any(|word| name.contains(word)) || ["key", "auth"].into_iter().any(is_last)
}

/// Whether a header holds credentials, and this value is not their hash.
#[cfg(feature = "admin")]
pub(super) fn is_readable_credential(name: &str, value: &[u8]) -> bool {
    let is_hash = value.strip_prefix(HASH.as_bytes()).is_some_and(|digits| {
        digits.len() == 32 && digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
    });
    holds_credentials(name) && !is_hash
}

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
pub fn method() -> Extractor {
    let method = KeyForm::of("method", "", Value::Method);
    let other = KeyForm::of("other-method", "", Value::Only("".into()));
    Extractor::new(KeyForm::first([method, other]), |parts| {
        Ok(Some(Key::method(&parts.method)))
    })
}

/// The methods of RFC 9110 and RFC 5789.
pub(crate) const STANDARD_METHODS: [&str; 9] = [
    "CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE",
];

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
        match STANDARD_METHODS.contains(&method.as_str()) {
            true => Self::plain("method", method),
            false => Self::plain("other-method", ""),
        }
    }
}
