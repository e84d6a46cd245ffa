//! The lease of a request that has slots: how it is taken, renewed and ended.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::{
    store::{Charge, LeaseId, Operation, Owed, Store, StoreFuture, StoreRequest},
    sync::{Mutex, MutexGuard},
};

/// A lease that holds slots of one policy.
pub(crate) struct Lease {
    /// Where the slots are counted.
    store: Arc<dyn Store>,
    pub(super) charge: Charge,
    id: LeaseId,
    #[cfg(feature = "admin")]
    pub(super) taken_at: Instant,
    length: Duration,
    progress: Mutex<Progress>,
}

struct Progress {
    /// When the last renewal that was confirmed was sent.
    renewed_at: Instant,
    /// Whether the store has replied that the slots are not held.
    lost: bool,
    renewing: bool,
    ended: bool,
    /// Its release, until that is sent.
    owed: Option<Owed>,
}

impl Lease {
    /// A lease that was just taken; `None` if the limit has none.
    pub(crate) fn new(store: Arc<dyn Store>, charge: Charge, made_at: Instant, release: Owed) -> Option<Self> {
        Some(Self {
            length: charge.limit().lease_length()?,
            store,
            id: charge.lease?,
            charge,
            #[cfg(feature = "admin")]
            taken_at: made_at,
            progress: Mutex::new(Progress {
                renewed_at: made_at,
                lost: false,
                renewing: false,
                ended: false,
                owed: Some(release),
            }),
        })
    }

    pub(super) fn id(&self) -> LeaseId {
        self.id
    }

    /// How long after a renewal the next one is due. It is looked after the same time again, so that a lease is renewed at least
    /// every third of its length, and most requests end before.
    pub(super) fn renewal_pause(&self) -> Duration {
        self.length / 6
    }

    pub(super) fn policy(&self) -> &str {
        self.charge.policy()
    }

    pub(super) fn is_lost(&self) -> bool {
        let progress = self.progress();
        progress.lost || progress.renewed_at.elapsed() > self.length
    }

    /// Ends it. Returns the release for the caller to send: after a renewal that is in flight, its task does.
    pub(super) fn end(&self) -> Option<Owed> {
        let mut progress = self.progress();
        progress.ended = true;
        let release = progress.owed.take()?.due();
        if progress.renewing {
            progress.owed = Some(release);
            return None;
        }
        Some(release)
    }

    /// Whether both are counted in one store.
    pub(super) fn shares_store(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.store, &other.store)
    }

    /// Sends an operation on leases that share their store.
    pub(super) fn send(operation: Operation, leases: &[Arc<Self>]) -> StoreFuture {
        let requests = leases.iter().map(|lease| StoreRequest::new(operation, [&lease.charge]));
        let requests: SmallVec<[StoreRequest<'_>; 1]> = requests.collect();
        leases[0].store.decide(&requests)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A renewal that is in flight, until it is finished.
pub(super) struct Renewal(Option<Arc<Lease>>);

impl Renewal {
    /// Begins a renewal, if it is due and none is in flight.
    pub(super) fn begin(lease: &Arc<Lease>) -> Option<Self> {
        let mut progress = lease.progress();
        if progress.ended || progress.renewing || progress.renewed_at.elapsed() < lease.renewal_pause() {
            return None;
        }
        progress.renewing = true;
        drop(progress);
        Some(Self(Some(lease.clone())))
    }

    /// Sends it, and records the reply. Without one, the next renewal is sent as if this one had not been.
    pub(super) async fn run(mut self) {
        let sent_at = Instant::now();
        let response = Lease::send(Operation::RenewLease, self.0.as_slice()).await;
        let held = response.map(|response| response.outcomes().first().is_some_and(|outcome| outcome.allowed));
        if let Some((ended, release)) = self.finish(held.ok().map(|held| (held, sent_at))) {
            release.end(&Lease::send(Operation::EndLease, &[ended]).await);
        }
    }

    /// Records whether the lease is held, and as of when. Returns the lease and its release if it was ended meanwhile.
    fn finish(&mut self, reply: Option<(bool, Instant)>) -> Option<(Arc<Lease>, Owed)> {
        let lease = self.0.take()?;
        let mut progress = lease.progress();
        if let Some((held, sent_at)) = reply {
            progress.lost = !held;
            if held {
                progress.renewed_at = sent_at;
            }
        }
        progress.renewing = false;
        let release = if progress.ended { progress.owed.take() } else { None };
        drop(progress);
        Some((lease, release?))
    }
}

/// Where the runtime ends, another renewal may follow.
impl Drop for Renewal {
    fn drop(&mut self) {
        self.finish(None);
    }
}
