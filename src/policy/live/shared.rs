#[cfg(feature = "file")]
use std::path::Path;
use std::{
    collections::BTreeMap,
    fmt::Display,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::source::{Description, Origin, Source};
#[cfg(feature = "file")]
use crate::policy::file::read;
use crate::{ConfigError, policy::file::Policies};

/// What the clones of live policies share.
pub(super) struct Shared {
    source: Arc<Source>,
    state: Mutex<State>,
    #[cfg_attr(not(feature = "file"), expect(dead_code, reason = "the feature reads files"))]
    path: Option<PathBuf>,
}

pub(super) struct State {
    pub(super) policies: Policies,
    /// The content of the file that they are from.
    #[cfg_attr(not(feature = "file"), expect(dead_code, reason = "the feature reads files"))]
    text: Option<String>,
    /// What the last file that had it has about each policy that code uses.
    used: BTreeMap<String, Description>,
}

impl Shared {
    /// Policies, with the path and the content of their file.
    pub(super) fn new(policies: Policies, file: Option<(PathBuf, String)>) -> Self {
        let (path, text) = file.unzip();
        let source = Arc::new(Source::new(policies.listed()));
        let state = State {
            policies,
            text,
            used: BTreeMap::new(),
        };
        Self {
            source,
            state: Mutex::new(state),
            path,
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(feature = "file")]
    pub(super) fn path(&self) -> Result<&Path, ConfigError> {
        self.path.as_deref().ok_or_else(|| {
            ConfigError::new(
                "these policies have no file; use `LivePolicies::replace`, or `Policies::watch` to read a file",
            )
        })
    }

    pub(super) fn register<T, V>(&self, name: String, value: impl Fn(&T) -> V + Send + Sync + 'static)
    where
        T: Send + Sync + 'static,
        V: Display,
    {
        self.state().policies.register(name, value);
    }

    /// Notes that code uses a policy.
    pub(super) fn note(&self, state: &mut State, name: &str, has_key: bool) -> Result<Origin, ConfigError> {
        let is_keyed = state.used.get(name).is_some_and(|used| used.key.is_some());
        let used = describe(&state.policies, name, has_key || is_keyed)?;
        self.source.add(name.to_owned(), switched(&state.policies, &used));
        state.used.insert(name.to_owned(), used);
        Ok(Origin {
            source: self.source.clone(),
            has_key,
        })
    }

    /// Reads the file and replaces all policies.
    #[cfg(feature = "file")]
    pub(super) fn reload(&self) -> Result<(), ConfigError> {
        let text = read(self.path()?);
        self.note_outcome(text.and_then(|text| self.load(text)))
    }

    #[cfg(feature = "file")]
    pub(super) fn load(&self, text: String) -> Result<(), ConfigError> {
        let policies = Policies::parse(self.path()?, &text);
        self.note_outcome(policies.and_then(|policies| self.replace(policies, Some(text))))
    }

    /// Why the newest policies are not applied.
    pub(super) fn fault(&self) -> Option<String> {
        self.source.refused_reload().map(|refused| refused.error)
    }

    /// Notes whether the task that follows the file has ended.
    #[cfg(feature = "file")]
    pub(super) fn note_watch(&self, error: Option<String>) {
        self.source.set_watch(error);
    }

    /// Notes whether policies were applied.
    pub(super) fn note_outcome<E: ToString>(&self, applied: Result<(), E>) -> Result<(), E> {
        self.source.set_refused(applied.as_ref().err().map(ToString::to_string));
        applied
    }

    #[cfg(feature = "file")]
    pub(super) fn has_loaded(&self, text: &str) -> bool {
        self.state().text.as_deref() == Some(text)
    }

    /// Whether anything but one task has these policies.
    #[cfg(feature = "file")]
    pub(super) fn is_used(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1 || Arc::strong_count(&self.source) > 1
    }

    pub(super) fn replace(&self, policies: Policies, text: Option<String>) -> Result<(), ConfigError> {
        self.note_outcome(self.try_replace(policies, text))
    }

    fn try_replace(&self, mut policies: Policies, text: Option<String>) -> Result<(), ConfigError> {
        let mut state = self.state();
        policies.inherit(&state.policies);
        let mut used = state.used.clone();
        for (name, used) in used.iter_mut().filter(|(name, _)| policies.contains(name)) {
            *used = describe(&policies, name, used.key.is_some())?;
        }

        let newest = used
            .iter()
            .map(|(name, used)| (name.clone(), switched(&policies, used)));
        self.source.replace(newest.collect(), policies.listed())?;
        for name in used.keys().filter(|name| !policies.contains(name)) {
            #[cfg(feature = "tracing")]
            tracing::warn!(
                policy = name,
                "the file of limits has no such policy anymore; it keeps its last numbers"
            );
            let _ = name;
        }
        #[cfg(feature = "tracing")]
        tracing::info!(policies = policies.names().count(), "changed limits are applied");
        *state = State { policies, text, used };
        Ok(())
    }
}

fn describe(policies: &Policies, name: &str, has_key: bool) -> Result<Description, ConfigError> {
    let terms = policies.terms(name)?;
    let key = if has_key { Some(policies.key(name)?) } else { None };
    Ok(Description { terms, key })
}

/// A policy by the switch at the top of a file, which turns off all policies.
fn switched(policies: &Policies, used: &Description) -> Description {
    Description {
        terms: policies.switched(used.terms.clone()),
        key: used.key.clone(),
    }
}
