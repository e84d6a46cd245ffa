mod message;
mod report;
mod router;
mod selected;
mod subject;

use std::{env, process, sync::Arc};

use http::request::Parts;

use self::{router::FindActor, subject::SubjectNames};
use crate::{ConfigError, Limiter, Policies, RateLimitLayer, decide::DenialWatch, key::Secret, policy::PolicySet};

/// A page and JSON for operators: the policies that run, the subjects that they deny most often, and the counts of one subject,
/// to read, to reset, and to [override](crate::Limiter::override_limit) for a time.
///
/// [`router_behind_authentication`](Self::router_behind_authentication) makes a router of axum for it. The router has no
/// authentication: its caller reads which limits there are, resets and overrides them. The application mounts it behind its own:
///
/// ```
/// use axum::{Router, body::Body, extract::Request, middleware::{self, Next}, response::Response, routing::get};
/// use http::{StatusCode, header::AUTHORIZATION};
/// use http_body_util::BodyExt;
/// use tower::ServiceExt;
/// use tower_quota::{key, Admin, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// /// A placeholder for the authentication of the application.
/// async fn authenticate(request: Request, next: Next) -> Result<Response, StatusCode> {
///     match request.headers().get(AUTHORIZATION) {
///         Some(token) if token == "Bearer of-an-operator" => Ok(next.run(request).await),
///         _ => Err(StatusCode::UNAUTHORIZED),
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limit = RateLimitLayer::new(
///     MemoryStore::new(),
///     Policy::new("hello", SlidingLog::per_minute(1)).key(key::constant("all")),
/// );
/// let admin = Admin::new().layer(&limit).router_behind_authentication();
/// let app: Router = Router::new()
///     .route("/hello", get(async || "hi").layer(limit))
///     .nest("/admin", admin.layer(middleware::from_fn(authenticate)));
///
/// let get = |path, token| {
///     let request = Request::get(path).header(AUTHORIZATION, token).body(Body::empty()).unwrap();
///     app.clone().oneshot(request)
/// };
/// assert_eq!(get("/hello", "").await?.status(), StatusCode::OK);
/// assert_eq!(get("/hello", "").await?.status(), StatusCode::TOO_MANY_REQUESTS);
///
/// assert_eq!(get("/admin/report", "").await?.status(), StatusCode::UNAUTHORIZED);
/// let report = get("/admin/report", "Bearer of-an-operator").await?;
/// let report: serde_json::Value = serde_json::from_slice(&report.into_body().collect().await?.to_bytes())?;
/// assert_eq!(report["policies"][0]["limit"], "sliding-log 1/min");
/// assert_eq!(report["policies"][0]["denials"]["total"], 1);
///
/// assert_eq!(get("/admin", "Bearer of-an-operator").await?.status(), StatusCode::OK);
/// assert_eq!(get("/admin/", "Bearer of-an-operator").await?.status(), StatusCode::NOT_FOUND);
/// # Ok(())
/// # }
/// ```
///
/// The page is at the path of the router without a slash at its end: after `.nest("/admin", ..)` at `/admin`. axum has no route
/// at `/admin/` then, and responds with a `404` without a body; add a redirect if operators enter it.
///
/// # Routes
///
/// | route | content |
/// | --- | --- |
/// | `GET /` | the page |
/// | `GET /report` | the stores and the policies, with the subjects that each denies most often |
/// | `GET /subject?policy=api&key=ip%3D203.0.113.7` | the counts of a key by each limit of a policy |
/// | `POST /subject` with `{"policy":"api","key":"ip=203.0.113.7"}` | the same; as no part of a URL, the key gets into no log of requests |
/// | `POST /search` with `{"text":"203.0.113.7"}` | the counts of [each key](#the-search) that can be made of a value, in all policies |
/// | `POST /reset` with `{"policy":"api","key":"ip=203.0.113.7"}` | removes the counts and bans of a key of a policy, as [`Limiter::reset`](crate::Limiter::reset) does, and returns what `/subject` returns. Of limits that are chosen for requests, it removes the counts of those that this process knows |
/// | `POST /override` with `{"policy":"api","key":"ip=203.0.113.7","limit":"sliding-log 50/d","lasts":"3d"}` | gives the key another limit for a time, as [`Limiter::override_limit`](crate::Limiter::override_limit) does, and returns what `/subject` returns |
/// | `POST /end-override` with `{"policy":"api","key":"ip=203.0.113.7"}` | ends that, as [`Limiter::end_override`](crate::Limiter::end_override) does |
///
/// A key is written as in Redis: [`Key`](crate::Key) has a table of its components. Characters that are not ASCII can be written as
/// themselves, and are shown so: `ext:user=张三` is `ext:user=^E5^BC^A0^E4^B8^89` in Redis. A key that no request of the policy
/// has is refused, with what its keys are made of, unless the report lists it. Any key is accepted for a policy of a limiter, for
/// one with an extractor that has no such form, and by `/end-override`. A hash that a store keeps of a long key
/// (`hash=..`) can be used in its place. Where a store [hashes all keys](crate::RedisStoreBuilder::hash_keys), the key itself is
/// written, and not the hash. If layers have a policy of one name in several stores, `store` selects one of these by its number
/// in the report.
///
/// The limit of an override is [text](crate::limit#limits-as-text). `lasts` is a number of seconds, or text such as `3d`, `12h`
/// or `3600`; `until` in its place is the time of the end. The page also takes `tomorrow` and a date such as `2026-12-01` or
/// `2026-12-01 18:00`, by the clock of the operator. Then `override` of `/subject` has the limit, when it ends (`ends_at`), and
/// the [actor](Self::actor) (`set_by`; `null` for one of the application), and each of its `counts` that the override applies to
/// is under the limit of the override, with the limit of the policy as `in_place_of`. The rest of a ban is `banned_for_seconds`.
///
/// Times are seconds since the Unix epoch, and lengths of time are seconds. An error is `{"error":".."}` with the fix: `400` for a
/// mistake in a request, `404` for a route or a policy that does not exist, and a hash by which this process knows no subject, `403` and `415`
/// as described [below](#what-the-router-refuses), `409` for a reset of a policy that counts nothing now, such as one that is
/// switched off, or with limits that are chosen for requests before the first one, while its bans are reset all the same, and for an
/// override in a store that has none, or as many as it may, `413` for a body of more than 16 KiB, and `503` if the store fails; the
/// text of that begins with `the change is done` if it is. While the policy counts locally, `/subject` returns the counts of this process, with `counted_locally` and
/// `store_error`. A Redis that refuses writes, such as a full one, returns its own, with `store_error`.
///
/// # The search
///
/// `POST /search` takes a value of a key, such as `alice` or `203.0.113.7`, a value with its name, such as `user=alice` or
/// `x-tenant=7`, or several of them with `|` between them, in any order. An IPv6 address is that of its network. `found` has what
/// `/subject` returns for each key that is made of these values. `incomplete` has the policies with more values in their keys, such as
/// `ip=203.0.113.7|path=/..`, and `failed` the keys for which the store returns no counts, with the `error`. Policies
/// with keys that cannot have the values are left out. A [hash](#the-subjects-that-are-denied-most-often) of a subject is a value too.
///
/// # The report
///
/// * Each store: its kind and [numbers](crate::store::Store::status), and how long it takes to reply to one peek, or its error.
///   `open breakers` of a [`RedisStore`](crate::RedisStore) above 0 means that Redis does not reply.
/// * The [health](crate::guide::operating#health-of-a-store) of each server of a store as `nodes`: its address as `node`, `state`,
///   `since`, the checks of this process in the last minute that were `decided` and that `failed`, both 0 while none has failed,
///   and the last `error`. `health` is the same in one line, such as `1 of 3 nodes down: 33 % of checks fail`.
/// * Each policy: what its keys are made of (`key`), its limit as text, cost, failure mode and bans, whether it only observes,
///   since when it runs in this process (`since`), whether its file has switched it `off`, or has no such policy anymore
///   (`missing`), and when its file was reloaded last (`reloaded_at`). If the last load was refused, `refused_reload` has the
///   error. Of limits that are [chosen](crate::Policy::with_limit_fn) for each request, the 20 lowest that were chosen in this
///   process are known, and those of the plans of a file.
/// * The `slots` of a policy that requests hold in this process, of the 20 subjects with most, and the `bans` of the 10 subjects
///   that the policy denies most often in this process.
/// * How many requests wait for a policy in this process (`waiting`), and the 20 subjects with most of them (`lines`), each with the
///   number of its `requests`. A request that waits for several policies is counted by each.
/// * The `overrides` of these policies, at most 10,000: the subject, its limit, when it ends, and whether it `applies`: after a
///   change of the policy it may be of another algorithm, and has no effect. A subject is named [as
///   below](#the-subjects-that-are-denied-most-often); where a store hashes all keys, the name is of the hash that it has.
/// * The `decisions` and the denials of each policy, and of each plan, in this process while there is a router (`since`): how many,
///   and of which subjects. Of a policy that only observes, those that it would have denied; of one that is enforced for a [share
///   of the keys](crate::Policy::enforce_share), those of these keys alone. `GET /report?subjects=50` has at most 50 subjects of
///   each policy.
///
/// Each process of a service has a report of its own, with its name as [`instance`](Self::instance). The counts in a shared store
/// and the overrides are those of all processes.
///
/// # The subjects that are denied most often
///
/// They are counted in bounded memory by the algorithm Space-Saving (Metwally, Agrawal, El Abbadi: "Efficient Computation of
/// Frequent and Top-k Elements in Data Streams", 2005). A subject was denied at least `denials - error` times and at most
/// `denials` times; one that is not listed, at most `most_of_others` times. Of `n` denials by a policy of one layer, no error is
/// above `n / 100` with the default of [100 keys](Self::most_denied). A denial takes one lock and a search in these keys. An
/// admission adds one to a number, and all requests without a router load one.
///
/// A subject is shown as a keyed hash of 64 bits, since keys contain addresses and users. Its secret is that of the first store
/// that has one for all its processes, so that all list a subject as the same hash (`shares_hashes`): a
/// [`RedisStore`](crate::RedisStore) keeps a random one for a year under a key such as `quota:1:secret` or, where it [hashes
/// keys](crate::RedisStoreBuilder::hash_keys), derives it from that secret. It is read before requests, once a minute. Until the
/// store replies, and without such a store, it is random for each `Admin`; `hashes_error` is why the store has not.
/// [`hash_secret`](Self::hash_secret) sets another.
///
/// An operator that has the key of a caller, from a complaint or a log of the application, enters it: the response has its hash
/// as `subject` and its denials as `denied`, with the time of the last one (`last_at`), and the page marks it in the list. An
/// operator that has the hash, from a list or the audit log, enters that in place of a key. It selects the subject if this
/// process lists it as denied, or as one with slots or waiting requests, or if it has an override in a store that does not hash
/// keys; its key is not shown for it. [`show_keys`](Self::show_keys) lists keys instead.
///
/// # The audit log
///
/// Each request that changes something is logged with the target `tower_quota::audit`: its
/// [`actor`](Self::actor), the policy, the hash of the key as `subject`, the limit of an override and its length as `setting`, the `instance`, and
/// the `outcome`. It is `done` at the level `INFO`; or at the level `WARN` and with the `error`, `refused`, if nothing has changed,
/// and `failed`, if the store has not confirmed the change, which may apply. `unknown` is the outcome for a client that has closed
/// its connection before the response. Text of a request is recorded as `str`, which a subscriber of `tracing` escapes: a line break
/// in it begins no line.
///
/// # What the router refuses
///
/// A browser sends the credentials of an operator with requests that pages of other sites make. So a request is refused
///
/// * with `403` if `Sec-Fetch-Site` is not `same-origin` or, in a browser that does not send it, if `Origin` is not the host of
///   the request. A client that is not a browser sends neither. Behind a proxy that replaces `Host`, the page is
///   served with HTTPS, since browsers send `Sec-Fetch-Site` then.
/// * a `POST` with `415` if the content is not `application/json`, which a form of another site cannot send.
///
/// `GET /report` and `GET /subject` may also have `Sec-Fetch-Site: none`, as of an address that an operator enters, and in a
/// browser without that field, `Referer` takes the place of `Origin`. A page can suppress it, so serve the router with HTTPS.
/// `GET /`, the page, has no data and is for all: a link leads to it.
///
/// An address or a network of the operator does not authenticate: a page of another site can reach the router through the browser
/// of an operator there, by a name that it resolves to the address of the router (DNS rebinding). Put no layer for CORS around
/// the router that permits credentials.
///
/// The [policy](https://www.w3.org/TR/CSP3/) of the page permits its own script and style by their hashes and requests to its
/// own server; it cannot be framed. No response is cached.
#[derive(Clone)]
#[must_use]
pub struct Admin {
    watched: Vec<PolicySet>,
    files: Vec<Policies>,
    instance: String,
    names: SubjectNames,
    actor: FindActor,
    most_denied: usize,
    /// Denials are counted for as long as there is a router.
    _denials: Arc<Vec<DenialWatch>>,
}

/// Constructors.
impl Admin {
    /// An admin of no policies. [`layer`](Self::layer) and [`limiter`](Self::limiter) add those of the application.
    pub fn new() -> Self {
        let host = env::var("HOSTNAME").ok().filter(|host| !host.is_empty());
        Self {
            watched: Vec::new(),
            files: Vec::new(),
            instance: host.unwrap_or_else(|| format!("process {}", process::id())),
            names: SubjectNames::new(),
            actor: Arc::new(router::basic_user),
            most_denied: 100,
            _denials: Arc::default(),
        }
    }
}

/// Settings.
impl Admin {
    /// Adds the policies of a layer, and its store. Add it after its last setting: a later one is not in the report.
    ///
    /// It can be in use already, and its clones are the same layer. Layers that share a policy and a store are reported as one.
    ///
    /// ```
    /// use tower_quota::{key, Admin, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// let limit = RateLimitLayer::new(MemoryStore::new(), Policy::new("api", SlidingLog::per_minute(5)).key(key::ip()));
    /// let admin = Admin::new().layer(&limit);
    /// assert!(format!("{admin:?}").contains("sources: 1"));
    /// ```
    pub fn layer(mut self, layer: &RateLimitLayer) -> Self {
        self.watched.push(layer.policies().clone());
        self
    }

    /// Adds the policies of a limiter, and its store. Add it after its last setting: a later one is not in the report.
    ///
    /// ```
    /// use tower_quota::{Admin, Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(3)));
    /// let admin = Admin::new().limiter(&mails);
    /// assert!(format!("{admin:?}").contains("sources: 1"));
    /// ```
    pub fn limiter(mut self, limiter: &Limiter) -> Self {
        self.watched.push(limiter.policies.clone());
        self
    }

    /// Adds the policies of a file, of which the report marks those that no layer or limiter has: `unused_policies`.
    ///
    /// ```
    /// use tower_quota::{Admin, Policies};
    ///
    /// let policies: Policies = serde_json::from_str(r#"{"policies": {"mails": {"limit": "sliding-log 3/h"}}}"#)?;
    /// let admin = Admin::new().policies(&policies);
    /// # let _ = admin;
    /// # Ok::<(), serde_json::Error>(())
    /// ```
    pub fn policies(mut self, policies: &Policies) -> Self {
        self.files.push(policies.clone());
        self
    }

    /// Sets whether the subjects that are denied most often are listed by their keys, in place of hashes of them.
    ///
    /// Keys contain addresses and users: see [above](Self#the-subjects-that-are-denied-most-often). The default is `false`.
    ///
    /// ```
    /// use tower_quota::Admin;
    ///
    /// assert!(format!("{:?}", Admin::new()).contains("show_keys: false"));
    /// assert!(format!("{:?}", Admin::new().show_keys(true)).contains("show_keys: true"));
    /// ```
    pub fn show_keys(mut self, show: bool) -> Self {
        self.names.show_keys = show;
        self
    }

    /// Sets the name of this instance of the service, which the report, the page and each response about a subject have.
    ///
    /// Behind a load balancer, an operator sees by it which instance has replied. The default is the environment variable
    /// `HOSTNAME`, which containers have, or else the process id, such as `process 4711`.
    ///
    /// ```
    /// use tower_quota::Admin;
    ///
    /// assert!(format!("{:?}", Admin::new().instance("api-7")).contains(r#"instance: "api-7""#));
    /// ```
    pub fn instance(mut self, name: impl Into<String>) -> Self {
        self.instance = name.into();
        self
    }

    /// Sets the function that names the operator of a request, for the [audit log](Self#the-audit-log).
    ///
    /// It reads what the authentication of the application has left in the request. The default reads the user of Basic
    /// credentials. It is only for an application that verifies these: with other authentication a client can send any user.
    ///
    /// ```
    /// use tower_quota::Admin;
    ///
    /// /// What authentication has found.
    /// #[derive(Clone)]
    /// struct Operator(String);
    ///
    /// let admin = Admin::new().actor(|parts| Some(parts.extensions.get::<Operator>()?.0.clone()));
    /// # let _ = admin;
    /// ```
    pub fn actor(mut self, of: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        self.actor = Arc::new(of);
        self
    }

    /// Sets the secret of the hashes of subjects, so that all instances of the service list a subject as the same hash.
    ///
    /// The hash of a key cannot be computed without the secret. The secret is at least 16 bytes, from a random source: operators
    /// see hashes, and can try short or chosen secrets offline. It may be that of `RedisStoreBuilder::hash_keys`; the hashes
    /// differ. By default it comes [from the store](Self#the-subjects-that-are-denied-most-often).
    ///
    /// ```
    /// use tower_quota::Admin;
    ///
    /// assert!(Admin::new().hash_secret("a secret of 24 bytes....").is_ok());
    ///
    /// let error = Admin::new().hash_secret("too short").unwrap_err();
    /// assert!(error.to_string().starts_with("a secret has at least 16 bytes, not 9; generate a random one"));
    /// ```
    ///
    /// # Errors
    ///
    /// If the secret has fewer than 16 bytes.
    pub fn hash_secret(mut self, secret: impl AsRef<[u8]>) -> Result<Self, ConfigError> {
        self.names.share(Secret::derive(Secret::SUBJECTS, secret)?);
        Ok(self)
    }

    /// Sets the number of keys for which denials are counted, for each policy of each layer and limiter; 0 counts the total only.
    ///
    /// At most 10,000, and a larger number counts as that, since each report copies them. A key takes about 300 bytes. If a
    /// layer has another router already, the number of that one applies. The default is 100.
    ///
    /// ```
    /// use tower_quota::Admin;
    ///
    /// assert!(format!("{:?}", Admin::new()).contains("most_denied: 100"));
    /// assert!(format!("{:?}", Admin::new().most_denied(1_000)).contains("most_denied: 1000"));
    /// ```
    pub fn most_denied(mut self, keys: usize) -> Self {
        self.most_denied = keys.min(10_000);
        self
    }
}

/// The router.
impl Admin {
    /// A router that the application mounts behind its own authentication, at any path.
    ///
    /// This is the only constructor of the router, so that a review finds each place by its name. The denials of its layers and
    /// limiters are counted until the last clone of the router is dropped. For a router with a state, `.with_state(())`
    /// converts it.
    ///
    /// ```
    /// use axum::{Router, body::Body};
    /// use http::{Request, StatusCode};
    /// use tower::ServiceExt;
    /// use tower_quota::Admin;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let operators: Router = Admin::new().router_behind_authentication();
    /// let page = operators.oneshot(Request::get("/").body(Body::empty())?).await?;
    /// assert_eq!(page.status(), StatusCode::OK);
    /// assert_eq!(page.headers()["cache-control"], "no-store");
    /// # Ok(())
    /// # }
    /// ```
    pub fn router_behind_authentication(self) -> axum::Router {
        let denials = self.watched.iter().map(|set| {
            let basis = set.newest();
            basis.context.denials.watch(basis.policies.len(), self.most_denied)
        });
        router::router(Self {
            _denials: Arc::new(denials.collect()),
            ..self
        })
    }
}

impl Default for Admin {
    fn default() -> Self {
        Self::new()
    }
}

impl_debug!(Admin, admin =>
    sources: admin.watched.len(),
    instance: admin.instance,
    show_keys: admin.names.show_keys,
    most_denied: admin.most_denied
);
