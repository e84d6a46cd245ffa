use std::fmt;

use http::Method;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, SeqAccess, Visitor},
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
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(try_from = "Texts")]
pub(super) struct Routes(pub(super) Vec<String>);

impl TryFrom<Texts> for Routes {
    type Error = String;

    fn try_from(Texts(routes): Texts) -> Result<Self, String> {
        match routes.iter().find(|route| !route.starts_with('/')) {
            Some(wrong) => Err(format!(
                "`{wrong}` is not a route; one looks like `/login`, `/users/{{id}}` or, in gRPC, `/shop.Accounts/SignIn`"
            )),
            None => Ok(Self(routes)),
        }
    }
}

/// The methods of requests.
#[derive(Clone, Debug, Default, Deserialize)]
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
