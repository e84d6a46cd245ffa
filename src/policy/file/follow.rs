//! A file that policies follow, and what the layers and limiters decide by that each load of it is applied to.

#[cfg(feature = "file")]
use std::path::Path;
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use arc_swap::{ArcSwap, Guard};

use super::config::{Config, FilePolicy, FromFile};
#[cfg(feature = "file")]
use super::read::read;
use crate::{
    ConfigError,
    decision::PolicyFile,
    limit::hash_text,
    observe::FileMetrics,
    policy::{Basis, Policy, PolicyKey},
    store::NamedLimit,
    sync::lock,
};

/// A file, or the configuration of an application in place of one.
pub(crate) struct File {
    /// Its number in the process.
    number: u64,
    #[cfg_attr(not(feature = "file"), expect(dead_code, reason = "the feature reads files"))]
    path: Option<PathBuf>,
    state: Mutex<State>,
    metrics: FileMetrics,
}

pub(super) struct State {
    pub(super) config: Config,
    /// The text that it was read from.
    text: Option<String>,
    /// The policies that the application has, each as of the last load that contains it.
    used: BTreeMap<String, FilePolicy>,
    subscribers: Vec<Weak<dyn Subscriber>>,
    loaded_at: Option<SystemTime>,
    /// Why the last load was refused.
    refused: Option<Fault>,
    /// Why changes are not seen.
    unseen: Option<Fault>,
}

/// A layer or a limiter that follows files.
trait Subscriber: Send + Sync {
    /// Builds what is decided by after a load; the returned function applies it.
    fn prepare(self: Arc<Self>, load: Load<'_>) -> Result<Box<dyn FnOnce()>, ConfigError>;
}

/// A file, and what it has about the policies that the application uses.
type Load<'a> = (&'a File, &'a Config, &'a BTreeMap<String, FilePolicy>);

/// When a fault was found, and its text.
type Fault = (SystemTime, String);

/// Held while a load is applied, and while a layer or a limiter begins to follow its files: none misses a load, and none
/// that follows several files has an older state of one of them.
fn lock_loads() -> MutexGuard<'static, ()> {
    static LOADS: Mutex<()> = Mutex::new(());
    lock(&LOADS)
}

/// A hash of the content of a file; 0 if there is none.
fn hash_file(text: Option<&str>) -> u64 {
    text.map(hash_text).unwrap_or_default()
}

impl File {
    /// A configuration, with the path and the content of its file.
    pub(super) fn new(config: Config, file: Option<(PathBuf, String)>) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let (path, text) = file.unzip();
        let metrics = FileMetrics::new(path.as_deref());
        if path.is_some() {
            metrics.loaded(SystemTime::now(), hash_file(text.as_deref()));
            metrics.set_refused(false);
        }
        Self {
            metrics,
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            path,
            state: Mutex::new(State {
                config,
                text,
                used: BTreeMap::new(),
                subscribers: Vec::new(),
                loaded_at: None,
                refused: None,
                unseen: None,
            }),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // The state is replaced as a whole.
        lock(&self.state)
    }

    /// That of the last load.
    pub(super) fn config(&self) -> Config {
        self.state().config.clone()
    }

    /// A policy of the last load, which follows the file.
    pub(super) fn policy(self: &Arc<Self>, name: &str) -> Result<Policy<()>, ConfigError> {
        let mut state = self.state();
        let described = state.take_up(name, false)?;
        Ok(described.policy(((), false), &state.config, self))
    }

    /// The same with its key.
    pub(super) fn keyed_policy(self: &Arc<Self>, name: &str) -> Result<Policy, ConfigError> {
        let mut state = self.state();
        let key = state.config.key(name)?;
        let described = state.take_up(name, true)?;
        Ok(described.policy((key, true), &state.config, self))
    }

    #[cfg(feature = "file")]
    pub(super) fn path(&self) -> Result<&Path, ConfigError> {
        self.path.as_deref().ok_or_else(|| {
            ConfigError::new(
                "these policies have no file; use `Policies::replace`, or `Policies::from_file` to read one",
            )
        })
    }

