use std::{collections::BTreeMap, fmt, path::Path, sync::Arc};

use http::{HeaderName, request::Parts};
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, SeqAccess, Visitor},
};

use crate::{
    ConfigError, FailureMode, Key, KeyExtractor, Limit, Policy, Unkeyed,
    key::{self, KeyError},
    policy::validate_name,
};

/// Policies by name, from a file.
///
/// In TOML, or the same in JSON:
///
/// ```
/// use tower_quota::{Limit, Policies};
///
/// let policies = Policies::from_toml(r#"
///     enabled = true # `false` turns all of it off
///
///     [policies.say-hi]
///     limit = "sliding-log 2/30s"
///     key = ["ip", "path"]
///
///     [policies.login]
///     limit = "sliding-log 5/min"
///     key = "header:x-user-id or ip" # the address where there is no user
///     cost = 2
///     failure-mode = "closed"
/// "#)?;
///
/// assert_eq!(policies.get("say-hi")?.limit().to_string(), "sliding-log 2/30s");
/// assert!(policies.get("log-in").unwrap_err().to_string().contains("`login`, `say-hi`"));
/// # Ok::<(), tower_quota::ConfigError>(())
/// ```
///
/// | field | what it says | default |
/// | --- | --- | --- |
/// | `limit` | how much, as [`Limit`] parses it | required |
/// | `key` | whom: `ip`, `path`, `route` (feature `axum`), `method`, `header:<name>`, `constant:<text>`, with `or` between for "else"; several in a list mean "and" | none; [`unkeyed`](Self::unkeyed) gives such a policy |
/// | `cost` | what a request costs | 1 |
/// | `failure-mode` | `open` or `closed` | `open` |
/// | `enabled` | with `false` the policy admits everything and counts nothing | `true` |
///
/// A field that is not one of these, and a name that stands twice, are errors that show the place.
#[derive(Clone, Debug)]
#[must_use]
pub struct Policies {
    enabled: bool,
    policies: BTreeMap<String, Entry>,
}

/// Constructors.
impl Policies {
    /// Policies from TOML.
    ///
    /// # Errors
    ///
    /// If the text does not say what policies are; the message shows the place.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text).map_err(|error| ConfigError::new(error.to_string()))?;
        Ok(file.into())
    }

    /// Policies from JSON.
    ///
    /// # Errors
    ///
    /// If the text does not say what policies are; the message shows the place.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let file: File = serde_json::from_str(text).map_err(|error| ConfigError::new(error.to_string()))?;
        Ok(file.into())
    }

    /// Policies from a file whose name ends in `.toml` or `.json`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or does not say what policies are; the message shows the place.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let parse = match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => Self::from_toml,
            Some("json") => Self::from_json,
            _ => {
                let fault = "the name of a file of limits ends in `.toml` or `.json`";
                return Err(ConfigError::new(format!("`{}`: {fault}", path.display())));
            }
        };

        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::because(format!("`{}` cannot be read: {error}", path.display()), error))?;
        parse(&text).map_err(|error| ConfigError::new(format!("`{}`: {error}", path.display())))
    }
}

/// Questions.
impl Policies {
    /// The policy of this name, for a layer. Ask for all that you need when you start.
    ///
    /// # Errors
    ///
    /// If the file has no such policy, or it has no key.
    pub fn get(&self, name: &str) -> Result<Policy, ConfigError> {
        let policy = self.unkeyed(name)?;
        let key = self.policies.get(name).and_then(|entry| entry.key.clone());
        match key {
            Some(Extractor(key)) => Ok(policy.key(key)),
            None => Err(ConfigError::new(format!(
                "the policy `{name}` has no key; add one to the file, such as `key = \"ip\"`, or in the code, with \
                 `Policies::unkeyed`"
            ))),
        }
    }

