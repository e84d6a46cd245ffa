//! The policies of a layer or limiter.

use std::{
    collections::{HashMap, HashSet},
    fmt::Write as _,
    ops::Deref,
    sync::Arc,
};

#[cfg(feature = "serde")]
use arc_swap::Guard;
use http::request::Parts;

#[cfg(feature = "serde")]
use super::file::Live;
use super::{Policy, plans::PlanChoice};
use crate::{
    ConfigError, KeyExtractor,
    decide::{CheckContext, Condition, Cost, LongestWait, PerThread, PolicyContext},
    limit::hash_text,
    observe::{METRICS_ENABLED, PolicyMetrics},
    store::Store,
};

/// One policy, or several that are decided together: a [`Policy`], an array or a [`Vec`] of them, or [`Plans`](crate::Plans).
///
/// An empty list admits everything.
///
/// ```
/// use tower_quota::{IntoPolicies, Limiter, MemoryStore, Policy, SlidingLog};
///
/// fn limiter(policies: impl IntoPolicies<()>) -> Limiter {
///     Limiter::new(MemoryStore::new(), policies)
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_quota::store::StoreError> {
/// let burst = || Policy::new("burst", SlidingLog::per_second(2));
/// let daily = || Policy::new("daily", SlidingLog::per_day(100));
/// for (limiter, policies) in [(limiter(burst()), 1), (limiter([burst(), daily()]), 2), (limiter(vec![]), 0)] {
///     assert_eq!(limiter.check("42").await?.policies().count(), policies);
/// }
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a policy with a key, nor a list of them",
    note = "a policy has a key that requests are counted under: `.key(key::ip())`, or `.key(key::constant(\"all\"))` for one \
            limit for all callers",
    note = "a list is an array or a `Vec`, by value"
)]
pub trait IntoPolicies<K = Arc<dyn KeyExtractor>> {
    /// The policies, in the order in which they are reported.
    fn into_policies(self) -> Vec<Policy<K>>;
}

impl<K> IntoPolicies<K> for Policy<K> {
    fn into_policies(self) -> Vec<Self> {
        vec![self]
    }
}

impl<K> IntoPolicies<K> for Vec<Policy<K>> {
    fn into_policies(self) -> Self {
        self
    }
}

impl<K, const N: usize> IntoPolicies<K> for [Policy<K>; N] {
    fn into_policies(self) -> Vec<Policy<K>> {
        self.into()
    }
}

/// Refuses policies that have the same counts, or are not for this layer or limiter.
fn validate_together(policies: &[Policy], validate: Validate) -> Result<(), ConfigError> {
    let mut of_plans = policies.iter().filter_map(|policy| policy.plan.as_ref());
    if let Some(first) = of_plans.clone().next()
        && of_plans.any(|plan| plan.is_apart_from(first))
    {
        return Err(ConfigError::new(
            "the policies are of two `Plans`, and a request has one plan; make one `Plans` with a plan for each combination, and add \
             policies that all of them have by `.in_each(..)`",
        ));
    }
    if let Some(name) = policies
        .iter()
        .find_map(|policy| policy.plan.as_ref())
        .and_then(|plan| plan.choice.repeated())
    {
        return Err(ConfigError::new(format!(
            "two plans are named `{name}`; give one of them another name, or one plan the policies of both"
        )));
    }
    let (mut names, mut counts, mut counted_as) = (PlansOfName::new(), PlansOfName::new(), HashMap::new());
    for policy in policies {
        let plan = policy.plan_position();
        let is_named = is_in_plan(&mut names, policy.name(), plan);
        if is_in_plan(&mut counts, policy.counted_as(), plan) || is_named {
            return Err(ConfigError::new(format!(
                "two policies are named `{}`; counts are stored under the name, so each policy needs its own",
                policy.counted_as(),
            )));
        }
        if *counted_as.entry(policy.name()).or_insert(policy.counted_as()) != policy.counted_as() {
            return Err(ConfigError::new(format!(
                "the policy `{}` has a former name in some plans only, or several, so that the plans count apart; set the same \
                 `.formerly(..)`, in files `formerly`, in each plan",
                policy.name(),
            )));
        }
        validate(policy)?;
    }
    Ok(())
}

/// The plans that have a policy of a name; `None` for one of all plans.
type PlansOfName<'a> = HashMap<&'a str, HashSet<Option<usize>>>;

/// Adds the plan, and returns whether a request may have two policies of the name.
fn is_in_plan<'a>(plans: &mut PlansOfName<'a>, name: &'a str, plan: Option<usize>) -> bool {
    let of_name = plans.entry(name).or_default();
    let others = of_name.len();
    !of_name.insert(plan) || others > 0 && of_name.contains(&None)
}

