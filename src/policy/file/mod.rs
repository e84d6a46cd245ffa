//! Policies in configuration files.

mod client_ip;
mod entry;

use std::{collections::BTreeMap, sync::Arc};
#[cfg(feature = "file")]
use std::{fs, path::Path};

use serde::Deserialize;

use self::{
    client_ip::ClientIp,
    entry::{Entries, Entry, Mode, yes},
};
use super::{Keyed, Policy, Unkeyed, terms::Terms};
use crate::{ConfigError, KeyExtractor};

/// Policies by name, from configuration.
///
/// The feature `serde` implements [`Deserialize`], so that policies can be a part of an application's own configuration, in
/// any format of serde that describes itself, such as TOML, JSON or YAML:
///
/// ```
/// use tower_quota::Policies;
///
/// #[derive(serde::Deserialize)]
/// struct Config {
///     port: u16,
///     limits: Policies,
/// }
///
/// let config: Config = serde_json::from_str(r#"{
///     "port": 3000,
///     "limits": {"policies": {"login": {"limit": "sliding-log 5/min", "key": "ip"}}}
/// }"#)?;
/// assert_eq!(config.port, 3000);
/// assert_eq!(config.limits.get("login")?.limit(), Some(&"sliding-log 5/min".parse()?));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The feature `file` reads TOML and JSON itself:
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{Policies, SlidingLog};
///
/// # #[cfg(all(feature = "axum", feature = "file"))] {
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
/// assert_eq!(policies.get("say-hi")?.limit(), Some(&SlidingLog::new(2, Duration::from_secs(30)).into()));
/// assert!(policies.get("log-in").unwrap_err().to_string().contains("`login`, `say-hi`"));
/// # }
/// # Ok::<(), tower_quota::ConfigError>(())
/// ```
///
/// | field | value | default |
/// | --- | --- | --- |
/// | `limit` | the limit, in one of its [spellings](crate::limit#limits-as-text) | required |
/// | `key` | a [key](#keys), or a list of at most 16, which means all of them together | none; for [`unkeyed`](Self::unkeyed) |
/// | `cost` | the cost of a request | 1 |
/// | `failure-mode` | what happens while the store fails: [`local`, `local 1/4`, `open` or `closed`](crate::FailureMode) | `local` |
/// | `mode` | `enforce`; or `observe`, to count and deny [nothing](Policy::observe_only) | `enforce` |
/// | `enabled` | with `false` the policy admits everything and counts nothing | `true` |
///
/// Unknown fields, and names that occur twice, are errors that show the place.
///
/// # Keys
///
/// | key | what requests are counted by |
/// | --- | --- |
/// | `ip` | the [peer address](crate::key::ip()): behind a proxy, that of the proxy |
/// | `client-ip` | the [client address](crate::key::client_ip) that a trusted proxy recorded, by the table [`[client-ip]`](#the-client-address) |
/// | `route` | the [matched route](crate::key::route()) (feature `axum`) |
/// | `path` | the [path](crate::key::path()), which the caller chooses: on a wildcard route every URL has a quota of its own |
/// | `method` | the [method](crate::key::method()) |
/// | `header:<name>` | a [header](fn@crate::key::header) |
/// | `constant:<text>` | [nothing](crate::key::constant()): one limit for all requests |
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
/// | `trusted` | a list of the networks of the proxies, whose header is read: `["10.0.0.0/8", "fd00::/8"]`; `"unix-peer"` for a proxy on a Unix socket; or `"any-peer"`, for a server that only its proxy can reach | required |
/// | `hops` | with `x-forwarded-for`, the number of proxies: the client is the n-th entry from the right | none: the client is the first entry from the right that is not trusted |
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "Table", expecting = "a table with `policies`")]
#[must_use]
pub struct Policies {
    enabled: bool,
    client_ip: Option<ClientIp>,
    policies: BTreeMap<String, Entry>,
}

/// Constructors, with the feature `file`.
#[cfg(feature = "file")]
impl Policies {
    /// Policies from TOML.
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// let policies = Policies::from_toml("policies.login = { limit = 'sliding-log 5/min', key = 'ip' }")?;
    /// assert!(policies.get("login").is_ok());
    ///
    /// let error = Policies::from_toml("policies.login = { limit = 'sliding-log 5' }").unwrap_err();
    /// assert!(error.to_string().contains("line 1") && error.to_string().contains("`sliding-log 100/min`"));
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the text does not describe policies; the message shows the place.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        toml::from_str(text).map_err(|error| ConfigError::new(error.to_string()))
    }

    /// Policies from JSON.
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// let policies = Policies::from_json(r#"{"policies": {"login": {"limit": "sliding-log 5/min", "key": "ip"}}}"#)?;
    /// assert!(policies.get("login").is_ok());
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the text does not describe policies; the message shows the place.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        serde_json::from_str(text).map_err(|error| ConfigError::new(error.to_string()))
    }

    /// Policies from a file whose name ends in `.toml` or `.json`.
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// let error = Policies::from_file("limits.yaml").unwrap_err();
    /// assert_eq!(error.to_string(), "`limits.yaml`: the name of a file of limits ends in `.toml` or `.json`");
    /// ```
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or does not describe policies; the message shows the place.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        Self::parse(path, &read(path)?)
    }

    /// Policies from the content of a file.
    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let parsed = match format_of(path)? {
            Format::Toml => Self::from_toml(text),
            Format::Json => Self::from_json(text),
        };
        parsed.map_err(|error| ConfigError::new(format!("`{}`: {error}", path.display())))
    }
}

