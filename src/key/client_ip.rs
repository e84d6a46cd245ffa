use super::{
    grouping::Grouping,
    ip::Ip,
    proxies::{ClientIpSource, Proxies, network},
};
use crate::ConfigError;

/// The address of the client, as a trusted proxy recorded it.
///
/// It requires the networks of your proxies, with [`trusted`](ClientIp::trusted), or one of the other methods of
/// [`ClientIp`]. The header is read only if the peer that sent it is trusted, since every client can send one. Lists are read
/// from the right, where the nearest proxy wrote, up to the first address that is not trusted.
///
/// ```
/// use http::Request;
/// use tower_quota::{KeyExtractor, key::{self, ClientIpSource, PeerAddr}};
///
/// let client = key::client_ip(ClientIpSource::XForwardedFor).trusted(["10.0.0.0/8"]);
///
/// let key_of = |peer: &str, forwarded_for: &str| {
///     let peer = PeerAddr(peer.parse().unwrap());
///     let request = Request::get("/").extension(peer).header("x-forwarded-for", forwarded_for).body(()).unwrap();
///     client.extract(&request.into_parts().0).unwrap().unwrap().to_string()
/// };
/// // The client's own claim stands left of what the proxy wrote.
/// assert_eq!(key_of("10.0.0.2:80", "1.2.3.4, 198.51.100.9"), "ip=198.51.100.9");
/// // A peer that is not a trusted proxy cannot choose its key.
/// assert_eq!(key_of("203.0.113.7:80", "1.2.3.4"), "ip=203.0.113.7");
/// ```
///
/// The elements of a list are split off from the right, byte by byte, so no byte that the client wrote changes how the
/// element of the proxy is read. If that element is absent, malformed or `unknown`, the request counts against the nearest
/// known hop, which is the proxy itself. Such an [unknown client](Ip::unknown) is [within](Ip::within) no network, and can be
/// blocked. At most 32 elements are read.
///
/// A client that reaches the service from a trusted network, past the proxies, chooses its key.
///
/// Addresses are grouped as by [`ip`](super::ip()), with the same settings.
///
/// # Panics
///
/// For [`XForwardedForHop(0)`](ClientIpSource::XForwardedForHop): a chain has at least one proxy. [`try_client_ip`] returns an
/// error instead.
#[track_caller]
pub fn client_ip(source: ClientIpSource) -> ClientIp {
    match try_client_ip(source) {
        Ok(client) => client,
        Err(error) => panic!("{error}"),
    }
}

/// A [`client_ip`] whose source comes from configuration.
///
/// # Errors
///
/// For [`XForwardedForHop(0)`](ClientIpSource::XForwardedForHop): a chain has at least one proxy.
///
/// ```
/// use tower_quota::key::{self, ClientIpSource};
///
/// assert!(key::try_client_ip(ClientIpSource::XForwardedForHop(1)).is_ok());
/// let error = key::try_client_ip(ClientIpSource::XForwardedForHop(0)).unwrap_err();
/// assert!(error.to_string().contains("`XForwardedForHop(1)`"));
/// ```
pub fn try_client_ip(source: ClientIpSource) -> Result<ClientIp, ConfigError> {
    match source {
        ClientIpSource::XForwardedForHop(0) => Err(ConfigError::new(
            "a chain has at least one proxy: behind one, the client is the last entry of `x-forwarded-for`, which is \
             `XForwardedForHop(1)`",
        )),
        _ => Ok(ClientIp { source }),
    }
}

/// A [`client_ip`] that still requires trusted peers.
#[derive(Clone, Debug)]
#[must_use]
pub struct ClientIp {
    source: ClientIpSource,
}

