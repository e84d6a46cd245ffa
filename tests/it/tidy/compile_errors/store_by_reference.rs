//~ Store` does not store counts
//~ a store is passed by value: its clones share their counts, and an `Arc<dyn Store>` can be cloned too

use tower_quota::{RateLimitLayer, store::Store};

fn limit(store: &dyn Store) -> RateLimitLayer {
    RateLimitLayer::new(store, [])
}

fn main() {
    let _ = limit;
}
