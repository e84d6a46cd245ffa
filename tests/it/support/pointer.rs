use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU16, AtomicU64, Ordering},
};

use tokio::{
    io::{self, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

/// A cluster node that decides nothing: it says which node has all slots, and redirects to it.
pub(crate) struct Pointer {
    port: u16,
    said: Arc<Said>,
    accepting: JoinHandle<()>,
}

struct Said {
    /// The port of the node that `CLUSTER SLOTS` names.
    primary: AtomicU16,
    /// The port of a replica of that node, if there is one: the slots are many ranges then.
    replica: AtomicU16,
    /// The reply to calls.
    reply: Mutex<String>,
    /// How often it was asked for the slots.
    lookups: AtomicU64,
}

impl Pointer {
    /// It names the node at this port.
    pub(crate) async fn start(primary: u16) -> Self {
        Self::start_for(Some(primary), primary).await
    }

    /// It names itself, and redirects to the node at this port.
    pub(crate) async fn redirecting(to: u16) -> Self {
        Self::start_for(None, to).await
    }

    async fn start_for(primary: Option<u16>, redirected: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("a bound port").port();
        let said = Arc::new(Said {
            primary: primary.unwrap_or(port).into(),
            replica: AtomicU16::new(0),
            reply: Mutex::new(moved(redirected)),
            lookups: AtomicU64::new(0),
        });
        let shared = said.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(converse(client, shared.clone()));
            }
        });
        Self { port, said, accepting }
    }

    /// Names a replica too, in many ranges of slots.
    pub(crate) fn name_replica(&self, replica: &Self) {
        self.said.replica.store(replica.port, Ordering::Relaxed);
    }

    pub(crate) fn url(&self) -> String {
        format!("redis-cluster://127.0.0.1:{}", self.port)
    }

    /// Names the node at this port from now on.
    pub(crate) fn point_to(&self, primary: u16) {
        self.said.primary.store(primary, Ordering::Relaxed);
    }

    /// Redirects to the node at this port from now on.
    pub(crate) fn redirect_to(&self, node: u16) {
        self.refuse_with(&moved(node));
    }

    /// Replies to calls with this error from now on.
    pub(crate) fn refuse_with(&self, error: &str) {
        error.clone_into(&mut self.said.reply.lock().expect("no panic"));
    }

    /// How often it was asked for the slots.
    pub(crate) fn lookups(&self) -> u64 {
        self.said.lookups.load(Ordering::Relaxed)
    }
}

impl Drop for Pointer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn converse(client: TcpStream, said: Arc<Said>) -> io::Result<()> {
    let mut client = BufReader::new(client);
    loop {
        let reply = match command(&mut client).await?.as_str() {
            "HELLO" | "CLIENT" | "PING" | "READONLY" => "+OK\r\n".to_owned(),
            "CLUSTER" => {
                said.lookups.fetch_add(1, Ordering::Relaxed);
                slots(
                    said.primary.load(Ordering::Relaxed),
                    said.replica.load(Ordering::Relaxed),
                )
            }
            _ => format!("-{}\r\n", said.reply.lock().expect("no panic")),
        };
        client.write_all(reply.as_bytes()).await?;
    }
}

fn moved(to: u16) -> String {
    format!("MOVED 1 127.0.0.1:{to}")
}

/// The reply to `CLUSTER SLOTS`.
fn slots(primary: u16, replica: u16) -> String {
    let node = |port| format!("*3\r\n$9\r\n127.0.0.1\r\n:{port}\r\n$2\r\nid\r\n");
    let (ranges, nodes) = match replica {
        0 => (1, vec![node(primary)]),
        _ => (64, vec![node(primary), node(replica)]),
    };
    let length = 16_384 / ranges;
    let range = |first: u32| {
        let (items, last) = (2 + nodes.len(), first + length - 1);
        format!("*{items}\r\n:{first}\r\n:{last}\r\n{}", nodes.concat())
    };
    let all: String = (0..ranges).map(|number| range(number * length)).collect();
    format!("*{ranges}\r\n{all}")
}

/// Reads a command and returns its name, in upper case.
async fn command(client: &mut BufReader<TcpStream>) -> io::Result<String> {
    let words = number(client).await?;
    let mut name = None;
    for _ in 0..words {
        let mut word = vec![0; number(client).await? + "\r\n".len()];
        client.read_exact(&mut word).await?;
        name.get_or_insert_with(|| String::from_utf8_lossy(&word).trim_end().to_uppercase());
    }
    name.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Reads the line before an array or a string: `*3` or `$7`.
async fn number(client: &mut BufReader<TcpStream>) -> io::Result<usize> {
    let mut line = String::new();
    client.read_line(&mut line).await?;
    let number = line.trim_end().get(1..).and_then(|number| number.parse().ok());
    number.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}
