//! Values of the fields of a file: routes, networks, methods, lengths of time, the address of the client, the requests that are
//! skipped or blocked, and extensions.

use std::{collections::BTreeMap, fmt::Display, sync::Arc, time::Duration};

use http::{HeaderName, Method, request::Parts};
use ipnet::IpNet;
use serde::{Deserialize, Deserializer, de::Error};

use super::{
    Policies,
    scope::{Routes, Scope, Spelling, Template},
};
use crate::{
    ConfigError, KeyExtractor,
    decision::Condition,
    key,
    key::{ClientIpSource, OneOrSeveral},
    limit::{deserialize_text, parse_length},
};

/// A text, or a list of texts that is not empty.
pub(super) struct Texts(Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const EMPTY: &str = "an empty list is for no request; leave it out, for all requests";

        OneOrSeveral::read(deserializer, "a text, or a list of texts", EMPTY).map(|texts| Self(texts.into_list()))
    }
}

impl TryFrom<Texts> for Routes {
    type Error = String;

    fn try_from(Texts(routes): Texts) -> Result<Self, String> {
        if matches!(&routes[..], [only] if only == "others") {
            return Ok(Self::Others(Vec::new()));
        }
        let parse = |route: &String| {
            Template::parse(route).map_err(|fix| {
                format!(
                    "`{route}` is not a route: {fix}; one looks like `/login`, `/users/{{id}}` or, in gRPC, \
                     `/shop.Accounts/SignIn`; `others` alone are those that no other policy has"
                )
            })
        };
        routes.iter().map(parse).collect::<Result<_, _>>().map(Self::These)
    }
}

/// The networks of clients.
#[derive(Clone, Default, Deserialize)]
#[serde(try_from = "Texts")]
pub(super) struct Networks(pub(super) Vec<String>);

impl TryFrom<Texts> for Networks {
    type Error = ConfigError;

    fn try_from(Texts(networks): Texts) -> Result<Self, ConfigError> {
        key::ip().within(&networks).map(|_| Self(networks))
    }
}

/// The methods of requests.
#[derive(Clone, Default, Deserialize)]
#[serde(try_from = "Texts")]
pub(super) struct Methods(pub(super) Vec<Method>);

impl TryFrom<Texts> for Methods {
    type Error = String;

    fn try_from(Texts(names): Texts) -> Result<Self, String> {
        // Methods are case-sensitive (RFC 9110 §9.1).
        let parse = |name: &String| {
            let is_upper = !name.bytes().any(|byte| byte.is_ascii_lowercase());
            let method = Method::from_bytes(name.as_bytes()).ok().filter(|_| is_upper);
            method.ok_or_else(|| format!("`{name}` is not a method; one looks like `POST`"))
        };
        names.iter().map(parse).collect::<Result<_, _>>().map(Self)
    }
}

/// A length of time, such as `10min`.
#[derive(Clone, Copy, Default)]
pub(super) struct Length(pub(super) Duration);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "a length of time such as \"10min\"", |text| {
            parse_length(text).map(Self).ok_or_else(|| {
                ConfigError::new(format!(
                    "`{text}` is not a length of time; one looks like `10min` or `500ms`"
                ))
            })
        })
    }
}

/// The client address as configuration describes it: the header, the networks whose header is read, and the number of proxies.
#[derive(Clone, Deserialize)]
#[serde(try_from = "ClientIpTable")]
pub(super) struct ClientIp(pub(super) key::Ip);

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
                "`{}` is not the name of a header; one looks like `\"x-forwarded-for\"`",
                table.header
            ))
        })?;

        let source = match (header.as_str(), table.hops) {
            ("x-forwarded-for", None) => ClientIpSource::XForwardedFor,
            ("x-forwarded-for", Some(0)) => {
                return Err(ConfigError::new(
                    "there is at least one proxy: with 1 as `hops`, the client is the last entry of `x-forwarded-for`",
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
            Trusted::UnixPeer => Ok(Self(client_ip.trust_unix_peer())),
            Trusted::Networks(networks) => {
                let is_all =
                    |network: &&String| network.parse::<IpNet>().is_ok_and(|network| network.prefix_len() == 0);
                match networks.iter().find(is_all) {
                    None => client_ip.trusted(networks).map(Self),
                    Some(all) => Err(ConfigError::new(format!(
                        "`{all}` contains every address; for a server that only its proxy can reach, `trusted` is `\"any-peer\"`"
                    ))),
                }
            }
        }
    }
}

/// The peers whose header is read.
enum Trusted {
    AnyPeer,
    UnixPeer,
    Networks(Vec<String>),
}

impl<'de> Deserialize<'de> for Trusted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const EXPECTED: &str = "a list of networks such as `[\"10.0.0.0/8\"]`, `\"unix-peer\"` for a proxy on a Unix socket, \
                                or `\"any-peer\"` for a server that only its proxy can reach";
        const EMPTY: &str = "an empty list trusts no proxy; write the networks of the proxies, such as `[\"10.0.0.0/8\"]`, \
                             `\"unix-peer\"` or `\"any-peer\"`";

        match OneOrSeveral::<String>::read(deserializer, EXPECTED, EMPTY)? {
            OneOrSeveral::Several(networks) => Ok(Self::Networks(networks)),
            OneOrSeveral::One(text) => match text.as_str() {
                "any-peer" => Ok(Self::AnyPeer),
                "unix-peer" => Ok(Self::UnixPeer),
                _ => Err(D::Error::custom(format_args!("`{text}` is not {EXPECTED}"))),
            },
        }
    }
}

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