impl ClientIp {
    /// Trusts peers, and hops in a list, in these networks, such as `10.0.0.0/8`, `fd00::/8` or `192.0.2.1`.
    ///
    /// An empty list trusts no address: the header is ignored, and each request counts by the address of its peer.
    ///
    /// # Panics
    ///
    /// If an element is not a network, or contains every address: `0.0.0.0/0` and `::/0`.
    /// [`try_trusted`](Self::try_trusted) returns an error instead.
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::{Key, KeyExtractor, key::{self, ClientIpSource, PeerAddr}};
    ///
    /// let client = key::client_ip(ClientIpSource::Forwarded).trusted(["10.0.0.0/8", "fd00::/8"]);
    ///
    /// let proxy = PeerAddr("[fd00::2]:80".parse()?);
    /// let request = Request::get("/").extension(proxy).header("forwarded", "for=198.51.100.9").body(())?;
    /// assert_eq!(client.extract(&request.into_parts().0)?, Some(Key::ip("198.51.100.9".parse()?)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn trusted<N: AsRef<str>>(self, networks: impl IntoIterator<Item = N>) -> Ip {
        match self.try_trusted(networks) {
            Ok(ip) => ip,
            Err(error) => panic!("{error}"),
        }
    }

    /// Trusts peers, and hops in a list, in these networks, which come from configuration.
    ///
    /// # Errors
    ///
    /// If an element is not a network, or contains every address: `0.0.0.0/0` and `::/0`.
    ///
    /// ```
    /// use tower_quota::key::{self, ClientIpSource};
    ///
    /// let client = || key::client_ip(ClientIpSource::XForwardedFor);
    /// assert!(client().try_trusted(["10.0.0.0/8"]).is_ok());
    /// let error = client().try_trusted(["10.0.0.0/33"]).unwrap_err();
    /// assert_eq!(error.to_string(), "`10.0.0.0/33` is not a network; one looks like `10.0.0.0/8` or `fd00::/8`");
    /// ```
    // Networks are text, as configuration has them, so that no crate for networks is part of the public API.
    pub fn try_trusted<N: AsRef<str>>(self, networks: impl IntoIterator<Item = N>) -> Result<Ip, ConfigError> {
        let networks = networks.into_iter().map(|text| network(text.as_ref()));
        let mut proxies = Proxies {
            given: networks.collect::<Result<_, _>>()?,
            ..self.untrusted()
        };
        proxies.group_by(&Grouping::default())?;
        Ok(Ip::behind(proxies))
    }

    /// Trusts every peer, for a server that only its proxy can reach.
    ///
    /// If clients can reach it directly, they choose their keys.
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::{Key, KeyExtractor, key::{self, ClientIpSource, PeerAddr}};
    ///
    /// let client = key::client_ip(ClientIpSource::XForwardedForHop(1)).trust_any_peer();
    ///
    /// let proxy = PeerAddr("192.0.2.1:80".parse()?);
    /// let request = Request::get("/").extension(proxy).header("x-forwarded-for", "198.51.100.9").body(())?;
    /// assert_eq!(client.extract(&request.into_parts().0)?, Some(Key::ip("198.51.100.9".parse()?)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn trust_any_peer(self) -> Ip {
        Ip::behind(Proxies {
            any_peer: true,
            ..self.untrusted()
        })
    }

    /// Trusts peers on Unix sockets, for a proxy on the same machine.
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::{Key, KeyExtractor, key::{self, ClientIpSource, UnixPeer}};
    ///
    /// let client = key::client_ip(ClientIpSource::XForwardedFor).trust_unix_peer();
    ///
    /// let request = Request::get("/").extension(UnixPeer).header("x-forwarded-for", "198.51.100.9").body(())?;
    /// assert_eq!(client.extract(&request.into_parts().0)?, Some(Key::ip("198.51.100.9".parse()?)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn trust_unix_peer(self) -> Ip {
        Ip::behind(Proxies {
            unix: true,
            ..self.untrusted()
        })
    }

    fn untrusted(self) -> Proxies {
        Proxies {
            source: self.source,
            given: Vec::new(),
            networks: Vec::new(),
            any_peer: false,
            unix: false,
        }
    }
}
