#[cfg(feature = "admin")]
use std::time::SystemTime;
use std::{
    any::Any,
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, Weak, atomic::AtomicBool},
};

#[cfg(feature = "admin")]
use super::denials::Denials;
use super::{OnSettled, Waiting, outcome::record_in_span, per_thread::Apart, settings::Settings, slots::Keeper};
use crate::{
    Ban, ConfigError, Key, Limit,
    observe::{CheckMetrics, PolicyMetrics, PolicyOutcome},
    store::{Failover, LostSettlements, NamedLimit, Outstanding, Overrides, PerStore, Store, StoreError, StoreId},
    sync::lock,
};

/// What the checks of a layer or a limiter have in common.
#[derive(Clone)]
pub(crate) struct CheckContext {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) failover: Arc<Failover>,
    pub(crate) overrides: Option<Overrides>,
    /// Renews leases.
    pub(crate) keeper: Arc<Keeper>,
    /// What [`Store::drained`] waits for.
    pub(crate) outstanding: Arc<Outstanding>,
    /// The policies, in their order.
    pub(crate) policies: Arc<[PolicyContext]>,
    /// What the contexts of all threads with these policies have in common.
    identity: Arc<()>,
    registry: Arc<Registry>,
    /// If a policy has a condition for refunds, or learns from responses.
    pub(crate) lost: Option<Arc<LostSettlements>>,
    /// Whether one of them only observes, so that the charges are not sent as one request.
    pub(crate) is_composite: bool,
    /// The position of the first policy of each name, which several plans may have.
    first_of_names: Arc<[usize]>,
    /// Whether the warning about a receipt of an unknown policy was logged.
    pub(super) warned_of_receipt: Arc<AtomicBool>,
    /// Whether the warning about an upgraded connection without its slots was logged.
    pub(super) warned_of_upgrade: Arc<AtomicBool>,
    /// How callers are told about decisions, by the HTTP side, of which this folder knows nothing.
    pub(crate) presentation: Arc<dyn Any + Send + Sync>,
    pub(crate) on_settled: Option<OnSettled>,
    pub(crate) metrics: CheckMetrics,
    /// What an `Admin` reports.
    #[cfg(feature = "admin")]
    pub(crate) denials: Denials,
    #[cfg(feature = "admin")]
    pub(crate) built_at: SystemTime,
}

/// The policies of all layers and limiters on a store.
type Registry = Mutex<Vec<Weak<[PolicyContext]>>>;

static REGISTRIES: PerStore<Registry> = PerStore::new();

fn register(registry: &Registry, policies: &Arc<[PolicyContext]>) {
    let mut all = lock(registry);
    all.retain(|policies| policies.strong_count() > 0);
    all.push(Arc::downgrade(policies));
}

impl CheckContext {
    pub(crate) fn new(store: impl Store, policies: Arc<[PolicyContext]>) -> Self {
        let registry = REGISTRIES.of(store.id());
        register(&registry, &policies);
        let awaits_completion = |policy: &PolicyContext| policy.settings.refund_if.is_some() || policy.settings.learns;
        Self {
            failover: Failover::of(&store),
            keeper: Keeper::of(&store),
            outstanding: Outstanding::of(store.id()),
            overrides: store.overrides().cloned(),
            store: Arc::new(store),
            lost: policies.iter().any(awaits_completion).then(Arc::default),
            is_composite: is_composite(&policies),
            first_of_names: first_of_names(&policies),
            warned_of_receipt: Arc::default(),
            warned_of_upgrade: Arc::default(),
            policies,
            identity: Arc::default(),
            registry,
            presentation: Arc::new(()),
            on_settled: None,
            metrics: CheckMetrics::default(),
            #[cfg(feature = "admin")]
            denials: Denials::default(),
            #[cfg(feature = "admin")]
            built_at: SystemTime::now(),
        }
    }

    /// The same for other terms of its policies.
    #[cfg(feature = "serde")]
    pub(crate) fn with_policies(&self, policies: Arc<[PolicyContext]>) -> Self {
        register(&self.registry, &policies);
        Self {
            is_composite: is_composite(&policies),
            first_of_names: first_of_names(&policies),
            policies,
            identity: Arc::default(),
            ..self.clone()
        }
    }

    /// Registers the series of the metrics, which are 0 before the first request, and records the limits as those in force.
    pub(crate) fn register_metrics(&self) {
        CheckMetrics::register();
        self.policies.iter().for_each(|policy| policy.metrics.register());
    }

