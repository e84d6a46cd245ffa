use std::{borrow::Cow, sync::Arc};

use super::name::validate_name;
use crate::{
    ConfigError, Limit,
    decision::Plan,
    headers::policy_item,
    response::violates,
    store::{FailureMode, Quota},
};

/// What the constructor or a file has about a policy.
///
/// Settings in code take precedence. A reload of the file replaces the terms and leaves those settings as they are.
#[derive(Clone)]
pub(super) struct Terms {
    pub(super) plan: Arc<Plan>,
    pub(super) cost: u64,
    pub(super) failure_mode: FailureMode,
}

impl Terms {
    pub(super) fn try_new(name: impl Into<Cow<'static, str>>, limit: impl Into<Limit>) -> Result<Self, ConfigError> {
        let (name, limit) = (name.into(), limit.into());
        validate_name(&name)?;
        limit.validate()?;

        Ok(Self {
            plan: plan(name, limit),
            cost: 1,
            failure_mode: FailureMode::default(),
        })
    }
}

fn plan(name: Cow<'static, str>, limit: Limit) -> Arc<Plan> {
    Arc::new(Plan {
        policy_item: policy_item(&name, &limit),
        problem: violates(&[&name]),
        quota: Quota::new(name, limit),
    })
}

#[cfg(feature = "serde")]
impl Terms {
    /// The terms of a policy that counts nothing.
    pub(super) fn switched_off(&self) -> Self {
        Self {
            plan: plan(self.plan.quota.name.clone(), Limit::Unlimited),
            ..self.clone()
        }
    }
}
