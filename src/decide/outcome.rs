//! The outcomes of a decision as metrics, as events of `tracing` at the level `DEBUG`, and in the current span.

use tracing::{Span, level_filters::LevelFilter};

#[cfg(feature = "admin")]
use super::Denials;
use super::{Decision, Denial, PolicyDecision};
use crate::observe::{GaugeGuard, METRICS_ENABLED, PolicyOutcome, WaitMetrics};

impl Decision {
    /// Counts what each policy has done with the request.
    #[inline(always)]
    pub(crate) fn count_outcomes(&self) {
        #[cfg(feature = "admin")]
        self.count_denials(|_| true);
        if has_spans()
            && let Some(policy) = self.foremost().or(self.as_slice().first())
        {
            record_in_span(policy.outcome(), Some(policy.name()), Some(policy));
        }
        if METRICS_ENABLED || tracing::enabled!(tracing::Level::DEBUG) {
            self.count_each(|_| true);
        }
    }

    /// Counts what the policies that observe would have done with the request.
    #[cold]
    pub(crate) fn count_observed(&self) {
        #[cfg(feature = "admin")]
        self.count_denials(PolicyDecision::is_observed);
        self.count_each(PolicyDecision::is_observed);
    }

    #[inline(always)]
    fn count_each(&self, selects: impl Fn(&PolicyDecision) -> bool) {
        let allowed = self.is_allowed();
        for policy in self.as_slice().iter().filter(|policy| selects(policy)) {
            if allowed || policy.denial.is_some() {
                policy.count(policy.outcome());
            }
        }
    }

    /// Counts the decision of each policy, and the key of each that denies the request or, if it observes all keys, would have
    /// denied it.
    #[cfg(feature = "admin")]
    #[inline(always)]
    fn count_denials(&self, selects: impl Fn(&PolicyDecision) -> bool) {
        let Some(first) = self.as_slice().first() else { return };
        if first.context.denials.are_watched() {
            self.count_watched_denials(&first.context.denials, selects);
        }
    }

    #[cfg(feature = "admin")]
    #[cold]
    fn count_watched_denials(&self, denials: &Denials, selects: impl Fn(&PolicyDecision) -> bool) {
        for policy in self.policies().filter(|policy| selects(policy)) {
            denials.count_decision(policy.position);
            let is_counted = !policy.is_observed() || policy.policy().settings.enforced.is_none();
            if policy.denial.is_some() && is_counted {
                denials.count(policy.position, &policy.charge.key);
            }
        }
    }

    /// The metrics of the denied request while it waits: those of the policy with the longest wait.
    pub(crate) fn wait_metrics(&self) -> WaitMetrics {
        let longest = self.deniers().max_by_key(|policy| policy.retry_after);
        longest.map_or_else(WaitMetrics::default, |policy| policy.policy().metrics.of_wait())
    }
}

impl PolicyDecision {
    /// Counts the request by what this policy has done with it.
    #[inline]
    pub(crate) fn count(&self, outcome: PolicyOutcome) {
        tracing::debug!(
            policy = self.name(),
            outcome = outcome.name(),
            cost = self.counted().cost,
            limit = self.limit(),
            remaining = self.remaining,
            retry_after = self.retry_after.map(|wait| wait.as_micros() as f64 / 1e6),
            "a policy has decided about a request"
        );
        let metrics = &self.policy().metrics;
        metrics.count(outcome);
        let admitted = matches!(outcome, PolicyOutcome::Admitted | PolicyOutcome::AdmittedLocally);
        if admitted && self.is_near() {
            metrics.near_limit();
        }
    }

    /// Whether at least 80 % of the limit is used.
    #[inline]
    fn is_near(&self) -> bool {
        self.remaining().saturating_mul(5) <= self.counted().limit().quota()
    }

    /// Counts slots that the request has taken of this policy, until the guard is dropped.
    pub(super) fn hold(&self) -> GaugeGuard {
        self.policy().metrics.hold(self.counted().cost)
    }

    #[inline]
    fn outcome(&self) -> PolicyOutcome {
        match (self.denial, self.local.is_some()) {
            (None, false) => PolicyOutcome::Admitted,
            (None, true) => PolicyOutcome::AdmittedLocally,
            (Some(_), _) if self.is_observed() => PolicyOutcome::Observed,
            (Some(Denial::Banned), _) => PolicyOutcome::Banned,
            (Some(Denial::LineFull), _) => PolicyOutcome::LineFull,
            (Some(_), false) => PolicyOutcome::Limited,
            (Some(_), true) => PolicyOutcome::LimitedLocally,
        }
    }
}

/// Whether there may be spans: without a subscriber there are none.
#[inline]
fn has_spans() -> bool {
    LevelFilter::current() != LevelFilter::OFF
}

/// Records in the current span what has been done with a request, by which policy, and the numbers of its decision. A span has
/// only the fields that it declares.
#[inline]
pub(super) fn record_in_span(outcome: PolicyOutcome, policy: Option<&str>, decision: Option<&PolicyDecision>) {
    if !has_spans() {
        return;
    }
    let span = Span::current();
    if span.is_none() {
        return;
    }
    span.record("rate_limit.outcome", outcome.name());
    // No value can be removed from a span that has one of an earlier check.
    span.record("rate_limit.policy", policy.unwrap_or_default());
    if let Some(decision) = decision {
        span.record("rate_limit.limit", decision.limit());
        span.record("rate_limit.remaining", decision.remaining());
        if let Some(wait) = decision.retry_after() {
            span.record("rate_limit.retry_after", wait.as_micros() as f64 / 1e6);
        }
    }
}
