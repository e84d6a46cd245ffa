//! The settings of a policy: which requests it counts, at which cost, for which keys it is enforced, and how long and in which
//! order requests wait for it.

use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    ops::RangeInclusive,
    sync::{Arc, LazyLock},
    time::Duration,
};

use http::{HeaderMap, request::Parts};

use super::Completion;
use crate::{
    Ban, ConfigError, Key, KeyExtractor,
    key::KeyError,
    limit::{MAX_QUOTA, hash_bytes},
    store::FailureMode,
};

pub(crate) type Condition = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;
type OfCompletion = Arc<dyn Fn(&Completion<'_>) -> bool + Send + Sync>;

/// The settings of a policy, in code or in a file.
///
/// A setting is a field here, a setter of [`Policy`](crate::Policy), and for files a line of [`over`](Self::over) and a field of
/// `PolicyEntry`.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    pub(crate) cost: Option<Cost>,
    /// The requests that the policy applies to.
    pub(crate) applies: Option<Condition>,
    /// Those of them that a file names by routes and methods.
    pub(crate) scope: Option<Condition>,
    pub(crate) failure_mode: Option<FailureMode>,
    /// Which completed requests are refunded.
    pub(crate) refund_if: Option<OfCompletion>,
    /// The keys that the policy is enforced for; others are observed.
    pub(crate) enforced: EnforcedShare,
    pub(crate) ban: Option<Ban>,
    /// Whether responses begin bans.
    pub(crate) learns: bool,
    pub(crate) longest_wait: Option<LongestWait>,
    /// The most units that wait.
    pub(crate) max_waiting: Option<u64>,
    /// The key of those that take turns.
    pub(crate) fair_by: Option<Arc<dyn KeyExtractor>>,
    pub(crate) priority: Option<Arc<Priority>>,
}

/// A value that all requests have, or that is computed from each.
#[derive(Clone)]
pub(crate) enum OfRequest<T> {
    Fixed(T),
    Computed(Arc<dyn Fn(&Parts) -> T + Send + Sync>),
}

pub(crate) type Cost = OfRequest<u64>;

pub(crate) type LongestWait = OfRequest<Duration>;

/// The longest pause that a response can ask for, unless the policy has bans.
const LONGEST_PAUSE: Duration = Duration::from_secs(3_600);

impl Settings {
    /// These settings, in place of those of a file.
    #[cfg(feature = "serde")]
    pub(crate) fn over(&self, file: &Self) -> Self {
        let own = self.clone();
        Self {
            cost: own.cost.or_else(|| file.cost.clone()),
            scope: own.scope.or_else(|| file.scope.clone()),
            failure_mode: own.failure_mode.or(file.failure_mode),
            enforced: own.enforced.min(file.enforced),
            ban: own.ban.or(file.ban),
            longest_wait: own.longest_wait.or_else(|| file.longest_wait.clone()),
            max_waiting: own.max_waiting.or(file.max_waiting),
            ..own
        }
    }

    /// The cost of each request, unless it is computed.
    pub(crate) fn fixed_cost(&self) -> Option<u64> {
        match self.cost {
            None => Some(1),
            Some(Cost::Fixed(cost)) => Some(cost),
            Some(Cost::Computed(_)) => None,
        }
    }

    /// The bans; those of responses if there are no others.
    pub(crate) fn bans(&self) -> Option<Ban> {
        let learnt = self.learns.then(|| Ban::by_hand().longest(LONGEST_PAUSE));
        self.ban.or(learnt)
    }

    /// How long requests wait. Those of a policy that only observes do not.
    pub(crate) fn waiting(&self) -> Waiting {
        match self.enforced.is_none() {
            true => Waiting::default(),
            false => Waiting::default().up_to(self.longest()),
        }
    }

    /// Whether requests wait at all, unless the policy only observes.
    pub(crate) fn waits(&self) -> bool {
        !self.longest().is_zero()
    }

    /// How long any request waits.
    fn longest(&self) -> Duration {
        match self.longest_wait {
            None => Duration::ZERO,
            Some(LongestWait::Fixed(longest)) => longest,
            Some(LongestWait::Computed(_)) => Duration::MAX,
        }
    }

    /// Whether a request of this cost may wait for a key in this process behind so many units. By default one of any cost may, where
    /// no other does.
    pub(crate) fn may_wait_behind(&self, waiting: u64, cost: u64) -> bool {
        let is_first = self.max_waiting.is_none() && waiting == 0;
        is_first || waiting.saturating_add(cost) <= self.max_waiting.unwrap_or(MOST_WAITING)
    }

