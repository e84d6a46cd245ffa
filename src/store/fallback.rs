#[cfg(feature = "tracing")]
use std::error::Error as _;
use std::{fmt, sync::Arc};

use smallvec::SmallVec;

use super::{Answer, Charge, Operation, Origin, Reply, Request, Store, StoreError};
use crate::{
    Key, Limit,
    health::{Health, OnFailure},
    limit::Share,
};

/// Counts in a second store while the first one fails.
///
/// Each request is asked of the first store; where that fails, for whatever [reason](crate::store::ErrorKind), of the
/// second. With a [`MemoryStore`](crate::MemoryStore) behind Redis, limits go on while Redis is away, and every replica of
/// the service counts for itself. [`share`](Self::share) gives each its part.
///
/// ```no_run
/// use tower_quota::{Fallback, MemoryStore, RedisStore};
///
/// # async fn f() -> Result<(), tower_quota::ConfigError> {
/// // Four replicas, and each takes a quarter of the limits when it is on its own.
/// let redis = RedisStore::connect("redis://127.0.0.1:6379").await?;
/// let store = Fallback::new(redis, MemoryStore::new()).share(1, 4);
/// # Ok(())
/// # }
/// ```
///
/// A policy's [`FailureMode`](crate::FailureMode) is for requests that neither store answers.
///
/// # What counts where
///
/// The stores know nothing of each other's counts. When the first one fails, everybody begins anew in the second; when it
/// is back, what it still has counts again, and what was counted meanwhile does not. So in one window a caller may get its
/// limit from the first, and its share of it from the second. A check that timed out may have been counted in both.
///
/// A [refund](crate::Limiter::refund) goes to the store that was charged, and fails if that does. A
/// [reset](crate::Limiter::reset) goes to both stores, and fails if one of them does.
///
/// # Shares
///
/// A share is rounded down, and never below 1. Of a [`TokenBucket`](crate::TokenBucket) the burst and the rate are shared,
/// and the rate exactly: a quarter of 3 a day is 3 in 4 days. (Where such a rate cannot be reckoned exactly, which
/// needs numbers of many digits, only the burst is shared.) A request whose cost is within the limit but above the share
/// counts as the whole share, so that it is admitted where nothing else was. `limit` and `RateLimit-Policy` show the whole
/// limit; `remaining` and the waits are those of the share.
///
/// ```
/// use tower_quota::{Fallback, Limiter, MemoryStore, Policy, SlidingLog};
/// use tower_quota::store::{ErrorKind, Reply, Request, Store, StoreError};
///
/// struct Away;
///
/// impl Store for Away {
///     fn decide(&self, _: &[Request<'_>]) -> Reply {
///         Reply::Ready(Err(StoreError::new(ErrorKind::Unreachable, "away")))
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = Fallback::new(Away, MemoryStore::new()).share(1, 4);
/// let limiter = Limiter::new(store, Policy::new("mail", SlidingLog::per_hour(10)));
///
/// assert_eq!(limiter.check("42").await?.remaining(), 1); // of 2
/// assert_eq!(limiter.check("42").await?.remaining(), 0);
/// assert!(!limiter.check("42").await?.is_allowed());
///
/// // Costs more than the share, and takes all of it.
/// assert_eq!(limiter.check_n("43", 5).await?.remaining(), 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct Fallback {
    shared: Arc<Shared>,
}

#[derive(Clone)]
struct Shared {
    first: Arc<dyn Store>,
    backup: Arc<Backup>,
    on_failure: OnFailure,
    health: Arc<Health>,
}

/// Constructors.
impl Fallback {
    /// A store that counts in the first one, and in the second one while that fails.
    pub fn new(first: impl Store, second: impl Store) -> Self {
        Self {
            shared: Arc::new(Shared {
                first: Arc::new(first),
                backup: Arc::new(Backup {
                    store: Arc::new(second),
                    share: Share::WHOLE,
                }),
                on_failure: OnFailure::default(),
                health: Arc::default(),
            }),
        }
    }
}

/// Settings.
impl Fallback {
    /// How much of each limit the second store admits: so many parts `of` the whole.
    ///
    /// With a store in memory behind Redis, `share(1, 4)` is for four replicas. The default is the whole.
    ///
    /// # Panics
    ///
    /// If it is nothing, or more than the whole.
    #[track_caller]
    pub fn share(mut self, parts: u32, of: u32) -> Self {
        assert!(
            parts > 0 && parts <= of,
            "a share is more than nothing and at most the whole, as in `.share(1, 4)`"
        );
        let shared = Arc::make_mut(&mut self.shared);
        Arc::make_mut(&mut shared.backup).share = Share { parts, of };
        self
    }

    /// Tells of each failure of the first store.
    ///
    /// It runs on the path of the request, so it must be quick and not panic.
    /// [`RateLimitLayer::on_failure`](crate::RateLimitLayer::on_failure) is told if the second store fails too. The default
    /// is to tell nobody.
    pub fn on_failure(mut self, observe: impl Fn(&StoreError) + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.shared).on_failure = OnFailure::new(observe);
        self
    }
}

