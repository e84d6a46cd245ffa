//! The settings of a policy.

use std::{fmt, sync::Arc, time::Duration};

use http::request::Parts;

use super::{completion::CompletionRule, context::Marker, degree::Thresholds, enforced_share::EnforcedShare};
use crate::{
    Ban, Key, KeyExtractor, Limit,
    key::KeyError,
    store::{FailureMode, Waiting},
};

/// A condition on requests.
pub(crate) type Condition = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

/// The settings of a policy, in code or in a file.
///
/// A setting is a field here, a line of [`over`](Self::over), a setter of [`Policy`](crate::Policy), and for files a field of
/// `Entry`.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    pub(crate) cost: Option<Cost>,
    /// The requests that the policy applies to.
    pub(crate) applies: Option<Condition>,
    /// Those of them that a file names by routes and methods.
    pub(crate) scope: Option<Condition>,
    pub(crate) failure_mode: Option<FailureMode>,
    pub(crate) completion: Option<CompletionRule>,
    /// The keys that the policy is enforced for; others are observed.
    pub(crate) enforced: EnforcedShare,
    pub(crate) thresholds: Thresholds,
    pub(crate) ban: Option<Ban>,
    /// Whether responses begin bans.
    pub(crate) learns: bool,
    pub(crate) longest_wait: Option<Duration>,
    /// The most units that wait.
    pub(crate) max_waiting: Option<u64>,
    /// The ids of requests that are sent again.
    pub(crate) id: Option<Arc<dyn KeyExtractor>>,
    /// How often an id is sent again without being counted.
    pub(crate) max_repetitions: Option<u64>,
}

/// The cost of a request.
#[derive(Clone)]
pub(crate) enum Cost {
    Fixed(u64),
    Computed(Arc<dyn Fn(&Parts) -> u64 + Send + Sync>),
}

/// The longest pause that a response can ask for, unless the policy has bans.
const LONGEST_PAUSE: Duration = Duration::from_secs(3_600);

const MAX_REPETITIONS: u64 = 10;

impl Settings {
    /// These settings, in place of those of a file.
    #[cfg(feature = "serde")]
    pub(crate) fn over(&self, file: &Self) -> Self {
        let Self {
            cost,
            applies,
            scope,
            failure_mode,
            completion,
            enforced,
            thresholds,
            ban,
            learns,
            longest_wait,
            max_waiting,
            id,
            max_repetitions,
        } = self.clone();
        Self {
            cost: cost.or_else(|| file.cost.clone()),
            applies: applies.or_else(|| file.applies.clone()),
            scope: scope.or_else(|| file.scope.clone()),
            failure_mode: failure_mode.or(file.failure_mode),
            completion: completion.or_else(|| file.completion.clone()),
            enforced: enforced.min(file.enforced),
            thresholds: if thresholds.is_empty() {
                file.thresholds.clone()
            } else {
                thresholds
            },
            ban: ban.or(file.ban),
            learns: learns || file.learns,
            longest_wait: longest_wait.or(file.longest_wait),
            max_waiting: max_waiting.or(file.max_waiting),
            id: id.or_else(|| file.id.clone()),
            max_repetitions: max_repetitions.or(file.max_repetitions),
        }
    }

    /// The cost of each request, unless it is computed.
    pub(crate) fn fixed_cost(&self) -> Option<u64> {
        match self.cost {
            None => Some(1),
            Some(Cost::Fixed(cost)) => Some(cost),
            Some(Cost::Computed(_)) => None,
        }
    }

    /// The bans; those of responses if there are no others.
    pub(super) fn bans(&self) -> Option<Limit> {
        let learnt = self.learns.then(|| Ban::by_hand().longest(LONGEST_PAUSE));
        self.ban.or(learnt).map(Limit::Ban)
    }

    /// How long requests wait. Those of a policy that only observes do not.
    pub(super) fn waiting(&self) -> Waiting {
        if self.enforced.is_none() {
            return Waiting::NONE;
        }
        let longest = self.longest_wait.unwrap_or_default();
        Waiting::up_to(longest, self.max_waiting.unwrap_or(Waiting::MOST))
    }
}

/// What a request is for the policy.
impl Settings {
    #[inline]
    pub(crate) fn apply_to(&self, parts: &Parts) -> bool {
        let holds = |condition: &Condition| condition(parts);
        self.scope.as_ref().is_none_or(holds) && self.applies.as_ref().is_none_or(holds)
    }

    #[inline]
    pub(crate) fn cost_of(&self, parts: &Parts) -> u64 {
        match &self.cost {
            None => 1,
            Some(Cost::Fixed(cost)) => *cost,
            Some(Cost::Computed(cost)) => cost(parts),
        }
    }

    /// The marker of a request with an id.
    #[inline]
    pub(crate) fn marker_of(
        &self,
        charge: (&Limit, u64),
        key: &Key,
        parts: &Parts,
    ) -> Result<Option<Arc<Marker>>, KeyError> {
        match &self.id {
            Some(id) => self.extract_marker(&**id, charge, key, parts),
            None => Ok(None),
        }
    }

    #[inline(never)] // most policies have no ids
    fn extract_marker(
        &self,
        extractor: &dyn KeyExtractor,
        charge: (&Limit, u64),
        key: &Key,
        parts: &Parts,
    ) -> Result<Option<Arc<Marker>>, KeyError> {
        match extractor.extract(parts) {
            Ok(Some(id)) => Ok(self.marker(charge, key, &id)),
            Ok(None) => Ok(None),
            Err(error) if error.is_absent() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The marker of a request with this id, limit and cost; `None` for a limit that counts nothing.
    pub(crate) fn marker(&self, (limit, cost): (&Limit, u64), key: &Key, id: &Key) -> Option<Arc<Marker>> {
        let repetitions = self.max_repetitions.unwrap_or(MAX_REPETITIONS);
        let markers = limit.for_markers(repetitions + 1)?;
        Some(Arc::new(Marker::new(markers, key.marker(id, cost))))
    }
}

impl fmt::Debug for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(cost) => cost.fmt(f),
            Self::Computed(_) => f.write_str("<fn>"),
        }
    }
}
