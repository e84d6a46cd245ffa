use std::{collections::BTreeMap, fmt, marker::PhantomData, time::Duration};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};

use super::{
    super::name::validate_name,
    ban::ban,
    length::Length,
    plans::{Plans, Selector},
    texts::{Methods, Routes},
    warn_at::WarnAt,
};
use crate::{Ban, FailureMode, Limit, key::KeySpec, store::Waiting};

/// A policy as configuration describes it.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "Fields")]
pub(super) struct Entry {
    pub(super) fields: Fields,
    pub(super) plans: Option<Plans>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Fields {
    pub(super) limit: Limit,
    plan: Option<Selector>,
    plans: Option<Unique<String, Limit>>,
    pub(super) key: Option<KeySpec>,
    #[serde(default)]
    pub(super) routes: Routes,
    #[serde(default)]
    pub(super) methods: Methods,
    #[serde(default = "one", deserialize_with = "cost")]
    pub(super) cost: u64,
    #[serde(default, deserialize_with = "failure_mode")]
    pub(super) failure_mode: FailureMode,
    #[serde(default, deserialize_with = "wait")]
    pub(super) wait: Duration,
    #[serde(default = "most_waiting", deserialize_with = "max_waiting")]
    pub(super) max_waiting: u64,
    #[serde(default)]
    pub(super) mode: Mode,
    #[serde(default)]
    pub(super) warn_at: WarnAt,
    #[serde(default, deserialize_with = "ban")]
    pub(super) ban: Option<Ban>,
    #[serde(default = "yes")]
    pub(super) enabled: bool,
}

impl TryFrom<Fields> for Entry {
    type Error = &'static str;

    fn try_from(mut fields: Fields) -> Result<Self, &'static str> {
        let plans = match (fields.plan.take(), fields.plans.take()) {
            (None, None) => None,
            (Some(selector), Some(Unique(limits))) => Some(Plans { selector, limits }),
            (None, Some(_)) => return Err("`plans` need a `plan`, which selects one, such as `\"extension:plan\"`"),
            (Some(_), None) => return Err("a `plan` is selected of `plans`, which are limits by name"),
        };
        Ok(Self { fields, plans })
    }
}

/// What a policy does with requests above its limit.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Mode {
    #[default]
    Enforce,
    Observe,
}

pub(super) fn yes() -> bool {
    true
}

fn one() -> u64 {
    1
}

fn failure_mode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<FailureMode, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(D::Error::custom)
}

fn wait<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    Length::deserialize(deserializer).map(|Length(longest)| longest)
}

fn most_waiting() -> u64 {
    Waiting::MOST
}

fn max_waiting<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let units = u64::deserialize(deserializer)?;
    if !Waiting::POSSIBLE.contains(&units) {
        return Err(D::Error::custom(
            "1 to 999999999999999 units wait for a limit; without `wait` none does",
        ));
    }
    Ok(units)
}

fn cost<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    match u64::deserialize(deserializer)? {
        0 => Err(D::Error::custom(
            "a request costs at least 1; a policy that is not `enabled` counts nothing",
        )),
        cost => Ok(cost),
    }
}

/// Values by name. A name that occurs twice, which JSON itself allows, is an error.
#[derive(Clone, Debug)]
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
#[derive(PartialEq, Eq, PartialOrd, Ord)]
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
