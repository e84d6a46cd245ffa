//! Values of the fields of a file: routes, networks, methods, lengths of time, and the address of the client.

use std::time::Duration;

use http::{HeaderName, Method};
use ipnet::IpNet;
use serde::{Deserialize, Deserializer, de::Error};

use super::scope::{Routes, Template};
use crate::{
    ConfigError, key,
    key::{ClientIpSource, OneOrSeveral},
    limit::{deserialize_text, parse_length},
};

/// A text, or a list of texts that is not empty.
pub(super) struct Texts(Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const EMPTY: &str = "an empty list is for no request; leave it out, for all requests";

        OneOrSeveral::read(deserializer, "a text, or a list of texts", EMPTY).map(|texts| Self(texts.into_list()))
    }
}

impl TryFrom<Texts> for Routes {
    type Error = String;

    fn try_from(Texts(routes): Texts) -> Result<Self, String> {
        if matches!(&routes[..], [only] if only == "others") {
            return Ok(Self::Others(Vec::new()));
        }
        let parse = |route: &String| {
            Template::parse(route).map_err(|fix| {
                format!(
                    "`{route}` is not a route: {fix}; one looks like `/login`, `/users/{{id}}` or, in gRPC, \
                     `/shop.Accounts/SignIn`; `others` alone are those that no other policy has"
                )
            })
        };
        routes.iter().map(parse).collect::<Result<_, _>>().map(Self::These)
    }
}

/// The networks of clients.
#[derive(Clone, Default, Deserialize)]
#[serde(try_from = "Texts")]
pub(super) struct Networks(pub(super) Vec<String>);

impl TryFrom<Texts> for Networks {
    type Error = ConfigError;

    fn try_from(Texts(networks): Texts) -> Result<Self, ConfigError> {
        key::ip().within(&networks).map(|_| Self(networks))
    }
}

/// The methods of requests.
#[derive(Clone, Default, Deserialize)]
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
#[derive(Clone, Copy, Default)]
pub(super) struct Length(pub(super) Duration);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "a length of time such as \"10min\"", |text| {
            parse_length(text).map(Self).ok_or_else(|| {
                ConfigError::new(format!(
                    "`{text}` is not a length of time; one looks like `10min` or `500ms`"
                ))
            })
        })
    }
}

/// The client address as configuration describes it: the header, the networks whose header is read, and the number of proxies.
#[derive(Clone, Deserialize)]
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
            Trusted::Networks(networks) => {
                let is_all =
                    |network: &&String| network.parse::<IpNet>().is_ok_and(|network| network.prefix_len() == 0);
                match networks.iter().find(is_all) {
                    None => client_ip.trusted(networks).map(Self),
                    Some(all) => Err(ConfigError::new(format!(
                        "`{all}` contains every address; for a server that only its proxy can reach, `trusted` is `\"any-peer\"`"
                    ))),
                }
            }
        }
    }
}

/// The peers whose header is read.
enum Trusted {
    AnyPeer,
    UnixPeer,
    Networks(Vec<String>),
}

impl<'de> Deserialize<'de> for Trusted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const EXPECTED: &str = "a list of networks such as `[\"10.0.0.0/8\"]`, `\"unix-peer\"` for a proxy on a Unix socket, \
                                or `\"any-peer\"` for a server that only its proxy can reach";
        const EMPTY: &str = "an empty list trusts no proxy; write the networks of the proxies, such as `[\"10.0.0.0/8\"]`, \
                             `\"unix-peer\"` or `\"any-peer\"`";

        match OneOrSeveral::<String>::read(deserializer, EXPECTED, EMPTY)? {
            OneOrSeveral::Several(networks) => Ok(Self::Networks(networks)),
            OneOrSeveral::One(text) => match text.as_str() {
                "any-peer" => Ok(Self::AnyPeer),
                "unix-peer" => Ok(Self::UnixPeer),
                _ => Err(D::Error::custom(format_args!("`{text}` is not {EXPECTED}"))),
            },
        }
    }
}
