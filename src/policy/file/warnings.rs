//! Log lines of loads, and of what a file describes that no layer or limiter has.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Policies,
    config::{Config, FilePolicy},
    follow::Used,
    plans::{is_of_plan, policy_at},
};
use crate::{Limit, Policy, policy::Basis};

/// Policies that limit nothing.
impl Policies {
    /// The names of the policies of the last load that this value and its clones have returned to nothing, by [`get`](Self::get),
    /// [`layer`](Self::layer), [`plans`](Self::plans) or their variants for limiters; `pro/api` for the policy `api` of the plan `pro`:
    /// they are configured, and limit nothing. Look at it when all layers are built.
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
        let state = self.file.state();
        let unused = unused(&state.config, &state.used).into_iter();
        unused.map(str::to_owned).collect()
    }

    /// Logs the names of the [unused](Self::unused) policies as one warning, if there are any.
    ///
    /// Call it when all layers are built, before the application serves requests. [`reload_on_change`](Self::reload_on_change) does so
    /// by itself after its first interval. A load logs those that it adds.
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
        log_unused(self.file.displayed().as_deref(), &self.unused().join(", "));
    }

    #[cfg(feature = "file")]
    pub(super) fn log_refused(&self, error: &str) {
        let file = self.file.displayed();
        tracing::warn!(error, file, "a changed file of limits is not applied");
    }
}

/// Where the file describes policies that nothing uses.
fn unused<'a>(config: &'a Config, used: &Used) -> Vec<&'a str> {
    let used: BTreeSet<&str> = used.values().map(|policy| &*policy.place).collect();
    config.places().filter(|place| !used.contains(place)).collect()
}

fn log_unused(file: Option<&str>, policies: &str) {
    if !policies.is_empty() {
        tracing::warn!(
            policies,
            file,
            "policies of a file of limits are not used: no layer or limiter has them"
        );
    }
}

/// Logs a load with the policies that it turns off, what it removes of that which layers and limiters have, and what it adds that
/// they do not have.
pub(super) fn log_load(file: Option<&str>, (before, config): (&Config, &Config), used: &Used) {
    let off = config.off().join(", ");
    tracing::info!(
        policies = config.names().count(),
        off = (!off.is_empty()).then_some(&*off),
        file,
        "changed limits are applied"
    );
    if config.is_off() {
        tracing::warn!(file, "a file of limits turns all of its limits off");
    }

    let gone = used.iter().filter(|(place, _)| config.nearest(place).is_none());
    for place in gone.map(|(_, policy)| &policy.place).collect::<BTreeSet<_>>() {
        tracing::warn!(
            policy = place,
            file,
            "the file of limits has no such policy anymore; it keeps its last numbers"
        );
    }

    let left = used.keys().filter(|place| config.nearest(place).is_some());
    let plans: BTreeSet<&str> = left.filter_map(|place| Some(place.split_once('/')?.0)).collect();
    let gone = before.plans.difference(&config.plans);
    for plan in gone.filter(|plan| plans.contains(plan.as_str())) {
        tracing::warn!(
            plan,
            file,
            "the file of limits has no such plan anymore; its policies have the numbers of the plan `default`, or those outside of plans"
        );
    }
    let selects = |(place, policy): (&String, &FilePolicy)| is_of_plan(place) && policy.key.is_some();
    if before.plan.is_some() && before.plan != config.plan && !config.plans.is_empty() && used.iter().any(selects) {
        tracing::warn!(
            file,
            "the file of limits has another `plan`, which selects plans from the next start on"
        );
    }

    // Without any, the layers are still to be built.
    if !used.is_empty() {
        let unused = unused(config, used).into_iter();
        // What is built of plans takes the policies of its names in each plan.
        let names: BTreeSet<&str> = used
            .keys()
            .filter(|place| is_of_plan(place))
            .map(|place| policy_at(place))
            .collect();
        let (later, never): (Vec<_>, Vec<_>) =
            unused.partition(|place| names.contains(policy_at(place)) && config.is_in_plans(place));
        let added = never.into_iter().filter(|place| !before.policies.contains_key(*place));
        if !later.is_empty() {
            tracing::warn!(
                policies = later.join(", "),
                file,
                "policies of a file of limits apply from the next start on: layers and limiters have them then"
            );
        }
        log_unused(file, &added.collect::<Vec<_>>().join(", "));
    }
}

/// Logs the overrides that have no effect by the limits of a load, or admit nothing by its costs.
pub(super) fn warn_of_overrides(basis: &Basis) {
    let Some(overrides) = &basis.context.overrides else {
        return;
    };
    let mut unfit = BTreeMap::<&str, usize>::new();
    for one in overrides.list() {
        let policies = basis
            .policies
            .iter()
            .filter(|policy| policy.counted_as() == &*one.policy && policy.limit() != Some(&Limit::Unlimited));
        if let Some(policy) = policies.clone().next()
            && Policy::accept_override(policies, &one.limit).is_err()
        {
            *unfit.entry(policy.name()).or_default() += 1;
        }
    }
    for (policy, overrides) in unfit {
        tracing::warn!(
            policy,
            overrides,
            "overrides do not fit the changed limit of their policy; set them again"
        );
    }
}
