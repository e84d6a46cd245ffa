//! What a file has about one policy, and what the policy has of it.

use std::sync::Arc;

use super::{Policies, entry::Entry, of_policy, plans::policy_at};
use crate::{
    ConfigError, KeyExtractor,
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
        if !fields.wait.is_zero() {
            of_policy(place, fields.limit.validate_wait())?;
        }
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
