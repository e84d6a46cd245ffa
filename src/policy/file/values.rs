//! Values of the fields of a file: routes, networks, methods, lengths of time, the address of the client, the requests that are
//! skipped or blocked, and extensions.

use std::{
    collections::BTreeMap,
    fmt::{self, Display},
    marker::PhantomData,
    sync::Arc,
    time::Duration,
};

use http::{HeaderName, Method, request::Parts};
use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor, value::MapAccessDeserializer},
};

use super::{
    Policies,
    scope::{Routes, Scope, Spelling, Template},
};
use crate::{
    ConfigError, KeyExtractor,
    decide::Condition,
    key,
    key::{ClientIpSource, one_or_several},
    limit::{deserialize_text, parse_length},
};

/// A text, or a list of texts that is not empty.
fn texts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    const EMPTY: &str = "an empty list is for no request; leave it out, for all requests";

    one_or_several(deserializer, "a text, or a list of texts", EMPTY)
}

pub(super) fn routes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Routes, D::Error> {
    let routes = texts(deserializer)?;
    if matches!(&routes[..], [only] if only == "others") {
        return Ok(Routes::Others(Vec::new()));
    }
    let parse = |route: &String| {
        Template::parse(route).map_err(|fix| {
            D::Error::custom(format_args!(
                "`{route}` is not a route: {fix}; one looks like `/login`, `/users/{{id}}` or, in gRPC, \
                 `/shop.Accounts/SignIn`; `others` alone are those that no other policy has"
            ))
        })
    };
    routes.iter().map(parse).collect::<Result<_, _>>().map(Routes::These)
}

/// Reads a table, with what is expected, for errors. A derived function takes a list for one, too: with the fields in their order.
pub(super) fn table<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
    expected: &'static str,
) -> Result<T, D::Error> {
    struct Table<T>(&'static str, PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Table<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
            T::deserialize(MapAccessDeserializer::new(map))
        }
    }

    deserializer.deserialize_map(Table(expected, PhantomData))
}

/// A value of JSON that is `null`, as by a template without a value, is an error.
pub(super) fn not_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

fn networks<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let networks = texts(deserializer)?;
    let conditions = key::ip().within(&networks);
    conditions.map(|_| networks).map_err(D::Error::custom)
}

pub(super) fn methods<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Method>, D::Error> {
    // Methods are case-sensitive (RFC 9110 §9.1). Some routers have names for all of them.
    let parse = |name: &String| {
        let is_upper = !name.bytes().any(|byte| byte.is_ascii_lowercase());
        let method = Method::from_bytes(name.as_bytes())
            .ok()
            .filter(|_| is_upper && !["*", "ANY", "ALL"].contains(&&**name));
        let method = method.ok_or_else(|| {
            D::Error::custom(format_args!(
                "`{name}` is not a method; one looks like `POST`, and without `methods` all are meant"
            ))
        })?;
        // Others may be those of an extension of HTTP.
        match key::STANDARD_METHODS.iter().find(|known| is_slip(name, known)) {
            Some(known) => Err(D::Error::custom(format_args!(
                "`{name}` is not a method; is `{known}` meant?"
            ))),
            None => Ok(method),
        }
    };
    texts(deserializer)?.iter().map(parse).collect()
}

/// Whether a text is another one with one letter more or less after its first, or with two letters swapped.
fn is_slip(text: &str, other: &str) -> bool {
    let (text, other) = (text.as_bytes(), other.as_bytes());
    let same = |(one, other): &(&u8, &u8)| one == other;
    let begin = text.iter().zip(other).take_while(same).count();
    let end = text.iter().rev().zip(other.iter().rev()).take_while(same).count();
    let differing = text.len().max(other.len()).saturating_sub(begin + end);
    match text.len().abs_diff(other.len()) {
        0 => differing == 2 && text.get(begin) == other.get(begin + 1) && text.get(begin + 1) == other.get(begin),
        1 => differing <= 1 && begin > 0,
        _ => false,
    }
}

/// A length of time, such as `10min`.
pub(super) fn length<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    deserialize_text(deserializer, "a length of time such as \"10min\"", |text| {
        let fault = || format!("`{text}` is not a length of time; one looks like `10min` or `500ms`");
        parse_length(text).map(Some).ok_or_else(|| ConfigError::new(fault()))
    })
}

/// The client address as configuration describes it: the header, the networks whose header is read, and the number of proxies.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientIp {
    header: String,
    trusted: Trusted,
    #[serde(default, deserialize_with = "not_null")]
    hops: Option<usize>,
}

pub(super) fn client_ip<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<key::Ip>, D::Error> {
    let client_ip: ClientIp = table(deserializer, "a table with `header` and `trusted`")?;
    client_ip.rule().map(Some).map_err(D::Error::custom)
}

