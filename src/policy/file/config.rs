//! What a file contains: its policies by their places, and what applies to all of them; and what a policy has of its file.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::Deserialize;

use super::{
    File,
    entry::{Name, PolicyEntry, Selector, Unique},
    plans::{is_of_plan, join, policy_at},
    scope::{Routes, Scope, Spelling},
    values::{Extensions, RequestMatcher, client_ip, conditions, not_null, requests},
};
use crate::{
    ConfigError, KeyExtractor,
    decide::{Condition, Cost, LongestWait, PolicyFile, Settings},
    key,
    policy::{limit::PolicyLimit, set::Access},
    store::NamedLimit,
};

/// The content of a file. Keys of extensions are built later, when these are registered.
#[derive(Clone, Deserialize)]
#[serde(try_from = "FileFields")]
pub(super) struct Config {
    enabled: bool,
    /// The rule of the table `[client-ip]`.
    pub(super) client_ip: Option<key::Ip>,
    listed: Option<Arc<Access>>,
    /// By their places: their names, and `plan/name` for those of plans.
    pub(super) policies: BTreeMap<String, PolicyEntry>,
    /// What selects the plan of a request.
    pub(super) plan: Option<Selector>,
    pub(super) plans: BTreeSet<String>,
    pub(super) extensions: Extensions,
    /// Of a file that was loaded again: the places of which requests may meet the policies. One that a load has added is none of
    /// them until the application uses it.
    pub(super) met: Option<BTreeSet<String>>,
}

/// The fields of a file, as they are written.
#[derive(Deserialize)]
#[serde(
    deny_unknown_fields,
    rename_all = "kebab-case",
    expecting = "a table with `policies`"
)]
struct FileFields {
    #[serde(default, deserialize_with = "not_null")]
    enabled: Option<bool>,
    #[serde(default, deserialize_with = "client_ip")]
    client_ip: Option<key::Ip>,
    #[serde(default, deserialize_with = "requests")]
    skip: Vec<RequestMatcher>,
    #[serde(default, deserialize_with = "requests")]
    block: Vec<RequestMatcher>,
    policies: Unique<Name, PolicyEntry>,
    #[serde(default, deserialize_with = "not_null")]
    plan: Option<Selector>,
    #[serde(default, deserialize_with = "not_null")]
    plans: Option<Unique<String, Unique<Name, PolicyEntry>>>,
}

impl TryFrom<FileFields> for Config {
    type Error = ConfigError;

    fn try_from(file: FileFields) -> Result<Self, ConfigError> {
        let (plans, policies) = join(file.policies, file.plans.map(|Unique(plans)| plans).unwrap_or_default())?;
        if file.plan.is_some() && plans.is_empty() {
            return Err(ConfigError::new(
                "the `plan` of the file selects one of its `plans`, and there are none; remove it, or add a table such as \
                 `[plans.pro.api]`",
            ));
        }
        for (place, entry) in &policies {
            if matches!(&entry.formerly, Some(Name(former)) if former == policy_at(place)) {
                return Err(ConfigError::new(
                    "`formerly` is another name, under which the policy was counted; remove it",
                )
                .of_policy(place));
            }
            if let Some(key) = &entry.key {
                key.validate(file.client_ip.as_ref())
                    .map_err(|error| error.of_policy(place))?;
            }
        }
        let listed = Access {
            skipped: conditions(&file.skip, file.client_ip.as_ref(), Spelling::All)
                .map_err(|error| error.within("`[skip]`"))?,
            blocked: conditions(&file.block, file.client_ip.as_ref(), Spelling::Any)
                .map_err(|error| error.within("`[block]`"))?,
        };
        Ok(Self {
            enabled: file.enabled.unwrap_or(true),
            listed: (!listed.is_empty()).then(|| Arc::new(listed)),
            client_ip: file.client_ip,
            policies,
            plan: file.plan,
            plans,
            extensions: Extensions::default(),
            met: None,
        })
    }
}

