use std::{borrow::Cow, sync::Arc};

use super::{
    name::validate_name,
    plan::{Plans, plan},
};
use crate::{
    ConfigError, Limit,
    decision::Plan,
    limit::{PolicyLimit, Source},
    store::FailureMode,
};

/// What the constructor or a file has about a policy.
///
/// Settings in code take precedence. A reload of the file replaces the terms and leaves those settings as they are.
#[derive(Clone)]
pub(super) struct Terms {
    /// The plan of all requests; if plans are chosen, one of the same name that limits nothing.
    pub(super) plan: Arc<Plan>,
    pub(super) plans: Option<Arc<Plans>>,
    pub(super) cost: u64,
    pub(super) failure_mode: FailureMode,
    /// Whether the policy only observes.
    pub(super) observed: bool,
}

impl Terms {
    pub(super) fn try_new(
        name: impl Into<Cow<'static, str>>,
        limit: impl Into<PolicyLimit>,
    ) -> Result<Self, ConfigError> {
        let name = name.into();
        validate_name(&name)?;
        let (limit, plans) = match limit.into().0 {
            Source::Fixed(limit) => (limit, None),
            Source::Chosen(choose) => (Limit::Unlimited, Some(Plans::new(name.clone(), choose))),
        };
        limit.validate()?;

        Ok(Self {
            plan: plan(name, limit),
            plans: plans.map(Arc::new),
            cost: 1,
            failure_mode: FailureMode::default(),
            observed: false,
        })
    }

    /// The terms of a policy that counts nothing.
    #[cfg(feature = "serde")]
    pub(super) fn switched_off(self) -> Self {
        Self {
            plan: plan(self.plan.quota.name.clone(), Limit::Unlimited),
            plans: None,
            ..self
        }
    }
}
