//! Values of the fields of a file: routes, networks, methods, lengths of time, and the address of the client.

use std::{fmt, time::Duration};

use http::{HeaderName, Method};
use ipnet::IpNet;
use serde::{
    Deserialize, Deserializer,
    de::{Error, SeqAccess, Visitor},
};

use super::Policies;
use crate::{
    ConfigError, key,
    key::ClientIpSource,
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

            fn visit_str<E: Error>(self, text: &str) -> Result<Texts, E> {
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

/// The client address as configuration describes it: the header, the networks whose header is read, and the number of proxies.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "ClientIpTable")]
pub(super) struct ClientIp(pub(super) key::Ip);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientIpTable {
    header: String,
    trusted: Trusted,
    hops: Option<usize>,
}

impl TryFrom<ClientIpTable> for ClientIp {
    type Error = ConfigError;

    fn try_from(table: ClientIpTable) -> Result<Self, ConfigError> {
        let header = table.header.parse::<HeaderName>().map_err(|_| {
            ConfigError::new(format!(
                "`{}` is not the name of a header; one looks like `\"x-forwarded-for\"`",
                table.header
            ))
        })?;

        let source = match (header.as_str(), table.hops) {
            ("x-forwarded-for", None) => ClientIpSource::XForwardedFor,
            ("x-forwarded-for", Some(0)) => {
                return Err(ConfigError::new(
                    "there is at least one proxy: with 1 as `hops`, the client is the last entry of `x-forwarded-for`",
                ));
            }
            ("x-forwarded-for", Some(hops)) => ClientIpSource::XForwardedForHop(hops),
            ("forwarded", None) => ClientIpSource::Forwarded,
            (_, None) => ClientIpSource::Header(header),
            (_, Some(_)) => {
                return Err(ConfigError::new(format!(
                    "`hops` counts entries of `x-forwarded-for`; leave it out for `{header}`"
                )));
            }
        };

        let client_ip = key::client_ip(source);
        match table.trusted {
            Trusted::AnyPeer => Ok(Self(client_ip.trust_any_peer())),
            Trusted::UnixPeer => Ok(Self(client_ip.trust_unix_peer())),
            Trusted::Networks(networks) => trusted(client_ip, &networks),
        }
    }
}

impl Policies {
    /// The rule for the address of the client: that of `[client-ip]`, or [`key::ip`](crate::key::ip()) if the file has no such table.
    ///
    /// It is for what the application does with the address: [`Ip::address`](crate::key::Ip::address), conditions on networks, and
    /// with the feature `axum` the extractor `ClientAddr`. It is that of this load of the file.
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::{Policies, key::PeerAddr};
    ///
    /// let policies: Policies = serde_json::from_str(
    ///     r#"{"policies": {}, "client-ip": {"header": "x-forwarded-for", "trusted": ["10.0.0.0/8"]}}"#,
    /// )?;
    /// let request = Request::get("/").extension(PeerAddr("10.0.0.2:80".parse()?)).header("x-forwarded-for", "198.51.100.9");
    /// let (parts, ()) = request.body(())?.into_parts();
    /// assert_eq!(policies.client_ip().address(&parts)?.to_string(), "198.51.100.9");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn client_ip(&self) -> key::Ip {
        self.client_ip
            .as_ref()
            .map_or_else(key::ip, |ClientIp(client_ip)| client_ip.clone())
    }
}

fn trusted(client_ip: key::ClientIp, networks: &[String]) -> Result<ClientIp, ConfigError> {
    let is_all = |network: &&String| network.parse::<IpNet>().is_ok_and(|network| network.prefix_len() == 0);
    if let Some(all) = networks.iter().find(is_all) {
        return Err(ConfigError::new(format!(
            "`{all}` contains every address; for a server that only its proxy can reach, `trusted` is `\"any-peer\"`"
        )));
    }
    client_ip.trusted(networks).map(ClientIp)
}

/// The peers whose header is read.
enum Trusted {
    AnyPeer,
    UnixPeer,
    Networks(Vec<String>),
}

impl<'de> Deserialize<'de> for Trusted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NetworksOrAny;

        const EXPECTED: &str = "a list of networks such as `[\"10.0.0.0/8\"]`, `\"unix-peer\"` for a proxy on a Unix socket, \
                                or `\"any-peer\"` for a server that only its proxy can reach";

        impl<'de> Visitor<'de> for NetworksOrAny {
            type Value = Trusted;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Trusted, E> {
                match text {
                    "any-peer" => Ok(Trusted::AnyPeer),
                    "unix-peer" => Ok(Trusted::UnixPeer),
                    _ => Err(E::custom(format_args!("`{text}` is not {EXPECTED}"))),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Trusted, A::Error> {
                let mut networks = Vec::new();
                while let Some(network) = list.next_element()? {
                    networks.push(network);
                }
                match networks.is_empty() {
                    true => Err(serde::de::Error::custom(format_args!(
                        "an empty list trusts no proxy; write {EXPECTED}"
                    ))),
                    false => Ok(Trusted::Networks(networks)),
                }
            }
        }

        deserializer.deserialize_any(NetworksOrAny)
    }
}