impl Config {
    /// The names of the policies outside of plans, in alphabetical order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.places().filter(|place| !is_of_plan(place))
    }

    /// Where the file describes policies.
    pub(super) fn places(&self) -> impl Iterator<Item = &str> {
        self.policies.keys().map(String::as_str)
    }

    /// The places of which requests may meet the policies.
    pub(super) fn places_met(&self) -> BTreeSet<String> {
        let all = || self.policies.keys().cloned().collect();
        self.met.clone().unwrap_or_else(all)
    }

    /// What the policies of the plan of a place are for that are for some requests only, apart from those that are for the others,
    /// and from those that no request meets.
    fn scopes_of_plan(&self, place: &str) -> Vec<Scope> {
        let plan = place.strip_suffix(policy_at(place)).unwrap_or_default();
        let names: BTreeSet<&str> = self.places().map(policy_at).collect();
        let scopes = names.into_iter().filter_map(|name| {
            let place = format!("{plan}{name}");
            let met = self.met.as_ref();
            let is_met = met.is_none_or(|met| met.contains(&place) || met.contains(name));
            let nearest = self.nearest(&place).filter(|_| is_met)?;
            Some(self.policies.get(nearest)?.scope())
        });
        scopes
            .filter(|scope| !matches!(scope.routes, Routes::Others(_)) && !scope.is_everything())
            .collect()
    }

    /// The limit of a policy by the switch at the top of the file.
    pub(super) fn switched(&self, limit: PolicyLimit) -> PolicyLimit {
        if self.enabled { limit } else { limit.switched_off() }
    }

    /// Where the file turns policies off by a switch of their own.
    pub(super) fn off(&self) -> Vec<&str> {
        let off = self.policies.iter().filter(|(_, entry)| !entry.is_enabled());
        off.map(|(place, _)| place.as_str()).collect()
    }

    /// Whether the file turns all of its policies off.
    pub(super) fn is_off(&self) -> bool {
        !self.enabled || !self.policies.is_empty() && self.off().len() == self.policies.len()
    }

    /// The requests that the file skips or blocks, unless it is switched off.
    pub(super) fn listed(&self) -> Option<Arc<Access>> {
        self.listed.clone().filter(|_| self.enabled)
    }

    pub(super) fn entry(&self, place: &str) -> Result<&PolicyEntry, ConfigError> {
        self.policies.get(place).ok_or_else(|| self.unknown(policy_at(place)))
    }

    /// Requires a policy of this name outside of plans.
    pub(super) fn require(&self, name: &str) -> Result<(), ConfigError> {
        match is_of_plan(name) {
            true => Err(self.unknown(name)),
            false => self.entry(name).map(drop),
        }
    }

    fn unknown(&self, name: &str) -> ConfigError {
        let names: Vec<_> = self.names().map(|name| format!("`{name}`")).collect();
        let others = match names.is_empty() {
            true => "the file has none".to_owned(),
            false => format!("there are {}", names.join(", ")),
        };
        ConfigError::new(format!("there is no policy `{name}`; {others}"))
    }

    /// The key of the policy of a place.
    pub(super) fn key(&self, place: &str) -> Result<Arc<dyn KeyExtractor>, ConfigError> {
        let name = self.nearest(place).unwrap_or(place);
        let Some(key) = &self.entry(name)?.key else {
            return Err(ConfigError::new(format!(
                "the policy `{name}` has no key; add a `key` such as `\"ip\"` where it is configured, or one in code, to the \
                 policy that `unkeyed` returns"
            )));
        };
        let extension = |name: &str| Ok(self.extensions.get(name)?.key.clone());
        let extractor = key.extractor(self.client_ip.as_ref(), &extension);
        extractor.map_err(|error| error.of_policy(name))
    }
}

/// What a file has about one policy.
#[derive(Clone)]
pub(super) struct FilePolicy {
    /// Where the file describes it.
    pub(super) place: String,
    pub(super) policy_limit: PolicyLimit,
    pub(super) settings: Settings,
    pub(super) key: Option<Arc<dyn KeyExtractor>>,
}

