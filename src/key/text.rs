//! Keys as text, for files of policies: `"ip"`, `["client-ip", "route"]`, `"header:x-user-id or ip"`.

use std::{fmt, marker::PhantomData, sync::Arc};

use http::HeaderName;
use serde::{
    Deserialize, Deserializer,
    de::{
        Error, IntoDeserializer, MapAccess, SeqAccess, Visitor,
        value::{MapAccessDeserializer, SeqAccessDeserializer},
    },
};

use super::{
    extractor::{Extractor, KeyExtractor},
    from_fn::constant,
    header::{FORWARDING_HEADERS, method, of_header},
    ip::{Ip, ip},
    path::path,
};
use crate::ConfigError;

/// A key that files can name: its name, such as `ip`, or with a colon before an argument, such as `header:`; an example of the
/// argument; and the extractor with an argument.
type Spelling = (&'static str, &'static str, fn(&str) -> Result<Named, String>);

/// All keys that files can name.
const KEYS: [Spelling; 8] = [
    ("ip", "", |_| Ok(Named::new(ip()))),
    ("client-ip", "", |_| Ok(Named::ClientIp)),
    ("route", "", route_extractor),
    ("path", "", |_| Ok(Named::new(path()))),
    ("method", "", |_| Ok(Named::new(method()))),
    ("header:", "x-user-id", header_extractor),
    ("extension:", "user", |name| Ok(Named::Extension(name.to_owned()))),
    ("constant:", "all", constant_extractor),
];

#[cfg(feature = "axum")]
fn route_extractor(_: &str) -> Result<Named, String> {
    Ok(Named::new(super::path::route()))
}

#[cfg(not(feature = "axum"))]
fn route_extractor(_: &str) -> Result<Named, String> {
    Err("the key `route` requires the feature `axum` of tower-quota".to_owned())
}

fn header_extractor(name: &str) -> Result<Named, String> {
    let Ok(name) = HeaderName::try_from(name) else {
        return Err(format!(
            "`{name}` is not the name of a header; one looks like `header:x-user-id`"
        ));
    };
    if FORWARDING_HEADERS.contains(&name.as_str()) {
        return Err(format!(
            "`header:{name}` would let every client choose its key, since clients can send this header too; use the key \
             `client-ip`, and in the table `client-ip` the `header` `\"{name}\"`, with the networks of the proxies as `trusted`"
        ));
    }
    Ok(Named::new(of_header(name)))
}

/// Refuses what looks like several keys, and would be one count for all callers.
fn constant_extractor(value: &str) -> Result<Named, String> {
    match value.is_empty() || value.contains(|part: char| part == ',' || part.is_whitespace()) {
        true => Err(format!(
            "`constant:{value}` is not a key: the constant is one word, as in `constant:all`, and several keys are a list such as \
             `[\"constant:all\", \"ip\"]`"
        )),
        false => Ok(Named::new(constant(value))),
    }
}

/// The extractor of a name.
#[derive(Clone)]
enum Named {
    Complete(Arc<dyn KeyExtractor>),
    /// The table `[client-ip]` of the file has the settings.
    ClientIp,
    /// The application registers what has this name.
    Extension(String),
}

/// The extractor of a key in a file, or the reason why there is none.
type Found = Result<Arc<dyn KeyExtractor>, ConfigError>;

impl Named {
    fn new(extractor: impl KeyExtractor) -> Self {
        Self::Complete(Arc::new(extractor))
    }

    /// One key in a file, such as `header:x-user-id`.
    fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        for (name, _, extractor) in KEYS {
            if let Some(argument) = text.strip_prefix(name)
                && (name.ends_with(':') || argument.is_empty())
            {
                return extractor(argument);
            }
        }

        let examples = KEYS.map(|(name, argument, _)| format!("`{name}{argument}`")).join(", ");
        Err(format!(
            "`{text}` is not a key; the keys are {examples}, and lists of them such as `[\"ip\", \"path\"]`"
        ))
    }

    fn extractor(&self, client_ip: Option<&Ip>, extension: &dyn Fn(&str) -> Found) -> Found {
        match (self, client_ip) {
            (Self::Complete(extractor), _) => Ok(extractor.clone()),
            (Self::Extension(name), _) => extension(name),
            (Self::ClientIp, Some(client_ip)) => Ok(Arc::new(client_ip.clone())),
            (Self::ClientIp, None) => Err(ConfigError::new(
                "the key `client-ip` requires the table `client-ip`, with a `header` such as `\"x-forwarded-for\"` and \
                 `trusted` networks such as `[\"10.0.0.0/8\"]`",
            )),
        }
    }
}

/// The key of a policy in a file: all components of a list, and of each the first alternative that a request has.
#[derive(Clone)]
pub(crate) struct KeySpec(Vec<Vec<Named>>);

impl KeySpec {
    /// Refuses a key that the rest of the file does not complete. Extensions are registered after the file was read.
    pub(crate) fn validate(&self, client_ip: Option<&Ip>) -> Result<(), ConfigError> {
        self.extractor(client_ip, &|_| Ok(Arc::new(ip()))).map(drop)
    }

