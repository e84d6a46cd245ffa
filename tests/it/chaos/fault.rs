use std::{
    fmt,
    pin::pin,
    process::{Command, Stdio},
    time::Duration,
};

use tokio::time::{sleep, timeout};
use tower_quota::ClientLibrary;

use crate::support::{Cluster, Faketime, Proxy, Redis, Sentinel};

/// A fault of Redis, its host or the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Kill,
    KillUnsaved,
    Stop,
    Restart,
    SentinelFailover,
    ClusterFailover,
    Reshard,
    ScriptFlush,
    Partition,
    Latency,
    Cuts,
    ClientKill,
    HourForward,
    HourBack,
    OutOfMemory,
    Busy,
}

/// What a fault leaves of the counts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Leaves {
    /// All that was replied to.
    Everything,
    /// What had reached a file or a replica.
    Part,
    /// What was counted by another time.
    AnotherTime,
}

/// The Redis that it happens to, and what stands in its way.
pub(super) enum Place {
    Server(Redis),
    Proxied(Redis, Proxy),
    Clocked(Redis, Faketime),
    Sentinel(Sentinel),
    Cluster(Cluster),
}

const HOUR_MS: i64 = 3_600_000;

impl Fault {
    pub(super) const ALL: [Self; 16] = [
        Self::Kill,
        Self::KillUnsaved,
        Self::Stop,
        Self::Restart,
        Self::SentinelFailover,
        Self::ClusterFailover,
        Self::Reshard,
        Self::ScriptFlush,
        Self::Partition,
        Self::Latency,
        Self::Cuts,
        Self::ClientKill,
        Self::HourForward,
        Self::HourBack,
        Self::OutOfMemory,
        Self::Busy,
    ];

    pub(super) fn leaves(self) -> Leaves {
        match self {
            Self::KillUnsaved | Self::SentinelFailover | Self::ClusterFailover => Leaves::Part,
            Self::HourForward | Self::HourBack => Leaves::AnotherTime,
            _ => Leaves::Everything,
        }
    }

    /// Whether Redis admits nothing while the fault lasts.
    pub(super) fn is_outage(self) -> bool {
        match self {
            Self::Kill
            | Self::KillUnsaved
            | Self::Stop
            | Self::Restart
            | Self::Partition
            | Self::OutOfMemory
            | Self::Busy => true,
            // Of these, some calls succeed: a reply that is late for a healthy process is used by one that was stalled.
            Self::SentinelFailover
            | Self::ClusterFailover
            | Self::Reshard
            | Self::ScriptFlush
            | Self::Latency
            | Self::Cuts
            | Self::ClientKill
            | Self::HourForward
            | Self::HourBack => false,
        }
    }

    pub(super) fn runs_on(self, library: ClientLibrary) -> bool {
        let clustered = matches!(self, Self::ClusterFailover | Self::Reshard);
        !clustered || library == ClientLibrary::RedisRs
    }

    pub(super) async fn place(self) -> Place {
        match self {
            Self::Kill => Place::Server(Redis::start_with(&["--appendonly", "yes", "--appendfsync", "always"])),
            Self::Busy => Place::Server(Redis::start_with(&["--lua-time-limit", "50"])),
            Self::SentinelFailover => Place::Sentinel(Sentinel::start_that_fails_over().await),
            Self::ClusterFailover => Place::Cluster(Cluster::start_that_fails_over().await),
            Self::Reshard => Place::Cluster(Cluster::start().await),
            Self::Partition | Self::Latency | Self::Cuts => {
                let redis = Redis::start();
                let proxy = Proxy::start(redis.port()).await;
                Place::Proxied(redis, proxy)
            }
            Self::HourForward | Self::HourBack => {
                let clock = Faketime::new();
                Place::Clocked(clock.start_redis(), clock)
            }
            _ => Place::Server(Redis::start()),
        }
    }

