//! The denied subjects of a store in Redis: a sorted set for each policy, in which each process counts once a second what it has
//! denied.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::sleep;

use super::{
    backend::Backend,
    call::ScriptCall,
    failure::Failure,
    reply::{member, number},
    script::DENIED_SUBJECTS,
    trial::run_beside,
};
use crate::{
    Key,
    store::{
        ErrorKind, StoreError,
        denied_subjects::{DeniedSubjects, WeakDeniedSubjects},
        space_saving::{Count, Summary},
    },
};

/// Counts and reads the denied subjects in Redis.
pub(in crate::store) struct RedisDenied {
    backend: Arc<Backend>,
}

/// The pause between two calls.
const PAUSE: Duration = Duration::from_secs(1);

/// The most subjects of a policy.
const MOST: usize = 1_000;

/// How long a policy is kept after its last denial.
const LASTS: Duration = Duration::from_secs(24 * 3_600);

impl RedisDenied {
    pub(super) fn new(backend: Arc<Backend>) -> Self {
        Self { backend }
    }

    /// The key as it is stored.
    #[cfg(feature = "admin")]
    pub(in crate::store) fn stored_key<'a>(&self, key: &'a Key) -> std::borrow::Cow<'a, Key> {
        self.backend.key_format.stored_key(key)
    }

    /// Counts what a process has denied. It is sent once: after a failure it may be counted or not.
    async fn count(&self, policy: &str, denied: &Summary<Key>) -> Result<(), StoreError> {
        let numbers = [
            0,
            MOST as u64,
            LASTS.as_millis() as u64,
            denied.total,
            denied.most_of_others,
        ];
        let subjects = denied.counts.iter().flat_map(|Count { item, count, error }| {
            [
                self.backend.key_format.stored_key(item).to_string(),
                (count - error).to_string(),
            ]
        });
        let arguments = numbers.map(|number| number.to_string()).into_iter().chain(subjects);
        self.call(policy, arguments).await.map(drop)
    }

    /// The denials of a policy by all processes, of so many subjects, and since when they are counted, if there are any.
    pub(in crate::store) async fn read(
        &self,
        policy: &str,
        most: usize,
    ) -> Result<Option<(Duration, Summary<Key>)>, StoreError> {
        let reply = self
            .call(policy, [most.min(MOST), MOST].map(|number| number.to_string()))
            .await?;
        summary(&reply).ok_or_else(|| Failure::malformed_reply().into())
    }

    async fn call(&self, policy: &str, arguments: impl IntoIterator<Item = String>) -> Result<Bytes, StoreError> {
        let mut call = ScriptCall::probe(Some(self.backend.key_format.denied_key(policy)));
        call.arguments.extend(arguments.into_iter().map(Bytes::from));
        run_beside(&self.backend, &DENIED_SUBJECTS, &call).await
    }
}

/// The denials in a reply. What is no key is left out.
fn summary(mut bytes: &[u8]) -> Option<Option<(Duration, Summary<Key>)>> {
    let [since, total, fewest, unlisted, count] = [(); 5].map(|()| number(&mut bytes).map(|number| number as u64));
    let (since, fewest, unlisted) = (Duration::from_micros(since?), fewest?, unlisted?);
    let mut counts = Vec::new();
    for _ in 0..count? {
        let denials = number(&mut bytes)? as u64;
        let key = std::str::from_utf8(member(&mut bytes)?).ok().and_then(Key::from_stored);
        counts.extend(key.map(|item| Count {
            item,
            count: denials.saturating_add(unlisted),
            // A subject that has replaced another one has its denials too, which were not more than the fewest now.
            error: fewest.min(denials).saturating_add(unlisted),
        }));
    }
    let summary = Summary {
        total: total?,
        counts,
        most_of_others: fewest.saturating_add(unlisted),
    };
    Some((!since.is_zero()).then_some((since, summary)))
}

/// Sends what is denied until the store is dropped. It logs the first of several refusals; that Redis is away is logged by its
/// health.
pub(super) async fn send(subjects: WeakDeniedSubjects) {
    let mut is_refused = false;
    loop {
        let Some(subjects) = subjects.upgrade() else { return };
        for (policy, sketch) in subjects.take_unsent() {
            match subjects.redis().count(&policy, &sketch.summary()).await {
                Ok(()) => is_refused = false,
                Err(error) if error.kind() == ErrorKind::Refused && !is_refused => {
                    #[cfg(feature = "tracing")]
                    tracing::warn!(%error, "the denied subjects cannot be counted in Redis; reports lack those of this process");
                    is_refused = true;
                }
                Err(_) => {}
            }
        }
        drop(subjects);
        sleep(PAUSE).await;
    }
}

/// Verifies that Redis runs the script.
pub(super) async fn verify(subjects: &DeniedSubjects) -> Result<(), StoreError> {
    subjects.redis().read("", 0).await.map(drop)
}
