//! The transport peer: the other end of the connection that a request came over.

use std::net::{IpAddr, SocketAddr};

use http::request::Parts;

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
pub(super) const NO_PEER: &str = if cfg!(any(feature = "axum", feature = "tonic")) {
    "no peer address on the request; serve with `into_make_service_with_connect_info::<SocketAddr>()` (axum), or put a \
     `tower_quota::key::PeerAddr` into the request's extensions"
} else {
    "no peer address on the request; turn on the feature `axum` of tower-quota and serve with \
     `into_make_service_with_connect_info::<SocketAddr>()`, or the feature `tonic`, or put a \
     `tower_quota::key::PeerAddr` into the request's extensions"
};