/// The context of the checks of these policies in a store.
pub(crate) fn context<K>(store: impl Store, policies: &[Policy<K>]) -> CheckContext {
    CheckContext::new(store, contexts(policies))
}

/// The part of that context that depends on the policies.
fn contexts<K>(policies: &[Policy<K>]) -> Arc<[PolicyContext]> {
    // Several plans may have a name.
    let mut limits = HashMap::<_, String>::new();
    for policy in policies.iter().filter(|_| METRICS_ENABLED) {
        let of_name = limits.entry(policy.name()).or_default();
        let _ = writeln!(of_name, "{}", policy.policy_limit.fixed.limit);
    }
    let hashes = limits.iter().map(|(name, limits)| (name, hash_text(limits)));
    let hashes: HashMap<_, _> = hashes.collect();
    let contexts = policies.iter().map(|policy| {
        let (limit, settings) = (policy.policy_limit.fixed.clone(), policy.all_settings());
        let hash = hashes.get(&policy.name()).copied().unwrap_or_default();
        PolicyContext {
            ban: settings.bans().map(Arc::new),
            waiting: settings.waiting(),
            metrics: PolicyMetrics::new(limit.name.clone(), hash),
            file: policy.file(),
            of_plan: policy.plan_name().cloned(),
            limit,
            settings,
        }
    });
    contexts.collect()
}

/// Each of these once.
pub(super) fn distinct<T>(all: impl Iterator<Item = Arc<T>>) -> Vec<Arc<T>> {
    let mut distinct = Vec::<Arc<T>>::new();
    for one in all {
        if !distinct.iter().any(|other| Arc::ptr_eq(other, &one)) {
            distinct.push(one);
        }
    }
    distinct
}

/// Refuses a policy that a layer or a limiter does not take.
pub(super) type Validate = fn(&Policy) -> Result<(), ConfigError>;

/// Refuses settings about requests that wait, if none does.
pub(crate) fn validate_for_layer(policy: &Policy) -> Result<(), ConfigError> {
    let settings = policy.all_settings();
    let setting = if settings.waits() {
        return Ok(());
    } else if settings.fair_by.is_some() {
        "`.fair_by(..)`"
    } else if settings.priority.is_some() {
        "`.priority_fn(..)`"
    } else if settings.max_waiting.is_some() {
        "`.max_waiting(..)`, in files `max-waiting`,"
    } else {
        return Ok(());
    };
    Err(ConfigError::new(format!(
        "{setting} of the policy `{}` has no effect, since none of its requests waits; add `.wait_up_to(..)`, in files `wait`, or \
         leave it out",
        policy.name(),
    )))
}

/// Refuses settings that need an HTTP request, which a limiter does not have. The error names what a limiter has in their
/// place.
pub(crate) fn validate_for_limiter(policy: &Policy) -> Result<(), ConfigError> {
    let settings = policy.all_settings();
    let for_requests = "leave it out, and call the limiter for the requests that the policy is for";
    let (setting, instead) = if policy.policy_limit.choose.is_some() {
        let is_of_file = !policy.policy_limit.of_plans.is_empty();
        (
            if is_of_file {
                "`plans`"
            } else {
                "`Policy::with_limit_fn`"
            },
            "make a limiter of `Plans`, and use `.request(key).plan(..)`",
        )
    } else if matches!(settings.cost, Some(Cost::Computed(_))) {
        (
            "`.cost_fn(..)`",
            "use `.cost(..)`, and `.request(key).cost(..)` for other costs",
        )
    } else if matches!(settings.longest_wait, Some(LongestWait::Computed(_))) {
        (
            "`.wait_up_to_fn(..)`",
            "use `.wait_up_to(..)`, and `.request(key).wait_up_to(..)` for other waits",
        )
    } else if settings.fair_by.is_some() {
        ("`.fair_by(..)`", "leave it out, and use `fair_by` of each request")
    } else if settings.priority.is_some() {
        ("`.priority_fn(..)`", "leave it out, and use `priority` of each request")
    } else if settings.scope.is_some() {
        ("the setting `routes` or `methods`", for_requests)
    } else if settings.applies.is_some() {
        ("`.apply_if(..)`", for_requests)
    } else if settings.learns {
        (
            "`.learn_from_responses()`",
            "leave it out, set `.ban(Ban::by_hand())`, and `ban` the key when a response asks for a pause",
        )
    } else if settings.refund_if.is_some() {
        (
            "`.refund_if(..)`",
            "leave it out, and refund by `decision.take_receipt().refund()`",
        )
    } else {
        return Ok(());
    };
    Err(ConfigError::new(format!(
        "{setting} of the policy `{}` needs an HTTP request, which a limiter does not have; {instead}",
        policy.name(),
    )))
}

/// The policies of a layer or a limiter.
#[derive(Clone)]
pub(crate) enum PolicySet {
    Fixed(Arc<Basis>),
    /// They follow files.
    #[cfg(feature = "serde")]
    Live(Arc<Live>),
}

