//! Named limits and the keys that they apply to.

mod enforcement;
#[cfg(feature = "serde")]
mod file;
mod limit;
mod plans;
mod set;
mod settings;

#[cfg(feature = "admin")]
use std::time::SystemTime;
use std::{fmt, sync::Arc};

use http::request::Parts;

#[cfg(feature = "serde")]
use self::file::FromFile;
#[cfg(feature = "serde")]
pub use self::file::Policies;
#[cfg(test)]
pub(crate) use self::set::context;
use self::{
    limit::{PolicyLimit, valid_name},
    plans::PlanOf,
};
pub(crate) use self::{
    plans::PlanChoice,
    set::{Access, Basis, PolicySet, validate_for_layer, validate_for_limiter},
};
pub use self::{plans::Plans, set::IntoPolicies};
use crate::{
    ConfigError, FixedWindow, Key, KeyExtractor, Limit,
    decide::{CheckContext, Cost, PolicyFile, Settings},
    error::or_panic,
    key,
    key::KeyError,
    store::{NamedLimit, Overrides},
};

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
/// # Ok::<(), tower_quota::ConfigError>(())
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
///
/// The type parameter is the key; a `Policy<()>` has none.
#[derive(Clone)]
#[must_use]
pub struct Policy<K = Arc<dyn KeyExtractor>> {
    policy_limit: PolicyLimit,
    /// Those in code.
    settings: Settings,
    /// What the file of the policy has beside its limit.
    #[cfg(feature = "serde")]
    from_file: Option<FromFile>,
    /// The plan that the policy is of, unless it applies to requests of all plans.
    plan: Option<PlanOf>,
    extractor: K,
}

/// Constructors.
impl Policy<()> {
    /// A policy without a key and with a cost of 1 for each request.
    ///
    /// The limit is an algorithm, a [`Limit`], or its [text](crate::limit#limits-as-text), such as `"100/min"`. A name is a lower-case word such as `say-hi`: a letter, then letters, digits, `_`, `.`
    /// and `-`, 64 characters at most.
    ///
    /// # Panics
    ///
    /// If the name is not such a word, or the text not a limit; parse one from configuration, which gives an error. What the settings are together is checked when a layer or a limiter is built, and by
    /// [`validate`](Self::validate).
    #[track_caller]
    pub fn new(name: impl Into<Arc<str>>, limit: impl TryInto<Limit, Error: fmt::Display>) -> Self {
        let limit = or_panic(limit.try_into());
        Self::of_limit(PolicyLimit::new(valid_name(name), limit))
    }

    fn of_limit(policy_limit: PolicyLimit) -> Self {
        Self {
            policy_limit,
            settings: Settings::default(),
            #[cfg(feature = "serde")]
            from_file: None,
            plan: None,
            extractor: (),
        }
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
        self.with_key(Arc::new(key))
    }
}

/// Checks.
impl<K> Policy<K> {
    /// Returns the first settings that cannot work together, as [`RateLimitLayer::try_new`](crate::RateLimitLayer::try_new) and
    /// [`Limiter::try_new`](crate::Limiter::try_new) do. These also refuse settings that depend on where the policy is used: in
    /// a layer an order or a bound of waits for which nothing waits, and in a limiter what needs an HTTP request.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{FixedWindow, Policy, SlidingLog};
    ///
    /// let mails = || Policy::new("mails", SlidingLog::per_hour(100));
    /// assert!(mails().cost(40).validate().is_ok());
    ///
    /// for wrong in [
    ///     Policy::new("mails", SlidingLog::per_hour(1_000_000)), // without a precision
    ///     Policy::new("mails", FixedWindow::per_hour(100)).wait_up_to(Duration::from_secs(2)),
    ///     mails().cost(101), // no request would be admitted
    /// ] {
    ///     assert!(wrong.validate().is_err(), "{wrong:?}");
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// If two settings contradict each other, such as a [cost](Self::cost) above the limit, or units that are
    /// [taken ahead](crate::limit#units-that-are-taken-ahead) for a policy with waits or bans. Or the limit cannot be kept: a
    /// [`SlidingLog`](crate::SlidingLog) of more than 100,000 without a [`precision`](crate::SlidingLog::precision), or a
    /// [`TokenBucket`](crate::TokenBucket) whose burst and rate are too large
    /// together for exact integers.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.policy_limit.fixed.limit.validate()?;
        self.validate_settings()
    }
}

