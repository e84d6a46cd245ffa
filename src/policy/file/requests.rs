use std::{collections::BTreeMap, fmt::Display, sync::Arc};

use http::request::Parts;
use serde::{Deserialize, Deserializer};

use super::{
    Policies,
    scope::{Routes, Scope, Spelling},
    values::{Methods, Networks},
};
use crate::{ConfigError, KeyExtractor, decision::Condition, key, key::OneOrSeveral};

/// The requests that a file skips or blocks: those of each of these tables.
#[derive(Clone, Default)]
pub(super) struct Requests(Vec<RequestMatcher>);

/// Requests as a table describes them: those for which all of its fields hold.
#[derive(Clone, Deserialize)]
#[serde(try_from = "RequestFields")]
struct RequestMatcher(RequestFields);

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table with `networks`, `routes` or `methods`")]
struct RequestFields {
    clients: Option<Clients>,
    #[serde(default)]
    networks: Networks,
    #[serde(default)]
    routes: Routes,
    #[serde(default)]
    methods: Methods,
}

/// Clients that have no network.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Clients {
    Unknown,
}

impl TryFrom<RequestFields> for RequestMatcher {
    type Error = &'static str;

    fn try_from(fields: RequestFields) -> Result<Self, &'static str> {
        match &fields.routes {
            Routes::Others(_) => Err("the routes `others` are for a policy; list the routes of these requests"),
            _ if fields.clients.is_some() && !fields.networks.0.is_empty() => {
                Err("an unknown client is in no network; use two tables, which are alternatives")
            }
            Routes::All if fields.networks.0.is_empty() && fields.methods.0.is_empty() && fields.clients.is_none() => {
                Err("without `networks`, `clients`, `routes` or `methods` these would be all requests")
            }
            Routes::All | Routes::These(_) => Ok(Self(fields)),
        }
    }
}

impl Requests {
    /// The conditions of these requests, where the file describes the client address so.
    pub(super) fn conditions(
        &self,
        client_ip: Option<&key::Ip>,
        spelling: Spelling,
    ) -> Result<Vec<Condition>, ConfigError> {
        let condition = |RequestMatcher(fields): &RequestMatcher| -> Result<Condition, ConfigError> {
            let scope = Scope {
                routes: fields.routes.clone(),
                methods: fields.methods.0.clone(),
            };
            let of_client = match (fields.clients, client_ip) {
                (Some(Clients::Unknown), _) if spelling == Spelling::Both => {
                    return Err(ConfigError::new("an unknown client is never skipped, only blocked"));
                }
                (Some(Clients::Unknown), None) => {
                    return Err(ConfigError::new(
                        "unknown are clients that no proxy has recorded; `[client-ip]` describes the proxies",
                    ));
                }
                (Some(Clients::Unknown), Some(client_ip)) => client_ip.clone().unknown(),
                (None, _) if fields.networks.0.is_empty() => {
                    return Ok(Arc::new(move |parts| scope.contains(parts, spelling)));
                }
                (None, _) => {
                    let address = client_ip.cloned().unwrap_or_else(key::ip);
                    address.within(&fields.networks.0)?
                }
            };
            Ok(Arc::new(move |parts| {
                scope.contains(parts, spelling) && of_client(parts)
            }))
        };
        self.0.iter().map(condition).collect()
    }
}

impl<'de> Deserialize<'de> for Requests {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const EXPECTED: &str = "a table with `networks`, `routes` or `methods`, or a list of such tables";
        const EMPTY: &str = "an empty list describes no request; leave it out";

        OneOrSeveral::read(deserializer, EXPECTED, EMPTY).map(|tables| Self(tables.into_list()))
    }
}

/// The extensions of requests that a file names, as the application has registered them.
#[derive(Clone, Default)]
pub(super) struct Extensions(BTreeMap<String, Extension>);

#[derive(Clone)]
struct Extension {
    key: Arc<dyn KeyExtractor>,
    text: Arc<Text>,
}

/// The value of a request as text, if the request has one.
type Text = dyn Fn(&Parts) -> Option<String> + Send + Sync;

impl Extensions {
    /// Adds one, or replaces that of the name.
    pub(super) fn register<T, V>(&mut self, name: String, value: impl Fn(&T) -> V + Send + Sync + 'static)
    where
        T: Send + Sync + 'static,
        V: Display,
    {
        let value = Arc::new(value);
        let of_key = value.clone();
        let extension = Extension {
            key: Arc::new(key::extension(&name, move |extension: &T| of_key(extension))),
            text: Arc::new(move |parts| {
                parts
                    .extensions
                    .get::<T>()
                    .map(|extension| value(extension).to_string())
            }),
        };
        self.0.insert(name, extension);
    }

    /// Adds those that were registered for an earlier load of the file.
    pub(super) fn inherit(&mut self, earlier: &Self) {
        for (name, extension) in &earlier.0 {
            self.0.entry(name.clone()).or_insert_with(|| extension.clone());
        }
    }

    pub(super) fn key(&self, name: &str) -> Result<Arc<dyn KeyExtractor>, ConfigError> {
        Ok(self.get(name)?.key.clone())
    }

    pub(super) fn text(&self, name: &str) -> Result<Arc<Text>, ConfigError> {
        Ok(self.get(name)?.text.clone())
    }

    fn get(&self, name: &str) -> Result<&Extension, ConfigError> {
        self.0.get(name).ok_or_else(|| {
            ConfigError::new(format!(
                "`extension:{name}` is not registered; call `with_extension(\"{name}\", |value: &Type| ..)` on the policies \
                 before it is used"
            ))
        })
    }
}

/// Settings.
impl Policies {
    /// Registers the type of an extension of requests under a name that the file uses, with the text of its value.
    ///
    /// As a key, `extension:<name>` is [`key::extension`](crate::key::extension()) of this name. As the `plan` of a policy it
    /// selects one of its [plans](Policies#plans). Registering a name again replaces it, and reloads keep it.
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// /// The user that authentication found.
    /// #[derive(Clone)]
    /// struct UserId(u64);
    ///
    /// let policies: Policies = serde_json::from_str(
    ///     r#"{"policies": {"mails": {"limit": "sliding-log 3/h", "key": "extension:user"}}}"#,
    /// )?;
    /// let error = policies.get("mails").unwrap_err();
    /// assert!(error.to_string().contains(r#"`with_extension("user", "#));
    ///
    /// let policies = policies.with_extension("user", |user: &UserId| user.0);
    /// assert!(policies.get("mails").is_ok());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_extension<T, V>(self, name: impl Into<String>, value: impl Fn(&T) -> V + Send + Sync + 'static) -> Self
    where
        T: Send + Sync + 'static,
        V: Display,
    {
        self.file.state().config.extensions.register(name.into(), value);
        self
    }
}
