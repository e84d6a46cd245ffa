//~ `Policy<()>` is not a policy with a key, nor a list of them
//~ a policy has a key that requests are counted under: `.key(key::ip())`, or `.key(key::constant("all"))`

use tower_quota::{MemoryStore, Policy, RateLimitLayer, SlidingLog};

fn main() {
    let _ = RateLimitLayer::new(MemoryStore::new(), Policy::new("hello", SlidingLog::per_minute(5)));
}
