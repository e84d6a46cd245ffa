//! A file that policies follow, and what the layers and limiters decide by that each load of it is applied to.

use std::{
    collections::BTreeMap,
    mem,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use arc_swap::{ArcSwap, Guard};

use super::{
    Policies,
    config::{Config, FilePolicy, FromFile},
    warnings::{log_load, warn_of_overrides},
};
use crate::{
    ConfigError,
    limit::hash_text,
    observe::file_followed,
    policy::{
        Basis, Policy,
        set::{Validate, distinct},
    },
    store::Store,
    sync::lock,
};

/// A file, or the configuration of an application in place of one.
pub(crate) struct File {
    /// Its number in the process.
    pub(super) number: u64,
    pub(super) path: Option<PathBuf>,
    state: Mutex<State>,
}

pub(super) struct State {
    pub(super) config: Config,
    /// The text of the file that was applied last.
    pub(super) text: Option<String>,
    /// The policies that the application has by their places, each as of the last load that contains it.
    pub(super) used: Used,
    subscribers: Vec<Weak<Live>>,
    loaded_at: SystemTime,
    is_reloaded: bool,
    /// That of the content in force; 0 of policies in place of a file.
    hash: u64,
    /// The number of loads, whether applied or refused.
    #[cfg(feature = "file")]
    pub(super) loads: u64,
    /// Why the last load was refused.
    pub(super) refused: Option<Fault>,
    /// The number of the task that follows the file: that of the last call which began one.
    #[cfg(feature = "file")]
    pub(super) follower: u64,
    /// Why changes are not seen.
    pub(super) unseen: Option<Fault>,
}

pub(super) type Used = BTreeMap<String, FilePolicy>;

/// A file, and what it has about the policies that the application uses.
type Load<'a> = (&'a File, &'a Config, &'a Used);

/// When a fault was found, and its text.
type Fault = (SystemTime, String);

/// Held while a load is applied, and while a layer or a limiter begins to follow its files: none misses a load, and none
/// that follows several files has an older state of one of them.
pub(super) fn lock_loads() -> MutexGuard<'static, ()> {
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
        Self {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            path,
            state: Mutex::new(State {
                config,
                hash: hash_file(text.as_deref()),
                text,
                used: BTreeMap::new(),
                subscribers: Vec::new(),
                loaded_at: SystemTime::now(),
                is_reloaded: false,
                #[cfg(feature = "file")]
                loads: 0,
                refused: None,
                #[cfg(feature = "file")]
                follower: 0,
                unseen: None,
            }),
        }
    }

    /// Its path, for logs.
    pub(super) fn displayed(&self) -> Option<String> {
        Some(self.path.as_ref()?.display().to_string())
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // The state is replaced as a whole.
        lock(&self.state)
    }

    /// That of the last load.
    pub(super) fn config(&self) -> Config {
        self.state().config.clone()
    }

    /// Applies these policies to all layers and limiters, or to none. The caller has locked loads.
    pub(super) fn replace(&self, mut config: Config, text: Option<String>) -> Result<(), ConfigError> {
        let mut state = self.state();
        config.extensions.inherit(&state.config.extensions);
        config.met = (!state.used.is_empty()).then(|| state.config.places_met());
        let mut used = state.used.clone();
        for (place, used) in &mut used {
            if config.nearest(place).is_some() {
                *used = config.describe(place, used.key.is_some())?;
            }
        }
        config.validate_plans(&used)?;

        let load = (self, &config, &used);
        let subscribers = state.subscribers.iter().filter_map(Weak::upgrade);
        let renewed = subscribers.map(|live| Ok((Arc::new(live.renewed(load)?), live)));
        let renewed = renewed.collect::<Result<Vec<_>, ConfigError>>()?;
        for (basis, live) in &renewed {
            live.basis.store(basis.clone());
        }
        let before = mem::replace(&mut state.config, config.clone());
        state.used.clone_from(&used);
        (state.loaded_at, state.is_reloaded) = (SystemTime::now(), true);
        state.hash = hash_file(text.as_deref());
        state.text = text.or(state.text.take());
        drop(state);

        // Requests settle meanwhile, and what receives events and metrics may read the policies, but not load any.
        for (basis, _) in &renewed {
            basis.context.register_metrics();
            basis.context.log_conflict();
            warn_of_overrides(basis);
        }
        log_load(self.displayed().as_deref(), (&before, &config), &used);
        Ok(())
    }

    /// Lets a layer or a limiter follow the file.
    fn subscribe(&self, subscriber: Weak<Live>) {
        let subscribers = &mut self.state().subscribers;
        subscribers.retain(|other| other.strong_count() > 0);
        subscribers.push(subscriber);
    }

    pub(super) fn note_outcome<E: ToString>(&self, applied: Result<(), E>) -> Result<(), E> {
        let refused = applied.as_ref().err();
        let refused = refused.map(|error| (SystemTime::now(), error.to_string()));
        self.note(|state| {
            state.refused = refused;
            #[cfg(feature = "file")]
            {
                state.loads += 1;
            }
        });
        applied
    }

    pub(super) fn note<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let noted = change(&mut self.state());
        self.record();
        noted
    }

    /// Records the content in force and whether a newer one is refused, for metrics: not before a layer or a limiter follows the file,
    /// since it may be read to be validated.
    fn record(&self) {
        let Some(path) = &self.path else { return };
        let state = self.state();
        if !state.subscribers.is_empty() {
            let recorded = (state.loaded_at, state.hash, state.fault().is_some());
            drop(state);
            file_followed(path, recorded);
        }
    }

    /// The last load, if it was refused, or why changes are not seen.
    pub(crate) fn refused_reload(&self) -> Option<Fault> {
        self.state().fault().cloned()
    }

    /// When the file was last loaded again.
    #[cfg(feature = "admin")]
    pub(crate) fn reloaded_at(&self) -> Option<SystemTime> {
        let state = self.state();
        state.is_reloaded.then_some(state.loaded_at)
    }
}

