//~ `ClientIp` is not a key extractor
//~ `key::client_ip(..)` requires the networks of your proxies: `key::client_ip(..).trusted(["10.0.0.0/8"])?`

use tower_quota::{
    Policy, SlidingLog,
    key::{self, ClientIpSource},
};

fn main() {
    let client = key::client_ip(ClientIpSource::XForwardedFor);
    let _ = Policy::new("hello", SlidingLog::per_minute(5)).key((client, key::path()));
}
