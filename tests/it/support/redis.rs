use std::{
    collections::BTreeMap,
    env,
    io::{BufRead, BufReader},
    net::{TcpListener, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Mutex,
};

use fred::{
    clients::Client,
    interfaces::ClientLike,
    types::{Builder, ClusterHash, CustomCommand, FromValue, Value, config::Config, config::ReconnectPolicy},
};
use tempfile::TempDir;
use tokio::sync::OnceCell;

/// A Redis server of the test's own, which ends with it.
pub(crate) struct Redis {
    port: u16,
    server: Option<Process>,
    settings: Vec<String>,
    folder: TempDir,
    client: OnceCell<Client>,
}

impl Redis {
    /// Starts a server on a free port and waits until it answers.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with these settings, such as `--requirepass`, `secret`.
    pub(crate) fn start_with(settings: &[&str]) -> Self {
        // Another process may have taken the port meanwhile.
        for _ in 0..5 {
            let mut redis = Self::not_started();
            redis.settings = settings.iter().map(|&setting| setting.to_owned()).collect();
            if settings.contains(&"--cluster-enabled") {
                redis.folder = folder_in_memory();
            }
            redis.server = spawn(redis.port, &redis.settings, &redis.folder);
            if redis.server.is_some() {
                return redis;
            }
        }
        panic!("redis-server does not start on any port");
    }

    /// Starts a server by this command, which is `redis-server` in some environment.
    pub(crate) fn start_by(command: Command) -> Self {
        let mut redis = Self::not_started();
        redis.server = launch(command, redis.port, &[], &redis.folder);
        assert!(redis.server.is_some(), "redis-server does not start");
        redis
    }

    /// A port on which nothing listens until [`restart`](Self::restart).
    pub(crate) fn not_started() -> Self {
        Self {
            port: free_port(),
            server: None,
            settings: Vec::new(),
            folder: tempfile::tempdir().expect("a folder for the server"),
            client: OnceCell::new(),
        }
    }

    /// Gives a server that is not started these settings too.
    pub(crate) fn set(&mut self, settings: &[&str]) {
        self.settings.extend(settings.iter().map(|&setting| setting.to_owned()));
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port())
    }

    /// Ends the server, as a crash would.
    pub(crate) fn kill(&mut self) {
        self.server = None;
    }

    /// Starts the server again after [`kill`](Self::kill), on the same port, with nothing but what it has saved.
    pub(crate) fn restart(&mut self) {
        self.server = spawn(self.port, &self.settings, &self.folder);
        assert!(
            self.server.is_some(),
            "redis-server does not start on port {}",
            self.port
        );
    }

    /// Makes the server hang, with its connections open, until what this returns is dropped.
    pub(crate) fn freeze(&self) -> Frozen<'_> {
        Frozen::new(self.server.as_ref().expect("the server runs"))
    }

    /// The subscriptions to the messages that wake lines.
    pub(crate) async fn wake_subscriptions(&self) -> u64 {
        let channels: Vec<String> = self.command("PUBSUB", ["CHANNELS", "quota:1:wake:*"]).await;
        let [channel] = &channels[..] else { return 0 };
        let (_, subscriptions): (String, u64) = self.command("PUBSUB", ["NUMSUB", channel]).await;
        subscriptions
    }

    /// Closes the connections of all others.
    pub(crate) async fn close_connections(&self) {
        self.command::<()>("CLIENT", ["KILL", "TYPE", "normal", "SKIPME", "yes"])
            .await;
    }

    /// A file of this name in the server's folder.
    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    /// Overrides of so many keys of the policy `mails`, from `key=1` on.
    pub(crate) async fn add_overrides(&self, number: u64) {
        let members = (1..=number).flat_map(|n| {
            [
                n.to_string(),
                format!("mails\nkey={n}\nsliding-log 9/h\n\n9999999999999999"),
            ]
        });
        let words = ["quota:1:overrides", "-1", "#"].map(str::to_owned);
        self.command::<()>("ZADD", words.into_iter().chain(members)).await;
    }

    /// How often each command was run, within scripts too.
    pub(crate) async fn all_calls(&self) -> BTreeMap<String, u64> {
        let statistics: String = self.command("INFO", ["commandstats"]).await;
        let calls = statistics.lines().filter_map(|line| {
            let (name, figures) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            Some((name.to_owned(), figures.split(',').next()?.parse().ok()?))
        });
        calls.collect()
    }

    /// How often this command was run, within scripts too.
    pub(crate) async fn calls(&self, command: &str) -> u64 {
        self.all_calls().await.remove(command).unwrap_or_default()
    }

    /// How often scripts were called.
    pub(crate) async fn script_calls(&self) -> u64 {
        let calls = self.all_calls().await;
        let of = |command: &str| calls.get(command).copied().unwrap_or_default();
        of("evalsha") + of("eval")
    }

    /// Runs a command and panics if Redis does not answer it.
    pub(crate) async fn command<R: FromValue>(
        &self,
        name: &'static str,
        arguments: impl IntoIterator<Item = impl Into<String>>,
    ) -> R {
        let arguments = arguments.into_iter().map(|argument| argument.into().into_bytes());
        self.command_of_bytes(name, arguments).await
    }

    /// Runs a command whose arguments need not be text, and panics if Redis does not answer it.
    pub(crate) async fn command_of_bytes<R: FromValue>(
        &self,
        name: &'static str,
        arguments: impl IntoIterator<Item = Vec<u8>>,
    ) -> R {
        let reply = self.try_command_of_bytes(name, arguments).await;
        reply.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    pub(crate) async fn try_command_of_bytes<R: FromValue>(
        &self,
        name: &'static str,
        arguments: impl IntoIterator<Item = Vec<u8>>,
    ) -> Result<R, fred::error::Error> {
        let arguments: Vec<Value> = arguments
            .into_iter()
            .map(|argument| Value::Bytes(argument.into()))
            .collect();
        let command = CustomCommand::new_static(name, ClusterHash::Random, false);
        self.client().await.custom(command, arguments).await
    }

    /// Runs a command on a connection of its own, and gives back what is printed, such as an error.
    pub(crate) fn cli(&self, command: &[&str]) -> String {
        cli(self.port, None, command)
    }

    /// When a key expires, in milliseconds since the Unix epoch; below 0 if it does not, or is not there.
    ///
    /// Redis 6.2 has no `PEXPIRETIME`.
    pub(crate) async fn expires_at(&self, key: &str) -> i64 {
        const WITHIN_ONE_MILLISECOND: &str = "
            local function ms()
                local time = redis.call('TIME')
                return time[1] * 1000 + math.floor(time[2] / 1000)
            end
            while true do
                local before, left, after = ms(), redis.call('PTTL', KEYS[1]), ms()
                if left < 0 then
                    return left
                elseif before == after then
                    return before + left
                end
            end";
        self.command("EVAL", [WITHIN_ONE_MILLISECOND, "1", key]).await
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
        let mut config = Config::from_url(&self.url()).expect("the URL is good");
        let password = self
            .settings
            .iter()
            .skip_while(|setting| *setting != "--requirepass")
            .nth(1);
        config.password = password.cloned();
        let mut builder = Builder::from_config(config);
        builder
            .set_policy(ReconnectPolicy::new_constant(0, 50))
            .with_connection_config(|connection| {
                connection.max_command_attempts = 1;
                connection.tcp.nodelay = Some(true);
            });
        builder
    }
}

