use std::{net::IpAddr, sync::Arc};

use http::request::Parts;
use ipnet::IpNet;

use super::{
    address::{Client, Grouping, NO_PEER, Peer, parse_network},
    client_ip::Proxies,
    extractor::{KeyError, KeyExtractor},
    form::{KeyForm, Value},
    key::Key,
    proxy_watch::ProxyWatch,
};
use crate::ConfigError;

/// The address of the transport peer, which is the other end of the connection.
///
/// Each IPv4 address has a key, and each /64 network of IPv6. An IPv4 address in IPv6 form (`::ffff:203.0.113.7`, or
/// `64:ff9b::/96` behind a NAT64) has the key of the IPv4 address.
///
/// The peer is in the extensions of the request:
///
/// | server | extension |
/// | --- | --- |
/// | axum (feature `axum`) | serve with `into_make_service_with_connect_info::<SocketAddr>()`; in tests add the layer `MockConnectInfo` |
/// | tonic (feature `tonic`, and `tonic-tls` where the application accepts the TLS of connections) | provided by its server |
/// | hyper and others, and Unix sockets | insert a [`PeerAddr`](super::PeerAddr), or [`UnixPeer`](super::UnixPeer) for a proxy that is trusted |
///
/// A request without a peer is refused with 500, so that unknown callers never share a count by accident.
///
/// No header is read, so a client cannot choose its key. Behind a reverse proxy, all requests have the key of the proxy;
/// [`client_ip`](super::client_ip()) reads the address that the proxy recorded.
///
/// # IPv6 networks
///
/// /64 is the size of one link: a host chooses any address in it (RFC 4291 §2.5.4), so a longer prefix limits nothing. It is
/// also what a mobile network assigns to a device (RIPE-690 §4.2.4). Most sites get more (RFC 6177 §1): /56 is suggested for
/// homes (RFC 6177 §2, RIPE-690 §4.2.2), which are 256 networks of /64, and /48 is common for businesses.
///
/// For logins and the like choose [`ipv6_prefix(56)`](Ip::ipv6_prefix): a home connection has 256 times the limit otherwise.
/// With the default of /64 no two subscribers share a key; with /56 they do where a provider assigns a /64 to each, as mobile
/// networks and some hosting providers do.
///
/// # IPv4 in IPv6
///
/// | address | key |
/// | --- | --- |
/// | `::ffff:a.b.c.d`, `64:ff9b::a.b.c.d` | that of the IPv4 address |
/// | `64:ff9b:1::/48` (RFC 8215), `::ffff:0:a.b.c.d` (SIIT) | by /64: one for all clients of a translator, unless its /96 is one of the [`nat64_prefixes`](Ip::nat64_prefixes). RFC 8215 §5 forbids to guess which bits are an IPv4 address; the form of SIIT is obsolete |
/// | `::a.b.c.d` | one for all. The form is deprecated (RFC 4291 §2.5.5.1), and `::1` is not `0.0.0.1` |
/// | Teredo (`2001::/32`) | one for all: the /64 is that of the server, and a client can claim any server, which would be 2^32 keys; with a prefix of 128 each address is a key |
/// | ISATAP (`::5efe:a.b.c.d`), 6to4 (`2002::/16`) | by /64: an ISATAP host can choose the IPv4 address, which would be 2^32 keys in its /64 |
///
/// ```
/// use http::Request;
/// use tower_quota::{KeyExtractor, key::{self, PeerAddr}};
///
/// let peer: std::net::SocketAddr = "[2001:db8:1:2:3:4:5:6]:443".parse()?;
/// let (parts, ()) = Request::get("/").extension(PeerAddr(peer)).body(())?.into_parts();
/// assert_eq!(key::ip().extract(&parts)?.unwrap().to_string(), "ip=2001:db8:1:2::/64");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn ip() -> Ip {
    Ip {
        proxies: None,
        grouping: Grouping::default(),
        find_peer: None,
        watch: Arc::default(),
    }
}

