use super::Policy;
use crate::Ban;

/// Bans.
impl<K> Policy<K> {
    /// Bans a caller that this policy denies too often: for the length of a ban, all its requests are denied.
    ///
    /// A ban begins when a key reaches the number of denials that the [`Ban`] permits in its [window](Ban::window). By default
    /// the first ban lasts 1 minute. Each further ban lasts twice as long as the previous one, up to 1 day. Each window without a
    /// ban undoes one doubling. Denials during a ban do not make it longer.
    ///
    /// While a ban is in force, all requests of the key are denied with the reason [`Banned`](crate::Denial::Banned). Neither
    /// this policy nor a policy that is decided together with it counts them. This also applies to retries with a known
    /// [id](Self::once_per) and to [`peek`](crate::Limiter::peek). A
    /// [`reset`](crate::Limiter::reset) ends a ban and forgets those before; [`Limiter::ban`](crate::Limiter::ban) begins one by
    /// hand. A policy that [only observes](Self::observe_only) reports its bans and denies nothing. If all policies that deny
    /// do so by a ban, the response has the problem type `abnormal-usage-detected` in place of `quota-exceeded`, as
    /// [`Problem`](crate::decision::response::Problem) lists them.
    ///
    /// A denial counts if the policy itself has no room for the request. These do not: a denial by another policy only; one
    /// for a cost [above the limit](crate::Denial::CostAboveLimit); a request that is refused without a key,
    /// [blocked](crate::RateLimitLayer::block) or [skipped](crate::RateLimitLayer::skip). Nor does a denial for
    /// [`Limit::DenyAll`](crate::Limit::DenyAll). In a cluster the policies of several keys are decided one after the other, and
    /// only the denial of the first one that denies counts.
    ///
    /// Setting it again replaces it. By default a policy has no bans.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Ban, Denial, Limiter, ManualClock, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let minute = Duration::from_secs(60);
    /// let clock = ManualClock::new();
    /// let codes = Policy::new("codes", SlidingLog::per_minute(5)).ban(Ban::after(3, 60 * minute).first(10 * minute));
    /// let codes = Limiter::new(MemoryStore::builder().manual_clock(&clock).build(), codes);
    ///
    /// let mut denials = Vec::new();
    /// for _ in 0..9 {
    ///     let decision = codes.check("42").await?;
    ///     denials.extend(decision.policies().filter_map(|policy| policy.denial()));
    /// }
    /// assert_eq!(denials, [Denial::QuotaExceeded, Denial::QuotaExceeded, Denial::Banned, Denial::Banned]);
    ///
    /// clock.advance(minute);
    /// assert_eq!(codes.check("42").await?.retry_after(), Some(9 * minute));
    /// clock.advance(9 * minute);
    /// assert!(codes.check("42").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # What attackers can do
    ///
    /// A ban is for a key, and not for a person:
    ///
    /// * By [address](crate::key::ip()), one caller behind a NAT, a proxy or a VPN bans all that share its address. Prefer a key
    ///   that authentication has verified; for addresses choose short bans and many denials.
    /// * By a name that the request contains, such as the account of a login form, anyone can ban the account of another by
    ///   sending wrong passwords for it. Use a key of name and address together, as `(key::ip(), key::header(..))`.
    /// * By a [header](fn@crate::key::header) that the client chooses, a caller is free of its ban with another value.
    /// * A source address that can be spoofed, as that of UDP, bans its owner. TCP and QUIC have verified it.
    ///
    /// # What it costs
    ///
    /// A second key beside the count, `quota:1:ban:<policy>:{<key>}` in Redis, from the first denial on until it is forgotten.
    /// A check reads it in the same call of the store: one `GET` more. It is not sent together with equal checks, and denials
    /// that count are not cached in the process; those by a ban in force are. Other policies pay nothing.
    ///
    /// # What ends a ban
    ///
    /// A ban lasts as long as it was begun for, also if other numbers apply meanwhile: those of another process, such as one with a
    /// newer version of the service, or those after a reload of a file. If the longest length is lowered, bans in force do not
    /// become shorter; a [`reset`](crate::Limiter::reset) ends one.
    ///
    /// If the clock of the store is set ahead, bans end early. If it is set back by more than a second, a ban ends that would then
    /// last for more than the [longest length](Ban::max_length). While the store fails and this process counts, it has bans of
    /// its own.
    pub fn ban(mut self, ban: Ban) -> Self {
        self.settings.ban = Some(ban);
        self.noting(ban.validate())
    }
}
