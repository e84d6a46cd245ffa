//! A hyper server without a framework. The accept loop inserts the address of the peer, as `PeerAddr`.
//!
//! ```console
//! $ cargo run --example hyper
//!
//! $ curl -i http://127.0.0.1:3000/hello
//! HTTP/1.1 200 OK
//! ratelimit: "say-hi";r=1;t=30
//!
//! $ curl -i http://127.0.0.1:3000/hello
//! $ curl -i http://127.0.0.1:3000/hello
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 30
//! ratelimit: "say-hi";r=0;t=30
//! ```

use std::{convert::Infallible, env, error::Error, io::ErrorKind, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{net::TcpListener, time::sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    MemoryStore, Policy, RateLimitLayer, SlidingLog,
    key::{self, PeerAddr},
};

pub(crate) fn limit() -> RateLimitLayer {
    let policy = Policy::new("say-hi", SlidingLog::new(2, Duration::from_secs(30))).key(key::ip());
    RateLimitLayer::new(MemoryStore::new(), policy)
}

pub(crate) async fn hello<B>(_: Request<B>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new("hi\n".into()))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let service = limit().layer(service_fn(hello));

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue, // the client has left
            Err(error) => {
                eprintln!("{error}"); // such as too many open files
                sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        let service = service.clone().map_request(move |mut request: Request<_>| {
            request.extensions_mut().insert(PeerAddr(peer));
            request
        });
        tokio::spawn(async move {
            let mut connection = auto::Builder::new(TokioExecutor::new());
            connection.http1().timer(TokioTimer::new()); // a head that is not complete within 30 s is an error
            let served = connection.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
            if let Err(error) = served.await {
                eprintln!("{peer}: {error}");
            }
        });
    }
}
