//! A limit without HTTP, by the crate that tower_governor is made of. A mail that is not sent counts: nothing is given back.

use std::{sync::Arc, thread, time::Duration};

// limits
use governor::{
    DefaultKeyedRateLimiter, Quota, RateLimiter,
    clock::{Clock, DefaultClock},
};

fn mails() -> Arc<DefaultKeyedRateLimiter<String>> {
    let quota = Quota::with_period(Duration::from_secs(3_600) / 3).expect("a period above 0");
    let mails = Arc::new(RateLimiter::keyed(quota.allow_burst(3.try_into().expect("above 0"))));
    let limiter = mails.clone();
    thread::spawn(move || {
        loop {
            thread::sleep(Duration::from_secs(60));
            limiter.retain_recent();
        }
    });
    mails
}
// rest

fn send(to: &str) -> Result<(), String> {
    if to == "unreachable" {
        Err("no route".into())
    } else {
        Ok(())
    }
}

fn mail(mails: &DefaultKeyedRateLimiter<String>, to: &str) -> Result<(), String> {
    // limits
    if let Err(denied) = mails.check_key(&to.to_owned()) {
        let wait = denied.wait_time_from(DefaultClock::default().now());
        return Err(format!("too many mails; retry in {wait:?}"));
    }
    // rest
    send(to)
}

fn main() {
    let mails = mails(); // limits
    for to in [
        "ada",
        "unreachable",
        "unreachable",
        "unreachable",
        "unreachable",
        "ada",
        "ada",
        "ada",
    ] {
        println!("{to} {:?}", mail(&mails, to));
    }
}
