use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
    time::sleep,
};

/// A way to a Redis that the test can trouble.
pub(crate) struct Proxy {
    port: u16,
    trouble: Arc<Trouble>,
    accepting: JoinHandle<()>,
}

struct Trouble {
    /// Where new connections go.
    target: AtomicU16,
    /// The next answer is lost, and the connection with it.
    cut: AtomicBool,
    delay_ms: AtomicU64,
    /// No answer is carried.
    held: watch::Sender<bool>,
    /// Connections opened before this many are silent.
    silent: watch::Sender<u64>,
    opened: AtomicU64,
}

impl Proxy {
    pub(crate) async fn start(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("a bound port").port();
        let trouble = Arc::new(Trouble {
            target: target.into(),
            cut: AtomicBool::new(false),
            delay_ms: AtomicU64::new(0),
            held: watch::Sender::new(false),
            silent: watch::Sender::new(0),
            opened: AtomicU64::new(0),
        });
        let shared = trouble.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(forward(client, shared.clone()));
            }
        });
        Self {
            port,
            trouble,
            accepting,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// How many connections there have been.
    pub(crate) fn opened(&self) -> u64 {
        self.trouble.opened.load(Ordering::Relaxed)
    }

    /// Loses the server's next answer, and the connection that it was to come through.
    pub(crate) fn cut_before_the_next_answer(&self) {
        self.trouble.cut.store(true, Ordering::Relaxed);
    }

    /// Whether [`cut_before_the_next_answer`](Self::cut_before_the_next_answer) has happened.
    pub(crate) fn has_cut(&self) -> bool {
        !self.trouble.cut.load(Ordering::Relaxed)
    }

    /// Holds up each answer.
    pub(crate) fn delay(&self, by: Duration) {
        self.trouble.delay_ms.store(by.as_millis() as u64, Ordering::Relaxed);
    }

    /// Holds all answers back until what this returns is dropped.
    pub(crate) fn hold(&self) -> Held<'_> {
        self.trouble.held.send_replace(true);
        Held(&self.trouble)
    }

    /// Goes to this port with new connections.
    pub(crate) fn go_to(&self, target: u16) {
        self.trouble.target.store(target, Ordering::Relaxed);
    }

    /// Carries nothing anymore over the connections that there are, and leaves them open; new ones go to this port.
    pub(crate) fn blackhole_and_go_to(&self, target: u16) {
        self.go_to(target);
        self.trouble.silent.send_replace(self.opened());
    }

    /// Carries nothing anymore over the connection that was opened first, and leaves it open.
    pub(crate) fn blackhole_the_first(&self) {
        self.trouble.silent.send_replace(1);
    }

    /// Carries nothing anymore, over no connection.
    pub(crate) fn partition(&self) {
        self.trouble.silent.send_replace(u64::MAX);
    }

    /// Carries what comes over new connections.
    pub(crate) fn heal(&self) {
        self.trouble.silent.send_replace(self.opened());
    }
}

/// Answers are held back until this is dropped.
pub(crate) struct Held<'a>(&'a Trouble);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.held.send_replace(false);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn forward(mut client: TcpStream, trouble: Arc<Trouble>) {
    let number = trouble.opened.fetch_add(1, Ordering::Relaxed);
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", trouble.target.load(Ordering::Relaxed))).await else {
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let mut silent = trouble.silent.subscribe();
    let (mut requests, mut answers) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        if *silent.borrow_and_update() > number {
            // Until the test ends.
            return std::future::pending().await;
        }
        let carried = tokio::select! {
            _ = silent.changed() => continue,
            read = client.read(&mut requests) => match read {
                Ok(length @ 1..) => server.write_all(&requests[..length]).await,
                _ => return,
            },
            read = server.read(&mut answers) => match read {
                Ok(_) if trouble.cut.swap(false, Ordering::Relaxed) => return,
                Ok(length @ 1..) => {
                    sleep(Duration::from_millis(trouble.delay_ms.load(Ordering::Relaxed))).await;
                    let _ = trouble.held.subscribe().wait_for(|held| !held).await;
                    client.write_all(&answers[..length]).await
                }
                _ => return,
            },
        };
        if carried.is_err() {
            return;
        }
    }
}