    /// The extractor, with that of the table `[client-ip]`, and those of the extensions that the application has registered.
    pub(crate) fn extractor(&self, client_ip: Option<&Ip>, extension: &dyn Fn(&str) -> Found) -> Found {
        let all = self.0.iter().map(|alternatives| -> Found {
            let alternatives = alternatives
                .iter()
                .map(|component| component.extractor(client_ip, extension));
            Ok(joined(alternatives.collect::<Result<_, _>>()?, Extractor::first))
        });
        Ok(joined(all.collect::<Result<_, _>>()?, Extractor::all))
    }
}

/// Several extractors as one; a single one stays itself, which takes 200 instructions less.
fn joined(
    mut extractors: Vec<Arc<dyn KeyExtractor>>,
    join: fn(Vec<Arc<dyn KeyExtractor>>) -> Extractor,
) -> Arc<dyn KeyExtractor> {
    match extractors.len() {
        1 => extractors.remove(0),
        _ => Arc::new(join(extractors)),
    }
}

/// The most components of a list, and the most alternatives of one.
const MAX_PARTS: usize = 16;

/// `ip`, or several with `or` between them.
fn alternatives(text: &str) -> Result<Vec<Named>, String> {
    if text.split(" or ").nth(MAX_PARTS).is_some() {
        return Err(format!(
            "a key has at most {MAX_PARTS} alternatives with `or` between them"
        ));
    }
    text.split(" or ").map(Named::parse).collect()
}

impl<'de> Deserialize<'de> for KeySpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const EXPECTED: &str = "a key such as `\"ip\"`, or a list of them such as `[\"ip\", \"path\"]`";
        const EMPTY: &str = "an empty list is not a key; one limit for all requests is `constant:all`";

        let texts: Vec<String> = one_or_several(deserializer, EXPECTED, EMPTY)?;
        if texts.len() > MAX_PARTS {
            return Err(D::Error::custom(format_args!("a list has at most {MAX_PARTS} keys")));
        }
        let all = texts.iter().map(|text| alternatives(text)).collect::<Result<_, _>>();
        all.map(Self).map_err(D::Error::custom)
    }
}

/// Reads a value in a file, or a list of them that is not empty, with what is expected and why a list is not empty, for errors.
pub(crate) fn one_or_several<'de, D, T>(
    deserializer: D,
    expected: &'static str,
    empty: &'static str,
) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Read<T>(&'static str, &'static str, PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Read<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Vec<T>, E> {
            Ok(vec![T::deserialize(text.into_deserializer())?])
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Vec<T>, A::Error> {
            Ok(vec![T::deserialize(MapAccessDeserializer::new(map))?])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Vec<T>, A::Error> {
            let all = Vec::deserialize(SeqAccessDeserializer::new(list))?;
            match all.is_empty() {
                true => Err(A::Error::custom(self.1)),
                false => Ok(all),
            }
        }
    }

    deserializer.deserialize_any(Read(expected, empty, PhantomData))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_alternative_is_the_key_where_a_request_lacks_the_first() {
        use crate::key::{self, Key};

        let (mut parts, ()) = http::Request::new(()).into_parts();
        let first = Extractor::first(vec![Arc::new(key::ip()), Arc::new(key::constant("all"))]);
        assert!(key::ip().extract(&parts).is_err(), "it has no peer address");
        assert_eq!(first.extract(&parts).unwrap(), Some(Key::constant("all")));

        // By a wrong header, a caller must not choose another key.
        let of_header = Extractor::first(vec![Arc::new(key::header("x-user")), Arc::new(key::constant("all"))]);
        assert_eq!(of_header.extract(&parts).unwrap(), Some(Key::constant("all")));
        for user in ["a", "b"] {
            parts.headers.append("x-user", http::HeaderValue::from_static(user));
        }
        assert!(of_header.extract(&parts).is_err());
    }

    #[test]
    fn no_header_that_clients_can_send_beside_those_of_proxies_is_a_key() {
        assert_eq!(FORWARDING_HEADERS.len(), 22);
        for name in FORWARDING_HEADERS {
            let error = Named::parse(&format!("header:{name}")).err().expect(name);
            assert!(error.contains(&format!("`header` `\"{name}\"`")), "{error}");
        }
    }

    #[test]
    fn the_docs_and_the_errors_have_every_key() {
        let error = Named::parse("address").err().unwrap();
        for (name, argument, _) in KEYS {
            let example = format!("{name}{argument}");
            let docs = include_str!("../policy/file/mod.rs");
            assert!(
                docs.contains(&format!("/// | `{name}")),
                "`{name}` is not in the docs of `Policies`"
            );
            assert!(error.contains(&format!("`{example}`")), "{error}");
            assert!(Named::parse(&example).is_ok() || !cfg!(feature = "axum"), "{example}");
        }
    }

    #[test]
    fn a_name_with_something_after_it_is_not_a_key() {
        for text in [
            "ip:",
            "ipv6",
            "client-ip-2",
            "header",
            "constant",
            "constant:",
            "constant:a, ip",
            "constant:a ip",
            "ip ip",
            "or",
            "",
        ] {
            let error = Named::parse(text).err().unwrap();
            assert!(error.contains("is not a key"), "{text}: {error}");
        }
    }
}
