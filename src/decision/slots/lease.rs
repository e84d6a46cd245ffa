//! The lease of a request that has slots: how it is taken, renewed and ended.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::{
    Key, Limit,
    store::{Charge, ChargeLine, Failover, LeaseId, Operation, Owed, Store, StoreFuture, StoreRequest},
    sync::{Mutex, MutexGuard},
};

/// The id of a lease that a request is about to take.
pub(crate) struct Ticket {
    pub(crate) id: LeaseId,
    /// It does not expire earlier than its length after this.
    pub(super) made_at: Instant,
}

impl Ticket {
    /// That of a request by this limit, if it has slots.
    #[inline]
    pub(crate) fn of(limit: &Limit) -> Option<Arc<Self>> {
        limit.is_held().then(Self::new)
    }

    #[cold]
    fn new() -> Arc<Self> {
        Self::made_now(LeaseId::random())
    }

    fn made_now(id: LeaseId) -> Arc<Self> {
        let made_at = Instant::now();
        Arc::new(Self { id, made_at })
    }
}

/// A lease that holds slots of one policy.
pub(crate) struct Lease {
    place: Place,
    policy: Arc<str>,
    limit: Limit,
    pub(super) key: Key,
    pub(super) cost: u64,
    /// The line of the requests that wait for these slots.
    line: Option<ChargeLine>,
    id: LeaseId,
    #[cfg(feature = "admin")]
    pub(super) taken_at: Instant,
    length: Duration,
    progress: Mutex<Progress>,
}

/// Where slots are counted.
#[derive(Clone)]
pub(crate) enum Place {
    Store(Arc<dyn Store>),
    /// In this process, since the store failed.
    Process(Arc<Failover>),
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
    pub(crate) fn new(
        place: Place,
        (policy, limit): (Arc<str>, Limit),
        key: Key,
        cost: u64,
        ticket: &Ticket,
    ) -> Option<Self> {
        Some(Self {
            length: limit.lease_length()?,
            place,
            policy,
            limit,
            key,
            cost,
            line: None,
            id: ticket.id,
            #[cfg(feature = "admin")]
            taken_at: ticket.made_at,
            progress: Mutex::new(Progress {
                renewed_at: ticket.made_at,
                lost: false,
                renewing: false,
                ended: false,
                owed: None,
            }),
        })
    }

    pub(crate) fn owing(self, release: Owed) -> Self {
        self.progress().owed = Some(release);
        self
    }

    /// With the line of its key.
    pub(crate) fn in_line(self, line: Option<ChargeLine>) -> Self {
        Self { line, ..self }
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
        &self.policy
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

    /// Whether both are counted in one place.
    pub(super) fn shares_place(&self, other: &Self) -> bool {
        match (&self.place, &other.place) {
            (Place::Store(one), Place::Store(other)) => Arc::ptr_eq(one, other),
            (Place::Process(one), Place::Process(other)) => Arc::ptr_eq(one, other),
            (Place::Store(_), Place::Process(_)) | (Place::Process(_), Place::Store(_)) => false,
        }
    }

    /// Sends an operation on leases that share their place.
    pub(super) fn send(operation: Operation, leases: &[Arc<Self>]) -> StoreFuture {
        let charges: SmallVec<[[Charge<'_>; 1]; 1]> = leases.iter().map(|lease| [lease.charge()]).collect();
        let requests = charges.iter().map(|charges| StoreRequest::new(operation, charges));
        let requests: SmallVec<[StoreRequest<'_>; 1]> = requests.collect();
        match &leases[0].place {
            Place::Store(store) => store.decide(&requests),
            Place::Process(failover) => failover.decide(&requests),
        }
    }

    fn charge(&self) -> Charge<'_> {
        let charge = Charge::new(&self.policy, &self.limit, &self.key, self.cost);
        charge.in_line(self.line).lease(self.id)
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
