use std::time::Duration;

use super::{Limiter, unknown};
use crate::{
    Decision, Key, Limit, Policy, PolicyDecision,
    decide::send_bans,
    limit::LengthText,
    observe::notify,
    store::{Override, OverrideError, Overrides, StoreError},
};

/// Bans by hand.
impl Limiter {
    /// Bans a key for a time, in all policies of the limiter that have [bans](crate::Policy::ban).
    ///
    /// Until then its requests are denied, with the reason [`Banned`](crate::Denial::Banned), also by other processes, and by
    /// policies of the same name whose [longest](crate::Ban::longest) ban is shorter. The time is in microseconds, rounded down. A
    /// ban that lasts longer stays. Denials before a ban by hand no longer count, and the next ban after denials is no longer for
    /// it. A [`reset`](Self::reset) ends it. A policy whose limit is [`Unlimited`](crate::Limit::Unlimited), such as while limits
    /// are off in a file, or that of an override of the key, admits the requests of a banned key; the ban applies when the policy has a
    /// limit again.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Ban, Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let calls = Policy::new("calls", SlidingLog::per_minute(60)).ban(Ban::by_hand());
    /// let calls = Limiter::new(MemoryStore::new(), calls);
    /// assert!(calls.check("42").await?.is_allowed());
    ///
    /// calls.ban("42", Duration::from_secs(30)).await?;
    /// assert_eq!(calls.check("42").await?.retry_after(), Some(Duration::from_secs(30)));
    ///
    /// calls.reset("42").await?;
    /// assert!(calls.check("42").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Bans after denials become shorter by a step for each [window](crate::Ban::after), or part of one, by which it ends later than the
    /// ban before.
    ///
    /// # Errors
    ///
    /// If the store fails: the key is banned in this process then, for the time in which it counts by itself. And if no policy has
    /// bans, none of those that have bans [has such keys](Self::from), the [longest](crate::Ban::longest) ban of one is shorter, or
    /// the time is below a microsecond: then no policy bans the key, and the [kind](StoreError::kind) is
    /// [`Invalid`](crate::store::ErrorKind::Invalid).
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Ban, Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// const DAY: Duration = Duration::from_secs(86_400);
    /// let calls = |ban| Limiter::new(MemoryStore::new(), Policy::new("calls", SlidingLog::per_minute(60)).ban(ban));
    /// let error = calls(Ban::by_hand()).ban("42", 7 * DAY).await.unwrap_err();
    /// assert_eq!(error.to_string(), "a policy of the limiter bans for at most 1d; set `.longest(..)` of its bans");
    ///
    /// calls(Ban::by_hand().longest(7 * DAY)).ban("42", 7 * DAY).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn ban(&self, key: impl Into<Key>, length: Duration) -> Result<(), StoreError> {
        let mut key = key.into();
        self.refuse_useless_key(&key, |policy| policy.ban.is_some())?;
        require_time(length, "ban", "reset")?;
        key.bound();
        let (decision, longest) = {
            let context = self.policies.newest().context.here().clone();
            // Also those that are not limited now: the ban applies when they are.
            let policies = 0..context.policies.len();
            let undecided = policies.map(|position| PolicyDecision::plain(&context, position, key.clone()));
            let bans = context.policies.iter().filter_map(|policy| policy.ban.as_deref());
            let longest = bans.map(|ban| ban.longest).min();
            (Decision::new(true, undecided.collect()), longest)
        };
        if let Some(longest) = longest.filter(|longest| length.as_micros() > longest.as_micros()) {
            let longest = LengthText(longest);
            return Err(StoreError::invalid(format!(
                "a policy of the limiter bans for at most {longest}; set `.longest(..)` of its bans"
            )));
        }
        let Some(response) = send_bans(&decision, length, |_| true) else {
            return Err(StoreError::invalid(
                "no policy of the limiter has bans; set `.ban(Ban::by_hand())`",
            ));
        };
        let banned = response.await.map(drop);
        banned.inspect_err(|error| {
            if let Some(first) = decision.as_slice().first() {
                first.context.metrics.failed(error.kind());
            }
            notify(&self.on_failure, error);
        })
    }
}

