//~ `&[Policy]` is not a policy with a key, nor a list of them
//~ a list is an array or a `Vec`, by value

use tower_quota::{MemoryStore, Policy, RateLimitLayer};

fn limit(policies: &[Policy]) -> RateLimitLayer {
    RateLimitLayer::new(MemoryStore::new(), policies)
}

fn main() {
    let _ = limit(&[]);
}
