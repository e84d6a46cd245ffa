//! Handlers that block the threads of the runtime while Redis replies.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Empty;
use tokio::{runtime::Builder, task::JoinSet};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{ClientLibrary, FailureMode, Policy, RateLimitLayer, RedisStore, SlidingLog, key};

use crate::support::{PATIENCE, Redis};

/// Four times the default, as all times below are, so that stalls of a busy machine are shorter.
const DEADLINE: Duration = Duration::from_millis(400);

/// The longest time between two replies to pings of a thread outside of the runtime, until the channel is closed. The first one is
/// reported.
fn slowest_ping(port: u16, pong: &Sender<()>, ends: &Receiver<()>) -> io::Result<Duration> {
    let (mut redis, mut slowest) = (TcpStream::connect(("127.0.0.1", port))?, Duration::ZERO);
    let mut last = None::<Instant>;
    loop {
        redis.write_all(b"PING\r\n")?;
        redis.read_exact(&mut [0; b"+PONG\r\n".len()])?;
        let now = Instant::now();
        match last.replace(now) {
            Some(last) => slowest = slowest.max(now - last),
            None => pong.send(()).expect("it is awaited"),
        }
        if ends.recv_timeout(DEADLINE / 100) != Err(RecvTimeoutError::Timeout) {
            return Ok(slowest.max(now.elapsed()));
        }
    }
}

/// How many of 100 requests at once reach a handler that blocks its thread, behind a limit of 5 a minute, while the machine is not so
/// busy that a reply of Redis comes late.
fn admitted(library: ClientLibrary, workers: usize, blocks: Duration) -> usize {
    for _ in 0..20 {
        let redis = Redis::start();
        let ((ends, end), (sender, pong)) = (mpsc::channel(), mpsc::channel());
        let port = redis.port();
        let pings = thread::spawn(move || slowest_ping(port, &sender, &end));
        pong.recv().expect("Redis replies");
        let admitted = admitted_in_a_round(&redis, library, workers, blocks);
        drop(ends);
        let slowest = pings.join().expect("no panic").expect("Redis replies");
        if slowest < DEADLINE / 2 {
            return admitted;
        }
    }
    panic!("each reply of Redis comes late");
}

fn admitted_in_a_round(redis: &Redis, library: ClientLibrary, workers: usize, blocks: Duration) -> usize {
    let runtime = Builder::new_multi_thread()
        .worker_threads(workers)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let builder = RedisStore::builder().client_library(library).deadline(DEADLINE);
        let store = builder
            .connect_timeout(PATIENCE)
            .url(&redis.url())
            .connect()
            .await
            .expect("the URL is good");
        store.ready().await.expect("Redis replies");

        let admitted = Arc::new(AtomicUsize::new(0));
        let reached = admitted.clone();
        let policy = Policy::new("login", SlidingLog::per_minute(5)).key(key::constant("k"));
        let service = RateLimitLayer::new(store, policy.failure_mode(FailureMode::Open)).layer(service_fn(
            move |_: Request<String>| {
                reached.fetch_add(1, Ordering::Relaxed);
                // A password hash on the thread of the runtime.
                thread::sleep(blocks);
                std::future::ready(Ok::<_, std::convert::Infallible>(Response::new(Empty::<Bytes>::new())))
            },
        ));

        let mut requests = JoinSet::new();
        for _ in 0..100 {
            requests.spawn(service.clone().oneshot(Request::new(String::new())));
        }
        for response in requests.join_all().await {
            response.expect("the service does not fail");
        }
        admitted.load(Ordering::Relaxed)
    })
}

#[test]
fn handlers_that_block_two_threads_for_a_while_let_no_request_pass_uncounted() {
    for library in [ClientLibrary::Fred, ClientLibrary::RedisRs] {
        for blocks in [DEADLINE * 3 / 5, DEADLINE * 6 / 5] {
            assert_eq!(admitted(library, 2, blocks), 5, "{library:?}, {blocks:?}");
        }
    }
}

#[test]
fn handlers_that_block_four_threads_for_longer_than_the_deadline_let_no_request_pass_uncounted() {
    for library in [ClientLibrary::Fred, ClientLibrary::RedisRs] {
        assert_eq!(admitted(library, 4, DEADLINE * 5 / 2), 5, "{library:?}");
    }
}

#[test]
fn a_handler_that_blocks_the_only_thread_lets_no_request_pass_uncounted() {
    for library in [ClientLibrary::Fred, ClientLibrary::RedisRs] {
        assert_eq!(admitted(library, 1, DEADLINE * 5 / 2), 5, "{library:?}");
    }
}
