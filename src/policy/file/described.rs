//! What a file has about one policy, what the policy has of it, and the policies of a file that limit nothing.

use std::sync::{Arc, PoisonError};

use super::{Policies, entry::Entry, of_policy, plans::policy_at};
use crate::{
    ConfigError, KeyExtractor, LivePolicies,
    decision::{Condition, Cost, Settings},
    policy::{
        Keyed, Policy, Unkeyed,
        limit::PolicyLimit,
        live::File,
        scope::{Scope, Spelling},
        set::{Access, PolicyKey},
    },
};

/// What a file has about one policy.
#[derive(Clone)]
pub(in crate::policy) struct FilePolicy {
    /// Where it is in the file.
    place: Arc<str>,
    pub(in crate::policy) policy_limit: PolicyLimit,
    settings: Settings,
    pub(in crate::policy) key: Option<Arc<dyn KeyExtractor>>,
}

/// What a policy has of its file, beside its limit and its key.
#[derive(Clone)]
pub(in crate::policy) struct FromFile {
    /// Those for which code has no others.
    pub(in crate::policy) settings: Settings,
    /// The requests that the file lists as skipped or blocked.
    pub(in crate::policy) listed: Option<Arc<Access>>,
    /// Where the file describes the policy: its name, after that of its plan and `/` if a plan has it.
    place: Arc<str>,
    /// The file, if the policy follows it.
    file: Option<Arc<File>>,
    /// Whether the key of the policy is that of the file.
    has_key: bool,
}

impl Policy<Unkeyed> {
    /// A policy as these policies describe it.
    pub(in crate::policy) fn described(described: FilePolicy, policies: &Policies, file: Option<&Arc<File>>) -> Self {
        let from_file = FromFile {
            settings: described.settings,
            listed: policies.listed(),
            place: described.place,
            file: file.cloned(),
            has_key: false,
        };
        Self {
            policy_limit: policies.switched(described.policy_limit),
            settings: Settings::default(),
            from_file: Some(from_file),
            fault: None,
            plan: None,
            extractor: Unkeyed,
        }
    }

    /// The policy with the key of its file.
    pub(in crate::policy) fn with_file_key(mut self, key: Arc<dyn KeyExtractor>) -> Policy {
        if let Some(from_file) = &mut self.from_file {
            from_file.has_key = true;
        }
        self.with_key(Keyed(key))
    }
}

impl<K> Policy<K> {
    /// The file that the policy follows, and where that describes it.
    pub(in crate::policy) fn followed(&self) -> Option<(&Arc<File>, &Arc<str>)> {
        let FromFile { file, place, .. } = self.from_file.as_ref()?;
        Some((file.as_ref()?, place))
    }
}

/// Replaces what a policy has of its file.
pub(in crate::policy) fn renew<K: PolicyKey>(policy: &mut Policy<K>, policies: &Policies, described: &FilePolicy) {
    let Some(from_file) = &mut policy.from_file else { return };
    from_file.listed = policies.listed();
    from_file.settings = described.settings.clone();
    if let Some(key) = described.key.as_ref().filter(|_| from_file.has_key) {
        policy.extractor.replace(key);
    }
    policy.policy_limit = policies.switched(described.policy_limit.clone());
}

impl Policies {
    /// What the file has about a policy, with its key if that is needed.
    pub(in crate::policy) fn describe(&self, place: &str, needs_key: bool) -> Result<FilePolicy, ConfigError> {
        let Entry { fields, plans } = self.entry(place)?;
        let without_plan = fields.limit.clone();
        let limit = match plans {
            None => without_plan.into(),
            Some(plans) => of_policy(place, plans.limit(without_plan, &self.extensions))?,
        };
        of_policy(place, fields.limit.validate_wait(fields.wait))?;
        let mut policy_limit = PolicyLimit::new(policy_at(place).into(), limit);
        policy_limit.validate()?;
        if let Some(plans) = plans {
            policy_limit.of_plans = plans.limits().chain([&fields.limit]).cloned().collect();
        }
        // An operator can reset the counts of all plans before a request of each was here.
        #[cfg(feature = "admin")]
        for limit in &policy_limit.of_plans {
            let _ = policy_limit.chosen.of(limit.clone());
        }
        let scope = Scope {
            routes: fields.routes.scope(|| self.scopes()),
            methods: fields.methods.0.clone(),
        };
        let scope = (!scope.is_everything())
            .then(|| -> Condition { Arc::new(move |parts| scope.contains(parts, Spelling::Either)) });

        Ok(FilePolicy {
            place: place.into(),
            policy_limit: if fields.enabled {
                policy_limit
            } else {
                policy_limit.switched_off()
            },
            settings: Settings {
                cost: Some(Cost::Fixed(fields.cost)),
                scope,
                failure_mode: Some(fields.failure_mode),
                enforced: fields.enforced(),
                thresholds: fields.warn_at.0.clone(),
                ban: fields.ban,
                longest_wait: Some(fields.wait),
                max_waiting: Some(fields.max_waiting),
                ..Settings::default()
            },
            key: needs_key.then(|| self.key(place)).transpose()?,
        })
    }
}

