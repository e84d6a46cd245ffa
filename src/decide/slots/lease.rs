//! The lease of a request that has slots, how it is taken, renewed and ended, and the task that renews those of this process.

use std::{collections::HashMap, sync::Arc, time::Duration};

use smallvec::SmallVec;
use tokio::{
    runtime::{Handle, Id},
    sync::Notify,
    time::{Instant, sleep, timeout_at},
};

#[cfg(feature = "admin")]
use crate::Key;
use crate::{
    store::{Charge, LeaseId, Operation, Owed, PerStore, Store, StoreFuture, StoreRequest},
    sync::{Mutex, MutexGuard, unpoisoned},
};

/// A lease that holds slots of one policy.
pub(crate) struct Lease {
    /// Where the slots are counted.
    pub(super) store: Arc<dyn Store>,
    pub(super) charge: Charge,
    id: LeaseId,
    #[cfg(feature = "admin")]
    taken_at: Instant,
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

    /// How long after a renewal the next one is due. It is looked after the same time again, so that a lease is renewed at least
    /// every third of its length, and most requests end before.
    fn renewal_pause(&self) -> Duration {
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

    /// Ends leases that share their store again, until it replies or they have expired: a call without a reply may still be executed.
    /// Nothing waits for it.
    pub(super) fn end_later(leases: SmallVec<[Arc<Self>; 1]>) {
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(async move {
            let longest = leases.iter().map(|lease| lease.length).max().unwrap_or_default();
            let (expired, mut pause) = (Instant::now() + longest, FIRST_PAUSE);
            while Instant::now() + pause < expired {
                sleep(pause).await;
                let response = Self::send(Operation::EndLease, &leases).await;
                if !response.is_err_and(|error| error.has_no_reply()) {
                    return;
                }
                pause = LONGEST_PAUSE.min(2 * pause);
            }
        });
    }

    /// Sends an operation on leases that share their store.
    pub(super) fn send(operation: Operation, leases: &[Arc<Self>]) -> StoreFuture {
        let requests = leases.iter().map(|lease| StoreRequest::new(operation, [&lease.charge]));
        let requests: SmallVec<[StoreRequest<'_>; 1]> = requests.collect();
        leases[0].store.decide(&requests)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        unpoisoned(self.progress.lock())
    }
}

/// The pauses between releases without a reply.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

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

/// Renews the leases that this process has in one store, and those that it counts itself while the store fails.
///
/// In each runtime one task renews those that were taken there, so that a runtime which is blocked, or not driven, loses only
/// its own. The task ends when none is held. If its runtime ends, another task renews the rest.
#[derive(Default)]
pub(crate) struct Keeper {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    groups: HashMap<Id, Group>,
    /// Those of runtimes that have ended, and those that were taken outside of a runtime, until a task takes them over.
    orphans: HashMap<LeaseId, Arc<Lease>>,
}

/// The leases of one runtime.
#[derive(Default)]
struct Group {
    held: HashMap<LeaseId, Arc<Lease>>,
    /// How long its task sleeps, if there is one.
    sleeps: Option<Duration>,
    /// Notified when the task is to wake up earlier.
    hurry: Arc<Notify>,
}

static KEEPERS: PerStore<Keeper> = PerStore::new();

impl Keeper {
    /// The keeper of a store.
    pub(crate) fn of(store: &impl Store) -> Arc<Self> {
        KEEPERS.of(store.id())
    }

    /// Renews a lease from now on.
    pub(super) fn hold(self: &Arc<Self>, lease: Arc<Lease>) {
        let mut state = self.state();
        state.orphans.insert(lease.id, lease);
        let Ok(runtime) = Handle::try_current() else {
            return hurry(state);
        };
        let pause = state.shortest_orphan_pause().unwrap_or_default();
        let group = state.take_over(runtime.id());
        match group.sleeps {
            Some(sleeps) if sleeps <= pause => {}
            Some(_) => group.hurry.notify_one(),
            None => {
                group.sleeps = Some(pause);
                let task = Task {
                    keeper: self.clone(),
                    runtime: runtime.id(),
                    hurry: group.hurry.clone(),
                };
                // In a runtime that ends, the task is dropped at once.
                drop(state);
                runtime.spawn(task.run());
            }
        }
    }

    /// Renews a lease no more.
    pub(super) fn forget(&self, lease: &Lease) {
        let mut state = self.state();
        state.orphans.remove(&lease.id);
        for group in state.groups.values_mut() {
            group.held.remove(&lease.id);
        }
    }

    /// The slots of a policy that this process holds, and the time since the first of them was taken, by key.
    #[cfg(feature = "admin")]
    pub(crate) fn held_of(&self, policy: &str) -> HashMap<Key, (u64, Duration)> {
        let state = self.state();
        let leases = state.groups.values().flat_map(|group| group.held.values());
        let leases = leases.chain(state.orphans.values());
        let mut held: HashMap<Key, (u64, Duration)> = HashMap::new();
        for lease in leases.filter(|lease| lease.policy() == policy) {
            let (slots, longest) = held.entry(lease.charge.key.clone()).or_default();
            *slots += lease.charge.cost;
            *longest = lease.taken_at.elapsed().max(*longest);
        }
        held
    }

    fn state(&self) -> MutexGuard<'_, State> {
        unpoisoned(self.state.lock())
    }
}

impl State {
    /// The leases of a runtime, to which it adds those that no task renews.
    fn take_over(&mut self, runtime: Id) -> &mut Group {
        let group = self.groups.entry(runtime).or_default();
        group.held.extend(self.orphans.drain());
        group
    }

