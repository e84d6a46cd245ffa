//! Three failed logins in 15 minutes for each account and address, where the account is in the body of the request.
//!
//! ```console
//! $ cargo run --example login_form --features axum
//!
//! $ curl -i -X POST -d 'ada wrong' http://127.0.0.1:3000/login
//! HTTP/1.1 401 Unauthorized
//!
//! $ curl -i -X POST -d 'ada lovelace' http://127.0.0.1:3000/login
//! HTTP/1.1 200 OK
//!
//! $ curl -i -X POST -d 'ada wrong' http://127.0.0.1:3000/login
//! $ curl -i -X POST -d 'Ada wrong' http://127.0.0.1:3000/login
//! HTTP/1.1 401 Unauthorized
//!
//! $ curl -i -X POST -d 'ada lovelace' http://127.0.0.1:3000/login
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 900
//! ratelimit: "logins";r=0;t=900
//!
//! $ curl -i -X POST -d 'alan turing' http://127.0.0.1:3000/login
//! HTTP/1.1 200 OK
//! ```
//!
//! A key of a layer sees the head of a request only, so the handler counts by what it has read. Here the body is two words; with
//! `axum::Form` or `axum::Json` the rest is the same. `ReadBodyLayer` is the alternative: it reads the body for the keys of a layer.

use std::{env, error::Error, net::SocketAddr, time::Duration};

use axum::{
    Router,
    extract::{ConnectInfo, State},
    http::StatusCode,
    response::Result,
    routing::post,
};
use tokio::net::TcpListener;
use tower_quota::{Key, Limiter, MemoryStore, Policy, SlidingLog};

/// A placeholder for the comparison with a hash of the password.
fn has_password(account: &str, password: &str) -> bool {
    matches!((account, password), ("ada", "lovelace") | ("alan", "turing"))
}

async fn login(
    State(logins): State<Limiter>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    form: String,
) -> Result<&'static str> {
    let (account, password) = form.split_once(' ').ok_or(StatusCode::BAD_REQUEST)?;
    // In one form: each spelling of an account would have a limit of its own.
    let account = account.to_lowercase();
    let decision = logins.check(Key::from(&*account).and(Key::ip(peer.ip()))).await?;
    decision.require()?;

    if !has_password(&account, password) {
        return Err(StatusCode::UNAUTHORIZED.into());
    }
    // If the store fails now, one attempt too many is counted. The password is right all the same.
    let _ = decision.take_receipt().refund().await;
    Ok("welcome\n")
}

pub(crate) fn app() -> Router {
    let logins = Policy::new("logins", SlidingLog::new(3, Duration::from_secs(15 * 60)));
    let logins = Limiter::new(MemoryStore::new(), logins);
    Router::new().route("/login", post(login)).with_state(logins)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app().into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
