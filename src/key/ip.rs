#[cfg(feature = "tracing")]
use std::sync::atomic::{AtomicBool, Ordering};
use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use http::{HeaderMap, HeaderName, header::FORWARDED, request::Parts};
use ipnet::Ipv6Net;

use super::{
    Key, KeyError, KeyExtractor,
    forwarded::{self, Hop},
    network::{Grouping, Trust, network},
};
use crate::ConfigError;

/// The address of the transport peer, which is the other end of the connection.
///
/// IPv4 addresses count one by one, IPv6 addresses by their /64 network. An IPv4 address in IPv6 form
/// (`::ffff:203.0.113.7`, or `64:ff9b::/96` behind a NAT64) is the IPv4 address.
///
/// # IPv6 networks
///
/// /64 is the size of one link: a host chooses any address in it (RFC 4291 §2.5.4), so a longer prefix limits nothing. It
/// is also what a mobile network assigns to a device (RIPE-690 §4.2.4). But a site gets at least one /64, and in most cases
/// significantly more (RFC 6177 §1): /56 is suggested for homes (RFC 6177 §2, RIPE-690 §4.2.2), which are 256 networks of
/// /64, and /48 is common for businesses.
///
/// So choose [`ipv6_prefix(56)`](Ip::ipv6_prefix) where a caller with a home connection must not get 256 times the limit,
/// such as for logins. With the default of /64 no two subscribers count as one; with /56 they do where a provider assigns a
/// /64 to each, as mobile networks and some hosting providers do.
///
/// The peer is found in the extensions of the request, where axum's `into_make_service_with_connect_info::<SocketAddr>()`
/// (feature `axum`) or tonic's server (feature `tonic`) left it, or a [`PeerAddr`] that you insert. A request without any
/// is refused with 500, so that unknown callers never share a count by accident.
///
/// No header is read: behind a reverse proxy, all requests come from the proxy. [`client_ip`] reads the address that the
/// proxy recorded.
///
/// ```
/// use http::Request;
/// use tower_quota::{key::{self, PeerAddr}, KeyExtractor};
///
/// let peer: std::net::SocketAddr = "[2001:db8:1:2:3:4:5:6]:443".parse()?;
/// let (parts, ()) = Request::get("/").extension(PeerAddr(peer)).body(())?.into_parts();
/// assert_eq!(key::ip().extract(&parts)?.unwrap().to_string(), "ip=2001:db8:1:2::/64");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn ip() -> Ip {
    Ip {
        source: None,
        trust: Trust::default(),
        grouping: Grouping::default(),
        peer: None,
        #[cfg(feature = "tracing")]
        warned: Arc::default(),
    }
}

/// The address of the client, as a trusted proxy recorded it.
///
/// It requires the networks of your proxies, with [`trusted`](ClientIp::trusted), or
/// [`trust_any_peer`](ClientIp::trust_any_peer): the header is only read if the peer that sent it is trusted, since every
/// client can send one. Lists are read from the right, where the nearest proxy wrote, up to the first address that is not
/// trusted.
///
/// ```
/// use http::Request;
/// use tower_quota::{key::{self, ClientIpSource, PeerAddr}, KeyExtractor};
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
/// // A peer that is not a proxy of ours cannot choose its key.
/// assert_eq!(key_of("203.0.113.7:80", "1.2.3.4"), "ip=203.0.113.7");
/// ```
///
/// The elements of a list are split off from the right, byte by byte, so nothing that the client wrote changes how the
/// element of the proxy is read. Where that element is absent, malformed or `unknown`, the request counts against the
/// nearest hop that is known: the proxy itself. At most 32 elements are read.
///
/// The result is grouped and canonical as with [`ip`].
pub fn client_ip(source: ClientIpSource) -> ClientIp {
    ClientIp { source }
}

/// The header in which proxies record the client address.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClientIpSource {
    /// In `X-Forwarded-For`: right of the first address that is not trusted.
    XForwardedFor,
    /// In `X-Forwarded-For`, the n-th from the right, for a fixed chain of n proxies. 0 means 1.
    XForwardedForHop(usize),
    /// In `Forwarded` (RFC 7239): right of the first address that is not trusted.
    Forwarded,
    /// In a header that holds one address, such as `CF-Connecting-IP`, `X-Real-IP` or `Fly-Client-IP`.
    Header(HeaderName),
}

/// A [`client_ip`] without trusted peers, which it requires.
#[derive(Clone, Debug)]
#[must_use]
pub struct ClientIp {
    source: ClientIpSource,
}

impl ClientIp {
    /// Trusts peers, and hops in a list, in these networks, such as `10.0.0.0/8`, `fd00::/8` or `192.0.2.1`.
    ///
    /// # Panics
    ///
    /// If one of them is not a network, or is everything: `0.0.0.0/0` and `::/0`.
    #[track_caller]
    pub fn trusted<N: AsRef<str>>(self, networks: impl IntoIterator<Item = N>) -> Ip {
        match self.try_trusted(networks) {
            Ok(ip) => ip,
            Err(error) => panic!("{error}"),
        }
    }

