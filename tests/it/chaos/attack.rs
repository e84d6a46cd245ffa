//! Attacks by callers: floods of denials, keys made to collide, long fields.

use std::{collections::BTreeSet, time::Duration};

use axum::{Router, routing::any};
use http::{HeaderName, Request, StatusCode, request::Parts};
use tokio::task::JoinSet;
use tower_quota::{
    Key, KeyExtractor, Policy, RateLimitLayer, SlidingLog,
    key::{self, ClientIpSource, PeerAddr},
    store::{self, Charge, Operation, Store},
};

use crate::support::{Algorithm, Clock, Redis, connected, decide, eventually, patient, processor_time, send};

// Floods.

const FLOOD: u64 = 2_000;

/// A number in the reply to `INFO`.
async fn info(redis: &Redis, section: &str, name: &str) -> u64 {
    let text: String = redis.command("INFO", [section]).await;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|value| value.trim().parse().ok()).expect("a number")
}

/// The content of Redis: each key, its value and the time at which it expires.
async fn everything(redis: &Redis) -> Vec<(String, Vec<u8>, i64)> {
    let mut keys: Vec<String> = redis.command("KEYS", ["quota:*"]).await;
    keys.sort();
    let mut everything = Vec::new();
    for key in keys {
        let content = redis.command("DUMP", [&key]).await;
        let expires_at = redis.expires_at(&key).await;
        everything.push((key, content, expires_at));
    }
    everything
}

/// The bytes that Lua has in use. Redis collects its garbage step by step while scripts run, so some is left at any time.
async fn lua_heap(redis: &Redis) -> u64 {
    let _: i64 = redis.command("EVAL", ["collectgarbage() return 0", "0"]).await;
    info(redis, "memory", "used_memory_lua").await
}

#[tokio::test]
async fn a_flood_of_denials_grows_nothing() {
    let redis = Redis::start();
    // From 7.4 on, Redis counts the heap of Lua as data, with what is not collected yet.
    let server: String = redis.command("INFO", ["server"]).await;
    let version = server.lines().find_map(|line| line.strip_prefix("redis_version:"));
    let mut version = version
        .expect("a version")
        .split('.')
        .map_while(|number| number.parse().ok());
    let heap_is_data = (version.next(), version.next()) >= (Some(7_u32), Some(4));
    let clock = Clock::new();
    clock.write_to(&redis).await;
    let store = clock.redis_store(&redis).await;
    for (name, algorithm) in Algorithm::ALL.into_iter().enumerate() {
        let (key, limit) = (name.to_string(), algorithm.limit(FLOOD));
        for cost in [1, FLOOD - 1] {
            assert!(decide(&store, Operation::Check, &limit, &key, cost).await.allowed);
        }
        let before = everything(&redis).await;
        let (memory, lua, scripts) = (
            info(&redis, "memory", "used_memory_dataset").await,
            lua_heap(&redis).await,
            info(&redis, "memory", "number_of_cached_scripts").await,
        );

        // Each costs less than those before, so the deny cache has no denial for it.
        let mut denials = JoinSet::new();
        for cost in (1..=FLOOD).rev() {
            let (store, limit, key) = (store.clone(), limit.clone(), key.clone());
            denials.spawn(async move { decide(&store, Operation::Check, &limit, &key, cost).await.allowed });
        }
        assert!(denials.join_all().await.into_iter().all(|allowed| !allowed), "{limit}");

        assert_eq!(everything(&redis).await, before, "{limit}");
        assert_eq!(info(&redis, "memory", "number_of_cached_scripts").await, scripts);
        // The buffers of the connections shrink after a while.
        eventually(&format!("the memory for {limit} is what it was"), async || {
            let now = info(&redis, "memory", "used_memory_dataset").await;
            let heap = lua_heap(&redis).await;
            assert!(heap < 2_000_000, "{heap} bytes");
            // Redis 6.2 overestimates its overhead: the number can be below 0, and is printed as unsigned.
            let growth = now.wrapping_sub(memory) as i64;
            let garbage = if heap_is_data { heap as i64 - lua as i64 } else { 0 };
            growth - garbage < 50 * FLOOD as i64
        })
        .await;
    }
}

