use super::dialect::{Headers, ResetFormat};
use crate::key::Secret;

/// The rate limit fields of responses: those of one dialect, and the legacy ones beside it if set.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fields {
    pub(crate) dialect: Headers,
    pub(crate) legacy: Option<ResetFormat>,
    pub(crate) partition_key: Option<Secret>,
    /// Whether policies that only observe have a field.
    pub(crate) observed: bool,
    /// Whether there is a field for the degree.
    pub(crate) degree: bool,
}
