use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};

use super::super::name::validate_name;
use crate::{FailureMode, Limit, key::KeySpec};

/// A policy as configuration describes it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Entry {
    pub(super) limit: Limit,
    pub(super) key: Option<KeySpec>,
    #[serde(default = "one", deserialize_with = "cost")]
    pub(super) cost: u64,
    #[serde(default, deserialize_with = "failure_mode")]
    pub(super) failure_mode: FailureMode,
    #[serde(default)]
    pub(super) mode: Mode,
    #[serde(default = "yes")]
    pub(super) enabled: bool,
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

fn cost<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    match u64::deserialize(deserializer)? {
        0 => Err(D::Error::custom(
            "a request costs at least 1; a policy that is not `enabled` counts nothing",
        )),
        cost => Ok(cost),
    }
}

/// The policies by name. A name that occurs twice, which JSON itself allows, is an error.
pub(super) struct Entries(pub(super) BTreeMap<String, Entry>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("policies by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(Name(name)) = map.next_key()? {
                    if entries.contains_key(&name) {
                        return Err(A::Error::custom(format_args!("the policy `{name}` occurs twice")));
                    }
                    entries.insert(name, map.next_value()?);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(Collect)
    }
}

struct Name(String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        validate_name(&name).map_err(D::Error::custom)?;
        Ok(Self(name))
    }
}