impl Store for Fallback {
    fn decide(&self, requests: &[Request<'_>]) -> Reply {
        let reply = self.ask(requests);
        let resets = requests
            .iter()
            .filter(|request| request.operation() == Operation::Reset);
        let resets: SmallVec<[Request<'_>; 1]> = resets.copied().collect();
        if resets.is_empty() {
            return reply;
        }

        let reset = self.shared.backup.decide(&resets);
        Reply::Pending(Box::pin(async move {
            let (answer, reset) = (reply.await, reset.await);
            answer.and_then(|answer| reset.map(|_| answer))
        }))
    }
}

impl Fallback {
    fn ask(&self, requests: &[Request<'_>]) -> Reply {
        match self.shared.first.decide(requests) {
            Reply::Ready(Ok(answer)) => {
                self.shared.recover();
                Reply::Ready(Ok(answer))
            }
            Reply::Ready(Err(error)) => self.shared.fall_back(error, requests),
            Reply::Pending(answer) => {
                let shared = self.shared.clone();
                let copies = Copies::of(requests);
                Reply::Pending(Box::pin(async move {
                    match answer.await {
                        Ok(answer) => {
                            shared.recover();
                            Ok(answer)
                        }
                        Err(error) => copies.with(|requests| shared.fall_back(error, requests)).await,
                    }
                }))
            }
        }
    }
}

impl fmt::Debug for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Share { parts, of } = self.shared.backup.share;
        f.debug_struct("Fallback")
            .field("share", &format_args!("{parts}/{of}"))
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// What the second store says, now that the first one failed.
    fn fall_back(&self, error: StoreError, requests: &[Request<'_>]) -> Reply {
        if self.health.fails() {
            #[cfg(feature = "tracing")]
            tracing::warn!(%error, source = error.source(), "the store of the limits fails; another one counts");
        }
        self.on_failure.tell(&error);

        // Nobody else has what it counted, to give back or to forget.
        let replaceable = requests.iter().all(|request| match request.operation() {
            Operation::Check | Operation::Charge | Operation::Peek => true,
            Operation::Reset | Operation::Refund { .. } => false,
        });
        match replaceable {
            true => self.backup.ask(requests),
            false => Reply::Ready(Err(error)),
        }
    }

    fn recover(&self) {
        if self.health.answers() {
            #[cfg(feature = "tracing")]
            tracing::warn!("the store of the limits answers again");
        }
    }
}

/// The second store, which has a share of the limits.
#[derive(Clone)]
struct Backup {
    store: Arc<dyn Store>,
    share: Share,
}

impl Backup {
    /// Decides, and signs the answer, so that refunds come here.
    fn ask(self: &Arc<Self>, requests: &[Request<'_>]) -> Reply {
        match self.decide(requests) {
            Reply::Ready(answer) => Reply::Ready(answer.map(|answer| self.signed(answer))),
            Reply::Pending(answer) => {
                let backup = self.clone();
                Reply::Pending(Box::pin(
                    async move { answer.await.map(|answer| backup.signed(answer)) },
                ))
            }
        }
    }

    fn signed(self: &Arc<Self>, mut answer: Answer) -> Answer {
        let origin = match answer.origin() {
            // This store has a fallback of its own, and that is where it was counted: by a share of a share.
            Some(store) => Arc::new(Self {
                store: store.clone(),
                share: self.share,
            }),
            None => self.clone(),
        };
        answer.origin = Some(Origin(origin));
        answer
    }
}

impl Store for Backup {
    fn decide(&self, requests: &[Request<'_>]) -> Reply {
        if self.share == Share::WHOLE {
            return self.store.decide(requests);
        }

        let charges = requests.iter().flat_map(|request| request.charges());
        let limits: SmallVec<[Limit; 1]> = charges.map(|charge| charge.limit.scaled(self.share)).collect();
        let mut limits = limits.iter();
        let charges: SmallVec<[SmallVec<[Charge<'_>; 1]>; 1]> = requests
            .iter()
            .map(|request| {
                let charges = request.charges().iter().zip(&mut limits);
                charges
                    .map(|(charge, limit)| Charge {
                        limit,
                        cost: cost(request.operation(), charge, limit),
                        ..*charge
                    })
                    .collect()
            })
            .collect();

        let scaled = requests.iter().zip(&charges);
        let scaled: SmallVec<[Request<'_>; 1]> = scaled
            .map(|(request, charges)| Request::new(request.operation(), charges))
            .collect();
        self.store.decide(&scaled)
    }
}

/// What is counted of a share: all of it, if the cost would fit the limit but not the share.
fn cost(operation: Operation, charge: &Charge<'_>, share: &Limit) -> u64 {
    match operation {
        // What has happened counts in full, and what costs more than the limit can only have happened.
        Operation::Charge => charge.cost,
        _ if charge.cost > charge.limit.quota() => charge.cost,
        _ => charge.cost.min(share.quota()),
    }
}

/// Requests that outlive the call.
struct Copies(SmallVec<[(Operation, SmallVec<[Copied; 1]>); 1]>);

struct Copied {
    policy: Box<str>,
    limit: Limit,
    key: Key,
    cost: u64,
}

impl Copies {
    fn of(requests: &[Request<'_>]) -> Self {
        let copy = |charge: &Charge<'_>| Copied {
            policy: charge.policy.into(),
            limit: charge.limit.clone(),
            key: charge.key.clone(),
            cost: charge.cost,
        };
        let copies = requests
            .iter()
            .map(|request| (request.operation(), request.charges().iter().map(copy).collect()));
        Self(copies.collect())
    }

    fn with<T>(&self, f: impl FnOnce(&[Request<'_>]) -> T) -> T {
        let charges = self.0.iter().map(|(_, charges)| {
            let charges = charges
                .iter()
                .map(|copied| Charge::new(&copied.policy, &copied.limit, &copied.key, copied.cost));
            charges.collect()
        });
        let charges: SmallVec<[SmallVec<[Charge<'_>; 1]>; 1]> = charges.collect();
        let requests = self.0.iter().zip(&charges);
        let requests: SmallVec<[Request<'_>; 1]> = requests
            .map(|((operation, _), charges)| Request::new(*operation, charges))
            .collect();
        f(&requests)
    }
}
