//! Rate-limit algorithms.
//!
//! # Which one to use
//!
//! Use a [`SlidingLog`] by default: it never admits more than its quota in any window, wherever the window starts. Use another
//! one if
//!
//! * the quota is above some thousands: a [`SlidingLog`] with a [`precision`](SlidingLog::precision). It never admits more than
//!   its quota either, and counts each admission a little too long.
//! * the average rate matters, and bursts are welcome: a [`TokenBucket`].
//! * the quota is of a period of the clock or the calendar, "three a month": a [`FixedWindow`] that is
//!   [`aligned`](FixedWindow::aligned) or of a [`calendar`](FixedWindow::calendar).
//! * there are so many keys that each may take a few numbers only: a [`SlidingCounter`], if a window may hold nearly twice the
//!   quota and requests may be denied too early.
//! * what matters is how many requests run at once, and not how often they begin: [`Concurrency`].
//!
//! # What each one guarantees
//!
//! For a quota of N in each window:
//!
//! | algorithm | stored for each key | most in any window | denied with room for ten in a hundred | use it for |
//! | --- | --- | --- | --- | --- |
//! | [`SlidingLog`] | one entry for each admission of the last window | N | never | up to 100,000 a window |
//! | with [`precision`](SlidingLog::precision) | at most `n` + 1 entries, with a prefetch up to a tenth more | N | none measured; an admission counts too long by less than one `n`-th of the window | large quotas |
//! | [`SlidingCounter`] | 3 numbers | 2 N - 1 | up to 31 % of requests; [its table](SlidingCounter#error) | many keys |
//! | [`FixedWindow`] | 2 numbers | 2 N - 1 | never | counts that people check by hand |
//! | [`aligned`](FixedWindow::aligned) | 2 numbers | 2 N | never | the same, by the clock |
//! | [`TokenBucket`] | 3 numbers | burst + N - 1 | never | an average, with bursts |
//!
//! A [`Concurrency`] limit of N has no window: at most N requests run at once, and a slot is free when one of them ends.
//!
//! The most in any window is what a caller reaches with the worst timing: for fixed windows, the quota at the end of one window
//! and at the start of the next one; for a bucket, the burst and then each token as it comes. A [`FixedWindow`] that is not
//! aligned opens with a request, so that one is not left for its end; if that request is refunded, another one is, and the most
//! is 2 N. Requests that are refunded do not count in the other numbers either. Tests send this traffic and count the admissions.
//!
//! What each one admits of the same traffic:
//!
#![doc = include_str!("../../docs/pictures/timelines.svg")]
//!
//! The quota is used up at the edge of a window, and then each request is sent as soon as it is admitted:
//!
#![doc = include_str!("../../docs/pictures/edge.svg")]
//!
//! `cargo run --example pictures` draws both from the decisions of a [`MemoryStore`](crate::MemoryStore).
//!
//! # What each one costs
//!
//! Memory is `MEMORY USAGE` of a key named such as `quota:1:log/1min:login:{header:x-user-id=42}` on Redis 7.0.15 with jemalloc. Commands are
//! those that the script runs for one check, `TIME` included; one of 16 checks runs `PTTL` too, to find a lost expiry. On Valkey 9.1 a
//! large log needs a third less memory.
//!
//! | limit | bytes, 1 admitted | 100 admitted | full | commands, admitted | after expiry | denied |
//! | --- | ---: | ---: | ---: | ---: | ---: | ---: |
//! | `sliding-log 100/min` | 120 | 2,136 | 2,136 | 5 | 5 | 5 |
//! | `sliding-log 10000/min` | 120 | 2,136 | 1,291,808 | 5 | 7 | 7 |
//! | `sliding-log 1000000/10s precision 1000` | 184 | 424 | 24,680 | 3 | 5 | 3 |
//! | `sliding-log 1000000/10s precision 100` | 184 | 184 | 2,664 | 3 | 5 | 3 |
//! | `sliding-counter 100/min` | 136 | 136 | 136 | 3 | 3 | 2 |
//! | `fixed-window 100/min` | 136 | 136 | 136 | 3 | 3 | 2 |
//! | `fixed-window 100/min aligned` | 136 | 136 | 136 | 3 | 3 | 2 |
//! | `token-bucket 100/min` | 136 | 136 | 136 | 3 | 3 | 2 |
//!
//! A check of `concurrency` is 4 to 6 commands, and its release 6 or 7. A lease takes about 50 bytes up to 128 of them.
//!
//! A log takes about 20 bytes for an entry up to 128 entries, and 130 above, where Redis changes its encoding; with a precision 24
//! to 36. *After expiry* is an admission that also removes expired entries. `cargo bench --bench figures --all-features` measures all of this.
//!
//! A check is one script call whatever the algorithm, and a request of any cost is one entry. A key expires one second after
//! nothing in it counts.
//!
//! # Limits as text
//!
//! A limit is a line of text in [files](crate::Policies), and wherever it is parsed:
//!
//! | part | spelling |
//! | --- | --- |
//! | algorithm | `sliding-log`, `sliding-counter`, `fixed-window`, `token-bucket` or `concurrency`. Without one the limit is a sliding log, or with a time zone a fixed window |
//! | quota | a whole number: `100`, `1000000` or `1_000_000` |
//! | `/` | `/` or `per`; spaces around `/` are allowed |
//! | window | a unit of time, or a number of them: `min`, `15min`, `15 minutes` |
//! | settings | those of the algorithm: `precision <n>` of a sliding log, `aligned` or a time zone of a fixed window, `burst <n>` of a token bucket, `lease <time>` of concurrency; last `prefetch <time>` of a sliding log, a fixed window or a token bucket |
//!
//! The unit that is displayed is the first of each line:
//!
//! | unit | other spellings |
//! | --- | --- |
//! | `us` | `microsecond`, `microseconds` |
//! | `ms` | `millisecond`, `milliseconds` |
//! | `s` | `sec`, `secs`, `second`, `seconds` |
//! | `min` | `m`, `mins`, `minute`, `minutes` |
//! | `h` | `hr`, `hrs`, `hour`, `hours` |
//! | `d`, 24 hours | `day`, `days` |
//! | `w`, 7 days | `week`, `weeks` |
//!
//! `concurrency` has slots in place of a quota and a window: `concurrency 3`. With a time zone (feature `calendar`) the window
//! is one `hour`, `day`, `week`, `month` or `year` of the calendar there. `M` and `mo`, which can be read as minutes and as
//! months, are errors. Each of these lines is displayed as the last column has it, which parses to the same limit:
//!
//! | text | in code | displayed |
//! | --- | --- | --- |
//! | `sliding-log 100/min` | `SlidingLog::per_minute(100)` | `sliding-log 100/min` |
//! | `5/15m`, `5 per 15 minutes` | `SlidingLog::new(5, Duration::from_secs(900))` | `sliding-log 5/15min` |
//! | `1 per 500ms` | `SlidingLog::new(1, Duration::from_millis(500))` | `sliding-log 1/500ms` |
//! | `1_000_000/10s precision 1000` | `SlidingLog::new(1_000_000, Duration::from_secs(10)).precision(1_000)` | `sliding-log 1000000/10s precision 1000` |
//! | `100000/s precision 100 prefetch 10ms` | `SlidingLog::per_second(100_000).precision(100).prefetch(Duration::from_millis(10))` | `sliding-log 100000/s precision 100 prefetch 10ms` |
//! | `sliding-counter 1000/hour` | `SlidingCounter::per_hour(1_000)` | `sliding-counter 1000/h` |
//! | `fixed-window 3/day` | `FixedWindow::per_day(3)` | `fixed-window 3/d` |
//! | `fixed-window 3/h aligned` | `FixedWindow::per_hour(3).aligned()` | `fixed-window 3/h aligned` |
//! | `3/day Europe/Berlin` | `FixedWindow::calendar(3, Calendar::Day, "Europe/Berlin")?` | `fixed-window 3/day Europe/Berlin` |
//! | `token-bucket 10/s burst 30` | `TokenBucket::per_second(10).burst(30)` | `token-bucket 10/s burst 30` |
//! | `concurrency 3` | `Concurrency::new(3)` | `concurrency 3` |
//! | `concurrency 3 lease 30s` | `Concurrency::new(3).lease(Duration::from_secs(30))` | `concurrency 3 lease 30s` |
//! | `unlimited` | `Limit::Unlimited` | `unlimited` |
//! | `deny-all` | `Limit::DenyAll` | `deny-all` |
//!
//! A text that is not a limit is an error with a correct spelling:
//!
//! ```
//! use tower_quota::Limit;
//!
//! let error = "100/M".parse::<Limit>().unwrap_err();
//! assert!(error.to_string().ends_with("one looks like `sliding-log 100/min`"), "{error}");
//! ```
//!
//! # When a limit changes
//!
//! Counts are stored under the name of the policy, the algorithm, and what shapes its state: the window of a log, a counter or a fixed
//! window, the precision of a log, and the rate of a bucket.
//!
//! * Another quota, burst or lease: the counts stay, and the new number applies to them. After it was lowered, callers may have to wait
//!   until enough has expired.
//! * Another window, precision, rate, time zone, alignment or [prefetch](#units-that-are-taken-ahead) of a log; another algorithm,
//!   or another name of the policy without its [former](crate::Policy::formerly) one: counts start at zero, and the old ones
//!   expire.
//!
//! While old and new replicas of a service run side by side, each applies its own numbers: to the same counts, or with another
//! window to counts of their own. [`Policy::with_limit_fn`](crate::Policy::with_limit_fn) chooses the numbers for each request.
//!
//! A request that was checked before a [reload](crate::Policies) is refunded or settled where it was counted, by the
//! new numbers if they have the same counts. A request for which
//! `with_limit_fn`, or `plans` of a policy in a file, has chosen the numbers is settled by these.
//!
//! ```
//! use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog, TokenBucket};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tower_quota::store::StoreError> {
//! let store = MemoryStore::new();
//! let before = Limiter::new(store.clone(), Policy::new("mail", SlidingLog::per_minute(5)));
//! assert_eq!(before.check("42").await?.remaining(), 4);
//!
//! // The first request still counts.
//! let raised = Limiter::new(store.clone(), Policy::new("mail", SlidingLog::per_minute(10)));
//! assert_eq!(raised.check("42").await?.remaining(), 8);
//!
//! // The bucket is full.
//! let bucket = Limiter::new(store, Policy::new("mail", TokenBucket::per_minute(10)));
//! assert_eq!(bucket.check("42").await?.remaining(), 9);
//! # Ok(())
//! # }
//! ```
//!
//! # Units that are taken ahead
//!
//! With [`prefetch`](SlidingLog::prefetch), a process takes units of a hot key from Redis ahead, for a time of some milliseconds, and
//! admits requests by them without a call. It adapts: a key that has used less than 8 units within that time is checked as without
//! it. A hotter one is granted as many as it has used, and at most a quarter of what is left, so that near the limit Redis decides
//! each request. Only admitted requests count for that: a caller that is only denied takes no units from other processes. What was not
//! used when the time ends is returned; to a token bucket, as far as a [refund](TokenBucket#refunds) returns it. What was taken by a
//! process that dies, or whose reply is lost, stays counted until it expires.
//!
//! The limit holds as without it, at each instant and for all processes together:
//!
//! | algorithm | why | what it costs |
//! | --- | --- | --- |
//! | [`SlidingLog`] | A unit is used less than one prefetch time after it was counted. So the units that are used in a window were counted in that window or in the prefetch time before it. Redis admits no more than N in both together: each admission counts for the window and the prefetch time | an admission counts longer by the prefetch time |
//! | [`FixedWindow`] | A unit is used in the window in which it was counted: its time ends with the window | nothing |
//! | [`TokenBucket`] | The tokens that are used in a time T were taken in T or in the prefetch time before it. The bucket in Redis is smaller by the tokens that come in one prefetch time | the quota is lower by these |
//!
//! Turn it on for a key that each process is asked for hundreds of times a second, such as a limit of a whole service; a key with
//! few requests gains nothing. [The measurements](crate::guide::speed) have what it gains. The metric
//! `tower_quota_prefetch_hits_total`, divided by the decisions of all policies with the setting, is the share that needs no call.
//!
//! Set a time that is several times as long as a call of Redis takes while the process is busy: the next units are taken while requests
//! use the ones in hand. On a core that is saturated, 100 ms replace almost all calls, and 10 ms only a part.
//!
//! The time is counted by the clock of the process, from before the call, and ends a 64th earlier, so the clocks of processes and of
//! Redis may run at rates that differ by 1 %. It does not hold for a process that is suspended with its clock, as in a snapshot of a
//! virtual machine, and then uses what it had: the units of one grant. A reset takes effect at once in its process, and in others when
//! their units have ended; what these return then may make room for as much more in a [`FixedWindow`] that is aligned or of a calendar.
//!
//! Set the same time in all processes of a service. With another one, or none, a log has [counts of its own](#when-a-limit-changes), so
//! that each setting admits the quota. A bucket is shared: the processes without the setting also use the tokens that the others leave,
//! so these are denied first, and the limit may be exceeded by the units that are taken ahead. A fixed window holds with any mix.
//!
//! `remaining` of a request that is admitted so is an estimate of what all processes have left: what was left in Redis by its last reply
//! to this process, and the units that this process has, at most the quota. Units that others have in hand count as used. A
//! denial is always by Redis or its cached denial, and its `retry_after` is that of Redis: units that are returned may make room earlier.
//! Requests of several policies, bans, waits and slots are decided by Redis. [`MemoryStore`](crate::MemoryStore) needs no units ahead,
//! and applies the same numbers.
//!
//! # Implementation
//!
//! This module has no I/O and reads no clock: times are arguments, in microseconds. Each algorithm is written twice with the same
//! names, here for [`MemoryStore`](crate::MemoryStore) and in `lua/` for Redis.

