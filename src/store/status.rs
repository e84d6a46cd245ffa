use std::{borrow::Cow, fmt, time::SystemTime};

/// What a store reports about itself to operators.
///
/// ```
/// use tower_quota::{MemoryStore, store::{Store, StoreStatus}};
///
/// let status = MemoryStore::new().status().expect("a memory store reports its numbers");
/// assert_eq!(status, StoreStatus::new("memory").number("keys", 0).number("capacity", 100_000).number("evictions", 0));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStatus {
    /// The kind of the store, such as `redis`.
    pub kind: Cow<'static, str>,
    /// Numbers by their names, such as `open breakers`.
    pub numbers: Vec<(Cow<'static, str>, u64)>,
    /// The health of the servers: of a cluster one entry for each primary. Empty for a store without servers.
    pub nodes: Vec<NodeStatus>,
}

/// The health of a server of a store, from the checks of this process.
///
/// The counts are those of the last 60 s, from the first failure on; 0 if no check has failed lately. Refunds and other operations
/// count as checks do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeStatus {
    /// The address, such as `10.0.0.7:6379`, the path of a Unix socket, or the name of the service of Sentinel. `None` for checks
    /// that no server has been called for: those of a slot without a known primary, and all of a store without servers.
    pub address: Option<String>,
    /// The state that the last checks have led to.
    pub state: NodeState,
    /// Since when it has this state; `None` since the store was built.
    pub since: Option<SystemTime>,
    /// The checks that were decided.
    pub decided: u64,
    /// The checks that failed.
    pub failed: u64,
    /// Those of them that failed because of what the store has under their keys (`WRONGTYPE`). They lead to no other state.
    pub failed_by_key: u64,
    /// The last failure, if there is one in this time.
    pub error: Option<String>,
}

/// The state of a server of a store.
///
/// A server enters another state 1 to 2 s after a check has failed, even if only one has, and leaves it when another one has fitted
/// for 6 s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum NodeState {
    /// No share of the checks fails.
    #[default]
    Ok,
    /// A share of the checks fails.
    Degraded,
    /// All checks fail.
    Down,
}

/// `ok`, `degraded` or `down`.
impl fmt::Display for NodeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Down => "down",
        })
    }
}

/// The health of these nodes in one line, such as `1 of 3 nodes down: 33 % of checks fail`; `None` if nothing fails.
#[cfg(feature = "admin")]
pub(crate) fn summary(nodes: &[NodeStatus]) -> Option<String> {
    let (decided, failed) = nodes.iter().fold((0, 0), |(decided, failed), node| {
        (decided + node.decided, failed + node.failed)
    });
    let [down, degraded] =
        [NodeState::Down, NodeState::Degraded].map(|state| nodes.iter().filter(|node| node.state == state).count());
    let states = match (down, degraded, nodes.len()) {
        (0, 0, _) if failed == 0 => return None,
        (0, 0, _) => String::new(),
        (1, 0, 1) => "down: ".to_owned(),
        (0, 1, 1) => "degraded: ".to_owned(),
        (_, 0, all) => format!("{down} of {all} nodes down: "),
        (0, _, all) => format!("{degraded} of {all} nodes degraded: "),
        (_, _, all) => format!("{down} of {all} nodes down, {degraded} degraded: "),
    };
    let fail = if states.is_empty() {
        "failed in the last minute"
    } else {
        "fail"
    };
    Some(match (100 * failed).checked_div(decided + failed) {
        None => format!("{states}no check was made"),
        Some(0) => format!("{states}less than 1 % of checks {fail}"),
        Some(percent) => format!("{states}{percent} % of checks {fail}"),
    })
}

impl StoreStatus {
    /// The status of a store of this kind, without numbers.
    pub fn new(kind: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind: kind.into(),
            numbers: Vec::new(),
            nodes: Vec::new(),
        }
    }

    /// The same status with one more number, in a unit that its name contains.
    #[must_use]
    pub fn number(mut self, name: impl Into<Cow<'static, str>>, number: u64) -> Self {
        self.numbers.push((name.into(), number));
        self
    }
}

#[cfg(test)]
#[cfg(feature = "admin")]
mod tests {
    use super::*;

    fn node(state: NodeState, decided: u64, failed: u64) -> NodeStatus {
        NodeStatus {
            address: None,
            state,
            since: None,
            decided,
            failed,
            failed_by_key: 0,
            error: None,
        }
    }

    #[test]
    fn the_health_of_all_nodes_is_one_line() {
        use NodeState::{Degraded, Down, Ok};

        for (nodes, line) in [
            (vec![], None),
            (vec![node(Ok, 0, 0), node(Ok, 10, 0)], None),
            (vec![node(Down, 0, 7)], Some("down: 100 % of checks fail")),
            (vec![node(Down, 0, 0)], Some("down: no check was made")),
            (vec![node(Degraded, 80, 20)], Some("degraded: 20 % of checks fail")),
            (
                vec![node(Ok, 999, 1)],
                Some("less than 1 % of checks failed in the last minute"),
            ),
            (
                vec![node(Down, 0, 100), node(Ok, 100, 0), node(Ok, 100, 0)],
                Some("1 of 3 nodes down: 33 % of checks fail"),
            ),
            (
                vec![node(Down, 0, 50), node(Degraded, 25, 25), node(Down, 0, 50)],
                Some("2 of 3 nodes down, 1 degraded: 83 % of checks fail"),
            ),
        ] {
            assert_eq!(summary(&nodes).as_deref(), line);
        }
    }
}
