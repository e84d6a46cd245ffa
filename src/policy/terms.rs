use std::{borrow::Cow, sync::Arc, time::Duration};

use http::request::Parts;

use super::plan::{Plans, plan};
#[cfg(feature = "serde")]
use super::scope::{Scope, Spelling};
use crate::{
    Ban, ConfigError, Limit,
    decision::{Plan, Thresholds},
    limit::{PolicyLimit, Source},
    store::{FailureMode, Waiting},
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
    pub(super) thresholds: Thresholds,
    pub(super) ban: Option<Ban>,
    /// The longest wait; zero if requests do not wait.
    pub(super) longest_wait: Duration,
    /// The most units that wait for each key.
    pub(super) max_waiting: u64,
    /// The requests that the policy is for, if it is not for all.
    #[cfg(feature = "serde")]
    pub(super) scope: Option<Arc<Scope>>,
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
            thresholds: Thresholds::default(),
            ban: None,
            longest_wait: Duration::ZERO,
            max_waiting: Waiting::MOST,
            #[cfg(feature = "serde")]
            scope: None,
        })
    }

    /// Whether the policy is for a request.
    #[cfg(feature = "serde")]
    #[inline]
    pub(super) fn contains(&self, parts: &Parts) -> bool {
        self.scope
            .as_ref()
            .is_none_or(|scope| scope.contains(parts, Spelling::Either))
    }

    #[cfg(not(feature = "serde"))]
    pub(super) fn contains(&self, _: &Parts) -> bool {
        true
    }

    /// Whether the policy is for some requests only.
    pub(super) fn is_scoped(&self) -> bool {
        #[cfg(feature = "serde")]
        return self.scope.is_some();
        #[cfg(not(feature = "serde"))]
        false
    }

    /// The terms of a policy that counts nothing.
    #[cfg(feature = "serde")]
    pub(super) fn switched_off(self) -> Self {
        Self {
            plan: plan(self.plan.named.name.clone(), Limit::Unlimited),
            plans: None,
            ..self
        }
    }
}

/// The most bytes of a name.
const MAX_NAME: usize = 64;

/// Refuses a name that is not a lower-case word.
pub(super) fn validate_name(name: &str) -> Result<(), ConfigError> {
    let mut bytes = name.bytes();
    let well_formed = bytes.next().is_some_and(|first| first.is_ascii_lowercase())
        && bytes.all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-'))
        && name.len() <= MAX_NAME;
    if well_formed {
        return Ok(());
    }

    Err(ConfigError::new(format!(
        "{name:?} is not a policy name; one is a lower-case word such as `say-hi`: a letter, then letters, digits, `_`, \
         `.` and `-`, {MAX_NAME} at most"
    )))
}