    /// Trusts peers, and hops in a list, in these networks.
    ///
    /// # Errors
    ///
    /// If one of them is not a network, or is everything: `0.0.0.0/0` and `::/0`.
    pub fn try_trusted<N: AsRef<str>>(self, networks: impl IntoIterator<Item = N>) -> Result<Ip, ConfigError> {
        let networks: Result<Vec<_>, _> = networks.into_iter().map(|text| network(text.as_ref())).collect();
        let trust = Trust {
            networks: networks?,
            ..Trust::default()
        };
        Ok(Ip {
            source: Some(self.source),
            trust,
            ..ip()
        })
    }

    /// Trusts every peer, for a server that only its proxy can reach.
    ///
    /// If clients can reach it directly, they choose their keys.
    pub fn trust_any_peer(self) -> Ip {
        let trust = Trust {
            any_peer: true,
            ..Trust::default()
        };
        Ip {
            source: Some(self.source),
            trust,
            ..ip()
        }
    }
}

/// A [`KeyExtractor`] made by [`ip`] or [`client_ip`].
#[derive(Clone)]
#[must_use]
pub struct Ip {
    source: Option<ClientIpSource>,
    trust: Trust,
    grouping: Grouping,
    peer: Option<FindPeer>,
    #[cfg(feature = "tracing")]
    warned: Arc<AtomicBool>,
}

type FindPeer = Arc<dyn Fn(&Parts) -> Option<IpAddr> + Send + Sync>;

/// Settings.
impl Ip {
    /// Trusts the header of a peer on a Unix socket.
    ///
    /// The default is not to.
    pub fn trust_unix_peer(mut self) -> Self {
        self.trust.unix = true;
        self
    }

    /// Finds the peer with a function, for servers that provide it elsewhere.
    pub fn peer(mut self, peer: impl Fn(&Parts) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        self.peer = Some(Arc::new(peer));
        self
    }

    /// Counts IPv4 addresses by networks of this length, from 8 to 32 bits.
    ///
    /// The default is 32: one by one.
    ///
    /// # Panics
    ///
    /// If the length is out of range.
    #[track_caller]
    pub fn ipv4_prefix(mut self, bits: u8) -> Self {
        assert!(
            (8..=32).contains(&bits),
            "IPv4 addresses are grouped by 8 to 32 bits, as in `.ipv4_prefix(24)`"
        );
        self.grouping.ipv4 = bits;
        self
    }

    /// Counts IPv6 addresses by networks of this length, from 32 to 128 bits.
    ///
    /// The default is 64; 56 is recommended [where callers get larger networks](ip#ipv6-networks).
    ///
    /// # Panics
    ///
    /// If the length is out of range.
    #[track_caller]
    pub fn ipv6_prefix(mut self, bits: u8) -> Self {
        assert!(
            (32..=128).contains(&bits),
            "IPv6 addresses are grouped by 32 to 128 bits, as in `.ipv6_prefix(56)`"
        );
        self.grouping.ipv6 = bits;
        self
    }

    /// Takes the last 32 bits of addresses in these /96 networks for the IPv4 address that they stand for.
    ///
    /// The default is the well-known prefix of NAT64, `64:ff9b::/96` (RFC 6052 §2.1).
    ///
    /// # Panics
    ///
    /// If one of them is not an IPv6 network of 96 bits.
    #[track_caller]
    pub fn nat64_prefixes<N: AsRef<str>>(mut self, networks: impl IntoIterator<Item = N>) -> Self {
        self.grouping.nat64 = networks
            .into_iter()
            .map(|text| match text.as_ref().parse::<Ipv6Net>() {
                Ok(net) if net.prefix_len() == 96 => net.trunc(),
                _ => panic!(
                    "`{}` is not a NAT64 prefix; one looks like `64:ff9b::/96`",
                    text.as_ref()
                ),
            })
            .collect();
        self
    }
}

impl KeyExtractor for Ip {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        let peer = match &self.peer {
            Some(find) => find(parts).map(Peer::Address),
            None => Peer::of(parts),
        };
        let Some(peer) = peer else {
            return Err(KeyError::misconfigured(NO_PEER));
        };

        let peer = peer.canonical(&self.grouping);
        let client = match &self.source {
            None => {
                #[cfg(feature = "tracing")]
                self.warn_of_forwarding(&parts.headers);
                peer
            }
            Some(_) if !self.trust.peer(peer) => peer,
            Some(source) => self.client(source, peer, &parts.headers),
        };
        Ok(Some(match client {
            Peer::Address(address) => self.grouping.key(address),
            Peer::Unix => Key::plain("ip", "unix"),
        }))
    }
}

