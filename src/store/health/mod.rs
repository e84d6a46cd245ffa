//! Health of the servers of a store, by their shares of failed checks over time, and the log lines about it.
//!
//! A check that succeeds increments a counter. The first failure starts a task, which reads the counters once a second, moves each
//! node from state to state, and logs that; it ends when no check has failed for a minute. If its runtime ends before, the next check
//! starts another one.

mod states;

use std::{
    error::Error as _,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep},
};

use self::states::{CheckCounts, LogLine, LogSubject, NodeStates};
use super::{NodeState, NodeStatus, StoreError};
use crate::{
    observe::{CheckOutcome, NodeMetrics},
    sync::lock,
};

/// The health of the nodes of a store.
#[derive(Default)]
pub(crate) struct Health {
    watching: AtomicBool,
    watch: Mutex<Watch>,
    /// Of checks of no other node: all checks of a store of one server, or without nodes.
    pub(crate) rest: Arc<Node>,
}

/// The task that watches the nodes. Since it may end with its runtime, it has a lease that it must renew.
#[derive(Default)]
struct Watch {
    nodes: Vec<Arc<Node>>,
    task: u64,
    until: Option<Instant>,
}

/// A server of a store.
#[derive(Default)]
pub(crate) struct Node {
    address: Option<String>,
    /// By [`CheckOutcome`].
    counts: [AtomicU64; 3],
    states: Mutex<NodeStates>,
    last_error: Mutex<Option<StoreError>>,
    last_error_of_key: Mutex<Option<StoreError>>,
    metrics: NodeMetrics,
}

const TICK: Duration = Duration::from_secs(1);
/// A task that has not renewed its lease for this time has ended.
const LEASE: Duration = Duration::from_secs(5);

impl Health {
    /// That of one server at this address, which has no credentials.
    #[cfg(feature = "_redis")]
    pub(crate) fn of_server(address: impl Into<String>) -> Arc<Self> {
        Arc::new(Self {
            rest: Node::new(address),
            ..Self::default()
        })
    }

    /// Whether a check has failed lately.
    #[inline]
    pub(crate) fn is_watching(&self) -> bool {
        self.watching.load(Ordering::Relaxed)
    }

    /// Replaces the nodes of a cluster.
    #[cfg(any(test, feature = "cluster"))]
    pub(crate) fn set_nodes(&self, nodes: Vec<Arc<Node>>) {
        let mut watch = lock(&self.watch);
        if self.is_watching() {
            let now = Instant::now();
            nodes.iter().for_each(|node| node.begin(now));
        }
        let before = std::mem::replace(&mut watch.nodes, nodes);
        let has_left = |node: &Arc<Node>| !watch.nodes.iter().any(|other| Arc::ptr_eq(node, other));
        let left: Vec<_> = before.into_iter().filter(has_left).collect();
        drop(watch);
        for node in left {
            node.leave();
        }
    }

    /// Records checks that a node has failed.
    pub(crate) fn failed(self: &Arc<Self>, node: &Node, checks: u64, error: &StoreError) {
        *lock(&node.last_error) = Some(error.clone());
        self.fail(node, CheckOutcome::Failed, checks);
    }

    /// Records checks that failed without a call, because a node has failed the last ones.
    pub(crate) fn failed_without_call(self: &Arc<Self>, node: &Node, checks: u64, error: &StoreError) {
        lock(&node.last_error).get_or_insert_with(|| error.clone());
        self.fail(node, CheckOutcome::Failed, checks);
    }

    /// Records checks that failed because of their keys.
    pub(crate) fn failed_by_key(self: &Arc<Self>, node: &Node, checks: u64, error: &StoreError) {
        *lock(&node.last_error_of_key) = Some(error.clone());
        self.fail(node, CheckOutcome::FailedByKey, checks);
    }

    /// Records checks that a node has decided.
    #[inline]
    pub(crate) fn decided(self: &Arc<Self>, node: &Node, checks: u64) {
        node.counts[CheckOutcome::Decided as usize].fetch_add(checks, Ordering::Relaxed);
        node.record(CheckOutcome::Decided, checks);
        // Reading only keeps the cache line shared between cores while no check fails.
        if self.is_watching() {
            self.continue_watch();
        }
    }