#[tokio::test]
async fn callers_denied_by_a_shared_limit_leave_no_keys_of_their_own() {
    let redis = Redis::start();
    let clock = Clock::new();
    clock.write_to(&redis).await;
    let store = clock.redis_store(&redis).await;
    for (name, algorithm) in Algorithm::ALL.into_iter().enumerate() {
        let limit = algorithm.limit(5);
        let shared = Key::from(name.to_string());
        assert!(
            decide(&store, Operation::Check, &limit, &name.to_string(), 5)
                .await
                .allowed
        );
        let before = everything(&redis).await;

        for caller in 0..100 {
            let own = Key::from(format!("{name} {caller}"));
            let charges = [
                Charge::new("own", &limit, &own, 1),
                Charge::new("test", &limit, &shared, 1),
            ];
            let request = store::StoreRequest::new(Operation::Check, &charges);
            let answer = store.decide(&[request]).await.expect("Redis replies");
            assert!(!answer.outcomes()[0].allowed, "{limit}");
        }
        assert_eq!(everything(&redis).await, before, "{limit}");
    }
}

// Collisions.

#[tokio::test]
async fn keys_made_to_collide_stay_apart() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let policy = Policy::new("p", SlidingLog::per_hour(1)).key((key::header("x-user"), key::path()));
    let app = Router::new()
        .fallback(any(async || "hi"))
        .layer(RateLimitLayer::new(store, policy));

    let long = "a".repeat(4_000);
    let edited = |at: usize| {
        let mut text = long.clone();
        text.replace_range(at..=at, "b");
        text
    };
    let path = format!("/{}", "p".repeat(60_000));
    let mut callers: Vec<(Vec<u8>, String)> = [
        // Delimiters, escapes of them, and escapes of escapes.
        ("a", "/b"),
        ("a|path=", "/b"),
        ("a|path=/b", "/"),
        ("a^7Cpath=/b", "/"),
        ("a%7Cpath=/b", "/"),
        ("a^5E7Cpath=/b", "/"),
        ("a", "/|path=/b"),
        ("a", "/^7Cpath=/b"),
        ("a", "/%257Cpath=/b"),
        ("a", "/%2Fpath=/b"),
        ("a", "/%252Fpath=/b"),
        ("a=b", "/"),
        ("{a}", "/"),
        ("}{a", "/"),
        ("a", "/{a}"),
        ("", "/b"),
        // Long keys with a common start, middle or end.
        (&long, "/"),
        (&edited(0), "/"),
        (&edited(2_000), "/"),
        (&edited(3_999), "/"),
        (&long[1..], "/"),
        (&long, "/b"),
        ("a", &path),
        ("a", &path[..60_000]),
    ]
    .map(|(user, path)| (user.as_bytes().to_vec(), path.to_owned()))
    .into();
    callers.extend([b"\xff".as_slice(), b"\xfe", b"\xef\xbf\xbd", b"^FF"].map(|user| (user.to_vec(), "/".to_owned())));

    let call = async |user: &[u8], path: &str| {
        let request = Request::get(path).header("x-user", user);
        send(&app, request).await.status
    };
    for (user, path) in &callers {
        assert_eq!(
            call(user, path).await,
            StatusCode::OK,
            "{:?} {path:.20}",
            user.escape_ascii().to_string()
        );
    }
    // The hash of a long key, sent as a value, is another key.
    let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
    assert_eq!(keys.len(), callers.len());
    let tags = keys.iter().filter_map(|key| key.split(['{', '}']).nth(1));
    for tag in tags.filter(|tag| tag.starts_with("hash=")) {
        assert_eq!(call(tag.as_bytes(), "/").await, StatusCode::OK);
        assert_eq!(call(b"a", &format!("/{tag}")).await, StatusCode::OK);
    }
    for (user, path) in &callers {
        assert_eq!(call(user, path).await, StatusCode::TOO_MANY_REQUESTS);
    }
}

// Long fields.

/// Contents of a field of this many bytes.
fn fields(bytes: usize) -> Vec<(&'static str, Vec<String>)> {
    let of = |piece: &str| piece.repeat(bytes / piece.len());
    let lines = |piece: &str| vec![of(piece)];
    vec![
        ("one word", lines("a")),
        ("spaces", lines(" ")),
        ("commas", lines(",")),
        ("addresses", lines("192.0.2.1, ")),
        ("addresses of proxies", lines("10.0.0.1, ")),
        ("IPv6 addresses of proxies", lines("[fd00::1]:4711,")),
        ("brackets", lines("[")),
        ("colons", lines(":")),
        ("digits", lines("1")),
        ("elements", lines("for=192.0.2.1;proto=https, ")),
        ("elements of proxies", lines("for=\"[fd00::1]:4711\";by=10.0.0.1,")),
        ("parameters", lines("for=a;")),
        ("quotes", lines("\"")),
        ("a quoted string of escapes", vec![format!("for=\"{}", of("\\\""))]),
        ("quoted commas", vec![format!("for=\"{}\"", of(","))]),
        ("lines", vec!["10.0.0.1".to_owned(); bytes / 8]),
        ("lines of elements", vec!["for=10.0.0.1".to_owned(); bytes / 12]),
    ]
}