/// Reads a file of limits.
#[cfg(feature = "file")]
pub(super) fn read(path: &Path) -> Result<String, ConfigError> {
    format_of(path)?;
    fs::read_to_string(path)
        .map_err(|error| ConfigError::because(format!("`{}` cannot be read: {error}", path.display()), error))
}

#[cfg(feature = "file")]
enum Format {
    Toml,
    Json,
}

#[cfg(feature = "file")]
fn format_of(path: &Path) -> Result<Format, ConfigError> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => Ok(Format::Toml),
        Some("json") => Ok(Format::Json),
        _ => {
            let fault = "the name of a file of limits ends in `.toml` or `.json`";
            Err(ConfigError::new(format!("`{}`: {fault}", path.display())))
        }
    }
}

/// Questions.
impl Policies {
    /// The policy of this name, for a layer. Get all policies when the program starts, so that it does not start with a name
    /// that is missing.
    ///
    /// # Errors
    ///
    /// If there is no such policy, or it has no key.
    pub fn get(&self, name: &str) -> Result<Policy, ConfigError> {
        let key = self.key(name)?;
        Ok(self.unkeyed(name)?.with_key(Keyed(key)))
    }

    /// The policy of this name without its key: for a limiter, or for a key that only code can extract.
    ///
    /// ```
    /// use tower_quota::{key, Policies};
    ///
    /// /// The user that authentication found.
    /// #[derive(Clone)]
    /// struct UserId(u64);
    ///
    /// let policies: Policies = serde_json::from_str(r#"{"policies": {"mails": {"limit": "sliding-log 3/h"}}}"#)?;
    /// assert!(policies.get("mails").is_err());
    ///
    /// let mails = policies.unkeyed("mails")?.key(key::extension::<UserId>(|user| user.0.to_string()));
    /// assert_eq!(mails.name(), "mails");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If there is no such policy.
    pub fn unkeyed(&self, name: &str) -> Result<Policy<Unkeyed>, ConfigError> {
        let terms = self.switched(self.terms(name)?);
        Ok(Policy::with_terms(terms))
    }

    /// The names of all policies, in alphabetical order.
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// let policies: Policies = serde_json::from_str(
    ///     r#"{"policies": {"say-hi": {"limit": "sliding-log 2/30s"}, "login": {"limit": "sliding-log 5/min"}}}"#,
    /// )?;
    /// assert_eq!(policies.names().collect::<Vec<_>>(), ["login", "say-hi"]);
    /// # Ok::<(), serde_json::Error>(())
    /// ```
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.policies.keys().map(String::as_str)
    }
}

impl Policies {
    pub(super) fn contains(&self, name: &str) -> bool {
        self.policies.contains_key(name)
    }

    /// What the file has about a policy, apart from the switch at its top.
    pub(super) fn terms(&self, name: &str) -> Result<Terms, ConfigError> {
        let entry = self.entry(name)?;
        let terms = Terms {
            cost: entry.cost,
            failure_mode: entry.failure_mode,
            observed: entry.mode == Mode::Observe,
            ..Terms::try_new(name.to_owned(), entry.limit.clone())?
        };
        Ok(if entry.enabled { terms } else { terms.switched_off() })
    }

    /// The terms of a policy by the switch at the top of the file.
    pub(super) fn switched(&self, terms: Terms) -> Terms {
        if self.enabled { terms } else { terms.switched_off() }
    }

    /// The key of a policy.
    pub(super) fn key(&self, name: &str) -> Result<Arc<dyn KeyExtractor>, ConfigError> {
        let Some(key) = &self.entry(name)?.key else {
            return Err(ConfigError::new(format!(
                "the policy `{name}` has no key; add a `key` such as `\"ip\"` where it is configured, or one in code, to the \
                 policy that `unkeyed` returns"
            )));
        };
        let client_ip = self.client_ip.as_ref().map(|ClientIp(client_ip)| client_ip);
        key.extractor(client_ip)
            .map_err(|error| ConfigError::because(format!("the policy `{name}`: {error}"), error))
    }

    fn entry(&self, name: &str) -> Result<&Entry, ConfigError> {
        self.policies.get(name).ok_or_else(|| {
            let names: Vec<_> = self.names().map(|name| format!("`{name}`")).collect();
            ConfigError::new(format!("there is no policy `{name}`; there are {}", names.join(", ")))
        })
    }
}

/// The fields of [`Policies`], before their keys are built.
#[derive(Deserialize)]
#[serde(
    deny_unknown_fields,
    rename_all = "kebab-case",
    expecting = "a table with `policies`"
)]
struct Table {
    #[serde(default = "yes")]
    enabled: bool,
    client_ip: Option<ClientIp>,
    policies: Entries,
}

impl TryFrom<Table> for Policies {
    type Error = ConfigError;

    fn try_from(table: Table) -> Result<Self, ConfigError> {
        let policies = Self {
            enabled: table.enabled,
            client_ip: table.client_ip,
            policies: table.policies.0,
        };
        let keyed = policies.policies.iter().filter(|(_, entry)| entry.key.is_some());
        for (name, _) in keyed {
            policies.key(name)?;
        }
        Ok(policies)
    }
}