/// A [`KeyExtractor`] made by [`ip`] or [`client_ip`](super::client_ip()).
#[derive(Clone)]
#[must_use]
pub struct Ip {
    proxies: Option<Proxies>,
    pub(super) grouping: Grouping,
    find_peer: Option<FindPeer>,
    watch: Arc<ProxyWatch>,
}

type FindPeer = Arc<dyn Fn(&Parts) -> Option<IpAddr> + Send + Sync>;

/// Settings.
impl Ip {
    pub(super) fn behind(proxies: Proxies) -> Self {
        Self {
            proxies: Some(proxies),
            ..ip()
        }
    }

    /// Trusts the header of a peer on a Unix socket, beside those of trusted networks.
    ///
    /// By default such a peer is not trusted. This setting has no effect on [`ip`], which reads no header.
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::{Key, KeyExtractor, key::{self, ClientIpSource, UnixPeer}};
    ///
    /// let client = key::client_ip(ClientIpSource::XForwardedFor).trusted(["10.0.0.0/8"])?.trust_unix_peer();
    ///
    /// let request = Request::get("/").extension(UnixPeer).header("x-forwarded-for", "198.51.100.9").body(())?;
    /// assert_eq!(client.extract(&request.into_parts().0)?, Some(Key::ip("198.51.100.9".parse()?)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn trust_unix_peer(mut self) -> Self {
        if let Some(proxies) = &mut self.proxies {
            proxies.unix = true;
        }
        self
    }

    /// Finds the peer with a function, for servers that provide it elsewhere.
    ///
    /// The default is to read the [extensions](ip) of the request. If the function returns `None`, the request is refused
    /// with 500. The function must return the address of the connection, not one from a header.
    ///
    /// ```
    /// use std::net::IpAddr;
    ///
    /// use http::Request;
    /// use tower_quota::{Key, KeyExtractor, key};
    ///
    /// /// What the server inserts.
    /// #[derive(Clone)]
    /// struct Connection { peer: IpAddr }
    ///
    /// let ip = key::ip().peer(|parts| Some(parts.extensions.get::<Connection>()?.peer));
    ///
    /// let peer = "203.0.113.7".parse()?;
    /// let (parts, ()) = Request::get("/").extension(Connection { peer }).body(())?.into_parts();
    /// assert_eq!(ip.extract(&parts)?, Some(Key::ip(peer)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn peer(mut self, peer: impl Fn(&Parts) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        self.find_peer = Some(Arc::new(peer));
        self
    }

    /// Counts IPv4 addresses by networks of this length, from 8 to 32 bits.
    ///
    /// The default is 32: each address has a key.
    ///
    /// # Panics
    ///
    /// If the length is out of range.
    ///
    /// ```
    /// use tower_quota::key;
    ///
    /// let ip = key::ip().ipv4_prefix(24);
    /// assert_eq!(ip.key_of("203.0.113.7".parse()?).to_string(), "ip=203.0.113.0/24");
    /// # Ok::<(), std::net::AddrParseError>(())
    /// ```
    #[track_caller]
    pub fn ipv4_prefix(mut self, bits: u8) -> Self {
        assert!(
            (8..=32).contains(&bits),
            "IPv4 addresses are grouped by 8 to 32 bits, as in `.ipv4_prefix(24)`, not by {bits}"
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
    ///
    /// ```
    /// use tower_quota::key;
    ///
    /// let ip = key::ip().ipv6_prefix(56);
    /// assert_eq!(ip.key_of("2001:db8:1:2::3".parse()?).to_string(), "ip=2001:db8:1::/56");
    /// # Ok::<(), std::net::AddrParseError>(())
    /// ```
    #[track_caller]
    pub fn ipv6_prefix(mut self, bits: u8) -> Self {
        assert!(
            (32..=128).contains(&bits),
            "IPv6 addresses are grouped by 32 to 128 bits, as in `.ipv6_prefix(56)`, not by {bits}"
        );
        self.grouping.ipv6 = bits;
        self
    }

    /// Replaces the NAT64 prefixes: the last 32 bits of addresses in these /96 networks are an IPv4 address.
    ///
    /// The default is the well-known prefix of NAT64, `64:ff9b::/96` (RFC 6052 §2.1). [Other translators](ip#ipv4-in-ipv6) need
    /// this setting. In [networks](Ip::within) too, such an address is an IPv4 address: `fd00::/8` does not contain those of
    /// `fd00:64::/96` then.
    ///
    /// # Errors
    ///
    /// If an element is not an IPv6 network of 96 bits and the rest 0, or if one is a trusted network: that would be all of IPv4.
    ///
    /// ```
    /// use tower_quota::{Key, key};
    ///
    /// let ip = key::ip().nat64_prefixes(["2001:db8:64::/96"])?;
    /// assert_eq!(ip.key_of("2001:db8:64::203.0.113.7".parse()?), Key::ip("203.0.113.7".parse()?));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// ```
    /// use tower_quota::key;
    ///
    /// let error = key::ip().nat64_prefixes(["64:ff9b::/64"]).unwrap_err().to_string();
    /// assert_eq!(error, "`64:ff9b::/64` is not a NAT64 prefix; one looks like `64:ff9b::/96`");
    /// ```
    pub fn nat64_prefixes<N: AsRef<str>>(mut self, networks: impl IntoIterator<Item = N>) -> Result<Self, ConfigError> {
        let prefixes = networks.into_iter().map(|text| match parse_network(text.as_ref()) {
            Some(IpNet::V6(network)) if network.prefix_len() == 96 && network == network.trunc() => Ok(network),
            _ => Err(ConfigError::new(format!(
                "`{}` is not a NAT64 prefix; one looks like `64:ff9b::/96`",
                text.as_ref()
            ))),
        });
        self.grouping.nat64 = prefixes.collect::<Result<_, _>>()?;
        if let Some(proxies) = &mut self.proxies {
            proxies.group_by(&self.grouping)?;
        }
        Ok(self)
    }
}

/// Keys made by hand.
impl Ip {
    /// The key that this extractor returns for a request from the address, with its settings.
    ///
    /// Without settings it is [`Key::ip`].
    ///
    /// ```
    /// use tower_quota::{Key, key};
    ///
    /// let address = "2001:db8:1:2::3".parse()?;
    /// assert_eq!(key::ip().key_of(address), Key::ip(address));
    /// assert_ne!(key::ip().ipv6_prefix(56).key_of(address), Key::ip(address));
    /// # Ok::<(), std::net::AddrParseError>(())
    /// ```
    pub fn key_of(&self, address: IpAddr) -> Key {
        self.grouping.key(self.grouping.canonical(address))
    }
}

impl Key {
    /// The key that [`ip`] and [`client_ip`](super::client_ip()) make of a request from this address.
    ///
    /// [`Ip::key_of`] makes the key of an extractor with settings. `From<IpAddr>` makes this one.
    ///
    /// ```
    /// use std::net::IpAddr;
    /// use tower_quota::Key;
    ///
    /// assert_eq!(Key::from("203.0.113.7".parse::<IpAddr>()?).to_string(), "ip=203.0.113.7");
    /// assert_eq!(Key::ip("2001:db8:1:2::3".parse()?).to_string(), "ip=2001:db8:1:2::/64");
    /// # Ok::<(), std::net::AddrParseError>(())
    /// ```
    pub fn ip(address: IpAddr) -> Self {
        let grouping = Grouping::default();
        grouping.key(grouping.canonical(address))
    }

    /// The key that [`ip`] makes of all requests over Unix sockets.
    ///
    /// ```
    /// use tower_quota::Key;
    ///
    /// assert_eq!(Key::unix_peer().to_string(), "ip=unix");
    /// ```
    pub fn unix_peer() -> Self {
        Self::plain("ip", "unix")
    }
}

impl From<IpAddr> for Key {
    fn from(address: IpAddr) -> Self {
        Self::ip(address)
    }
}

impl KeyExtractor for Ip {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        match self.client(parts).map(Client::address) {
            Some(Peer::Address(address)) => Ok(Some(self.grouping.key(address))),
            Some(Peer::Unix) => Ok(Some(Key::unix_peer())),
            None => Err(KeyError::misconfigured(NO_PEER)),
        }
    }

    fn form(&self) -> KeyForm {
        KeyForm::of("ip", "", Value::Address(self.grouping.clone()))
    }
}

