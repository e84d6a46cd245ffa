//! Named limits and the keys that they apply to.

mod access;
mod ban;
mod completion;
#[cfg(feature = "serde")]
mod file;
#[cfg(feature = "admin")]
mod inspect;
mod list;
#[cfg(feature = "serde")]
mod live;
mod once;
mod plan;
#[cfg(feature = "serde")]
mod scope;
mod set;
mod settings;
mod terms;
mod wait;

use std::{borrow::Cow, fmt, sync::Arc, time::Duration};

use http::request::Parts;

#[cfg(feature = "serde")]
use self::live::Origin;
use self::{once::Once, plan::Plans, terms::Terms};
use crate::{
    Ban, ConfigError, KeyExtractor, Limit,
    decision::{CompletionRule, Plan, PolicyFile, Thresholds},
    key::KeyError,
    limit::PolicyLimit,
    store::{FailureMode, NamedLimit, Waiting},
};

pub use self::list::IntoPolicies;
#[cfg(test)]
pub(crate) use self::list::context;
pub(crate) use self::{
    access::{Access, Condition},
    set::{Basis, PolicySet},
};
#[cfg(feature = "serde")]
pub use self::{file::Policies, live::LivePolicies};

/// A named limit and the key it applies to.
///
/// The [`Limit`] is an algorithm with its parameters; the [key](crate::key) is extracted from each request. Counts are stored
/// under the name of the policy, and responses contain the name in `RateLimit-Policy`.
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{key, Policy, SlidingLog};
///
/// let say_hi = Policy::new("say-hi", SlidingLog::new(2, Duration::from_secs(30)))
///     .key((key::ip(), key::path()));
/// assert_eq!(say_hi.name(), "say-hi");
/// assert_eq!(say_hi.limit(), Some(&"sliding-log 2/30s".parse()?));
/// # Ok::<(), tower_quota::limit::ParseLimitError>(())
/// ```
///
/// A layer takes only policies with a key. One limit for all callers has a constant key:
///
/// ```
/// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// let total = Policy::new("total", SlidingLog::per_second(1_000)).key(key::constant("all"));
/// assert!(RateLimitLayer::try_new(MemoryStore::new(), total).is_ok());
/// ```
///
/// ```compile_fail
/// # use tower_quota::{MemoryStore, Policy, RateLimitLayer, SlidingLog};
/// let no_key = Policy::new("no-key", SlidingLog::per_second(10));
/// RateLimitLayer::new(MemoryStore::new(), no_key); // the policy has no key
/// ```
#[derive(Clone)]
#[must_use]
pub struct Policy<K = Keyed> {
    settings: Settings,
    key: K,
}

/// What a policy has besides its key.
#[derive(Clone)]
struct Settings {
    terms: Terms,
    /// The settings in code, over those of the terms.
    cost: Option<Cost>,
    failure_mode: Option<FailureMode>,
    /// The requests that the policy applies to.
    applies: Option<Condition>,
    completion: Option<CompletionRule>,
    /// Whether the policy only observes.
    observed: bool,
    /// Those in code, if there are any, in place of those of the terms.
    thresholds: Thresholds,
    ban: Option<Ban>,
    /// Whether responses begin bans.
    learns: bool,
    /// The longest wait.
    longest_wait: Option<Duration>,
    /// The most units that wait.
    max_waiting: Option<u64>,
    once: Once,
    /// The requests that the file of the policy lists as skipped or blocked.
    #[cfg(feature = "serde")]
    listed: Option<Arc<Access>>,
    /// Where a reload replaces the terms and the lists.
    #[cfg(feature = "serde")]
    origin: Option<Origin>,
}

impl Settings {
    fn failure_mode(&self) -> FailureMode {
        self.failure_mode.unwrap_or(self.terms.failure_mode)
    }

    fn thresholds(&self) -> &Thresholds {
        match self.thresholds.is_empty() {
            true => &self.terms.thresholds,
            false => &self.thresholds,
        }
    }

