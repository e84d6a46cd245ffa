//! A server that is terminated sends what its requests owe to the store before its process ends.

use std::{
    convert::Infallible,
    env,
    io::{BufRead, BufReader, Lines, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{ChildStdout, Command, Stdio},
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, State},
    response::{
        IntoResponse,
        sse::{Event, Sse},
    },
    routing::get,
};
use tokio::{
    net::TcpListener,
    runtime::Builder,
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tower_quota::{
    Concurrency, Decision, Key, Limiter, Policy, RateLimitLayer, Receipt, RedisStore, SlidingLog, key, store::Store,
};

use crate::support::{PATIENCE, Process, Redis, connected, patient, this_binary};

/// The environment variable with the URL of the Redis of a server, and how long it waits for it in the end.
const SETUP: &str = "TOWER_QUOTA_TERMINATED";
/// The start of each line that is a report. The test harness prints other lines.
const REPORT: &str = "server: ";
/// The tokens that are charged at the check, and in the end.
const ESTIMATE: u64 = 30;
const ACTUAL: u64 = 7;

fn streams() -> Policy<()> {
    Policy::new("streams", Concurrency::new(1).lease(Duration::from_secs(3_600)))
}

fn tokens() -> Policy<()> {
    Policy::new("tokens", SlidingLog::per_hour(100)).cost(ESTIMATE)
}

/// How a stream ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The server ends it after so many more events.
    Events(u32),
    /// The client leaves before the server is terminated.
    LeftBefore,
    /// The client leaves when the server has been terminated.
    LeftAfter,
}

#[tokio::test]
async fn a_server_that_is_terminated_settles_and_releases_its_last_streams() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let (streams, tokens) = (Limiter::new(store.clone(), streams()), Limiter::new(store, tokens()));
    for round in 0..25 {
        let end = match round % 5 {
            3 => End::LeftBefore,
            4 => End::LeftAfter,
            _ => End::Events(round),
        };
        let mut server = Server::start(&redis, PATIENCE);
        let path = format!(
            "/{round}/{}",
            if let End::Events(events) = end {
                events
            } else {
                u32::MAX
            }
        );
        let mut stream = server.stream(&path);
        match end {
            End::LeftBefore => {
                drop(stream);
                server.terminate();
            }
            End::LeftAfter => {
                server.terminate();
                drop(stream);
            }
            End::Events(_) => {
                server.terminate();
                stream.read_to_end(&mut Vec::new()).expect("the stream ends");
            }
        }
        assert_eq!(server.outcome().0, "all is confirmed", "round {round}, {end:?}");

        let left = streams.peek(Key::path(&path)).await.expect("Redis replies");
        assert_eq!(left.remaining(), 1, "a lease of round {round}, {end:?}");
        let left = tokens.peek(Key::path(&path)).await.expect("Redis replies");
        assert_eq!(left.remaining(), 100 - ACTUAL, "tokens of round {round}, {end:?}");
    }
}

#[test]
fn a_server_whose_redis_hangs_ends_in_time_and_reports_what_is_lost() {
    const WITHIN: Duration = Duration::from_millis(300);
    let redis = Redis::start();
    let mut server = Server::start(&redis, WITHIN);
    let mut stream = server.stream("/0/0");
    let _frozen = redis.freeze();
    server.terminate();
    stream.read_to_end(&mut Vec::new()).expect("the stream ends");

    let (outcome, took) = server.outcome();
    assert_eq!(
        outcome,
        "the store has not confirmed 1 settlement and 1 release of slots, sent or still to be sent"
    );
    assert!(took >= WITHIN, "{took:?}");
}

/// A process of an application: this test binary again, started to run [`a_server_streams_until_it_is_terminated`] only.
struct Server {
    process: Process,
    reports: Lines<BufReader<ChildStdout>>,
    address: SocketAddr,
}

impl Server {
    fn start(redis: &Redis, within: Duration) -> Self {
        let process = this_binary("decide::terminated::a_server_streams_until_it_is_terminated")
            .env(SETUP, format!("{} {}", redis.url(), within.as_millis()))
            .stdout(Stdio::piped())
            .spawn();
        let mut process = Process(process.expect("this binary starts"));
        let mut reports = BufReader::new(process.0.stdout.take().expect("a pipe")).lines();
        let address = report(&mut reports).parse().expect("an address");
        Self {
            process,
            reports,
            address,
        }
    }

