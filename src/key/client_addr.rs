//! The address of the client as an extractor of axum.

use std::{
    error::Error,
    fmt,
    net::IpAddr,
    sync::atomic::{AtomicBool, Ordering},
};

use axum::{
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
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
    fn of(parts: &Parts) -> Result<Self, ClientAddrRejection> {
        let rule = parts.extensions.get::<Ip>();
        let rule = rule.ok_or_else(|| ClientAddrRejection(KeyError::misconfigured(NO_RULE)))?;
        rule.address(parts).map(Self).map_err(ClientAddrRejection)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for ClientAddr {
    type Rejection = ClientAddrRejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ClientAddrRejection> {
        Self::of(parts)
    }
}

impl<S: Send + Sync> OptionalFromRequestParts<S> for ClientAddr {
    type Rejection = ClientAddrRejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, ClientAddrRejection> {
        match Self::of(parts) {
            Err(ClientAddrRejection(error)) if error.is_absent() => Ok(None),
            result => result.map(Some),
        }
    }
}

const NO_RULE: &str = "no rule for the address of the client; add `.layer(axum::Extension(key::ip()))` to the router, or the \
                       `key::client_ip` of its limits behind a proxy";

/// Rejection of a handler that takes a [`ClientAddr`]: `500 Internal Server Error` if the rule or the peer address is missing, which is
/// also logged as an error; `400 Bad Request` if the peer is on a Unix socket.
///
/// ```
/// use axum::{extract::FromRequestParts, response::IntoResponse};
/// use http::{Request, StatusCode};
/// use tower_quota::key::{self, ClientAddr, UnixPeer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// for (request, status, text) in [
///     (Request::get("/"), StatusCode::INTERNAL_SERVER_ERROR, "add `.layer(axum::Extension(key::ip()))`"),
///     (Request::get("/").extension(key::ip()), StatusCode::INTERNAL_SERVER_ERROR, "into_make_service_with_connect_info"),
///     (Request::get("/").extension(key::ip()).extension(UnixPeer), StatusCode::BAD_REQUEST, "Unix socket"),
/// ] {
///     let (mut parts, ()) = request.body(()).unwrap().into_parts();
///     let rejection = <ClientAddr as FromRequestParts<()>>::from_request_parts(&mut parts, &()).await.unwrap_err();
///     assert!(rejection.to_string().contains(text), "{rejection}");
///     assert_eq!(rejection.into_response().status(), status);
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct ClientAddrRejection(KeyError);

impl fmt::Display for ClientAddrRejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for ClientAddrRejection {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.0)
    }
}

impl IntoResponse for ClientAddrRejection {
    fn into_response(self) -> Response {
        if !self.0.is_misconfigured() {
            return (StatusCode::BAD_REQUEST, self.to_string()).into_response();
        }
        static LOGGED: AtomicBool = AtomicBool::new(false);
        if !LOGGED.swap(true, Ordering::Relaxed) {
            tracing::error!(error = %self, "a handler cannot run");
        }
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}