/// Policies that limit nothing.
impl Policies {
    /// The names of the policies that neither [`get`](Self::get), [`unkeyed`](Self::unkeyed) nor [`layer`](Self::layer) of this
    /// value or a clone of it has returned: they are configured, and limit nothing. Look at it when all layers are built.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policies};
    ///
    /// # #[cfg(feature = "file")] {
    /// let policies = Policies::from_toml(
    ///     "policies.mails.limit = 'sliding-log 3/h'
    ///      policies.logins.limit = 'sliding-log 5/min'",
    /// )?;
    /// let mails = Limiter::new(MemoryStore::new(), policies.unkeyed("mails")?);
    /// assert_eq!(policies.unused(), ["logins"]);
    /// # let _ = mails;
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    #[must_use]
    pub fn unused(&self) -> Vec<String> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let unused = self.places().filter(|place| !taken.contains(*place));
        unused.map(str::to_owned).collect()
    }

    /// Logs the names of the [unused](Self::unused) policies as one warning, if there are any.
    ///
    /// Call it when all layers are built, before the application serves requests: no later moment is known to the policies
    /// themselves.
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// let policies: Policies = serde_json::from_str(r#"{"policies": {"mails": {"limit": "sliding-log 3/h"}}}"#)?;
    /// assert_eq!(policies.unused(), ["mails"]);
    /// policies.warn_of_unused(); // of `mails`
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn warn_of_unused(&self) {
        warn_of_unused(&self.unused());
    }
}

/// Logs these names, if there are any.
pub(in crate::policy) fn warn_of_unused(names: &[String]) {
    #[cfg(feature = "tracing")]
    if !names.is_empty() {
        tracing::warn!(
            policies = names.join(", "),
            "policies of a file of limits are not used: no layer or limiter has them"
        );
    }
    let _ = names;
}

/// Policies that limit nothing.
impl LivePolicies {
    /// The names of the policies of the last load that no layer or limiter was given, as [`Policies::unused`](crate::Policies::unused).
    ///
    /// ```
    /// use tower_quota::{LivePolicies, Policies};
    ///
    /// # #[cfg(feature = "file")] {
    /// let policies = LivePolicies::from(Policies::from_toml("policies.mails.limit = 'sliding-log 3/h'")?);
    /// assert_eq!(policies.unused(), ["mails"]);
    /// assert!(policies.unkeyed("mails").is_ok());
    /// assert!(policies.unused().is_empty());
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    #[must_use]
    pub fn unused(&self) -> Vec<String> {
        self.file.state().unused()
    }

    /// Logs the names of the [unused](Self::unused) policies as one warning, if there are any, as
    /// [`Policies::warn_of_unused`](crate::Policies::warn_of_unused).
    ///
    /// `reload_on_change` does so by itself after its first interval.
    ///
    /// ```
    /// use tower_quota::{LivePolicies, Policies};
    ///
    /// # #[cfg(feature = "file")] {
    /// let policies = LivePolicies::from(Policies::from_toml("policies.mails.limit = 'sliding-log 3/h'")?);
    /// assert_eq!(policies.unused(), ["mails"]);
    /// policies.warn_of_unused(); // of `mails`
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    pub fn warn_of_unused(&self) {
        warn_of_unused(&self.unused());
    }
}
