use std::{collections::BTreeMap, fmt, path::Path, sync::Arc};

use http::HeaderName;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, SeqAccess, Visitor},
};

use super::{Policy, Unkeyed, validate_name};
use crate::{
    ConfigError, FailureMode, KeyExtractor, Limit,
    key::{self, ClientIpSource, KeySpec},
};

/// Policies by name, from a file.
///
/// In TOML, or the same in JSON:
///
/// ```
/// use tower_quota::{Limit, Policies};
///
/// # #[cfg(feature = "axum")] {
/// let policies = Policies::from_toml(r#"
///     enabled = true # `false` turns all of it off
///
///     [client-ip] # the service is behind one proxy
///     header = "x-forwarded-for"
///     trusted = ["10.0.0.0/8"]
///
///     [policies.say-hi]
///     limit = "sliding-log 2/30s"
///     key = ["client-ip", "route"]
///
///     [policies.login]
///     limit = "sliding-log 5/min"
///     key = "client-ip"
///     cost = 2
///     failure-mode = "closed"
/// "#)?;
///
/// assert_eq!(policies.get("say-hi")?.limit().to_string(), "sliding-log 2/30s");
/// assert!(policies.get("log-in").unwrap_err().to_string().contains("`login`, `say-hi`"));
/// # }
/// # Ok::<(), tower_quota::ConfigError>(())
/// ```
///
/// | field | value | default |
/// | --- | --- | --- |
/// | `limit` | the limit, as [`Limit`] parses it | required |
/// | `key` | a [key](#keys), or a list of at most 16, which means all of them together | none; [`unkeyed`](Self::unkeyed) returns such a policy |
/// | `cost` | the cost of a request | 1 |
/// | `failure-mode` | what happens while the store fails: [`local`, `local 1/4`, `open` or `closed`](FailureMode) | `local` |
/// | `enabled` | with `false` the policy admits everything and counts nothing | `true` |
///
/// A field that is not one of these, and a name that stands twice, are errors that show the place.
///
/// # Keys
///
/// | key | what requests are counted by |
/// | --- | --- |
/// | `ip` | the [peer address](key::ip()): behind a proxy, that of the proxy |
/// | `client-ip` | the [client address](key::client_ip) that a trusted proxy recorded, by the table [`[client-ip]`](#the-client-address) |
/// | `route` | the [matched route](key::route()) (feature `axum`) |
/// | `path` | the [path](key::path()), which the caller chooses: on a wildcard route every URL has a quota of its own |
/// | `method` | the [method](key::method()) |
/// | `header:<name>` | a [header](fn@key::header) |
/// | `constant:<text>` | [nothing](key::constant()): one limit for all requests |
///
/// `a or b` is the key `a`, and `b` for requests that have no `a`; at most 16 alternatives.
///
/// A header that the client can send is no identity. With `header:x-user-id or ip`, each new value is a new quota, so a
/// caller that changes it with every request is never limited. Use `header:` only for a header that a proxy in front sets
/// and removes from what the client sends, and add a policy by address. Headers in which proxies record the client address,
/// such as `x-forwarded-for` or `cf-connecting-ip`, are refused as `header:` keys: use `client-ip`.
///
/// # The client address
///
/// | field of `[client-ip]` | value | default |
/// | --- | --- | --- |
/// | `header` | the one header in which the proxies record the client: `x-forwarded-for`, `forwarded`, or one that holds a single address, such as `cf-connecting-ip` or `x-real-ip` | required |
/// | `trusted` | a list of the networks of the proxies, whose header is read: `["10.0.0.0/8", "fd00::/8"]`; or `"any-peer"`, for a server that only its proxy can reach | required |
/// | `hops` | with `x-forwarded-for`, the number of proxies: the client is the n-th entry from the right | none: the client is the first entry from the right that is not trusted |
#[derive(Clone, Debug)]
#[must_use]
pub struct Policies {
    enabled: bool,
    client_ip: Option<ClientIp>,
    policies: BTreeMap<String, Entry>,
}