    /// Refuses policies that another layer or limiter on the store has with another limit.
    pub(crate) fn refuse_conflict(&self) -> Result<(), ConfigError> {
        // A file may have thousands of policies, those of its plans: they are grouped once.
        let registered = self.registered();
        let others: Vec<_> = registered.iter().map(|policies| by_name(policies)).collect();
        let mut own = by_name(&self.policies);
        let error = |policy: &PolicyContext| {
            let name = policy.limit.counted_as();
            let own = own.remove(name)?;
            let others = others.iter().filter_map(|others| others.get(name));
            let apart: Vec<_> = others.filter(|others| are_apart(&own, others)).collect();
            let (policy, other) = own.into_iter().find_map(|policy| {
                let other = apart.iter().find_map(|others| other_than(policy, others))?;
                Some((policy, other))
            })?;
            let (name, limit) = (&policy.limit.name, &policy.limit.limit);
            Some(ConfigError::new(format!(
                "the policy `{name}` is `{limit}` here, and `{other}` in another layer or limiter on this store, so that a request \
                 counts for both, or a caller has both if they count apart; give one of them another name, or both the same limit"
            )))
        };
        self.policies.iter().find_map(error).map_or(Ok(()), Err)
    }

    /// Logs the error of such policies.
    pub(crate) fn log_conflict(&self) {
        if let Err(error) = self.refuse_conflict() {
            tracing::error!(error = error.to_string(), "two limits have one name");
        }
    }

    /// The limit under the name of a policy in another layer or limiter on the store, if it is another one.
    #[cfg(feature = "admin")]
    pub(crate) fn other_limit(&self, policy: &PolicyContext) -> Option<Limit> {
        let own = of_name(&self.policies, policy);
        self.registered().iter().find_map(|others| {
            let others = of_name(others, policy);
            let other = other_than(policy, &others).filter(|_| are_apart(&own, &others))?;
            Some(other.clone())
        })
    }

    /// The policies of each layer and limiter on the store.
    fn registered(&self) -> Vec<Arc<[PolicyContext]>> {
        lock(&self.registry).iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether both are of one layer or limiter, with the same policies.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.identity, &other.identity)
    }

    /// Identifies the counts of the store. One without an identity has that of its pointer, so it differs from all others.
    #[inline]
    pub(crate) fn store_id(&self) -> Option<StoreId> {
        // The trait object itself would have none.
        <Arc<dyn Store> as Store>::id(&self.store)
    }

    /// The names of the policies, in their order, each once: plans have policies of the same names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let positions = self.first_of_names.iter();
        positions.map(|position| &*self.policies[*position].limit.name)
    }

    /// The overrides of the store, to set one.
    pub(crate) fn require_overrides(&self) -> Result<&Overrides, StoreError> {
        self.overrides.as_ref().ok_or_else(|| {
            StoreError::invalid(
                "the store has no overrides; set `.overrides(true)` of `RedisStore::builder()`, or return the \
                 store that is wrapped from `Store::inner`",
            )
        })
    }

    /// Counts a request by what the policy at this position has done with it.
    #[inline]
    pub(crate) fn count(&self, position: usize, outcome: PolicyOutcome) {
        self.policies[position].metrics.count(outcome);
        tracing::debug!(
            policy = &*self.policies[position].limit.name,
            outcome = outcome.name(),
            "a policy has not decided about a request"
        );
    }

    /// Records in the current span what is done with a request without a decision, and the policy at this position if one
    /// has caused it.
    pub(crate) fn record(&self, outcome: PolicyOutcome, position: Option<usize>) {
        record_in_span(
            outcome,
            position.map(|position| &*self.policies[position].limit.name),
            None,
        );
    }

    /// Counts a request that is decided before any policy regards it, once for the policies of several plans with one name.
    pub(crate) fn count_for_all(&self, outcome: PolicyOutcome) {
        for position in self.first_of_names.iter() {
            self.count(*position, outcome);
        }
    }
}

impl Apart for CheckContext {
    fn apart(&self) -> Self {
        Self {
            policies: self.policies.iter().map(Apart::apart).collect(),
            ..self.clone()
        }
    }
}

