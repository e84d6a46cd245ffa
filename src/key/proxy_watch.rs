//! Warnings of proxies that an extractor of addresses does not know, or that send another header.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use http::{HeaderMap, header::FORWARDED};

use super::{
    address::Peer,
    client_ip::{ClientIpSource, Proxies, X_FORWARDED_FOR},
    header::FORWARDING_HEADERS,
};

/// What an extractor has seen of proxies.
#[derive(Default)]
pub(super) struct ProxyWatch {
    has_warned: AtomicBool,
    /// How many requests were searched for each header of a proxy.
    searched: AtomicU32,
}

/// The first requests that are searched for each header of a proxy, which takes longer than all else.
const SEARCHED: u32 = 1_000;

impl ProxyWatch {
    /// Warns once if a proxy seems to have forwarded a request that counts under its peer.
    #[inline]
    pub(super) fn for_unread_header(&self, proxies: Option<&Proxies>, peer: Peer, headers: &HeaderMap) {
        if !self.has_warned.load(Ordering::Relaxed) && self.is_forwarded(proxies, headers) {
            self.warn_of_forwarding(proxies, peer);
        }
    }

    #[inline]
    fn is_forwarded(&self, proxies: Option<&Proxies>, headers: &HeaderMap) -> bool {
        are_forwarding(headers)
            || match proxies {
                Some(proxies) => matches!(&proxies.source, ClientIpSource::Header(name) if headers.contains_key(name)),
                None => self.searched.load(Ordering::Relaxed) < SEARCHED && self.has_any(headers),
            }
    }

    #[cold]
    fn has_any(&self, headers: &HeaderMap) -> bool {
        self.searched.fetch_add(1, Ordering::Relaxed);
        FORWARDING_HEADERS.iter().any(|name| headers.contains_key(*name))
    }

    #[cold]
    fn warn_of_forwarding(&self, proxies: Option<&Proxies>, peer: Peer) {
        if self.has_warned.swap(true, Ordering::Relaxed) {
            return;
        }
        let address = match peer {
            Peer::Address(address) => address.to_string(),
            Peer::Unix => "unix".to_owned(),
        };
        let fix = match (proxies, peer) {
            (None, _) => "use `key::client_ip`, in a file the key `client-ip`",
            (Some(_), Peer::Address(_)) => "add its address to `trusted`",
            (Some(_), Peer::Unix) => "use `trust_unix_peer`",
        };
        tracing::warn!(
            peer = address,
            "a request has been forwarded, but is counted under the address of the peer; if the peer is your proxy, {fix}"
        );
    }

    /// Warns once if the proxies record clients in another header.
    #[cold]
    pub(super) fn for_other_header(&self, proxies: &Proxies, headers: &HeaderMap) {
        let header = proxies.header();
        let is_other = || !headers.contains_key(&header) && are_forwarding(headers);
        if !self.has_warned.load(Ordering::Relaxed) && is_other() && !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                header = header.as_str(),
                "a trusted proxy has not sent the header with the client, but `X-Forwarded-For` or `Forwarded`: all of its clients \
                 are counted as one; configure the header that it sends"
            );
        }
    }
}

/// Whether one of the lists is there. Each name more that is looked for costs every request one hundredth.
#[inline]
fn are_forwarding(headers: &HeaderMap) -> bool {
    headers.contains_key(&X_FORWARDED_FOR) || headers.contains_key(&FORWARDED)
}
