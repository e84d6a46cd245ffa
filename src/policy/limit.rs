//! The limits of a policy under its name, and which settings they permit.

use std::sync::{Arc, OnceLock};

use http::request::Parts;

use super::Policy;
use crate::{
    ConfigError, Limit, decide::LongestWait, error::or_panic, key::KeyError, limit::ChooseLimit, store::NamedLimit,
};

#[derive(Clone)]
pub(super) struct PolicyLimit {
    /// The limit of all requests; if limits are chosen, one of the same name that limits nothing.
    pub(super) fixed: Arc<NamedLimit>,
    pub(super) choose: Option<ChooseLimit>,
    /// Those that a file lets it choose among.
    pub(super) of_plans: Vec<Limit>,
    /// Those that were chosen for requests, or may be.
    pub(super) chosen: Arc<RenderedLimits>,
    /// Those of overrides.
    pub(super) overriding: Arc<RenderedLimits>,
}

impl PolicyLimit {
    pub(super) fn new(name: Arc<str>, limit: impl Into<Limit>) -> Self {
        Self::of(NamedLimit::new(name, limit.into()))
    }

    fn of(fixed: NamedLimit) -> Self {
        Self {
            fixed: Arc::new(fixed),
            choose: None,
            of_plans: Vec::new(),
            chosen: Arc::default(),
            overriding: Arc::default(),
        }
    }

    /// The same, counted under a former name of the policy if it has one.
    pub(super) fn formerly(self, former: Option<Arc<str>>) -> Self {
        let fixed = self.fixed.with(self.fixed.limit.clone()).formerly(former);
        Self {
            choose: self.choose,
            of_plans: self.of_plans,
            ..Self::of(fixed)
        }
    }

    pub(super) fn chosen(name: Arc<str>, choose: ChooseLimit) -> Self {
        Self {
            choose: Some(choose),
            ..Self::new(name, Limit::Unlimited)
        }
    }

    /// The limit of a policy that a file has switched off: nothing is limited.
    #[cfg(feature = "serde")]
    pub(super) fn switched_off(self) -> Self {
        Self::of(self.fixed.with(Limit::Unlimited))
    }
}

const MAX_NAME: usize = 64;

/// Requires a lower-case word, which needs no escaping in a key, a field or JSON.
pub(super) fn validate_name(name: &str) -> Result<(), ConfigError> {
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

/// A name that a policy can have.
#[track_caller]
pub(super) fn valid_name(name: impl Into<Arc<str>>) -> Arc<str> {
    let name = name.into();
    or_panic(validate_name(&name));
    name
}

/// Limits that apply to some requests of a policy alone.
#[derive(Default)]
pub(super) struct RenderedLimits {
    /// Those that were rendered before, each near the place of its limit. None is removed, so reading takes no lock.
    seen: OnceLock<Box<[OnceLock<Arc<NamedLimit>>; PLACES]>>,
}

/// More than twice the number of all time zones.
const PLACES: usize = 2_048;

/// The number of places that are searched for a limit.
const REACH: usize = 32;

impl RenderedLimits {
    /// A limit of the policy that has this one too. It is rendered once.
    #[inline]
    pub(super) fn of(&self, limit: Limit, other: &NamedLimit) -> Result<Arc<NamedLimit>, KeyError> {
        let mut seen = self.near(&limit).map_while(OnceLock::get);
        match seen.find(|seen| seen.limit == limit) {
            Some(seen) => Ok(seen.clone()),
            None => self.add(limit, other),
        }
    }

    #[cold]
    fn add(&self, limit: Limit, other: &NamedLimit) -> Result<Arc<NamedLimit>, KeyError> {
        if let Err(error) = limit.validate() {
            let policy = &other.name;
            let message =
                format!("the limit that was chosen for a request of the policy `{policy}` is invalid: {error}");
            return Err(KeyError::misconfigured(message));
        }

        let new = Arc::new(other.with(limit));
        for place in self.near(&new.limit) {
            let seen = place.get_or_init(|| new.clone());
            if seen.limit == new.limit {
                return Ok(seen.clone());
            }
        }
        Ok(new)
    }

    /// All of them, as far as there is room for them.
    pub(super) fn all(&self) -> Vec<Arc<NamedLimit>> {
        let places = self.seen.get().into_iter().flat_map(|seen| seen.iter());
        places.filter_map(OnceLock::get).cloned().collect()
    }

    #[inline]
    fn near<'a>(&'a self, limit: &Limit) -> impl Iterator<Item = &'a OnceLock<Arc<NamedLimit>>> + use<'a> {
        let first = (limit.hash() >> (u64::BITS - PLACES.ilog2())) as usize;
        let seen = self.seen.get_or_init(|| Box::new([const { OnceLock::new() }; PLACES]));
        (first..first + REACH).map(move |place| &seen[place % PLACES])
    }
}

