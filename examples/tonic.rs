//! A tonic server and its client in one program: the client calls until it is told to wait, and by how much.
//!
//! ```text
//! cargo run --example tonic --features tonic
//! ```
//!
//! `examples/generated/hello.rs` is what tonic makes of `examples/hello.proto`; a test compares the two.

use std::{error::Error, time::Duration};

use tokio::net::TcpListener;
use tonic::{
    Code, Request, Response, Status,
    transport::{Endpoint, Server, server::TcpIncoming},
};
use tonic_types::StatusExt;
use tower_quota::{MemoryStore, Policy, RateLimitLayer, SlidingLog, key};

#[allow(missing_docs, unreachable_pub, clippy::all)]
mod hello {
    include!("generated/hello.rs");
}

use hello::{
    HiReply, HiRequest,
    greeter_client::GreeterClient,
    greeter_server::{Greeter, GreeterServer},
};

struct Polite;

#[tonic::async_trait]
impl Greeter for Polite {
    async fn say_hi(&self, request: Request<HiRequest>) -> Result<Response<HiReply>, Status> {
        let text = format!("hi, {}", request.into_inner().name);
        Ok(Response::new(HiReply { text }))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Two calls of this method in any 30 seconds for each address. The layer is before tonic's router, so a policy that is
    // not for all methods says which.
    let say_hi = Policy::new("say-hi", SlidingLog::new(2, Duration::from_secs(30)))
        .key(key::ip())
        .apply_if(|parts| parts.uri.path() == "/hello.Greeter/SayHi");

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let server = Server::builder()
        .layer(RateLimitLayer::new(MemoryStore::new(), say_hi))
        .add_service(GreeterServer::new(Polite));
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));

    let mut client = GreeterClient::new(Endpoint::try_from(url)?.connect().await?);
    loop {
        let request = HiRequest { name: "Ada".into() };
        let status = match client.say_hi(request).await {
            Ok(reply) => {
                println!("{}", reply.into_inner().text);
                continue;
            }
            Err(status) => status,
        };

        println!("{:?}: {}", status.code(), status.message());
        let wait = status.get_details_retry_info().and_then(|info| info.retry_delay);
        println!("retry after {:?}", wait.unwrap_or_default());
        let violated = status.get_details_quota_failure().map(|failure| failure.violations);
        for violation in violated.unwrap_or_default() {
            println!("{} allows {}", violation.subject, violation.description);
        }

        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(wait.is_some_and(|wait| wait > Duration::from_secs(29)));
        return Ok(());
    }
}