mod ban;
#[cfg(feature = "calendar")]
mod calendar;
mod concurrency;
mod fixed_window;
#[expect(clippy::module_inception, reason = "the type `Limit` is where a reader looks for it")]
mod limit;
mod line;
mod parse;
mod prefetch;
mod rate;
mod rule;
mod sliding_counter;
mod sliding_log;
mod token_bucket;

#[cfg(feature = "calendar")]
pub use self::calendar::Calendar;
#[cfg(feature = "serde")]
pub(crate) use self::parse::deserialize_text;
#[cfg(any(feature = "serde", feature = "admin"))]
pub(crate) use self::rate::parse_length;
pub use self::{
    ban::Ban, concurrency::Concurrency, fixed_window::FixedWindow, limit::Limit, sliding_counter::SlidingCounter,
    sliding_log::SlidingLog, token_bucket::TokenBucket,
};
pub(crate) use self::{
    ban::Banned,
    limit::{NamedLimit, Shape, Share, hash_bytes, hash_text},
    line::{Line, PLACE_SIZE, PLACE_US, SOON_US, Standing},
    rate::LengthText,
    rule::{Change, Effect, MAX_QUOTA, SLACK, Saved, State},
};
#[cfg(feature = "_redis")]
pub(crate) use self::{
    ban::{LEVELS, MAX_BAN, NEVER},
    concurrency::{HEAVIEST, MOST_AHEAD_US, RETRY_US},
    line::LONGEST_WAIT_US,
    rule::{BOUND, MAX_EXACT, MAX_TOTAL},
    sliding_log::{BUDGET, FEW, STEPS},
};
#[doc(hidden)]
pub use self::{
    line::{Arrival, ChargeLine},
    rule::LeaseId,
};

pub(crate) type ChooseLimit = std::sync::Arc<dyn Fn(&http::request::Parts) -> Limit + Send + Sync>;
