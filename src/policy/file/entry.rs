use std::{borrow::Cow, collections::BTreeMap, fmt, marker::PhantomData, sync::Arc, time::Duration};

use http::{HeaderName, Method};
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};

use super::{
    scope::{Routes, Scope},
    values::{Extensions, length, methods, not_null, routes, table},
};
use crate::{
    Ban, ConfigError, FailureMode, Limit,
    decide::{EnforcedShare, POSSIBLE_WAITING},
    key::KeySpec,
    policy::{
        limit::validate_name,
        plans::ChoosePlan,
        settings::{COST_FAULT, WAITING_FAULT},
    },
};

/// The limits of a policy by the plan of a request.
type ByPlan = BTreeMap<String, Limit>;

/// A policy as configuration describes it.
#[derive(Clone, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct PolicyEntry {
    pub(super) limit: Limit,
    #[serde(default, deserialize_with = "not_null")]
    pub(super) formerly: Option<Name>,
    #[serde(default, deserialize_with = "not_null")]
    plan: Option<Selector>,
    #[serde(default, deserialize_with = "not_null")]
    plans: Option<Unique<String, Limit>>,
    #[serde(default, deserialize_with = "not_null")]
    pub(super) key: Option<KeySpec>,
    #[serde(default, deserialize_with = "routes")]
    pub(super) routes: Routes,
    #[serde(default, deserialize_with = "methods")]
    pub(super) methods: Vec<Method>,
    #[serde(default, deserialize_with = "cost")]
    pub(super) cost: Option<u64>,
    #[serde(default, deserialize_with = "not_null")]
    pub(super) failure_mode: Option<FailureMode>,
    #[serde(default, deserialize_with = "length")]
    pub(super) wait: Option<Duration>,
    #[serde(default, deserialize_with = "max_waiting")]
    pub(super) max_waiting: Option<u64>,
    #[serde(default, deserialize_with = "not_null")]
    mode: Option<Mode>,
    #[serde(default, deserialize_with = "enforce_share")]
    enforce_share: Option<EnforcedShare>,
    #[serde(default, deserialize_with = "ban")]
    pub(super) ban: Option<Ban>,
    #[serde(default, deserialize_with = "not_null")]
    enabled: Option<bool>,
}

impl<'de> Deserialize<'de> for PolicyEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// By the derived function, which `remote` makes inherent.
        #[derive(Deserialize)]
        #[serde(transparent)]
        struct Fields(#[serde(with = "PolicyEntry")] PolicyEntry);

        let Fields(entry) = table(deserializer, "a table with a `limit`")?;
        entry.plans().map_err(D::Error::custom)?;
        if entry.mode == Some(Mode::Observe) && entry.enforce_share.is_some() {
            return Err(D::Error::custom(
                "the policy observes all keys, so that none is enforced by `enforce-share`; leave out `mode` or the share",
            ));
        }
        if entry.ban.is_some() && !entry.limits().any(Limit::is_counted) {
            return Err(D::Error::custom(format_args!(
                "a `ban` begins by denials of a limit that counts, and `{}` counts nothing; leave it out",
                entry.limit
            )));
        }
        Ok(entry)
    }
}

impl PolicyEntry {
    /// The same with the settings of the policy outside of the plans that a plan does not have.
    pub(super) fn over(mut self, common: &Self) -> Self {
        if matches!(self.routes, Routes::All) {
            self.routes = common.routes.clone();
        }
        if self.methods.is_empty() {
            self.methods.clone_from(&common.methods);
        }
        if (self.mode, self.enforce_share) == (None, None) {
            (self.mode, self.enforce_share) = (common.mode, common.enforce_share);
        }
        // Units are not taken ahead beside waits and bans.
        let takes_ahead = self.limits().any(|limit| limit.prefetch_time().is_some());
        let wait = self.wait.or(common.wait.filter(|_| !takes_ahead));
        let waits = wait.is_some_and(|longest| !longest.is_zero());
        Self {
            formerly: self.formerly.or_else(|| common.formerly.clone()),
            key: self.key.or_else(|| common.key.clone()),
            cost: self.cost.or(common.cost),
            failure_mode: self.failure_mode.or(common.failure_mode),
            wait,
            max_waiting: self.max_waiting.or(common.max_waiting.filter(|_| waits)),
            ban: self.ban.or(common.ban.filter(|_| !takes_ahead)),
            enabled: self.enabled.or(common.enabled),
            ..self
        }
    }

    /// The limits of its plans, and of requests without one.
    fn limits(&self) -> impl Iterator<Item = &Limit> {
        let of_plans = self.plans.iter().flat_map(|Unique(by_plan)| by_plan.values());
        of_plans.chain([&self.limit])
    }

    /// The keys that the policy is enforced for.
    pub(super) fn enforced(&self) -> EnforcedShare {
        match self.mode.unwrap_or_default() {
            Mode::Enforce => self.enforce_share.unwrap_or_default(),
            Mode::Observe => EnforcedShare::NONE,
        }
    }

