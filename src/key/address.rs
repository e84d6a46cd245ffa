//! The address of a transport peer, its canonical form, and the networks whose addresses share a key.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::atomic::{AtomicBool, Ordering},
};

use http::request::Parts;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{client_ip::parse_networks, ip::Ip, key::Key};
use crate::ConfigError;

/// The address of the transport peer, as a request extension.
///
/// Insert it on servers that do not provide the address themselves, such as a bare hyper server, in the loop that accepts
/// connections. It takes precedence over the address that axum or tonic provides.
///
/// The address is trusted: insert that of the connection, not one from a header.
///
/// ```
/// use http::Request;
/// use tower_quota::{Key, KeyExtractor, key::{self, PeerAddr}};
///
/// let peer = PeerAddr("203.0.113.7:4711".parse()?);
/// let (parts, ()) = Request::get("/").extension(peer).body(())?.into_parts();
/// assert_eq!(key::ip().extract(&parts)?, Some(Key::ip("203.0.113.7".parse()?)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The extractors of this crate know the types of axum 0.8. An application on axum 0.7 takes the address from the
/// `ConnectInfo` of its axum:
///
/// ```
/// use std::net::SocketAddr;
/// use axum::{extract::{ConnectInfo, Request}, middleware::map_request};
/// # use axum::{Router, routing::get};
/// use tower_quota::key::PeerAddr;
/// # use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// async fn with_peer(ConnectInfo(peer): ConnectInfo<SocketAddr>, mut request: Request) -> Request {
///     request.extensions_mut().insert(PeerAddr(peer));
///     request
/// }
/// # let app: Router = Router::new().route("/", get(async || "hi"));
/// # let limit = RateLimitLayer::new(MemoryStore::new(), Policy::new("api", SlidingLog::per_minute(5)).key(key::ip()));
/// let app = app.layer(limit).layer(map_request(with_peer));
/// # let _: Router = app;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddr(pub SocketAddr);

/// A transport peer on a Unix socket, as a request extension.
///
/// All peers on Unix sockets share one key, [`Key::unix_peer`](super::Key::unix_peer). tonic provides it itself (feature
/// `tonic`).
///
/// ```
/// use http::Request;
/// use tower_quota::{Key, KeyExtractor, key::{self, UnixPeer}};
///
/// let (parts, ()) = Request::get("/").extension(UnixPeer).body(())?.into_parts();
/// assert_eq!(key::ip().extract(&parts)?, Some(Key::unix_peer()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnixPeer;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    Address(IpAddr),
    Unix,
}

/// The client of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Client {
    Known(Peer),
    /// A trusted proxy has recorded no address that can be read. This is the nearest hop that is known, which is a proxy.
    Behind(Peer),
}

impl Client {
    /// The address that it is counted by.
    pub(super) fn address(self) -> Peer {
        match self {
            Self::Known(address) | Self::Behind(address) => address,
        }
    }
}

impl Peer {
    /// The peer in the extensions of a request.
    #[inline]
    pub(super) fn of(parts: &Parts) -> Option<Self> {
        if let Some(PeerAddr(addr)) = parts.extensions.get() {
            return Some(Self::Address(addr.ip()));
        }
        if let Some(UnixPeer) = parts.extensions.get() {
            return Some(Self::Unix);
        }

        #[cfg(feature = "axum")]
        {
            use ::axum::extract::connect_info::{ConnectInfo, MockConnectInfo};

            if let Some(ConnectInfo::<SocketAddr>(addr)) = parts.extensions.get() {
                return Some(Self::Address(addr.ip()));
            }
            // As axum's own extractor, which takes it in tests.
            if let Some(MockConnectInfo::<SocketAddr>(addr)) = parts.extensions.get() {
                return Some(Self::Address(addr.ip()));
            }
        }

        #[cfg(feature = "tonic")]
        {
            use tonic::transport::server::TcpConnectInfo;

            if let Some(info) = parts.extensions.get::<TcpConnectInfo>() {
                return info.remote_addr().map(|addr| Self::Address(addr.ip()));
            }
            #[cfg(feature = "tonic-tls")]
            if let Some(info) = parts
                .extensions
                .get::<tonic::transport::server::TlsConnectInfo<TcpConnectInfo>>()
            {
                return info.get_ref().remote_addr().map(|addr| Self::Address(addr.ip()));
            }
            #[cfg(unix)]
            if parts
                .extensions
                .get::<tonic::transport::server::UdsConnectInfo>()
                .is_some()
            {
                return Some(Self::Unix);
            }
        }

        None
    }
}

