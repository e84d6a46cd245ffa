//! The policies and stores of the layers and limiters that an `Admin` has.

use std::{sync::Arc, time::SystemTime};

use super::response::RefusedReload;
use crate::{
    FailureMode, Key, Limiter, Policy, RateLimitLayer,
    decision::{CheckContext, DenialWatch, Denials, PolicyContext},
    key::KeyForm,
    middleware::Enforcer,
    policy::Basis,
    store::{NamedLimit, Store},
};

/// A layer or a limiter.
#[derive(Clone)]
pub(super) enum Watched {
    Layer(Arc<Enforcer>),
    Limiter(Limiter),
}

impl From<&RateLimitLayer> for Watched {
    fn from(layer: &RateLimitLayer) -> Self {
        Self::Layer(layer.clone().into_enforcer())
    }
}

impl From<&Limiter> for Watched {
    fn from(limiter: &Limiter) -> Self {
        Self::Limiter(limiter.clone())
    }
}

/// All policies, with the numbers of their stores.
pub(super) fn all_policies(watched: &[Watched]) -> Arc<[WatchedPolicy]> {
    let mut policies: Vec<_> = watched.iter().flat_map(Watched::policies).collect();
    let mut stores = Vec::new();
    for policy in &mut policies {
        let store = policy.context.store.id();
        if !stores.contains(&store) {
            stores.push(store);
        }
        policy.store = stores.iter().take_while(|other| **other != store).count() + 1;
    }
    policies.into()
}

impl Watched {
    /// LimitCounts its denials, each policy those of so many keys.
    pub(super) fn watch(&self, keys: usize) -> DenialWatch {
        let policies = self.policies();
        let count = |denials: &Denials| denials.watch(policies.len(), keys);
        match self {
            Self::Layer(enforcer) => count(&enforcer.policies.newest().context.denials),
            Self::Limiter(limiter) => count(&limiter.policies.newest().context.denials),
        }
    }

    /// Its policies after the last reload, in their order.
    fn policies(&self) -> Vec<WatchedPolicy> {
        match self {
            Self::Layer(enforcer) => policies(&enforcer.policies.newest(), |policy| policy.extractor().form()),
            Self::Limiter(limiter) => policies(&limiter.policies.newest(), |_| KeyForm::any()),
        }
    }
}

fn policies<K: Clone>(newest: &Basis<K>, key_form: fn(&Policy<K>) -> KeyForm) -> Vec<WatchedPolicy> {
    let policies = newest.policies.iter().enumerate();
    let watched = policies.map(|(position, policy)| WatchedPolicy {
        context: newest.context.here().clone(),
        position,
        store: 0,
        name: policy.name().to_owned(),
        limits: policy.known_limits(),
        key_form: key_form(policy),
        unkeyed: policy.clone().without_key(),
        cost: newest.context.policies[position].settings.fixed_cost(),
        reloaded_at: policy.reloaded_at(),
        #[cfg(feature = "serde")]
        refused_reload: policy
            .refused_reload()
            .map(|refused| RefusedReload::new(refused.at, &refused.error)),
        #[cfg(not(feature = "serde"))]
        refused_reload: None,
    });
    watched.collect()
}

/// A policy of a layer or a limiter.
#[derive(Clone)]
pub(super) struct WatchedPolicy {
    pub(super) context: Arc<CheckContext>,
    pub(super) position: usize,
    /// The number of its store in a report.
    pub(super) store: usize,
    pub(super) name: String,
    /// The limits that are known.
    pub(super) limits: Vec<Arc<NamedLimit>>,
    /// What its keys are made of.
    pub(super) key_form: KeyForm,
    pub(super) unkeyed: Policy<()>,
    /// Unless it is computed for each request.
    pub(super) cost: Option<u64>,
    pub(super) reloaded_at: Option<SystemTime>,
    /// The last load of its file, if it was refused.
    pub(super) refused_reload: Option<RefusedReload>,
}

impl WatchedPolicy {
    /// Whether both have the same counts.
    pub(super) fn shares_counts(&self, other: &Self) -> bool {
        self.name == other.name && self.store == other.store
    }

    pub(super) fn failure_mode(&self) -> FailureMode {
        self.policy().settings.failure_mode.unwrap_or_default()
    }

    /// The limit of a key that is [bound](Key::bound) in place of this limit, if an override applies.
    pub(super) fn overriding(&self, limit: &NamedLimit, key: &Key) -> Option<Arc<NamedLimit>> {
        self.unkeyed.overriding(&self.context, &limit.limit, key)
    }

    /// The limit under its name in another layer or limiter on the store, if that is another one.
    pub(super) fn other_limit(&self) -> Option<String> {
        self.context.other_limit(self.policy()).map(|limit| limit.to_string())
    }

    /// Whether it only observes.
    pub(super) fn is_observed(&self) -> bool {
        self.policy().settings.enforced.is_none()
    }

    /// The share of the keys that it is enforced for.
    pub(super) fn enforced_share(&self) -> f64 {
        self.policy().settings.enforced.fraction()
    }

    /// The settings of its bans as text, if it has bans.
    pub(super) fn ban(&self) -> Option<String> {
        self.policy().ban.as_ref().map(ToString::to_string)
    }

    fn policy(&self) -> &PolicyContext {
        &self.context.policies[self.position]
    }
}
