use std::net::IpAddr;

use http::{HeaderMap, HeaderName, header::FORWARDED};
use ipnet::IpNet;

use super::{
    address::{Client, Grouping, Peer, parse_network},
    forwarded,
    ip::Ip,
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
/// let client = key::client_ip(ClientIpSource::XForwardedFor).trusted(["10.0.0.0/8"])?;
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
/// # Ok::<(), tower_quota::ConfigError>(())
/// ```
///
/// The elements of a list are split off from the right, byte by byte, so no byte that the client wrote changes how the
/// element of the proxy is read. If that element is absent, malformed or `unknown`, the request counts against the nearest
/// known hop, which is the proxy itself. Such an [unknown client](Ip::unknown) is [within](Ip::within) no network, and can be
/// blocked. At most 32 elements are read, or as many as there are trusted hops.
///
/// A client that reaches the service from a trusted network, past the proxies, chooses its key.
///
/// Addresses are grouped as by [`ip`](super::ip()), with the same settings.
///
/// # Panics
///
/// For [`XForwardedForHop(0)`](ClientIpSource::XForwardedForHop): a chain has at least one proxy; and for the
/// [`Header`](ClientIpSource::Header) `forwarded`, which never is one address.
#[track_caller]
pub fn client_ip(source: ClientIpSource) -> ClientIp {
    assert!(
        !matches!(source, ClientIpSource::XForwardedForHop(0)),
        "a chain has at least one proxy: behind one, the client is the last entry of `x-forwarded-for`, which is \
         `XForwardedForHop(1)`"
    );
    assert!(
        source != ClientIpSource::Header(FORWARDED),
        "`forwarded` holds elements such as `for=192.0.2.1`; use `ClientIpSource::Forwarded`"
    );
    ClientIp(Proxies {
        source,
        given: Vec::new(),
        networks: Vec::new(),
        any_peer: false,
        unix: false,
    })
}

/// A [`client_ip`] that still requires trusted peers.
#[derive(Clone, Debug)]
#[must_use]
pub struct ClientIp(Proxies);

impl ClientIp {
    /// Trusts peers, and hops in a list, in these networks, such as `10.0.0.0/8`, `fd00::/8` or `192.0.2.1`.
    ///
    /// The networks of a provider, such as those of Cloudflare, are read from the lists that it publishes, with one in a line:
    ///
    /// ```
    /// use tower_quota::key::{self, ClientIpSource};
    ///
    /// let (v4, v6) = ("173.245.48.0/20\n103.21.244.0/22", "2400:cb00::/32\n"); // std::fs::read_to_string(..)?
    /// let client = key::client_ip(ClientIpSource::Header("cf-connecting-ip".parse()?));
    /// assert!(client.trusted(v4.lines().chain(v6.lines())).is_ok());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the list is empty; if an element is not a network, such as `10.0.0.1/8`, or contains every address: `0.0.0.0/0` and
    /// `::/0`; or if it contains `::ffff:0:0/96` or `64:ff9b::/96`, which are
    /// [compared as IPv4 addresses](super::ip()#ipv4-in-ipv6).
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::{Key, KeyExtractor, key::{self, ClientIpSource, PeerAddr}};
    ///
    /// let client = key::client_ip(ClientIpSource::Forwarded).trusted(["10.0.0.0/8", "fd00::/8"])?;
    ///
    /// let proxy = PeerAddr("[fd00::2]:80".parse()?);
    /// let request = Request::get("/").extension(proxy).header("forwarded", "for=198.51.100.9").body(())?;
    /// assert_eq!(client.extract(&request.into_parts().0)?, Some(Key::ip("198.51.100.9".parse()?)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// ```
    /// use tower_quota::key::{self, ClientIpSource};
    ///
    /// let client = || key::client_ip(ClientIpSource::XForwardedFor);
    /// assert!(client().trusted(["10.0.0.0/8"]).is_ok());
    /// let error = client().trusted(["10.0.0.0/33"]).unwrap_err();
    /// assert_eq!(error.to_string(), "`10.0.0.0/33` is not a network; one looks like `10.0.0.0/8` or `fd00::/8`");
    /// ```
    // Networks are text, as configuration has them, so that no crate for networks is part of the public API.
    pub fn trusted<N: AsRef<str>>(mut self, networks: impl IntoIterator<Item = N>) -> Result<Ip, ConfigError> {
        self.0.given = parse_networks(networks)?;
        if self.0.given.is_empty() {
            return Err(ConfigError::new(
                "no network is trusted, so the header would never be read; name those of the proxies",
            ));
        }
        self.0.group_by(&Grouping::default())?;
        Ok(Ip::behind(self.0))
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
    pub fn trust_any_peer(mut self) -> Ip {
        self.0.any_peer = true;
        Ip::behind(self.0)
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
    pub fn trust_unix_peer(mut self) -> Ip {
        self.0.unix = true;
        Ip::behind(self.0)
    }
}

/// The header in which proxies record the client address.
///
/// Choose the header that your proxies write. All others are not read, since a client can send them.
///
/// ```
/// use http::Request;
/// use tower_quota::{Key, KeyExtractor, key::{self, ClientIpSource, PeerAddr}};
///
/// // nginx in front, with `proxy_set_header X-Real-IP $remote_addr`.
/// let source = ClientIpSource::Header("x-real-ip".parse()?);
/// let client = key::client_ip(source).trusted(["10.0.0.0/8"])?;
///
/// let nginx = PeerAddr("10.0.0.2:80".parse()?);
/// let request = Request::get("/").extension(nginx).header("x-real-ip", "198.51.100.9").body(())?;
/// assert_eq!(client.extract(&request.into_parts().0)?, Some(Key::ip("198.51.100.9".parse()?)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClientIpSource {
    /// `X-Forwarded-For`: the first address from the right that is not trusted.
    XForwardedFor,
    /// `X-Forwarded-For`: the n-th element from the right, for a fixed chain of n proxies.
    /// [`client_ip`](super::client_ip()) panics on 0.
    XForwardedForHop(usize),
    /// `Forwarded` (RFC 7239): the first address from the right that is not trusted.
    Forwarded,
    /// A header that holds one address, such as `CF-Connecting-IP`, `X-Real-IP` or `Fly-Client-IP`. [`client_ip`](super::client_ip())
    /// panics on `Forwarded`.
    Header(HeaderName),
}

/// The most elements that are read of the lists of a request.
const MAX_HOPS: usize = 32;

pub(super) const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The proxies in front of a service.
#[derive(Clone, Debug)]
pub(super) struct Proxies {
    pub(super) source: ClientIpSource,
    /// Networks of peers whose headers are read, and of hops that are passed over, as they were given.
    pub(super) given: Vec<IpNet>,
    /// The same networks in canonical form.
    pub(super) networks: Vec<IpNet>,
    pub(super) any_peer: bool,
    pub(super) unix: bool,
}

impl Proxies {
    /// Compares networks and addresses by these NAT64 prefixes.
    pub(super) fn group_by(&mut self, grouping: &Grouping) -> Result<(), ConfigError> {
        let fix =
            "for a server that only its proxy can reach, use `trust_any_peer`; in a file, `trusted` is `\"any-peer\"`";
        self.networks = grouping.canonical_networks(&self.given, fix)?;
        Ok(())
    }

    /// The client of a request from a peer whose header is read, in canonical form.
    pub(super) fn client(&self, peer: Peer, headers: &HeaderMap, grouping: &Grouping) -> Client {
        let lines = |name: &HeaderName| headers.get_all(name).iter().rev();
        let recorded = match &self.source {
            ClientIpSource::XForwardedFor => {
                let hops = lines(&X_FORWARDED_FOR).flat_map(forwarded::x_forwarded_for);
                return self.walk(peer, hops, grouping);
            }
            ClientIpSource::Forwarded => {
                let hops = lines(&FORWARDED).flat_map(forwarded::forwarded);
                return self.walk(peer, hops, grouping);
            }
            ClientIpSource::XForwardedForHop(n) => {
                let mut hops = lines(&X_FORWARDED_FOR).flat_map(forwarded::x_forwarded_for);
                hops.nth(n - 1).flatten()
            }
            ClientIpSource::Header(name) => {
                let mut lines = lines(name);
                let address = lines.next().and_then(|line| forwarded::single(name, line));
                address.filter(|_| lines.next().is_none())
            }
        };
        match recorded {
            Some(address) => Client::Known(Peer::Address(grouping.canonical(address))),
            None => Client::Behind(peer),
        }
    }

    /// The header that is read.
    pub(super) fn header(&self) -> HeaderName {
        match &self.source {
            ClientIpSource::XForwardedFor | ClientIpSource::XForwardedForHop(_) => X_FORWARDED_FOR,
            ClientIpSource::Forwarded => FORWARDED,
            ClientIpSource::Header(name) => name.clone(),
        }
    }

    /// Goes from the nearest hop outward, past trusted hops.
    fn walk(&self, peer: Peer, mut hops: impl Iterator<Item = Option<IpAddr>>, grouping: &Grouping) -> Client {
        let mut last = Client::Behind(peer);
        for hop in hops.by_ref().take(MAX_HOPS) {
            let Some(address) = hop else {
                return Client::Behind(last.address());
            };
            last = Client::Known(Peer::Address(grouping.canonical(address)));
            if !self.trusts(last.address()) {
                return last;
            }
        }
        // The first element is the peer of the first proxy, which is the client, unless elements are left.
        match hops.next() {
            Some(_) => Client::Behind(last.address()),
            None => last,
        }
    }

    #[inline]
    pub(super) fn trusts(&self, hop: Peer) -> bool {
        match hop {
            Peer::Address(address) => self.networks.iter().any(|network| network.contains(&address)),
            Peer::Unix => self.unix,
        }
    }
}

pub(super) fn parse_networks<N: AsRef<str>>(networks: impl IntoIterator<Item = N>) -> Result<Vec<IpNet>, ConfigError> {
    let networks = networks.into_iter().map(|text| {
        let text = text.as_ref();
        let network = parse_network(text).ok_or_else(|| {
            ConfigError::new(format!(
                "`{text}` is not a network; one looks like `10.0.0.0/8` or `fd00::/8`"
            ))
        })?;
        match network.trunc() {
            same if same == network => Ok(network),
            whole => Err(ConfigError::new(format!(
                "`{text}` is an address in a network; write the network `{whole}`, or the address `{}` alone",
                network.addr()
            ))),
        }
    });
    networks.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{Ip, client_ip};

    fn trusted(network: &str) -> Result<Ip, ConfigError> {
        client_ip(ClientIpSource::XForwardedFor).trusted([network])
    }

    #[test]
    fn a_network_of_all_addresses_cannot_be_trusted() {
        for text in [
            "0.0.0.0/0",
            "::/0",
            "::ffff:0:0/96",
            "64:ff9b::/96",
            "10.0.0.0/33",
            // Octal for some programs (CVE-2021-29922).
            "010.0.0.0/8",
            "::ffff:010.0.0.0/104",
            "10.0.0.0/08",
            "10.0.0.0/+8",
            "10.0.0.0/",
            "ten",
            "",
        ] {
            let error = trusted(text).unwrap_err().to_string();
            assert!(
                error.contains("trust_any_peer") || error.contains("`10.0.0.0/8`"),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn no_network_at_all_cannot_be_trusted() {
        let error = client_ip(ClientIpSource::XForwardedFor).trusted([""; 0]);
        assert!(error.is_err_and(|error| error.to_string().contains("would never be read")));
    }

    #[test]
    fn a_mapped_network_is_the_ipv4_network() {
        for text in ["::ffff:10.0.0.0/104", "64:ff9b::10.0.0.0/104"] {
            let networks = Grouping::default().canonical_networks(&parse_networks([text]).unwrap(), "");
            assert_eq!(networks.unwrap()[0].to_string(), "10.0.0.0/8");
        }
    }
}
