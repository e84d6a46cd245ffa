//! Requests wait in a line: nothing of them is counted before they are admitted, in every store.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use fastrand::Rng;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use tower_quota::{
    Limit, Limiter, MemoryStore, Policy, RedisStore, SlidingLog, TokenBucket,
};

use crate::support::Redis;

const SECOND: Duration = Duration::from_secs(1);

fn log_and_bucket(rate: u64) -> [Limit; 2] {
    [
        SlidingLog::per_second(rate).into(),
        TokenBucket::per_second(rate).burst(1).into(),
    ]
}

/// How many of the calls of patient callers are admitted in this time.
async fn admitted_of_callers(limiters: Vec<Limiter>, callers: usize, patience: f64, length: Duration) -> usize {
    let (start, admitted) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for caller in 0..callers {
        let (limiter, admitted) = (limiters[caller % limiters.len()].clone(), admitted.clone());
        let mut rng = Rng::with_seed(caller as u64);
        tasks.spawn(async move {
            sleep(Duration::from_secs_f64(rng.f64() / 10.0)).await;
            while start.elapsed() < length {
                let patience = Duration::from_secs_f64(patience * (2.0 + 2.0 * rng.f64()) / 3.0);
                let call = limiter.acquire("k").into_future();
                let end = (Instant::now() + patience).min(start + length);
                match timeout(end - Instant::now(), call).await {
                    Ok(Ok(_)) => drop(admitted.fetch_add(1, Ordering::Relaxed)),
                    // A caller that is denied tries again after a while.
                    Ok(Err(_)) => sleep_until((Instant::now() + SECOND / 10).min(end)).await,
                    Err(_) => {}
                }
            }
        });
    }
    tasks.join_all().await;
    admitted.load(Ordering::Relaxed)
}

#[tokio::test(start_paused = true)]
async fn callers_that_leave_take_nothing_with_them() {
    for limit in log_and_bucket(20) {
        let policy = Policy::new("p", limit.clone()).wait_up_to(3 * SECOND);
        let limiter = Limiter::new(MemoryStore::new(), policy);
        let admitted = admitted_of_callers(vec![limiter], 40, 1.0, 10 * SECOND).await;
        assert!(admitted >= 190, "{limit}: {admitted} of 200");
    }
}

#[tokio::test]
async fn callers_of_redis_that_leave_take_nothing_with_them() {
    let redis = Redis::start();
    for limit in log_and_bucket(20) {
        let mut limiters = Vec::new();
        for _ in 0..2 {
            let store = RedisStore::connect(&redis.url()).await.expect("Redis replies");
            limiters.push(Limiter::new(store, Policy::new("p", limit.clone()).wait_up_to(3 * SECOND)));
        }
        let admitted = admitted_of_callers(limiters, 40, 1.0, 10 * SECOND).await;
        assert!(admitted >= 190, "{limit}: {admitted} of 200");
    }
}
