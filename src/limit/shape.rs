//! What shapes the state of a limit.

#[cfg(feature = "_redis")]
use std::{fmt, time::Duration};

use super::limit::Limit;
#[cfg(feature = "_redis")]
use super::rate::LengthText;

/// The algorithm of a limit with the numbers that shape what it stores: the window, the grain and the rate, and neither the quota nor the
/// burst. A limit of another shape has other counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape(&'static str, [u64; 2]);

impl Shape {
    /// That of bans.
    pub(crate) const BANS: Self = Self("ban", [0; 2]);
}

impl Limit {
    #[inline]
    pub(crate) fn shape(&self) -> Shape {
        let numbers = match self {
            Self::SlidingLog(log) => log.shape(),
            Self::SlidingCounter(counter) => [counter.window_us(), 0],
            Self::FixedWindow(fixed) => fixed.shape(),
            Self::TokenBucket(bucket) => bucket.rate_and_period().into(),
            Self::Concurrency(_) | Self::Unlimited | Self::DenyAll => [0; 2],
        };
        Shape(self.algorithm(), numbers)
    }
}

/// The [shape](Limit::shape) of a limit as it is written in the keys of Redis, such as `log/30s`.
#[cfg(feature = "_redis")]
pub(crate) struct ShapeText<'a>(pub(crate) &'a Limit);

#[cfg(feature = "_redis")]
impl fmt::Display for ShapeText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0.algorithm();
        let us = |micros| LengthText(Duration::from_micros(micros));
        match self.0 {
            Limit::SlidingLog(log) => match log.shape() {
                [window, 0] => write!(f, "{name}/{}", us(window)),
                [window, grain] => write!(f, "{name}/{}/{}", us(window), us(grain)),
            },
            Limit::SlidingCounter(counter) => write!(f, "{name}/{}", us(counter.window_us())),
            Limit::FixedWindow(fixed) => {
                write!(f, "{name}/")?;
                fixed.write_shape(f)
            }
            Limit::TokenBucket(bucket) => {
                let (rate, period) = bucket.rate_and_period();
                write!(f, "{name}/{rate}/{}", us(period))
            }
            Limit::Concurrency(_) | Limit::Unlimited | Limit::DenyAll => f.write_str(name),
        }
    }
}
