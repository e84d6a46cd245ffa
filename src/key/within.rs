use std::sync::atomic::{AtomicBool, Ordering};

use http::request::Parts;
use ipnet::IpNet;

use super::{
    address::{Client, Grouping, NO_PEER, Peer},
    client_ip::network,
    ip::Ip,
};
use crate::ConfigError;

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
    /// If an element is not a network, or contains every address.
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
        let networks = networks.into_iter().map(|text| listed(text.as_ref(), &self.grouping));
        let networks: Result<Vec<IpNet>, _> = networks.collect();
        let networks = networks?;
        Ok(
            self.of_client(false, move |client| match (client.address, client.is_unknown) {
                (Peer::Address(address), false) => networks.iter().any(|network| network.contains(&address)),
                _ => false,
            }),
        )
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
        self.of_client(true, |client| client.is_unknown)
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

/// Parses a network of a list, in canonical form.
fn listed(text: &str, grouping: &Grouping) -> Result<IpNet, ConfigError> {
    let network = grouping.canonical_network(network(text)?);
    if network.prefix_len() == 0 {
        return Err(ConfigError::new(format!(
            "`{text}` contains every address; list the networks of the clients"
        )));
    }
    Ok(network)
}
