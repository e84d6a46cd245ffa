//! The keys in Redis: their memory, their expiry, and their content after a denial.

use std::time::Duration;

use tower_quota::{
    Key, Limit, SlidingLog,
    store::{Operation, Outcome},
};

use crate::support::{Algorithm, Clock, Redis, connected, decide, patient, redis_key};

const SECOND: Duration = Duration::from_secs(1);

async fn bytes(redis: &Redis, key: &str) -> u64 {
    redis.command("MEMORY", ["USAGE", key, "SAMPLES", "0"]).await
}

/// Admits a million evenly in ten seconds, twice in each grain, and as much in each ten seconds after these. Returns the bytes of the
/// key then, and the most afterwards.
async fn bytes_of_a_million(precision: u32) -> [u64; 2] {
    let redis = Redis::start();
    let clock = Clock::new();
    let store = clock.redis_store(&redis).await;
    let window = 10 * SECOND;
    let limit = Limit::from(SlidingLog::new(1_000_000, window).precision(precision));

    let parts = 2 * u64::from(precision);
    let mut last = None;
    for _ in 0..parts {
        clock.advance(window / parts as u32);
        clock.write_to(&redis).await;
        let admitted = decide(&store, Operation::Check, &limit, "k", 1_000_000 / parts).await;
        assert!(admitted.allowed);
        last = Some(admitted);
    }

    assert_eq!(last.map(|admitted| admitted.states()[0].remaining), Some(0));
    assert!(!decide(&store, Operation::Check, &limit, "k", 1).await.allowed);
    let key = redis_key("test", &limit, &Key::from("k"));
    // The last entry is in the first numbers, as are the numbers of the first one and of the next.
    let head: Vec<u8> = redis.command("GETRANGE", [key.as_str(), "0", "71"]).await;
    let number = |place: usize| f64::from_le_bytes(head[8 * place..][..8].try_into().expect("eight bytes"));
    let entries = (number(5) - number(4)) as u32;
    let length: u32 = redis.command("STRLEN", [key.as_str()]).await;
    assert!(length <= 72 + 24 * precision, "{length} bytes");
    assert!((precision..=precision + 2).contains(&entries), "{entries} entries");

    // Then as much as fits, while entries expire.
    let filled = bytes(&redis, &key).await;
    let mut most = filled;
    for _ in 0..2 * parts {
        clock.advance(window / parts as u32);
        clock.write_to(&redis).await;
        decide(&store, Operation::Check, &limit, "k", 1_000_000 / parts).await;
        most = most.max(bytes(&redis, &key).await);
    }
    [filled, most]
}

#[tokio::test]
async fn a_million_in_ten_seconds_fits_in_25_kb_with_precision_1000() {
    let bytes @ [filled, most] = bytes_of_a_million(1_000).await;
    assert!(filled <= 25_000 && most <= 25_000, "{bytes:?}");
}

#[tokio::test]
async fn a_million_in_ten_seconds_fits_in_3_kb_with_precision_100() {
    let bytes @ [filled, most] = bytes_of_a_million(100).await;
    assert!(filled <= 3_000 && most <= 3_000, "{bytes:?}");
}

/// A Redis, and a store with the clock of Redis.
async fn shared() -> (Redis, tower_quota::RedisStore) {
    let redis = Redis::start();
    // Without the deny cache, since the keys are flushed between the rounds.
    let store = connected(patient().deny_cache(false), &redis.url()).await;
    (redis, store)
}

async fn only_key(redis: &Redis) -> String {
    let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
    assert_eq!(keys.len(), 1, "{keys:?}");
    keys.into_iter().next().unwrap_or_default()
}

/// The remaining time to live of the key.
async fn ttl(redis: &Redis, key: &str) -> Duration {
    let ttl: i64 = redis.command("PTTL", [key]).await;
    Duration::from_millis(u64::try_from(ttl).unwrap_or_else(|_| panic!("PTTL {key} is {ttl}")))
}

#[tokio::test]
async fn the_key_of_a_window_of_100_000_seconds_lives_as_long() {
    let (redis, store) = shared().await;
    let window = Duration::from_secs(100_000);
    for quota in [1, 100_000] {
        let limit = Limit::from(SlidingLog::new(quota, window));
        redis.command::<()>("FLUSHALL", [""; 0]).await;
        assert!(decide(&store, Operation::Check, &limit, "k", 1).await.allowed);
        let ttl = ttl(&redis, &only_key(&redis).await).await;
        assert!(ttl > window - 10 * SECOND && ttl <= window + SECOND, "{ttl:?}");
    }
}

/// Redis 7.2.4 refuses a time of eight zeros at its end.
#[tokio::test]
async fn no_key_expires_at_a_time_that_is_written_with_an_exponent() {
    const ZEROS: u64 = 100_000_000;
    let (redis, clock) = (Redis::start(), Clock::new());
    let store = clock.redis_store(&redis).await;
    for limit in [
        "sliding-log 3/min",
        "sliding-log 3/min precision 100",
        "fixed-window 3/min",
        "token-bucket 3/min",
    ] {
        let limit: Limit = limit.parse().expect("a limit");
        for expected in [None, Some(1)] {
            redis.command::<()>("FLUSHALL", [""; 0]).await;
            clock.write_to(&redis).await;
            let reset = decide(&store, Operation::Check, &limit, "k", 1).await.states()[0].reset_after;
            let keys: Vec<String> = redis.command("KEYS", ["*key=k*"]).await;
            let expires_at = redis.expires_at(&keys[0]).await as u64;
            assert_eq!(
                expires_at % ZEROS,
                expected.unwrap_or(expires_at % ZEROS),
                "{limit}: {expires_at}"
            );
            let rest = ZEROS - (clock.expiry(reset) + 1_000) % ZEROS;
            clock.advance(Duration::from_millis(rest));
        }
    }
}

