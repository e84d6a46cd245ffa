//! The address of the client as an extractor of axum.

use std::{
    net::IpAddr,
    sync::atomic::{AtomicBool, Ordering},
};

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use http::{StatusCode, request::Parts};

use super::{extractor::KeyError, ip::Ip};

/// Extracts the address of the client, by the same rule as a limit with the same [`Ip`].
///
/// The rule is an [`Ip`] in the extensions of the request: the layer `Extension` of axum inserts one, which may be a clone of that of
/// the policies, or [`Policies::client_ip`](crate::Policies::client_ip) of a file. So the address in logs and lock-outs is the one
/// that is counted, whole and in canonical form ([`Ip::address`]), and no header is read that the limits do not trust.
///
/// `Option<ClientAddr>` is `None` for a peer on a Unix socket for which no proxy has recorded an address. Without a rule or a
/// peer address, the response is `500 Internal Server Error`, and names the fix.
///
/// ```
/// use axum::{Extension, Router, body::Body, routing::get};
/// use http::{Request, StatusCode};
/// use http_body_util::BodyExt;
/// use tower::ServiceExt;
/// use tower_quota::{MemoryStore, Policy, RateLimitLayer, SlidingLog};
/// use tower_quota::key::{self, ClientAddr, ClientIpSource, PeerAddr};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let client = key::client_ip(ClientIpSource::XForwardedFor).trusted(["10.0.0.0/8"])?;
/// let hello = Policy::new("hello", SlidingLog::per_minute(1)).key(client.clone());
/// let app: Router = Router::new()
///     .route("/", get(async |ClientAddr(address): ClientAddr| address.to_string()))
///     .layer(RateLimitLayer::new(MemoryStore::new(), hello))
///     .layer(Extension(client));
///
/// let request = || Request::get("/").extension(PeerAddr(([10, 0, 0, 2], 80).into())).header("x-forwarded-for", "198.51.100.9");
/// let admitted = app.clone().oneshot(request().body(Body::empty())?).await?;
/// assert_eq!(admitted.into_body().collect().await?.to_bytes(), "198.51.100.9");
/// let denied = app.oneshot(request().body(Body::empty())?).await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientAddr(pub IpAddr);

impl ClientAddr {
    fn of(parts: &Parts) -> Result<Self, KeyError> {
        let rule = parts.extensions.get::<Ip>();
        let rule = rule.ok_or_else(|| KeyError::misconfigured(NO_RULE))?;
        rule.address(parts).map(Self)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for ClientAddr {
    type Rejection = (StatusCode, String);

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        Self::of(parts).map_err(|error| rejection(&error))
    }
}

impl<S: Send + Sync> OptionalFromRequestParts<S> for ClientAddr {
    type Rejection = (StatusCode, String);

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Self::Rejection> {
        match Self::of(parts) {
            Err(error) if error.is_absent() => Ok(None),
            result => result.map(Some).map_err(|error| rejection(&error)),
        }
    }
}

const NO_RULE: &str = "no rule for the address of the client; add `.layer(axum::Extension(key::ip()))` to the router, or behind a \
                       proxy the `key::client_ip` of its limits, which is `policies.client_ip()` of a file";

fn rejection(error: &KeyError) -> (StatusCode, String) {
    static LOGGED: AtomicBool = AtomicBool::new(false);

    if !error.is_misconfigured() {
        return (StatusCode::BAD_REQUEST, error.to_string());
    }
    if !LOGGED.swap(true, Ordering::Relaxed) {
        tracing::error!(error = error.to_string(), "a handler cannot run");
    }
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use crate::key::{self, UnixPeer};

    #[tokio::test]
    async fn a_request_without_the_address_is_rejected_with_the_fix() {
        for (request, status, fix) in [
            (Request::get("/"), 500, "add `.layer(axum::Extension(key::ip()))`"),
            (
                Request::get("/").extension(key::ip()),
                500,
                "into_make_service_with_connect_info",
            ),
            (
                Request::get("/").extension(key::ip()).extension(UnixPeer),
                400,
                "Unix socket",
            ),
        ] {
            let (mut parts, ()) = request.body(()).unwrap().into_parts();
            let rejected = <ClientAddr as FromRequestParts<()>>::from_request_parts(&mut parts, &()).await;
            let (rejected, text) = rejected.unwrap_err();
            assert_eq!(rejected, status, "{text}");
            assert!(text.contains(fix), "{text}");
        }
    }
}
