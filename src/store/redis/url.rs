#[cfg(feature = "cluster")]
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::client::{BUILT_IN, ClientLibrary};
use crate::ConfigError;

/// A URL that all clients read alike. No error contains it, since it may contain a password.
pub(super) struct Url<'a> {
    tls: bool,
    kind: ServerKind,
    credentials: Option<&'a str>,
    host: &'a str,
    /// The library to connect with.
    pub(super) library: ClientLibrary,
    /// Begins with the slash.
    path: &'a str,
    query: &'a str,
}

/// The parameters that a URL may have.
const PARAMETERS: [&str; 4] = ["node", "sentinelServiceName", "sentinelUsername", "sentinelPassword"];

#[derive(Clone, Copy, PartialEq)]
enum ServerKind {
    SingleServer,
    UnixSocket,
    Sentinel,
    Cluster,
}

impl<'a> Url<'a> {
    /// Reads a URL for this library, or for the first one that supports it, perhaps with a provider of credentials.
    pub(super) fn parse(url: &'a str, chosen: Option<ClientLibrary>, has_provider: bool) -> Result<Self, ConfigError> {
        if url.is_empty() {
            return Err(ConfigError::new(
                "the URL is empty; one looks like `redis://:password@127.0.0.1:6379/0`",
            ));
        }
        let (scheme, rest) = url.split_once("://").ok_or_else(not_redis)?;
        let (base, kind) = match scheme.split_once(['-', '+']) {
            Some((base, "sentinel")) => (base, ServerKind::Sentinel),
            Some((base, "cluster")) => (base, ServerKind::Cluster),
            Some((base, "unix")) => (base, ServerKind::UnixSocket),
            Some(_) => return Err(not_redis()),
            None => (scheme, ServerKind::SingleServer),
        };
        let tls = match base {
            "redis" | "valkey" => false,
            "rediss" | "valkeys" => true,
            _ => return Err(not_redis()),
        };

        let (rest, fragment) = rest.split_once('#').unwrap_or((rest, ""));
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        // The first database needs no `SELECT`, and no permission for it.
        let path = if path == "/0" { "" } else { path };
        let first_parameter = query.split('=').next().unwrap_or_default();
        let unescaped = unescaped_delimiter(authority, url)
            .or_else(|| fragment.contains('@').then_some('#'))
            .or_else(|| first_parameter.contains('@').then_some('?'));
        if let Some(delimiter) = unescaped {
            return Err(ConfigError::new(format!(
                "`{delimiter}` in a password is written `%{:02X}`",
                u32::from(delimiter)
            )));
        }
        let (credentials, host) = match authority.rsplit_once('@') {
            Some((credentials, host)) => (Some(credentials), host),
            None => (None, authority),
        };
        if fragment == "insecure" {
            return Err(ConfigError::new(
                "`#insecure` would trust any server; the certificate of Redis is always verified",
            ));
        }
        let url = Self {
            tls,
            kind,
            library: library(kind, has_provider, chosen)?,
            credentials,
            host,
            path,
            query,
        };
        url.validate(has_provider)?;
        // Without TLS built in, fred would connect in plain text.
        if tls && cfg!(not(feature = "tls")) {
            return Err(ConfigError::new(format!(
                "`{scheme}://` means TLS: turn on the feature `tls`"
            )));
        }
        #[cfg(feature = "tls")]
        if tls {
            prepare_tls()?;
        }
        url.warn_of_ignored_parameters(fragment);
        Ok(url)
    }

