use std::time::Duration;

use tokio::{task::JoinSet, time::Instant};
use tower_quota::{Limit, RedisStore, SlidingLog, store::Operation};

use super::{Redis, eventually, try_decide};

/// Three primaries with a third of the slots each, and a replica of each primary.
pub(crate) struct Cluster {
    pub(crate) primaries: Vec<Redis>,
    pub(crate) replicas: Vec<Redis>,
}

const SLOTS: usize = 16_384;
const PRIMARIES: usize = 3;

impl Cluster {
    /// Starts a cluster and waits until it serves every slot and has replicas.
    pub(crate) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Starts a cluster with these settings of its nodes.
    ///
    /// No replica takes over, also when a busy machine delays its primary.
    pub(crate) async fn start_with(settings: &'static [&'static str]) -> Self {
        // With a longer timeout nodes also send less often, and so learn later which slots have moved.
        let patient = ["--cluster-node-timeout", "1000", "--cluster-replica-no-failover", "yes"];
        Self::start_nodes(patient.iter().chain(settings).copied().collect()).await
    }

    /// Starts a cluster in which no node is taken for dead because the machine is busy. Its nodes learn late which slots have moved.
    pub(crate) async fn start_patient() -> Self {
        Self::start_with(&["--cluster-node-timeout", "60000"]).await
    }

    /// Starts a cluster in which a replica takes over from a primary that is silent for three seconds.
    pub(crate) async fn start_that_fails_over() -> Self {
        Self::start_nodes(vec!["--cluster-node-timeout", "3000"]).await
    }

    async fn start_nodes(settings: Vec<&'static str>) -> Self {
        let mut starting = JoinSet::new();
        for _ in 0..2 * PRIMARIES {
            let settings = settings.clone();
            starting.spawn_blocking(move || {
                let mut all = vec!["--cluster-enabled", "yes"];
                // The slots of a dead primary are no reason to stop serving the others.
                all.extend(["--cluster-require-full-coverage", "no"]);
                all.extend(["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"]);
                all.extend(&settings);
                Redis::start_with(&all)
            });
        }
        let mut primaries = starting.join_all().await;
        let replicas = primaries.split_off(PRIMARIES);
        let cluster = Self { primaries, replicas };

        for (position, primary) in cluster.primaries.iter().enumerate() {
            let epoch = (position + 1).to_string();
            primary.command::<()>("CLUSTER", ["SET-CONFIG-EPOCH", &epoch]).await;
            let slots = position * SLOTS / PRIMARIES..(position + 1) * SLOTS / PRIMARIES;
            let slots = slots.map(|slot| slot.to_string());
            let addslots = std::iter::once("ADDSLOTS".to_owned()).chain(slots);
            primary.command::<()>("CLUSTER", addslots).await;
        }
        // A node forgets another one that does not reply to it soon.
        let mut met_at = None::<Instant>;
        eventually("it is whole", async || {
            if met_at.is_none_or(|at| at.elapsed() > Duration::from_secs(3)) {
                met_at = Some(Instant::now());
                for node in cluster.nodes() {
                    for other in cluster.nodes() {
                        let port = other.port().to_string();
                        node.command::<()>("CLUSTER", ["MEET", "127.0.0.1", &port]).await;
                    }
                }
            }
            let mut is_whole = true;
            for node in cluster.nodes() {
                is_whole &= number(node, "cluster_known_nodes:").await == 6;
            }
            is_whole
        })
        .await;

        for (primary, replica) in cluster.primaries.iter().zip(&cluster.replicas) {
            let id: String = primary.command("CLUSTER", ["MYID"]).await;
            eventually("the replica knows its primary", async || {
                replica.cli(&["CLUSTER", "REPLICATE", &id]).contains("OK")
            })
            .await;
        }
        for replica in &cluster.replicas {
            eventually("the replica has its primary's data", async || {
                let replication: String = replica.command("INFO", ["replication"]).await;
                replication.contains("master_link_status:up")
            })
            .await;
        }
        cluster
            .eventually_everywhere("every slot is served", "cluster_state:ok")
            .await;
        cluster
    }

    fn nodes(&self) -> impl Iterator<Item = &Redis> {
        self.primaries.iter().chain(&self.replicas)
    }

    async fn eventually_everywhere(&self, what: &str, line: &str) {
        for node in self.nodes() {
            eventually(what, async || {
                let info: String = node.command("CLUSTER", ["INFO"]).await;
                info.contains(line)
            })
            .await;
        }
    }

    /// The URL of the second node, which names the first one too.
    pub(crate) fn url(&self) -> String {
        let [first, second, ..] = &self.primaries[..] else {
            unreachable!("there are three")
        };
        format!(
            "redis-cluster://127.0.0.1:{}?node=127.0.0.1:{}",
            second.port(),
            first.port()
        )
    }

    /// The URL of the replicas, for when a primary is gone.
    pub(crate) fn replicas_url(&self) -> String {
        let [first, second, ..] = &self.replicas[..] else {
            unreachable!("there are three")
        };
        format!(
            "redis-cluster://127.0.0.1:{}?node=127.0.0.1:{}",
            first.port(),
            second.port()
        )
    }

    /// The position of the primary that this slot was given to when the cluster was made.
    pub(crate) fn owner(slot: u16) -> usize {
        (0..PRIMARIES)
            .find(|position| usize::from(slot) < (position + 1) * SLOTS / PRIMARIES)
            .expect("a slot")
    }

    /// A key of the limiter in each primary's slots: `quota:1:log/1h:test:{key=k0}` or another number.
    pub(crate) async fn keys(&self) -> [String; PRIMARIES] {
        let mut found = [const { None }; PRIMARIES];
        for number in 0..100 {
            let key = format!("k{number}");
            let owner = Self::owner(self.slot(&format!("{{key={key}}}")).await);
            found[owner].get_or_insert(key);
        }
        found.map(|key| key.expect("one in a hundred"))
    }

    /// Waits until the store is connected to every primary.
    pub(crate) async fn serves(&self, store: &RedisStore) {
        let limit = Limit::from(SlidingLog::per_hour(1));
        for key in self.keys().await {
            eventually("the primary answers the store", async || {
                try_decide(store, Operation::Peek, &limit, &key, 1).await
            })
            .await;
        }
    }

    /// The slot of a key.
    pub(crate) async fn slot(&self, key: &str) -> u16 {
        self.primaries[0].command("CLUSTER", ["KEYSLOT", key]).await
    }

    /// Begins to move a slot from one primary to another.
    pub(crate) async fn begin_to_move(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        let (source, target) = (&self.primaries[from], &self.primaries[to]);
        let ids = [self.id(from).await, self.id(to).await];
        let importing = ["SETSLOT", &slot, "IMPORTING", &ids[0]];
        target.command::<()>("CLUSTER", importing).await;
        let migrating = ["SETSLOT", &slot, "MIGRATING", &ids[1]];
        source.command::<()>("CLUSTER", migrating).await;
    }

    /// Moves the keys that are there now.
    pub(crate) async fn move_keys(&self, slot: u16, from: usize, to: usize) {
        let (source, port) = (&self.primaries[from], self.primaries[to].port().to_string());
        let slot = slot.to_string();
        loop {
            let keys: Vec<String> = source.command("CLUSTER", ["GETKEYSINSLOT", &slot, "100"]).await;
            if keys.is_empty() {
                return;
            }
            let mut migrate: Vec<_> = ["127.0.0.1", &port, "", "0", "5000", "KEYS"].map(str::to_owned).into();
            migrate.extend(keys);
            source.command::<()>("MIGRATE", migrate).await;
        }
    }

    /// Moves one key.
    pub(crate) async fn move_key(&self, key: &str, from: usize, to: usize) {
        let port = self.primaries[to].port().to_string();
        let migrate = ["127.0.0.1", &port, key, "0", "5000"];
        self.primaries[from].command::<()>("MIGRATE", migrate).await;
    }

    /// Gives the slot to its new owner.
    pub(crate) async fn end_moving(&self, slot: u16, to: usize) {
        // Its claim must be newer than those of all others, which it may not have learned yet.
        let mut newest = 0;
        for primary in &self.primaries {
            newest = newest.max(number(primary, "cluster_my_epoch:").await);
        }
        eventually("the new owner has all epochs", async || {
            let has_all = number(&self.primaries[to], "cluster_current_epoch:").await >= newest;
            if !has_all {
                self.meet(to).await;
            }
            has_all
        })
        .await;

        let (slot, id) = (slot.to_string(), self.id(to).await);
        let setslot = ["SETSLOT", &slot, "NODE", &id];
        self.primaries[to].command::<()>("CLUSTER", setslot).await;
        for primary in &self.primaries {
            primary.command::<()>("CLUSTER", setslot).await;
        }
        // A primary that hears the claim only when the slot has been moved on may give the slot back: `SETSLOT` leaves the mark that
        // its owner does not claim it.
        let claim = number(&self.primaries[to], "cluster_my_epoch:").await;
        eventually("the others have heard the claim", async || {
            let mut heard = true;
            for primary in &self.primaries {
                heard &= epoch_of(primary, &id).await >= claim;
            }
            if !heard {
                self.meet(to).await;
            }
            heard
        })
        .await;
    }

    /// Has a primary exchange messages with the others.
    async fn meet(&self, primary: usize) {
        for other in &self.primaries {
            let port = other.port().to_string();
            let meet = ["MEET", "127.0.0.1", &port];
            self.primaries[primary].command::<()>("CLUSTER", meet).await;
        }
    }

    pub(crate) async fn id(&self, primary: usize) -> String {
        self.primaries[primary].command("CLUSTER", ["MYID"]).await
    }
}

/// A number that `CLUSTER INFO` has.
async fn number(node: &Redis, name: &str) -> u64 {
    let info: String = node.command("CLUSTER", ["INFO"]).await;
    let number = info
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    number.expect("a number")
}

/// The epoch that a node knows of the one with this identifier.
async fn epoch_of(node: &Redis, id: &str) -> u64 {
    let nodes: String = node.command("CLUSTER", ["NODES"]).await;
    let line = nodes.lines().find(|line| line.starts_with(id));
    let epoch = line.and_then(|line| line.split(' ').nth(6)?.parse().ok());
    epoch.expect("a number")
}
