//! The metrics. The handles are obtained from the recorder once, with the first request, and are kept. The series are registered
//! before, when a layer, a limiter or a store is built, so that a recorder which is installed by then has them from the start.

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Arc, Mutex, OnceLock},
    time::{SystemTime, UNIX_EPOCH},
};

#[cfg(feature = "metrics")]
use metrics::{
    Counter, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use tokio::time::Instant;

#[cfg(not(feature = "metrics"))]
use super::unrecorded::{
    Counter, Histogram, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use crate::{error::ErrorKind, sync::lock};

/// Metrics, each with the macro that describes it, its name, its unit and its description.
macro_rules! metrics {
    ($($describe:ident $metric:ident = $name:literal, $unit:ident, $description:literal;)+) => {
        $(pub(super) const $metric: &str = $name;)+

        /// Passes the units and descriptions to the recorder.
        fn describe() {
            $($describe!($metric, Unit::$unit, $description);)+
        }
    };
}

metrics! {
    describe_counter DECISIONS = "tower_quota_decisions_total", Count,
        "Requests by what a policy has done with them";
    describe_counter NEAR_LIMIT = "tower_quota_near_limit_total", Count,
        "Admitted requests after which at least 80 % of the quota is used";
    describe_gauge LIMITS_HASH = "tower_quota_limits_hash", Count,
        "Hash of the limits in force, which is the same in replicas with the same limits";
    describe_gauge SLOTS_HELD = "tower_quota_slots_held", Count,
        "Slots of a concurrency limit that requests of this process hold";
    describe_gauge REQUESTS_WAITING = "tower_quota_requests_waiting", Count,
        "Requests that wait in a line";
    describe_histogram WAIT_DURATION = "tower_quota_wait_duration_seconds", Seconds,
        "Time for which admitted requests have waited";
    describe_counter LEFT_WHILE_WAITING = "tower_quota_left_while_waiting_total", Count,
        "Requests whose caller has left while they waited";
    describe_histogram CHECK_DURATION = "tower_quota_check_duration_seconds", Seconds,
        "Time from a check to the reply of the store";
    describe_counter STORE_ERRORS = "tower_quota_store_errors_total", Count,
        "Checks and other operations that the store failed, by the kind of the error";
    describe_counter LOST_SETTLEMENTS = "tower_quota_lost_settlements_total", Count,
        "Refunds, later charges, learnt pauses and units ahead that no store has confirmed";
    describe_histogram CALL_REQUESTS = "tower_quota_redis_call_requests", Count,
        "Requests that one script call has decided";
    describe_counter REDIS_CHECKS = "tower_quota_redis_checks_total", Count,
        "Checks that were sent to a server of Redis, by their outcome";
    describe_counter DENY_CACHE_HITS = "tower_quota_deny_cache_hits_total", Count,
        "Checks that the deny cache has denied";
    describe_counter PREFETCH_HITS = "tower_quota_prefetch_hits_total", Count,
        "Checks that were admitted by units that the process has taken ahead";
    describe_gauge BREAKERS_OPEN = "tower_quota_breakers_open", Count,
        "Breakers that are open, since Redis does not reply";
    describe_counter EVICTIONS = "tower_quota_memory_evictions_total", Count,
        "Keys that a full memory store has evicted before they expired";
    describe_gauge FILE_HASH = "tower_quota_file_hash", Count,
        "Hash of the file of limits in force, which is the same in replicas with the same content";
    describe_gauge FILE_LOADED = "tower_quota_file_loaded_timestamp_seconds", Seconds,
        "Time of the last load of the file of limits, since the Unix epoch";
    describe_gauge FILE_REFUSED = "tower_quota_file_refused", Count,
        "1 if the newest content of the file of limits is refused or not seen, else 0";
}

pub(crate) const METRICS_ENABLED: bool = cfg!(feature = "metrics");

/// Handles of the recorder, which are made for the first value.
#[derive(Clone)]
pub(super) struct Handles<T>(OnceLock<T>);

impl<T> Handles<T> {
    #[inline]
    pub(super) fn record<R>(&self, make: impl FnOnce() -> T, record: impl FnOnce(&T) -> R) -> Option<R> {
        METRICS_ENABLED.then(|| record(self.0.get_or_init(make)))
    }
}

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

/// The metrics of the checks of a layer or a limiter.
#[derive(Clone, Default)]
pub(crate) struct CheckMetrics(Handles<Arc<CheckHandles>>);

struct CheckHandles {
    duration: Histogram,
    store_errors: [Counter; ErrorKind::FAILURES.len()],
}

impl CheckMetrics {
    /// Records the duration of a check that began to wait then: 0 if the store has replied at once, since reading the clock
    /// twice would take longer than all other metrics of a request.
    #[inline]
    pub(crate) fn end(&self, began: Option<Instant>) {
        self.0.record(Arc::default, |handles| {
            let duration = began.map_or(0.0, |began| began.elapsed().as_secs_f64());
            handles.duration.record(duration);
        });
    }

    pub(crate) fn register() {
        let _ = CheckHandles::default();
    }

    pub(crate) fn failed(&self, kind: ErrorKind) {
        let record = |handles: &Arc<CheckHandles>| {
            let counter = handles.store_errors.get(kind as usize);
            counter.inspect(|errors| errors.increment(1));
        };
        self.0.record(Arc::default, record);
    }
}

impl Default for CheckHandles {
    #[cold]
    fn default() -> Self {
        describe();
        // They are 0 from the first check on, so that the first increment is one.
        let _ = (counter!(LOST_SETTLEMENTS), counter!(EVICTIONS));
        Self {
            duration: histogram!(CHECK_DURATION),
            store_errors: ErrorKind::FAILURES.map(|kind| counter!(STORE_ERRORS, "kind" => kind.name())),
        }
    }
}

pub(crate) struct RedisMetrics(Handles<RedisHandles>);

struct RedisHandles {
    call_requests: Histogram,
    deny_cache_hits: Counter,
    prefetch_hits: Counter,
}

impl RedisMetrics {
    pub(crate) fn new() -> Self {
        let _ = RedisHandles::new();
        Self(Handles::default())
    }

    /// Records a script call for so many requests.
    pub(crate) fn call(&self, requests: u64) {
        let record = |handles: &RedisHandles| handles.call_requests.record(requests as f64);
        self.0.record(RedisHandles::new, record);
    }

    #[inline]
    pub(crate) fn deny_cache_hit(&self) {
        let record = |handles: &RedisHandles| handles.deny_cache_hits.increment(1);
        self.0.record(RedisHandles::new, record);
    }

    #[inline]
    pub(crate) fn prefetch_hit(&self) {
        let record = |handles: &RedisHandles| handles.prefetch_hits.increment(1);
        self.0.record(RedisHandles::new, record);
    }
}

impl RedisHandles {
    #[cold]
    fn new() -> Self {
        // It is 0 from the first call on.
        gauge!(BREAKERS_OPEN).increment(0);
        Self {
            call_requests: histogram!(CALL_REQUESTS),
            deny_cache_hits: counter!(DENY_CACHE_HITS),
            prefetch_hits: counter!(PREFETCH_HITS),
        }
    }
}

/// How a check ended that was sent to a server of Redis.
#[derive(Clone, Copy)]
pub(crate) enum CheckOutcome {
    Decided,
    Failed,
    FailedByKey,
}

/// The most servers of Redis that have series of their own. A recorder never removes one, and the nodes of a cluster may have new
/// addresses again and again.
const MAX_NODES: usize = 1_000;

static NODES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// The label of a server, of which these had one before.
fn label_of(nodes: &mut BTreeSet<String>, node: &str) -> String {
    if !nodes.contains(node) && nodes.len() >= MAX_NODES {
        return "other".to_owned();
    }
    nodes.insert(node.to_owned());
    node.to_owned()
}

/// The metrics of a server of Redis.
#[derive(Default)]
pub(crate) struct NodeMetrics(Handles<[Counter; 3]>);

impl NodeMetrics {
    pub(crate) fn new(node: &str) -> Self {
        let _ = Self::handles(node);
        Self::default()
    }

    #[inline]
    pub(crate) fn count(&self, node: &str, outcome: CheckOutcome, checks: u64) {
        let record = |handles: &[Counter; 3]| handles[outcome as usize].increment(checks);
        self.0.record(|| Self::handles(node), record);
    }

    #[cold]
    fn handles(node: &str) -> [Counter; 3] {
        let (node, outcomes) = (
            label_of(&mut lock(&NODES), node),
            ["decided", "failed", "failed_by_key"],
        );
        outcomes.map(|outcome| counter!(REDIS_CHECKS, "node" => node.clone(), "outcome" => outcome))
    }
}

#[derive(Default)]
pub(crate) struct MemoryMetrics(Handles<Counter>);

impl MemoryMetrics {
    pub(crate) fn evicted(&self, keys: u64) {
        self.0
            .record(|| counter!(EVICTIONS), |evictions| evictions.increment(keys));
    }
}

/// Records when the content of a file of limits was loaded, its hash, and whether the newest one is refused.
pub(crate) fn file_followed(path: &Path, (loaded_at, hash, is_refused): (SystemTime, u64, bool)) {
    let at = loaded_at.duration_since(UNIX_EPOCH).unwrap_or_default();
    gauge!(FILE_LOADED, "file" => path.display().to_string()).set(at.as_secs_f64());
    gauge!(FILE_HASH, "file" => path.display().to_string()).set(exact(hash));
    gauge!(FILE_REFUSED, "file" => path.display().to_string()).set(f64::from(u8::from(is_refused)));
}

/// The upper 48 bits of a hash, which a recorder keeps exactly.
pub(super) fn exact(hash: u64) -> f64 {
    (hash >> 16) as f64
}

pub(crate) fn lost_settlement() {
    counter!(LOST_SETTLEMENTS).increment(1);
}

pub(crate) fn breaker_opened() {
    gauge!(BREAKERS_OPEN).increment(1);
}

pub(crate) fn breaker_closed() {
    gauge!(BREAKERS_OPEN).decrement(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_a_bounded_number_of_labels() {
        let mut nodes = BTreeSet::new();
        let labels: BTreeSet<_> = (0..2 * MAX_NODES)
            .map(|n| label_of(&mut nodes, &format!("10.0.0.1:{n}")))
            .collect();
        assert_eq!((nodes.len(), labels.len()), (MAX_NODES, MAX_NODES + 1));
        assert_eq!(label_of(&mut nodes, "10.0.0.1:7"), "10.0.0.1:7");
    }
}