impl State {
    fn fault(&self) -> Option<&Fault> {
        self.refused.as_ref().or(self.unseen.as_ref())
    }

    /// A policy that the application uses from now on, with this key, which may be that of the file.
    pub(super) fn take_up<K>(
        &mut self,
        file: &Arc<File>,
        place: &str,
        (key, is_of_file): (K, bool),
    ) -> Result<Policy<K>, ConfigError> {
        let has_key = self.used.get(place).is_some_and(|used| used.key.is_some());
        let described = self.config.describe(place, is_of_file || has_key)?;
        self.used.insert(place.to_owned(), described.clone());
        let met = self.config.met.as_mut();
        if met.is_some_and(|met| met.insert(place.to_owned())) {
            // From now on those for `others` are not for its requests, whichever was taken up first.
            for (place, used) in &mut self.used {
                if self.config.nearest(place).is_some() {
                    *used = self.config.describe(place, used.key.is_some())?;
                }
            }
        }
        Ok(Policy {
            from_file: Some(FromFile {
                settings: described.settings,
                listed: self.config.listed(),
                place: place.into(),
                file: file.clone(),
                has_key: is_of_file,
            }),
            ..Policy::of_limit(self.config.switched(described.policy_limit)).with_key(key)
        })
    }
}

/// Other policies while a service runs.
impl Policies {
    /// Replaces all policies, for an application that has them in its own configuration. A file that is followed applies again when its
    /// content changes.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policies};
    ///
    /// # #[cfg(feature = "file")] {
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policies = Policies::from_toml("policies.mails.limit = 'sliding-log 3/h'")?;
    /// let mails = Limiter::new(MemoryStore::new(), policies.unkeyed("mails")?);
    ///
    /// policies.replace(&Policies::from_toml("policies.mails.limit = 'sliding-log 10/h'")?)?;
    /// assert_eq!(mails.check("42").await?.limit(), 10);
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If a policy that [`get`](Self::get) has returned has no key anymore, if a policy
    /// [contradicts](Self#what-a-reload-changes) a layer or limiter, or if the application could not start with the plans. Nothing is
    /// changed then.
    pub fn replace(&self, policies: &Self) -> Result<(), ConfigError> {
        let config = policies.file.config();
        let _loads = lock_loads();
        self.file.note_outcome(self.file.replace(config, None))
    }

