//! A hundred tokens of a language model in a minute: 30 are charged at first, and settled when the stream ends or breaks.
//!
//! ```console
//! $ cargo run --example tokens --features axum
//!
//! $ curl -i -X POST http://127.0.0.1:3000/complete/10
//! HTTP/1.1 200 OK
//! ratelimit: "requests";r=4;t=60, "tokens";r=70;t=60
//!
//! $ curl -i -X POST http://127.0.0.1:3000/complete/80
//! HTTP/1.1 200 OK
//! ratelimit: "requests";r=3;t=60, "tokens";r=60;t=60
//!
//! $ curl -i -X POST http://127.0.0.1:3000/complete/1
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//! ratelimit: "requests";r=3;t=60, "tokens";r=0;t=60
//! ```
//!
//! The first response had 10 tokens, so 20 of the 30 were refunded. The second had 80: 50 more were charged at its end.

use std::{convert::Infallible, env, error::Error, iter::repeat_n, mem, net::SocketAddr, time::Duration};

use axum::{Router, body::Body, extract::Path, routing::post};
use tokio::{net::TcpListener, signal};
use tokio_stream::StreamExt;
use tower_quota::{Decision, MemoryStore, Policy, RateLimitLayer, Receipt, SlidingLog, key, store::Store};

/// The tokens of a response. They are settled when it is dropped: at the end of the stream, or when the client has left.
struct Usage {
    tokens: u64,
    receipt: Receipt,
}

impl Usage {
    // A method borrows all of the value, so that the closure below owns it. With `usage.tokens += 1` it would own a copy of
    // the number.
    fn add_token(&mut self) {
        self.tokens += 1;
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        tokio::spawn(mem::take(&mut self.receipt).settle(self.tokens));
    }
}

/// Streams this number of tokens, as a language model would.
async fn complete(decision: Decision, Path(length): Path<usize>) -> Body {
    let mut usage = Usage {
        tokens: 0,
        receipt: decision.take_receipt_of("tokens"),
    };
    let model = tokio_stream::iter(repeat_n("token ", length));
    Body::from_stream(model.map(move |token| {
        usage.add_token();
        Ok::<_, Infallible>(token)
    }))
}

pub(crate) fn app(store: impl Store) -> Router {
    let policies = [
        Policy::new("requests", SlidingLog::per_minute(5)).key(key::ip()),
        Policy::new("tokens", SlidingLog::per_minute(100))
            .key(key::ip())
            .cost(30),
    ];
    let limit = RateLimitLayer::new(store, policies);
    Router::new().route("/complete/{length}", post(complete).layer(limit))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let store = MemoryStore::new();
    axum::serve(
        listener,
        app(store.clone()).into_make_service_with_connect_info::<SocketAddr>(),
    )
    .with_graceful_shutdown(async { drop(signal::ctrl_c().await) })
    .await?;
    // The last settlements.
    store.drained(Duration::from_secs(5)).await?;
    Ok(())
}