/// Overrides: other limits of single keys, for a time.
///
/// They are stored beside the counts, so they apply in all processes, and in layers and limiters alike. A [`MemoryStore`](crate::MemoryStore) has
/// them; a [`RedisStore`](crate::RedisStore) with the setting [`overrides`](crate::RedisStoreBuilder::overrides), which each process of
/// the service has.
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), tower_quota::store::StoreError> {
/// const DAY: Duration = Duration::from_secs(86_400);
/// let exports = Limiter::new(MemoryStore::new(), Policy::new("exports", SlidingLog::per_day(5)));
/// assert_eq!(exports.check("acme").await?.remaining(), 4);
///
/// // Twenty a day until Friday. What was counted still counts.
/// exports.override_limit("exports", "acme", SlidingLog::per_day(20), 3 * DAY).await?;
/// assert_eq!(exports.check("acme").await?.remaining(), 18);
/// assert_eq!(exports.check("initech").await?.remaining(), 4);
/// assert_eq!(exports.overrides()[0].limit.to_string(), "sliding-log 20/d");
///
/// exports.end_override("exports", "acme").await?;
/// assert_eq!(exports.check("acme").await?.remaining(), 2);
/// # Ok(())
/// # }
/// ```
impl Limiter {
    /// Sets the limit of one key of a policy for a time, in place of the limit of the policy and of its plans.
    ///
    /// It replaces an earlier override of the key. The limit has the algorithm of one of the known limits of the
    /// policy, or is [`Unlimited`](Limit::Unlimited) or [`DenyAll`](Limit::DenyAll). With another window or rate, counts are those
    /// [after a change](crate::limit#when-a-limit-changes). The other settings of the policy stay.
    ///
    /// The time is rounded down to microseconds, and at most 31 years. Redis keeps overrides as it keeps counts: those that are lost with
    /// its data are logged as a warning, and are to be set again.
    ///
    /// # Errors
    ///
    /// If the store fails: the change may have been made then. And, with nothing changed, if the store has no overrides, the
    /// limiter has no policy of this name, no request of the layer that it is [made of](Self#impl-From<%26RateLimitLayer>-for-Limiter) has
    /// the key, the policy is `Unlimited` and so has no keys, the limit is not one that it can have, the
    /// time is shorter than a microsecond, or the store has 10,000 overrides already.
    pub async fn override_limit(
        &self,
        policy: &str,
        key: impl Into<Key>,
        limit: impl Into<Limit>,
        lasts: Duration,
    ) -> Result<(), StoreError> {
        self.set_override(policy, key.into(), Some((limit.into(), lasts))).await
    }

    /// Ends the override of a key, if it has one.
    ///
    /// # Errors
    ///
    /// If the store fails: the override may have ended then. And if the store has no overrides, or the limiter no policy of this
    /// name.
    pub async fn end_override(&self, policy: &str, key: impl Into<Key>) -> Result<(), StoreError> {
        self.set_override(policy, key.into(), None).await
    }

    /// The overrides of the policies of this limiter that have not ended, by policy and key.
    ///
    /// They are as this process knows them: those that another one has set are known within a second.
    #[must_use]
    pub fn overrides(&self) -> Vec<Override> {
        let basis = self.policies.newest();
        let overrides = basis.context.overrides.as_ref();
        let list = overrides.map(Overrides::list).unwrap_or_default();
        let named = list.into_iter().filter_map(|mut one| {
            let policy = basis
                .policies
                .iter()
                .find(|policy| policy.counted_as() == &*one.policy)?;
            one.policy = policy.name().into();
            Some(one)
        });
        named.collect()
    }

    async fn set_override(
        &self,
        policy: &str,
        mut key: Key,
        limit: Option<(Limit, Duration)>,
    ) -> Result<(), StoreError> {
        if let Some((_, lasts)) = &limit {
            self.refuse_useless_key(&key, |of| *of.limit.name == *policy)?;
            require_time(*lasts, "override", "end_override")?;
        }
        key.bound();
        let (overrides, counted_as) = {
            let basis = self.policies.newest();
            let overrides = basis.context.require_overrides()?.clone();
            let mut named = basis.policies.iter().filter(|of| of.name() == policy).peekable();
            let Some(first) = named.peek() else {
                return Err(unknown(policy, &basis.context));
            };
            let counted_as = Box::<str>::from(first.counted_as());
            if let Some((limit, _)) = &limit {
                let valid = Policy::accept_override(named, limit);
                valid.map_err(|error| StoreError::invalid(error.to_string()))?;
            }
            (overrides, counted_as)
        };
        let changed = overrides.set(&counted_as, &key, limit, None).await;
        changed.map_err(|error| {
            if let OverrideError::Unconfirmed(error) = &error {
                notify(&self.on_failure, error);
            }
            error.into()
        })
    }
}

/// What is shorter than the clock of a store would end at once, and do nothing.
fn require_time(lasts: Duration, what: &str, end: &str) -> Result<(), StoreError> {
    if lasts < Duration::from_micros(1) {
        return Err(StoreError::invalid(format!(
            "this {what} lasts less than a microsecond; to end one, call `{end}`"
        )));
    }
    Ok(())
}