    /// What selects the plan of a request, and the limits by plan, if the policy has them.
    pub(super) fn plans(&self) -> Result<Option<(&Selector, &ByPlan)>, ConfigError> {
        match (&self.plan, &self.plans) {
            (None, None) => Ok(None),
            (Some(selector), Some(Unique(by_plan))) => Ok(Some((selector, by_plan))),
            (None, Some(_)) => Err(ConfigError::new(
                "`plans` need a `plan`, which selects one, such as `\"extension:plan\"`",
            )),
            (Some(_), None) => Err(ConfigError::new(
                "a `plan` is selected of `plans`, which are limits by name",
            )),
        }
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.enabled.unwrap_or(true)
    }

    /// The requests that the policy is for.
    pub(super) fn scope(&self) -> Scope {
        Scope {
            routes: self.routes.clone(),
            methods: self.methods.clone(),
        }
    }
}

/// What a policy does with requests above its limit.
#[derive(Clone, Copy, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    #[default]
    Enforce,
    Observe,
}

fn enforce_share<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<EnforcedShare>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a share of the keys is a number from 0 to 1, such as 0.1")]
    enum Share {
        Fraction(f64),
    }

    let Share::Fraction(fraction) = Share::deserialize(deserializer)?;
    EnforcedShare::new(fraction).map(Some).map_err(D::Error::custom)
}

fn max_waiting<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let units = u64::deserialize(deserializer)?;
    match POSSIBLE_WAITING.contains(&units) {
        true => Ok(Some(units)),
        false => Err(D::Error::custom(WAITING_FAULT)),
    }
}

fn cost<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    match u64::deserialize(deserializer)? {
        0 => Err(D::Error::custom(COST_FAULT)),
        cost => Ok(Some(cost)),
    }
}

/// Values by name. A name that occurs twice, which JSON itself allows, is an error.
#[derive(Clone)]
pub(super) struct Unique<K, V>(pub(super) BTreeMap<K, V>);

impl<'de, K, V> Deserialize<'de> for Unique<K, V>
where
    K: Deserialize<'de> + fmt::Display + Ord,
    V: Deserialize<'de>,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect<K, V>(PhantomData<(K, V)>);

        impl<'de, K, V> Visitor<'de> for Collect<K, V>
        where
            K: Deserialize<'de> + fmt::Display + Ord,
            V: Deserialize<'de>,
        {
            type Value = Unique<K, V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table of names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut values = BTreeMap::new();
                while let Some(name) = map.next_key::<K>()? {
                    if values.contains_key(&name) {
                        return Err(A::Error::custom(format_args!("`{name}` occurs twice")));
                    }
                    values.insert(name, map.next_value()?);
                }
                Ok(Unique(values))
            }
        }

        deserializer.deserialize_map(Collect(PhantomData))
    }
}

/// The name of a policy.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name(pub(super) String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        validate_name(&name).map_err(D::Error::custom)?;
        Ok(Self(name))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The bans of a policy, as files have them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct BanTable {
    #[serde(default, deserialize_with = "not_null")]
    after: Option<u64>,
    #[serde(default, deserialize_with = "length")]
    within: Option<Duration>,
    #[serde(default, deserialize_with = "length")]
    first: Option<Duration>,
    #[serde(default, deserialize_with = "length")]
    longest: Option<Duration>,
}

fn ban<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Ban>, D::Error> {
    let table: BanTable = table(deserializer, "a table such as { after = 10, within = \"1h\" }")?;
    let (Some(after), Some(within)) = (table.after, table.within) else {
        return Err(D::Error::custom(
            "bans have `after`, a number of denials such as 10, and `within`, a length of time such as \"1h\"",
        ));
    };
    let ban = Ban::after(after, within);
    let ban = table.first.map_or(ban, |first| ban.first(first));
    let ban = table.longest.map_or(ban, |longest| ban.longest(longest));
    ban.validate().map_err(D::Error::custom)?;
    Ok(Some(ban))
}

/// What selects the plan of a request, in a file: `extension:tier` or `header:x-plan`.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(super) enum Selector {
    Extension(String),
    Header(HeaderName),
}

impl TryFrom<String> for Selector {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if let Some(name) = text.strip_prefix("extension:") {
            return Ok(Self::Extension(name.to_owned()));
        }
        let header = text.strip_prefix("header:").map(HeaderName::try_from);
        match header {
            Some(Ok(name)) => Ok(Self::Header(name)),
            _ => Err(format!(
                "`{text}` does not select a plan; what does looks like `extension:plan` or `header:x-plan`"
            )),
        }
    }
}

impl Selector {
    /// The plan of a request, if it has one.
    pub(super) fn select(&self, extensions: &Extensions) -> Result<ChoosePlan, ConfigError> {
        match self {
            Self::Extension(name) => {
                let text = extensions.get(name)?.text.clone();
                Ok(Arc::new(move |parts| text(parts).map(Cow::Owned)))
            }
            Self::Header(name) => {
                let name = name.clone();
                Ok(Arc::new(move |parts| {
                    let mut lines = parts.headers.get_all(&name).iter();
                    match (lines.next(), lines.next()) {
                        (Some(only), None) => only.to_str().ok().map(Cow::Borrowed),
                        _ => None,
                    }
                }))
            }
        }
    }
}
