mod degree;
mod dialect;
mod draft06;
mod draft07;
mod draft08;
mod fields;
mod legacy;
mod line;
mod names;
mod text;
mod triple;
mod value;
mod write;

pub use self::dialect::{Headers, ResetFormat};
pub(crate) use self::{
    draft08::policy_item,
    fields::Fields,
    names::{GRPC_MESSAGE, GRPC_RETRY_PUSHBACK, GRPC_STATUS, GRPC_STATUS_DETAILS, RATELIMIT},
    value::{delay_secs, retry_after},
};
