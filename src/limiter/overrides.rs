use std::time::Duration;

use super::{Limiter, request::unknown};
use crate::{
    Key, Limit,
    store::{ErrorKind, Override, StoreError},
};

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
/// assert_eq!(exports.overrides()[0].limit().to_string(), "sliding-log 20/d");
///
/// exports.end_override("exports", "acme").await?;
/// assert_eq!(exports.check("acme").await?.remaining(), 2);
/// # Ok(())
/// # }
/// ```
impl Limiter {
    /// Sets the limit of one key of a policy for a time, in place of the limit of the policy and of its plans.
    ///
    /// It replaces an earlier override of the key. The limit has the algorithm of the policy's, or is
    /// [`Unlimited`](Limit::Unlimited) or [`DenyAll`](Limit::DenyAll). With another window, counts are those
    /// [after a change](crate::limit#when-a-limit-changes). The other settings of the policy stay. A policy that is `Unlimited` does
    /// not extract keys, so no override applies in a layer.
    ///
    /// The time is rounded down to microseconds, and at most 31 years.
    ///
    /// # Errors
    ///
    /// If the store fails, or has no overrides; and if the limiter has no policy of this name, the limit is not one that the policy
    /// can have, or the store has 10,000 overrides already. Then nothing is changed.
    pub async fn override_limit(
        &self,
        policy: &str,
        key: impl Into<Key>,
        limit: impl Into<Limit>,
        lasts: Duration,
    ) -> Result<(), StoreError> {
        self.set_override(policy, key.into(), Some((limit.into(), lasts.min(LONGEST))))
            .await
    }

    /// Ends the override of a key, if it has one.
    ///
    /// # Errors
    ///
    /// If the store fails, or has no overrides; and if the limiter has no policy of this name.
    pub async fn end_override(&self, policy: &str, key: impl Into<Key>) -> Result<(), StoreError> {
        self.set_override(policy, key.into(), None).await
    }

    /// The overrides of the policies of this limiter that have not ended, by policy and key.
    ///
    /// They are as this process knows them: those that another one has set are known within a second.
    #[must_use]
    pub fn overrides(&self) -> Vec<Override> {
        let basis = self.policies.newest();
        let mut list = basis
            .context
            .overrides
            .as_ref()
            .map(|overrides| overrides.list())
            .unwrap_or_default();
        list.retain(|one| basis.policies.iter().any(|policy| policy.name() == one.policy()));
        list
    }

    async fn set_override(
        &self,
        policy: &str,
        mut key: Key,
        limit: Option<(Limit, Duration)>,
    ) -> Result<(), StoreError> {
        key.bound();
        let overrides = {
            let basis = self.policies.newest();
            let overrides = basis.context.overrides.clone().ok_or_else(no_overrides)?;
            let mut named = basis.policies.iter().filter(|of| of.name() == policy).peekable();
            if named.peek().is_none() {
                return Err(unknown(policy, &basis.context));
            }
            if let Some((limit, _)) = &limit {
                for of in named {
                    let own = of.limit().unwrap_or(&Limit::Unlimited);
                    let valid = of.validate_override(own, limit.clone());
                    valid.map_err(|error| StoreError::new(ErrorKind::Refused, error.to_string()))?;
                }
            }
            overrides
        };
        overrides.set(policy, &key, limit).await
    }
}

/// The longest override: numbers of microseconds are exact up to here for longer than a century.
const LONGEST: Duration = Duration::from_micros(crate::limit::MAX_QUOTA);

fn no_overrides() -> StoreError {
    StoreError::new(
        ErrorKind::Refused,
        "the store has no overrides; set `.overrides(true)` of `RedisStore::builder()`, or pass on `Store::overrides` of a store \
         that is wrapped",
    )
}