impl ClientIp {
    fn rule(self) -> Result<key::Ip, ConfigError> {
        let header = self.header.parse::<HeaderName>().map_err(|_| {
            ConfigError::new(format!(
                "`{}` is not the name of a header; one looks like `\"x-forwarded-for\"`",
                self.header
            ))
        })?;

        let source = match (header.as_str(), self.hops) {
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
        match self.trusted {
            Trusted::Peer(TrustedPeer::AnyPeer) => Ok(client_ip.trust_any_peer()),
            Trusted::Peer(TrustedPeer::UnixPeer) => Ok(client_ip.trust_unix_peer()),
            Trusted::Networks(networks) if networks.is_empty() => Err(ConfigError::new(
                "an empty list trusts no proxy; write the networks of the proxies, such as `[\"10.0.0.0/8\"]`, \
                 `\"unix-peer\"` or `\"any-peer\"`",
            )),
            Trusted::Networks(networks) => client_ip.trusted(networks),
        }
    }
}

/// The peers whose header is read.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a list of networks such as `[\"10.0.0.0/8\"]`, `\"unix-peer\"` for a proxy on a Unix socket, or \
                 `\"any-peer\"` for a server that only its proxy can reach"
)]
enum Trusted {
    Peer(TrustedPeer),
    Networks(Vec<String>),
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum TrustedPeer {
    AnyPeer,
    UnixPeer,
}

/// Requests as a table describes them: those for which all of its fields hold.
#[derive(Clone, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
pub(super) struct RequestMatcher {
    #[serde(default, deserialize_with = "not_null")]
    clients: Option<Clients>,
    #[serde(default, deserialize_with = "networks")]
    networks: Vec<String>,
    #[serde(default, deserialize_with = "routes")]
    routes: Routes,
    #[serde(default, deserialize_with = "methods")]
    methods: Vec<Method>,
}

/// Clients that have no network.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Clients {
    Unknown,
}

impl<'de> Deserialize<'de> for RequestMatcher {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// By the derived function, which `remote` makes inherent.
        #[derive(Deserialize)]
        #[serde(transparent)]
        struct Fields(#[serde(with = "RequestMatcher")] RequestMatcher);

        let Fields(fields) = table(deserializer, "a table with `networks`, `routes` or `methods`")?;
        let fault = match &fields.routes {
            Routes::Others(_) => "the routes `others` are for a policy; list the routes of these requests",
            _ if fields.clients.is_some() && !fields.networks.is_empty() => {
                "an unknown client is in no network; use two tables, which are alternatives"
            }
            Routes::All if fields.networks.is_empty() && fields.methods.is_empty() && fields.clients.is_none() => {
                "without `networks`, `clients`, `routes` or `methods` these would be all requests"
            }
            Routes::All | Routes::These(_) => return Ok(fields),
        };
        Err(D::Error::custom(fault))
    }
}

/// The requests that a file skips or blocks: those of each of these tables.
pub(super) fn requests<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<RequestMatcher>, D::Error> {
    const EXPECTED: &str = "a table with `networks`, `routes` or `methods`, or a list of such tables";
    const EMPTY: &str = "an empty list describes no request; leave it out";

    one_or_several(deserializer, EXPECTED, EMPTY)
}

/// The conditions of these requests, where the file describes the client address so.
pub(super) fn conditions(
    requests: &[RequestMatcher],
    client_ip: Option<&key::Ip>,
    spelling: Spelling,
) -> Result<Vec<Condition>, ConfigError> {
    let condition = |fields: &RequestMatcher| -> Result<Condition, ConfigError> {
        let scope = Scope {
            routes: fields.routes.clone(),
            methods: fields.methods.clone(),
        };
        let of_client = match (fields.clients, client_ip) {
            (Some(Clients::Unknown), _) if spelling == Spelling::All => {
                return Err(ConfigError::new("an unknown client is never skipped, only blocked"));
            }
            (Some(Clients::Unknown), None) => {
                return Err(ConfigError::new(
                    "unknown are clients that no proxy has recorded; `[client-ip]` describes the proxies",
                ));
            }
            (Some(Clients::Unknown), Some(client_ip)) => Some(client_ip.clone().unknown()),
            (None, _) if fields.networks.is_empty() => None,
            (None, _) => {
                let address = client_ip.cloned().unwrap_or_else(key::ip);
                Some(address.within(&fields.networks)?)
            }
        };
        Ok(Arc::new(move |parts| {
            scope.contains(parts, spelling) && of_client.as_ref().is_none_or(|holds| holds(parts))
        }))
    };
    requests.iter().map(condition).collect()
}

/// The extensions of requests that a file names, as the application has registered them.
#[derive(Clone, Default)]
pub(super) struct Extensions(BTreeMap<String, Extension>);

#[derive(Clone)]
pub(super) struct Extension {
    pub(super) key: Arc<dyn KeyExtractor>,
    pub(super) text: Arc<Text>,
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

    pub(super) fn get(&self, name: &str) -> Result<&Extension, ConfigError> {
        self.0.get(name).ok_or_else(|| {
            let names: Vec<_> = self.0.keys().map(|known| format!("`{known}`")).collect();
            let registered = match names.is_empty() {
                true => String::new(),
                false => format!(" (registered: {})", names.join(", ")),
            };
            ConfigError::new(format!(
                "`extension:{name}` is not registered{registered}; correct the name, or call `with_extension(\"{name}\", |value: \
                 &Type| ..)` on the policies before it is used"
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
        let (name, value) = (name.into(), Arc::new(value));
        let of_key = value.clone();
        let extension = Extension {
            key: Arc::new(key::extension(&name, move |extension: &T| of_key(extension))),
            text: Arc::new(move |parts| {
                let extension = parts.extensions.get::<T>();
                extension.map(|extension| value(extension).to_string())
            }),
        };
        self.file.state().config.extensions.0.insert(name, extension);
        self
    }
}
