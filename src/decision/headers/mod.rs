mod custom;
mod dialect;
mod draft06;
mod draft07;
mod draft08;
mod legacy;
mod values;
mod write;

use std::time::Duration;

use crate::key::Secret;

pub use self::{
    custom::CustomHeaders,
    dialect::{Headers, ResetFormat},
};
pub(crate) use self::{
    dialect::{GRPC_MESSAGE, GRPC_RETRY_PUSHBACK, GRPC_STATUS, GRPC_STATUS_DETAILS, RATELIMIT},
    draft08::policy_item,
    values::{delay_secs, retry_after},
};

/// The rate limit fields of responses: those of one dialect, and the legacy ones beside it if set.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fields {
    pub(crate) dialect: Headers,
    pub(crate) legacy: Option<ResetFormat>,
    pub(crate) partition_key: Option<Secret>,
    /// The longest wait that a response asks for.
    pub(crate) longest_retry_after: Option<Duration>,
    /// Whether policies that only observe have a field.
    pub(crate) observed: bool,
    /// Whether there is a field for the degree.
    pub(crate) degree: bool,
}
