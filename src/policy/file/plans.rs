//! The plans of a file: tables of policies by name.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Policies,
    config::Config,
    entry::{Name, PolicyEntry, Unique},
    follow::Used,
};
use crate::{
    ConfigError,
    policy::{
        IntoPolicies, Plans, Policy,
        plans::ChoosePlan,
        set::{validate_for_layer, validate_for_limiter},
    },
};

/// The plan of requests without one.
const DEFAULT: &str = "default";

pub(super) fn policy_at(place: &str) -> &str {
    place.rsplit('/').next().unwrap_or(place)
}

pub(super) fn is_of_plan(place: &str) -> bool {
    place.contains('/')
}

fn place_of(plan: &str, policy: &str) -> String {
    format!("{plan}/{policy}")
}

type Places = BTreeMap<String, PolicyEntry>;

/// The names of the plans, and all policies by their places.
///
/// The settings of a policy that its plan does not have are those of the policy of its name outside of the plans.
pub(super) fn join(
    Unique(policies): Unique<Name, PolicyEntry>,
    plans: BTreeMap<String, Unique<Name, PolicyEntry>>,
) -> Result<(BTreeSet<String>, Places), ConfigError> {
    let mut places: Places = policies.into_iter().map(|(Name(name), entry)| (name, entry)).collect();
    let mut names = BTreeSet::new();
    for (plan, Unique(policies)) in plans {
        if plan.contains('/') {
            return Err(ConfigError::new(format!(
                "`{plan}` is no name of a plan, which contains no `/`"
            )));
        }
        for (Name(name), entry) in policies {
            let entry = match places.get(&name) {
                Some(common) => entry.over(common),
                None => entry,
            };
            places.insert(place_of(&plan, &name), entry);
        }
        names.insert(plan);
    }
    Ok((names, places))
}

/// Plans.
impl Policies {
    /// The policies of these names in each [plan](Self#plans) of the file, for a layer.
    ///
    /// The plan `default` is that of requests without one, or with one that the file does not have, of which a warning is logged:
    /// an empty table, such as `[plans.free]`, is a plan with the policies outside of plans. A reload changes what the plans
    /// have; the policies of a plan that it removes have the numbers of the plan `default`, or those outside of plans. A plan that it adds, a policy of a name that
    /// the plan and the file had not, and another `plan` to select by are for the next start. A warning is logged for
    /// the policies and for another `plan`.
    ///
    /// ```
    /// use tower_quota::{MemoryStore, Policies, RateLimitLayer};
    ///
    /// /// What authentication has found.
    /// #[derive(Clone)]
    /// struct User { id: u64, plan: &'static str }
    ///
    /// # #[cfg(feature = "file")] {
    /// let policies = Policies::from_toml(r#"
    ///     plan = "extension:plan"
    ///
    ///     [policies.requests]
    ///     limit = "sliding-log 10/min"
    ///     key = "extension:user"
    ///
    ///     [policies.streams]
    ///     limit = "concurrency 1"
    ///     key = "extension:user"
    ///
    ///     [plans.pro.requests]
    ///     limit = "sliding-log 100/min"
    ///     wait = "2s"
    ///
    ///     [plans.pro.streams]
    ///     limit = "concurrency 5"
    ///     failure-mode = "closed"
    /// "#)?
    /// .with_extension("user", |user: &User| user.id)
    /// .with_extension("plan", |user: &User| user.plan.to_owned());
    /// let layer = RateLimitLayer::try_new(MemoryStore::new(), policies.plans(["requests", "streams"])?)?;
    /// # let _ = layer;
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If neither the file nor one of its plans has a policy of a name, if one has no key, if there are plans and no `plan` that
    /// selects one, or if that is an extension that is not [registered](Self::with_extension).
    pub fn plans<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) -> Result<Plans, ConfigError> {
        let config = self.file.config();
        let plans = config.plans_with(names, |place| self.keyed(place))?;
        Ok(match config.choose_plan()? {
            Some(choose) => plans.chosen_by(choose),
            None => plans,
        })
    }

    /// The same without keys, for a limiter, which [chooses the plan](crate::LimiterRequest::plan) of each request.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policies};
    ///
    /// # #[cfg(feature = "file")] {
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policies = Policies::from_toml("
    ///     policies.mails.limit = 'sliding-log 3/h'
    ///     plans.pro.mails.limit = 'sliding-log 100/h'
    /// ")?;
    /// let mails = Limiter::new(MemoryStore::new(), policies.unkeyed_plans(["mails"])?);
    /// assert_eq!(mails.check("42").await?.remaining(), 2);
    /// assert_eq!(mails.request("42").plan("pro").check().await?.remaining(), 98);
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If neither the file nor one of its plans has a policy of a name.
    pub fn unkeyed_plans<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) -> Result<Plans<()>, ConfigError> {
        let take_up = |place: &str| self.file.state().take_up(&self.file, place, ((), false));
        self.file.config().plans_with(names, take_up)
    }

    /// The policies of these names for a layer: of each plan, or of requests without a plan if the last load has no plans.
    pub(crate) fn for_layer<N: AsRef<str>>(&self, names: &[N]) -> Result<Vec<Policy>, ConfigError> {
        let config = self.file.config();
        if !config.plans.is_empty() {
            return self.plans(names).map(Plans::into_policies);
        }
        let of_default = |name: &N| {
            config.require(name.as_ref())?;
            self.keyed(&place_of(DEFAULT, name.as_ref()))
        };
        names.iter().map(of_default).collect()
    }

    pub(super) fn keyed(&self, place: &str) -> Result<Policy, ConfigError> {
        let mut state = self.file.state();
        let key = state.config.key(place)?;
        state.take_up(&self.file, place, (key, true))
    }
}

