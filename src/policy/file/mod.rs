//! Policies in configuration files.

mod config;
mod entry;
mod follow;
mod plans;
#[cfg(feature = "file")]
mod read;
mod scope;
mod values;
mod warnings;

use std::sync::Arc;

use serde::Deserialize;

use self::config::Config;
pub(super) use self::{
    config::FromFile,
    follow::{File, Live},
};
use super::Policy;
use crate::{ConfigError, key};

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
///     enabled = true # `false` turns all of it off, also lists of blocked requests
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
/// | `formerly` | the [former name](Policy::formerly) of the policy, under which it goes on to be counted | none |
/// | `plan`, `plans` | what selects the [plan](#plans) of a request, and the limits of plans by name | none |
/// | `key` | a [key](#keys), or a list of at most 16, which means all of them together | none; for [`unkeyed`](Self::unkeyed) |
/// | `routes` | the [routes](#routes) that the policy is for: one, or a list; or `others` | all |
/// | `methods` | the methods that the policy is for: one, or a list. `GET` is also for `HEAD`, and for WebSockets of HTTP/2, and `POST` for `post`, which some services take for it. tonic calls a handler by every method, and axum one of `any`: leave it out there | all |
/// | `cost` | the cost of a request, from 1 | 1 |
/// | `failure-mode` | what happens while the store fails: [`local`, `local 1/4`, `open` or `closed`](crate::FailureMode) | `local` |
/// | `wait` | how long a request may [wait](Policy::wait_up_to) until it fits, such as `2s` or `500ms` | it does not wait |
/// | `max-waiting` | the most units that [wait](Policy::max_waiting) for each key, from 1 | 500 |
/// | `mode` | `enforce`; or `observe`, to count and deny [nothing](Policy::observe_only) | `enforce` |
/// | `enforce-share` | the [share of the keys](Policy::enforce_share) that the limit is enforced for, from 0 to 1, such as `0.1`; others are observed | 1 |
/// | `ban` | when callers are [banned](Policy::ban) and for how long, such as `{ after = 10, within = "1h", first = "1min", longest = "1d" }`; `first` and `longest` may be left out; `after` is at most 1,000,000, and `within` 1 ms to 366 days | none |
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
/// | `header:<name>` | a [header](fn@crate::key::header), hashed if it holds credentials, such as `header:x-api-key` |
/// | `extension:<name>` | an [extension](crate::key::extension()) of the request that the application [registers](Self::with_extension) under this name |
/// | `constant:<word>` | [nothing](crate::key::constant()): one limit for all requests |
///
/// `a or b` is the key `a`, and `b` for requests that have no `a`; at most 16 alternatives.
///
/// A header that the client can send is not an identity. With `header:x-user-id or ip`, each new value is a new quota, so a
/// caller that changes it with every request is never limited. Use `header:` only for a header that a proxy in front sets
/// and removes from what the client sends, and add a policy by address. Headers in which proxies record the client address,
/// such as `x-forwarded-for` or `cf-connecting-ip`, are refused as `header:` keys: use `client-ip`.
///
/// # Plans
///
/// A policy has a limit for each plan of its callers: that of `plans` whose name `plan` selects, and `limit` for requests without
/// a plan, or with one of another name. [`Policy::with_limit_fn`](crate::Policy::with_limit_fn) describes how plans share their counts.
///
/// ```
/// use tower_quota::Policies;
///
/// # #[cfg(feature = "file")] {
/// /// What authentication has found.
/// #[derive(Clone)]
/// struct User { id: u64, plan: &'static str }
///
/// let policies = Policies::from_toml(r#"
///     [policies.api]
///     limit = "sliding-log 10/min"
///     key = "extension:user"
///     plan = "extension:plan"
///
///     [policies.api.plans]
///     pro = "sliding-log 100/min"
///     internal = "unlimited"
/// "#)?
/// .with_extension("user", |user: &User| user.id)
/// .with_extension("plan", |user: &User| user.plan.to_owned());
///
/// assert!(policies.get("api").is_ok());
/// # }
/// # Ok::<(), tower_quota::ConfigError>(())
/// ```
///
/// `plan` is `extension:<name>`, as [registered](Self::with_extension), or `header:<name>`: a header that only a proxy in front
/// sets, since a client that can send it chooses its limit.
///
/// What differs by more than the limit is a table of `plans` at the top: its policies take the place of those of the same names
/// for requests of that plan. Each has its own `limit`. What else they do not set is as in the policy outside of the plans, but
/// for its own `plan` and `plans`, a `wait` and a `ban` where the limit of the plan takes units ahead, `max-waiting` where
/// nothing waits, and `mode` and `enforce-share` where the plan has one of these two. [`layer`](Self::layer),
/// [`plans`](Self::plans) and [`unkeyed_plans`](Self::unkeyed_plans) return the policies of all plans. Requests without a plan,
/// or with one that the file does not have, are of the plan `default`: the policies outside of plans, if no table has that name.
///
/// # Routes
///
/// A route is a template such as `/users/{id}`, which is compared with that of the route that axum has matched. Where axum has
/// matched none, or either has a rest such as `/files/{*rest}`, or the template is one of several in the matched one, such as
/// `/users/root` in `/users/{id}`, the path is compared too: `{id}` is a segment, and a rest includes the routes below it. In
/// gRPC it is `/shop.Accounts/SignIn`, or `/shop.Accounts/{*rest}` for all methods, also for a layer around one service. A
/// template that matches none of the paths it looks like, such as `/users/:id` or `/admin/*`, is an error. `others` are the
/// requests that no other policy of their plan, in this file, with `routes` or `methods` is for; one that is for it in some
/// spellings only, as below, is counted by both. Have them in one layer: two may know different routes and paths of a request.
///
/// A path is compared as written, decoded, and in normal form: without trailing slashes, `//` and upper case of ASCII. It has
/// several such forms where services differ: in whether they remove dot segments, `%2F` and `\` are slashes, `%2E` is a dot, `;v=1`
/// is a parameter, `//name` at the beginning is a host, `%3F` or `%23` is the end, `%5C` and `%3B` are the same as `\` and `;`, and
/// tabs and line ends are left out, also spaces and controls at the end. Each form is compared that services make of the path, also
/// one after the other, but for those that decode an escape of an escape, such as `%252F`. A policy or `[block]` applies if one of
/// these matches, and `[skip]` if all do. So `/login/` and `/static/../login` neither evade a limit nor are skipped. A path with
/// more than 32 forms, or with several and 32 KiB in them, is taken for a match: such a request is counted, blocked, and never
/// skipped. In `[skip]`, escapes are written as sent: `/caf%C3%A9`.
///
/// In a nested router of axum, and in a service that is nested in one, the path is the whole one, with the prefix. Where another
/// service within a router has removed a prefix, as middleware makes `/login` of `/en/login`, and axum has not matched the whole
/// path, the one that is left is compared too. Where a service in a nested router has set another path, it is compared with the prefix
/// and without it. A policy or `[block]` for either path applies, and `others` are those of neither. `[skip]` is for the whole path,
/// and if a service has set it, for both. If the path of the client ends with the prefix and the path that is set, nothing tells
/// that a service has set it: limit such a path in a layer around its handler.
///
/// # Skipped and blocked requests
///
/// `[skip]` and `[block]` list requests that each layer with a policy of the file [skips](crate::RateLimitLayer::skip) or
/// [blocks](crate::RateLimitLayer::block), beside those of the layer itself. All fields of a table hold for such a request; several
/// tables, `[[skip]]`, are alternatives. A [`Limiter`](crate::Limiter) has no requests and no lists.
///
/// ```
/// # #[cfg(feature = "file")] {
/// use tower_quota::{MemoryStore, Policies};
///
/// let policies = Policies::from_toml(r#"
///     [[skip]]
///     routes = "/health"
///
///     [[skip]]
///     networks = ["10.0.0.0/8", "fd00::/8"]
///     methods = "GET"
///
///     [block]
///     networks = "198.51.100.0/24"
///
///     [policies.api]
///     limit = "sliding-log 100/min"
///     key = "ip"
/// "#)?;
/// let layer = policies.layer(MemoryStore::new(), ["api"])?;
/// # }
/// # Ok::<(), tower_quota::ConfigError>(())
/// ```
///
/// | field of `[skip]` and `[block]` | value | default |
/// | --- | --- | --- |
/// | `networks` | the networks of clients: one, or a list. The address is that of the table `[client-ip]`, if the file has it, else that of the peer. An unknown client is in no network | all |
/// | `clients` | only in `[block]`: `unknown`, for clients that a trusted proxy has [not recorded](crate::key::Ip::unknown). It requires the table `[client-ip]` | all |
/// | `routes`, `methods` | as those of policies, without `others`; in `[skip]`, `GET` is not for WebSockets of HTTP/2, nor `POST` for `post` | all |
///
/// # The client address
///
/// | field of `[client-ip]` | value | default |
/// | --- | --- | --- |
/// | `header` | the one header in which the proxies record the client: `x-forwarded-for`, `forwarded`, or one that holds a single address, such as `cf-connecting-ip` or `x-real-ip` | required |
/// | `trusted` | a list of the networks of the proxies, whose header is read: `["10.0.0.0/8", "fd00::/8"]`; `"unix-peer"` for a proxy on a Unix socket, with [`UnixPeer`](crate::key::UnixPeer) in the extensions except on tonic; or `"any-peer"`, for a server that only its proxy can reach | required |
/// | `hops` | with `x-forwarded-for`, the number of proxies: the client is the n-th entry from the right | none: the client is the first entry from the right that is not trusted |
///
/// # Reloads
///
/// The layers, limiters and tonic services that are made of the policies follow them. [`reload`](Self::reload) reads the file again,
/// [`reload_on_change`](Self::reload_on_change) does whenever it has changed, and [`replace`](Self::replace) takes other policies, of
/// an application that has them in its own configuration. The new numbers apply from the first request after it.
///
/// ```
/// # #[cfg(feature = "file")] {
/// use std::fs;
/// use tower_quota::{Limiter, MemoryStore, Policies};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let file = folder.path().join("limits.toml");
/// fs::write(&file, "policies.mails.limit = 'sliding-log 3/h'")?;
/// let policies = Policies::from_file(&file)?;
/// let mails = Limiter::new(MemoryStore::new(), policies.unkeyed("mails")?);
/// assert_eq!(mails.check("42").await?.remaining(), 2);
///
/// fs::write(&file, "policies.mails.limit = 'sliding-log 10/h'")?;
/// policies.reload()?;
/// assert_eq!(mails.check("42").await?.remaining(), 8);
///
/// fs::write(&file, "policies.mails.limit = 'sliding-log 10'")?;
/// assert!(policies.reload().is_err());
/// assert_eq!(mails.check("42").await?.remaining(), 7);
/// # Ok(())
/// # }
/// # main().unwrap();
/// # }
/// ```
///
/// # What a reload changes
///
/// * All that the file has about a policy becomes that of the file, from its limit and key to waits, bans and routes. Settings in
///   code, such as [`cost_fn`](Policy::cost_fn) or [`failure_mode`](Policy::failure_mode), and the key of a policy without one in
///   the file, stay and take precedence. [`apply_if`](Policy::apply_if) holds beside `routes` and `methods`, and of
///   [enforced shares](Policy::enforce_share) the smaller one holds.
/// * The requests that the file [skips and blocks](#skipped-and-blocked-requests) are skipped and blocked. Those of
///   [`RateLimitLayer::skip`](crate::RateLimitLayer::skip) and [`block`](crate::RateLimitLayer::block) stay.
/// * Counts are kept, and the new numbers apply to them. With another algorithm, window, precision or prefetch of a log, rate of a
///   bucket, time zone or alignment, [counts start at zero](crate::limit#when-a-limit-changes).
/// * A file that cannot be read or has a wrong line changes nothing.
/// * Nor does a file that contradicts the settings in code of a layer or limiter in use, such as a limit of
///   [`Concurrency`](crate::Concurrency) for a policy with [`refund_if`](Policy::refund_if). The error names the setting.
/// * Nor does one with [plans](#plans) by which the application could not start, such as a new plan without a key.
/// * A policy that is new in the file limits nothing until the application uses it, such as after a restart; until then, `others`
///   include its requests, and for layers that run also after that, until the next load.
/// * A policy that the file has no more keeps its last numbers, with a warning, and `others` include its requests. `enabled = false` at the top of the file turns
///   off that one, too.
/// * A request is decided by one load of the file, with all policies of the layer: never by parts of two. One that
///   [waits](Policy::wait_up_to) follows the limit of each policy, unless the new one has other counts or none, as `unlimited`, or the
///   limit was chosen by `plans` of the policy.
///
/// # Cost
///
/// A request reads a pointer with `arc-swap`: some nanoseconds, without a lock. A reload builds what each layer and limiter decides
/// by, and then replaces all of it; only requests that wait, and refunds and settlements, take a lock, until it has ended.
#[derive(Clone, Deserialize)]
#[serde(from = "Config")]
#[must_use]
pub struct Policies {
    pub(super) file: Arc<File>,
}

