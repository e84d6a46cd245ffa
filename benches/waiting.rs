//! What requests that wait cost: calls of Redis, and time of the client's core. `cargo bench --bench waiting`.

use std::{
    fs,
    time::{Duration, Instant},
};

use bench_harness::{Options, Server, Table, count, decimal};
use tokio::{task::JoinSet, time::sleep};
use tower_quota::{Limit, Limiter, Policy, RedisStore, SlidingLog, TokenBucket};

/// Longer than a request waits here.
const LONGEST: Duration = Duration::from_secs(24 * 3_600);

fn main() {
    let options = Options::from_command_line();
    let (keys, each) = if options.quick { (10, 2) } else { (1_000, 10) };
    bench_harness::run(async |server| {
        let mut table = Table::new(&[
            "requests that wait",
            "admitted within, s",
            "calls",
            "calls each",
            "% of a core",
        ]);
        let bucket = || TokenBucket::per_second(1).into();
        for (keys, each) in [(1, 1), (1, each), (keys, each)] {
            let cost = Waiting::begin(server, keys, each, bucket()).await.admitted().await;
            let title = format!("{each} for each of {keys} keys, of which one is admitted a second");
            table.row(cost.row(title, keys * each));
        }
        let time = if options.quick {
            Duration::from_millis(100)
        } else {
            Duration::from_secs(10)
        };
        let waiting = Waiting::begin(server, keys, each, SlidingLog::per_hour(1).into()).await;
        let cost = waiting.for_(time).await;
        table.row(cost.row(format!("{each} for each of {keys} keys, none admitted"), keys * each));
        println!("{}\n{table}", server.machine());
    });
}

/// Requests for keys without room.
struct Waiting<'a> {
    server: &'a Server,
    requests: JoinSet<()>,
}

struct Cost {
    time: Duration,
    calls: u64,
    /// Seconds of the thread of the client.
    processor: f64,
}

impl<'a> Waiting<'a> {
    async fn begin(server: &'a Server, keys: u32, each: u32, limit: Limit) -> Self {
        server.flush().await;
        let store = RedisStore::builder()
            .deadline(Duration::from_secs(10))
            .url(&server.url());
        let policy = Policy::new("waiting", limit)
            .wait_up_to(LONGEST)
            .max_waiting(u64::from(keys * each));
        let limiter = Limiter::new(store.connect().await.expect("a store"), policy);
        for key in 0..keys {
            assert!(limiter.check(u64::from(key)).await.expect("Redis replies").is_allowed());
        }

        server.commands().await;
        let mut requests = JoinSet::new();
        for key in (0..keys).cycle().take((keys * each) as usize) {
            let limiter = limiter.clone();
            requests.spawn(async move {
                let _permit = limiter.acquire(u64::from(key)).await.expect("it waits long enough");
            });
        }
        Self { server, requests }
    }

    /// What they cost until all are admitted.
    async fn admitted(self) -> Cost {
        let Self { server, requests } = self;
        Cost::of(server, requests.join_all()).await
    }

    /// What they cost in this time, when all have been denied once.
    async fn for_(self, time: Duration) -> Cost {
        sleep(Duration::from_secs(2)).await;
        self.server.commands().await;
        Cost::of(self.server, sleep(time)).await
    }
}

impl Cost {
    async fn of<T>(server: &Server, work: impl Future<Output = T>) -> Self {
        let (began, before) = (Instant::now(), processor_time());
        work.await;
        Self {
            time: began.elapsed(),
            processor: processor_time() - before,
            calls: server.commands().await.scripts,
        }
    }

    fn row(&self, title: String, requests: u32) -> [String; 5] {
        [
            title,
            decimal(self.time.as_secs_f64()),
            count(self.calls as f64),
            format!("{:.2}", self.calls as f64 / f64::from(requests)),
            decimal(100.0 * self.processor / self.time.as_secs_f64()),
        ]
    }
}

/// The seconds for which this thread has run.
fn processor_time() -> f64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|number| number.parse::<f64>().ok());
    nanoseconds.unwrap_or(f64::NAN) / 1e9
}
