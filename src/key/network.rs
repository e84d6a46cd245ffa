//! Networks: trusted peers, and the grouping of addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{Key, ip::Peer};
use crate::ConfigError;

/// The peers whose headers are read.
#[derive(Clone, Debug, Default)]
pub(super) struct Trust {
    pub(super) networks: Vec<IpNet>,
    pub(super) any_peer: bool,
    pub(super) unix: bool,
}

impl Trust {
    pub(super) fn peer(&self, peer: Peer) -> bool {
        self.any_peer || self.hop(peer)
    }

    pub(super) fn hop(&self, hop: Peer) -> bool {
        match hop {
            Peer::Address(address) => self.networks.iter().any(|network| network.contains(&address)),
            Peer::Unix => self.unix,
        }
    }
}

/// A network to trust, in canonical form.
pub(super) fn network(text: &str) -> Result<IpNet, ConfigError> {
    let parsed = text
        .parse::<IpNet>()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    let network = parsed.map_err(|_| {
        ConfigError::new(format!(
            "`{text}` is not a network; one looks like `10.0.0.0/8` or `fd00::/8`"
        ))
    })?;
    // Addresses are compared in canonical form, and so is the network.
    let network = canonical(network);
    if network.prefix_len() == 0 {
        return Err(ConfigError::new(format!(
            "`{text}` contains every address; for a server that only its proxy can reach, use `trust_any_peer()`, or \
             `trusted = \"any-peer\"` in a file"
        )));
    }
    Ok(network)
}

/// The IPv4 network, if an IPv6 network stands for one.
fn canonical(network: IpNet) -> IpNet {
    let IpNet::V6(v6) = network else {
        return network;
    };
    let Some(length) = v6.prefix_len().checked_sub(96) else {
        return network;
    };
    match Grouping::default().canonical(v6.addr().into()) {
        IpAddr::V4(v4) => Ipv4Net::new(v4, length).map_or(network, IpNet::V4),
        IpAddr::V6(_) => network,
    }
}

/// The networks whose addresses have one key.
#[derive(Clone, Debug)]
pub(super) struct Grouping {
    pub(super) ipv4: u8,
    pub(super) ipv6: u8,
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
    /// The IPv4 address, if an IPv6 address stands for one.
    #[inline]
    pub(super) fn canonical(&self, address: IpAddr) -> IpAddr {
        match address.to_canonical() {
            IpAddr::V6(v6) if self.nat64.iter().any(|prefix| prefix.contains(&v6)) => {
                let [.., a, b, c, d] = v6.octets();
                IpAddr::V4(Ipv4Addr::new(a, b, c, d))
            }
            canonical => canonical,
        }
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_of_all_addresses_cannot_be_trusted() {
        for text in [
            "0.0.0.0/0",
            "::/0",
            "::ffff:0:0/96",
            "64:ff9b::/96",
            "10.0.0.0/33",
            "ten",
            "",
        ] {
            let error = network(text).unwrap_err().to_string();
            assert!(
                error.contains("trust_any_peer") || error.contains("`10.0.0.0/8`"),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn a_mapped_network_is_the_ipv4_network() {
        for text in ["::ffff:10.0.0.0/104", "64:ff9b::10.0.0.0/104"] {
            assert_eq!(network(text).unwrap().to_string(), "10.0.0.0/8");
        }
    }
}