/// The error for a request without a peer.
pub(super) const NO_PEER: &str = "no peer address on the request; axum 0.8 needs \
    `into_make_service_with_connect_info::<SocketAddr>()` and the feature `axum` of tower-quota, tonic the feature `tonic`, or \
    `tonic-tls` where the application accepts the TLS, and other servers, such as axum 0.7, a `tower_quota::key::PeerAddr` in the \
    extensions of the request, or on a Unix socket a `UnixPeer`; what inserts it, such as `MockConnectInfo` in a test, is outside of this layer: in axum, added after it";

/// The networks whose addresses share a key.
#[derive(Clone, Debug)]
pub(super) struct Grouping {
    /// Bits of the prefix, 8 to 32.
    pub(super) ipv4: u8,
    /// Bits of the prefix, 32 to 128.
    pub(super) ipv6: u8,
    /// Prefixes of 96 bits.
    pub(super) nat64: Vec<Ipv6Net>,
}

impl Default for Grouping {
    fn default() -> Self {
        Self {
            ipv4: 32,
            ipv6: 64,
            nat64: vec![NAT64],
        }
    }
}

/// The well-known prefix of RFC 6052 §2.1.
const NAT64: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96);

/// RFC 4291 §2.5.5.2.
const MAPPED: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96);

/// RFC 4380 §4: the /64 of an address is that of its server, which no relay compares with anything.
const TEREDO: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 32);

impl Grouping {
    /// The IPv4 address that an IPv6 address maps, or the address itself.
    #[inline]
    pub(super) fn canonical(&self, address: IpAddr) -> IpAddr {
        match address.to_canonical() {
            IpAddr::V6(v6) if self.nat64.iter().any(|prefix| prefix.contains(&v6)) => {
                let [.., a, b, c, d] = v6.octets();
                IpAddr::V4(Ipv4Addr::new(a, b, c, d))
            }
            canonical @ (IpAddr::V4(_) | IpAddr::V6(_)) => canonical,
        }
    }

    /// Networks in the form that is compared with canonical addresses.
    ///
    /// # Errors
    ///
    /// If one contains every address, for which the fix is given, or all of a prefix that are compared as IPv4 addresses.
    pub(super) fn canonical_networks(&self, given: &[IpNet], fix: &str) -> Result<Vec<IpNet>, ConfigError> {
        let networks = given.iter().map(|given| match self.canonical_network(*given) {
            network if network.prefix_len() == 0 => {
                Err(ConfigError::new(format!("`{given}` contains every address; {fix}")))
            }
            network => match self.compared_as_ipv4(network) {
                Some(part) => Err(ConfigError::new(format!(
                    "`{given}` contains `{part}`, which is compared as IPv4 addresses; list IPv4 networks, such as \
                     `192.0.2.0/24`, and IPv6 networks without it"
                ))),
                None => Ok(network),
            },
        });
        networks.collect()
    }

    /// The part of a network that would never match. An application has chosen its own NAT64 prefix, within its own network.
    fn compared_as_ipv4(&self, network: IpNet) -> Option<Ipv6Net> {
        let IpNet::V6(network) = network else { return None };
        let well_known = self.nat64.iter().copied().filter(|prefix| *prefix == NAT64);
        [MAPPED]
            .into_iter()
            .chain(well_known)
            .find(|part| network.contains(part))
    }

    /// The IPv4 network that an IPv6 network maps, or the network itself. It is compared with canonical addresses.
    fn canonical_network(&self, network: IpNet) -> IpNet {
        let IpNet::V6(v6) = network else {
            return network;
        };
        let Some(length) = v6.prefix_len().checked_sub(96) else {
            return network;
        };
        match self.canonical(v6.addr().into()) {
            IpAddr::V4(v4) => Ipv4Net::new(v4, length).map_or(network, IpNet::V4),
            IpAddr::V6(_) => network,
        }
    }

    /// The key of a peer, an address, or a network that has one key; a network of several keys is none of them.
    #[cfg(feature = "admin")]
    pub(super) fn parse(&self, text: &str) -> Option<Key> {
        let [first, last] = self.keys_of(text)?;
        (first == last).then_some(first)
    }

