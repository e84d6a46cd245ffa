//! What operators see of a policy.

use std::{sync::Arc, time::SystemTime};

use super::Policy;
#[cfg(feature = "serde")]
use super::live::RefusedReload;
use crate::decision::Plan;

impl<K> Policy<K> {
    /// The limit; of a policy that chooses one for each request, those that it has chosen in this process. The
    /// lowest quota is the first one.
    pub(crate) fn known_plans(&self) -> Vec<Arc<Plan>> {
        let mut known = match &self.settings.terms.plans {
            Some(plans) => plans.chosen(),
            None => vec![self.settings.terms.plan.clone()],
        };
        known.sort_by_key(|plan| plan.named.limit.quota());
        known
    }

    /// When the file of the policy was reloaded last, if it follows one that was.
    pub(crate) fn reloaded_at(&self) -> Option<SystemTime> {
        #[cfg(feature = "serde")]
        return self.settings.origin.as_ref()?.reloaded_at();
        #[cfg(not(feature = "serde"))]
        None
    }

    /// The last load of that file, if it has changed nothing since it was refused.
    #[cfg(feature = "serde")]
    pub(crate) fn refused_reload(&self) -> Option<RefusedReload> {
        self.settings.origin.as_ref()?.refused_reload()
    }
}