    /// Whether anything but a task that watches the file uses it.
    #[cfg(feature = "file")]
    pub(super) fn is_used(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1
    }

    #[cfg(feature = "file")]
    pub(super) fn has_loaded(&self, text: &str) -> bool {
        self.state().text.as_deref() == Some(text)
    }
}

/// Loads.
impl File {
    /// Reads the file, and applies it.
    #[cfg(feature = "file")]
    pub(super) fn reload(&self) -> Result<(), ConfigError> {
        let text = read(self.path()?);
        self.note_outcome(text.and_then(|text| self.load(text)))
    }

    #[cfg(feature = "file")]
    pub(super) fn load(&self, text: String) -> Result<(), ConfigError> {
        let config = Config::parse(self.path()?, &text);
        self.note_outcome(config.and_then(|config| self.replace(config, Some(text))))
    }

    /// Applies these policies to all layers and limiters, or to none.
    pub(super) fn replace(&self, config: Config, text: Option<String>) -> Result<(), ConfigError> {
        self.note_outcome(self.try_replace(config, text))
    }

    fn try_replace(&self, mut config: Config, text: Option<String>) -> Result<(), ConfigError> {
        let _loads = lock_loads();
        let mut state = self.state();
        config.extensions.inherit(&state.config.extensions);
        let mut used = state.used.clone();
        for (place, used) in &mut used {
            if let Some(place) = config.nearest(place) {
                *used = config.describe(place, used.key.is_some())?;
            }
        }

        let load = (self, &config, &used);
        let subscribers = state.subscribers.iter().filter_map(Weak::upgrade);
        let prepared: Result<Vec<_>, _> = subscribers.map(|subscriber| subscriber.prepare(load)).collect();
        prepared?.into_iter().for_each(|apply| apply());

        for place in used.keys().filter(|place| config.nearest(place).is_none()) {
            tracing::warn!(
                policy = place,
                "the file of limits has no such policy anymore; it keeps its last numbers"
            );
        }
        tracing::info!(policies = config.names().count(), "changed limits are applied");
        state.config = config;
        state.text = text;
        state.used = used;
        let now = SystemTime::now();
        state.loaded_at = Some(now);
        self.metrics.loaded(now, hash_file(state.text.as_deref()));
        Ok(())
    }

    /// Lets a layer or a limiter follow the file.
    fn subscribe(&self, subscriber: Weak<dyn Subscriber>) {
        let subscribers = &mut self.state().subscribers;
        subscribers.retain(|other| other.strong_count() > 0);
        subscribers.push(subscriber);
    }
}

/// Faults.
impl File {
    pub(super) fn note_outcome<E: ToString>(&self, applied: Result<(), E>) -> Result<(), E> {
        let refused = applied.as_ref().err();
        let refused = refused.map(|error| (SystemTime::now(), error.to_string()));
        self.note(|state| state.refused = refused);
        applied
    }

    #[cfg(feature = "file")]
    pub(super) fn note_watch(&self, error: Option<String>) {
        self.note(|state| state.unseen = error.map(|error| (SystemTime::now(), error)));
    }

    fn note(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        change(&mut state);
        self.metrics.set_refused(state.fault().is_some());
    }

    /// The last load, if it was refused, or why changes are not seen.
    pub(crate) fn refused_reload(&self) -> Option<Fault> {
        self.state().fault().cloned()
    }

    /// When the file was last loaded again.
    #[cfg(feature = "admin")]
    pub(crate) fn reloaded_at(&self) -> Option<SystemTime> {
        self.state().loaded_at
    }
}

impl State {
    fn fault(&self) -> Option<&Fault> {
        self.refused.as_ref().or(self.unseen.as_ref())
    }

    pub(super) fn unused(&self) -> Vec<String> {
        let places = self.config.places();
        places
            .filter(|name| !self.used.contains_key(*name))
            .map(str::to_owned)
            .collect()
    }

