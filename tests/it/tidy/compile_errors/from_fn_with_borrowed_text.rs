//~ a function for `key::from_fn` cannot return `&str`
//~ `&str` is not a key
//~ copy text that is borrowed from the request with `Key::from(text)`

use tower_quota::key;

fn main() {
    let _ = key::from_fn(|parts| parts.extensions.get::<String>().map(String::as_str));
}
