//! The messages that wake lines of this process.
//!
//! The script publishes the number of a line to the channel of its process, such as `quota:1:wake:4503599627370495`, when its first
//! request may fit. Messages may be lost, and forged: the first request of a line is checked each second in any case, and a wake is
//! but another check.

use std::{
    mem,
    sync::{Arc, Mutex, Weak},
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
    let (mut failed, mut refused, mut is_logged) = (0_u32, 0, false);
    loop {
        let Some(backend) = backend.upgrade() else { return };
        let mut receive = |event: Event<'_>| match event {
            Event::Subscribed => {
                (failed, refused, is_logged) = (0, 0, false);
                wake_all();
            }
            Event::Message(number) => {
                let number = std::str::from_utf8(number).ok().and_then(|number| number.parse().ok());
                if let Some(number) = number {
                    wake_line(number);
                }
            }
        };
        let failure = backend.client.receive_messages(&channel, &mut receive).await;
        drop(backend);
        let is_refused = !(failure.is_no_reply() || failure.is_passing());
        failed = failed.saturating_add(1);
        // One failure is logged until messages are received.
        if (failed >= UNLOGGED_FAILURES || is_refused) && !mem::replace(&mut is_logged, true) {
            let error = &*failure.cause();
            tracing::info!(
                error,
                "no messages wake requests which wait; these wait up to a second longer"
            );
        }
        let pause = if is_refused { PAUSE * 2_u32.pow(refused) } else { PAUSE };
        refused = if is_refused { 7.min(refused + 1) } else { 0 };
        sleep(pause.min(LONGEST_PAUSE)).await;
    }
}
