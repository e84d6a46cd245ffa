#[cfg(feature = "serde")]
mod file;

use std::{borrow::Cow, fmt, sync::Arc};

use http::request::Parts;

#[cfg(feature = "serde")]
pub use self::file::Policies;

use crate::{
    ConfigError, KeyExtractor, Limit,
    decision::{CheckContext, Rendered},
    headers::announced,
    response::violates,
    store::{Failover, FailureMode, Quota, Store},
};

/// Who may do how much.
///
/// A policy has a name, a [`Limit`], and a [key](crate::key) that says whom a request counts against. Counts are stored
/// under the name, and callers are told of it in `RateLimit-Policy`.
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{key, Policy, SlidingLog};
///
/// let say_hi = Policy::new("say-hi", SlidingLog::new(2, Duration::from_secs(30)))
///     .key((key::ip(), key::path()));
/// assert_eq!(say_hi.name(), "say-hi");
/// assert_eq!(say_hi.limit().to_string(), "sliding-log 2/30s");
/// ```
///
/// A policy without a key does not fit a layer, since it is easily forgotten. One limit for everybody says so:
///
/// ```
/// # use tower_quota::{key, Policy, SlidingLog};
/// let everybody = Policy::new("everybody", SlidingLog::per_second(1_000)).key(key::constant("all"));
/// # let _ = everybody;
/// ```
///
/// ```compile_fail
/// # use tower_quota::{MemoryStore, Policy, RateLimitLayer, SlidingLog};
/// let whom = Policy::new("whom", SlidingLog::per_second(10));
/// RateLimitLayer::new(MemoryStore::new(), whom); // the policy `whom` has no key
/// ```
#[derive(Clone)]
#[must_use]
pub struct Policy<K = Keyed> {
    quota: Arc<Quota>,
    rendered: Rendered,
    cost: Cost,
    failure_mode: FailureMode,
    only: Option<Selection>,
    key: K,
}

/// Which requests a policy is for.
type Selection = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

/// What a request costs.
#[derive(Clone)]
enum Cost {
    Always(u64),
    Computed(Arc<dyn Fn(&Parts) -> u64 + Send + Sync>),
}

/// A [`Policy`] that has a key, so that a layer can use it.
#[derive(Clone)]
pub struct Keyed(Arc<dyn KeyExtractor>);

/// A [`Policy`] that has no key yet: [`Policy::key`] gives it one.
#[derive(Clone, Copy, Debug)]
pub struct Unkeyed;

/// Constructors.
impl Policy<Unkeyed> {
    /// A policy of this name.
    ///
    /// Names are lower-case words such as `say-hi`: a letter, then letters, digits, `_`, `.` and `-`, 64 at most.
    ///
    /// # Panics
    ///
    /// If the name is not of that form, or the limit cannot be kept: a [`SlidingLog`](crate::SlidingLog) of more than
    /// 100,000 without a [`precision`](crate::SlidingLog::precision), or a [`TokenBucket`](crate::TokenBucket) whose burst
    /// and rate are too large together to be reckoned exactly. [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub fn new(name: impl Into<Cow<'static, str>>, limit: impl Into<Limit>) -> Self {
        match Self::try_new(name, limit) {
            Ok(policy) => policy,
            Err(error) => panic!("{error}"),
        }
    }

    /// A policy of this name, or what is wrong with it.
    ///
    /// # Errors
    ///
    /// For the names and limits that [`new`](Self::new) panics on.
    pub fn try_new(name: impl Into<Cow<'static, str>>, limit: impl Into<Limit>) -> Result<Self, ConfigError> {
        let (name, limit) = (name.into(), limit.into());
        validate_name(&name)?;
        limit.validate()?;

        Ok(Self {
            rendered: Rendered {
                policy_item: announced(&name, &limit),
                problem: violates(&[&name]),
            },
            quota: Arc::new(Quota::new(name, limit)),
            cost: Cost::Always(1),
            failure_mode: FailureMode::default(),
            only: None,
            key: Unkeyed,
        })
    }

    /// Whom a request counts against; see [`key`](crate::key) for what there is.
    ///
    /// A [`Limiter`](crate::Limiter) does without, since it is given the keys.
    pub fn key(self, key: impl KeyExtractor) -> Policy {
        Policy {
            quota: self.quota,
            rendered: self.rendered,
            cost: self.cost,
            failure_mode: self.failure_mode,
            only: self.only,
            key: Keyed(Arc::new(key)),
        }
    }
}

