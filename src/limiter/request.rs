use std::{borrow::Cow, time::Duration};

use super::{Limiter, undecided, unknown, unknown_plan};
use crate::{
    Decision, Key,
    decide::{self, Check, PolicyContext, Waiting},
    policy::Basis,
    store::{ErrorKind, Operation, StoreError},
};

/// A request to a [`Limiter`] in which policies have keys and costs of their own; made by [`Limiter::request`].
#[derive(Clone, Debug)]
#[must_use = "a request is decided by `check`, `check_now`, `take_up_to`, `peek`, `charge` or `acquire`"]
pub struct LimiterRequest<'a> {
    limiter: &'a Limiter,
    key: Key,
    cost: Option<u64>,
    pub(super) plan: Option<Cow<'a, str>>,
    pub(super) wait_up_to: Option<Duration>,
    pub(super) turn_key: u32,
    pub(super) priority: i32,
    pub(super) units: u32,
    of_policies: Vec<OfPolicy<'a>>,
}

/// What one policy has in place of the others.
#[derive(Clone, Debug)]
pub(super) struct OfPolicy<'a> {
    policy: Cow<'a, str>,
    pub(super) key: Option<Key>,
    cost: Option<u64>,
    /// Whether the policy does not apply.
    pub(super) is_off: bool,
}

/// Constructors.
impl Limiter {
    /// A request of this key, which may have other keys and costs for single policies.
    ///
    /// All policies are decided at once: the request is counted by all of them or, if one denies it, by none.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog, TokenBucket};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let model = Limiter::new(MemoryStore::new(), [
    ///     Policy::new("requests", SlidingLog::per_minute(60)),
    ///     Policy::new("tokens", TokenBucket::per_minute(10_000)),
    ///     Policy::new("organization", TokenBucket::per_minute(50_000)),
    /// ]);
    ///
    /// // One request of a user, with 800 tokens for the user and for the organization.
    /// let request = model.request("user-7").key_of("organization", "acme");
    /// let decision = request.cost_of("tokens", 800).cost_of("organization", 800).check().await?;
    /// assert!(decision.is_allowed());
    /// assert_eq!(decision.policies().map(|policy| policy.remaining()).collect::<Vec<_>>(), [59, 9_200, 49_200]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn request(&self, key: impl Into<Key>) -> LimiterRequest<'_> {
        LimiterRequest {
            limiter: self,
            key: key.into(),
            cost: None,
            plan: None,
            wait_up_to: None,
            turn_key: 0,
            priority: 0,
            units: 1,
            of_policies: Vec::new(),
        }
    }
}

/// Settings.
impl<'a> LimiterRequest<'a> {
    /// The cost for each policy, in units of its limit, in place of the cost of the policy.
    ///
    /// A cost above a limit is denied with [`Denial::CostAboveLimit`](crate::Denial::CostAboveLimit), and counts nothing.
    /// An operation of cost 0 is a [`peek`](Self::peek) of cost 1: it counts nothing, does not wait, and is denied if a cost of 1 would
    /// be. A [`charge`](Self::charge) of cost 0 counts nothing. Beside a [`cost_of`](Self::cost_of), policies of cost 0 do not apply.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Denial, Limiter, MemoryStore, Policy, TokenBucket};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let rows = Limiter::new(MemoryStore::new(), Policy::new("rows", TokenBucket::per_minute(1_000)));
    /// let request = |cost| rows.request("42").cost(cost);
    /// assert_eq!(request(600).check().await?.remaining(), 400);
    /// assert_eq!(request(600).check().await?.retry_after(), Some(Duration::from_secs(12)));
    /// let never = request(2_000).check().await?;
    /// assert_eq!(never.retry_after(), None);
    /// assert_eq!(never.policies().next().and_then(|policy| policy.denial()), Some(Denial::CostAboveLimit));
    /// # Ok(())
    /// # }
    /// ```
    pub fn cost(mut self, cost: u64) -> Self {
        self.cost = Some(cost);
        self
    }