    fn shortest_orphan_pause(&self) -> Option<Duration> {
        self.orphans.values().map(|lease| lease.renewal_pause()).min()
    }
}

/// Wakes up the tasks that sleep for longer than an orphan can wait, of which the first one takes over the orphans. The state is not
/// locked meanwhile, since a runtime that ends may drop a task that is woken up, which locks it.
fn hurry(state: MutexGuard<'_, State>) {
    let Some(pause) = state.shortest_orphan_pause() else {
        return;
    };
    let is_late = |group: &&Group| group.sleeps.is_some_and(|sleeps| sleeps > pause);
    let late = state.groups.values().filter(is_late);
    let late: Vec<_> = late.map(|group| group.hurry.clone()).collect();
    drop(state);
    late.iter().for_each(|task| task.notify_one());
}

/// The task that renews the leases of a runtime.
struct Task {
    keeper: Arc<Keeper>,
    runtime: Id,
    /// That of its group.
    hurry: Arc<Notify>,
}

impl Task {
    async fn run(self) {
        let mut looked_at = Instant::now();
        while let Some(pause) = self.next_pause() {
            // From the last look on, so that short leases that come and go do not delay the others.
            let due = looked_at + pause;
            let hurried = timeout_at(due, self.hurry.notified()).await.is_ok();
            if hurried && Instant::now() < due {
                continue;
            }
            looked_at = Instant::now();
            // Each in a task of its own: a store sends together what comes at once, and one that hangs delays no other.
            for renewal in self.held().iter().filter_map(Renewal::begin) {
                tokio::spawn(renewal.run());
            }
        }
    }

    fn held(&self) -> Vec<Arc<Lease>> {
        let mut state = self.keeper.state();
        state.take_over(self.runtime).held.values().cloned().collect()
    }

    /// The time until the next look; `None` if nothing is held.
    fn next_pause(&self) -> Option<Duration> {
        let mut state = self.keeper.state();
        let group = state.take_over(self.runtime);
        let shortest = group.held.values().map(|lease| lease.renewal_pause()).min();
        match shortest {
            Some(pause) => group.sleeps = Some(pause),
            None => drop(state.groups.remove(&self.runtime)),
        }
        shortest
    }
}

/// Its runtime has ended, or nothing is held.
impl Drop for Task {
    fn drop(&mut self) {
        let mut state = self.keeper.state();
        let is_own = |group: &Group| Arc::ptr_eq(&group.hurry, &self.hurry);
        if state.groups.get(&self.runtime).is_some_and(is_own)
            && let Some(group) = state.groups.remove(&self.runtime)
        {
            state.orphans.extend(group.held);
            hurry(state);
        }
    }
}