/// Settings.
impl<K> Policy<K> {
    /// What a request costs: as much as so many requests of cost 1.
    ///
    /// A cost above the limit is never admitted: such a request is denied without asking the store, and without
    /// `Retry-After`. The default is 1.
    ///
    /// # Panics
    ///
    /// If the cost is 0.
    #[track_caller]
    pub fn cost(mut self, cost: u64) -> Self {
        assert!(
            cost > 0,
            "a request costs at least 1; `Limit::Unlimited` counts nothing"
        );
        self.cost = Cost::Always(cost);
        self
    }

    /// What a request costs, computed from the request; with 0 the policy does not apply to it.
    ///
    /// A request that costs more than the limit is denied without asking the store, and without `Retry-After`.
    ///
    /// ```
    /// use tower_quota::{key, Policy, TokenBucket};
    ///
    /// // A request that writes costs as much as ten that read.
    /// let api = Policy::new("api", TokenBucket::per_second(100)).key(key::ip()).cost_fn(|parts| match parts.method {
    ///     http::Method::GET | http::Method::HEAD | http::Method::OPTIONS => 1,
    ///     _ => 10,
    /// });
    /// # let _ = api;
    /// ```
    pub fn cost_fn(mut self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.cost = Cost::Computed(Arc::new(cost));
        self
    }

    /// Which requests the policy is for; it does not apply to others.
    ///
    /// Where a layer sees all methods of a service, as around tonic's router, this picks some of them. The default is all
    /// requests.
    ///
    /// ```
    /// use tower_quota::{key, Policy, SlidingLog};
    ///
    /// let sign_up = Policy::new("sign-up", SlidingLog::per_hour(3))
    ///     .key(key::ip())
    ///     .only(|parts| parts.uri.path() == "/shop.Accounts/SignUp");
    /// # let _ = sign_up;
    /// ```
    pub fn only(mut self, selects: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.only = Some(Arc::new(selects));
        self
    }

    /// What happens to a request while the store fails.
    ///
    /// Of several policies that a request counts against, one that is [`Closed`](FailureMode::Closed) closes the request. The
    /// default is [`FailureMode::Local`]: each process counts by itself.
    pub fn failure_mode(mut self, failure_mode: FailureMode) -> Self {
        self.failure_mode = failure_mode;
        self
    }
}

/// Questions.
impl<K> Policy<K> {
    /// The name, under which counts are stored.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.quota.name
    }

    /// How much.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        &self.quota.limit
    }

    pub(crate) fn quota(&self) -> &Quota {
        &self.quota
    }

    /// What each request costs, if they all cost the same.
    pub(crate) fn price(&self) -> Option<u64> {
        match self.cost {
            Cost::Always(cost) => Some(cost),
            Cost::Computed(_) => None,
        }
    }

    /// The same policy for callers who bring their keys.
    pub(crate) fn without_key(self) -> Policy<Unkeyed> {
        Policy {
            quota: self.quota,
            rendered: self.rendered,
            cost: self.cost,
            failure_mode: self.failure_mode,
            only: self.only,
            key: Unkeyed,
        }
    }
}

impl Policy {
    pub(crate) fn extractor(&self) -> &dyn KeyExtractor {
        &*self.key.0
    }

    /// What a request costs; 0 if the policy is not for it, and then its key does not matter.
    pub(crate) fn cost_of(&self, parts: &Parts) -> u64 {
        if self.quota.limit == Limit::Unlimited || self.only.as_ref().is_some_and(|selects| !selects(parts)) {
            return 0;
        }
        match &self.cost {
            Cost::Always(cost) => *cost,
            Cost::Computed(cost) => cost(parts),
        }
    }
}

