//! What shapes the state of a limit.

#[cfg(feature = "_redis")]
use std::{fmt, time::Duration};

use super::limit::Limit;
#[cfg(feature = "_redis")]
use super::rate::LengthText;

/// What shapes the state of a limit: the algorithm and its numbers. A count of another shape is another count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape(u8, [u64; 2]);

impl Shape {
    /// That of the bans of a policy.
    pub(crate) const BANS: Self = Self(0, [0; 2]);
}

impl Limit {
    pub(crate) fn shape(&self) -> Shape {
        match self {
            Self::SlidingLog(log) => Shape(1, log.shape()),
            Self::SlidingCounter(counter) => Shape(2, [counter.window_us(), 0]),
            Self::FixedWindow(fixed) => Shape(3, fixed.shape()),
            Self::TokenBucket(bucket) => Shape(4, bucket.rate_and_period().into()),
            Self::Concurrency(_) => Shape(5, [0; 2]),
            Self::Unlimited | Self::DenyAll => Shape(6, [0; 2]),
        }
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
