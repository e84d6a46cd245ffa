//! Eviction and expiry of the keys of a memory store.

use std::{collections::HashMap, sync::Arc, time::Duration};

use allocation_counter::measure;
use tower_quota::{
    Ban, Concurrency, Key, Limit, Limiter, MemoryStore, Policy, SlidingLog,
    store::{Charge, LeaseId, Operation, Outcome, Store, StoreRequest},
};

use crate::support::{Clock, Log, Wrapped, decide};

fn hourly() -> Limit {
    SlidingLog::per_hour(1).into()
}

fn limit(text: &str) -> Limit {
    text.parse().expect("a limit")
}

fn store(capacity: usize, clock: &Clock) -> MemoryStore {
    let clock = clock.clone();
    MemoryStore::builder()
        .capacity(capacity)
        .clock(move || Duration::from_micros(clock.now()))
        .build()
}

fn outcome(store: &MemoryStore, operation: Operation, charges: &[Charge]) -> Outcome {
    let Ok(Ok(response)) = store.decide(&[StoreRequest::new(operation, charges)]).try_ready() else {
        panic!("the response of a memory store is ready at once");
    };
    response
        .outcomes()
        .first()
        .cloned()
        .expect("one outcome for one request")
}

/// Whether a check of cost 1 is admitted.
fn admits(store: &MemoryStore, policy: &str, limit: &Limit, key: impl Into<Key>) -> bool {
    outcome(store, Operation::Check, &[Charge::new(policy, limit, &key.into(), 1)]).allowed
}

/// The units of the quota that the store has counted.
fn used(store: &MemoryStore, policy: &str, limit: &Limit, key: impl Into<Key>) -> u64 {
    let peeked = outcome(store, Operation::Peek, &[Charge::new(policy, limit, &key.into(), 1)]);
    limit.quota() - peeked.states()[0].remaining
}

#[test]
fn any_number_of_slots_can_be_charged() {
    let (store, slots) = (MemoryStore::new(), Limit::from(Concurrency::new(1)));
    let charge = |cost| Charge::new("p", &slots, &Key::from("k"), cost).lease(LeaseId::random());
    for _ in 0..20_000 {
        outcome(&store, Operation::Charge, &[charge(u64::MAX)]);
    }
    assert!(!outcome(&store, Operation::Check, &[charge(1)]).allowed);
}

/// Another policy of the name has a shorter window.
#[test]
fn a_ban_is_remembered_as_long_as_one_policy_remembers_it() {
    let clock = Clock::new();
    let store = store(100_000, &clock);
    let [second, hour] = [1, 3_600].map(Duration::from_secs);
    let policy = |ban| Limiter::new(store.clone(), Policy::new("p", SlidingLog::per_second(1)).ban(ban));
    let (long, short) = (policy(Ban::after(1, hour)), policy(Ban::after(9, second)));
    let denied = |limiter: &Limiter| {
        let [first, second] = [(); 2].map(|()| limiter.request("k").check_now().expect("in memory"));
        assert!(first.is_allowed());
        second.retry_after().expect("it is denied")
    };
    assert_eq!(denied(&long), 60 * second);
    clock.advance(60 * second);
    assert_eq!(denied(&short), second);
    clock.advance(10 * second);
    // These take the room of what has expired.
    for key in 0..10_000 {
        assert!(admits(&store, "other", &hourly(), key.to_string()));
    }
    assert_eq!(denied(&long), 120 * second);
}

#[tokio::test]
async fn expired_keys_are_evicted_first() {
    let clock = Clock::new();
    let now = clock.clone();
    let store = MemoryStore::builder()
        .capacity(1_000)
        .clock(move || Duration::from_micros(now.now()))
        .build();
    let short = Limit::from(SlidingLog::per_second(1));
    for key in 0..900 {
        decide(&store, Operation::Check, &short, &format!("short {key}"), 1).await;
    }
    clock.advance(Duration::from_secs(1));
    for key in 0..1_000 {
        decide(&store, Operation::Check, &hourly(), &key.to_string(), 1).await;
    }

    assert_eq!(store.evictions(), 0);
    assert!(store.len() <= 1_000, "{}", store.len());
    for key in 0..1_000 {
        assert!(
            !decide(&store, Operation::Peek, &hourly(), &key.to_string(), 1)
                .await
                .allowed,
            "{key}"
        );
    }
}

#[test]
fn a_full_store_evicts_the_key_that_expires_first_and_counts_it() {
    let clock = Clock::new();
    let store = store(100, &clock);
    // No key denies, since keys that deny are evicted last.
    let limit = limit("sliding-log 2/h");
    for key in 0..110_u64 {
        assert!(admits(&store, "test", &limit, key));
        clock.advance(Duration::from_secs(1));
    }

    assert_eq!((store.len(), store.evictions()), (100, 10));
    for key in 0..110_u64 {
        assert_eq!(used(&store, "test", &limit, key), u64::from(key >= 10), "{key}");
    }
}

