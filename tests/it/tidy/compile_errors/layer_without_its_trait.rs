//~ use tower_quota::Layer;

use tower_quota::{MemoryStore, RateLimitLayer};

fn main() {
    let _ = RateLimitLayer::new(MemoryStore::new(), []).layer("a service");
}