    /// Why the newest content of the file is not applied, or changes of it are not followed anymore; none in order.
    ///
    /// It is the error of the last load, whether by [`reload`](Self::reload), [`replace`](Self::replace) or
    /// [`reload_on_change`](Self::reload_on_change), until another load succeeds, or that task finds the content in force in the file
    /// again. An [`Admin`](crate::Admin) has it as `refused_reload` (feature `admin`).
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// # #[cfg(feature = "file")] {
    /// let policies = Policies::from_toml("policies.mails = { limit = 'sliding-log 3/h', key = 'ip' }")?;
    /// let _mails = policies.get("mails")?;
    /// assert_eq!(policies.fault(), None);
    ///
    /// assert!(policies.replace(&Policies::from_toml("policies.mails.limit = 'sliding-log 3/h'")?).is_err());
    /// assert!(policies.fault().unwrap().to_string().contains("`mails`"));
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    #[must_use]
    pub fn fault(&self) -> Option<ConfigError> {
        self.file.refused_reload().map(|(_, error)| ConfigError::new(error))
    }
}

/// The [`Basis`] of a layer or a limiter with policies that follow files. A load of a file replaces it.
pub(crate) struct Live {
    basis: ArcSwap<Basis>,
    validate: Validate,
}

impl Live {
    /// Builds it of the policies as of the last loads of their files.
    pub(crate) fn new(
        store: impl Store,
        mut policies: Vec<Policy>,
        validate: Validate,
    ) -> Result<Arc<Self>, ConfigError> {
        let _loads = lock_loads();
        for file in files(&policies) {
            let state = file.state();
            renew(&mut policies, (&*file, &state.config, &state.used));
        }
        Ok(Self::follow(Basis::new(store, policies, validate)?, validate))
    }

    /// Another one with a change. This one stays as it is, for clones of its layer.
    pub(crate) fn changed(&self, change: impl FnOnce(&mut Basis)) -> Arc<Self> {
        let _loads = lock_loads();
        let mut basis = Basis::clone(&self.basis.load());
        change(&mut basis);
        Self::follow(basis, self.validate)
    }

    fn follow(basis: Basis, validate: Validate) -> Arc<Self> {
        let files = files(&basis.policies);
        let live = Arc::new(Self {
            basis: ArcSwap::from_pointee(basis),
            validate,
        });
        for file in files {
            file.subscribe(Arc::downgrade(&live));
            file.record();
        }
        live
    }

    /// What is decided by after a load.
    fn renewed(&self, load: Load<'_>) -> Result<Basis, ConfigError> {
        let newest = self.basis.load();
        let mut policies = newest.policies.clone();
        renew(&mut policies, load);
        newest.renewed(policies, self.validate)
    }

    #[inline]
    pub(crate) fn newest(&self) -> Guard<Arc<Basis>> {
        self.basis.load()
    }
}

/// The files that policies follow, each of them once.
fn files(policies: &[Policy]) -> Vec<Arc<File>> {
    distinct(
        policies
            .iter()
            .filter_map(|policy| Some(policy.from_file.as_ref()?.file.clone())),
    )
}

/// Gives those of the policies that follow the file what it has about them.
fn renew(policies: &mut [Policy], (file, config, used): Load<'_>) {
    for policy in policies {
        let from_file = policy.from_file.as_mut();
        let Some(from_file) = from_file.filter(|from| std::ptr::eq(&*from.file, file)) else {
            continue;
        };
        let Some(described) = used.get(&*from_file.place) else {
            continue;
        };
        from_file.listed = config.listed();
        from_file.settings = described.settings.clone();
        if let Some(key) = described.key.as_ref().filter(|_| from_file.has_key) {
            policy.extractor = key.clone();
        }
        policy.policy_limit = config.switched(described.policy_limit.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limiter, MemoryStore};

    fn file(quota: u64) -> Policies {
        serde_json::from_str(&format!(r#"{{"policies": {{"p": {{"limit": "{quota}/s"}}}}}}"#)).expect("a policy")
    }

    #[test]
    fn a_file_forgets_the_layers_and_limiters_that_are_gone() {
        let policies = file(1);
        for _ in 0..100 {
            let _ = Limiter::new(MemoryStore::new(), policies.unkeyed("p").expect("a policy"));
        }
        assert_eq!(policies.file.state().subscribers.len(), 1);
    }

    #[test]
    fn what_is_decided_by_an_earlier_load_is_no_conflict_with_the_next_one() {
        let (policies, store) = (file(1), MemoryStore::new());
        let limiter = Limiter::new(store, policies.unkeyed("p").expect("a policy"));
        let earlier = limiter.policies.newest();
        policies.replace(&file(2)).expect("it fits");
        assert_eq!(limiter.policies.newest().context.refuse_conflict(), Ok(()));
        drop(earlier);
    }
}
