//~ is not a key extractor
//~ or `key::from_fn(|parts| ..)`

use tower_quota::{Policy, SlidingLog};

fn main() {
    let _ = Policy::new("hello", SlidingLog::per_minute(5)).key(|_: &str| 42);
}