/// A process that is killed when this is dropped.
pub(crate) struct Process(pub(crate) Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server that hangs until this is dropped.
pub(crate) struct Frozen<'a>(&'a Process);

impl<'a> Frozen<'a> {
    pub(super) fn new(server: &'a Process) -> Self {
        signal("STOP", server);
        Self(server)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        signal("CONT", self.0);
    }
}

fn signal(name: &str, server: &Process) {
    let status = Command::new("kill")
        .args([&format!("-{name}"), &server.0.id().to_string()])
        .status();
    assert!(status.is_ok_and(|status| status.success()), "kill -{name} works");
}

/// A folder in memory where the system has one.
///
/// Sentinels and nodes of a cluster write what they learn to a file, and wait until it is on the disk. Where the disk is
/// busy that takes seconds, in which others take them for dead.
pub(crate) fn folder_in_memory() -> TempDir {
    let memory = Path::new("/dev/shm");
    // What is told where to write has a reason, such as to delete it.
    let folder = match memory.is_dir() && env::var_os("TMPDIR").is_none() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    };
    folder.expect("a folder for the server")
}

/// A port that is free, and of a cluster's node the port for its bus, which is 10,000 higher; neither is one that the
/// system gives to outgoing connections.
///
/// A server takes its port later than it is chosen, and a server that is started again takes the same one. Until this
/// process ends, no other test gets it: the UDP port of the same number, which no server uses, is held for that.
pub(crate) fn free_port() -> u16 {
    static HELD: Mutex<Vec<UdpSocket>> = Mutex::new(Vec::new());

    fn hold(port: u16) -> Option<UdpSocket> {
        let held = UdpSocket::bind(("127.0.0.1", port)).ok()?;
        TcpListener::bind(("127.0.0.1", port)).is_ok().then_some(held)
    }
    std::iter::repeat_with(|| fastrand::u16(10_000..22_000))
        .take(1_000)
        .find_map(|port| {
            let ports = [hold(port)?, hold(port + 10_000)?];
            HELD.lock().expect("no test panics while it holds a port").extend(ports);
            Some(port)
        })
        .expect("a free port")
}

/// Runs a command on a server, with this password.
pub(crate) fn cli(port: u16, password: Option<&str>, command: &[&str]) -> String {
    let output = Command::new("redis-cli")
        .args(["-p", &port.to_string()])
        .args(command)
        .env("REDISCLI_AUTH", password.unwrap_or_default())
        .output()
        .expect("redis-cli starts; `.ci/test` installs it");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A server that accepts connections; `None` if it ends before, since the port is taken.
fn spawn(port: u16, settings: &[String], folder: &TempDir) -> Option<Process> {
    launch(server(), port, settings, folder)
}

/// The program of the server: `redis-server`, unless this variable of the environment has the path of another one.
pub(crate) fn server() -> Command {
    Command::new(env::var_os("TOWER_QUOTA_REDIS_SERVER").unwrap_or_else(|| "redis-server".into()))
}

fn launch(mut command: Command, port: u16, settings: &[String], folder: &TempDir) -> Option<Process> {
    let server = command
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no"])
        .args(settings)
        .arg("--dir")
        .arg(folder.path());
    start(server, "eady to accept connections")
}

/// A server that has written this to its log; `None` if it ends before.
///
/// An answer on its port would prove less, since it could be another server's.
pub(crate) fn start(server: &mut Command, ready: &str) -> Option<Process> {
    let server = server.stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut server = Process(server.expect("redis-server starts; `.ci/test` installs it"));
    let log = BufReader::new(server.0.stdout.take().expect("a pipe"));
    let mut lines = log.lines().map_while(Result::ok);
    lines.any(|line| line.contains(ready)).then_some(server)
}