/// Constructors.
impl Policies {
    /// Policies from TOML.
    ///
    /// # Errors
    ///
    /// If the text does not describe policies; the message shows the place.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text).map_err(|error| ConfigError::new(error.to_string()))?;
        file.try_into()
    }

    /// Policies from JSON.
    ///
    /// # Errors
    ///
    /// If the text does not describe policies; the message shows the place.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let file: File = serde_json::from_str(text).map_err(|error| ConfigError::new(error.to_string()))?;
        file.try_into()
    }

    /// Policies from a file whose name ends in `.toml` or `.json`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or does not describe policies; the message shows the place.
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
    /// The policy of this name, for a layer. Get all policies at the start of the program, so that errors show there.
    ///
    /// # Errors
    ///
    /// If the file has no such policy, or it has no key.
    pub fn get(&self, name: &str) -> Result<Policy, ConfigError> {
        let policy = self.unkeyed(name)?;
        match self.key(name)? {
            Some(key) => Ok(policy.key(key)),
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
            .failure_mode(entry.failure_mode))
    }

    fn key(&self, name: &str) -> Result<Option<Arc<dyn KeyExtractor>>, ConfigError> {
        let Some(key) = self.policies.get(name).and_then(|entry| entry.key.as_ref()) else {
            return Ok(None);
        };
        match key.extractor(self.client_ip.as_ref().map(|ClientIp(client_ip)| client_ip)) {
            Ok(key) => Ok(Some(key)),
            Err(error) => Err(ConfigError::because(format!("the policy `{name}`: {error}"), error)),
        }
    }

    /// The names of all policies, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.policies.keys().map(String::as_str)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    #[serde(default = "yes")]
    enabled: bool,
    client_ip: Option<ClientIp>,
    policies: Entries,
}

impl TryFrom<File> for Policies {
    type Error = ConfigError;

    fn try_from(file: File) -> Result<Self, ConfigError> {
        let policies = Self {
            enabled: file.enabled,
            client_ip: file.client_ip,
            policies: file.policies.0,
        };
        for name in policies.names() {
            policies.key(name)?;
        }
        Ok(policies)
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    limit: Limit,
    key: Option<KeySpec>,
    #[serde(default = "one", deserialize_with = "cost")]
    cost: u64,
    #[serde(default, deserialize_with = "failure_mode")]
    failure_mode: FailureMode,
    #[serde(default = "yes")]
    enabled: bool,
}

fn yes() -> bool {
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
            "a request costs at least 1; `enabled = false` counts nothing",
        )),
        cost => Ok(cost),
    }
}

/// A map without duplicate names, which JSON itself allows.
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

/// The client address as a file describes it: the header, the networks whose header is read, and the number of proxies.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "ClientIpTable")]
struct ClientIp(key::Ip);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientIpTable {
    header: String,
    trusted: Trusted,
    hops: Option<usize>,
}

impl TryFrom<ClientIpTable> for ClientIp {
    type Error = ConfigError;

    fn try_from(table: ClientIpTable) -> Result<Self, ConfigError> {
        let header = table.header.parse::<HeaderName>().map_err(|_| {
            ConfigError::new(format!(
                "`{}` is not the name of a header; one looks like `header = \"x-forwarded-for\"`",
                table.header
            ))
        })?;

        let source = match (header.as_str(), table.hops) {
            ("x-forwarded-for", None) => ClientIpSource::XForwardedFor,
            ("x-forwarded-for", Some(0)) => {
                return Err(ConfigError::new(
                    "there is at least one proxy: `hops = 1` takes the last entry of `x-forwarded-for`",
                ));
            }
            ("x-forwarded-for", Some(hops)) => ClientIpSource::XForwardedForHop(hops),
            ("forwarded", None) => ClientIpSource::Forwarded,
            (_, None) => ClientIpSource::Header(header),
            (_, Some(_)) => {
                return Err(ConfigError::new(format!(
                    "`hops` counts entries of `x-forwarded-for`; leave it out for `{header}`"
                )));
            }
        };

        let client_ip = key::client_ip(source);
        match table.trusted {
            Trusted::AnyPeer => Ok(Self(client_ip.trust_any_peer())),
            Trusted::Networks(networks) => client_ip.try_trusted(networks).map(Self),
        }
    }
}

/// The peers whose header is read.
enum Trusted {
    AnyPeer,
    Networks(Vec<String>),
}

impl<'de> Deserialize<'de> for Trusted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NetworksOrAny;

        const EXPECTED: &str = "a list of networks such as `[\"10.0.0.0/8\"]`, or `\"any-peer\"` for a server that only \
                                its proxy can reach";

        impl<'de> Visitor<'de> for NetworksOrAny {
            type Value = Trusted;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED)
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Trusted, E> {
                match text {
                    "any-peer" => Ok(Trusted::AnyPeer),
                    _ => Err(E::custom(format_args!("`{text}` is not {EXPECTED}"))),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Trusted, A::Error> {
                let mut networks = Vec::new();
                while let Some(network) = list.next_element()? {
                    networks.push(network);
                }
                match networks.is_empty() {
                    true => Err(A::Error::custom(format_args!(
                        "an empty list trusts no proxy; write {EXPECTED}"
                    ))),
                    false => Ok(Trusted::Networks(networks)),
                }
            }
        }

        deserializer.deserialize_any(NetworksOrAny)
    }
}
