use std::{any::Any, sync::Arc};

use bytes::Bytes;
use http::HeaderValue;

use crate::{
    FailureMode,
    headers::Fields,
    store::{Failover, Quota, Store},
};

/// What the checks of a layer or a limiter have in common.
#[derive(Clone)]
pub(crate) struct CheckContext {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) failover: Arc<Failover>,
    /// The quotas of the policies, in their order.
    pub(crate) quotas: Arc<[Arc<Quota>]>,
    /// The failure modes of the policies, in their order.
    pub(crate) failure_modes: Arc<[FailureMode]>,
    /// The parts of responses that depend on a policy alone, in their order.
    pub(crate) rendered: Arc<[Rendered]>,
    /// The rate limit fields of responses.
    pub(crate) fields: Fields,
    pub(crate) format: SharedFormat,
}

/// The [`ResponseFormat`](crate::response::ResponseFormat) of a layer or a limiter.
///
/// Its type is erased: a format takes decisions, which have this context.
#[derive(Clone)]
pub(crate) struct SharedFormat(pub(crate) Arc<dyn Any + Send + Sync>);

/// The parts of responses that depend on a policy alone, rendered when the policy is built.
#[derive(Clone, Debug)]
pub(crate) struct Rendered {
    /// The member of `RateLimit-Policy`.
    pub(crate) policy_item: HeaderValue,
    /// The body of the response to a request that this policy alone denies.
    pub(crate) problem: Bytes,
}
