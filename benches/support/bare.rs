//! A service that responds at once, and requests to it.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    net::{Ipv4Addr, SocketAddr},
    pin::pin,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use tower::Service;
use tower_quota::{Limit, MemoryStore, Policy, RateLimitLayer, SlidingLog, TokenBucket, key, key::PeerAddr};

#[derive(Clone)]
pub(crate) struct Bare;

impl Service<Request<Empty<Bytes>>> for Bare {
    type Response = Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Empty<Bytes>>) -> Self::Future {
        ready(Ok(Response::new(Empty::new())))
    }
}

/// A request from the n-th address.
pub(crate) fn request(n: u32) -> Request<Empty<Bytes>> {
    let mut request = Request::new(Empty::new());
    let peer = SocketAddr::from((Ipv4Addr::from_bits(0x0a00_0000 + n), 4711));
    request.extensions_mut().insert(PeerAddr(peer));
    request
}

/// Sends a request whose response is ready at once.
pub(crate) fn send<S, B>(service: &mut S, request: Request<Empty<Bytes>>) -> StatusCode
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error = Infallible>,
{
    let mut cx = Context::from_waker(Waker::noop());
    match pin!(service.call(request)).poll(&mut cx) {
        Poll::Ready(Ok(response)) => response.status(),
        Poll::Pending => unreachable!("the store and the service answer at once"),
    }
}

pub(crate) fn limited(limit: impl Into<Limit>) -> RateLimitLayer {
    RateLimitLayer::new(MemoryStore::new(), Policy::new("bench", limit).key(key::ip()))
}

/// A limit that no key reaches.
pub(crate) fn admitting() -> Limit {
    TokenBucket::per_second(1_000_000).burst(1_000_000_000).into()
}

/// A limit that a key reaches with its first request.
pub(crate) fn denying() -> Limit {
    SlidingLog::per_day(1).into()
}