fn extractors() -> Vec<(&'static str, Box<dyn KeyExtractor>)> {
    let from = |source| key::client_ip(source).trusted(["10.0.0.0/8", "fd00::/8"]).unwrap();
    let whole = |parts: &Parts| {
        let bytes = parts.headers.get("x-user").map(|value| value.as_bytes().to_vec());
        String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
    };
    vec![
        ("header", Box::new(key::header("x-user"))),
        ("header or address", Box::new(key::header("x-user").or(key::ip()))),
        ("path", Box::new(key::path())),
        (
            "path with all options",
            Box::new(
                key::path()
                    .remove_dot_segments()
                    .collapse_slashes()
                    .strip_trailing_slash()
                    .ignore_case(),
            ),
        ),
        ("route", Box::new(key::route())),
        ("method", Box::new(key::method())),
        ("ip", Box::new(key::ip())),
        ("constant", Box::new(key::constant("all"))),
        ("extension", Box::new(key::extension("user", String::clone))),
        ("from_fn", Box::new(key::from_fn(whole))),
        ("X-Forwarded-For", Box::new(from(ClientIpSource::XForwardedFor))),
        (
            "X-Forwarded-For by hop",
            Box::new(from(ClientIpSource::XForwardedForHop(3))),
        ),
        ("Forwarded", Box::new(from(ClientIpSource::Forwarded))),
        (
            "X-Real-IP",
            Box::new(from(ClientIpSource::Header(HeaderName::from_static("x-real-ip")))),
        ),
        ("all together", Box::new((key::ip(), key::path(), key::from_fn(whole)))),
    ]
}

/// A request from a proxy with these lines in every field, and as much in its path, its method and its extensions.
fn request_with(lines: &[String]) -> Parts {
    let bytes = lines.iter().map(String::len).sum::<usize>();
    let path = "/../%2e%41".repeat(bytes.min(60_000) / 10);
    let mut request = Request::builder()
        .method("M".repeat(bytes).as_str())
        .uri(format!("/{path}"))
        .extension(PeerAddr(([10, 0, 0, 1], 4711).into()))
        .extension(lines.concat());
    for name in ["x-user", "x-forwarded-for", "forwarded", "x-real-ip"] {
        for line in lines {
            request = request.header(name, line);
        }
    }
    request.body(()).expect("a good request").into_parts().0
}

#[tokio::test]
async fn fields_of_100_000_bytes_make_short_keys_or_none() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    for (extractor, key) in extractors() {
        let policy = Policy::new("p", SlidingLog::per_hour(1_000)).key(key);
        let app = Router::new()
            .fallback(any(async || "hi"))
            .layer(RateLimitLayer::new(store.clone(), policy));
        for (fields, lines) in fields(100_000) {
            let parts = request_with(&lines);
            let request = Request::from_parts(parts, axum::body::Body::empty());
            let Ok(response) = tower::ServiceExt::oneshot(app.clone(), request).await;
            assert!(
                matches!(response.status().as_u16(), 200 | 400),
                "{extractor}, {fields}: {}",
                response.status()
            );
        }
    }

    let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
    assert!(keys.iter().all(|key| key.len() < 200), "{keys:?}");
    let distinct: BTreeSet<_> = keys.iter().map(|key| key.split('=').next()).collect();
    assert!(distinct.len() > 5, "{distinct:?}");
}

#[test]
fn the_time_for_a_long_field_grows_no_faster_than_the_field() {
    let time = |extractor: &dyn KeyExtractor, parts: &Parts| {
        let before = processor_time();
        let _ = extractor.extract(parts);
        processor_time() - before
    };
    let (short, long) = (fields(10_000), fields(100_000));
    for ((name, short), (_, long)) in short.iter().zip(&long) {
        let (short, long) = (request_with(short), request_with(long));
        for (extractor, key) in extractors() {
            // Ten times the bytes take about ten times as long; a quadratic algorithm would take a hundred times as long. Other
            // load can only add to a time, so one short time is enough; the median excludes a cold cache.
            let mut shorts: Vec<_> = (0..9).map(|_| time(&*key, &short)).collect();
            shorts.sort_unstable();
            let most = 30 * shorts[4].max(Duration::from_micros(20));
            let longs = || (0..100).map(|_| time(&*key, &long));
            assert!(
                longs().any(|long| long <= most),
                "{extractor}, {name}: {:?}, and {:?} for ten times as much",
                shorts[4],
                longs().min()
            );
        }
    }
}
