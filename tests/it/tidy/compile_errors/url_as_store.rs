//~ `&str` does not store counts
//~ use `MemoryStore::new()`, or `RedisStore::connect("redis://127.0.0.1:6379").await?`

use tower_quota::RateLimitLayer;

fn main() {
    let _ = RateLimitLayer::new("redis://127.0.0.1:6379", []);
}