    #[inline]
    pub(crate) fn apply_to(&self, parts: &Parts) -> bool {
        let holds = |condition: &Condition| condition(parts);
        self.scope.as_ref().is_none_or(holds) && self.applies.as_ref().is_none_or(holds)
    }

    /// Whether a request without a key is admitted, as one that the policy only observes. Where some keys are enforced, one whose key
    /// is malformed is not: its caller may have another one, which is denied.
    #[cold]
    pub(crate) fn lets_pass(&self, error: &KeyError) -> bool {
        self.enforced.is_none() || !self.enforced.is_whole() && !error.is_malformed()
    }

    /// How a request waits.
    #[inline]
    pub(crate) fn waiting_of(&self, waiting: Waiting, parts: &Parts) -> Waiting {
        match waiting.longest_us {
            0 => waiting,
            _ => self.waiting_in_line(waiting, parts),
        }
    }

    #[cold]
    fn waiting_in_line(&self, mut waiting: Waiting, parts: &Parts) -> Waiting {
        if let Some(LongestWait::Computed(longest)) = &self.longest_wait {
            waiting = waiting.at_most(longest(parts));
        }
        if let Some(deadline) = deadline(&parts.headers) {
            waiting = waiting.at_most(deadline);
        }
        Waiting {
            priority: self.priority.as_ref().map_or(0, |priority| priority(parts)),
            fair: self.fair_by.as_ref().map_or(0, |key| {
                let key = key.extract(parts).ok().flatten();
                key.map_or(0, |key| turn_key(&key))
            }),
            ..waiting
        }
    }

    #[inline]
    pub(crate) fn cost_of(&self, parts: &Parts) -> u64 {
        match &self.cost {
            None => 1,
            Some(Cost::Fixed(cost)) => *cost,
            Some(Cost::Computed(cost)) => cost(parts),
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for OfRequest<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(value) => value.fmt(f),
            Self::Computed(_) => f.write_str("<fn>"),
        }
    }
}

/// The share of the keys that a policy is enforced for, in billionths; the others are observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EnforcedShare(u32);

const WHOLE: u32 = 1_000_000_000;

impl EnforcedShare {
    pub(crate) const NONE: Self = Self(0);

    pub(crate) fn new(fraction: f64) -> Result<Self, ConfigError> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(ConfigError::new(format!(
                "{fraction} is not a share of the keys, which is from 0 to 1, such as 0.1"
            )));
        }
        // A share that rounds to none is still one.
        let least = u32::from(fraction > 0.0);
        Ok(Self(((fraction * f64::from(WHOLE)).round() as u32).max(least)))
    }

    /// Whether keys differ in whether the policy is enforced or observed, or all are observed.
    #[inline]
    pub(crate) fn is_whole(self) -> bool {
        self.0 == WHOLE
    }

    #[inline]
    pub(crate) fn is_none(self) -> bool {
        self == Self::NONE
    }

    #[cfg(feature = "admin")]
    pub(crate) fn fraction(self) -> f64 {
        f64::from(self.0) / f64::from(WHOLE)
    }

    /// Whether the policy of this name is enforced for this key.
    #[inline]
    pub(crate) fn contains(self, name: &str, key: &Key) -> bool {
        match self.0 {
            WHOLE => true,
            0 => false,
            share => place(name, key) < share,
        }
    }
}

impl Default for EnforcedShare {
    fn default() -> Self {
        Self(WHOLE)
    }
}

/// The place of a key among all, from 0 to [`WHOLE`]: the same in each process and version, and another for each policy, so that
/// the policies of an application are not tried on the same callers first.
#[inline(never)] // most policies are enforced for all keys
fn place(name: &str, key: &Key) -> u32 {
    let hash = hash_bytes(name.bytes().chain([0]).chain(key.as_bytes().iter().copied()));
    (((hash >> 32) * u64::from(WHOLE)) >> 32) as u32
}

type Priority = dyn Fn(&Parts) -> i32 + Send + Sync;

/// How a request waits for a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// In microseconds; 0 if the request has to fit at once.
    pub(crate) longest_us: u64,
    /// Requests of higher priority are before it.
    pub(crate) priority: i32,
    /// Identifies those with which it takes turns; 0 for those without a key.
    pub(crate) fair: u32,
}

/// The most units that wait by default.
const MOST_WAITING: u64 = 500;

/// The numbers of units that may be the most.
pub(crate) const POSSIBLE_WAITING: RangeInclusive<u64> = 1..=MAX_QUOTA;

impl Waiting {
    /// The same for this time.
    pub(crate) fn up_to(self, longest: Duration) -> Self {
        let longest_us = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        Self {
            longest_us: longest_us.min(MAX_QUOTA),
            ..self
        }
    }