    fn validate(&self, has_provider: bool) -> Result<(), ConfigError> {
        if has_provider && self.credentials.is_some() {
            return Err(two_credentials("URL"));
        }
        let is_socket = self.kind == ServerKind::UnixSocket;
        let needs_service = self.kind == ServerKind::Sentinel;
        let fault = if self.credentials.is_some_and(|credentials| !credentials.contains(':')) {
            "the URL has a user and no password; a password alone is written `redis://:password@host`"
        } else if self.parameter("db").is_some() {
            "the database is the path of the URL: `redis://host:6379/3`, not `?db=3`"
        } else if needs_service && self.parameter("sentinelServiceName").is_none_or(str::is_empty) {
            "Sentinel needs the name of the primary: `redis-sentinel://host:26379?sentinelServiceName=name`"
        } else if is_socket && self.tls {
            "a Unix socket has no TLS: `redis+unix:///path`"
        } else if is_socket {
            return Ok(());
        } else if self.host.is_empty() || self.host.starts_with(':') {
            "the URL has no host; one looks like `redis://127.0.0.1:6379`"
        } else if self.host.contains(',') {
            "the URL has several servers; more nodes of a cluster, or sentinels, are parameters: \
             `redis-cluster://host:6379?node=host:6380&node=host:6381`"
        } else if !self.path.trim_matches('/').bytes().all(|digit| digit.is_ascii_digit()) {
            "the path of the URL is not the number of a database, as in `redis://host:6379/3`"
        } else {
            return Ok(());
        };
        Err(ConfigError::new(fault))
    }

    /// Other programs may share the URL.
    fn warn_of_ignored_parameters(&self, fragment: &str) {
        let others = self.parameters().map(|(name, _)| name);
        let mut others: Vec<_> = others.filter(|name| !PARAMETERS.contains(name)).collect();
        // All may be parts of a password: those after one, those without a value, and before an `@`.
        if self.parameter("sentinelPassword").is_some() && !others.is_empty() {
            others = vec!["one beside `sentinelPassword`"];
        }
        if self
            .query
            .split('&')
            .any(|pair| !pair.is_empty() && !pair.contains('='))
        {
            others.push("one without a value");
        }
        if !fragment.is_empty() {
            others.push("the fragment");
        }
        for name in others.into_iter().filter(|_| !self.query.contains('@')) {
            tracing::warn!(
                parameter = name,
                "this parameter of the Redis URL is ignored; `RedisStore::builder()` has settings, such as `deadline`"
            );
        }
    }

    fn parameters(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.query.split('&').filter_map(|pair| pair.split_once('='))
    }

    fn parameter(&self, name: &str) -> Option<&'a str> {
        self.parameters()
            .find_map(|(key, value)| (key == name).then_some(value))
    }
}

/// The chosen library, or the first one that is built in and supports such a URL.
fn library(kind: ServerKind, has_provider: bool, chosen: Option<ClientLibrary>) -> Result<ClientLibrary, ConfigError> {
    let candidates = BUILT_IN
        .iter()
        .filter(|library| chosen.is_none_or(|chosen| chosen == **library));
    let supporting = candidates.map(|library| supports(*library, kind, has_provider).map(|()| *library));
    supporting.reduce(Result::or).expect("the chosen library is built in")
}

/// Refuses a URL for a library that does not support it.
#[cfg_attr(not(feature = "fred"), expect(unused_variables, reason = "fred alone has limits"))]
fn supports(library: ClientLibrary, kind: ServerKind, has_provider: bool) -> Result<(), ConfigError> {
    match library {
        #[cfg(feature = "cluster")]
        ClientLibrary::RedisRs => Ok(()),
        #[cfg(feature = "fred")]
        ClientLibrary::Fred => match kind {
            ServerKind::Cluster => {
                let needed = match cfg!(feature = "cluster") {
                    true => "redis-rs",
                    false => "the feature `cluster`",
                };
                Err(ConfigError::new(format!(
                    "a cluster needs {needed}: {FRED_IN_A_CLUSTER}"
                )))
            }
            ServerKind::Sentinel if has_provider => Err(ConfigError::new(
                "with Sentinel, `.credentials(..)` and `.password_file(..)` need redis-rs, by the feature `cluster`: fred 10 \
                 would send these credentials to the sentinels too",
            )),
            ServerKind::UnixSocket if cfg!(not(feature = "unix-sockets")) => {
                Err(ConfigError::new("a Unix socket needs the feature `unix-sockets`"))
            }
            ServerKind::SingleServer | ServerKind::UnixSocket | ServerKind::Sentinel => Ok(()),
        },
    }
}

