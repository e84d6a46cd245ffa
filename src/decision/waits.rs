//! How long a request waits for a policy, and in which order.

use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    ops::RangeInclusive,
    sync::{Arc, LazyLock},
    time::Duration,
};

use http::{HeaderMap, request::Parts};

use crate::{Key, KeyExtractor, limit::MAX_QUOTA};

/// The longest wait of a policy.
#[derive(Clone)]
pub(crate) enum LongestWait {
    Fixed(Duration),
    Computed(Arc<dyn Fn(&Parts) -> Duration + Send + Sync>),
}

/// The priority of a request.
type Priority = dyn Fn(&Parts) -> i32 + Send + Sync;

/// In which order the requests of a process wait.
#[derive(Clone, Default)]
pub(crate) struct WaitOrder {
    /// The key of those that take turns.
    pub(crate) fair_by: Option<Arc<dyn KeyExtractor>>,
    pub(crate) priority: Option<Arc<Priority>>,
}

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
pub(crate) const MOST_WAITING: u64 = 500;

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

impl LongestWait {
    /// How long any request waits.
    pub(super) fn longest(&self) -> Duration {
        match self {
            Self::Fixed(longest) => *longest,
            Self::Computed(_) => Duration::MAX,
        }
    }

    /// How a request with these parts waits.
    #[cold]
    pub(super) fn of(longest: Option<&Self>, order: &WaitOrder, waiting: Waiting, parts: &Parts) -> Waiting {
        let mut waiting = waiting;
        if let Some(Self::Computed(longest)) = longest {
            waiting = waiting.at_most(longest(parts));
        }
        if let Some(deadline) = deadline(&parts.headers) {
            waiting = waiting.at_most(deadline);
        }
        Waiting {
            priority: order.priority.as_ref().map_or(0, |priority| priority(parts)),
            fair: order.fair_by.as_ref().map_or(0, |key| {
                let key = key.extract(parts).ok().flatten();
                key.map_or(0, |key| turn_key(&key))
            }),
            ..waiting
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

impl fmt::Debug for LongestWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(longest) => longest.fmt(f),
            Self::Computed(_) => f.write_str("<fn>"),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

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