    /// Logs the names of the unused policies, if there are any.
    pub(super) fn warn_of_unused(&self) {
        let unused = self.unused();
        if !unused.is_empty() {
            tracing::warn!(
                policies = unused.join(", "),
                "policies of a file of limits are not used: no layer or limiter has them"
            );
        }
    }

    /// What the configuration has about one that the application uses from now on.
    fn take_up(&mut self, name: &str, needs_key: bool) -> Result<FilePolicy, ConfigError> {
        let has_key = self.used.get(name).is_some_and(|used| used.key.is_some());
        let described = self.config.describe(name, needs_key || has_key)?;
        self.used.insert(name.to_owned(), described.clone());
        Ok(described)
    }
}

impl PolicyFile for FromFile {
    fn number(&self) -> u64 {
        self.file.number
    }

    fn newest_limit(&self) -> Option<Arc<NamedLimit>> {
        let state = self.file.state();
        let limit = state
            .config
            .switched(state.used.get(&*self.place)?.policy_limit.clone());
        limit.choose.is_none().then_some(limit.fixed)
    }
}

/// The [`Basis`] of a layer or a limiter with policies that follow files. A load of a file replaces it.
pub(crate) struct Live<K> {
    basis: ArcSwap<Basis<K>>,
}

impl<K: PolicyKey> Live<K> {
    /// Builds it of the policies as of the last loads of their files.
    pub(crate) fn new(
        mut policies: Vec<Policy<K>>,
        build: impl FnOnce(Vec<Policy<K>>) -> Result<Basis<K>, ConfigError>,
    ) -> Result<Arc<Self>, ConfigError> {
        let _loads = lock_loads();
        for file in files(&policies) {
            let state = file.state();
            renew(&mut policies, (&*file, &state.config, &state.used));
        }
        build(policies).map(Self::follow)
    }

    /// Another one with a change. This one stays as it is, for clones of its layer.
    pub(crate) fn changed(&self, change: impl FnOnce(&mut Basis<K>)) -> Arc<Self> {
        let _loads = lock_loads();
        let mut basis = Basis::clone(&self.basis.load());
        change(&mut basis);
        Self::follow(basis)
    }

    fn follow(basis: Basis<K>) -> Arc<Self> {
        let files = files(&basis.policies);
        let live = Arc::new(Self {
            basis: ArcSwap::from_pointee(basis),
        });
        for file in files {
            let subscriber: Weak<Self> = Arc::downgrade(&live);
            file.subscribe(subscriber);
        }
        live
    }

    #[inline]
    pub(crate) fn newest(&self) -> Guard<Arc<Basis<K>>> {
        self.basis.load()
    }
}

impl<K: PolicyKey> Subscriber for Live<K> {
    fn prepare(self: Arc<Self>, load: Load<'_>) -> Result<Box<dyn FnOnce()>, ConfigError> {
        let newest = self.basis.load();
        let mut policies = newest.policies.clone();
        renew(&mut policies, load);
        let renewed = newest.renewed(policies)?;
        Ok(Box::new(move || {
            renewed.context.register_metrics();
            renewed.context.log_conflict();
            self.basis.store(Arc::new(renewed));
        }))
    }
}

/// The files that policies follow, each of them once.
fn files<K>(policies: &[Policy<K>]) -> Vec<Arc<File>> {
    let mut files = Vec::<Arc<File>>::new();
    for FromFile { file, .. } in policies.iter().filter_map(|policy| policy.from_file.as_ref()) {
        if !files.iter().any(|other| Arc::ptr_eq(other, file)) {
            files.push(file.clone());
        }
    }
    files
}

/// Gives those of the policies that follow the file what it has about them.
fn renew<K: PolicyKey>(policies: &mut [Policy<K>], (file, config, used): Load<'_>) {
    for policy in policies {
        let from_file = policy.from_file.as_ref().filter(|from| std::ptr::eq(&*from.file, file));
        if let Some(described) = from_file.and_then(|from| used.get(&*from.place)) {
            described.renew(policy, config);
        }
    }
}