    /// Causes the fault, runs `during`, and ends the fault; a clock that was set stays so.
    pub(super) async fn strike<T>(self, place: &mut Place, keys: &[String], during: impl Future<Output = T>) -> T {
        match (self, place) {
            (Self::Kill | Self::KillUnsaved, Place::Server(redis)) => {
                redis.kill();
                let output = during.await;
                redis.restart();
                output
            }
            (Self::Stop, Place::Server(redis)) => {
                let _frozen = redis.freeze();
                during.await
            }
            (Self::Restart, Place::Server(redis)) => {
                redis.cli(&["SHUTDOWN", "SAVE"]);
                redis.kill();
                let output = during.await;
                redis.restart();
                output
            }
            (Self::SentinelFailover, Place::Sentinel(sentinel)) => {
                cut_off(&sentinel.primary, &sentinel.replicas).await;
                sentinel.primary.kill();
                during.await
            }
            (Self::ClusterFailover, Place::Cluster(cluster)) => {
                cut_off(&cluster.primaries[1], &cluster.replicas[1..2]).await;
                cluster.primaries[1].kill();
                during.await
            }
            (Self::Reshard, Place::Cluster(cluster)) => reshard(cluster, keys, during).await,
            (Self::ScriptFlush, Place::Server(redis)) => {
                again_and_again(during, OFTEN, async || redis.command("SCRIPT", ["FLUSH"]).await).await
            }
            (Self::Partition, Place::Proxied(_, proxy)) => {
                proxy.partition();
                let output = during.await;
                proxy.heal();
                output
            }
            (Self::Latency, Place::Proxied(_, proxy)) => {
                proxy.delay(Duration::from_millis(200));
                let output = during.await;
                proxy.delay(Duration::ZERO);
                output
            }
            (Self::Cuts, Place::Proxied(_, proxy)) => {
                again_and_again(during, SELDOM, async || proxy.cut_before_the_next_answer()).await
            }
            (Self::ClientKill, Place::Server(redis)) => {
                let kill = ["KILL", "TYPE", "normal", "SKIPME", "yes"];
                again_and_again(during, SELDOM, async || redis.command("CLIENT", kill).await).await
            }
            (Self::HourForward, Place::Clocked(_, clock)) => {
                clock.set(HOUR_MS);
                during.await
            }
            (Self::HourBack, Place::Clocked(_, clock)) => {
                clock.set(-HOUR_MS);
                during.await
            }
            (Self::OutOfMemory, Place::Server(redis)) => {
                redis.command::<()>("CONFIG", ["SET", "maxmemory", "1"]).await;
                let output = during.await;
                redis.command::<()>("CONFIG", ["SET", "maxmemory", "0"]).await;
                output
            }
            (Self::Busy, Place::Server(redis)) => {
                let mut endless = Command::new("redis-cli")
                    .args(["-p", &redis.port().to_string(), "EVAL", "while true do end", "0"])
                    .stdout(Stdio::null())
                    .spawn()
                    .expect("redis-cli starts");
                while !redis.cli(&["PING"]).contains("BUSY") {
                    sleep(Duration::from_millis(5)).await;
                }
                let output = during.await;
                redis.cli(&["SCRIPT", "KILL"]);
                endless.wait().expect("the script was killed");
                output
            }
            _ => unreachable!("{self} happens in a place of its own"),
        }
    }
}

/// The name in the table.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kill => "killed, with all in its append-only file",
            Self::KillUnsaved => "killed, with nothing saved",
            Self::Stop => "stopped (`SIGSTOP`)",
            Self::Restart => "restarted (`SHUTDOWN SAVE`)",
            Self::SentinelFailover => "failed over by Sentinel, its replicas 300 ms behind",
            Self::ClusterFailover => "failed over in a cluster, its replica 300 ms behind",
            Self::Reshard => "a cluster whose slots move",
            Self::ScriptFlush => "forgetting the script every 50 ms (`SCRIPT FLUSH`)",
            Self::Partition => "cut off (no packet either way)",
            Self::Latency => "200 ms late with each reply",
            Self::Cuts => "losing a connection with a reply every 300 ms",
            Self::ClientKill => "killing all connections every 300 ms",
            Self::HourForward => "an hour ahead, its clock set",
            Self::HourBack => "an hour back, its clock set",
            Self::OutOfMemory => "out of memory (`noeviction`)",
            Self::Busy => "busy with an endless script",
        })
    }
}

const OFTEN: Duration = Duration::from_millis(50);
/// Seldom enough for callers to be connected again in between.
const SELDOM: Duration = Duration::from_millis(300);

async fn again_and_again<T>(during: impl Future<Output = T>, pause: Duration, mut fault: impl AsyncFnMut()) -> T {
    let mut during = pin!(during);
    loop {
        fault().await;
        if let Ok(output) = timeout(pause, &mut during).await {
            return output;
        }
    }
}

/// Keeps from the replicas what the primary counts from now on, and lets it count a little.
async fn cut_off(primary: &Redis, replicas: &[Redis]) {
    for replica in replicas {
        // The primary has no password, and so rejects a replica that sends one.
        replica.command::<()>("CONFIG", ["SET", "masterauth", "none"]).await;
    }
    primary.command::<()>("CLIENT", ["KILL", "TYPE", "replica"]).await;
    sleep(Duration::from_millis(300)).await;
}

/// Moves the slots of these keys from primary to primary.
async fn reshard<T>(cluster: &Cluster, keys: &[String], during: impl Future<Output = T>) -> T {
    let mut slots = Vec::new();
    for key in keys {
        let slot = cluster.slot(key).await;
        slots.push((slot, Cluster::owner(slot)));
    }
    let mut next = (0..slots.len()).cycle();
    again_and_again(during, OFTEN, async || {
        let (slot, owner) = &mut slots[next.next().expect("there are keys")];
        let from = std::mem::replace(owner, (*owner + 1) % cluster.primaries.len());
        cluster.begin_to_move(*slot, from, *owner).await;
        cluster.move_keys(*slot, from, *owner).await;
        cluster.end_moving(*slot, *owner).await;
    })
    .await
}

impl Place {
    pub(super) fn url(&self) -> String {
        match self {
            Self::Server(redis) | Self::Clocked(redis, _) => redis.url(),
            Self::Proxied(_, proxy) => proxy.url(),
            Self::Sentinel(sentinel) => sentinel.url(),
            Self::Cluster(cluster) => cluster.url(),
        }
    }

    /// The servers that may be written to now.
    pub(super) fn primaries(&self) -> Vec<&Redis> {
        let servers: Vec<&Redis> = match self {
            Self::Server(redis) | Self::Clocked(redis, _) | Self::Proxied(redis, _) => vec![redis],
            Self::Sentinel(sentinel) => [&sentinel.primary].into_iter().chain(&sentinel.replicas).collect(),
            Self::Cluster(cluster) => cluster.primaries.iter().chain(&cluster.replicas).collect(),
        };
        let writable = |redis: &&Redis| redis.cli(&["INFO", "replication"]).contains("role:master");
        servers.into_iter().filter(writable).collect()
    }
}
