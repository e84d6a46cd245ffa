use super::{Cost, Policy, Settings};
use crate::{ConfigError, completion::CompletionRule};

/// The policies of a limiter.
impl<K> Policy<K> {
    /// Refuses settings that need an HTTP request, which a limiter does not have. The error names what a limiter has in
    /// their place.
    pub(crate) fn validate_without_requests(&self) -> Result<(), ConfigError> {
        let Settings {
            terms,
            cost,
            applies,
            once,
            completion,
            learns,
            ..
        } = &self.settings;
        let (setting, instead) = if terms.plans.is_some() {
            (
                "`limit::by(..)`",
                "make a limiter for each plan, with this policy name and one store: they share their counts",
            )
        } else if matches!(cost, Some(Cost::Computed(_))) {
            ("`.cost_fn(..)`", "use `.cost(..)`, and `check_n` for other costs")
        } else if terms.is_scoped() {
            (
                "the setting `routes` or `methods`",
                "leave it out, and call the limiter for the requests that the policy is for",
            )
        } else if applies.is_some() {
            (
                "`.apply_if(..)`",
                "leave it out, and call the limiter for the requests that the policy is for",
            )
        } else if once.has_id() {
            ("`.once_per(..)`", "leave it out, and give the id to `check_once`")
        } else if *learns {
            (
                "`.learn_from_responses()`",
                "leave it out, set `.ban(Ban::by_hand())`, and `ban` the key when a response asks for a pause",
            )
        } else {
            match completion {
                Some(CompletionRule::RefundIf(_)) => {
                    ("`.refund_if(..)`", "leave it out, and call `refund` of the decision")
                }
                Some(CompletionRule::ChargeIf(_)) => (
                    "`.charge_if(..)`",
                    "leave it out, and use `peek` before and `charge` after the request",
                ),
                None => return Ok(()),
            }
        };
        Err(ConfigError::new(format!(
            "{setting} of the policy `{}` needs an HTTP request, which a limiter does not have; {instead}",
            self.name(),
        )))
    }
}
