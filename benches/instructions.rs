//! Instructions of one request through the layer, the same on every run. The argument is the number of requests, so the
//! instructions of one are the difference of two runs divided by the difference of their numbers:
//!
//! ```sh
//! cargo bench --bench instructions --no-run # prints where the program is
//! for n in 10000 20000; do
//!     valgrind --tool=callgrind --callgrind-out-file=/dev/null <program> admitted $n
//! done
//! ```
//!
//! | path | requests |
//! | --- | --- |
//! | `bare` | to the service without the layer |
//! | `admitted` | admitted, with header fields and extensions |
//! | `fields`, `extensions`, `least` | admitted, with header fields only, with extensions only, with neither |
//! | `metrics` | as `admitted`, with a recorder of atomics; the others have none. Features are those of the tests, which are all |
//! | `plans` | as `admitted`, under a limit that is chosen for each request |
//! | `live`, `reloaded` | as `least`, by a policy that follows a file, before and after a reload |
//! | `denied` | denied by a `MemoryStore` |
//! | `cached` | denied by the deny cache of a `RedisStore`; starts a Redis server |
//! | `alone` | admitted by a `RedisStore`, one after the other; starts a Redis server, whose replies arrive in their own time, so that the result varies by a few percent |

#[path = "support/bare.rs"]
mod bare;
#[cfg(feature = "metrics")]
#[path = "support/recorder.rs"]
mod recorder;

use std::{
    env,
    future::poll_fn,
    time::{Duration, Instant},
};

use http::{StatusCode, request::Parts};
use tower::{Layer, Service};
use tower_quota::{Headers, Limit, MemoryStore, Policies, Policy, RateLimitLayer, RedisStore, key, key::PeerAddr};

use self::bare::{Bare, admitting, denying, limited, request, send};

fn main() {
    let mut arguments = env::args().skip(1).filter(|argument| argument != "--bench");
    let path = arguments.next().unwrap_or_else(|| "admitted".to_owned());
    let requests = arguments
        .next()
        .map_or(10_000, |n| n.parse().expect("a number of requests"));

    if path == "cached" || path == "alone" {
        let limit = if path == "cached" { denying() } else { admitting() };
        bench_harness::run(async |server| through_redis(&server.url(), limit, requests).await);
        return;
    }

    let (fields, extensions) = match path.as_str() {
        "fields" => (Headers::Draft08, false),
        "extensions" => (Headers::None, true),
        "least" | "live" | "reloaded" => (Headers::None, false),
        "bare" | "admitted" | "metrics" | "plans" | "denied" => (Headers::Draft08, true),
        other => panic!("`{other}` is not a path; see the head of this file"),
    };
    let (limit, answer) = match path.as_str() {
        "denied" => (denying(), StatusCode::TOO_MANY_REQUESTS),
        _ => (admitting(), StatusCode::OK),
    };
    #[cfg(feature = "metrics")]
    if path == "metrics" {
        metrics::set_global_recorder(recorder::Atomics).expect("no other recorder");
    }
    let layer = match path.as_str() {
        "live" => live(0),
        "reloaded" => live(1),
        "plans" => RateLimitLayer::new(
            MemoryStore::new(),
            Policy::with_limit_fn("bench", by_peer).key(key::ip()),
        ),
        _ => limited(limit),
    };
    let layer = layer.headers(fields).extensions(extensions);
    let mut service = layer.layer(Bare);
    send(&mut service, request(1));
    let start = Instant::now();
    for _ in 0..requests {
        let status = match path.as_str() {
            "bare" => send(&mut Bare, request(1)),
            _ => send(&mut service, request(1)),
        };
        assert_eq!(status, answer);
    }
    println!("{requests} requests, {path}, {:?} each", start.elapsed() / requests);
}

/// A layer that follows a file, which was reloaded so often.
fn live(reloads: u32) -> RateLimitLayer {
    let file = format!(
        r#"{{"policies": {{"bench": {{"limit": "{}", "key": "ip"}}}}}}"#,
        admitting()
    );
    let policies = || serde_json::from_str::<Policies>(&file).expect("a policy");
    let live = policies();
    let layer = RateLimitLayer::new(MemoryStore::new(), live.get("bench").expect("a policy"));
    for _ in 0..reloads {
        live.replace(&policies()).expect("a policy");
    }
    layer
}

/// The limit of a plan, as an extension of the request has it.
fn by_peer(parts: &Parts) -> Limit {
    let pro = parts
        .extensions
        .get::<PeerAddr>()
        .is_some_and(|peer| peer.0.port() == 4711);
    if pro { admitting() } else { denying() }
}

/// One request after the other. A denial is cached for 1 s, so that one denied request in some thousand is sent to Redis.
async fn through_redis(url: &str, limit: Limit, requests: u32) {
    let store = RedisStore::builder().deadline(Duration::from_secs(10));
    let store = store.url(url).connect().await.expect("a store");
    let answer = match limit == denying() {
        true => StatusCode::TOO_MANY_REQUESTS,
        false => StatusCode::OK,
    };
    let policy = Policy::new("bench", limit).key(key::ip());
    let mut service = RateLimitLayer::new(store, policy).layer(Bare);

    let start = Instant::now();
    for n in 0..=requests {
        let Ok(()) = poll_fn(|cx| service.poll_ready(cx)).await;
        let Ok(response) = service.call(request(1)).await;
        assert!(n == 0 || response.status() == answer);
    }
    println!("{requests} requests, {:?} each", start.elapsed() / requests);
}