impl Config {
    /// The place itself, or where the file has the policy of the name for all plans, if it has either. Requests of a plan that the
    /// file does not have are of the plan [`DEFAULT`].
    pub(super) fn nearest<'a>(&'a self, place: &str) -> Option<&'a str> {
        let of_plan = place.split_once('/');
        let of_default = of_plan
            .filter(|(plan, _)| !self.plans.contains(*plan))
            .map(|(_, name)| place_of(DEFAULT, name));
        [Some(place), of_default.as_deref(), Some(policy_at(place))]
            .into_iter()
            .flatten()
            .find_map(|place| Some(self.policies.get_key_value(place)?.0.as_str()))
    }

    /// Whether one of the plans that a start builds of the file has its policy of this name from this place.
    pub(super) fn is_in_plans(&self, place: &str) -> bool {
        let mut plans = [DEFAULT].into_iter().chain(self.plans.iter().map(String::as_str));
        is_of_plan(place) || plans.any(|plan| self.nearest(&place_of(plan, place)) == Some(place))
    }

    /// How the plan of a request is chosen, if there are plans.
    fn choose_plan(&self) -> Result<Option<ChoosePlan>, ConfigError> {
        match &self.plan {
            Some(selector) => Ok(Some(selector.select(&self.extensions)?)),
            None if self.plans.is_empty() => Ok(None),
            None => Err(ConfigError::new(
                "`plans` need a `plan` at the top of the file, which selects one, such as `\"extension:plan\"`",
            )),
        }
    }

    /// Fails where the next start would, which builds plans of all that the file has then.
    pub(super) fn validate_plans(&self, used: &Used) -> Result<(), ConfigError> {
        let mut names = BTreeMap::new();
        for (place, policy) in used.iter().filter(|(place, _)| is_of_plan(place)) {
            *names.entry(policy_at(place)).or_insert(false) |= policy.key.is_some();
        }
        if names.values().any(|has_key| *has_key) {
            self.choose_plan()?;
        }
        let plans = [DEFAULT].into_iter().chain(self.plans.iter().map(String::as_str));
        let places = plans.flat_map(|plan| names.iter().map(move |name| (plan, name)));
        for (plan, (name, has_key)) in places {
            let place = place_of(plan, name);
            if self.nearest(&place).is_none() || used.contains_key(&place) {
                continue;
            }
            let described = self.describe(&place, *has_key)?;
            let policy = Policy {
                settings: described.settings,
                ..Policy::of_limit(self.switched(described.policy_limit))
            };
            policy.validate()?;
            match described.key {
                Some(key) => validate_for_layer(&policy.with_key(key))?,
                None => validate_for_limiter(&policy.for_limiter())?,
            }
        }
        Ok(())
    }

    fn plans_with<N: AsRef<str>, K>(
        &self,
        names: impl IntoIterator<Item = N>,
        get: impl Fn(&str) -> Result<Policy<K>, ConfigError>,
    ) -> Result<Plans<K>, ConfigError> {
        let names: Vec<N> = names.into_iter().collect();
        let others = self.plans.iter().map(String::as_str).filter(|plan| *plan != DEFAULT);
        let of_plan = |plan| {
            let places = names.iter().map(|name| place_of(plan, name.as_ref()));
            let policies = places
                .filter(|place| self.nearest(place).is_some())
                .map(|place| get(&place));
            policies.collect::<Result<Vec<_>, _>>()
        };
        let mut plans = Plans::new(DEFAULT, of_plan(DEFAULT)?);
        for plan in others {
            plans = plans.plan(plan, of_plan(plan)?);
        }
        for name in &names {
            if self.places().all(|place| policy_at(place) != name.as_ref()) {
                self.require(name.as_ref())?;
            }
        }
        Ok(plans)
    }
}