#[test]
fn a_key_that_expires_now_makes_room_without_an_eviction() {
    let (clock, limit, key) = (Clock::new(), limit("sliding-log 10/min"), Key::from("old"));
    let store = store(1, &clock);
    assert!(admits(&store, "test", &limit, "old"));
    // Each refund gives the key a new place in the order of eviction; only a few of the others are removed in one call.
    clock.advance(Duration::from_secs(10));
    for _ in 0..10 {
        assert!(admits(&store, "test", &limit, "old"));
        let refund = Operation::Refund {
            admitted_at: Duration::from_micros(clock.now()),
        };
        outcome(&store, refund, &[Charge::new("test", &limit, &key, 1)]);
    }
    assert_eq!(used(&store, "test", &limit, "old"), 1);

    clock.advance(Duration::from_secs(50));
    assert_eq!(used(&store, "test", &limit, "old"), 0);
    assert!(admits(&store, "test", &limit, "new"));
    assert_eq!((store.len(), store.evictions()), (1, 0));
}

const FLOOD: u64 = 100_001;

/// How many of 1,000 checks of one key of the policy `login` are admitted after a flood of keys. `between` is called after each.
fn passed(store: &MemoryStore, mut between: impl FnMut(u64)) -> usize {
    let limit = limit("sliding-log 5/min");
    let tries = (0..1_000).filter(|&n| {
        let passed = admits(store, "login", &limit, "target");
        between(n);
        passed
    });
    tries.count()
}