impl Ip {
    /// The client behind a trusted peer.
    fn client(&self, source: &ClientIpSource, peer: Peer, headers: &HeaderMap) -> Peer {
        match source {
            ClientIpSource::XForwardedFor => {
                let lines = headers.get_all(X_FORWARDED_FOR).iter();
                self.walk(peer, lines.rev().flat_map(forwarded::x_forwarded_for))
            }
            ClientIpSource::Forwarded => {
                let lines = headers.get_all(FORWARDED).iter();
                self.walk(peer, lines.rev().flat_map(forwarded::forwarded))
            }
            ClientIpSource::XForwardedForHop(n) => {
                let lines = headers.get_all(X_FORWARDED_FOR).iter();
                let mut hops = lines.rev().flat_map(forwarded::x_forwarded_for);
                match hops.nth(n.saturating_sub(1)) {
                    Some(Hop::Address(address)) => Peer::Address(self.grouping.canonical(address)),
                    _ => peer,
                }
            }
            ClientIpSource::Header(name) => {
                let mut lines = headers.get_all(name).iter();
                match (lines.next().and_then(forwarded::single), lines.next()) {
                    (Some(address), None) => Peer::Address(self.grouping.canonical(address)),
                    _ => peer,
                }
            }
        }
    }

    /// From the nearest hop outward, past those that are trusted.
    fn walk(&self, peer: Peer, hops: impl Iterator<Item = Hop>) -> Peer {
        let mut last = peer;
        for hop in hops.take(MAX_HOPS) {
            let Hop::Address(address) = hop else {
                return last;
            };
            last = Peer::Address(self.grouping.canonical(address));
            if !self.trust.hop(last) {
                return last;
            }
        }
        last
    }

    /// Warns once if a proxy seems to be in front, so that all requests have its key.
    #[cfg(feature = "tracing")]
    fn warn_of_forwarding(&self, headers: &HeaderMap) {
        if !self.warned.load(Ordering::Relaxed)
            && (headers.contains_key(X_FORWARDED_FOR) || headers.contains_key(FORWARDED))
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                "a request has been forwarded, but counts against the peer that sent it; if that is your proxy, use \
                 `key::client_ip`"
            );
        }
    }
}

const NO_PEER: &str = if cfg!(any(feature = "axum", feature = "tonic")) {
    "no peer address on the request; serve with `into_make_service_with_connect_info::<SocketAddr>()` (axum), or put a \
     `tower_quota::key::PeerAddr` into the request's extensions"
} else {
    "no peer address on the request; turn on the feature `axum` of tower-quota and serve with \
     `into_make_service_with_connect_info::<SocketAddr>()`, or the feature `tonic`, or put a \
     `tower_quota::key::PeerAddr` into the request's extensions"
};

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// No chain of proxies is longer.
const MAX_HOPS: usize = 32;

impl fmt::Debug for Ip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ip")
            .field("source", &self.source)
            .field("trust", &self.trust)
            .field("grouping", &self.grouping)
            .finish_non_exhaustive()
    }
}

/// The address of the transport peer, as a request extension, for servers that do not provide it themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddr(pub SocketAddr);

/// A request extension for a transport peer on a Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnixPeer;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    Address(IpAddr),
    Unix,
}

impl Peer {
    fn of(parts: &Parts) -> Option<Self> {
        if let Some(PeerAddr(addr)) = parts.extensions.get() {
            return Some(Self::Address(addr.ip()));
        }
        if let Some(UnixPeer) = parts.extensions.get() {
            return Some(Self::Unix);
        }

        #[cfg(feature = "axum")]
        if let Some(::axum::extract::ConnectInfo::<SocketAddr>(addr)) = parts.extensions.get() {
            return Some(Self::Address(addr.ip()));
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

    fn canonical(self, grouping: &Grouping) -> Self {
        match self {
            Self::Address(address) => Self::Address(grouping.canonical(address)),
            Self::Unix => Self::Unix,
        }
    }
}

impl Key {
    /// The key that [`ip`] makes of a request from this address.
    pub fn ip(address: IpAddr) -> Self {
        let grouping = Grouping::default();
        grouping.key(grouping.canonical(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_of(addr: &str) -> String {
        Key::ip(addr.parse().unwrap()).to_string()
    }

    #[test]
    fn an_ipv4_address_has_one_key_in_every_form() {
        for addr in ["192.0.2.1", "::ffff:192.0.2.1", "64:ff9b::192.0.2.1"] {
            assert_eq!(key_of(addr), "ip=192.0.2.1");
        }
    }

    #[test]
    fn ipv6_addresses_count_by_their_64() {
        assert_eq!(key_of("2001:db8:1:2:3:4:5:6"), "ip=2001:db8:1:2::/64");
        assert_eq!(key_of("2001:db8:1:2::"), key_of("2001:db8:1:2:ffff:ffff:ffff:ffff"));
        assert_ne!(key_of("2001:db8:1:2::1"), key_of("2001:db8:1:3::1"));
    }

    #[test]
    fn an_ipv6_address_that_only_looks_like_ipv4_stays_what_it_is() {
        assert_eq!(key_of("::1"), "ip=::/64");
        assert_eq!(key_of("2001:db8::192.0.2.1"), "ip=2001:db8::/64");
    }
}
