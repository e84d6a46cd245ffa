//! The messages that wake lines of this process.
//!
//! The script publishes the number of a line to the channel of its process, such as `quota:1:wake:4503599627370495`, when its first
//! request may fit. Messages may be lost, and forged: the first request of a line is checked each second in any case, and a wake is
//! but another check.

use std::{
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::time::sleep;

use super::{backend::Backend, task::AbortOnDrop};
use crate::{
    store::{
        LeaseId,
        wakes::{wake_all, wake_line},
    },
    sync::lock,
};

/// The subscription of a store, which begins with the first request that waits.
#[derive(Default)]
pub(super) struct Subscription(Mutex<Option<AbortOnDrop<()>>>);

/// What a subscription receives.
pub(super) enum Event<'a> {
    /// Messages are received from now on.
    Subscribed,
    Message(&'a [u8]),
}

/// The pause between two attempts to subscribe. After each refusal it is twice as long, up to this.
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

impl Subscription {
    /// Subscribes in a task, unless one runs. It ends with the store.
    pub(super) fn begin(&self, backend: &Arc<Backend>) {
        let mut task = lock(&self.0);
        if task.as_ref().is_none_or(|task| task.0.is_finished()) {
            let channel = backend.key_format.wake_channel(LeaseId::process());
            *task = Some(AbortOnDrop(
                backend.runtime.spawn(keep_subscribed(Arc::downgrade(backend), channel)),
            ));
        }
    }
}

/// The attempts in a row that fail before that is logged.
const UNLOGGED_FAILURES: u32 = 10;

async fn keep_subscribed(backend: Weak<Backend>, channel: String) {
    let (failed, refused, is_logged) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false));
    let receive = |event: Event<'_>| match event {
        Event::Subscribed => {
            failed.store(0, Ordering::Relaxed);
            refused.store(0, Ordering::Relaxed);
            is_logged.store(false, Ordering::Relaxed);
            wake_all();
        }
        Event::Message(number) => {
            let number = std::str::from_utf8(number).ok().and_then(|number| number.parse().ok());
            if let Some(number) = number {
                wake_line(number);
            }
        }
    };
    loop {
        let Some(backend) = backend.upgrade() else { return };
        let failure = backend.client.receive_messages(&channel, &receive).await;
        drop(backend);
        let is_refused = !(failure.is_no_reply() || failure.is_passing());
        let is_due = failed.fetch_add(1, Ordering::Relaxed) + 1 >= UNLOGGED_FAILURES || is_refused;
        // One failure is logged until messages are received.
        if is_due && !is_logged.swap(true, Ordering::Relaxed) {
            let error = &*failure.cause();
            tracing::info!(
                error,
                "no messages wake requests which wait; these wait up to a second longer"
            );
        }
        let before = refused.load(Ordering::Relaxed).min(7);
        refused.store(if is_refused { before + 1 } else { 0 }, Ordering::Relaxed);
        let pause = if is_refused { PAUSE * 2_u32.pow(before) } else { PAUSE };
        sleep(pause.min(LONGEST_PAUSE)).await;
    }
}