/// Those of the policies that count under the name of a policy.
#[cfg(feature = "admin")]
fn of_name<'a>(policies: &'a [PolicyContext], policy: &PolicyContext) -> Vec<&'a PolicyContext> {
    let counts = |other: &&PolicyContext| {
        other.limit.limit.is_counted() && other.limit.counted_as() == policy.limit.counted_as()
    };
    policies.iter().filter(counts).collect()
}

/// Those of the policies that count, by the name under which they do.
fn by_name(policies: &[PolicyContext]) -> HashMap<&str, Vec<&PolicyContext>> {
    let mut names = HashMap::<_, Vec<_>>::new();
    for policy in policies.iter().filter(|policy| policy.limit.limit.is_counted()) {
        names.entry(policy.limit.counted_as()).or_default().push(policy);
    }
    names
}

/// Whether two layers or limiters with these policies of one name differ by more than that one of them has more plans.
fn are_apart(one: &[&PolicyContext], other: &[&PolicyContext]) -> bool {
    let among = |some: &[&PolicyContext], all: &[&PolicyContext]| {
        some.iter()
            .all(|one| all.iter().any(|other| one.limit.limit == other.limit.limit))
    };
    !among(one, other) && !among(other, one)
}

/// The limit of the first of these policies that does not follow the file of a policy under its name: those of one file change one
/// after the other.
fn other_than<'a>(policy: &PolicyContext, others: &[&'a PolicyContext]) -> Option<&'a Limit> {
    let is_other = |other: &&&PolicyContext| {
        let is_of_file = other.file_number().is_some() && other.file_number() == policy.file_number();
        !is_of_file || other.limit.name != policy.limit.name
    };
    Some(&others.iter().find(is_other)?.limit.limit)
}

fn is_composite(policies: &[PolicyContext]) -> bool {
    policies.iter().any(|policy| !policy.settings.enforced.is_whole())
}

fn first_of_names(policies: &[PolicyContext]) -> Arc<[usize]> {
    let mut names = HashSet::new();
    let is_first = |position: &usize| names.insert(&policies[*position].limit.name);
    (0..policies.len()).filter(is_first).collect()
}

/// What the checks of one policy have in common.
#[derive(Clone)]
pub(crate) struct PolicyContext {
    pub(crate) limit: Arc<NamedLimit>,
    pub(crate) settings: Settings,
    pub(crate) ban: Option<Arc<Ban>>,
    pub(crate) waiting: Waiting,
    /// The file that the policy follows, if it follows one.
    pub(crate) file: Option<Arc<dyn PolicyFile>>,
    /// The name of the plan that it is of, if it is of one.
    pub(crate) of_plan: Option<Arc<str>>,
    pub(crate) metrics: PolicyMetrics,
}

impl PolicyContext {
    /// Whether the policy only observes this key.
    #[inline]
    pub(crate) fn observes(&self, key: &Key) -> bool {
        !self.settings.enforced.contains(self.limit.counted_as(), key)
    }

    /// How long requests of this key wait. Those that are observed do not.
    #[inline(always)]
    pub(crate) fn waiting_of(&self, key: &Key) -> Waiting {
        match self.observes(key) {
            true => Waiting::default(),
            false => self.waiting,
        }
    }

    pub(super) fn file_number(&self) -> Option<u64> {
        self.file.as_ref().map(|file| file.number())
    }
}

impl Apart for PolicyContext {
    fn apart(&self) -> Self {
        Self {
            limit: Arc::new(self.limit.apart()),
            ..self.clone()
        }
    }
}

/// What a policy follows of a file.
pub(crate) trait PolicyFile: Send + Sync {
    /// The number of the file in the process.
    fn number(&self) -> u64;

    /// The limit of the policy as of the last load: one that counts nothing where it is chosen for each request.
    fn newest_limit(&self) -> Option<Arc<NamedLimit>>;
}

impl Apart for NamedLimit {
    fn apart(&self) -> Self {
        Self::new(self.name.as_ref().into(), self.limit.clone()).formerly(self.former.as_deref().map(Into::into))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryStore, Policy, SlidingLog, policy};

    #[test]
    fn the_contexts_of_all_threads_are_those_of_one_layer() {
        let context = || policy::context(MemoryStore::new(), &[Policy::new("p", SlidingLog::per_minute(1))]);
        let one = context();
        assert!(one.is_same(&one.apart()) && one.apart().is_same(&one.apart()));
        assert!(!one.is_same(&context()));
    }
}
