use std::{fmt, time::Duration};

use http::Method;
use ipnet::IpNet;
use serde::{
    Deserialize, Deserializer,
    de::{Error, SeqAccess, Visitor},
};

use crate::{
    ConfigError, key,
    limit::parse_length,
    policy::{
        scope,
        scope::{Scope, Template},
    },
};

/// A text, or a list of texts that is not empty.
struct Texts(Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrSeveral;

        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = Texts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, or a list of texts")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Texts, E> {
                Ok(Texts(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Texts, A::Error> {
                let mut texts = Vec::new();
                while let Some(text) = list.next_element()? {
                    texts.push(text);
                }
                if texts.is_empty() {
                    return Err(A::Error::custom(
                        "an empty list is for no request; leave it out, for all requests",
                    ));
                }
                Ok(Texts(texts))
            }
        }

        deserializer.deserialize_any(OneOrSeveral)
    }
}

/// The templates of routes, or the paths.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "Texts")]
pub(super) enum Routes {
    #[default]
    All,
    These(Vec<String>),
    /// Those that no other policy of the file is for.
    Others,
}

impl TryFrom<Texts> for Routes {
    type Error = String;

    fn try_from(Texts(routes): Texts) -> Result<Self, String> {
        if matches!(&routes[..], [only] if only == "others") {
            return Ok(Self::Others);
        }
        match routes.iter().find(|route| !route.starts_with('/')) {
            Some(wrong) => Err(format!(
                "`{wrong}` is not a route; one looks like `/login`, `/users/{{id}}` or, in gRPC, `/shop.Accounts/SignIn`; \
                 `others` alone are those that no other policy has"
            )),
            None => Ok(Self::These(routes)),
        }
    }
}

impl Routes {
    /// The routes as a part of a scope, with the scopes of the other policies.
    pub(super) fn scope(&self, others: impl FnOnce() -> Vec<Scope>) -> scope::Routes {
        match self {
            Self::All => scope::Routes::All,
            Self::These(routes) => scope::Routes::These(routes.iter().map(|route| Template::new(route)).collect()),
            Self::Others => scope::Routes::NoneOf(others()),
        }
    }
}

/// The networks of clients.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(try_from = "Texts")]
pub(super) struct Networks(pub(super) Vec<String>);

impl TryFrom<Texts> for Networks {
    type Error = ConfigError;

    fn try_from(Texts(networks): Texts) -> Result<Self, ConfigError> {
        let is_all = |network: &&String| network.parse::<IpNet>().is_ok_and(|network| network.prefix_len() == 0);
        if let Some(all) = networks.iter().find(is_all) {
            return Err(ConfigError::new(format!(
                "`{all}` contains every address; list the networks of the clients"
            )));
        }
        key::ip().within(&networks).map(|_| Self(networks))
    }
}

/// The methods of requests.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "Texts")]
pub(super) struct Methods(pub(super) Vec<Method>);

impl TryFrom<Texts> for Methods {
    type Error = String;

    fn try_from(Texts(names): Texts) -> Result<Self, String> {
        // Methods are case-sensitive (RFC 9110 §9.1).
        let parse = |name: &String| {
            let is_upper = !name.bytes().any(|byte| byte.is_ascii_lowercase());
            let method = Method::from_bytes(name.as_bytes()).ok().filter(|_| is_upper);
            method.ok_or_else(|| format!("`{name}` is not a method; one looks like `POST`"))
        };
        names.iter().map(parse).collect::<Result<_, _>>().map(Self)
    }
}

/// A length of time, such as `10min`.
pub(super) struct Length(pub(super) Duration);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Length;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a length of time such as \"10min\"")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Length, E> {
                let length = parse_length(text).map(Length);
                length.ok_or_else(|| {
                    E::custom(format_args!(
                        "`{text}` is not a length of time; one looks like `10min` or `500ms`"
                    ))
                })
            }
        }

        deserializer.deserialize_str(Text)
    }
}