/// Accessors.
impl<K> Policy<K> {
    /// The name. Counts are stored under it, or under its [former](Self::formerly) one.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.policy_limit.fixed.name
    }

    /// The limit; `None` if it is [chosen](crate::Policy::with_limit_fn) for each request.
    #[must_use]
    pub fn limit(&self) -> Option<&Limit> {
        match self.policy_limit.choose {
            Some(_) => None,
            None => Some(&self.policy_limit.fixed.limit),
        }
    }

    /// The name under which it is counted.
    pub(crate) fn counted_as(&self) -> &str {
        self.policy_limit.fixed.counted_as()
    }

    /// The settings in code, or those of the file.
    fn all_settings(&self) -> Settings {
        #[cfg(feature = "serde")]
        if let Some(from_file) = &self.from_file {
            return self.settings.over(&from_file.settings);
        }
        self.settings.clone()
    }

    fn file(&self) -> Option<Arc<dyn PolicyFile>> {
        #[cfg(feature = "serde")]
        return Some(Arc::new(self.from_file.clone()?));
        #[cfg(not(feature = "serde"))]
        None
    }

    /// The requests that its file lists as skipped or blocked.
    fn listed(&self) -> Option<Arc<Access>> {
        #[cfg(feature = "serde")]
        return self.from_file.as_ref()?.listed.clone();
        #[cfg(not(feature = "serde"))]
        None
    }

    /// The same policy for a limiter, which is given the keys.
    pub(crate) fn for_limiter(self) -> Policy {
        self.with_key(Arc::new(key::from_fn(|_| None::<Key>)))
    }

    fn with_key<L>(self, extractor: L) -> Policy<L> {
        Policy {
            policy_limit: self.policy_limit,
            settings: self.settings,
            #[cfg(feature = "serde")]
            from_file: self.from_file.map(FromFile::without_key),
            plan: self.plan,
            extractor,
        }
    }
}

/// Plans.
impl<K> Policy<K> {
    /// Whether it applies to requests of the plan at this position.
    #[inline]
    pub(crate) fn is_of_plan(&self, position: usize) -> bool {
        self.plan_position().is_none_or(|own| own == position)
    }

    /// The position of the plan that it is of, unless it is of all.
    #[inline]
    pub(crate) fn plan_position(&self) -> Option<usize> {
        self.plan.as_ref()?.position
    }

    /// The name of the plan that it is of, unless it is of all.
    pub(crate) fn plan_name(&self) -> Option<&Arc<str>> {
        self.plan.as_ref()?.choice.names.get(self.plan_position()?)
    }
}

/// What a request is for the policy.
impl Policy {
    pub(crate) fn extractor(&self) -> &dyn KeyExtractor {
        &*self.extractor
    }

    /// The limit that is chosen for a request, unless all requests have the same.
    #[inline]
    pub(crate) fn choose_limit(&self, parts: &Parts) -> Result<Option<Arc<NamedLimit>>, KeyError> {
        match &self.policy_limit.choose {
            None => Ok(None),
            Some(choose) => {
                let limit = self.policy_limit.chosen.of(choose(parts), &self.policy_limit.fixed)?;
                let valid = self.validate_slots(&limit.limit);
                valid.map_err(|error| KeyError::misconfigured(error.to_string()))?;
                Ok(Some(limit))
            }
        }
    }
}

/// Overrides.
impl<K> Policy<K> {
    /// The limit of an override of this key, if there is one that can be applied in place of this limit.
    #[inline(always)]
    pub(crate) fn overriding(&self, context: &CheckContext, own: &Limit, key: &Key) -> Option<Arc<NamedLimit>> {
        self.overriding_by(context.overrides.as_ref()?, own, key)
    }

    fn overriding_by(&self, overrides: &Overrides, own: &Limit, key: &Key) -> Option<Arc<NamedLimit>> {
        if matches!(own, Limit::Unlimited) {
            return None;
        }
        let limit = overrides
            .limit_of(self.counted_as(), key)
            .filter(|limit| self.fits(own, limit))?;
        self.policy_limit.overriding.of(limit, &self.policy_limit.fixed).ok()
    }

    /// Whether the limit of an override applies in place of this limit of the policy.
    pub(crate) fn fits(&self, own: &Limit, limit: &Limit) -> bool {
        *own != Limit::Unlimited && Self::validate_override(own, limit).is_ok() && self.validate_slots(limit).is_ok()
    }