    /// The keys of the first and of the last address that a text stands for.
    pub(super) fn keys_of(&self, text: &str) -> Option<[Key; 2]> {
        if text == "unix" {
            return Some([Key::unix_peer(), Key::unix_peer()]);
        }
        let network = parse_network(text)?;
        Some([network.network(), network.broadcast()].map(|address| self.key(self.canonical(address))))
    }

    /// The key of a canonical address.
    #[inline]
    pub(super) fn key(&self, address: IpAddr) -> Key {
        match address {
            IpAddr::V4(v4) if self.ipv4 == 32 => Key::ipv4(v4),
            IpAddr::V6(v6) if self.ipv6 == 128 => Key::plain("ip", v6),
            IpAddr::V4(_) | IpAddr::V6(_) => {
                let bits = match address {
                    IpAddr::V4(_) => self.ipv4,
                    IpAddr::V6(v6) if TEREDO.contains(&v6) => TEREDO.prefix_len(),
                    IpAddr::V6(_) => self.ipv6,
                };
                let network = IpNet::new(address, bits).map(|network| network.trunc());
                Key::plain("ip", network.unwrap_or(address.into()))
            }
        }
    }
}

/// A network, or one address. The standard library parses the address, since others take `010.0.0.0`, which some programs read as
/// octal (CVE-2021-29922).
pub(super) fn parse_network(text: &str) -> Option<IpNet> {
    let Some((address, length)) = text.split_once('/') else {
        return text.parse::<IpAddr>().ok().map(IpNet::from);
    };
    let is_number = length == "0" || length.starts_with(|digit| matches!(digit, '1'..='9'));
    let length = length.parse().ok().filter(|_| is_number)?;
    IpNet::new(address.parse().ok()?, length).ok()
}

/// Conditions on addresses.
impl Ip {
    /// The condition that the address is in one of these networks, such as `10.0.0.0/8`, `fd00::/8` or `192.0.2.1`.
    ///
    /// It is for [`RateLimitLayer::skip`](crate::RateLimitLayer::skip), [`RateLimitLayer::block`](crate::RateLimitLayer::block)
    /// and [`Policy::apply_if`](crate::Policy::apply_if). With [`client_ip`](super::client_ip()) it is on the address that a
    /// trusted proxy recorded. The whole address is compared, however addresses are grouped as keys.
    ///
    /// A peer on a Unix socket is in no network. Neither is an [unknown client](Self::unknown), which has the key of its proxy,
    /// nor a request without a peer address; the first one is logged as an error. The networks are compared one after the
    /// other.
    ///
    /// # Errors
    ///
    /// If an element is not a network, such as `10.0.0.1/8`, or contains every address; or if it contains `::ffff:0:0/96` or
    /// `64:ff9b::/96`, which are [compared as IPv4 addresses](super::ip()#ipv4-in-ipv6).
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::key::{self, ClientIpSource, PeerAddr};
    ///
    /// let internal = key::client_ip(ClientIpSource::XForwardedFor).trusted(["10.0.0.0/8"])?.within(["192.0.2.0/24"])?;
    ///
    /// for (peer, forwarded_for, is_internal) in [
    ///     ("10.0.0.2:80", "192.0.2.7", true),
    ///     ("10.0.0.2:80", "198.51.100.9", false),
    ///     // Not a trusted proxy.
    ///     ("203.0.113.7:80", "192.0.2.7", false),
    ///     // The proxy has not recorded the client.
    ///     ("10.0.0.2:80", "unknown", false),
    /// ] {
    ///     let request = Request::get("/").extension(PeerAddr(peer.parse()?)).header("x-forwarded-for", forwarded_for);
    ///     let (parts, ()) = request.body(())?.into_parts();
    ///     assert_eq!(internal(&parts), is_internal);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// ```
    /// use tower_quota::key;
    ///
    /// assert!(key::ip().within(["10.0.0.0/8"]).is_ok());
    /// let error = key::ip().within(["10.0.0.0/33"]).err().map(|error| error.to_string());
    /// assert_eq!(error.unwrap(), "`10.0.0.0/33` is not a network; one looks like `10.0.0.0/8` or `fd00::/8`");
    /// ```
    #[expect(clippy::type_complexity, reason = "an alias would hide that it is a closure")]
    pub fn within<N: AsRef<str>>(
        self,
        networks: impl IntoIterator<Item = N>,
    ) -> Result<Box<dyn Fn(&Parts) -> bool + Send + Sync>, ConfigError> {
        let given = parse_networks(networks)?;
        let networks = self
            .grouping
            .canonical_networks(&given, "list the networks of the clients")?;
        Ok(self.of_client(false, move |client| match client {
            Client::Known(Peer::Address(address)) => networks.iter().any(|network| network.contains(&address)),
            Client::Known(Peer::Unix) | Client::Behind(_) => false,
        }))
    }