#[cfg(feature = "tls")]
fn prepare_tls() -> Result<(), ConfigError> {
    // Where the application has two providers compiled in and has chosen none, rustls would panic.
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // An error means that another thread has installed one.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    if let Some(Err(error)) = std::env::var_os("SSL_CERT_FILE").map(std::fs::File::open) {
        return Err(ConfigError::because(
            "the file with the trusted authorities, which the variable `SSL_CERT_FILE` names, cannot be read",
            error,
        ));
    }
    Ok(())
}

/// Why fred does not serve a cluster.
#[cfg(feature = "fred")]
pub(super) const FRED_IN_A_CLUSTER: &str = "while slots move, fred 10 may return the reply to one caller to another, and \
                                            while one primary is down it serves none";

/// URLs of single servers, for redis-rs, which reads no others.
#[cfg(feature = "cluster")]
impl<'a> Url<'a> {
    pub(super) fn is_cluster(&self) -> bool {
        self.kind == ServerKind::Cluster
    }

    /// The name of the primary that sentinels know.
    pub(super) fn sentinel_service(&self) -> Option<String> {
        let name = self.parameter("sentinelServiceName");
        name.filter(|_| self.kind == ServerKind::Sentinel).map(decoded)
    }

    fn sentinel_credentials(&self) -> Option<String> {
        let (user, password) = (self.parameter("sentinelUsername"), self.parameter("sentinelPassword")?);
        let [user, password] = [user.unwrap_or_default(), password].map(decoded);
        let encoded = |text| utf8_percent_encode(text, NON_ALPHANUMERIC);
        Some(format!("{}:{}", encoded(&user), encoded(&password)))
    }

    /// The URL of the server; for Sentinel and a cluster, the settings of connections to a server.
    pub(super) fn server_url(&self) -> String {
        if self.kind != ServerKind::UnixSocket {
            return self.url_of(self.host, self.credentials, self.path);
        }
        let credentials = self.credentials.and_then(|credentials| credentials.split_once(':'));
        let (user, password) = credentials.unwrap_or_default();
        let mut url = format!("unix://{}", self.path);
        for (name, value) in [("pass", password), ("user", user)] {
            if !value.is_empty() {
                let separator = if url.contains('?') { "&" } else { "?" };
                url.extend([separator, name, "=", &value.replace('+', "%2B").replace('&', "%26")]);
            }
        }
        url
    }

    /// The URLs of all nodes in this URL.
    pub(super) fn node_urls(&self) -> impl Iterator<Item = String> {
        let (credentials, path) = match self.sentinel_service() {
            // Sentinels have credentials of their own, and no databases.
            Some(_) => (self.sentinel_credentials(), ""),
            None => (self.credentials.map(str::to_owned), self.path),
        };
        let more = self.parameters().filter(|(name, _)| *name == "node");
        std::iter::once(self.host)
            .map(str::to_owned)
            .chain(more.map(|(_, node)| decoded(node)))
            .map(move |node| self.url_of(&node, credentials.as_deref(), path))
    }

    fn url_of(&self, host: &str, credentials: Option<&str>, path: &str) -> String {
        let scheme = if self.tls { "rediss" } else { "redis" };
        let (credentials, at) = credentials.map_or(("", ""), |credentials| (credentials, "@"));
        let has_port = host.rfind(':') > host.rfind(']');
        let port = match self.kind {
            ServerKind::Sentinel if !has_port => ":26379",
            ServerKind::SingleServer | ServerKind::UnixSocket | ServerKind::Sentinel | ServerKind::Cluster => "",
        };
        format!("{scheme}://{credentials}{at}{host}{port}{path}")
    }
}

/// The value of a parameter, in which `+` is a space.
#[cfg(feature = "cluster")]
fn decoded(value: &str) -> String {
    let value = value.replace('+', " ");
    percent_decode_str(&value).decode_utf8_lossy().into_owned()
}

