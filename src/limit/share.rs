use std::fmt;

/// A fraction of a limit, above 0 and at most 1.
///
/// [`FailureMode::LocalShare`](crate::FailureMode::LocalShare) has one.
///
/// ```
/// use tower_quota::limit::Share;
///
/// assert_eq!(Share::new(1, 4).map(|share| share.to_string()), Some("1/4".to_owned()));
/// assert_eq!(Share::new(0, 4), None);
/// assert_eq!(Share::new(5, 4), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Share {
    parts: u32,
    of: u32,
}

impl Share {
    pub(crate) const WHOLE: Self = Self { parts: 1, of: 1 };

    /// `parts` of `of` parts; `None` if `parts` is 0 or above `of`.
    #[must_use]
    pub const fn new(parts: u32, of: u32) -> Option<Self> {
        if parts == 0 || parts > of {
            return None;
        }
        Some(Self { parts, of })
    }

    pub(super) fn parts(self) -> u32 {
        self.parts
    }

    pub(super) fn of(self) -> u32 {
        self.of
    }

    /// The share of a quota, rounded down, and at least 1.
    pub(super) fn part_of(self, quota: u64) -> u64 {
        let part = u128::from(quota) * u128::from(self.parts) / u128::from(self.of);
        u64::try_from(part).unwrap_or(quota).max(1)
    }
}

/// The fraction: `1/4`.
impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.parts, self.of)
    }
}
