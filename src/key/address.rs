//! The address of a transport peer, its canonical form, and the networks whose addresses share a key.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use http::request::Parts;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::key::Key;

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
pub(super) struct Client {
    /// Its address; of an unknown client, the nearest hop that is known, which is a proxy.
    pub(super) address: Peer,
    /// Whether a trusted proxy has recorded no address that can be read.
    pub(super) is_unknown: bool,
}

impl Client {
    pub(super) fn known(address: Peer) -> Self {
        Self {
            address,
            is_unknown: false,
        }
    }

    pub(super) fn behind(proxy: Peer) -> Self {
        Self {
            address: proxy,
            is_unknown: true,
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
    `tonic-tls` with TLS, and other servers, such as axum 0.7, a `tower_quota::key::PeerAddr` in the extensions of the request";

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

    /// The IPv4 network that an IPv6 network maps, or the network itself. It is compared with canonical addresses.
    pub(super) fn canonical_network(&self, network: IpNet) -> IpNet {
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

    #[inline]
    pub(super) fn canonical_peer(&self, peer: Peer) -> Peer {
        match peer {
            Peer::Address(address) => Peer::Address(self.canonical(address)),
            Peer::Unix => Peer::Unix,
        }
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