    /// Counts failed checks, and watches the nodes.
    fn fail(self: &Arc<Self>, node: &Node, outcome: CheckOutcome, checks: u64) {
        let mut watch = lock(&self.watch);
        self.ensure_watch(&mut watch);
        node.counts[outcome as usize].fetch_add(checks, Ordering::Relaxed);
        drop(watch);
        node.record(outcome, checks);
    }

    /// Watches the nodes on, if the runtime of the task has ended.
    fn continue_watch(self: &Arc<Self>) {
        let mut watch = lock(&self.watch);
        // The task may just have found that no check fails anymore.
        if self.is_watching() {
            self.ensure_watch(&mut watch);
        }
    }

    /// Watches the nodes, unless a task does that.
    fn ensure_watch(self: &Arc<Self>, watch: &mut Watch) {
        let now = Instant::now();
        if watch.until.is_some_and(|until| now < until) {
            return;
        }
        self.all(watch).for_each(|node| node.begin(now));
        self.watching.store(true, Ordering::Relaxed);
        // Without a runtime nothing is logged.
        if let Ok(runtime) = Handle::try_current() {
            watch.task += 1;
            watch.until = Some(now + LEASE);
            runtime.spawn(keep_watch(Arc::downgrade(self), watch.task));
        }
    }

    fn all<'a>(&'a self, watch: &'a Watch) -> impl Iterator<Item = &'a Arc<Node>> {
        watch.nodes.iter().chain([&self.rest])
    }

    /// Advances the states, and logs what is to be logged. Returns false if the task has to end: all nodes are `ok`, or another
    /// task has replaced it.
    fn tick(&self, task: u64, now: Instant) -> bool {
        let mut watch = lock(&self.watch);
        if watch.task != task {
            return false;
        }
        let lines = self
            .all(&watch)
            .filter_map(|node| Some((node.clone(), lock(&node.states).tick(now, node.totals())?)));
        let lines: Vec<_> = lines.collect();
        let is_settled = |node: &Arc<Node>| lock(&node.states).is_settled(node.totals());
        let continues = !self.all(&watch).all(is_settled);
        watch.until = continues.then(|| now + LEASE);
        if !continues {
            self.watching.store(false, Ordering::Relaxed);
            self.all(&watch).for_each(|node| lock(&node.states).end());
        }
        drop(watch);
        for (node, line) in lines {
            node.log(&line);
        }
        continues
    }

    /// The nodes, and checks without a node if they fail.
    pub(crate) fn status(self: &Arc<Self>) -> Vec<NodeStatus> {
        self.continue_watch();
        let watch = lock(&self.watch);
        let nodes = self.all(&watch).map(|node| node.status());
        let is_shown = |node: &NodeStatus| node.address.is_some() || node.failed > 0 || node.state != NodeState::Ok;
        nodes.filter(is_shown).collect()
    }
}

async fn keep_watch(health: Weak<Health>, task: u64) {
    loop {
        sleep(TICK).await;
        let Some(health) = health.upgrade() else { return };
        if !health.tick(task, Instant::now()) {
            return;
        }
    }
}

impl Node {
    /// A node at this address, which has no credentials.
    pub(crate) fn new(address: impl Into<String>) -> Arc<Self> {
        let address = address.into();
        Arc::new(Self {
            metrics: NodeMetrics::new(&address),
            address: Some(address),
            ..Self::default()
        })
    }

    #[cfg(feature = "_redis")]
    pub(crate) fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    /// Records checks in the metrics, if this is a server of Redis.
    #[inline]
    fn record(&self, outcome: CheckOutcome, checks: u64) {
        if let Some(address) = &self.address {
            self.metrics.count(address, outcome, checks);
        }
    }

    fn totals(&self) -> CheckCounts {
        let [decided, failed, failed_by_key] = self.counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        CheckCounts {
            decided,
            failed,
            failed_by_key,
        }
    }

    fn begin(&self, now: Instant) {
        lock(&self.states).begin(now, self.totals());
    }

    fn status(&self) -> NodeStatus {
        let states = lock(&self.states);
        let counts = states.window(self.totals());
        let is_failing = states.state != NodeState::Ok || counts.failed > 0;
        let last_error = match is_failing {
            true => &self.last_error,
            false => &self.last_error_of_key,
        };
        let error = (is_failing || counts.failed_by_key > 0).then(|| lock(last_error).clone());
        NodeStatus {
            address: self.address.clone(),
            state: states.state,
            since: states.since,
            decided: counts.decided,
            failed: counts.failed + counts.failed_by_key,
            failed_by_key: counts.failed_by_key,
            error: error.flatten().map(|error| error.to_string()),
        }
    }

