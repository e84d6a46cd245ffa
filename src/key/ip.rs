use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use http::request::Parts;

use super::{Key, KeyError, KeyExtractor};

/// The address of the transport peer: whoever opened the connection.
///
/// IPv4 addresses count one by one, IPv6 addresses by their /64, which is what one subscriber gets (RFC 6177). An IPv4
/// address in IPv6 form (`::ffff:203.0.113.7`, or `64:ff9b::/96` behind a NAT64) is the IPv4 address.
///
/// The peer is what axum's `into_make_service_with_connect_info::<SocketAddr>()` (feature `axum`) or tonic's server
/// (feature `tonic`) left in the extensions of the request, or a [`PeerAddr`] that you put there. A request without any
/// is refused with 500: callers of whom nothing is known never share a count by accident.
///
/// No header is read: behind a reverse proxy, all requests come from the proxy.
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
    Ip(())
}

/// A [`KeyExtractor`] made by [`ip`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Ip(());

/// The address of the transport peer, as a request extension, for servers that do not provide it themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddr(pub SocketAddr);

impl KeyExtractor for Ip {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        match peer(parts) {
            Some(addr) => Ok(Some(key(canonical(addr)))),
            None => Err(KeyError::misconfigured(
                "no peer address on the request; serve with \
                 `into_make_service_with_connect_info::<SocketAddr>()` (axum), or put a \
                 `tower_quota::key::PeerAddr` into the request's extensions",
            )),
        }
    }
}

impl Key {
    /// The key that [`ip`] makes of a request from this address.
    pub fn ip(addr: IpAddr) -> Self {
        key(canonical(addr))
    }
}

fn peer(parts: &Parts) -> Option<IpAddr> {
    if let Some(PeerAddr(addr)) = parts.extensions.get() {
        return Some(addr.ip());
    }

    #[cfg(feature = "axum")]
    if let Some(axum::extract::ConnectInfo::<SocketAddr>(addr)) = parts.extensions.get() {
        return Some(addr.ip());
    }

    #[cfg(feature = "tonic")]
    {
        use tonic::transport::server::TcpConnectInfo;

        if let Some(info) = parts.extensions.get::<TcpConnectInfo>() {
            return info.remote_addr().map(|addr| addr.ip());
        }
    }

    None
}

/// The IPv4 address that an IPv6 address stands for, if it does.
fn canonical(addr: IpAddr) -> IpAddr {
    match addr.to_canonical() {
        IpAddr::V6(v6) if v6.segments()[..6] == NAT64 => {
            let [.., a, b, c, d] = v6.octets();
            IpAddr::V4(Ipv4Addr::new(a, b, c, d))
        }
        canonical => canonical,
    }
}

/// The well-known prefix of RFC 6052 §2.1.
const NAT64: [u16; 6] = [0x64, 0xff9b, 0, 0, 0, 0];

fn key(addr: IpAddr) -> Key {
    match addr {
        IpAddr::V4(v4) => Key::plain("ip", v4),
        IpAddr::V6(v6) => {
            let network = v6.to_bits() >> 64 << 64;
            Key::plain("ip", format_args!("{}/64", Ipv6Addr::from_bits(network)))
        }
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
