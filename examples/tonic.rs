//! A tonic server and a client in one program: two calls are admitted, the third is denied.
//!
//! ```console
//! $ cargo run --example tonic --features tonic
//! hi, Ada
//! hi, Ada
//! ResourceExhausted: rate limit exceeded
//! RateLimit: "say-hi";r=0;t=30
//! RetryInfo: 30 s
//! QuotaFailure: policy:say-hi, 2 requests per 30s
//! ```
//!
//! tonic generates `examples/generated/hello.rs` from `examples/hello.proto`; a test compares the two.

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

struct Hello;

#[tonic::async_trait]
impl Greeter for Hello {
    async fn say_hi(&self, request: Request<HiRequest>) -> Result<Response<HiReply>, Status> {
        let text = format!("hi, {}", request.into_inner().name);
        Ok(Response::new(HiReply { text }))
    }
}

#[tokio::main]
pub(crate) async fn main() -> Result<(), Box<dyn Error>> {
    // The layer runs before tonic's router and sees all methods. This policy applies to one of them.
    let say_hi = Policy::new("say-hi", SlidingLog::new(2, Duration::from_secs(30)))
        .key(key::ip())
        .apply_if(|parts| parts.uri.path() == "/hello.Greeter/SayHi");

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let server = Server::builder()
        .layer(RateLimitLayer::new(MemoryStore::new(), say_hi))
        .add_service(GreeterServer::new(Hello));
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true)); // tonic's default is for its own listener
    tokio::spawn(server.serve_with_incoming(incoming));

    let mut client = GreeterClient::new(Endpoint::try_from(url)?.connect().await?);
    let ada = || HiRequest { name: "Ada".into() };
    for _ in 0..2 {
        println!("{}", client.say_hi(ada()).await?.into_inner().text);
    }

    let status = client.say_hi(ada()).await.expect_err("the third call is denied");
    println!("{:?}: {}", status.code(), status.message());
    assert_eq!(status.code(), Code::ResourceExhausted);

    let ratelimit = status.metadata().get("ratelimit").expect("a field");
    println!("RateLimit: {}", ratelimit.to_str()?);
    assert!(ratelimit.to_str()?.starts_with("\"say-hi\";r=0;t="));

    let wait = status.get_details_retry_info().and_then(|info| info.retry_delay);
    let wait = wait.expect("a wait");
    println!("RetryInfo: {:.0} s", wait.as_secs_f64());
    assert!(wait <= Duration::from_secs(30));

    for violation in status.get_details_quota_failure().expect("a policy").violations {
        println!("QuotaFailure: {}, {}", violation.subject, violation.description);
    }
    Ok(())
}
