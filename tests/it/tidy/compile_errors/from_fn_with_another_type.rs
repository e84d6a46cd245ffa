//~ a function for `key::from_fn` cannot return `Account`
//~ return a `Key`, a `String` or a `u64`, an `Option` of one, or a `Result` of either with a `KeyError`

use tower_quota::key;

#[derive(Clone)]
struct Account;

fn main() {
    let _ = key::from_fn(|parts| parts.extensions.get::<Account>().cloned());
}
