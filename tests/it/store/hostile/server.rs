use std::{
    io::{self, BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// What a server sends for a command.
pub(super) enum Reply {
    /// As Redis would.
    Honest,
    Bytes(Vec<u8>),
    /// Each of these as often.
    Long(Vec<(Vec<u8>, usize)>),
    /// The first bytes, then the others again and again.
    Endless(Vec<u8>, Vec<u8>),
    /// Nothing, and the connection is closed.
    Close,
}

/// The reply to the nth command of this name, in upper case, of a server at this port.
pub(super) type Behavior = fn(command: &str, nth: u64, port: u16) -> Reply;

/// A server that sends what the test wants.
pub(super) struct HostileServer {
    shared: Arc<Shared>,
}

struct Shared {
    port: u16,
    behavior: Behavior,
    connections: AtomicU64,
    commands: AtomicU64,
    attacks: AtomicU64,
    loses: AtomicBool,
    stopped: AtomicBool,
}

impl HostileServer {
    pub(super) fn start(behavior: Behavior) -> Self {
        let listener = TcpListener::bind("0.0.0.0:0").expect("a free port");
        let shared = Arc::new(Shared {
            port: listener.local_addr().expect("a bound port").port(),
            behavior,
            connections: AtomicU64::new(0),
            commands: AtomicU64::new(0),
            attacks: AtomicU64::new(0),
            loses: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        });
        let accepting = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming() {
                if accepting.stopped.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(client), shared) = (client, accepting.clone()) else {
                    continue;
                };
                accepting.connections.fetch_add(1, Ordering::Relaxed);
                thread::spawn(move || converse(&client, &shared));
            }
        });
        Self { shared }
    }

    pub(super) fn port(&self) -> u16 {
        self.shared.port
    }

    /// Sends no reply to the next call of the script.
    pub(super) fn lose_a_reply(&self) {
        self.shared.loses.store(true, Ordering::Relaxed);
    }

    /// How many connections it has accepted.
    pub(super) fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// How often it has sent what Redis does not.
    pub(super) fn attacks(&self) -> u64 {
        self.shared.attacks.load(Ordering::Relaxed)
    }
}

impl Drop for HostileServer {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.shared.port));
    }
}

/// The pause after each part of an endless reply, so that it has some megabytes a second.
const PAUSE: Duration = Duration::from_millis(4);

fn converse(client: &TcpStream, shared: &Shared) -> io::Result<()> {
    client.set_nodelay(true)?;
    client.set_write_timeout(Some(Duration::from_secs(1)))?;
    let (mut input, mut output) = (BufReader::new(client), client);
    loop {
        let command = command(&mut input)?;
        let nth = shared.commands.fetch_add(1, Ordering::Relaxed);
        let reply = (shared.behavior)(&command, nth, shared.port);
        if !matches!(reply, Reply::Honest) {
            shared.attacks.fetch_add(1, Ordering::Relaxed);
        }
        match reply {
            _ if command == "EVALSHA" && shared.loses.swap(false, Ordering::Relaxed) => {}
            Reply::Honest => output.write_all(honest(&command, shared.port).as_bytes())?,
            Reply::Bytes(bytes) => output.write_all(&bytes)?,
            Reply::Long(parts) => {
                for (bytes, times) in parts {
                    (0..times).try_for_each(|_| output.write_all(&bytes))?;
                }
            }
            Reply::Close => return Ok(()),
            Reply::Endless(first, others) => {
                output.write_all(&first)?;
                while !shared.stopped.load(Ordering::Relaxed) {
                    output.write_all(&others)?;
                    thread::sleep(PAUSE);
                }
            }
        }
    }
}

fn honest(command: &str, port: u16) -> String {
    match command {
        "PING" => "+PONG\r\n".to_owned(),
        "CLIENT" => ":1\r\n".to_owned(),
        "INFO" => "$22\r\nredis_version:7.0.15\r\n\r\n".to_owned(),
        "CLUSTER" => format!("*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:{port}\r\n$2\r\nid\r\n"),
        _ => "+OK\r\n".to_owned(),
    }
}

/// Reads a command and returns its name, in upper case.
fn command(input: &mut impl BufRead) -> io::Result<String> {
    let mut name = None;
    for _ in 0..number(input)? {
        let mut word = vec![0; number(input)? + "\r\n".len()];
        input.read_exact(&mut word)?;
        name.get_or_insert_with(|| String::from_utf8_lossy(&word).trim_end().to_uppercase());
    }
    name.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Reads the line before an array or a string: `*3` or `$7`.
fn number(input: &mut impl BufRead) -> io::Result<usize> {
    let mut line = String::new();
    input.read_line(&mut line)?;
    let number = line.trim_end().get(1..).and_then(|number| number.parse().ok());
    number.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}
