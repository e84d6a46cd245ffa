//! The application before its migration to tower-quota.

use std::{net::SocketAddr, thread, time::Duration};

use axum::{Router, routing::get};
use tower_governor::{GovernorLayer, governor::GovernorConfigBuilder}; // limits

#[tokio::main]
async fn main() {
    // limits
    let config = GovernorConfigBuilder::default()
        .per_second(2)
        .burst_size(5)
        .finish()
        .expect("a limit above 0");
    let limiter = config.limiter().clone();
    thread::spawn(move || {
        loop {
            thread::sleep(Duration::from_secs(60));
            limiter.retain_recent();
        }
    });
    // rest
    let app = Router::new()
        .route("/", get(async || "hi\n"))
        .layer(GovernorLayer::new(config)); // limits
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000")
        .await
        .expect("the port is free");
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await.expect("the server runs");
}
