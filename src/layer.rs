use std::{fmt, sync::Arc, time::Duration};

use tower_layer::Layer;

use crate::{
    ConfigError, FailureMode, Headers, IntoPolicies, Policy, RateLimit,
    enforce::Enforcer,
    headers::{Fields, Reset},
    key::Secret,
    policy::validate_names,
    response::{Negotiated, ResponseFormat},
    store::Store,
};

/// Limits how often a caller may use the services it is applied to.
///
/// It has no type parameters, and its clones, and the services it makes, share their counts. See the
/// [crate documentation](crate) for an example.
#[derive(Clone)]
#[must_use]
pub struct RateLimitLayer {
    enforcer: Arc<Enforcer>,
}

/// Constructors.
impl RateLimitLayer {
    /// A layer that counts in this store for one policy, or for several that are decided together.
    ///
    /// Of several, a request is counted by all or, if one denies it, by none. An empty list lets everything pass.
    ///
    /// # Panics
    ///
    /// If two policies have the same name. [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub fn new(store: impl Store, policies: impl IntoPolicies) -> Self {
        match Self::try_new(store, policies) {
            Ok(layer) => layer,
            Err(error) => panic!("{error}"),
        }
    }

    /// A layer that counts in this store for one policy, or for several that are decided together.
    ///
    /// # Errors
    ///
    /// If two policies have the same name.
    pub fn try_new(store: impl Store, policies: impl IntoPolicies) -> Result<Self, ConfigError> {
        let policies = policies.into_policies();
        validate_names(&policies)?;

        let enforcer = Enforcer {
            store: Arc::new(store),
            fields: Fields::default(),
            jitter: Duration::ZERO,
            format: Arc::new(Negotiated::default()),
            failure_mode: policies.iter().map(Policy::on_failure).max().unwrap_or_default(),
            policies: policies.into(),
            health: Arc::default(),
        };
        Ok(Self {
            enforcer: Arc::new(enforcer),
        })
    }
}

/// Settings.
impl RateLimitLayer {
    /// Which header fields tell callers how they stand.
    ///
    /// The default is [`Headers::Draft08`].
    pub fn headers(mut self, headers: Headers) -> Self {
        Arc::make_mut(&mut self.enforcer).fields.style = headers;
        self
    }

    /// Adds `X-RateLimit-Limit`, `-Remaining` and `-Reset` beside the other fields, for clients that read only these.
    ///
    /// The default is not to.
    pub fn legacy_headers(mut self, reset: Reset) -> Self {
        Arc::make_mut(&mut self.enforcer).fields.legacy = Some(reset);
        self
    }

    /// Adds the partition key `pk` to the fields of [`Headers::Draft08`], by which a caller knows what it shares a count
    /// with: 128 bits of a hash of the key that nobody can compute without the secret.
    ///
    /// The default is not to.
    pub fn partition_key(mut self, secret: impl AsRef<[u8]>) -> Self {
        Arc::make_mut(&mut self.enforcer).fields.partition_key = Some(Secret::new(secret));
        self
    }

    /// Tells callers to wait up to this much longer than they must, at random, so that those who were denied together do
    /// not come back together.
    ///
    /// It is added to `Retry-After` and to what [`Decision::retry_after`](crate::Decision::retry_after) says of a denial.
    /// The default is not to.
    pub fn retry_jitter(mut self, most: Duration) -> Self {
        Arc::make_mut(&mut self.enforcer).jitter = most;
        self
    }

    /// What answers requests that may not pass.
    ///
    /// The default is [`Negotiated`]: gRPC calls in gRPC, everything else as [`Problem`](crate::response::Problem).
    pub fn format(mut self, format: impl ResponseFormat) -> Self {
        Arc::make_mut(&mut self.enforcer).format = Arc::new(format);
        self
    }

    /// What happens to requests when the store does not answer, whatever the policies say.
    ///
    /// The default is [`FailureMode::Closed`] if a policy is, else [`FailureMode::Open`].
    pub fn failure_mode(mut self, failure_mode: FailureMode) -> Self {
        Arc::make_mut(&mut self.enforcer).failure_mode = failure_mode;
        self
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit::new(inner, self.enforcer.clone())
    }
}

impl fmt::Debug for RateLimitLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer")
            .field("policies", &self.enforcer.policies)
            .field("headers", &self.enforcer.fields)
            .field("failure_mode", &self.enforcer.failure_mode)
            .finish_non_exhaustive()
    }
}
