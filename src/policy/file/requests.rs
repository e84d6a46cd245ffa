use std::{any::type_name, collections::BTreeMap, fmt, fmt::Display, sync::Arc};

use http::request::Parts;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer},
};

use super::{
    Policies, of_policy,
    values::{ClientIp, Methods, Networks, Routes},
};
use crate::{
    ConfigError, KeyExtractor,
    decision::Condition,
    key,
    key::Registered,
    policy::scope::{Scope, Spelling},
};

/// The requests that a file skips or blocks: those of each of these tables.
#[derive(Clone, Debug, Default)]
pub(super) struct Requests(Vec<RequestMatcher>);

/// Requests as a table describes them: those for which all of its fields hold.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "Fields")]
struct RequestMatcher(Fields);

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    clients: Option<Clients>,
    #[serde(default)]
    networks: Networks,
    #[serde(default)]
    routes: Routes,
    #[serde(default)]
    methods: Methods,
}

/// Clients that have no network.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Clients {
    Unknown,
}

impl TryFrom<Fields> for RequestMatcher {
    type Error = &'static str;

    fn try_from(fields: Fields) -> Result<Self, &'static str> {
        match &fields.routes {
            Routes::Others => Err("the routes `others` are for a policy; list the routes of these requests"),
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
                routes: fields.routes.scope(Vec::new),
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
        struct OneOrSeveral;

        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = Requests;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table with `networks`, `routes` or `methods`, or a list of such tables")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Requests, A::Error> {
                let only = RequestMatcher::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Requests(vec![only]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Requests, A::Error> {
                let mut all = Vec::new();
                while let Some(matcher) = list.next_element()? {
                    all.push(matcher);
                }
                match all.is_empty() {
                    true => Err(A::Error::custom("an empty list describes no request; leave it out")),
                    false => Ok(Requests(all)),
                }
            }
        }

        deserializer.deserialize_any(OneOrSeveral)
    }
}

/// The extensions of requests that a file names, as the application has registered them.
#[derive(Clone, Default)]
pub(super) struct Extensions(BTreeMap<String, Extension>);

#[derive(Clone)]
struct Extension {
    type_name: &'static str,
    key: Arc<dyn KeyExtractor>,
    text: Arc<Text>,
}

/// The value of a request as text, if the request has one.
type Text = dyn Fn(&Parts) -> Option<String> + Send + Sync;

impl Extensions {
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

impl fmt::Debug for Extensions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let types = self.0.iter().map(|(name, extension)| (name, extension.type_name));
        f.debug_map().entries(types).finish()
    }
}

/// Settings.
impl Policies {
    /// Registers the type of an extension of requests under a name that the file uses, with the text of its value.
    ///
    /// As a key, `extension:<name>` is [`key::extension`](crate::key::extension()) of this name. As the `plan` of a policy it
    /// selects one of its [plans](Policies#plans). Registering a name again replaces it.
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
    pub fn with_extension<T, V>(
        mut self,
        name: impl Into<String>,
        value: impl Fn(&T) -> V + Send + Sync + 'static,
    ) -> Self
    where
        T: Send + Sync + 'static,
        V: Display,
    {
        self.register(name.into(), value);
        self
    }

    pub(in crate::policy) fn register<T, V>(&mut self, name: String, value: impl Fn(&T) -> V + Send + Sync + 'static)
    where
        T: Send + Sync + 'static,
        V: Display,
    {
        let value = Arc::new(value);
        let of_key = value.clone();
        let extension = Extension {
            type_name: type_name::<T>(),
            key: Arc::new(key::extension(&name, move |extension: &T| of_key(extension))),
            text: Arc::new(move |parts| {
                parts
                    .extensions
                    .get::<T>()
                    .map(|extension| value(extension).to_string())
            }),
        };
        self.extensions.0.insert(name, extension);
    }
}

/// Keys.
impl Policies {
    /// The key of a policy.
    pub(in crate::policy) fn key(&self, name: &str) -> Result<Arc<dyn KeyExtractor>, ConfigError> {
        let Some(key) = &self.entry(name)?.fields.key else {
            return Err(ConfigError::new(format!(
                "the policy `{name}` has no key; add a `key` such as `\"ip\"` where it is configured, or one in code, to the \
                 policy that `unkeyed` returns"
            )));
        };
        let registered = Registered {
            client_ip: self.client_ip.as_ref().map(|ClientIp(client_ip)| client_ip),
            extension: &|name| self.extensions.key(name),
        };
        of_policy(name, key.extractor(&registered))
    }
}