/// What a policy has of its file, beside its limit and its key.
#[derive(Clone)]
pub(in crate::policy) struct FromFile {
    /// Those for which code has no others.
    pub(in crate::policy) settings: Settings,
    /// The requests that the file lists as skipped or blocked.
    pub(in crate::policy) listed: Option<Arc<Access>>,
    /// The place of the policy: its name, after that of its plan and `/` if it is of one.
    pub(super) place: Arc<str>,
    pub(in crate::policy) file: Arc<File>,
    /// Whether the key of the policy is that of the file.
    pub(super) has_key: bool,
}

impl FromFile {
    /// Whether the last load has no such policy.
    #[cfg(feature = "admin")]
    pub(in crate::policy) fn is_missing(&self) -> bool {
        self.file.state().config.nearest(&self.place).is_none()
    }

    /// Whether the last load has switched it off, or all policies.
    #[cfg(feature = "admin")]
    pub(in crate::policy) fn is_off(&self) -> bool {
        let config = &self.file.state().config;
        let entry = config.nearest(&self.place).and_then(|place| config.policies.get(place));
        !config.enabled || entry.is_some_and(|entry| !entry.is_enabled())
    }

    /// The same for a policy that has another key.
    pub(in crate::policy) fn without_key(self) -> Self {
        Self { has_key: false, ..self }
    }
}

impl Config {
    /// What the file has about the policy of a place, with its key if that is needed.
    pub(super) fn describe(&self, used_at: &str, needs_key: bool) -> Result<FilePolicy, ConfigError> {
        let place = self.nearest(used_at).unwrap_or(used_at);
        let entry = self.entry(place)?;
        let of_policy = |error: ConfigError| error.of_policy(place);
        let name: Arc<str> = policy_at(place).into();
        let policy_limit = match entry.plans().map_err(of_policy)? {
            None => PolicyLimit::new(name, entry.limit.clone()),
            Some((selector, limits)) => {
                let select = selector.select(&self.extensions).map_err(of_policy)?;
                let (limits, without) = (limits.clone(), entry.limit.clone());
                PolicyLimit {
                    of_plans: limits.values().chain([&without]).cloned().collect(),
                    ..PolicyLimit::chosen(
                        name,
                        Arc::new(move |parts| {
                            let planned = select(parts).and_then(|plan| limits.get(&*plan));
                            planned.unwrap_or(&without).clone()
                        }),
                    )
                }
            }
        };
        let former = entry.formerly.as_ref().map(|Name(former)| former.as_str().into());
        let policy_limit = policy_limit.formerly(former);
        for limit in policy_limit.of_plans.iter().chain([&entry.limit]) {
            limit.validate()?;
        }
        // The counts of all plans can be reset before a request of each was here.
        for limit in &policy_limit.of_plans {
            let _ = policy_limit.chosen.of(limit.clone(), &policy_limit.fixed);
        }
        let mut scope = entry.scope();
        if let Routes::Others(others) = &mut scope.routes {
            *others = self.scopes_of_plan(used_at);
        }
        let scope = (!scope.is_everything())
            .then(|| -> Condition { Arc::new(move |parts| scope.contains(parts, Spelling::Any)) });

        Ok(FilePolicy {
            place: place.to_owned(),
            policy_limit: if entry.is_enabled() {
                policy_limit
            } else {
                policy_limit.switched_off()
            },
            settings: Settings {
                cost: entry.cost.map(Cost::Fixed),
                scope,
                failure_mode: Some(entry.failure_mode.unwrap_or_default()),
                enforced: entry.enforced(),
                ban: entry.ban,
                longest_wait: Some(LongestWait::Fixed(entry.wait.unwrap_or_default())),
                max_waiting: entry.max_waiting,
                ..Settings::default()
            },
            key: needs_key.then(|| self.key(place)).transpose()?,
        })
    }
}

impl PolicyFile for FromFile {
    fn number(&self) -> u64 {
        self.file.number
    }

    fn newest_limit(&self) -> Option<Arc<NamedLimit>> {
        let state = self.file.state();
        let used = state.used.get(&*self.place)?;
        Some(state.config.switched(used.policy_limit.clone()).fixed)
    }
}
