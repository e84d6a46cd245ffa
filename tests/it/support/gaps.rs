use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use fred::interfaces::ClientLike;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::Redis;

/// The longest time in which this runtime had no reply of a server: one of them, or the machine, was busy with something else.
pub(crate) struct Gaps {
    longest_ms: Arc<AtomicU64>,
    _pings: JoinSet<()>,
}

impl Gaps {
    /// Measures them from now on.
    pub(crate) async fn of(redis: &Redis) -> Self {
        let (client, longest_ms) = (redis.client().await.clone(), Arc::<AtomicU64>::default());
        let (mut pings, longest) = (JoinSet::new(), longest_ms.clone());
        let mut last = Instant::now();
        pings.spawn(async move {
            loop {
                let pong: Result<(), _> = client.ping(None).await;
                pong.expect("the server replies");
                longest.fetch_max(last.elapsed().as_millis() as u64 + 1, Ordering::Relaxed);
                last = Instant::now();
                sleep(Duration::from_millis(5)).await;
            }
        });
        Self {
            longest_ms,
            _pings: pings,
        }
    }

    pub(crate) fn longest(&self) -> Duration {
        Duration::from_millis(self.longest_ms.load(Ordering::Relaxed))
    }
}
