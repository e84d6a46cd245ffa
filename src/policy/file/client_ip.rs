use std::fmt;

use http::HeaderName;
use ipnet::IpNet;
use serde::{
    Deserialize, Deserializer,
    de::{SeqAccess, Visitor},
};

use super::Policies;
use crate::{ConfigError, key, key::ClientIpSource};

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

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Trusted, E> {
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