impl<K> fmt::Debug for Policy<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policy")
            .field("name", &self.quota.name)
            .field("limit", &self.quota.limit)
            .field("cost", &self.cost)
            .field("failure_mode", &self.failure_mode)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Always(cost) => cost.fmt(f),
            Self::Computed(_) => f.write_str("<fn>"),
        }
    }
}

impl fmt::Debug for Keyed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keyed(<extractor>)")
    }
}

/// The context of the checks of these policies in a store.
pub(crate) fn context<K>(store: impl Store, policies: &[Policy<K>]) -> CheckContext {
    CheckContext {
        failover: Failover::of(&store),
        store: Arc::new(store),
        quotas: policies.iter().map(|policy| policy.quota.clone()).collect(),
        failure_modes: policies.iter().map(|policy| policy.failure_mode).collect(),
        rendered: policies.iter().map(|policy| policy.rendered.clone()).collect(),
    }
}

/// One policy, or several that are decided together: a [`Policy`], an array or a [`Vec`] of them.
///
/// An empty list admits everything.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a policy with a key, nor a list of them",
    note = "a policy says whom it counts against: `.key(key::ip())`, or `.key(key::constant(\"all\"))` for one limit for everybody"
)]
pub trait IntoPolicies<K = Keyed> {
    /// The policies, in the order in which they are reported.
    fn into_policies(self) -> Vec<Policy<K>>;
}

impl<K> IntoPolicies<K> for Policy<K> {
    fn into_policies(self) -> Vec<Self> {
        vec![self]
    }
}

impl<K> IntoPolicies<K> for Vec<Policy<K>> {
    fn into_policies(self) -> Self {
        self
    }
}

impl<K, const N: usize> IntoPolicies<K> for [Policy<K>; N] {
    fn into_policies(self) -> Vec<Policy<K>> {
        self.into()
    }
}

const MAX_NAME: usize = 64;

pub(crate) fn validate_name(name: &str) -> Result<(), ConfigError> {
    let mut bytes = name.bytes();
    let well_formed = bytes.next().is_some_and(|first| first.is_ascii_lowercase())
        && bytes.all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-'))
        && name.len() <= MAX_NAME;
    if well_formed {
        return Ok(());
    }

    Err(ConfigError::new(format!(
        "{name:?} is not a policy name; one is a lower-case word such as `say-hi`: a letter, then letters, digits, `_`, \
         `.` and `-`, {MAX_NAME} at most"
    )))
}

/// Refuses lists in which two policies would share their counts.
pub(crate) fn validate_names<K>(policies: &[Policy<K>]) -> Result<(), ConfigError> {
    for (position, policy) in policies.iter().enumerate() {
        if policies[..position]
            .iter()
            .any(|earlier| earlier.name() == policy.name())
        {
            return Err(ConfigError::new(format!(
                "two policies are named `{}`; counts are stored under the name, so give each its own",
                policy.name(),
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SlidingLog;

    #[test]
    fn a_name_is_a_lower_case_word() {
        for name in ["a", "say-hi", "v1.login_attempts"] {
            assert!(Policy::try_new(name, SlidingLog::per_second(1)).is_ok(), "{name}");
        }
        for name in ["", "Say-hi", "1st", "naïve", "a b", "a:b", "a{b}", &"a".repeat(65)] {
            let error = Policy::try_new(name.to_owned(), SlidingLog::per_second(1)).unwrap_err();
            assert!(error.to_string().contains("such as `say-hi`"), "{error}");
        }
    }

    #[test]
    fn a_plain_log_is_for_100_000_at_most() {
        assert!(Policy::try_new("a", SlidingLog::per_second(100_000)).is_ok());
        let error = Policy::try_new("a", SlidingLog::per_second(100_001)).unwrap_err();
        assert!(error.to_string().contains("at most 100000"), "{error}");
    }
}
