use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use fred::{
    clients::Client,
    interfaces::ClientLike,
    types::{Builder, ClusterHash, CustomCommand, FromValue, config::Config, config::ReconnectPolicy},
};
use tempfile::TempDir;
use tokio::sync::OnceCell;

/// A Redis server of the test's own, which ends with it.
pub(crate) struct Redis {
    port: u16,
    server: Child,
    folder: TempDir,
    client: OnceCell<Client>,
}

impl Redis {
    /// Starts a server on a free port and waits until it answers.
    pub(crate) fn start() -> Self {
        let port = free_port();
        let folder = tempfile::tempdir().expect("a folder for the server");
        let server = spawn(port, &folder);
        let redis = Self {
            port,
            server,
            folder,
            client: OnceCell::new(),
        };
        redis.wait_until_it_answers();
        redis
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port())
    }

    /// Ends the server, as a crash would.
    pub(crate) fn kill(&mut self) {
        self.server.kill().expect("the server can be killed");
        self.server.wait().expect("the server ends");
    }

    /// Starts the server again after [`kill`](Self::kill), empty, on the same port.
    pub(crate) fn restart(&mut self) {
        self.server = spawn(self.port, &self.folder);
        self.wait_until_it_answers();
    }

    /// Runs a command and panics if Redis does not answer it.
    pub(crate) async fn command<R: FromValue>(
        &self,
        name: &'static str,
        arguments: impl IntoIterator<Item = impl Into<String>>,
    ) -> R {
        let arguments: Vec<String> = arguments.into_iter().map(Into::into).collect();
        let command = CustomCommand::new_static(name, ClusterHash::Random, false);
        self.client()
            .await
            .custom(command, arguments)
            .await
            .unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// A client for the tests' own commands.
    pub(crate) async fn client(&self) -> &Client {
        self.client
            .get_or_init(|| async {
                let client = self.builder().build().expect("a client");
                client.init().await.expect("the server answers");
                client
            })
            .await
    }

    /// A fred client as an application would build it for the limiter.
    pub(crate) fn builder(&self) -> Builder {
        let mut builder = Builder::from_config(Config::from_url(&self.url()).expect("the URL is good"));
        builder
            .set_policy(ReconnectPolicy::new_constant(0, 50))
            .with_connection_config(|connection| connection.max_command_attempts = 1);
        builder
    }

    fn wait_until_it_answers(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let ping = Command::new("redis-cli")
                .args(["-p", &self.port.to_string(), "ping"])
                .output();
            if ping.is_ok_and(|output| output.stdout.starts_with(b"PONG")) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "redis-server on port {} does not answer",
                self.port
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("a bound port").port()
}

fn spawn(port: u16, folder: &TempDir) -> Child {
    Command::new("redis-server")
        .args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ])
        .arg("--dir")
        .arg(folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("redis-server starts; `.ci/test` installs it")
}