/// The address as a value.
impl Ip {
    /// The address of the client by the same rule as the key, whole and in canonical form, for logs, lock-outs and other
    /// decisions of the application about it.
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::key::{self, ClientIpSource, PeerAddr};
    ///
    /// let client = key::client_ip(ClientIpSource::XForwardedFor).trusted(["10.0.0.0/8"])?;
    /// for (peer, address) in [("10.0.0.2:80", "198.51.100.9"), ("203.0.113.7:80", "203.0.113.7")] {
    ///     let request = Request::get("/").extension(PeerAddr(peer.parse()?)).header("x-forwarded-for", "1.2.3.4, 198.51.100.9");
    ///     let (parts, ()) = request.body(())?.into_parts();
    ///     assert_eq!(client.address(&parts)?.to_string(), address);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the request has no peer address, or the peer is on a Unix socket and no proxy has recorded an address.
    pub fn address(&self, parts: &Parts) -> Result<IpAddr, KeyError> {
        match self.client(parts).map(Client::address) {
            Some(Peer::Address(address)) => Ok(address),
            Some(Peer::Unix) => Err(KeyError::absent("a peer on a Unix socket has no address")),
            None => Err(KeyError::misconfigured(NO_PEER)),
        }
    }
}

impl Ip {
    /// The client of a request, in canonical form; `None` without a peer.
    #[inline]
    pub(super) fn client(&self, parts: &Parts) -> Option<Client> {
        let peer = match &self.find_peer {
            Some(find) => find(parts).map(Peer::Address),
            None => Peer::of(parts),
        };
        let peer = match peer? {
            Peer::Address(address) => Peer::Address(self.grouping.canonical(address)),
            Peer::Unix => Peer::Unix,
        };
        Some(match &self.proxies {
            Some(proxies) if proxies.any_peer || proxies.trusts(peer) => {
                let client = proxies.client(peer, &parts.headers, &self.grouping);
                if matches!(client, Client::Behind(_)) {
                    self.watch.for_other_header(proxies, &parts.headers);
                }
                client
            }
            proxies => {
                self.watch.for_unread_header(proxies.as_ref(), peer, &parts.headers);
                Client::Known(peer)
            }
        })
    }
}

impl_debug!(Ip, ip => proxies: ip.proxies, grouping: ip.grouping);

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
        for octet in 0..=u8::MAX {
            let addr = format!("{octet}.0.2.{octet}");
            assert_eq!(key_of(&addr), format!("ip={addr}"));
        }
    }

    #[test]
    fn ipv6_addresses_count_by_their_64() {
        assert_eq!(key_of("2001:db8:1:2:3:4:5:6"), "ip=2001:db8:1:2::/64");
        assert_eq!(key_of("2001:db8:1:2::"), key_of("2001:db8:1:2:ffff:ffff:ffff:ffff"));
        assert_ne!(key_of("2001:db8:1:2::1"), key_of("2001:db8:1:3::1"));
    }

    #[test]
    fn an_ipv6_address_that_only_looks_like_ipv4_stays_ipv6() {
        assert_eq!(key_of("::1"), "ip=::/64");
        assert_eq!(key_of("2001:db8::192.0.2.1"), "ip=2001:db8::/64");
    }
}