    /// The condition that the client is unknown: a trusted proxy sent the request, but its header is absent, is there twice
    /// although it holds one address, or cannot be read up to the client.
    ///
    /// Such a client has the key of the nearest hop that is known, which is a proxy. It is [within](Self::within) no network, so
    /// it is not skipped by one. Pass this condition to [`RateLimitLayer::block`](crate::RateLimitLayer::block) to reject it.
    ///
    /// A request without a peer address is of an unknown client, too; the first one is logged as an error. With
    /// [`ip`](super::ip()), which reads no header, each client with a peer address is known.
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::key::{self, ClientIpSource, PeerAddr};
    ///
    /// let unknown = key::client_ip(ClientIpSource::XForwardedFor).trusted(["10.0.0.0/8"])?.unknown();
    ///
    /// for (peer, forwarded_for, is_unknown) in [
    ///     ("10.0.0.2:80", "198.51.100.9", false),
    ///     ("10.0.0.2:80", "unknown", true),
    ///     ("10.0.0.2:80", "", true),
    ///     // The peer is the client.
    ///     ("203.0.113.7:80", "unknown", false),
    /// ] {
    ///     let request = Request::get("/").extension(PeerAddr(peer.parse()?)).header("x-forwarded-for", forwarded_for);
    ///     let (parts, ()) = request.body(())?.into_parts();
    ///     assert_eq!(unknown(&parts), is_unknown, "{peer} {forwarded_for}");
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unknown(self) -> Box<dyn Fn(&Parts) -> bool + Send + Sync> {
        self.of_client(true, |client| matches!(client, Client::Behind(_)))
    }

    /// Whether a condition holds for the client of a request, or this if the request has no peer address.
    fn of_client(
        self,
        without_peer: bool,
        holds: impl Fn(Client) -> bool + Send + Sync + 'static,
    ) -> Box<dyn Fn(&Parts) -> bool + Send + Sync> {
        let logged = AtomicBool::new(false);
        Box::new(move |parts| match self.client(parts) {
            Some(client) => holds(client),
            None => {
                if !logged.swap(true, Ordering::Relaxed) {
                    tracing::error!(error = NO_PEER, "the client of a request is unknown");
                }
                without_peer
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(grouping: &Grouping, network: &str) -> Result<Vec<IpNet>, ConfigError> {
        grouping.canonical_networks(&[network.parse().unwrap()], "the fix")
    }

    #[test]
    fn a_network_with_addresses_that_are_compared_as_ipv4_addresses_is_refused() {
        for (network, part) in [
            ("64:ff9b::/64", "64:ff9b::/96"),
            ("64:ff9b::/95", "64:ff9b::/96"),
            ("64::/16", "64:ff9b::/96"),
            ("::/64", "::ffff:0.0.0.0/96"),
            ("::/8", "::ffff:0.0.0.0/96"),
            ("::/1", "::ffff:0.0.0.0/96"),
        ] {
            let error = canonical(&Grouping::default(), network).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("`{network}` contains `{part}`")),
                "{network}: {error}"
            );
        }
        for network in ["2000::/3", "8000::/1", "64:ff9b:1::/48", "::/127", "10.0.0.0/8"] {
            assert!(canonical(&Grouping::default(), network).is_ok(), "{network}");
        }
    }

    #[test]
    fn a_network_may_contain_the_nat64_prefix_of_the_application() {
        let grouping = Grouping {
            nat64: vec!["fd00:64::/96".parse().unwrap()],
            ..Grouping::default()
        };
        assert!(canonical(&grouping, "fd00::/8").is_ok());
        assert!(canonical(&grouping, "64:ff9b::/64").is_ok());
        assert!(canonical(&grouping, "::/64").is_err());
    }
}
