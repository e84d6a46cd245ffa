//! One mistake a function, and the sentences that the compiler prints for it.

use tower_quota::{
    MemoryStore, Policy, RateLimitLayer, SlidingLog,
    key::{self, ClientIpSource},
    store::Store,
};

#[derive(Clone)]
pub struct Account;

//~ `ClientIp` is not a key extractor
//~ `key::client_ip(..)` requires the networks of your proxies: `key::client_ip(..).trusted(["10.0.0.0/8"])?`
pub fn a_client_ip_without_trusted_networks() {
    let client = key::client_ip(ClientIpSource::XForwardedFor);
    let _ = Policy::new("hello", SlidingLog::per_minute(5)).key((client, key::path()));
}

//~ is not a key extractor
//~ or `key::from_fn(|parts| ..)`
pub fn a_closure_as_a_key() {
    let _ = Policy::new("hello", SlidingLog::per_minute(5)).key(|_: &str| 42);
}

//~ a function for `key::from_fn` cannot return `Account`
//~ return a `Key`, a `String` or an integer, an `Option` of one, or a `Result` of either with a `KeyError`
pub fn a_function_that_returns_another_type() {
    let _ = key::from_fn(|parts| parts.extensions.get::<Account>().cloned());
}

//~ a function for `key::from_fn` cannot return `&str`
//~ `&str` is not a key
//~ copy text that is borrowed from the request with `Key::from(text)`
pub fn a_function_that_returns_borrowed_text() {
    let _ = key::from_fn(|parts| parts.extensions.get::<String>().map(String::as_str));
}

//~ use tower_quota::Layer;
pub fn a_layer_without_its_trait() {
    let _ = RateLimitLayer::new(MemoryStore::new(), []).layer("a service");
}

//~ `&[Policy<Arc<dyn KeyExtractor>>]` is not a policy with a key, nor a list of them
//~ a list is an array or a `Vec`, by value
pub fn a_list_by_reference(policies: &[Policy]) -> RateLimitLayer {
    RateLimitLayer::new(MemoryStore::new(), policies)
}

//~ `Policy<()>` is not a policy with a key, nor a list of them
//~ a policy has a key that requests are counted under: `.key(key::ip())`, or `.key(key::constant("all"))`
pub fn a_policy_without_a_key() {
    let _ = RateLimitLayer::new(MemoryStore::new(), Policy::new("hello", SlidingLog::per_minute(5)));
}

//~ Store` does not store counts
//~ a store is passed by value: its clones share their counts, and an `Arc<dyn Store>` can be cloned too
pub fn a_store_by_reference(store: &dyn Store) -> RateLimitLayer {
    RateLimitLayer::new(store, [])
}

//~ `&str` is not a response format
//~ implement `ResponseFormat`, pass a closure
pub fn a_text_as_a_format() {
    let _ = RateLimitLayer::new(MemoryStore::new(), []).format("Too many requests.");
}

//~ `&str` does not store counts
//~ use `MemoryStore::new()`, or `RedisStore::connect("redis://127.0.0.1:6379").await?`
pub fn a_url_as_a_store() {
    let _ = RateLimitLayer::new("redis://127.0.0.1:6379", []);
}
