//! A bare hyper server, without a framework: the accept loop knows the peer, and says so with `PeerAddr`.
//!
//! ```text
//! cargo run --example hyper
//!
//! curl -i http://127.0.0.1:3000/hello
//! ```

use std::{convert::Infallible, env, error::Error, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::net::TcpListener;
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_quota::{
    MemoryStore, Policy, RateLimitLayer, SlidingLog,
    key::{self, PeerAddr},
};

async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("hi\n")))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let policy = Policy::new("say-hi", SlidingLog::new(2, Duration::from_secs(30))).key(key::ip());
    let service = ServiceBuilder::new()
        .layer(RateLimitLayer::new(MemoryStore::new(), policy))
        .service(service_fn(hello));

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    loop {
        let (stream, peer) = listener.accept().await?;
        let service = service.clone().map_request(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(PeerAddr(peer));
            request
        });
        tokio::spawn(async move {
            let connection = auto::Builder::new(TokioExecutor::new());
            let served = connection.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
            if let Err(error) = served.await {
                eprintln!("{peer}: {error}");
            }
        });
    }
}
