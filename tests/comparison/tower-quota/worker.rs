//! A worker without HTTP: a mail that is not sent does not count, and an estimated cost is settled.

use std::{env, error::Error};

use tower_quota::{Limiter, Policy, RedisStore, SlidingLog, store::Store}; // limits

type Outcome<T> = Result<T, Box<dyn Error>>;

pub(crate) struct Worker {
    // limits
    mails: Limiter,
    tokens: Limiter,
    // rest
}

impl Worker {
    pub(crate) fn new(store: impl Store + Clone) -> Self {
        // limits
        let mails = Limiter::new(store.clone(), Policy::new("mails", SlidingLog::per_hour(3)));
        let tokens = Limiter::new(store, Policy::new("tokens", SlidingLog::per_hour(10_000)));
        // rest
        Self { mails, tokens }
    }

    pub(crate) async fn mail(&self, to: &str, send: impl AsyncFnOnce() -> Outcome<()>) -> Outcome<()> {
        // limits
        let decision = self.mails.check(to).await?;
        decision.require()?;
        // rest
        let sent = send().await;
        // limits
        if sent.is_err() {
            decision.take_receipt().refund().await?;
        }
        // rest
        sent
    }

    /// The answer of a model. The estimate and the cost that the model returns are in tokens.
    pub(crate) async fn complete(
        &self,
        user: &str,
        estimate: u64,
        model: impl AsyncFnOnce() -> (String, u64),
    ) -> Outcome<String> {
        // limits
        let decision = self.tokens.check_n(user, estimate).await?;
        decision.require()?;
        // rest
        let (answer, cost) = model().await;
        // limits
        decision.take_receipt().settle(cost).await?;
        // rest
        Ok(answer)
    }
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let store = RedisStore::connect(&env::var("REDIS_URL")?).await?; // limits
    let worker = Worker::new(store);
    worker.mail("ada@example.org", async || Ok(())).await?;
    let answer = worker
        .complete("ada", 300, async || ("an answer".to_owned(), 120))
        .await?;
    println!("{answer}");
    Ok(())
}
