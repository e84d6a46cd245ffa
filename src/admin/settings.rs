//! The settings of an `Admin`.

use std::sync::Arc;

use http::request::Parts;

use super::{Admin, selected::policies};
#[cfg(feature = "serde")]
use crate::Policies;
use crate::{
    ConfigError, Limiter, RateLimitLayer,
    key::{KeyForm, Secret},
};

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
        let set = layer.policies().clone();
        let watched = move || policies(&set.newest(), |policy| policy.extractor().form());
        self.watched.push(Arc::new(watched));
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
        let set = limiter.policies.clone();
        let watched = move || policies(&set.newest(), |_| KeyForm::Any);
        self.watched.push(Arc::new(watched));
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
    #[cfg(feature = "serde")]
    pub fn policies(mut self, policies: &Policies) -> Self {
        let policies = policies.clone();
        self.files.push(Arc::new(move || policies.unused()));
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
    /// It reads what the authentication of the application has left in the request. The default is the user of Basic
    /// authentication.
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
    /// differ. By default it is random for each `Admin`.
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
        self.names.share(Secret::for_subjects(secret)?);
        Ok(self)
    }

    /// Sets the number of keys for which denials are counted, for each policy of each layer and limiter; 0 counts the total only.
    ///
    /// At most 10,000, and a larger number counts as that, since each report copies them. A key takes about 200 bytes. If a
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
