//! Limits that follow their file: the program applies a change within two seconds, without a restart and with all counts.
//!
//! ```console
//! $ cargo run --example reload --features axum,file
//!
//! $ curl -i http://127.0.0.1:3000/search
//! HTTP/1.1 200 OK
//! ratelimit-policy: "search";q=3;w=60
//! ratelimit: "search";r=2;t=60
//!
//! $ sed -i s,3/min,10/min, limits-of-search.toml
//! $ curl -i http://127.0.0.1:3000/search
//! HTTP/1.1 200 OK
//! ratelimit-policy: "search";q=10;w=60
//! ratelimit: "search";r=8;t=60
//! ```
//!
//! A file with a wrong line changes nothing, and is logged as a warning.

use std::{
    env,
    error::Error,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use axum::{Router, routing::get};
use tokio::net::TcpListener;
use tower_quota::{ConfigError, MemoryStore, Policies};

const LIMITS: &str = r#"
[policies.search]
limit = "sliding-log 3/min"
key = "ip"
"#;

pub(crate) fn app(file: &Path) -> Result<Router, ConfigError> {
    let policies = Policies::watch(file)?;
    policies.reload_on_change(Duration::from_secs(1))?;
    let limit = policies.layer(MemoryStore::new(), ["search"])?;
    Ok(Router::new().route("/search", get(async || "results\n").layer(limit)))
}

pub(crate) fn write_limits(file: &Path) -> std::io::Result<()> {
    fs::write(file, LIMITS)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let file = PathBuf::from("limits-of-search.toml");
    write_limits(&file)?;
    let app = app(&file)?;

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
