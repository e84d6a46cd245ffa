/// What a [`Charge`](super::Charge) is in its request.
///
/// ```
/// use tower_quota::{FixedWindow, Key, Limit, MemoryStore, SlidingLog, store::{Charge, Operation, Store, StoreRequest}};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_quota::store::StoreError> {
/// let store = MemoryStore::new();
/// let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("42"));
/// let (marks, id) = (Limit::from(FixedWindow::per_minute(2)), Key::from("42").and("id-1"));
/// let remaining = async |charges: &[Charge<'_>]| {
///     let response = store.decide(&[StoreRequest::new(Operation::Check, charges)]).await?;
///     Ok::<_, tower_quota::store::StoreError>(response.outcomes()[0].states().last().map(|state| state.remaining))
/// };
///
/// let counted = Charge::new("mails", &limit, &key, 1);
/// assert_eq!(remaining(&[counted]).await?, Some(4));
/// assert_eq!(remaining(&[counted.checked_only()]).await?, Some(4));
///
/// let marker = Charge::new("mails", &marks, &id, 1).once();
/// assert_eq!(remaining(&[marker, counted]).await?, Some(3));
/// assert_eq!(remaining(&[marker, counted]).await?, Some(3)); // the one repetition
/// assert_eq!(remaining(&[marker, counted]).await?, Some(2));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ChargeRole {
    /// A check is denied without room for the cost, and the cost is counted when the request is admitted. This is the default.
    #[default]
    Counted,
    /// A check is denied without room for the cost, and nothing is counted. So there is nothing to refund.
    CheckedOnly,
    /// A marker for the next charge of the request, so that repetitions of the request are not counted. It never denies:
    ///
    /// * If nothing counts on it, the next charge is decided as without it. The cost of the marker is counted when the request
    ///   is admitted.
    /// * If something counts on it and it has room, the request is a repetition: the next charge does not deny and is not
    ///   counted. The cost of the marker is counted when the request is admitted.
    /// * If it has no room, the next charge is decided as without it, and the marker is not counted. Its state has a
    ///   [`retry_after`](super::ChargeState::retry_after), even if the request is admitted.
    ///
    /// So each counted request has as many repetitions as fit on the marker beside it. A marker is not counted if the next
    /// charge is not: if there is none, if it is only checked, and if its limit is
    /// [`Limit::Unlimited`](crate::Limit::Unlimited) or [`Limit::DenyAll`](crate::Limit::DenyAll). In a Redis cluster a marker
    /// and the next charge lie in one slot. The role has no effect on refunds and resets.
    Once,
    /// A charge of [`Limit::Ban`](crate::Limit::Ban), for the next charge of the request that is not a marker:
    ///
    /// * A check or peek is denied while a ban is in force, and nothing is counted then.
    /// * If a check is denied, no ban is in force, and the next charge itself has no room for its cost, which is within its
    ///   limit, one denial is counted. With the last one that [`Ban::denials`](crate::Ban::denials) permits a ban begins, and
    ///   the state has its wait.
    /// * [`Operation::Charge`](super::Operation::Charge) begins a ban of `cost` microseconds, at most
    ///   [`Ban::max_length`](crate::Ban::max_length), unless a longer one is in force.
    /// * A refund changes nothing, and a reset ends the ban and forgets the ones before.
    ///
    /// Its state has the denials that remain, 0 while a ban is in force; the rest of the ban; and the time until the ban, the
    /// denials and the number of bans are forgotten. A ban is ignored if the next charge counts nothing, for
    /// [`Limit::Unlimited`](crate::Limit::Unlimited) or [`Limit::DenyAll`](crate::Limit::DenyAll). In a Redis cluster it lies
    /// in one slot with the next charge. A charge has this role if and only if its limit is a ban.
    Ban,
}
