use std::{
    fs,
    process::{Child, Command, Stdio},
};

use tempfile::TempDir;

use super::{Redis, eventually, redis::free_port};

/// A primary with two replicas, and three sentinels who watch them.
pub(crate) struct Sentinel {
    pub(crate) primary: Redis,
    pub(crate) replicas: Vec<Redis>,
    watchers: Vec<Watcher>,
}

struct Watcher {
    port: u16,
    process: Child,
    _folder: TempDir,
}

impl Sentinel {
    /// Starts all of them and waits until the sentinels know each other and the replicas.
    pub(crate) async fn start() -> Self {
        Self::start_with(&[], "").await
    }

    /// Starts all of them, where the servers have these settings, and the sentinels this one.
    pub(crate) async fn start_with(settings: &[&str], watching: &str) -> Self {
        let all = [
            &["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"],
            settings,
        ]
        .concat();
        let primary = Redis::start_with(&all);
        let port = primary.port().to_string();
        let replica = [&all[..], &["--replicaof", "127.0.0.1", &port]].concat();
        let replicas: Vec<_> = (0..2).map(|_| Redis::start_with(&replica)).collect();
        let watchers = (0..3).map(|_| Watcher::start(primary.port(), watching)).collect();

        let sentinel = Self {
            primary,
            replicas,
            watchers,
        };
        for watcher in &sentinel.watchers {
            eventually("the sentinel knows all the others", async || {
                let primary = watcher.ask(&["SENTINEL", "master", "main"]);
                let says = |name: &str, value: &str| primary.contains(&format!("{name}\n{value}\n"));
                says("num-slaves", "2") && says("num-other-sentinels", "2")
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

    /// Ends the sentinel that the URL names first.
    pub(crate) fn kill_the_first_watcher(&mut self) {
        let _ = self.watchers[0].process.kill();
        let _ = self.watchers[0].process.wait();
    }

    /// The replica that has become the primary, as soon as there is one.
    pub(crate) async fn promoted(&self) -> &Redis {
        let mut promoted = None;
        eventually("a replica is the primary", async || {
            for replica in &self.replicas {
                let replication: String = replica.command("INFO", ["replication"]).await;
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
    fn start(primary: u16, watching: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the sentinel");
        let file = folder.path().join("sentinel.conf");
        let port = free_port();
        let settings = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor main 127.0.0.1 {primary} 2\n\
             sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n{watching}\n",
            folder.path().display()
        );
        fs::write(&file, settings).expect("the sentinel's settings");
        let process = Command::new("redis-server")
            .arg(&file)
            .arg("--sentinel")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server starts; `.ci/test` installs it");
        Self {
            port,
            process,
            _folder: folder,
        }
    }

    fn ask(&self, command: &[&str]) -> String {
        let output = Command::new("redis-cli")
            .args(["-p", &self.port.to_string()])
            .args(command)
            .output()
            .expect("redis-cli starts; `.ci/test` installs it");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
