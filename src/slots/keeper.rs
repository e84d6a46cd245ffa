use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::Notify,
    time::{Instant, timeout_at},
};

use super::lease::{Lease, Renewal};
use crate::store::{LeaseId, Store, StoreId};

/// Renews the leases that this process has in one store, and those that it counts itself while the store fails.
///
/// One task renews all of them, in the runtime of the request that started it. It ends when none is held. If its runtime
/// ends, the next request with slots starts another one.
#[derive(Default)]
pub(crate) struct Keeper {
    state: Mutex<State>,
    /// Notified when the task is to wake up earlier.
    hurry: Notify,
}

#[derive(Default)]
struct State {
    held: HashMap<LeaseId, Arc<Lease>>,
    /// The number of the task that runs, and how long it sleeps.
    task: Option<(u64, Duration)>,
    tasks: u64,
}

/// The keepers of the stores that are in use, since a store may have several layers.
static KEEPERS: LazyLock<Mutex<HashMap<StoreId, Weak<Keeper>>>> = LazyLock::new(Mutex::default);

impl Keeper {
    /// The keeper of a store.
    pub(crate) fn of(store: &impl Store) -> Arc<Self> {
        let Some(id) = store.id() else { return Arc::default() };
        let mut keepers = KEEPERS.lock().unwrap_or_else(PoisonError::into_inner);
        keepers.retain(|_, keeper| keeper.strong_count() > 0);
        if let Some(keeper) = keepers.get(&id).and_then(Weak::upgrade) {
            return keeper;
        }
        let keeper = Arc::default();
        keepers.insert(id, Arc::downgrade(&keeper));
        keeper
    }

    /// Renews a lease from now on.
    pub(super) fn hold(self: &Arc<Self>, lease: Arc<Lease>) {
        let pause = pause(&lease);
        let mut state = self.state();
        state.held.insert(lease.id(), lease);
        match state.task {
            Some((_, sleeps)) if sleeps <= pause => {}
            Some(_) => self.hurry.notify_one(),
            None => {
                if let Ok(runtime) = Handle::try_current() {
                    state.tasks += 1;
                    let number = state.tasks;
                    state.task = Some((number, pause));
                    drop(state);
                    let keeper = self.clone();
                    runtime.spawn(Task { keeper, number }.run());
                }
            }
        }
    }

    /// Renews a lease no more.
    pub(super) fn forget(&self, lease: &Lease) {
        self.state().held.remove(&lease.id());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How often it is looked whether a lease is due. It is after the same time again, so that it is renewed at least every third
/// of its length, and most requests end before.
fn pause(lease: &Lease) -> Duration {
    lease.length() / 6
}

/// The task that renews.
struct Task {
    keeper: Arc<Keeper>,
    number: u64,
}

impl Task {
    async fn run(self) {
        let mut looked_at = Instant::now();
        while let Some(pause) = self.next_pause() {
            // From the last look on, so that short leases that come and go do not delay the others.
            let hurried = timeout_at(looked_at + pause, self.keeper.hurry.notified())
                .await
                .is_ok();
            if hurried {
                continue;
            }
            looked_at = Instant::now();
            let held: Vec<Arc<Lease>> = self.keeper.state().held.values().cloned().collect();
            // Each in a task of its own: a store sends together what comes at once, and one that hangs delays no other.
            for renewal in held.iter().filter_map(Renewal::begin) {
                tokio::spawn(renewal.run());
            }
        }
    }

    /// The time until the next look; `None` if nothing is held.
    fn next_pause(&self) -> Option<Duration> {
        let mut state = self.keeper.state();
        let shortest = state.held.values().map(|lease| pause(lease)).min();
        if state.task.is_some_and(|(number, _)| number == self.number) {
            state.task = shortest.map(|pause| (self.number, pause));
        }
        shortest
    }
}

/// Its runtime has ended, or nothing is held.
impl Drop for Task {
    fn drop(&mut self) {
        let mut state = self.keeper.state();
        if state.task.is_some_and(|(number, _)| number == self.number) {
            state.task = None;
        }
    }
}
