use std::{
    sync::{Arc, Mutex},
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
    /// The longest so far, and when the last reply came.
    longest: Arc<Mutex<(Duration, Instant)>>,
    _pings: JoinSet<()>,
}

impl Gaps {
    /// Measures them from now on.
    pub(crate) async fn of(redis: &Redis) -> Self {
        let client = redis.client().await.clone();
        let longest = Arc::new(Mutex::new((Duration::ZERO, Instant::now())));
        let (mut pings, measured) = (JoinSet::new(), longest.clone());
        pings.spawn(async move {
            loop {
                let pong: Result<(), _> = client.ping(None).await;
                pong.expect("the server replies");
                {
                    let mut measured = measured.lock().expect("no panic");
                    *measured = (measured.0.max(measured.1.elapsed()), Instant::now());
                }
                sleep(Duration::from_millis(5)).await;
            }
        });
        Self { longest, _pings: pings }
    }

    /// The longest so far, or that which has not ended.
    pub(crate) fn longest(&self) -> Duration {
        let (longest, last) = *self.longest.lock().expect("no panic");
        longest.max(last.elapsed())
    }
}
