//! Addresses as keys: their canonical form, and the networks whose addresses share a key.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{key::Key, peer::Peer};

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
            IpAddr::V4(v4) => {
                let network = v4.to_bits() & (u32::MAX << (32 - self.ipv4));
                Key::plain("ip", format_args!("{}/{}", Ipv4Addr::from_bits(network), self.ipv4))
            }
            IpAddr::V6(v6) => {
                let network = v6.to_bits() & (u128::MAX << (128 - self.ipv6));
                Key::plain("ip", format_args!("{}/{}", Ipv6Addr::from_bits(network), self.ipv6))
            }
        }
    }
}
