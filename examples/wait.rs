//! A worker that sends ten mails a second, as the mail server of another company admits. With a `RedisStore`, all replicas of the
//! worker share the limit.
//!
//! ```console
//! $ cargo run --example wait
//! 30 mails were sent in 2.0 s
//! ```
//!
//! The tasks of the worker wait for their turns, in the order in which they have taken a mail from the queue. Each mail is one
//! check, without polling. A mail that would wait for more than five seconds goes back to the queue at once.

use std::{error::Error, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tower_quota::{AcquireError, Limiter, MemoryStore, Policy, SlidingLog};

/// A placeholder for a client of SMTP.
async fn send(_mail: u32) {
    sleep(Duration::from_millis(20)).await;
}

/// Sends a mail as soon as the limit admits it, or returns when to try again.
async fn work(limiter: Limiter, mail: u32) -> Result<Instant, AcquireError> {
    let _permit = limiter.acquire("smtp.example.com").await?;
    let sent_at = Instant::now();
    send(mail).await;
    Ok(sent_at)
}

pub(crate) async fn run() -> Result<Duration, Box<dyn Error>> {
    let mails = Policy::new("mails", SlidingLog::per_second(10)).wait_up_to(Duration::from_secs(5));
    let limiter = Limiter::new(MemoryStore::new(), mails);

    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for mail in 0..30 {
        tasks.spawn(work(limiter.clone(), mail));
    }
    let mut sent = tasks.join_all().await.into_iter().collect::<Result<Vec<_>, _>>()?;
    sent.sort();

    // Ten at once, and ten more in each second after that.
    assert_eq!(sent.len(), 30);
    assert!(sent[9] - start < Duration::from_millis(500));
    assert!(sent[10] - start >= Duration::from_secs(1));
    assert!(sent[20] - start >= Duration::from_secs(2));

    let denied = limiter.acquire("smtp.example.com").max_wait(Duration::ZERO).await;
    assert!(matches!(denied, Err(AcquireError::Denied(_))));
    Ok(sent[29] - start)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let took = run().await?;
    println!("30 mails were sent in {:.1} s", took.as_secs_f64());
    Ok(())
}
