//! What a file contains: its policies by their places, and what applies to all of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::Deserialize;

use super::{
    entry::{Name, PolicyEntry, Selector, Unique, yes},
    plans::{is_of_plan, join, policy_at},
    requests::{Extensions, Requests},
    values::{ClientIp, Routes},
};
use crate::{
    ConfigError, KeyExtractor, key,
    key::Registered,
    policy::{
        limit::PolicyLimit,
        scope::{Scope, Spelling},
        set::Access,
    },
};

/// The content of a file. Keys of extensions are built later, when these are registered.
#[derive(Clone, Deserialize)]
#[serde(try_from = "FileFields")]
pub(super) struct Config {
    enabled: bool,
    client_ip: Option<ClientIp>,
    listed: Option<Arc<Access>>,
    /// By their places: their names, and `plan/name` for those of plans.
    pub(super) policies: BTreeMap<String, PolicyEntry>,
    /// What selects the plan of a request.
    pub(super) plan: Option<Selector>,
    pub(super) plans: BTreeSet<String>,
    pub(super) extensions: Extensions,
}

/// The fields of a file, as they are written.
#[derive(Deserialize)]
#[serde(
    deny_unknown_fields,
    rename_all = "kebab-case",
    expecting = "a table with `policies`"
)]
struct FileFields {
    #[serde(default = "yes")]
    enabled: bool,
    client_ip: Option<ClientIp>,
    #[serde(default)]
    skip: Requests,
    #[serde(default)]
    block: Requests,
    policies: Unique<Name, PolicyEntry>,
    plan: Option<Selector>,
    #[serde(default)]
    plans: Unique<String, Unique<Name, PolicyEntry>>,
}

impl TryFrom<FileFields> for Config {
    type Error = ConfigError;

    fn try_from(file: FileFields) -> Result<Self, ConfigError> {
        let client_ip = file.client_ip.as_ref().map(|ClientIp(client_ip)| client_ip);
        let (plans, policies) = join(file.policies, file.plans)?;
        for (place, entry) in &policies {
            if let Some(key) = &entry.fields.key {
                key.validate(client_ip).map_err(|error| error.of_policy(place))?;
            }
        }
        let listed = Access {
            skipped: file.skip.conditions(client_ip, Spelling::Both)?,
            blocked: file.block.conditions(client_ip, Spelling::Either)?,
        };
        Ok(Self {
            enabled: file.enabled,
            listed: (!listed.is_empty()).then(|| Arc::new(listed)),
            client_ip: file.client_ip,
            policies,
            plan: file.plan,
            plans,
            extensions: Extensions::default(),
        })
    }
}

impl Config {
    /// The names of all policies, in alphabetical order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.places().filter(|place| !is_of_plan(place))
    }

    /// Where the file describes policies.
    pub(super) fn places(&self) -> impl Iterator<Item = &str> {
        self.policies.keys().map(String::as_str)
    }

    /// The rule of the table `[client-ip]`.
    pub(super) fn client_ip(&self) -> Option<&key::Ip> {
        self.client_ip.as_ref().map(|ClientIp(client_ip)| client_ip)
    }

    /// What the policies are for that are for some requests only, apart from those that are for the others.
    pub(super) fn scopes(&self) -> Vec<Scope> {
        let entries = self.policies.values().map(|entry| &entry.fields);
        let scopes = entries
            .filter(|fields| !matches!(fields.routes, Routes::Others))
            .map(|fields| Scope {
                routes: fields.routes.scope(Vec::new),
                methods: fields.methods.0.clone(),
            });
        scopes.filter(|scope| !scope.is_everything()).collect()
    }

    /// The limit of a policy by the switch at the top of the file.
    pub(super) fn switched(&self, limit: PolicyLimit) -> PolicyLimit {
        if self.enabled { limit } else { limit.switched_off() }
    }

    /// The requests that the file skips or blocks, unless it is switched off.
    pub(super) fn listed(&self) -> Option<Arc<Access>> {
        self.listed.clone().filter(|_| self.enabled)
    }

    pub(super) fn entry(&self, place: &str) -> Result<&PolicyEntry, ConfigError> {
        self.policies.get(place).ok_or_else(|| {
            let name = policy_at(place);
            let names: Vec<_> = self.names().map(|name| format!("`{name}`")).collect();
            ConfigError::new(format!("there is no policy `{name}`; there are {}", names.join(", ")))
        })
    }
}

/// Keys.
impl Config {
    /// The key of a policy.
    pub(super) fn key(&self, name: &str) -> Result<Arc<dyn KeyExtractor>, ConfigError> {
        let Some(key) = &self.entry(name)?.fields.key else {
            return Err(ConfigError::new(format!(
                "the policy `{name}` has no key; add a `key` such as `\"ip\"` where it is configured, or one in code, to the \
                 policy that `unkeyed` returns"
            )));
        };
        let registered = Registered {
            client_ip: self.client_ip(),
            extension: &|name| self.extensions.key(name),
        };
        key.extractor(&registered).map_err(|error| error.of_policy(name))
    }
}
