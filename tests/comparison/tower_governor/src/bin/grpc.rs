//! A limit on one method, and one on all others.

use std::{thread, time::Duration};

use tonic::{service::Routes, transport::Server};
// limits
use std::net::IpAddr;

use governor::{clock::QuantaInstant, middleware::NoOpMiddleware};
use tonic::{Code, Status, body::Body, transport::server::TcpConnectInfo};
use tonic_types::{ErrorDetails, StatusExt};
use tower::{Layer, Service, layer::layer_fn, service_fn};
use tower_governor::{GovernorError, GovernorLayer, governor::GovernorConfigBuilder, key_extractor::KeyExtractor};

#[derive(Clone)]
struct PeerKey;

impl KeyExtractor for PeerKey {
    type Key = IpAddr;

    fn extract<T>(&self, request: &http::Request<T>) -> Result<IpAddr, GovernorError> {
        let peer = request
            .extensions()
            .get::<TcpConnectInfo>()
            .and_then(TcpConnectInfo::remote_addr);
        Ok(peer.ok_or(GovernorError::UnableToExtractKey)?.ip())
    }
}

fn denied(error: GovernorError) -> http::Response<Body> {
    let status = match error {
        GovernorError::TooManyRequests { wait_time, .. } => {
            let wait = Duration::from_secs(wait_time + 1); // `wait_time` is rounded down
            let details = ErrorDetails::with_retry_info(Some(wait));
            Status::with_error_details(Code::ResourceExhausted, "rate limit exceeded", details)
        }
        error => Status::internal(error.to_string()),
    };
    status.into_http()
}

fn limit(period: Duration, burst: u32) -> GovernorLayer<PeerKey, NoOpMiddleware<QuantaInstant>, Body> {
    let config = GovernorConfigBuilder::default()
        .period(period)
        .burst_size(burst)
        .key_extractor(PeerKey)
        .finish()
        .expect("a limit above 0");
    let limiter = config.limiter().clone();
    thread::spawn(move || {
        loop {
            thread::sleep(Duration::from_secs(60));
            limiter.retain_recent();
        }
    });
    GovernorLayer::new(config).error_handler(denied)
}
// rest

#[tokio::main]
async fn main() {
    // limits
    let sign_ups = limit(Duration::from_secs(3_600) / 5, 5);
    let others = limit(Duration::from_millis(10), 100);
    let limits = layer_fn(move |inner: Routes| {
        let (mut sign_ups, mut others) = (sign_ups.layer(inner.clone()), others.layer(inner));
        service_fn(move |request: http::Request<Body>| match request.uri().path() {
            "/app.Users/SignUp" => sign_ups.call(request),
            _ => others.call(request),
        })
    });
    // rest
    Server::builder()
        .layer(limits) // limits
        .add_routes(Routes::default())
        .serve(([127, 0, 0, 1], 50_051).into())
        .await
        .expect("the server runs");
}