    /// Logs that a node which is not `ok` has left the store.
    #[cfg(any(test, feature = "cluster"))]
    fn leave(&self) {
        let states = lock(&self.states);
        let (state, counts) = (states.state, states.unlogged(self.totals()));
        drop(states); // what receives the event may read them
        if state != NodeState::Ok {
            tracing::warn!(
                node = self.address.as_deref(),
                decided = counts.decided,
                failed = counts.failed,
                "a node of the rate limit store that failed has no slots anymore"
            );
        }
    }

    fn log(&self, line: &LogLine) {
        let node = self.address.as_deref();
        let CheckCounts { decided, failed, .. } = line.counts;
        let (failed, last_error, text) = match line.subject {
            LogSubject::State(NodeState::Down) => (
                failed,
                Some(&self.last_error),
                "the rate limit store fails; until it replies, each policy applies its failure mode, by default \
                     counting in this process",
            ),
            LogSubject::State(NodeState::Degraded) => (
                failed,
                Some(&self.last_error),
                "the rate limit store fails a share of the checks; to each of them its policies apply their failure \
                     modes, by default counting in this process",
            ),
            LogSubject::State(NodeState::Ok) => {
                (failed, None, "the rate limit store replies again; its own counts apply")
            }
            LogSubject::Keys => (
                line.counts.failed_by_key,
                Some(&self.last_error_of_key),
                "checks of some keys failed because of what the rate limit store had under these keys",
            ),
        };
        let error = last_error.and_then(|error| lock(error).clone());
        let error = error.as_ref();
        let kind = error.map(|error| error.kind().name());
        let source = error.and_then(|error| error.source()).map(ToString::to_string);
        let error = error.map(ToString::to_string);
        tracing::warn!(node, decided, failed, kind, error, source, "{text}");
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::{Builder, Runtime};

    use super::*;
    use crate::{error::ErrorKind, observe::log::Log};

    fn runtime() -> Runtime {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime")
    }

    #[test]
    fn a_node_is_ok_again_although_the_runtime_of_its_failures_has_ended() {
        type Step = fn(&Arc<Health>, &Node);
        let replies: Step = |health, node| health.decided(node, 1);
        let is_read: Step = |health, _| drop(health.status());
        for step in [replies, is_read] {
            let (node, health) = (Node::new("a"), Arc::<Health>::default());
            health.set_nodes(vec![node.clone()]);
            let state = || lock(&node.states).state;
            let error = StoreError::new(ErrorKind::Timeout, "no reply");
            runtime().block_on(async {
                while state() == NodeState::Ok {
                    health.failed(&node, 1, &error);
                    sleep(TICK).await;
                }
            });
            assert_eq!(state(), NodeState::Down);

            node.counts[CheckOutcome::Decided as usize].fetch_add(1, Ordering::Relaxed);
            runtime().block_on(async {
                for _ in 0..30 {
                    step(&health, &node);
                    sleep(TICK).await;
                }
            });
            assert_eq!(state(), NodeState::Ok);
        }
    }

    #[test]
    fn a_node_that_joins_while_others_fail_is_watched_at_once_and_one_that_leaves_failing_is_logged() {
        let log = Log::capture();
        let ([a, b], health) = (["a", "b"].map(Node::new), Arc::<Health>::default());
        let error = StoreError::new(ErrorKind::Timeout, "no reply");
        runtime().block_on(async {
            health.set_nodes(vec![a.clone()]);
            health.failed(&a, 1, &error);
            health.set_nodes(vec![a.clone(), b.clone()]);
            health.failed(&b, 3, &error);
            let failed: Vec<_> = health.status().iter().map(|node| node.failed).collect();
            assert_eq!(failed, [1, 3]);

            while lock(&a.states).state == NodeState::Ok {
                health.failed(&a, 1, &error);
                sleep(TICK).await;
            }
        });
        health.set_nodes(vec![b]);
        let text = log.text();
        let left = "a node of the rate limit store that failed has no slots anymore node=\"a\"";
        assert_eq!(text.matches(left).count(), 1, "{text}");
    }
}