    fn ban(&self) -> Option<Ban> {
        let learnt = self.learns.then(|| Ban::by_hand().longest(LONGEST_PAUSE));
        self.ban.or(self.terms.ban).or(learnt)
    }

    fn waiting(&self) -> Waiting {
        let longest = self.longest_wait.unwrap_or(self.terms.longest_wait);
        Waiting::up_to(longest, self.max_waiting.unwrap_or(self.terms.max_waiting))
    }

    /// The file that the policy follows.
    #[cfg(feature = "serde")]
    fn file(&self) -> Option<Arc<dyn PolicyFile>> {
        self.origin.as_ref().map(Origin::file)
    }

    #[cfg(not(feature = "serde"))]
    fn file(&self) -> Option<Arc<dyn PolicyFile>> {
        None
    }
}

/// The longest pause that a response can ask for, unless the policy has bans.
const LONGEST_PAUSE: Duration = Duration::from_secs(3_600);

/// The cost of a request.
#[derive(Clone)]
enum Cost {
    Fixed(u64),
    Computed(Arc<dyn Fn(&Parts) -> u64 + Send + Sync>),
}

/// The type parameter of a [`Policy`] with a key, as a layer takes it.
#[derive(Clone)]
pub struct Keyed(Arc<dyn KeyExtractor>);

/// The type parameter of a [`Policy`] without a key. [`Policy::key`] adds one.
#[derive(Clone, Copy, Debug)]
pub struct Unkeyed;

/// Constructors.
impl Policy<Unkeyed> {
    /// A policy without a key and with a cost of 1 for each request.
    ///
    /// The limit is an algorithm, a [`Limit`], or one that [`limit::by`](crate::limit::by()) chooses for each request.
    ///
    /// A name is a lower-case word such as `say-hi`: a letter, then letters, digits, `_`, `.` and `-`, 64 characters at most.
    ///
    /// # Panics
    ///
    /// If the name is not of that form, or the limit cannot be kept: a [`SlidingLog`](crate::SlidingLog) of more than
    /// 100,000 without a [`precision`](crate::SlidingLog::precision), or a [`TokenBucket`](crate::TokenBucket) whose burst
    /// and rate are too large together for exact integers; or it is a [`Limit::Ban`], which [`ban`](Self::ban) sets beside the
    /// limit. [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub fn new(name: impl Into<Cow<'static, str>>, limit: impl Into<PolicyLimit>) -> Self {
        match Self::try_new(name, limit) {
            Ok(policy) => policy,
            Err(error) => panic!("{error}"),
        }
    }

    /// A policy without a key, or the reason why the name or the limit cannot be used.
    ///
    /// ```
    /// use tower_quota::{Policy, SlidingLog};
    ///
    /// assert!(Policy::try_new("say-hi", SlidingLog::per_minute(5)).is_ok());
    /// assert!(Policy::try_new("Say Hi", SlidingLog::per_minute(5)).is_err());
    /// ```
    ///
    /// # Errors
    ///
    /// For the names and limits for which [`new`](Self::new) panics.
    pub fn try_new(name: impl Into<Cow<'static, str>>, limit: impl Into<PolicyLimit>) -> Result<Self, ConfigError> {
        Terms::try_new(name, limit).map(Self::with_terms)
    }

    fn with_terms(terms: Terms) -> Self {
        let settings = Settings {
            terms,
            cost: None,
            failure_mode: None,
            applies: None,
            completion: None,
            observed: false,
            thresholds: Thresholds::default(),
            ban: None,
            learns: false,
            longest_wait: None,
            max_waiting: None,
            once: Once::DEFAULT,
            #[cfg(feature = "serde")]
            listed: None,
            #[cfg(feature = "serde")]
            origin: None,
        };
        Self { settings, key: Unkeyed }
    }

    /// The key that requests are counted under; see [`key`](crate::key) for the extractors.
    ///
    /// A [`Limiter`](crate::Limiter) takes policies without one, since each of its methods is given the key.
    ///
    /// ```
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// let login = Policy::new("login", SlidingLog::per_minute(5)).key((key::ip(), key::path()));
    /// assert!(RateLimitLayer::try_new(MemoryStore::new(), login).is_ok());
    /// ```
    pub fn key(self, key: impl KeyExtractor) -> Policy {
        self.with_key(Keyed(Arc::new(key)))
    }
}