    /// Whether a key can have this limit in all of these policies of one name, and in one of them with effect.
    pub(crate) fn accept_override<'a>(
        mut policies: impl Iterator<Item = &'a Self> + Clone,
        limit: &Limit,
    ) -> Result<(), ConfigError>
    where
        K: 'a,
    {
        limit.validate()?;
        policies.clone().try_for_each(|policy| {
            policy.validate_prefetch(limit)?;
            policy.validate_slots(limit)
        })?;
        // A key is of one plan.
        let (of_plans, of_all): (Vec<_>, Vec<_>) =
            policies.clone().partition(|policy| policy.plan_position().is_some());
        of_all.iter().try_for_each(|policy| policy.validate_cost(limit))?;
        let affordable = of_plans.iter().map(|policy| policy.validate_cost(limit));
        affordable.reduce(Result::or).unwrap_or(Ok(()))?;
        // It applies in place of those whose algorithm it has.
        let known = policies.clone().flat_map(Self::known_limits);
        let counted = known.filter(|own| own.limit.is_counted());
        let fits = counted.map(|own| Self::validate_override(&own.limit, limit));
        fits.reduce(Result::or).unwrap_or(Ok(()))?;
        if policies.all(|policy| policy.limit() == Some(&Limit::Unlimited)) {
            return Err(ConfigError::new(
                "an override of a policy that is `unlimited` has no effect; give the policy a limit",
            ));
        }
        Ok(())
    }

    /// Whether the limit of an override applies in place of this limit. Counts of one algorithm are no counts of another.
    fn validate_override(own: &Limit, limit: &Limit) -> Result<(), ConfigError> {
        if limit.is_counted() && own.is_counted() && limit.algorithm() != own.algorithm() {
            return Err(ConfigError::new(format!(
                "`{limit}` cannot override `{own}`: another algorithm has other counts; use the same algorithm, `unlimited` or \
                 `deny-all`"
            )));
        }
        Ok(())
    }
}

/// Its limits and counts.
impl<K> Policy<K> {
    /// The limits of the policy, as far as they are known, the smallest first.
    pub(crate) fn known_limits(&self) -> Vec<Arc<NamedLimit>> {
        let mut known = match &self.policy_limit.choose {
            Some(_) => self.policy_limit.chosen.all(),
            None => vec![self.policy_limit.fixed.clone()],
        };
        known.sort_by_key(|limit| limit.limit.quota());
        known
    }

    /// What to reset for a key of the policy at this position: the limits that count, as far as they are known, and their overrides.
    pub(crate) fn counted_limits(
        &self,
        (context, position): (&CheckContext, usize),
        key: &Key,
    ) -> Vec<Arc<NamedLimit>> {
        let known = self.known_limits();
        let overriding = known.iter().filter_map(|own| self.overriding(context, &own.limit, key));
        let mut counted: Vec<_> = known.iter().cloned().chain(overriding).collect();
        counted.retain(|limit| limit.limit.is_counted());
        if counted.is_empty() && context.policies[position].ban.is_some() {
            // Bans are reset with a count, which is one of nothing here.
            let any = self.policy_limit.fixed.with(FixedWindow::per_second(1).into());
            counted.push(Arc::new(any));
        }
        counted
    }
}

/// What operators see.
#[cfg(feature = "admin")]
impl<K> Policy<K> {
    /// When the file of the policy was last loaded again.
    pub(crate) fn reloaded_at(&self) -> Option<SystemTime> {
        self.from_file.as_ref()?.file.reloaded_at()
    }

    /// Whether the newest load of its file has no such policy, so that it keeps what the last one had.
    pub(crate) fn is_missing(&self) -> bool {
        self.from_file.as_ref().is_some_and(FromFile::is_missing)
    }

    /// Whether its file has switched it off.
    pub(crate) fn is_off(&self) -> bool {
        self.from_file.as_ref().is_some_and(FromFile::is_off) && self.limit() == Some(&Limit::Unlimited)
    }

    /// Why the file is not applied as it is.
    pub(crate) fn refused_reload(&self) -> Option<(SystemTime, String)> {
        self.from_file.as_ref()?.file.refused_reload()
    }
}

impl_debug!(Policy[K], policy =>
    name: policy.name(),
    limit: policy.limit().map_or("<fn>".to_owned(), Limit::to_string),
    cost: policy.all_settings().cost.unwrap_or(Cost::Fixed(1)),
    failure_mode: policy.all_settings().failure_mode.unwrap_or_default()
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SlidingLog;

    #[test]
    fn a_name_is_a_lower_case_word() {
        for name in ["a", "say-hi", "v1.login_attempts"] {
            assert!(limit::validate_name(name).is_ok(), "{name}");
        }
        for name in [
            "",
            "Say-hi",
            "1st",
            "naïve",
            "a b",
            "a:b",
            "a{b}",
            "a\nb",
            &"a".repeat(65),
        ] {
            let error = limit::validate_name(name).unwrap_err();
            assert!(error.to_string().contains("such as `say-hi`"), "{error}");
        }
    }

    #[test]
    fn a_log_without_precision_is_for_100_000_at_most() {
        let validate = |quota| Policy::new("a", SlidingLog::per_second(quota)).validate();
        assert!(validate(100_000).is_ok());
        let error = validate(100_001).unwrap_err();
        assert!(error.to_string().contains("at most 100000"), "{error}");
    }
}