#[tokio::test]
async fn every_key_lives_at_most_a_second_longer_than_its_counts() {
    let (redis, store) = shared().await;
    for algorithm in Algorithm::ALL {
        let limit = algorithm.limit(3);
        for operations in [
            &[Operation::Check][..],
            &[Operation::Charge, Operation::Charge],
            &[Operation::Check, Operation::Charge, Operation::Check],
            &[Operation::Check, Operation::Check, Operation::Peek],
        ] {
            redis.command::<()>("FLUSHALL", [""; 0]).await;
            let mut counts = Duration::ZERO;
            for operation in operations {
                let outcome: Outcome = decide(&store, *operation, &limit, "k", 2).await;
                counts = counts.max(outcome.states()[0].reset_after);
            }
            let ttl = ttl(&redis, &only_key(&redis).await).await;
            assert!(
                !ttl.is_zero() && ttl <= counts + SECOND + SECOND / 1_000,
                "{limit}, {operations:?}: {ttl:?}"
            );
            assert!(
                ttl + 5 * SECOND > counts,
                "{limit}, {operations:?}: {ttl:?} for {counts:?}"
            );
        }
    }
}

/// The expiry is exact after the first charge. Later charges may leave an expiry that is up to a second late.
#[tokio::test]
async fn a_key_expires_one_second_after_its_counts() {
    let (redis, store) = shared().await;
    for algorithm in Algorithm::ALL {
        let limit = algorithm.limit(7);
        redis.command::<()>("FLUSHALL", [""; 0]).await;
        let key = tower_quota::Key::from("k");
        let mut fresh = true;
        for (operation, cost) in [(Operation::Check, 1), (Operation::Charge, 3), (Operation::Check, 2)]
            .into_iter()
            .chain([(Operation::Charge, 9), (Operation::Check, 1), (Operation::Peek, 1)])
        {
            let charges = [tower_quota::store::Charge::new("test", &limit, &key, cost)];
            let request = tower_quota::store::StoreRequest::new(operation, &charges);
            let response = tower_quota::store::Store::decide(&store, &[request]).await;
            let response = response.expect("Redis replies");
            let counts = response.server_time + response.outcomes()[0].states()[0].reset_after;
            let expires = redis.expires_at(&only_key(&redis).await).await;
            let expires = Duration::from_millis(u64::try_from(expires).expect("it expires"));
            if fresh {
                assert_eq!(expires.as_millis(), (counts + SECOND).as_millis(), "{limit}");
            }
            fresh = false;
            assert!(expires >= counts, "{limit}, {operation:?}: {counts:?}, {expires:?}");
            assert!(
                expires <= counts + SECOND,
                "{limit}, {operation:?}: {counts:?}, {expires:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_refund_leaves_no_key_without_expiry() {
    let (redis, store) = shared().await;
    for algorithm in Algorithm::ALL {
        let limit = algorithm.limit(3);
        for refunded in [1, 3] {
            redis.command::<()>("FLUSHALL", [""; 0]).await;
            let admitted_at = {
                let key = tower_quota::Key::from("k");
                let charges = [tower_quota::store::Charge::new("test", &limit, &key, 3)];
                let request = tower_quota::store::StoreRequest::new(Operation::Check, &charges);
                let response = tower_quota::store::Store::decide(&store, &[request]).await;
                response.expect("Redis replies").server_time
            };
            let refund = Operation::Refund { admitted_at };
            let outcome = decide(&store, refund, &limit, "k", refunded).await;
            assert!(outcome.states()[0].remaining >= refunded, "{limit}: {outcome:?}");

            let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
            for key in keys {
                let ttl = ttl(&redis, &key).await;
                assert!(
                    !ttl.is_zero() && ttl <= algorithm.longest_block() + SECOND,
                    "{limit}: {ttl:?}"
                );
            }
        }
    }
}

#[tokio::test]
async fn a_denied_request_leaves_every_key_as_it_was() {
    let redis = Redis::start();
    let clock = Clock::new();
    let store = clock.redis_store(&redis).await;
    for algorithm in Algorithm::ALL {
        let limit = algorithm.limit(3);
        clock.advance(86_400 * SECOND);
        clock.write_to(&redis).await;
        for cost in [1, 2] {
            decide(&store, Operation::Check, &limit, "k", cost).await;
        }
        let keys: Vec<String> = redis.command("KEYS", ["quota:*"]).await;
        let key = keys.first().expect("a key").as_str();
        let before = (
            redis.command::<Vec<u8>>("DUMP", [key]).await,
            redis.expires_at(key).await,
        );

        for cost in [1, 3] {
            clock.advance(SECOND / 10);
            clock.write_to(&redis).await;
            assert!(
                !decide(&store, Operation::Check, &limit, "k", cost).await.allowed,
                "{limit}"
            );
            assert!(
                !decide(&store, Operation::Peek, &limit, "k", cost).await.allowed,
                "{limit}"
            );
            let after = (
                redis.command::<Vec<u8>>("DUMP", [key]).await,
                redis.expires_at(key).await,
            );
            assert_eq!(after, before, "{limit}");
        }
        redis.command::<()>("DEL", [key]).await;
    }
}
