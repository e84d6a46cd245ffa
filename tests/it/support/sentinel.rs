use std::fs;

use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::{
    Redis, eventually,
    redis::{Frozen, Process, cli, folder_in_memory, free_port, server, start},
};

/// A primary with two replicas, and three sentinels that watch them.
pub(crate) struct Sentinel {
    // They end first: a sentinel that finds another test's server on the primary's port would join the sentinels of that one.
    watchers: Vec<Watcher>,
    pub(crate) primary: Redis,
    pub(crate) replicas: Vec<Redis>,
}

struct Watcher {
    port: u16,
    process: Process,
    _folder: TempDir,
}

impl Sentinel {
    /// Starts all of them and waits until the sentinels have found each other and the replicas.
    ///
    /// On a busy machine the primary may be silent for a while, for which no replica takes over.
    pub(crate) async fn start() -> Self {
        Self::start_with(&[], None, 30_000).await
    }

    /// Starts sentinels that fail over when the primary is silent for a second.
    pub(crate) async fn start_that_fails_over() -> Self {
        Self::start_with(&[], None, 1_000).await
    }

    /// Starts all of them, where the servers have the first of these passwords, and the sentinels the other one.
    pub(crate) async fn start_with_passwords(of_redis: &str, of_sentinels: &str) -> Self {
        let settings = ["--requirepass", of_redis, "--masterauth", of_redis];
        Self::start_with(&settings, Some((of_redis, of_sentinels)), 30_000).await
    }

    async fn start_with(settings: &[&str], passwords: Option<(&str, &str)>, silence_ms: u64) -> Self {
        let all = [
            &["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"],
            settings,
        ]
        .concat();
        let primary = Redis::start_with(&all);
        let port = primary.port().to_string();
        let replica = [&all[..], &["--replicaof", "127.0.0.1", &port]].concat();
        let replicas: Vec<_> = (0..2).map(|_| Redis::start_with(&replica)).collect();
        // A sentinel that has not found a replica looks again after ten seconds.
        eventually("the replicas are connected", async || {
            let password = passwords.map(|(of_redis, _)| of_redis);
            let replication = cli(primary.port(), password, &["INFO", "replication"]);
            replication.matches("state=online").count() == 2
        })
        .await;
        let watchers = (0..3)
            .map(|_| Watcher::start(primary.port(), passwords, silence_ms))
            .collect();

        let sentinel = Self {
            watchers,
            primary,
            replicas,
        };
        for watcher in &sentinel.watchers {
            eventually("the sentinel has found all the others", async || {
                let password = passwords.map(|(_, of_sentinels)| of_sentinels);
                let primary = cli(watcher.port, password, &["SENTINEL", "master", "main"]);
                let has = |name: &str, value: &str| primary.contains(&format!("{name}\n{value}\n"));
                has("num-slaves", "2") && has("num-other-sentinels", "2")
            })
            .await;
        }
        sentinel
    }

    /// Where the sentinels are, and the name of the primary.
    pub(crate) fn url(&self) -> String {
        self.url_with("")
    }

    /// The same with credentials for Redis, such as `user:password@`.
    pub(crate) fn url_with(&self, credentials: &str) -> String {
        let [first, second, third] = &self.watchers[..] else {
            unreachable!("there are three")
        };
        format!(
            "redis-sentinel://{credentials}127.0.0.1:{}?sentinelServiceName=main&node=127.0.0.1:{}&node=127.0.0.1:{}",
            first.port, second.port, third.port
        )
    }

    /// The same with the first sentinel alone.
    pub(crate) fn url_of_the_first(&self) -> String {
        format!(
            "redis-sentinel://127.0.0.1:{}?sentinelServiceName=main",
            self.watchers[0].port
        )
    }

    /// Runs a command on each sentinel.
    pub(crate) fn command_to_watchers(&self, command: &[&str]) {
        for watcher in &self.watchers {
            let reply = cli(watcher.port, None, command);
            assert!(reply.starts_with("OK"), "{reply}");
        }
    }

    /// Ends a sentinel, by its position in the URL.
    pub(crate) fn kill_watcher(&mut self, position: usize) {
        let _ = self.watchers[position].process.0.kill();
        let _ = self.watchers[position].process.0.wait();
    }

    /// Makes a sentinel hang, by its position in the URL, until what this returns is dropped.
    pub(crate) fn freeze_watcher(&self, position: usize) -> Frozen<'_> {
        Frozen::new(&self.watchers[position].process)
    }

    /// Makes a replica the primary, as before the primary is maintained.
    pub(crate) async fn fail_over(&self) {
        eventually("a sentinel fails over", async || {
            cli(self.watchers[0].port, None, &["SENTINEL", "FAILOVER", "main"]).starts_with("OK")
        })
        .await;
    }

    /// The replica that has become the primary, as soon as there is one.
    pub(crate) async fn promoted(&self) -> &Redis {
        let mut promoted = None;
        eventually("a replica is the primary", async || {
            for replica in &self.replicas {
                // The connections that there were are closed with its new role.
                let replication = replica.cli(&["INFO", "replication"]);
                if replication.contains("role:master") {
                    promoted = Some(replica);
                }
            }
            promoted.is_some()
        })
        .await;
        promoted.expect("it was found")
    }
}

impl Watcher {
    fn start(primary: u16, passwords: Option<(&str, &str)>, silence_ms: u64) -> Self {
        let folder = folder_in_memory();
        let file = folder.path().join("sentinel.conf");
        let port = free_port();
        let passwords = passwords.map_or(String::new(), |(of_redis, of_sentinels)| {
            format!(
                "sentinel auth-pass main {of_redis}\nrequirepass {of_sentinels}\nsentinel sentinel-pass {of_sentinels}"
            )
        });
        let settings = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor main 127.0.0.1 {primary} 2\n\
             sentinel down-after-milliseconds main {silence_ms}\nsentinel failover-timeout main 3000\n{passwords}\n",
            folder.path().display()
        );
        fs::write(&file, settings).expect("the sentinel's settings");
        let process = start(server().arg(&file).arg("--sentinel"), "+monitor").expect("the sentinel starts");
        Self {
            port,
            process,
            _folder: folder,
        }
    }
}

/// Listens as a sentinel that has found no others, and reports the server on this port as the primary. Returns its own port.
pub(crate) async fn lone_sentinel(primary: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("a bound port").port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(report(client, primary));
        }
    });
    port
}

async fn report(mut client: TcpStream, primary: u16) {
    let primary = primary.to_string();
    let mut query = [0; 1_024];
    while let Ok(length @ 1..) = client.read(&mut query).await {
        let query = String::from_utf8_lossy(&query[..length]).to_lowercase();
        let reply = match () {
            () if query.contains("get-master-addr-by-name") => {
                format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{primary}\r\n", primary.len())
            }
            () if query.contains("sentinels") => "*0\r\n".to_owned(),
            () if query.contains("ping") => "+PONG\r\n".to_owned(),
            () => "-ERR unknown command\r\n".to_owned(),
        };
        if client.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}