    /// A stream whose first event has arrived.
    fn stream(&self, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).expect("the server accepts connections");
        write!(stream, "GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n").expect("it reads the request");
        let mut received = Vec::new();
        while !received.ends_with(b"data: begun\n\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("an event");
            received.extend(byte);
        }
        stream
    }

    fn terminate(&self) {
        let killed = Command::new("kill").arg(self.process.0.id().to_string()).status();
        assert!(killed.expect("kill runs").success());
    }

    /// The outcome of the end, and how long it took.
    fn outcome(&mut self) -> (String, Duration) {
        let report = report(&mut self.reports);
        assert!(self.process.0.wait().expect("it ends").success(), "{report}");
        let (took, outcome) = report.split_once(' ').expect("two words");
        (
            outcome.to_owned(),
            Duration::from_millis(took.parse().expect("a number")),
        )
    }
}

fn report(reports: &mut Lines<BufReader<ChildStdout>>) -> String {
    let reports = reports.map(|line| line.expect("a process prints text"));
    let mut reports = reports.filter_map(|line| line.split_once(REPORT).map(|(_, report)| report.to_owned()));
    reports.next().expect("the process reports")
}

/// In the process.
#[test]
fn a_server_streams_until_it_is_terminated() {
    let Ok(setup) = env::var(SETUP) else { return };
    let (url, within) = setup.split_once(' ').expect("two words");
    // As `#[tokio::main]` does it: the tasks end with the runtime when `main` returns.
    let runtime = Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(serve(url, Duration::from_millis(within.parse().expect("a number"))));
}

async fn serve(url: &str, within: Duration) {
    let store = connected(patient(), url).await;
    let (terminate, terminated) = watch::channel(false);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let mut signals = signal(SignalKind::terminate()).expect("a handler of signals");
    println!("{REPORT}{}", listener.local_addr().expect("a bound port"));
    axum::serve(listener, app(store.clone(), terminated))
        .with_graceful_shutdown(async move {
            signals.recv().await;
            terminate.send_replace(true);
        })
        .await
        .expect("it serves");

    let start = Instant::now();
    let outcome = match store.drained(within).await {
        Ok(()) => "all is confirmed".to_owned(),
        Err(undrained) => undrained.to_string(),
    };
    println!("{REPORT}{} {outcome}", start.elapsed().as_millis());
}

fn app(store: RedisStore, terminated: watch::Receiver<bool>) -> Router {
    let policies = [streams().key(key::path()), tokens().key(key::path())];
    Router::new()
        .route("/{round}/{events}", get(stream))
        .layer(RateLimitLayer::new(store, policies))
        .with_state(terminated)
}

/// An event, and so many more after the server is terminated.
async fn stream(
    Path((round, events)): Path<(u32, u32)>,
    State(mut terminated): State<watch::Receiver<bool>>,
    decision: Decision,
) -> impl IntoResponse {
    let usage = Usage {
        receipt: decision.take_receipt_of("tokens"),
        is_settled_in_a_block: round % 2 == 0,
    };
    let (events_sent, received) = mpsc::channel(1);
    tokio::spawn(async move {
        let _ = events_sent.send("begun").await;
        let _ = terminated.wait_for(|terminated| *terminated).await;
        for _ in 0..events {
            if events_sent.send("more").await.is_err() {
                return;
            }
        }
    });
    Sse::new(ReceiverStream::new(received).map(move |event| {
        let _ = &usage;
        Ok::<_, Infallible>(Event::default().data(event))
    }))
}

/// Settles the tokens when a stream ends or its client has left.
struct Usage {
    receipt: Receipt,
    /// Whether `settle` is called when its task is polled.
    is_settled_in_a_block: bool,
}

impl Drop for Usage {
    fn drop(&mut self) {
        let receipt = std::mem::take(&mut self.receipt);
        match self.is_settled_in_a_block {
            true => tokio::spawn(async move { receipt.settle(ACTUAL).await }),
            false => tokio::spawn(receipt.settle(ACTUAL)),
        };
    }
}