impl From<Config> for Policies {
    fn from(config: Config) -> Self {
        Self {
            file: Arc::new(File::new(config, None)),
        }
    }
}

/// Accessors.
impl Policies {
    /// The policy of this name, for a layer. All that the file has about it follows the file; [`Policy::limit`] returns the
    /// limit at the time of this call. Get all policies when the program starts, so that it does not start with a name
    /// that is missing. Settings in code may contradict the limit of the file, such as [`refund_if`](Policy::refund_if) and
    /// `concurrency 3`: [`RateLimitLayer::try_new`](crate::RateLimitLayer::try_new) returns an error then, and does not panic.
    ///
    /// # Errors
    ///
    /// If there is no such policy, if it has no key, or if its key or its plan is of an extension that is not
    /// [registered](Self::with_extension).
    pub fn get(&self, name: &str) -> Result<Policy, ConfigError> {
        self.file.state().config.require(name)?;
        self.keyed(name)
    }

    /// The policy of this name without its key: for a limiter, or for a key that only code can extract. It follows the file, too.
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
    /// let mails = policies.unkeyed("mails")?.key(key::extension("user", |user: &UserId| user.0));
    /// assert_eq!(mails.name(), "mails");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If there is no such policy, or its plan is of an extension that is not [registered](Self::with_extension).
    pub fn unkeyed(&self, name: &str) -> Result<Policy<()>, ConfigError> {
        let mut state = self.file.state();
        state.config.require(name)?;
        state.take_up(&self.file, name, ((), false))
    }

