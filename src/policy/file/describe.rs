//! What a file has about one policy, and what the policy has of it.

use std::sync::Arc;

use super::{File, config::Config, entry::PolicyEntry, plans::policy_at};
use crate::{
    ConfigError, KeyExtractor,
    decision::{Condition, Cost, LongestWait, Settings},
    policy::{
        Policy, PolicyKey,
        limit::PolicyLimit,
        scope::{Scope, Spelling},
        set::Access,
    },
};

/// What a file has about one policy.
#[derive(Clone)]
pub(super) struct FilePolicy {
    /// Where it is in the file.
    place: Arc<str>,
    pub(super) policy_limit: PolicyLimit,
    settings: Settings,
    pub(super) key: Option<Arc<dyn KeyExtractor>>,
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
    file: Arc<File>,
    /// Whether the key of the policy is that of the file.
    has_key: bool,
}

impl FilePolicy {
    /// The policy, which follows the file.
    pub(super) fn policy(self, config: &Config, file: &Arc<File>) -> Policy<()> {
        let from_file = FromFile {
            settings: self.settings,
            listed: config.listed(),
            place: self.place,
            file: file.clone(),
            has_key: false,
        };
        Policy {
            from_file: Some(from_file),
            ..Policy::of_limit(config.switched(self.policy_limit))
        }
    }

    /// The same with the key that the file has.
    pub(super) fn keyed_policy(self, key: Arc<dyn KeyExtractor>, config: &Config, file: &Arc<File>) -> Policy {
        let mut policy = self.policy(config, file).with_key(key);
        if let Some(from_file) = &mut policy.from_file {
            from_file.has_key = true;
        }
        policy
    }

    /// Replaces what a policy has of its file.
    pub(super) fn renew<K: PolicyKey>(&self, policy: &mut Policy<K>, config: &Config) {
        let Some(from_file) = &mut policy.from_file else { return };
        from_file.listed = config.listed();
        from_file.settings = self.settings.clone();
        if let Some(key) = self.key.as_ref().filter(|_| from_file.has_key) {
            policy.extractor.replace(key);
        }
        policy.policy_limit = config.switched(self.policy_limit.clone());
    }
}

impl<K> Policy<K> {
    /// The file that the policy follows, and where that describes it.
    pub(in crate::policy) fn followed(&self) -> Option<(&Arc<File>, &Arc<str>)> {
        let FromFile { file, place, .. } = self.from_file.as_ref()?;
        Some((file, place))
    }
}

impl Config {
    /// What the file has about a policy, with its key if that is needed.
    pub(super) fn describe(&self, place: &str, needs_key: bool) -> Result<FilePolicy, ConfigError> {
        let PolicyEntry { fields, plans } = self.entry(place)?;
        let without_plan = fields.limit.clone();
        let name: Arc<str> = policy_at(place).into();
        let mut policy_limit = match plans {
            None => PolicyLimit::new(name, without_plan),
            Some(plans) => {
                let choose = plans.choose(without_plan, &self.extensions);
                PolicyLimit::chosen(name, choose.map_err(|error| error.of_policy(place))?)
            }
        };
        let valid = fields.limit.validate_wait(fields.wait.0);
        valid.map_err(|error| error.of_policy(place))?;
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
                ban: fields.ban,
                longest_wait: Some(LongestWait::Fixed(fields.wait.0)),
                max_waiting: Some(fields.max_waiting),
                ..Settings::default()
            },
            key: needs_key.then(|| self.key(place)).transpose()?,
        })
    }
}
