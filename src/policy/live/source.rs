use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use crate::{
    ConfigError, KeyExtractor,
    decision::{Plan, PolicyFile},
    policy::{access::Access, terms::Terms},
};

/// What a file has about a policy that code uses.
#[derive(Clone)]
pub(super) struct Description {
    pub(super) terms: Terms,
    /// The key, if code uses it.
    pub(super) key: Option<Arc<dyn KeyExtractor>>,
}

/// The policies of one load of a file that code uses, by name.
#[derive(Clone, Default)]
pub(super) struct Snapshot {
    /// The number of loads before this one.
    pub(super) revision: u64,
    pub(super) policies: BTreeMap<String, Description>,
    /// The requests that the file lists as skipped or blocked.
    pub(super) listed: Option<Arc<Access>>,
    /// When it was loaded, unless it is the first one.
    #[cfg(feature = "admin")]
    reloaded_at: Option<SystemTime>,
}

/// Refuses a snapshot that contradicts the settings in code of a layer or limiter.
pub(super) type Requirement = dyn Fn(&Source, &Snapshot) -> Result<(), ConfigError> + Send + Sync;

/// Where policies that follow a file find their newest terms.
pub(in crate::policy) struct Source {
    /// The number of this source in the process.
    number: u64,
    state: Mutex<State>,
    revision: AtomicU64,
    faults: Mutex<Faults>,
}

struct State {
    newest: Arc<Snapshot>,
    /// Of the layers and limiters that exist.
    requirements: Vec<Weak<Requirement>>,
}

/// Why the file may have a newer content than the one that is applied.
#[derive(Default)]
struct Faults {
    /// The last load has changed nothing.
    load: Option<RefusedReload>,
    /// The task that follows the file has ended.
    watch: Option<RefusedReload>,
}

/// A load that has changed nothing, since the file has a mistake or cannot be read, or since the file is not followed anymore.
#[derive(Clone)]
pub(crate) struct RefusedReload {
    #[cfg_attr(not(feature = "admin"), expect(dead_code, reason = "an `Admin` shows it"))]
    pub(crate) at: SystemTime,
    pub(crate) error: String,
}

impl RefusedReload {
    fn now(error: String) -> Self {
        Self {
            at: SystemTime::now(),
            error,
        }
    }
}

impl Source {
    pub(super) fn new(listed: Option<Arc<Access>>) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let newest = Snapshot {
            listed,
            ..Snapshot::default()
        };
        Self {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            state: Mutex::new(State {
                newest: Arc::new(newest),
                requirements: Vec::new(),
            }),
            revision: AtomicU64::new(0),
            faults: Mutex::default(),
        }
    }

    /// The revision of the newest snapshot. A request reads it, so it is apart from the snapshot.
    #[inline]
    pub(super) fn revision(&self) -> u64 {
        self.revision.load(Ordering::Acquire)
    }

    pub(super) fn newest(&self) -> Arc<Snapshot> {
        self.state().newest.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses later snapshots that do not meet this requirement, until it is dropped.
    pub(super) fn require(&self, requirement: &Arc<Requirement>) {
        let requirements = &mut self.state().requirements;
        requirements.retain(|other| other.strong_count() > 0);
        requirements.push(Arc::downgrade(requirement));
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records whether the last load was refused, for what reason.
    pub(super) fn set_refused(&self, error: Option<String>) {
        self.faults().load = error.map(RefusedReload::now);
    }

    /// Records whether the task that follows the file has ended.
    #[cfg(feature = "file")]
    pub(super) fn set_watch(&self, error: Option<String>) {
        self.faults().watch = error.map(RefusedReload::now);
    }

    pub(super) fn refused_reload(&self) -> Option<RefusedReload> {
        let faults = self.faults();
        faults.load.as_ref().or(faults.watch.as_ref()).cloned()
    }

    pub(super) fn add(&self, name: String, description: Description) {
        Arc::make_mut(&mut self.state().newest)
            .policies
            .insert(name, description);
    }

    /// Replaces the snapshot, unless it does not fit a layer or limiter.
    pub(super) fn replace(
        &self,
        policies: BTreeMap<String, Description>,
        listed: Option<Arc<Access>>,
    ) -> Result<(), ConfigError> {
        let mut state = self.state();
        let revision = state.newest.revision + 1;
        let newest = Snapshot {
            revision,
            policies,
            listed,
            #[cfg(feature = "admin")]
            reloaded_at: Some(SystemTime::now()),
        };
        let mut requirements = state.requirements.iter().filter_map(Weak::upgrade);
        requirements.try_for_each(|requirement| requirement(self, &newest))?;
        state.newest = Arc::new(newest);
        self.revision.store(revision, Ordering::Release);
        Ok(())
    }
}

impl PolicyFile for Source {
    fn number(&self) -> u64 {
        self.number
    }

    fn newest_plan(&self, policy: &str) -> Option<Arc<Plan>> {
        let newest = self.newest();
        let terms = &newest.policies.get(policy)?.terms;
        terms.plans.is_none().then(|| terms.plan.clone())
    }
}

/// The source of a policy that follows a file.
#[derive(Clone)]
pub(in crate::policy) struct Origin {
    pub(super) source: Arc<Source>,
    /// Whether the key is that of the file too.
    pub(super) has_key: bool,
}

impl Origin {
    pub(in crate::policy) fn file(&self) -> Arc<dyn PolicyFile> {
        self.source.clone()
    }

    /// When the file was reloaded last, if it was.
    #[cfg(feature = "admin")]
    pub(in crate::policy) fn reloaded_at(&self) -> Option<SystemTime> {
        self.source.newest().reloaded_at
    }

    /// The last load of the file, if it was refused.
    #[cfg(feature = "admin")]
    pub(in crate::policy) fn refused_reload(&self) -> Option<RefusedReload> {
        self.source.refused_reload()
    }
}