/// Accessors.
impl<K> Policy<K> {
    /// The name, under which counts are stored.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.settings.terms.plan.named.name
    }

    /// The limit; `None` if it is [chosen](crate::limit::by()) for each request.
    #[must_use]
    pub fn limit(&self) -> Option<&Limit> {
        match self.settings.terms.plans {
            Some(_) => None,
            None => Some(&self.settings.terms.plan.named.limit),
        }
    }

    /// The cost of each request, unless it is computed.
    pub(crate) fn fixed_cost(&self) -> Option<u64> {
        match self.settings.cost {
            None => Some(self.settings.terms.cost),
            Some(Cost::Fixed(cost)) => Some(cost),
            Some(Cost::Computed(_)) => None,
        }
    }

    /// The ids of requests.
    pub(crate) fn once(&self) -> &Once {
        &self.settings.once
    }

    /// The same policy without its key.
    pub(crate) fn without_key(self) -> Policy<Unkeyed> {
        self.with_key(Unkeyed)
    }

    fn with_key<L>(self, key: L) -> Policy<L> {
        Policy {
            settings: self.settings,
            key,
        }
    }
}

impl Policy {
    pub(crate) fn extractor(&self) -> &dyn KeyExtractor {
        &*self.key.0
    }

    /// Whether the policy is for a request.
    #[inline]
    pub(crate) fn applies_to(&self, parts: &Parts) -> bool {
        let applies = |condition: &Condition| condition(parts);
        self.settings.terms.contains(parts) && self.settings.applies.as_ref().is_none_or(applies)
    }

    /// The plan that is chosen for a request, unless all requests have the same.
    #[inline]
    pub(crate) fn choose_plan(&self, parts: &Parts) -> Result<Option<Arc<Plan>>, KeyError> {
        match &self.settings.terms.plans {
            None => Ok(None),
            Some(plans) => self.choose_of(plans, parts).map(Some),
        }
    }

    fn choose_of(&self, plans: &Plans, parts: &Parts) -> Result<Arc<Plan>, KeyError> {
        let plan = plans.of(parts)?;
        self.validate_chosen(&plan.named.limit)?;
        Ok(plan)
    }

    /// What applies to a request for which this plan is chosen.
    #[inline]
    pub(crate) fn named_of<'a>(&'a self, chosen: Option<&'a Plan>) -> &'a NamedLimit {
        &chosen.unwrap_or(&self.settings.terms.plan).named
    }

    /// The cost of a request; 0 if the policy does not apply to it.
    #[inline]
    pub(crate) fn cost_of(&self, parts: &Parts) -> u64 {
        match &self.settings.cost {
            None => self.settings.terms.cost,
            Some(Cost::Fixed(cost)) => *cost,
            Some(Cost::Computed(cost)) => cost(parts),
        }
    }
}

impl<K> fmt::Debug for Policy<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit: &dyn fmt::Debug = match self.limit() {
            Some(limit) => limit,
            None => &format_args!("<fn>"),
        };
        f.debug_struct("Policy")
            .field("name", &self.name())
            .field("limit", limit)
            .field(
                "cost",
                self.settings
                    .cost
                    .as_ref()
                    .unwrap_or(&Cost::Fixed(self.settings.terms.cost)),
            )
            .field("failure_mode", &self.settings.failure_mode())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(cost) => cost.fmt(f),
            Self::Computed(_) => f.write_str("<fn>"),
        }
    }
}

impl fmt::Debug for Keyed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keyed(<extractor>)")
    }
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
    fn a_log_without_precision_is_for_100_000_at_most() {
        assert!(Policy::try_new("a", SlidingLog::per_second(100_000)).is_ok());
        let error = Policy::try_new("a", SlidingLog::per_second(100_001)).unwrap_err();
        assert!(error.to_string().contains("at most 100000"), "{error}");
    }
}
