use std::{
    convert::Infallible,
    future::{Ready, poll_fn, ready},
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use axum::{
    BoxError, Router,
    body::{Body, Bytes, HttpBody},
    extract::ConnectInfo,
    routing::get,
};
use fastrand::Rng;
use http::{Request, Response, StatusCode};
use tokio::task::{JoinSet, yield_now};
use tower_service::Service;

use crate::{figures::Latencies, traffic::Traffic};

type Later<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

const CALLERS: usize = 256;
/// Requests after which a caller yields, if their responses are ready at once.
const TURN: usize = 64;

/// A service under load.
pub trait Subject {
    /// Load of 256 callers, each of which sends its next request after the response to the last one.
    fn closed_loop<'a>(&'a self, traffic: &'a Arc<Traffic>, warm_up: Duration, time: Duration) -> Later<'a, Load>;

    /// Requests at random times at this mean rate, independent of responses. A latency counts from the time at which the
    /// request was due.
    fn open_loop<'a>(&'a self, traffic: &'a Arc<Traffic>, per_second: f64, time: Duration) -> Later<'a, Latencies>;

    /// The latency of one request.
    fn alone(&self, address: SocketAddr) -> Later<'_, Duration>;

    /// Sequential requests to a service whose responses are ready at once.
    fn at_once(&self, traffic: &Traffic, requests: u64) -> Load;

    /// An axum router with this service at `/`. Requests come from the addresses of the traffic.
    fn router(&self, traffic: &Arc<Traffic>) -> Router;
}

/// Result of a load.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    /// Responses with 200.
    pub admitted: u64,
    /// Responses with 429.
    pub denied: u64,
    /// Other responses: the limiter failed. On an idle machine there are none.
    pub failed: u64,
    /// Duration of the load.
    pub time: Duration,
}

impl Load {
    /// Number of decisions.
    pub fn requests(&self) -> u64 {
        self.admitted + self.denied
    }

    /// Decisions per second.
    pub fn per_second(&self) -> f64 {
        self.requests() as f64 / self.time.as_secs_f64()
    }

    /// Nanoseconds per sequential request.
    pub fn nanoseconds(&self) -> f64 {
        self.time.as_secs_f64() * 1e9 / self.requests() as f64
    }
}

/// Counts of responses, which can be read while a load runs.
#[derive(Default)]
struct Tally {
    admitted: AtomicU64,
    denied: AtomicU64,
    failed: AtomicU64,
    ended: AtomicBool,
}

impl Tally {
    fn add(&self, status: StatusCode) {
        match status {
            StatusCode::OK => self.admitted.fetch_add(1, Relaxed),
            StatusCode::TOO_MANY_REQUESTS => self.denied.fetch_add(1, Relaxed),
            _ => self.failed.fetch_add(1, Relaxed),
        };
    }

    fn load(&self, time: Duration) -> Load {
        Load {
            admitted: self.admitted.load(Relaxed),
            denied: self.denied.load(Relaxed),
            failed: self.failed.load(Relaxed),
            time,
        }
    }
}

fn request(address: SocketAddr) -> Request<Body> {
    let mut request = Request::new(Body::empty());
    request.extensions_mut().insert(ConnectInfo(address));
    request
}

async fn send<S, B>(service: &mut S, address: SocketAddr) -> StatusCode
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    let request = request(address);
    let Ok(()) = poll_fn(|cx| service.poll_ready(cx)).await;
    let Ok(response) = service.call(request).await;
    response.status()
}

impl<S, B> Subject for S
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    fn closed_loop<'a>(&'a self, traffic: &'a Arc<Traffic>, warm_up: Duration, time: Duration) -> Later<'a, Load> {
        Box::pin(async move {
            let tally = Arc::new(Tally::default());
            let mut callers = JoinSet::new();
            for _ in 0..CALLERS {
                let (mut service, traffic, tally) = (self.clone(), traffic.clone(), tally.clone());
                callers.spawn(async move {
                    loop {
                        for _ in 0..TURN {
                            if tally.ended.load(Relaxed) {
                                return;
                            }
                            tally.add(send(&mut service, traffic.next_address()).await);
                        }
                        yield_now().await;
                    }
                });
            }

            tokio::time::sleep(warm_up).await;
            let before = tally.load(warm_up);
            let start = Instant::now();
            tokio::time::sleep(time).await;
            let after = tally.load(start.elapsed());
            tally.ended.store(true, Relaxed);
            while let Some(caller) = callers.join_next().await {
                caller.expect("no caller panics");
            }

            Load {
                admitted: after.admitted - before.admitted,
                denied: after.denied - before.denied,
                failed: after.failed - before.failed,
                time: after.time,
            }
        })
    }

    fn open_loop<'a>(&'a self, traffic: &'a Arc<Traffic>, per_second: f64, time: Duration) -> Later<'a, Latencies> {
        Box::pin(async move {
            let requests = (per_second * time.as_secs_f64()).ceil() as usize;
            let took: Arc<[AtomicU64]> = (0..requests).map(|_| AtomicU64::new(0)).collect();
            let mut random = Rng::with_seed(4);
            let mut callers = JoinSet::new();
            let mut due = Instant::now();

            for turn in 0..requests {
                due += Duration::from_secs_f64(-(1.0 - random.f64()).ln() / per_second);
                // A busy loop, because the timer of the runtime has a resolution of a millisecond.
                while Instant::now() < due {
                    while callers.try_join_next().is_some() {}
                    yield_now().await;
                }
                if turn % TURN == 0 {
                    yield_now().await;
                }

                let (mut service, address, took) = (self.clone(), traffic.next_address(), took.clone());
                callers.spawn(async move {
                    send(&mut service, address).await;
                    took[turn].store(due.elapsed().as_nanos() as u64, Relaxed);
                });
            }
            while let Some(caller) = callers.join_next().await {
                caller.expect("no caller panics");
            }

            let settled = took.iter().skip(requests / 5);
            Latencies::new(settled.map(|took| Duration::from_nanos(took.load(Relaxed))).collect())
        })
    }

    fn alone(&self, address: SocketAddr) -> Later<'_, Duration> {
        Box::pin(async move {
            let mut service = self.clone();
            let start = Instant::now();
            send(&mut service, address).await;
            start.elapsed()
        })
    }

    fn at_once(&self, traffic: &Traffic, requests: u64) -> Load {
        let tally = Tally::default();
        let mut service = self.clone();
        let mut context = Context::from_waker(Waker::noop());
        let start = Instant::now();
        for _ in 0..requests {
            match pin!(send(&mut service, traffic.next_address())).poll(&mut context) {
                Poll::Ready(status) => tally.add(status),
                Poll::Pending => panic!("the response of this service is not ready at once"),
            }
        }
        tally.load(start.elapsed())
    }

    fn router(&self, traffic: &Arc<Traffic>) -> Router {
        let (service, traffic) = (self.clone(), traffic.clone());
        let handler = move || {
            let (mut service, address) = (service.clone(), traffic.next_address());
            async move {
                let Ok(()) = poll_fn(|cx| service.poll_ready(cx)).await;
                let Ok(response) = service.call(request(address)).await;
                response
            }
        };
        Router::new().route("/", get(handler))
    }
}

/// The limited service: responds at once, without content.
#[derive(Clone, Copy, Debug)]
pub struct Bare;

impl Service<Request<Body>> for Bare {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        ready(Ok(Response::new(Body::empty())))
    }
}
