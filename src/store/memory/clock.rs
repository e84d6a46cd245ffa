use std::{
    fmt,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

/// The clock of a memory store.
pub(super) enum Clock {
    Monotonic {
        started: Instant,
        /// The time at which it started, in microseconds since the Unix epoch.
        epoch: u64,
    },
    Custom(Box<dyn Fn() -> Duration + Send + Sync>),
}

/// The rules calculate with times up to here, which is in the year 2112.
const MAX_NOW: u64 = 1 << 52;

impl Clock {
    pub(super) fn monotonic() -> Self {
        let epoch = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        Self::Monotonic {
            started: Instant::now(),
            epoch: micros(epoch),
        }
    }

    /// Microseconds since the Unix epoch.
    pub(super) fn now(&self) -> u64 {
        let now = match self {
            Self::Monotonic { started, epoch } => epoch + micros(started.elapsed()),
            Self::Custom(now) => micros(now()),
        };
        now.min(MAX_NOW)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Monotonic { .. } => f.write_str("<monotonic>"),
            Self::Custom(_) => f.write_str("<fn>"),
        }
    }
}

pub(super) fn micros(time: Duration) -> u64 {
    time.as_secs()
        .saturating_mul(1_000_000)
        .saturating_add(time.subsec_micros().into())
}
