//! Shows how clients handle the responses of tower-quota. See `README.md`.

mod browser;
mod retries;
mod upload;

#[tokio::main]
async fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("browser") => browser::run().await,
        Some("retries") => retries::run().await,
        Some("upload") => upload::run().await,
        _ => eprintln!("usage: clients browser | retries | upload"),
    }
}

/// A file of this package.
fn file(path: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}
