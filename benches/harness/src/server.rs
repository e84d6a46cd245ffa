use std::process::{Command, Stdio};

use crate::redis::Redis;

/// A Redis server that ends with the benchmark.
pub struct Server {
    redis: Redis,
    version: String,
    cores: usize,
    pinned: bool,
}

/// Commands that Redis ran since the last reading.
#[derive(Clone, Copy, Debug)]
pub struct Commands {
    /// Calls of scripts.
    pub scripts: u64,
    /// Commands outside of scripts and within.
    pub others: u64,
}

impl Server {
    /// Starts it, pinned to a core of its own if there is `taskset` and a second core.
    pub(crate) async fn start() -> Self {
        let redis = Redis::start();
        let info: String = redis.command("INFO", ["server"]).await;
        let field = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap_or_default().to_owned()
        };
        let (server, own) = (field("process_id"), std::process::id().to_string());

        Self {
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            pinned: pin(&own, "0") && pin(&server, "1"),
            version: field("redis_version"),
            redis,
        }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        self.redis.url()
    }

    /// The id of its process.
    pub async fn process(&self) -> String {
        process_of(&self.redis).await
    }

    /// One line on the machine.
    pub fn machine(&self) -> String {
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpu
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
        let placement = match self.pinned {
            true => "Redis on one core, the client on another",
            false => "Redis and the client not pinned to cores",
        };
        format!(
            "Redis {} over loopback, {placement}; {} cores, {}",
            self.version,
            self.cores,
            cpu.unwrap_or("unknown processor").trim()
        )
    }

    /// Removes all keys.
    pub async fn flush(&self) {
        self.redis.command::<()>("FLUSHALL", ["SYNC"]).await;
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.redis.port()
    }

    /// A number in a section of `INFO`; of `keyspace` the number of keys of database 0.
    pub async fn figure(&self, section: &str, field: &str) -> f64 {
        let info: String = self.redis.command("INFO", [section]).await;
        let separators = |c: char| matches!(c, ':' | '=' | ',' | '\r' | '\n');
        let mut words = info.split(separators).skip_while(|word| *word != field);
        words.nth(1).and_then(|number| number.parse().ok()).unwrap_or(0.0)
    }

    /// Waits until it has this value.
    pub async fn reaches(&self, section: &str, field: &str, value: f64) {
        while self.figure(section, field).await != value {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }

    /// Seconds of the processor that it has used, for commands alone.
    pub async fn processor_time(&self) -> f64 {
        self.figure("cpu", "used_cpu_sys").await + self.figure("cpu", "used_cpu_user").await
    }

    /// Sets a setting.
    pub async fn set(&self, setting: &str, value: &str) {
        self.redis.command::<()>("CONFIG", ["SET", setting, value]).await;
    }

    /// Starts to save all keys.
    pub async fn save(&self) {
        self.redis.command::<()>("BGSAVE", [""; 0]).await;
    }

    /// The commands since the last call of this method, without its own.
    pub async fn commands(&self) -> Commands {
        let calls = self.redis.all_calls().await;
        self.redis.command::<()>("CONFIG", ["RESETSTAT"]).await;

        let mut commands = Commands { scripts: 0, others: 0 };
        for (name, calls) in calls {
            match name.as_str() {
                "evalsha" | "eval" => commands.scripts += calls,
                "info" | "config|resetstat" => {}
                _ => commands.others += calls,
            }
        }
        commands
    }

    /// The mean memory of its keys, in bytes.
    pub async fn bytes_per_key(&self) -> f64 {
        let keys: Vec<String> = self.redis.command("KEYS", ["*"]).await;
        let mut bytes = 0_u64;
        for key in &keys {
            let usage: u64 = self.redis.command("MEMORY", ["USAGE", key, "SAMPLES", "0"]).await;
            bytes += usage;
        }
        bytes as f64 / keys.len() as f64
    }
}

/// Three primaries of a cluster, which end with the benchmark.
pub struct Cluster {
    primaries: Vec<Redis>,
}

impl Cluster {
    /// Starts it; with `taskset` and a second core, its nodes share the core of the [`Server`].
    pub async fn start() -> Self {
        const PRIMARIES: usize = 3;
        const SLOTS: usize = 16_384;

        let settings = ["--cluster-enabled", "yes"];
        let primaries: Vec<_> = (0..PRIMARIES).map(|_| Redis::start_with(&settings)).collect();
        for (position, primary) in primaries.iter().enumerate() {
            let slots = position * SLOTS / PRIMARIES..(position + 1) * SLOTS / PRIMARIES;
            let slots = slots.map(|slot| slot.to_string());
            let epoch = (position + 1).to_string();
            primary.command::<()>("CLUSTER", ["SET-CONFIG-EPOCH", &epoch]).await;
            primary
                .command::<()>("CLUSTER", ["ADDSLOTS".to_owned()].into_iter().chain(slots))
                .await;
            let port = primaries[0].port().to_string();
            primary.command::<()>("CLUSTER", ["MEET", "127.0.0.1", &port]).await;
            pin(&process_of(primary).await, "1");
        }
        for primary in &primaries {
            loop {
                let info: String = primary.command("CLUSTER", ["INFO"]).await;
                if info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3") {
                    break;
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        }
        Self { primaries }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("redis-cluster://127.0.0.1:{}", self.primaries[0].port())
    }

    /// The URLs of its nodes.
    pub fn node_urls(&self) -> Vec<String> {
        self.primaries.iter().map(Redis::url).collect()
    }

    /// The ids of its processes.
    pub async fn processes(&self) -> Vec<String> {
        let mut ids = Vec::new();
        for primary in &self.primaries {
            ids.push(process_of(primary).await);
        }
        ids
    }

    /// Removes all keys.
    pub async fn flush(&self) {
        for primary in &self.primaries {
            primary.command::<()>("FLUSHALL", ["SYNC"]).await;
        }
    }
}

async fn process_of(redis: &Redis) -> String {
    let info: String = redis.command("INFO", ["server"]).await;
    let id = info.lines().find_map(|line| line.strip_prefix("process_id:"));
    id.unwrap_or_default().to_owned()
}

/// Pins a process to a core, and returns whether that is possible here.
pub fn pin(process: &str, core: &str) -> bool {
    let status = Command::new("taskset")
        .args(["--all-tasks", "--cpu-list", "--pid", core, process])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}