/// What a layer or a limiter decides requests by.
#[derive(Clone)]
pub(crate) struct Basis {
    pub(crate) policies: Vec<Policy>,
    pub(crate) context: PerThread<CheckContext>,
    /// How the plan of a request is found, if there are plans.
    pub(crate) plans: Option<Arc<PlanChoice>>,
    /// The requests that are skipped or blocked, if there are conditions.
    pub(crate) access: Option<Access>,
    /// Those of them that are conditions in code.
    own_access: Access,
}

impl PolicySet {
    /// The policies, or the reason why they are not valid.
    pub(crate) fn new(store: impl Store, policies: Vec<Policy>, validate: Validate) -> Result<Self, ConfigError> {
        #[cfg(feature = "serde")]
        if policies.iter().any(|policy| policy.from_file.is_some()) {
            return Live::new(store, policies, validate).map(Self::Live);
        }
        Basis::new(store, policies, validate).map(Arc::new).map(Self::Fixed)
    }

    /// What requests are decided by now.
    #[inline(always)]
    pub(crate) fn newest(&self) -> Newest<'_> {
        match self {
            Self::Fixed(basis) => Newest::Fixed(basis),
            #[cfg(feature = "serde")]
            Self::Live(live) => Newest::Live(live.newest()),
        }
    }

    /// Changes the context, apart from what clones have.
    pub(crate) fn change_context(&mut self, change: impl FnOnce(&mut CheckContext)) {
        self.change(|basis| basis.context.change(change));
    }

    /// Adds conditions on requests, apart from what clones have.
    pub(crate) fn change_access(&mut self, change: impl FnOnce(&mut Access)) {
        self.change(|basis| {
            change(&mut basis.own_access);
            basis.access = basis.own_access.joined(&basis.policies);
        });
    }

    fn change(&mut self, change: impl FnOnce(&mut Basis)) {
        match self {
            Self::Fixed(basis) => change(Arc::make_mut(basis)),
            #[cfg(feature = "serde")]
            Self::Live(live) => *live = live.changed(change),
        }
    }
}

/// A basis, which a reload does not replace meanwhile.
pub(crate) enum Newest<'a> {
    Fixed(&'a Basis),
    #[cfg(feature = "serde")]
    Live(Guard<Arc<Basis>>),
}

impl Deref for Newest<'_> {
    type Target = Basis;

    #[inline(always)]
    fn deref(&self) -> &Basis {
        match self {
            Self::Fixed(basis) => basis,
            #[cfg(feature = "serde")]
            Self::Live(basis) => basis,
        }
    }
}

impl Basis {
    pub(super) fn new(store: impl Store, policies: Vec<Policy>, validate: Validate) -> Result<Self, ConfigError> {
        policies.iter().try_for_each(Policy::validate)?;
        validate_together(&policies, validate)?;
        let context = context(store, &policies);
        context.register_metrics();
        Ok(Self::of(context, Access::default(), policies))
    }

    /// The same with other limits of its policies.
    #[cfg(feature = "serde")]
    pub(super) fn renewed(&self, policies: Vec<Policy>, validate: Validate) -> Result<Self, ConfigError> {
        policies.iter().try_for_each(Policy::validate_settings)?;
        validate_together(&policies, validate)?;
        let context = self.context.with_policies(contexts(&policies));
        Ok(Self::of(context, self.own_access.clone(), policies))
    }

    fn of(context: CheckContext, own_access: Access, policies: Vec<Policy>) -> Self {
        Self {
            context: PerThread::new(context),
            access: own_access.joined(&policies),
            own_access,
            plans: policies
                .iter()
                .find_map(|policy| Some(policy.plan.as_ref()?.choice.clone())),
            policies,
        }
    }
}

/// The conditions under which a layer decides about a request without its policies.
#[derive(Clone, Default)]
pub(crate) struct Access {
    pub(crate) blocked: Vec<Condition>,
    pub(crate) skipped: Vec<Condition>,
}

impl Access {
    pub(crate) fn blocks(&self, parts: &Parts) -> bool {
        self.blocked.iter().any(|condition| condition(parts))
    }

    pub(crate) fn skips(&self, parts: &Parts) -> bool {
        self.skipped.iter().any(|condition| condition(parts))
    }

    /// These conditions and those of the files of policies; `None` if there are none.
    fn joined(&self, policies: &[Policy]) -> Option<Self> {
        let mut all = self.clone();
        for file in distinct(policies.iter().filter_map(Policy::listed)) {
            all.blocked.extend_from_slice(&file.blocked);
            all.skipped.extend_from_slice(&file.skipped);
        }
        (!all.is_empty()).then_some(all)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.blocked.is_empty() && self.skipped.is_empty()
    }
}