    /// The names of the policies of the last load, in alphabetical order. Those that only plans have are not among them: [`get`](Self::get)
    /// and [`unkeyed`](Self::unkeyed) return none of these, and [`layer`](Self::layer) takes their names.
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// let policies: Policies = serde_json::from_str(
    ///     r#"{"policies": {"say-hi": {"limit": "sliding-log 2/30s"}, "login": {"limit": "sliding-log 5/min"}}}"#,
    /// )?;
    /// assert_eq!(policies.names(), ["login", "say-hi"]);
    /// # Ok::<(), serde_json::Error>(())
    /// ```
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.file.state().config.names().map(str::to_owned).collect()
    }

    /// The rule for the address of the client: that of `[client-ip]`, or [`key::ip`](crate::key::ip()) if the file has no such table.
    ///
    /// It is for what the application does with the address: [`Ip::address`](crate::key::Ip::address), conditions on networks, and
    /// with the feature `axum` the extractor `ClientAddr`. It is that of this load of the file.
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::{Policies, key::PeerAddr};
    ///
    /// let policies: Policies = serde_json::from_str(
    ///     r#"{"policies": {}, "client-ip": {"header": "x-forwarded-for", "trusted": ["10.0.0.0/8"]}}"#,
    /// )?;
    /// let request = Request::get("/").extension(PeerAddr("10.0.0.2:80".parse()?)).header("x-forwarded-for", "198.51.100.9");
    /// let (parts, ()) = request.body(())?.into_parts();
    /// assert_eq!(policies.client_ip().address(&parts)?.to_string(), "198.51.100.9");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn client_ip(&self) -> key::Ip {
        self.file.state().config.client_ip.clone().unwrap_or_else(key::ip)
    }
}

impl_debug!(Policies, policies => names: policies.names());