/// Of two credentials one may be out of date.
pub(super) fn two_credentials(other: &str) -> ConfigError {
    ConfigError::new(format!(
        "the {other} has credentials, and `.credentials(..)` or `.password_file(..)` sets others; remove one of the two"
    ))
}

fn not_redis() -> ConfigError {
    ConfigError::new("this is not the URL of a Redis; one looks like `redis://:password@127.0.0.1:6379/0`")
}

/// The character that ends an authority within the credentials, which end with `@`.
fn unescaped_delimiter(authority: &str, url: &str) -> Option<char> {
    let (_, rest) = url.split_once(authority).filter(|(_, rest)| rest.contains('@'))?;
    let (user, begin) = authority.rsplit_once(':')?;
    let is_host = authority.ends_with(']') || !user.is_empty() && begin.bytes().all(|digit| digit.is_ascii_digit());
    (!authority.contains('@') && !is_host).then(|| rest.chars().next())?
}

/// The scheme and the host of a URL, without what may be a password.
pub(super) fn shown(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let (hidden, host) = rest.rsplit_once('@').map_or(("", rest), |(_, host)| ("..@", host));
    let host = host.split(['/', '?', '#']).next().unwrap_or_default();
    let (name, port) = host
        .rsplit_once(':')
        .filter(|_| !host.ends_with(']'))
        .unwrap_or((host, ""));
    let has_port = !port.is_empty() && port.bytes().all(|digit| digit.is_ascii_digit());
    // With a colon, it is a password whose `@` is missing.
    let is_name = !name.is_empty() && (!name.contains(':') || name.starts_with('['));
    let is_host = is_name && (has_port || name.len() == host.len() && !scheme.is_empty());
    let delimiter = if scheme.is_empty() { "" } else { "://" };
    match is_host {
        true => format!("{scheme}{delimiter}{hidden}{host}"),
        false => format!("{scheme}{delimiter}.."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::log::Log;

    fn parse(url: &str) -> Result<Url<'_>, ConfigError> {
        Url::parse(url, None, false)
    }

    #[test]
    fn a_url_that_clients_read_differently_is_refused_with_the_fix() {
        for (url, fix) in [
            ("", "redis://"),
            ("127.0.0.1:6379", "redis://"),
            ("http://127.0.0.1:6379", "redis://"),
            ("redis-ring://127.0.0.1", "redis://"),
            ("redis://secret@127.0.0.1", "`redis://:password@host`"),
            ("redis://127.0.0.1/?db=3", "redis://host:6379/3"),
            ("redis://127.0.0.1:6379,127.0.0.1:6380", "?node=host:6380"),
            ("redis://127.0.0.1:6379/abc", "redis://host:6379/3"),
            ("redis://127.0.0.1:6379/-1", "redis://host:6379/3"),
            ("redis://", "redis://127.0.0.1:6379"),
            ("redis://:6379", "has no host"),
            ("redis-sentinel://127.0.0.1", "?sentinelServiceName=name"),
            (
                "redis-sentinel://127.0.0.1?sentinelServiceName=",
                "?sentinelServiceName=name",
            ),
            ("redis://:secret@127.0.0.1#insecure", "always verified"),
            ("rediss+unix:///run/redis.sock", "`redis+unix:///path`"),
        ] {
            let error = parse(url).err().expect(url).to_string();
            assert!(error.contains(fix), "{url}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_password_with_delimiters_is_refused_with_their_escapes() {
        for (url, fix) in [
            ("redis://:sec#ret@127.0.0.1", "`%23`"),
            ("redis://:12#34@127.0.0.1:6379/0", "`%23`"),
            ("redis://user:sec/ret@127.0.0.1:6379", "`%2F`"),
            ("rediss://user:sec?ret@redis.internal:6379", "`%3F`"),
            ("redis-cluster://user:s#e/c?ret@redis.internal:6379?node=b", "`%23`"),
            ("redis://limiter:12#sec@127.0.0.1:6379", "`%23`"),
            ("redis://limiter:12?sec@127.0.0.1:6379", "`%3F`"),
            ("redis://limiter:12?sec@127.0.0.1:6379/0?a=b", "`%3F`"),
            ("redis://user:12@34#sec@127.0.0.1:6379", "`%23`"),
        ] {
            let error = parse(url).err().expect(url).to_string();
            assert!(error.contains(fix) && error.contains("password"), "{url}: {error}");
            assert!(!error.contains("sec") && !error.contains("ret@"), "{error}");
        }
        for url in [
            "redis://:se@c@127.0.0.1",
            "redis://127.0.0.1:6379/3?client=a@b",
            "redis://[::1]/3?client=a@b",
            "redis+unix:///run/redis@main.sock",
        ] {
            let error = parse(url).err().map(|error| error.to_string());
            assert!(
                error.is_none_or(|error| error.contains("feature `unix-sockets`")),
                "{url}"
            );
        }
    }

    #[test]
    fn a_url_is_shown_without_what_may_be_a_password() {
        for (url, expected) in [
            ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379"),
            ("http://[::1]:6379/0?a=b", "http://[::1]:6379"),
            ("127.0.0.1:6379", "127.0.0.1:6379"),
            ("rediss://user:sec@ret@redis.internal#x", "rediss://..@redis.internal"),
            ("redis://:sec#/?ret@redis.internal:1", "redis://..@redis.internal:1"),
            ("redis://user:secret", "redis://.."),
            ("redis://:secret", "redis://.."),
            ("redis://user:secret-host:6379", "redis://.."),
            ("redis://:secret:127.0.0.1:6379", "redis://.."),
            ("redis://:secret:6379", "redis://.."),
            ("redis://user:sec%40ret host:6379/0", "redis://.."),
            ("redis://user:secret@[::1]:6379", "redis://..@[::1]:6379"),
            ("secret", ".."),
            ("sec/ret", ".."),
            ("redis+unix:///run/redis.sock", "redis+unix://.."),
            ("", ".."),
        ] {
            assert_eq!(shown(url), expected);
        }
    }

    #[test]
    fn tls_without_tls_built_in_is_refused() {
        for url in [
            "rediss://127.0.0.1",
            "valkeys://127.0.0.1",
            "rediss-sentinel://127.0.0.1?sentinelServiceName=main",
        ] {
            let refused = parse(url).err().map(|error| error.to_string());
            let built_in = cfg!(feature = "tls");
            assert_eq!(refused.is_none(), built_in, "{url}");
            assert!(refused.is_none_or(|error| error.contains("feature `tls`")));
        }
    }

    #[test]
    #[cfg(all(feature = "fred", feature = "cluster"))]
    fn the_first_library_that_supports_a_url_connects() {
        let (fred, redis_rs) = (ClientLibrary::Fred, ClientLibrary::RedisRs);
        let of_sockets = if cfg!(feature = "unix-sockets") { fred } else { redis_rs };
        for (kind, has_provider, expected) in [
            (ServerKind::SingleServer, false, fred),
            (ServerKind::SingleServer, true, fred),
            (ServerKind::UnixSocket, false, of_sockets),
            (ServerKind::Sentinel, false, fred),
            (ServerKind::Sentinel, true, redis_rs),
            (ServerKind::Cluster, false, redis_rs),
        ] {
            assert_eq!(library(kind, has_provider, None).ok(), Some(expected));
            // The application has chosen: no other library connects.
            assert!(library(kind, has_provider, Some(redis_rs)).is_ok());
            assert_eq!(library(kind, has_provider, Some(fred)).is_ok(), expected == fred);
        }
    }

    #[test]
    fn the_usual_urls_pass() {
        for url in [
            "redis://127.0.0.1",
            "redis://user:p%40ss@[::1]:6379/3",
            "valkey://:secret@redis.internal",
            "redis-sentinel://10.0.0.1:26379?sentinelServiceName=main&node=10.0.0.2:26379",
        ] {
            assert!(parse(url).is_ok(), "{url}");
        }
    }

    #[test]
    #[cfg(not(feature = "cluster"))]
    fn a_cluster_without_redis_rs_is_refused_with_the_fix() {
        let error = parse("redis-cluster://:secret@127.0.0.1")
            .err()
            .expect("an error")
            .to_string();
        assert!(error.contains("feature `cluster`"), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    #[cfg(all(feature = "fred", feature = "cluster"))]
    fn only_redis_rs_serves_a_cluster() {
        let url = "redis-cluster://127.0.0.1";
        assert_eq!(parse(url).expect("a good URL").library, ClientLibrary::RedisRs);
        let error = Url::parse(url, Some(ClientLibrary::Fred), false)
            .err()
            .expect("an error")
            .to_string();
        assert!(error.contains("a cluster needs redis-rs"), "{error}");
    }

    #[cfg(feature = "cluster")]
    fn urls_in(url: &str) -> (String, Vec<String>) {
        let url = parse(url).expect("a good URL");
        (url.server_url(), url.node_urls().collect())
    }

    #[test]
    #[cfg(feature = "cluster")]
    fn sentinels_have_credentials_of_their_own_and_no_database() {
        let url = "redis-sentinel://u:p@a:1/3?sentinelServiceName=s&node=[::1]&node=b&sentinelPassword=x+y";
        let sentinels = ["a:1", "[::1]:26379", "b:26379"].map(|node| format!("redis://:x%20y@{node}"));
        assert_eq!(urls_in(url), ("redis://u:p@a:1/3".into(), sentinels.into()));
    }

    #[test]
    #[cfg(feature = "cluster")]
    fn the_values_of_parameters_are_decoded() {
        let url = "redis-sentinel://a:1?sentinelServiceName=my%20main&node=b%3A2&sentinelPassword=x%2Fy%3F";
        let sentinels = ["a:1", "b:2"].map(|node| format!("redis://:x%2Fy%3F@{node}"));
        assert_eq!(urls_in(url).1, sentinels);
        assert_eq!(
            parse(url).expect("a good URL").sentinel_service().as_deref(),
            Some("my main")
        );
        assert_eq!(
            urls_in("redis-cluster://a:1?node=b%3A2").1,
            ["redis://a:1", "redis://b:2"]
        );
    }

    #[test]
    #[cfg(feature = "cluster")]
    fn nodes_of_a_cluster_share_their_credentials() {
        let (_, nodes) = urls_in("valkey-cluster://u:p@a:1?node=b:2");
        assert_eq!(nodes, ["redis://u:p@a:1", "redis://u:p@b:2"]);
    }

    #[test]
    #[cfg(all(feature = "cluster", feature = "unix-sockets"))]
    fn the_path_of_a_socket_is_beside_the_credentials() {
        for (credentials, parameters) in [
            ("", ""),
            ("u:p@", "?pass=p&user=u"),
            (":p@", "?pass=p"),
            ("u:@", "?user=u"),
        ] {
            let url = format!("redis+unix://{credentials}localhost/a.sock");
            assert_eq!(urls_in(&url).0, format!("unix:///a.sock{parameters}"));
        }
    }

    #[test]
    fn a_parameter_that_may_be_a_part_of_a_password_is_not_logged() {
        // The password would be `6379?secret=x`.
        for (url, is_logged) in [
            ("redis://host:6379?secret=x@host", false),
            ("redis://host:6379?client=x", true),
            ("redis://host:6379?tls", true),
            ("redis://host:6379?&#secret", true),
            (
                "redis-sentinel://host?sentinelServiceName=a&sentinelPassword=a&secret",
                true,
            ),
            (
                "redis-sentinel://host?sentinelServiceName=a&sentinelPassword=a&secret=1",
                true,
            ),
            ("redis://host:6379?", false),
        ] {
            let log = Log::capture();
            assert!(Url::parse(url, None, false).is_ok());
            assert_eq!(log.text().contains("is ignored"), is_logged, "{url}");
            assert!(!log.text().contains("secret"), "{url}");
        }
    }
}