    /// The same for at most this time.
    fn at_most(self, longest: Duration) -> Self {
        Self {
            longest_us: self.longest_us.min(self.up_to(longest).longest_us),
            ..self
        }
    }
}

/// Identifies the key of those that take turns.
pub(crate) fn turn_key(key: &Key) -> u32 {
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

    HASHER.hash_one(key.as_bytes()) as u32 | 1
}

/// The timeout of a gRPC call: at most 8 digits and a unit, as in `100m` for 100 ms
/// (<https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#requests>).
fn deadline(headers: &HeaderMap) -> Option<Duration> {
    let (unit, digits) = headers.get("grpc-timeout")?.as_bytes().split_last()?;
    let is_number = (1..=8).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit);
    let number = std::str::from_utf8(digits).ok().filter(|_| is_number)?.parse().ok()?;
    match unit {
        b'H' => Some(Duration::from_secs(3_600 * number)),
        b'M' => Some(Duration::from_secs(60 * number)),
        b'S' => Some(Duration::from_secs(number)),
        b'm' => Some(Duration::from_millis(number)),
        b'u' => Some(Duration::from_micros(number)),
        b'n' => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn contained(share: f64, name: &str) -> Vec<usize> {
        let share = EnforcedShare::new(share).expect("a share");
        let contains = |number: &usize| share.contains(name, &Key::from(number.to_string()));
        (0..10_000).filter(contains).collect()
    }

    #[test]
    fn a_share_has_its_part_of_the_keys_and_keeps_them_when_it_grows() {
        let mut earlier = Vec::new();
        for (share, expected) in [(0.0, 0), (0.01, 100), (0.1, 1_000), (0.5, 5_000), (1.0, 10_000)] {
            let now = contained(share, "mails");
            assert!(now.len().abs_diff(expected) <= 150, "{share}: {}", now.len());
            assert!(earlier.iter().all(|key| now.contains(key)), "{share}");
            earlier = now;
        }
    }

    #[test]
    #[cfg(feature = "serde")]
    fn the_most_units_that_wait_are_those_in_code_else_those_of_a_file() {
        let waiting = |max_waiting| Settings {
            max_waiting,
            ..Settings::default()
        };
        for (own, file, expected) in [(Some(5), Some(9), 5), (Some(5), None, 5), (None, Some(9), 9)] {
            assert_eq!(waiting(own).over(&waiting(file)).max_waiting, Some(expected));
        }
    }

    #[test]
    fn policies_have_other_keys_first() {
        let (mails, logins) = (contained(0.1, "mails"), contained(0.1, "logins"));
        let common = mails.iter().filter(|key| logins.contains(key)).count();
        assert!((50..200).contains(&common), "{common}");
    }

    /// Replicas of two versions enforce a policy for the same keys.
    #[test]
    fn the_place_of_a_key_is_the_same_in_all_versions() {
        let places = ["", "42", "ip=203.0.113.7"].map(|key| place("mails", &Key::from(key)));
        assert_eq!(places, [958_422_614, 489_390_295, 944_812_597]);
    }

    #[test]
    fn a_share_that_rounds_to_none_is_one() {
        let share = |fraction| EnforcedShare::new(fraction).expect("a share");
        assert!(share(0.0).is_none() && !share(1e-12).is_none());
    }

    #[test]
    fn what_is_no_share_is_an_error() {
        for fraction in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let error = EnforcedShare::new(fraction).expect_err("no share").to_string();
            assert!(error.contains("is not a share of the keys"), "{error}");
        }
    }

    #[test]
    fn the_timeout_of_a_grpc_call_is_its_deadline() {
        let hour = Duration::from_secs(3_600);
        for (value, expected) in [
            ("1H", Some(hour)),
            ("60M", Some(hour)),
            ("3600S", Some(hour)),
            ("100m", Some(hour / 36_000)),
            ("100000u", Some(hour / 36_000)),
            ("99999999n", Some(Duration::from_nanos(99_999_999))),
            ("99999999H", Some(99_999_999 * hour)),
            ("0m", Some(Duration::ZERO)),
            ("", None),
            ("m", None),
            ("1", None),
            ("1s", None),
            ("+1S", None),
            ("-1S", None),
            ("1.5S", None),
            ("123456789n", None),
            ("1\u{e9}", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(
                "grpc-timeout",
                HeaderValue::from_bytes(value.as_bytes()).expect("a value"),
            );
            assert_eq!(deadline(&headers), expected, "{value}");
        }
        assert_eq!(deadline(&HeaderMap::new()), None);
    }
}