    /// The cost for the policy of this name, which takes precedence over [`cost`](Self::cost). With 0 the policy does not apply
    /// to the request.
    ///
    /// The decision is an error of the kind [`Invalid`](ErrorKind::Invalid) if the limiter has no such policy.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let policies = ["requests", "bytes"].map(|name| Policy::new(name, SlidingLog::per_hour(100)));
    /// let uploads = Limiter::new(MemoryStore::new(), policies);
    ///
    /// let decision = uploads.request("42").cost_of("bytes", 64).check().await?;
    /// assert_eq!(decision.policies().map(|policy| policy.remaining()).collect::<Vec<_>>(), [99, 36]);
    /// let decision = uploads.request("42").cost_of("bytes", 0).check().await?;
    /// assert_eq!(decision.policies().map(|policy| policy.name()).collect::<Vec<_>>(), ["requests"]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn cost_of(mut self, policy: &'a str, cost: u64) -> Self {
        self.of(policy.into()).cost = Some(cost);
        self
    }

    /// The key for the policy of this name.
    ///
    /// The decision is an error of the kind [`Invalid`](ErrorKind::Invalid) if the limiter has no such policy. In a Redis cluster
    /// keys lie in several slots: `RedisStore` has what that means.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let policies = [("account", 5), ("address", 20)].map(|(name, n)| Policy::new(name, SlidingLog::per_hour(n)));
    /// let logins = Limiter::new(MemoryStore::new(), policies);
    ///
    /// for account in 0..20 {
    ///     let login = logins.request(account).key_of("address", "198.51.100.7");
    ///     assert!(login.check().await?.is_allowed());
    /// }
    /// // The address has none left, so nothing is counted for the account.
    /// assert!(!logins.request(20).key_of("address", "198.51.100.7").check().await?.is_allowed());
    /// assert_eq!(logins.request(20).key_of("address", "203.0.113.9").peek().await?.remaining(), 5);
    /// # Ok(())
    /// # }
    /// ```
    pub fn key_of(mut self, policy: &'a str, key: impl Into<Key>) -> Self {
        let of = self.of(policy.into());
        (of.key, of.is_off) = (Some(key.into()), false);
        self
    }

    /// The plan whose policies decide the request, where the limiter has [`Plans`](crate::Plans). The default is the first plan.
    ///
    /// The decision is an error of the kind [`Invalid`](ErrorKind::Invalid) if the limiter has no such plan.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Plans, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = |n| Policy::new("mails", SlidingLog::per_day(n));
    /// let mails = Limiter::new(MemoryStore::new(), Plans::new("free", mails(3)).plan("pro", mails(100)));
    ///
    /// assert_eq!(mails.check("42").await?.remaining(), 2);
    /// let decision = mails.request("42").plan("pro").check().await?;
    /// assert_eq!((decision.plan(), decision.remaining()), (Some("pro"), 98));
    /// # Ok(())
    /// # }
    /// ```
    pub fn plan(mut self, name: &'a str) -> Self {
        self.plan = Some(name.into());
        self
    }

    pub(super) fn of(&mut self, policy: Cow<'a, str>) -> &mut OfPolicy<'a> {
        let position = self.of_policies.iter().position(|of| of.policy == policy);
        let position = position.unwrap_or_else(|| {
            self.of_policies.push(OfPolicy {
                policy,
                key: None,
                cost: None,
                is_off: false,
            });
            self.of_policies.len() - 1
        });
        &mut self.of_policies[position]
    }
}