/// Limits that a function chooses.
impl Policy<()> {
    /// A policy whose limit a function chooses for each request, such as by the plan of a user.
    ///
    /// The function gets the head of the request, with the extensions that authentication has inserted. It returns one algorithm,
    /// or a [`Limit`].
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Request, Response};
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// /// What authentication inserts.
    /// #[derive(Clone)]
    /// struct User { id: u64, pro: bool }
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let api = Policy::with_limit_fn("api", |parts| match parts.extensions.get::<User>() {
    ///     Some(user) if user.pro => SlidingLog::per_minute(100),
    ///     _ => SlidingLog::per_minute(10),
    /// })
    /// .key(key::extension("user", |user: &User| user.id));
    /// let service = RateLimitLayer::new(MemoryStore::new(), api).layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
    /// }));
    ///
    /// // The second request is made after an upgrade. The first one still counts.
    /// for (pro, policy, state) in [
    ///     (false, r#""api";q=10;w=60"#, r#""api";r=9;t=60"#),
    ///     (true, r#""api";q=100;w=60"#, r#""api";r=98;t=60"#),
    /// ] {
    ///     let request = Request::get("/").extension(User { id: 42, pro }).body(Body::new())?;
    ///     let response = service.clone().oneshot(request).await?;
    ///     assert_eq!(response.headers()["ratelimit-policy"], policy);
    ///     assert_eq!(response.headers()["ratelimit"], state);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Counts of several plans
    ///
    /// Counts are stored as [after a change](crate::limit#when-a-limit-changes):
    ///
    /// * Limits that differ in quota, burst or lease alone share the count of a key. A caller whose plan changes keeps what was
    ///   counted, and a plan decides about the requests of the others too.
    /// * Limits of different windows, precisions, rates of a bucket, alignments or algorithms have separate counts: after a change of
    ///   the rate the bucket is full. A caller that can change its plan at will, such as by a header, can use up each of them.
    ///
    /// # What applies to a request
    ///
    /// The chosen limit is that of the [`Decision`](crate::Decision), of the response, of the count in this process while the store
    /// fails, and of a [`Receipt`](crate::Receipt). With [`Limit::Unlimited`] the policy does not apply, and no key is extracted.
    /// A limit that cannot be kept, such as a sliding log of a million without a precision, refuses the request with
    /// `500 Internal Server Error`, and the first one is logged. So does a limit of [`Concurrency`](crate::Concurrency) if the policy has
    /// [`refund_if`](crate::Policy::refund_if), which has no meaning for slots.
    ///
    /// A [`Limiter`](crate::Limiter) has no requests. Make one of [`Plans`](crate::Plans), and name the plan of each
    /// [request](crate::Limiter::request).
    ///
    /// # Costs
    ///
    /// The function runs on the path of the request. Its limits are rendered once and kept, up to some 2,000 of them; further ones
    /// are rendered for each request. A request makes no other call of the store than with a fixed limit.
    ///
    /// # Panics
    ///
    /// If the name is not one that [`new`](Self::new) takes.
    #[track_caller]
    pub fn with_limit_fn<L: Into<Limit>>(
        name: impl Into<Arc<str>>,
        limit: impl Fn(&Parts) -> L + Send + Sync + 'static,
    ) -> Self {
        let choose = Arc::new(move |parts: &Parts| limit(parts).into());
        Self::of_limit(PolicyLimit::chosen(valid_name(name), choose))
    }
}

/// Another name.
impl<K> Policy<K> {
    /// The former name of the policy, under which its requests go on to be counted, in files `formerly`.
    ///
    /// Counts, bans, overrides and lines are stored under the name of a policy, so a policy with another name starts at zero, and
    /// during a deploy the replicas with the old name count apart from those with the new one. With its former name none of this
    /// happens: the new name is that of fields, metrics and the page, and the old one that of the store. Leave it out once the counts
    /// may start at zero. A window, rate or algorithm that changes with the name [starts a new count](crate::limit#when-a-limit-changes).
    /// A policy of several [plans](crate::Plans) has it in each of them.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let store = MemoryStore::new();
    /// let old = Limiter::new(store.clone(), Policy::new("login", SlidingLog::per_hour(5)));
    /// let new = Limiter::new(store, Policy::new("sign-in", SlidingLog::per_hour(5)).formerly("login"));
    ///
    /// assert_eq!(old.check("42").await?.remaining(), 4);
    /// let decision = new.check("42").await?;
    /// assert_eq!((decision.policies().next().map(|policy| policy.name()), decision.remaining()), (Some("sign-in"), 3));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If it is not a name that [`new`](Policy::new) takes, or the policy is one of a file, which has its former name.
    #[track_caller]
    pub fn formerly(mut self, name: impl Into<Arc<str>>) -> Self {
        #[cfg(feature = "serde")]
        assert!(
            self.from_file.is_none(),
            "the policy `{}` is one of a file; write `formerly` there",
            self.name()
        );
        self.policy_limit = self.policy_limit.formerly(Some(valid_name(name)));
        self
    }
}

impl<K> Policy<K> {
    /// Refuses settings that contradict the limits, as far as these are known before a request.
    pub(super) fn validate_settings(&self) -> Result<(), ConfigError> {
        self.validate_learning()?;
        let mut known = self.limit().into_iter().chain(&self.policy_limit.of_plans);
        known.try_for_each(|limit| {
            self.validate_slots(limit)?;
            self.validate_prefetch(limit)?;
            self.validate_wait(limit)?;
            self.validate_cost(limit)
        })
    }

    /// Refuses a policy that is to obey a server, and never applies. One of a file may be switched off.
    fn validate_learning(&self) -> Result<(), ConfigError> {
        let never_applies = self.file().is_none() && self.limit() == Some(&Limit::Unlimited);
        if !self.settings.learns || !never_applies {
            return Ok(());
        }
        Err(ConfigError::new(format!(
            "`.learn_from_responses()` has no effect in the policy `{}`, since `Limit::Unlimited` denies no request; use a limit that \
             is never reached, such as `FixedWindow::per_second(1_000_000)`",
            self.name(),
        )))
    }

    /// Refuses a wait that hardly ever ends in time, unless requests are refunded, and a cost that may not wait.
    fn validate_wait(&self, limit: &Limit) -> Result<(), ConfigError> {
        let settings = self.all_settings();
        if let Some(LongestWait::Fixed(longest)) = settings.longest_wait
            && settings.refund_if.is_none()
        {
            let valid = limit.validate_wait(longest);
            valid.map_err(|error| error.of_policy(self.name()))?;
        }
        match settings.fixed_cost() {
            Some(cost) if limit.is_counted() && settings.waits() && !settings.may_wait_behind(0, cost) => {
                Err(ConfigError::new(format!(
                    "no request of the policy `{}` would wait: each costs {cost}, which is more than `.max_waiting(..)`, in files \
                     `max-waiting`; set that to at least {cost}",
                    self.name(),
                )))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Refuses units that are taken ahead where each request is decided by Redis.
    pub(super) fn validate_prefetch(&self, limit: &Limit) -> Result<(), ConfigError> {
        let settings = self.all_settings();
        let decided_by_redis = settings.waits() || settings.bans().is_some();
        match limit.prefetch_time() {
            Some(_) if decided_by_redis => Err(ConfigError::new(format!(
                "`prefetch` of the policy `{}` has no effect: with waits or bans Redis decides each request; leave one of them out",
                self.name(),
            ))),
            Some(_) | None => Ok(()),
        }
    }

    /// Refuses settings by which a request is counted when it has ended, if it holds slots until then.
    #[inline]
    pub(super) fn validate_slots(&self, limit: &Limit) -> Result<(), ConfigError> {
        if !limit.is_held() || self.settings.refund_if.is_none() {
            return Ok(());
        }
        Err(ConfigError::new(format!(
            "`.refund_if(..)` has no meaning for the policy `{}` with the limit `{limit}`: a request holds its slots until it ends; \
             leave it out, or add a policy with a limit such as `SlidingLog::per_minute(100)` for it",
            self.name(),
        )))
    }

    /// Refuses a fixed cost above the limit.
    pub(super) fn validate_cost(&self, limit: &Limit) -> Result<(), ConfigError> {
        match self.all_settings().fixed_cost() {
            Some(cost) if limit.is_counted() && cost > limit.quota() => Err(ConfigError::new(format!(
                "each request of the policy `{}` costs {cost}, and `{limit}` admits at most {quota}, so it admits none; set a cost \
                 of at most {quota}, or a larger limit; `Limit::DenyAll`, in files `deny-all`, is for a policy that admits none",
                self.name(),
                quota = limit.quota(),
            ))),
            Some(_) | None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Concurrency, SlidingLog};
    #[cfg(feature = "calendar")]
    use crate::{FixedWindow, limit::Calendar};

    fn limits() -> PolicyLimit {
        PolicyLimit::new("api".into(), Limit::Unlimited)
    }

    fn chosen(limits: &PolicyLimit, quota: u64) -> Result<Arc<NamedLimit>, KeyError> {
        limits.chosen.of(SlidingLog::per_minute(quota).into(), &limits.fixed)
    }

    #[test]
    fn a_limit_that_was_chosen_before_is_not_rendered_again() {
        let limits = limits();
        let first: Vec<_> = (1..=100).map(|quota| chosen(&limits, quota).unwrap()).collect();
        for (quota, first) in (1..=100).zip(first) {
            assert!(Arc::ptr_eq(&first, &chosen(&limits, quota).unwrap()), "{quota}");
        }
    }

    #[test]
    fn limits_of_one_quota_are_all_kept() {
        let leases = (1..=300).map(|s| Concurrency::new(9).lease(Duration::from_secs(s)).into());
        #[cfg(feature = "calendar")]
        let leases = leases.chain((0..5 * 26_u8).map(|n| {
            const CALENDARS: [Calendar; 5] = [
                Calendar::Hour,
                Calendar::Day,
                Calendar::Week,
                Calendar::Month,
                Calendar::Year,
            ];
            let zone = format!("Etc/GMT{:+}", i32::from(n / 5) - 14 + i32::from(n / 5 >= 14));
            FixedWindow::calendar(9, CALENDARS[usize::from(n % 5)], &zone)
                .unwrap()
                .into()
        }));
        let all: Vec<Limit> = leases.collect();
        let limits = limits();
        for limit in &all {
            limits.chosen.of(limit.clone(), &limits.fixed).unwrap();
        }
        assert_eq!(limits.chosen.all().len(), all.len());
    }

    #[test]
    fn any_number_of_limits_can_be_chosen_in_bounded_memory() {
        let limits = limits();
        for _ in 0..2 {
            for quota in 1..=10_000 {
                let limit = chosen(&limits, quota).unwrap();
                assert_eq!(limit.limit.quota(), quota);
            }
        }
        let seen = limits.chosen.seen.get().unwrap();
        assert!(seen.iter().all(|place| place.get().is_some()));
    }

    #[test]
    fn an_invalid_limit_is_an_error_that_names_the_policy_and_the_fix() {
        let error = chosen(&limits(), SlidingLog::MAX_QUOTA + 1).unwrap_err();
        assert!(error.is_misconfigured());
        for part in ["policy `api`", "`.precision(1000)`"] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
