//~ `&str` is not a response format
//~ implement `ResponseFormat`, pass a closure

use tower_quota::{MemoryStore, RateLimitLayer};

fn main() {
    let _ = RateLimitLayer::new(MemoryStore::new(), []).format("Too many requests.");
}