#[test]
fn a_limit_that_is_used_up_stays_so_under_a_flood_of_keys() {
    for (policy, flood) in [
        ("login", "sliding-log 5/min"),
        ("paths", "sliding-log 5/min"),
        ("paths", "sliding-log 5/s"),
        ("paths", "sliding-log 5/h"),
        ("paths", "sliding-log 1/s"),
        ("paths", "sliding-log 1/h"),
    ] {
        let (clock, login, flood) = (Clock::new(), limit("sliding-log 5/min"), limit(flood));
        let store = MemoryStore::builder()
            .clock(move || Duration::from_micros(clock.now()))
            .build();
        for _ in 0..5 {
            assert!(admits(&store, "login", &login, "target"));
        }
        for key in 0..FLOOD {
            assert!(admits(&store, policy, &flood, key));
        }
        assert_eq!(passed(&store, |_| ()), 0, "{policy} {flood}");
        assert!(store.evictions() > 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_ban_by_hand_stays_under_a_flood_of_keys() {
    let store = MemoryStore::builder().capacity(100).build();
    let policy = Policy::new("login", SlidingLog::per_hour(2)).ban(Ban::by_hand());
    let limiter = Limiter::new(store.clone(), policy);
    limiter.ban("banned", Duration::from_secs(60)).await.unwrap();
    for key in 0..1_000_u64 {
        assert!(limiter.check(key).await.unwrap().is_allowed());
    }
    assert!(store.evictions() > 0);
    assert!(!limiter.check("banned").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn where_all_keys_deny_a_flood_evicts_a_ban_too() {
    let store = MemoryStore::builder().capacity(100).build();
    let policy = Policy::new("login", SlidingLog::per_hour(2)).ban(Ban::by_hand());
    let limiter = Limiter::new(store.clone(), policy);
    let keys = 0..1_000_u64;
    for key in keys.clone() {
        limiter.ban(key, Duration::from_secs(60)).await.unwrap();
    }
    let mut banned = 0;
    for key in keys {
        banned += usize::from(!limiter.peek(key).await.unwrap().is_allowed());
    }
    assert!((50..=100).contains(&banned), "{banned}");
}

#[tokio::test]
async fn a_policy_with_a_shorter_window_does_not_forget_the_bans_of_another_one() {
    const MINUTE: Duration = Duration::from_secs(60);
    let clock = Clock::new();
    let store = store(1_000, &clock);
    let [long, short] = [86_400, 1].map(|seconds| {
        let ban = Ban::after(1, Duration::from_secs(seconds)).first(MINUTE);
        Limiter::new(store.clone(), Policy::new("login", SlidingLog::per_second(1)).ban(ban))
    });
    for minutes in [1, 2] {
        assert!(long.check("k").await.unwrap().is_allowed());
        let banned = long.check("k").await.unwrap();
        assert_eq!(banned.retry_after(), Some(minutes * MINUTE));
        short.ban("k", Duration::from_micros(1)).await.unwrap();
        // New keys take the place of those that have expired.
        clock.advance(minutes * MINUTE + Duration::from_secs(5));
        for key in 0..64 * u64::from(minutes) {
            admits(&store, "flood", &hourly(), key);
        }
    }
}

/// Also if some of the slots are free, and longer than a denial says that it waits.
#[test]
fn slots_that_are_held_stay_under_a_flood_of_keys_until_their_leases_end() {
    for held in [1, 2] {
        let clock = Clock::new();
        let (store, slots, paths) = (store(1_000, &clock), limit("concurrency 2"), limit("sliding-log 5/h"));
        let (key, leases) = (Key::from("exports"), [(); 2].map(|()| LeaseId::random()));
        let decide = |operation, lease| {
            outcome(
                &store,
                operation,
                &[Charge::new("exports", &slots, &key, 1).lease(lease)],
            )
        };
        for lease in &leases[..held] {
            assert!(decide(Operation::Check, *lease).allowed);
        }
        if held == 2 {
            assert!(!decide(Operation::Check, LeaseId::random()).allowed);
        }
        let mut next = 0_u64..;
        let mut flood = || {
            for key in next.by_ref().take(5_000) {
                assert!(admits(&store, ["exports", "paths"][key as usize % 2], &paths, key));
            }
            assert!(store.evictions() > 0);
        };
        for _ in 0..3 {
            clock.advance(Duration::from_millis(1_100));
            flood();
            assert_eq!(used(&store, "exports", &slots, "exports"), held as u64);
        }
        // One lease is renewed, and held for longer than the others.
        assert!(decide(Operation::RenewLease, leases[0]).allowed);
        clock.advance(Duration::from_millis(9_900));
        flood();
        assert_eq!(used(&store, "exports", &slots, "exports"), 1);
    }
}

#[test]
fn a_limit_without_room_for_the_cost_of_its_requests_stays_so_under_a_flood_of_keys() {
    let clock = Clock::new();
    let (store, uploads) = (store(1_000, &clock), limit("sliding-log 15/h"));
    let key = Key::from("target");
    let upload = |operation, cost| outcome(&store, operation, &[Charge::new("uploads", &uploads, &key, cost)]);
    let flood = |from: u64| {
        for key in from..from + 5_000 {
            assert!(admits(&store, "uploads", &uploads, key));
        }
    };
    assert!(upload(Operation::Check, 10).allowed);
    // What reads the count leaves it where it is.
    assert!(upload(Operation::Peek, 1).allowed);
    flood(0);
    assert!(!upload(Operation::Check, 10).allowed);
    assert!(upload(Operation::Peek, 1).allowed);
    flood(5_000);
    assert_eq!(used(&store, "uploads", &uploads, "target"), 10);

    clock.advance(Duration::from_secs(3_600));
    assert!(upload(Operation::Check, 10).allowed);
}

#[test]
fn a_new_key_after_a_flood_is_limited() {
    for flood in ["sliding-log 5/s", "sliding-log 5/h", "sliding-log 1/h"] {
        // The keys between the tries: of the flood, one after each five tries, or of the policy itself, one after each four.
        for own in [false, true] {
            for capacity in [1_000, 10_000] {
                let clock = Clock::new();
                let (store, login, flood) = (store(capacity, &clock), limit("sliding-log 5/min"), limit(flood));
                for key in 0..=capacity as u64 {
                    assert!(admits(&store, "paths", &flood, key));
                }
                let passed = passed(&store, |n| match own {
                    true if n % 4 == 3 => assert!(admits(&store, "login", &login, n)),
                    false if n % 5 == 4 => assert!(admits(&store, "paths", &flood, FLOOD + n)),
                    _ => {}
                });
                assert_eq!(passed, 5, "{flood}, {own}, {capacity}");
            }
        }
    }
}

/// How many checks of these keys are admitted, each checked once in each of these rounds.
fn rounds(store: &MemoryStore, policies: &[&str], limit: &Limit, rounds: usize, keys: u64) -> usize {
    let tries = (0..rounds).flat_map(|_| 1_000_000..1_000_000 + keys);
    let tries = tries.flat_map(|key| policies.iter().map(move |policy| (policy, key)));
    tries.filter(|(policy, key)| admits(store, policy, limit, *key)).count()
}

/// Where all other keys deny, they would evict each other before one of them is used up.
#[test]
fn new_keys_after_a_flood_are_limited() {
    for capacity in [1_000, 10_000] {
        for (policy, flood, tries) in [
            ("login", "sliding-log 5/h", 5),
            ("paths", "sliding-log 5/h", 5),
            ("paths", "sliding-log 5/h", 1),
            ("paths", "sliding-log 1/h", 1),
        ] {
            let clock = Clock::new();
            let (store, login, flood) = (store(capacity, &clock), limit("sliding-log 5/h"), limit(flood));
            for key in 0..2 * capacity as u64 {
                for _ in 0..tries {
                    assert!(admits(&store, policy, &flood, key));
                }
            }
            assert!(store.evictions() > 0);
            let keys = capacity as u64 / 16;
            let admitted = rounds(&store, &["login"], &login, 20, keys);
            assert_eq!(admitted as u64, 5 * keys, "{policy} {flood} {tries}");
        }
    }
}

#[test]
fn new_keys_of_several_policies_share_an_eighth() {
    let clock = Clock::new();
    let (store, login) = (store(1_000, &clock), limit("sliding-log 5/h"));
    for key in 0..1_000_u64 {
        admits(&store, "paths", &hourly(), key);
    }
    let admitted = rounds(&store, &["minute", "hour", "day"], &login, 20, 41);
    assert_eq!(admitted, 3 * 5 * 41);
}

#[test]
fn a_key_that_does_not_deny_stays_while_new_ones_are_used_up() {
    let clock = Clock::new();
    let (store, login) = (store(1_000, &clock), limit("sliding-log 5/h"));
    let use_up = |keys: std::ops::Range<u64>, times| {
        for key in keys {
            (0..times).for_each(|_| assert!(admits(&store, "login", &login, key)));
        }
    };
    use_up(0..900, 5);
    use_up(900..901, 4);
    use_up(901..1_200, 5);
    assert!(store.evictions() > 0);
    assert_eq!(used(&store, "login", &login, 900_u64), 4);
}

#[tokio::test(start_paused = true)]
async fn short_bans_evict_no_long_ones_and_other_denials_no_bans() {
    const DAY: Duration = Duration::from_secs(86_400);
    for flood_of_paths in [false, true] {
        let store = MemoryStore::builder().capacity(1_000).build();
        let policy = Policy::new("login", SlidingLog::per_hour(2)).ban(Ban::by_hand());
        let limiter = Limiter::new(store.clone(), policy);
        for key in 0..100_u64 {
            if key % 2 == 0 {
                limiter.ban(key, Duration::from_secs(60)).await.unwrap();
            }
            limiter.ban(key, DAY).await.unwrap();
        }
        for key in 0..5_000_u64 {
            if flood_of_paths {
                admits(&store, "paths", &hourly(), key);
            } else {
                limiter.ban(1_000 + key, Duration::from_secs(300)).await.unwrap();
            }
        }
        assert!(store.evictions() > 0);
        for key in 0..100_u64 {
            assert!(!limiter.peek(key).await.unwrap().is_allowed(), "{key}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn keys_that_deny_free_no_slots_of_any_number_of_keys() {
    let store = MemoryStore::builder().capacity(1_000).build();
    let exports = Limiter::new(store.clone(), Policy::new("exports", Concurrency::new(1)));
    for key in 0..2_000_u64 {
        admits(&store, "paths", &hourly(), key);
    }
    let mut held = Vec::new();
    for key in 0..700_u64 {
        held.push(exports.acquire(key).await.expect("a slot is free"));
    }
    for key in 2_000..3_000_u64 {
        admits(&store, "paths", &hourly(), key);
    }
    for key in 0..700_u64 {
        assert!(exports.acquire(key).await.is_err(), "{key}");
    }
}

#[test]
fn a_flood_evicts_keys_of_its_own_policy_first() {
    for flood in ["sliding-log 5/s", "sliding-log 5/min", "sliding-log 5/h"] {
        let clock = Clock::new();
        let (store, mail, flood) = (store(1_000, &clock), limit("sliding-log 2/min"), limit(flood));
        for key in 0..500_u64 {
            assert!(admits(&store, "mail", &mail, key));
        }
        for key in 0..5_000_u64 {
            assert!(admits(&store, "paths", &flood, key));
        }
        assert_eq!((store.len(), store.evictions()), (1_000, 4_500));
        assert!((0..500_u64).all(|key| used(&store, "mail", &mail, key) == 1), "{flood}");
    }
}

#[test]
fn a_policy_with_few_keys_keeps_them() {
    let clock = Clock::new();
    for flood in ["sliding-log 2/min", "sliding-log 1/h"] {
        let (store, mail, flood) = (store(640, &clock), limit("sliding-log 2/min"), limit(flood));
        let held = |policy, limit| {
            (0..10_000_u64)
                .filter(|key| used(&store, policy, limit, *key) == 1)
                .count()
        };
        for key in 0..640_u64 {
            assert!(admits(&store, "paths", &flood, key));
        }
        for key in 0..1_000_u64 {
            assert!(admits(&store, "mail", &mail, key));
        }
        // An eighth, and one.
        assert_eq!((held("paths", &flood), held("mail", &mail)), (559, 81));
        assert_eq!(used(&store, "mail", &mail, 999), 1);

        for key in 1_000..2_000_u64 {
            assert!(admits(&store, "paths", &flood, key));
        }
        // Keys that deny leave an eighth.
        let kept = 80 + usize::from(flood.quota() > 1);
        assert_eq!((held("paths", &flood), held("mail", &mail)), (640 - kept, kept));
    }
}

/// Such as one for each tenant.
#[test]
fn many_policies_with_one_key_fit_as_many_keys_of_one_policy_do() {
    let clock = Clock::new();
    let store = store(10_000, &clock);
    for tenant in 0..8_000 {
        assert!(admits(&store, &format!("tenant-{tenant}"), &hourly(), "all"));
    }
    assert_eq!((store.len(), store.evictions()), (8_000, 0));
}

#[test]
fn where_all_keys_deny_those_that_end_first_are_evicted() {
    let clock = Clock::new();
    let store = store(100, &clock);
    for key in 0..110_u64 {
        assert!(admits(&store, "test", &hourly(), key));
        clock.advance(Duration::from_secs(1));
    }

    assert_eq!((store.len(), store.evictions()), (100, 10));
    for key in 0..110_u64 {
        assert_eq!(used(&store, "test", &hourly(), key), u64::from(key >= 10), "{key}");
    }
}

#[test]
fn a_key_can_be_evicted_when_its_denial_is_over() {
    let (clock, limit) = (Clock::new(), limit("sliding-log 2/h"));
    let store = store(2, &clock);
    let start = clock.now();
    let at = |minutes: u64, seconds: u64| clock.set(start + (minutes * 60 + seconds) * 1_000_000);
    let used = |key: &str| used(&store, "test", &limit, key);

    // `a` denies from 1:00 to 60:00, and expires at 61:00.
    assert!(admits(&store, "test", &limit, "a"));
    at(1, 0);
    assert!(admits(&store, "test", &limit, "a"));
    at(59, 30);
    assert!(admits(&store, "test", &limit, "b"));
    at(59, 45);
    assert!(admits(&store, "test", &limit, "c"));
    assert_eq!((used("a"), used("b"), used("c")), (2, 0, 1));

    at(60, 0);
    assert!(admits(&store, "test", &limit, "d"));
    assert_eq!((used("a"), used("c"), used("d")), (0, 1, 1));
    assert_eq!(store.evictions(), 2);
}

#[test]
fn a_key_can_be_evicted_when_a_refund_ends_its_denial() {
    let (clock, limit) = (Clock::new(), limit("sliding-log 2/h"));
    let store = store(2, &clock);
    let key = Key::from("a");
    let charge = [Charge::new("test", &limit, &key, 1)];
    for operation in [Operation::Check, Operation::Check] {
        outcome(&store, operation, &charge);
    }
    let admitted_at = Duration::from_micros(clock.now());
    for other in ["b", "c"] {
        clock.advance(Duration::from_secs(1));
        assert!(admits(&store, "test", &limit, other));
    }
    assert_eq!(used(&store, "test", &limit, "a"), 2);

    outcome(&store, Operation::Refund { admitted_at }, &charge);
    assert!(admits(&store, "test", &limit, "d"));
    let used = |key: &str| used(&store, "test", &limit, key);
    assert_eq!((used("a"), used("b"), used("c"), used("d")), (0, 0, 1, 1));
}

#[test]
fn the_order_of_eviction_holds_after_any_history() {
    let policies = [
        ("a", limit("sliding-log 3/h")),
        ("b", limit("sliding-log 1/30min")),
        ("c", limit("sliding-log 5/h")),
    ];
    let mut evictions = [0; 4];
    // The larger store has three keys for those that do not deny.
    for (seed, capacity) in (0..100).flat_map(|seed| [(seed, 6), (seed, 24)]) {
        let keys = 2 * capacity as u64 / 3 + 4;
        let mut random = fastrand::Rng::with_seed(seed);
        let clock = Clock::new();
        let store = store(capacity, &clock);
        // The cost that each key has charged last.
        let mut last_costs = HashMap::new();
        // The keys with a count, and whether they deny.
        let counted = |last_costs: &HashMap<_, _>| {
            let all = policies
                .iter()
                .flat_map(|policy| (0..keys).map(move |key| (policy, key)));
            let used = all.map(|((name, limit), key)| (*name, key, used(&store, name, limit, key), limit.quota()));
            let counted = used.filter(|(_, _, used, _)| *used > 0);
            counted
                .map(|(name, key, used, quota)| (name, key, used + last_costs[&(name, key)] > quota))
                .collect::<Vec<_>>()
        };
        let mut admitted_at = Duration::ZERO;
        for _ in 0..300 {
            let (name, limit) = random.choice(&policies).expect("some");
            let key = random.u64(0..keys);
            let (cost, before) = (random.u64(1..=4), counted(&last_costs));
            let operation = match random.u8(0..8) {
                0 => Operation::Refund { admitted_at },
                1 => Operation::Reset,
                2 => Operation::Peek,
                _ => Operation::Check,
            };
            let allowed = outcome(&store, operation, &[Charge::new(name, limit, &Key::from(key), cost)]).allowed;
            if operation == Operation::Check && allowed {
                admitted_at = Duration::from_micros(clock.now());
                last_costs.insert((*name, key), cost);
            }

            let after = counted(&last_costs);
            let lost = |(policy, id, _): &&(&str, u64, bool)| {
                let kept = after.iter().any(|other| (other.0, other.1) == (*policy, *id));
                !kept && (*policy, *id) != (*name, key)
            };
            let lost: Vec<_> = before.iter().filter(lost).collect();
            let new = operation == Operation::Check
                && allowed
                && !before.iter().any(|other| (other.0, other.1) == (*name, key));
            let what = format!("{operation:?} {name} {key} in {before:?} evicts {lost:?}, seed {seed}");
            assert_eq!(lost.len(), usize::from(new && before.len() == capacity), "{what}");
            if let [(policy, _, denies)] = lost[..] {
                let found = usize::from(policy != name) + 2 * usize::from(*denies);
                let number = |of: &str| {
                    before
                        .iter()
                        .filter(|other| other.0 == of && other.2 == *denies)
                        .count()
                };
                let free = before.iter().filter(|other| !other.2);
                let own = free.clone().filter(|other| other.0 == *name).count();
                let reserve = capacity / 8;
                assert_eq!(*denies, free.count() <= reserve, "{what}");
                if own > reserve {
                    assert_eq!(policy, name, "{what}");
                } else {
                    assert!(policies.iter().all(|(of, _)| number(policy) >= number(of)), "{what}");
                }
                evictions[found] += 1;
            }
            if random.u8(0..4) == 0 {
                clock.advance(Duration::from_secs(random.u64(0..1_200)));
            }
        }
    }
    assert!(evictions.iter().all(|seen| *seen > 0), "{evictions:?}");
}

#[test]
fn a_store_never_holds_more_keys_than_its_capacity_although_clocks_go_back() {
    let limits = [
        limit("sliding-log 3/h"),
        limit("token-bucket 3/h"),
        limit("fixed-window 2/h"),
    ];
    for (seed, capacity) in (0..300).map(|seed| (seed, [1, 5, 20][seed as usize % 3])) {
        let mut random = fastrand::Rng::with_seed(seed);
        let clock = Clock::new();
        let store = store(capacity, &clock);
        for _ in 0..400 {
            let (name, limit) = (
                random.choice(["a", "b"]).expect("some"),
                random.choice(&limits).expect("some"),
            );
            let operation = match random.u8(0..4) {
                0 => Operation::Charge,
                _ => Operation::Check,
            };
            let key = Key::from(random.u64(0..2 * capacity as u64 + 2));
            outcome(&store, operation, &[Charge::new(name, limit, &key, random.u64(1..=3))]);
            assert!(store.len() <= capacity, "{} of {capacity}, seed {seed}", store.len());
            match random.u8(0..40) {
                0 => clock.set(clock.now() - random.u64(0..2_000_000)),
                1..5 => clock.advance(Duration::from_secs(random.u64(0..1_200))),
                _ => {}
            }
        }
    }
}

/// A refund leaves room for its own cost, and a check of a higher cost lacks what others have.
#[test]
fn whether_a_key_denies_is_by_the_cost_of_its_last_charge() {
    let (clock, limit) = (Clock::new(), limit("sliding-log 10/h"));
    let store = store(8, &clock);
    let charge = |policy, key: &str, cost| [Charge::new(policy, &limit, &key.into(), cost)];
    assert!(outcome(&store, Operation::Check, &charge("a", "settled", 10)).allowed);
    let refund = Operation::Refund {
        admitted_at: Duration::from_micros(clock.now()),
    };
    outcome(&store, refund, &charge("a", "settled", 1));
    assert!(admits(&store, "b", &limit, "used"));
    for key in ["1", "2", "3", "4", "5", "6", "7"] {
        assert!(outcome(&store, Operation::Check, &charge("a", key, 1)).allowed);
        assert!(!outcome(&store, Operation::Check, &charge("a", key, 11)).allowed);
    }
    assert_eq!(used(&store, "a", &limit, "settled"), 9);
    assert_eq!(used(&store, "b", &limit, "used"), 1);
    assert_eq!(store.evictions(), 1);
}

#[test]
fn a_denial_of_a_lower_cost_leaves_that_of_the_last_charge() {
    let (clock, limit) = (Clock::new(), limit("sliding-log 10/h"));
    let (store, minute) = (store(8, &clock), Duration::from_secs(60));
    let check = |cost| {
        outcome(
            &store,
            Operation::Check,
            &[Charge::new("p", &limit, &"used".into(), cost)],
        )
        .allowed
    };
    assert!(check(1));
    clock.advance(30 * minute);
    assert!(check(9));
    assert!(!check(1));
    clock.advance(minute);
    for key in ["1", "2", "3", "4", "5", "6", "7"] {
        assert!(admits(&store, "p", &limit, key));
    }
    // A check of cost 1 would be admitted, and one of 9 is denied.
    clock.advance(30 * minute);
    assert!(admits(&store, "p", &limit, "8"));
    assert_eq!(store.evictions(), 1);
    assert!(!check(9));
}

#[test]
fn a_key_that_a_decision_counts_again_is_not_evicted_for_a_new_one_of_it() {
    let (clock, limit) = (Clock::new(), limit("sliding-log 9/min"));
    let (store, pause) = (store(2, &clock), Duration::from_secs(10));
    for key in ["k", "j"] {
        assert!(admits(&store, "known", &limit, key));
        clock.advance(pause);
    }
    let charges = ["new", "known"].map(|policy| Charge::new(policy, &limit, &"k".into(), 1));
    assert!(outcome(&store, Operation::Check, &charges).allowed);
    assert_eq!(used(&store, "known", &limit, "k"), 2);
}

#[test]
fn a_key_that_was_counted_again_is_evicted_later() {
    let (clock, limit) = (Clock::new(), limit("sliding-log 9/h"));
    let store = store(3, &clock);
    for key in ["a", "b", "c", "a", "d"] {
        clock.advance(Duration::from_secs(1));
        assert!(admits(&store, "test", &limit, key));
    }
    let used = |key: &str| used(&store, "test", &limit, key);
    assert_eq!((used("a"), used("b"), used("c"), used("d")), (2, 0, 1, 1));
}

#[test]
fn the_key_that_expires_first_is_evicted_however_many_were_counted_again() {
    let (clock, limit) = (Clock::new(), limit("sliding-log 9/h"));
    let store = store(400, &clock);
    for key in (0..400).chain((0..400).rev()).chain([400]) {
        clock.advance(Duration::from_secs(1));
        assert!(admits(&store, "test", &limit, key));
    }
    let gone: Vec<_> = (0..=400)
        .filter(|key| used(&store, "test", &limit, *key) == 0)
        .collect();
    assert_eq!(gone, [399]);
}

#[test]
fn a_log_in_use_does_not_keep_the_memory_of_its_largest_burst() {
    let (clock, limit) = (Clock::new(), limit("sliding-log 10000/h"));
    let store = store(3, &clock);
    let admit = |times| (0..times).for_each(|_| assert!(admits(&store, "test", &limit, "a")));
    let burst = measure(|| admit(10_000)).bytes_current;
    // A charge removes a bounded number of entries.
    let rest = measure(|| {
        for _ in 0..100 {
            clock.advance(Duration::from_secs(3_600));
            admit(1);
        }
    });
    assert!(
        burst > 160_000 && -rest.bytes_current > burst * 9 / 10,
        "{burst}, {rest:?}"
    );
}

#[test]
fn a_store_is_empty_until_it_has_counted() {
    let store = store(3, &Clock::new());
    assert!(store.is_empty());
    assert!(admits(&store, "test", &hourly(), "a"));
    assert!(!store.is_empty());
}

#[test]
fn small_stores_hold_exactly_as_many_keys() {
    for capacity in [1, 2, 3, 17, 1_024] {
        for limit in [limit("sliding-log 2/h"), hourly()] {
            let clock = Clock::new();
            let store = store(capacity, &clock);
            let keys = 2 * capacity as u64 + 7;
            for key in 0..keys {
                assert!(admits(&store, "test", &limit, key));
                clock.advance(Duration::from_micros(1));
                assert_eq!(store.len(), capacity.min(key as usize + 1));
            }
            for key in 0..keys {
                let kept = key >= keys - capacity as u64;
                assert_eq!(
                    used(&store, "test", &limit, key),
                    u64::from(kept),
                    "{limit}, {capacity}, {key}"
                );
            }
        }
    }
}

#[test]
fn no_call_exceeds_the_capacity_or_blocks_another() {
    // The clock stands still, since expired keys would make room on a slow machine.
    let clock = Clock::new();
    for capacity in [1, 2, 3, 100, 3_000, 10_000] {
        let store = store(capacity, &clock);
        let limits = ["sliding-log 1/h", "token-bucket 3/s", "fixed-window 2/s"].map(limit);
        let flood = |thread: u64| {
            for n in 0..3_000 {
                let keys: [u64; 3] = std::array::from_fn(|part| (thread * 3_000 + n) * 7 / (part as u64 + 1));
                let keys = keys.map(Key::from);
                let parts = limits.iter().zip(&keys).zip(["a", "b", "c"]);
                let charges: Vec<_> = parts
                    .map(|((limit, key), policy)| Charge::new(policy, limit, key, 1))
                    .collect();
                let charges = if n % 2 == 0 { &charges[..] } else { &charges[..1] };
                outcome(&store, Operation::Check, charges);
                if n % 5 == 0 {
                    outcome(&store, Operation::Reset, charges);
                }
                assert!(store.len() <= capacity, "{} of {capacity}", store.len());
            }
        };
        std::thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || flood(thread));
            }
        });
        assert!(store.evictions() > 0, "{capacity}");
    }
}

#[test]
fn the_first_eviction_is_logged_once_with_the_fix() {
    let log = Log::capture();
    let store = MemoryStore::builder().capacity(10).build();
    for key in 0..10_u64 {
        assert!(admits(&store, "test", &hourly(), key));
    }
    assert_eq!(log.text(), "");

    for key in 10..20_u64 {
        assert!(admits(&store, "test", &hourly(), key));
    }
    assert_eq!(store.evictions(), 10);
    assert_eq!(
        log.text().matches("MemoryStoreBuilder::capacity").count(),
        1,
        "{}",
        log.text()
    );
    assert!(log.text().contains("capacity=10"), "{}", log.text());
}

#[tokio::test]
async fn a_new_key_in_a_full_store_is_kept() {
    let store = MemoryStore::builder().capacity(100).build();
    let daily = Limiter::new(store.clone(), Policy::new("daily", SlidingLog::per_day(1)));
    for key in 0..100_u64 {
        assert!(daily.check(key).await.unwrap().is_allowed());
    }

    let login = Limiter::new(store.clone(), Policy::new("login", SlidingLog::per_minute(1)));
    assert!(login.check("42").await.unwrap().is_allowed());
    assert!(!login.check("42").await.unwrap().is_allowed());
    assert_eq!((store.len(), store.evictions()), (100, 1));
}

/// As Redis keeps keys a second longer than they matter.
#[test]
fn what_was_counted_ahead_of_a_clock_that_was_set_back_a_little_is_kept() {
    const SECOND: Duration = Duration::from_secs(1);
    for limit in ["sliding-log 5/10s", "sliding-log 5/10s precision 10"] {
        let (clock, limit) = (Clock::new(), limit.parse().expect("a limit"));
        let store = store(100, &clock);
        let used = || used(&store, "log", &limit, "k");
        let start = clock.now();
        clock.advance(SECOND * 9 / 10);
        assert!(admits(&store, "log", &limit, "k"));
        clock.set(start);
        assert!(admits(&store, "log", &limit, "k"));
        let before = used();
        assert!(before > 0, "{limit}");

        // The other keys are as many as it takes for the store to look for keys that have expired.
        clock.advance(SECOND * 21 / 2);
        let counted = used();
        assert!(counted > 0, "{limit}: the first one still counts");
        for key in 0..50_u64 {
            assert!(admits(&store, "hourly", &hourly(), key));
        }
        assert_eq!(used(), counted, "{limit}");
        clock.advance(2 * SECOND);
        for key in 50..90_u64 {
            assert!(admits(&store, "hourly", &hourly(), key));
        }
        assert_eq!(store.len(), 90, "{limit}: it is removed when it has expired");
    }
}

#[tokio::test]
async fn keys_that_are_reset_leave_nothing() {
    let store = MemoryStore::new();
    let limiter = Limiter::new(store.clone(), Policy::new("mail", SlidingLog::per_hour(1)));
    for key in 0..10_000_u64 {
        assert!(limiter.check(key).await.unwrap().is_allowed());
        limiter.reset(key).await.unwrap();
    }
    assert!(store.is_empty());
}

#[tokio::test]
async fn denied_and_peeked_keys_are_not_stored() {
    let store = MemoryStore::new();
    let limiter = Limiter::new(store.clone(), Policy::new("mail", SlidingLog::per_hour(1)));
    assert!(limiter.peek("a").await.unwrap().is_allowed());
    assert!(!limiter.request("b").cost(2).check().await.unwrap().is_allowed());
    assert!(store.is_empty());
}

#[tokio::test]
async fn a_clock_at_the_end_of_time_panics_nowhere() {
    for now in [0, 1, u64::MAX] {
        let store = MemoryStore::builder().clock(move || Duration::from_micros(now)).build();
        for limit in [
            "sliding-log 2/h",
            "sliding-counter 2/h",
            "fixed-window 2/h aligned",
            "token-bucket 2/h",
        ] {
            let limit = limit.parse().unwrap();
            let allowed = decide(&store, Operation::Check, &limit, "k", 2).await.allowed;
            assert!(
                allowed && !decide(&store, Operation::Check, &limit, "k", 1).await.allowed,
                "{limit} at {now}"
            );
        }
    }
}

#[test]
fn a_pointer_to_a_store_has_its_inner_store() {
    let wrapped = || Wrapped(MemoryStore::new());
    let pointers: [Box<dyn Store>; 2] = [Box::new(wrapped()), Box::new(Arc::new(wrapped()))];
    assert!(
        pointers
            .iter()
            .all(|store| store.inner().is_some_and(|inner| inner.id() == store.id()))
    );
    assert!(Arc::new(MemoryStore::new()).inner().is_none());
}