/// Decisions.
impl LimiterRequest<'_> {
    /// Counts the costs if all of them fit, as [`Limiter::check`] does.
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed), or if the limiter has no policy of a name that
    /// was given.
    pub async fn check(self) -> Result<Decision, StoreError> {
        self.perform(Operation::Check).await
    }

    /// Counts the costs if all of them fit, as [`check`](Self::check) does, without a future: for code that is not
    /// `async`.
    ///
    /// It needs a store that replies at once: a [`MemoryStore`](crate::MemoryStore). A decision waits at most for the lock of a part
    /// of its keys.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// let queries = Limiter::new(MemoryStore::new(), Policy::new("queries", SlidingLog::per_second(2)));
    ///
    /// // The filter of a server that is not async.
    /// let accepts = |peer: &str| queries.request(peer).check_now().is_ok_and(|decision| decision.is_allowed());
    /// assert_eq!([accepts("a"), accepts("a"), accepts("a"), accepts("b")], [true, true, false, true]);
    /// ```
    ///
    /// # Errors
    ///
    /// If the store does not reply at once, such as a `RedisStore`: then nothing is sent and nothing is counted. And as
    /// [`check`](Self::check).
    pub fn check_now(self) -> Result<Decision, StoreError> {
        if !self.limiter.policies.newest().context.store.replies_at_once() {
            return Err(StoreError::invalid(
                "the store does not reply at once; use `check(..).await`, or a `MemoryStore`",
            ));
        }
        let limiter = self.limiter;
        match self.begin(Operation::Check)? {
            (operation, Check::Decided(decision)) => limiter.observe(operation, decision),
            (_, Check::Pending(_)) => Err(StoreError::new(
                ErrorKind::Protocol,
                "the store that replies at once has not replied",
            )),
        }
    }

    /// Counts the costs as often as they fit, at most so many times: how many of n jobs may run now.
    ///
    /// [`Decision::taken`] is how many times that was; the decision is allowed if it was at least one. It is one call of the store, and
    /// of several policies all count as often. With 0 times it is a [`peek`](Self::peek).
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// // Two mails for each job.
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(20)).cost(2));
    ///
    /// let decision = mails.request("42").take_up_to(7).await?;
    /// assert_eq!((decision.taken(), decision.remaining()), (7, 6));
    /// let decision = mails.request("42").take_up_to(7).await?;
    /// assert_eq!((decision.taken(), decision.remaining()), (3, 0));
    /// // Of the three, one was not needed: four mails were sent.
    /// decision.take_receipt().settle(2 * 2).await?;
    /// assert_eq!(mails.request("42").take_up_to(7).await?.taken(), 1);
    /// assert_eq!(mails.request("42").take_up_to(7).await?.taken(), 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check). And if a policy has slots or bans, or keys of its own that lie in several slots of a Redis cluster.
    pub async fn take_up_to(mut self, times: u32) -> Result<Decision, StoreError> {
        let takes_one = |policy: &PolicyContext| policy.ban.is_some() || policy.limit.limit.is_held();
        if self.limiter.policies.newest().context.policies.iter().any(takes_one) {
            return Err(undecided::one_by_one());
        }
        let operation = match times {
            0 => Operation::Peek,
            _ => self.operation(Operation::Check),
        };
        self.units = if operation == Operation::Peek { 0 } else { times };
        self.perform(operation).await
    }

    /// Counts the costs unconditionally, even if they exceed the limits.
    ///
    /// The decision is always allowed. Later requests are denied until enough of the costs has expired; they count in full, up to
    /// 999,999,999,999,999; of a [`TokenBucket`](crate::TokenBucket) and a [`SlidingCounter`](crate::SlidingCounter) up to what is
    /// computed exactly, and of slots up to a billion. Unlike a [ban](Limiter::ban), it does not refuse a key that no request has.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_quota::{Limiter, MemoryStore, Policy, TokenBucket};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let tokens = Limiter::new(MemoryStore::new(), Policy::new("tokens", TokenBucket::per_second(10)));
    ///
    /// // The response was three times as long as the limit: 21 tokens must be restored before one more fits.
    /// assert!(tokens.request("42").cost(30).charge().await?.is_allowed());
    /// assert_eq!(tokens.check("42").await?.retry_after(), Some(Duration::from_millis(2_100)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub async fn charge(self) -> Result<Decision, StoreError> {
        self.perform(Operation::Charge).await
    }

    /// Returns what [`check`](Self::check) would return, and counts nothing.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub async fn peek(self) -> Result<Decision, StoreError> {
        self.perform(Operation::Peek).await
    }

    /// This operation, or a peek if it would count nothing.
    fn operation(&mut self, operation: Operation) -> Operation {
        let is_free = self.cost == Some(0) && self.of_policies.iter().all(|of| of.cost.is_none());
        if is_free && operation.requires_room() {
            self.cost = Some(1);
            return Operation::Peek;
        }
        operation
    }

    pub(super) async fn perform(self, operation: Operation) -> Result<Decision, StoreError> {
        let limiter = self.limiter;
        let (operation, check) = self.begin(operation)?;
        limiter.observe(operation, check.decided().await)
    }

    fn begin(mut self, operation: Operation) -> Result<(Operation, Check), StoreError> {
        if operation != Operation::Wait && (self.wait_up_to.is_some() || self.turn_key != 0 || self.priority != 0) {
            return Err(StoreError::invalid(
                "`wait_up_to`, `fair_by` and `priority` are for `acquire`; no other operation waits",
            ));
        }
        let operation = self.operation(operation);
        let keys = self.of_policies.iter_mut().filter_map(|of| of.key.as_mut());
        keys.chain([&mut self.key]).for_each(Key::bound);
        let mut undecided = undecided::undecided_by(&self.limiter.policies.newest(), operation, &self)?;
        undecided.is_of_http = false;
        if operation.regards_lines() {
            undecided.enter_lines();
        }
        Ok((operation, decide::begin(operation, undecided)))
    }
}

/// What a policy decides.
impl LimiterRequest<'_> {
    /// Its key and its cost for a policy; without a cost, it is that of the policy.
    #[inline]
    pub(super) fn for_policy(&self, policy: &str) -> (&Key, Option<u64>) {
        match self.of_policies.iter().find(|of| of.policy == policy) {
            None => (&self.key, self.cost),
            Some(of) if of.is_off => (&self.key, Some(0)),
            Some(of) => (of.key.as_ref().unwrap_or(&self.key), of.cost.or(self.cost)),
        }
    }

    /// How it waits for a policy for which requests wait like this.
    pub(super) fn waiting(&self, of_policy: Waiting) -> Waiting {
        Waiting {
            fair: self.turn_key,
            priority: self.priority,
            ..self.wait_up_to.map_or(of_policy, |longest| of_policy.up_to(longest))
        }
    }

    /// The position of its plan. Refuses a name that no plan or none of the policies has.
    #[inline]
    pub(super) fn plan_of(&self, Basis { context, plans, .. }: &Basis) -> Result<usize, StoreError> {
        if context.policies.is_empty() {
            return Ok(0); // limits are turned off
        }
        let position = |name| plans.as_ref().and_then(|plans| plans.position(name));
        let plan = self.plan.as_deref().map_or(Ok(0), |name| {
            position(name).ok_or_else(|| unknown_plan(name, plans.as_deref()))
        })?;
        for of in &self.of_policies {
            if context.policies.iter().all(|policy| *policy.limit.name != *of.policy) {
                return Err(unknown(&of.policy, context));
            }
        }
        Ok(plan)
    }
}
