use std::{fmt, str::FromStr, sync::Arc};

use http::{HeaderName, request::Parts};
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, SeqAccess, Visitor},
};

use super::client_ip::ClientIp;
use crate::{
    ConfigError, Key, KeyExtractor,
    key::{self, KeyError},
};

/// A key as configuration spells it: all components of a list, and of each the first alternative that a request has.
#[derive(Clone, Debug)]
pub(super) struct KeySpec(Vec<Vec<Component>>);

/// One key of a list or of several alternatives.
#[derive(Clone)]
enum Component {
    Key(Arc<dyn KeyExtractor>),
    /// The key that the table of the client address describes.
    ClientIp,
}

/// The most components of a list, and the most alternatives of one.
const MAX_PARTS: usize = 16;

/// Headers in which proxies record the client address, and which a client can send too.
const FORWARDING_HEADERS: [&str; 22] = [
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

impl KeySpec {
    pub(super) fn extractor(&self, client_ip: Option<&ClientIp>) -> Result<Arc<dyn KeyExtractor>, ConfigError> {
        let mut all = Vec::new();
        for alternatives in &self.0 {
            let alternatives: Result<Vec<_>, _> = alternatives
                .iter()
                .map(|component| component.extractor(client_ip))
                .collect();
            all.push(First(alternatives?));
        }
        Ok(Arc::new(All(all)))
    }
}

impl Component {
    fn extractor(&self, client_ip: Option<&ClientIp>) -> Result<Arc<dyn KeyExtractor>, ConfigError> {
        match (self, client_ip) {
            (Self::Key(key), _) => Ok(key.clone()),
            (Self::ClientIp, Some(ClientIp(client_ip))) => Ok(Arc::new(client_ip.clone())),
            (Self::ClientIp, None) => Err(ConfigError::new(
                "`client-ip` needs the table `[client-ip]`, such as `header = \"x-forwarded-for\"` and `trusted = \
                 [\"10.0.0.0/8\"]`",
            )),
        }
    }
}

/// The keys that configuration can name, one a line.
impl FromStr for Component {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (name, argument) = match text.split_once(':') {
            Some((name, argument)) => (name, Some(argument)),
            None => (text, None),
        };
        let key: Arc<dyn KeyExtractor> = match (name, argument) {
            ("client-ip", None) => return Ok(Self::ClientIp),
            ("ip", None) => Arc::new(key::ip()),
            ("path", None) => Arc::new(key::path()),
            ("method", None) => Arc::new(key::method()),
            #[cfg(feature = "axum")]
            ("route", None) => Arc::new(key::route()),
            ("header", Some(name)) => Arc::new(key::header(header_name(name)?)),
            ("constant", Some(value)) => Arc::new(key::constant(value)),
            _ => {
                return Err(format!(
                    "`{text}` is not a key; one is `ip`, `client-ip`, `path`, `route` (feature `axum`), `method`, \
                     `header:x-user-id` or `constant:all`"
                ));
            }
        };
        Ok(Self::Key(key))
    }
}

impl fmt::Debug for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key(_) => "<key>",
            Self::ClientIp => "client-ip",
        })
    }
}

/// The name of a header that is no record of the client address.
fn header_name(name: &str) -> Result<HeaderName, String> {
    let Ok(name) = HeaderName::try_from(name) else {
        return Err(format!(
            "`{name}` is not the name of a header; one looks like `header:x-user-id`"
        ));
    };
    if FORWARDING_HEADERS.contains(&name.as_str()) {
        return Err(format!(
            "`header:{name}` would let each client choose its key, since clients can send this header too; use the key \
             `client-ip`, with `header = \"{name}\"` and the networks of the proxies as `trusted` in the table `[client-ip]`"
        ));
    }
    Ok(name)
}

/// `ip`, or several with `or` between them.
fn alternatives(text: &str) -> Result<Vec<Component>, String> {
    let mut alternatives = Vec::new();
    for text in text.split(" or ") {
        if alternatives.len() == MAX_PARTS {
            return Err(format!(
                "a key has at most {MAX_PARTS} alternatives with `or` between them"
            ));
        }
        alternatives.push(text.parse()?);
    }
    Ok(alternatives)
}

/// The key of the first extractor that finds one.
struct First(Vec<Arc<dyn KeyExtractor>>);

impl KeyExtractor for First {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        let mut found = Ok(None);
        for extractor in &self.0 {
            found = extractor.extract(parts);
            match &found {
                Ok(None) => {}
                Err(error) if error.is_absent() => {}
                Ok(Some(_)) | Err(_) => break,
            }
        }
        found
    }
}

/// The keys of several extractors together.
struct All(Vec<First>);

impl KeyExtractor for All {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        let mut all = Key::empty();
        for extractor in &self.0 {
            match extractor.extract(parts)? {
                Some(key) => all = all.and(key),
                None => return Ok(None),
            }
        }
        Ok(Some(all))
    }
}

impl<'de> Deserialize<'de> for KeySpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrSeveral;

        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = KeySpec;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key such as `\"ip\"`, or a list of them such as `[\"ip\", \"path\"]`")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<KeySpec, E> {
                let alternatives = alternatives(text).map_err(E::custom)?;
                Ok(KeySpec(vec![alternatives]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<KeySpec, A::Error> {
                let mut all = Vec::new();
                while let Some(text) = list.next_element::<String>()? {
                    if all.len() == MAX_PARTS {
                        return Err(A::Error::custom(format_args!("a list has at most {MAX_PARTS} keys")));
                    }
                    all.push(alternatives(&text).map_err(A::Error::custom)?);
                }
                if all.is_empty() {
                    return Err(A::Error::custom(
                        "an empty list is no key; one limit for all requests is `constant:all`",
                    ));
                }
                Ok(KeySpec(all))
            }
        }

        deserializer.deserialize_any(OneOrSeveral)
    }
}
