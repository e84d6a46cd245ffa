/// The tokens that were taken from the bucket of one key since it was last full.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bucket {
    pub(super) since: u64,
    pub(super) spent: u64,
    /// The time of the last charge.
    pub(super) at: u64,
    /// Whether that may be followed by reservations, whose tokens come later.
    pub(super) reserved: bool,
}

impl Bucket {
    /// The time of the last charge, later by a part of a microsecond if there may be reservations, as in Redis; rounded up.
    #[inline]
    pub(super) fn charged_at(&self) -> u64 {
        self.at + u64::from(self.reserved)
    }
}
