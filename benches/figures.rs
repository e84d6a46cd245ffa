//! The figures in the documentation of the module `limit`: memory and commands in Redis, admissions and denials on different
//! traffic. They are the same on every run. `cargo bench --bench figures --all-features`.

#[path = "../tests/it/support/clock.rs"]
#[allow(dead_code)]
mod clock;
#[path = "../tests/it/support/connected.rs"]
#[allow(dead_code)]
mod connected;
#[path = "../tests/it/support/redis.rs"]
#[allow(dead_code)]
mod redis;
#[path = "../tests/it/support/traffic.rs"]
mod traffic;
#[path = "../tests/it/support/usage.rs"]
#[allow(dead_code)]
mod usage;

use tower_quota::{FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket};

use self::{
    redis::Redis,
    traffic::Traffic,
    usage::{Usage, limits},
};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let redis = Redis::start();
    println!("| limit | bytes, 1 admitted | 100 admitted | full | commands, admitted | after expiry | denied |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    for limit in limits() {
        println!("| `{limit}` | {} |", Usage::of(&limit, &redis).await);
    }

    println!();
    println!("| limit | traffic | most in any window | admitted over | denied with room | with room for ten |");
    println!("| --- | --- | ---: | ---: | ---: | ---: |");
    let (quota, window) = (Traffic::LIMIT, Traffic::WINDOW);
    let limits: [Limit; 7] = [
        SlidingLog::new(quota, window).into(),
        SlidingLog::new(quota, window).precision(1_000).into(),
        SlidingLog::new(quota, window).precision(100).into(),
        SlidingCounter::new(quota, window).into(),
        FixedWindow::new(quota, window).into(),
        FixedWindow::new(quota, window).aligned().into(),
        TokenBucket::new(quota, window).into(),
    ];
    for limit in limits {
        for traffic in Traffic::ALL {
            let tally = traffic.meet(&limit).await;
            println!("| `{limit}` | {traffic:?} | {tally} |");
        }
    }
}