    /// The policy of this name, whatever key the file gives it: for a limiter, or for a key that only code can find.
    ///
    /// # Errors
    ///
    /// If the file has no such policy.
    pub fn unkeyed(&self, name: &str) -> Result<Policy<Unkeyed>, ConfigError> {
        let Some(entry) = self.policies.get(name) else {
            let names: Vec<_> = self.names().map(|name| format!("`{name}`")).collect();
            return Err(ConfigError::new(format!(
                "there is no policy `{name}`; there are {}",
                names.join(", ")
            )));
        };

        let limit = match self.enabled && entry.enabled {
            true => entry.limit.clone(),
            false => Limit::Unlimited,
        };
        Ok(Policy::try_new(name.to_owned(), limit)?
            .cost(entry.cost)
            .failure_mode(entry.failure_mode.into()))
    }

    /// The names of all policies, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.policies.keys().map(String::as_str)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default = "yes")]
    enabled: bool,
    policies: Entries,
}

impl From<File> for Policies {
    fn from(file: File) -> Self {
        Self {
            enabled: file.enabled,
            policies: file.policies.0,
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    limit: Limit,
    key: Option<Extractor>,
    #[serde(default = "one", deserialize_with = "cost")]
    cost: u64,
    #[serde(default)]
    failure_mode: Mode,
    #[serde(default = "yes")]
    enabled: bool,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    #[default]
    Open,
    Closed,
}

impl From<Mode> for FailureMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Open => Self::Open,
            Mode::Closed => Self::Closed,
        }
    }
}

fn yes() -> bool {
    true
}

fn one() -> u64 {
    1
}

fn cost<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    match u64::deserialize(deserializer)? {
        0 => Err(D::Error::custom(
            "a request costs at least 1; `enabled = false` counts nothing",
        )),
        cost => Ok(cost),
    }
}

/// A map in which no name stands twice; JSON itself allows that.
struct Entries(BTreeMap<String, Entry>);

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
                        return Err(A::Error::custom(format_args!("the policy `{name}` stands twice")));
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

/// A key as a file spells it.
#[derive(Clone)]
struct Extractor(Arc<dyn KeyExtractor>);

/// The keys of several extractors together.
struct All(Vec<Arc<dyn KeyExtractor>>);

impl KeyExtractor for All {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        let mut all: Option<Key> = None;
        for extractor in &self.0 {
            let Some(key) = extractor.extract(parts)? else {
                return Ok(None);
            };
            all = Some(match all {
                Some(all) => all.and(key),
                None => key,
            });
        }
        Ok(all)
    }
}

fn extractor(text: &str) -> Result<Arc<dyn KeyExtractor>, String> {
    if let Some((first, rest)) = text.split_once(" or ") {
        return Ok(Arc::new(extractor(first)?.or(extractor(rest)?)));
    }

    let text = text.trim();
    Ok(match text.split_once(':') {
        None if text == "ip" => Arc::new(key::ip()),
        None if text == "path" => Arc::new(key::path()),
        None if text == "method" => Arc::new(key::method()),
        #[cfg(feature = "axum")]
        None if text == "route" => Arc::new(key::route()),
        Some(("constant", value)) => Arc::new(key::constant(value)),
        Some(("header", name)) => match HeaderName::try_from(name) {
            Ok(name) => Arc::new(key::header(name)),
            Err(_) => {
                return Err(format!(
                    "`{name}` is not the name of a header; one looks like `header:x-user-id`"
                ));
            }
        },
        _ => {
            return Err(format!(
                "`{text}` is not a key; one is `ip`, `path`, `route` (feature `axum`), `method`, `header:x-user-id` or \
                 `constant:all`"
            ));
        }
    })
}

impl<'de> Deserialize<'de> for Extractor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrSeveral;

        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = Extractor;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key such as `\"ip\"`, or a list of them such as `[\"ip\", \"path\"]`")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Extractor, E> {
                extractor(text).map(Extractor).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Extractor, A::Error> {
                let mut all = Vec::new();
                while let Some(Extractor(one)) = list.next_element()? {
                    all.push(one);
                }
                if all.is_empty() {
                    return Err(A::Error::custom(
                        "an empty list is no key; one limit for everybody says `constant:all`",
                    ));
                }
                Ok(Extractor(Arc::new(All(all))))
            }
        }

        deserializer.deserialize_any(OneOrSeveral)
    }
}

impl fmt::Debug for Extractor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<extractor>")
    }
}
