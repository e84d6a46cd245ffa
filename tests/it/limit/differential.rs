//! The algorithms in Rust and in Lua return the same on the same random timelines.

use std::{
    collections::{BTreeSet, HashMap},
    hash::{BuildHasher, RandomState},
    sync::LazyLock,
    time::Duration,
};

use proptest::{
    collection::vec,
    option,
    prelude::{BoxedStrategy, Just, Strategy, prop_oneof},
    strategy::ValueTree,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use tower_quota::{
    Ban, Concurrency, FixedWindow, Key, Limit, RedisStore, SlidingCounter, SlidingLog, TokenBucket,
    limit::Calendar,
    store::{Charge, LeaseId, Operation, Outcome, Store, StoreRequest},
};

use crate::{
    model::number,
    support::{Clock, Lua54, Redis, connected, eventually, patient, redis_key},
};

/// The number of steps of each timeline; `TOWER_QUOTA_STEPS` overrides it.
fn steps() -> usize {
    number("TOWER_QUOTA_STEPS").map_or(1_500, |steps| steps as usize)
}

/// The random seed of all timelines of a process, since each begins where the clock of the one before ends; `TOWER_QUOTA_SEED`
/// repeats one. The hashes of a memory store have a seed of their own.
fn seed() -> u64 {
    static SEED: LazyLock<u64> =
        LazyLock::new(|| number("TOWER_QUOTA_SEED").unwrap_or_else(|| RandomState::new().hash_one(0)));
    *SEED
}

/// A step of a timeline.
#[derive(Clone, Debug)]
struct Step {
    /// The time by which the clock moves, in microseconds.
    moves: i64,
    requests: Vec<Planned>,
}

/// A request that each of some callers sends.
#[derive(Clone, Debug)]
struct Planned {
    operation: Operation,
    /// Which of the admissions or leases so far is given back, renewed or ended.
    admission: usize,
    key: usize,
    /// The position of the limit and the cost of each charge, of a limit that no other charge of the request has, and the position
    /// of its bans.
    charges: Vec<(usize, u64, Option<usize>)>,
    callers: usize,
}

fn moves(window: Duration) -> BoxedStrategy<i64> {
    let window = window.as_micros() as i64;
    prop_oneof![
        8 => Just(0),
        8 => 0..=3i64,
        16 => 0..=window / 4,
        4 => Just(window),
        2 => 0..=3 * window,
        1 => -window / 2..=0,
        1 => -3 * window..=0,
    ]
    .boxed()
}

fn operations() -> impl Strategy<Value = Operation> + Clone {
    prop_oneof![
        16 => Just(Operation::Check),
        2 => Just(Operation::Peek),
        2 => Just(Operation::Charge),
        3 => Just(Operation::Refund { admitted_at: Duration::ZERO }),
        1 => Just(Operation::Reset),
        4 => Just(Operation::RenewLease),
        4 => Just(Operation::EndLease),
    ]
}

/// A lease that was taken or denied before.
#[derive(Clone, Copy)]
struct Taken<'a> {
    id: LeaseId,
    policy: usize,
    key: usize,
    limit: &'a Limit,
    cost: u64,
}

/// The names of the policies.
const NAMES: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

impl Planned {
    /// A charge of this lease, if its limit has leases.
    fn charge_of(&self, lease: Taken<'_>, ban: Option<&Ban>, keys: &[Key]) -> Charge {
        let charge = Charge::new(NAMES[lease.policy], lease.limit, &keys[lease.key], lease.cost).ban(ban);
        let charge = charge.keeping([0, 1, 3, u64::MAX][self.admission % 4]);
        // Checks with ids of their own are not merged, and requests that differ in more than their keys are sent apart.
        match lease.limit {
            Limit::Concurrency(_) => charge.lease(lease.id),
            _ => charge,
        }
    }
}

/// Most charges cost 1, few of them more than any limit.
fn costs() -> impl Strategy<Value = u64> + Clone {
    prop_oneof![48 => Just(1), 16 => 1..=4u64, 1 => Just(u64::MAX)]
}

/// Charges without bans of different limits.
fn charges(policies: usize, most: usize) -> impl Strategy<Value = Vec<(usize, u64, Option<usize>)>> {
    let charges = vec((0..policies, costs(), Just(None)), 1..=most);
    charges.prop_map(of_different_limits)
}

fn of_different_limits(charges: Vec<(usize, u64, Option<usize>)>) -> Vec<(usize, u64, Option<usize>)> {
    let mut seen = BTreeSet::new();
    charges
        .into_iter()
        .filter(|(policy, ..)| seen.insert(*policy))
        .collect()
}

/// One operation on one list of charges, of several callers on up to three keys.
fn alike(window: Duration, policies: usize) -> BoxedStrategy<Step> {
    let charges = charges(policies, policies);
    let callers = prop_oneof![
        12 => Just(std::vec![1]),
        3 => vec(1..=4usize, 1..=3),
        1 => (30..=40usize).prop_map(|callers| std::vec![callers]),
    ];
    let step = (moves(window), operations(), 0..8usize, charges, callers);
    let step = step.prop_map(|(moves, operation, admission, charges, callers)| {
        let planned = |(key, callers)| Planned {
            operation,
            admission,
            key,
            charges: charges.clone(),
            callers,
        };
        let requests = callers.into_iter().enumerate().map(planned).collect();
        Step { moves, requests }
    });
    step.boxed()
}

/// Several operations, each on charges of its own.
fn mixed(window: Duration, policies: usize) -> BoxedStrategy<Step> {
    let callers = prop_oneof![8 => Just(1), 1 => 2..=4usize];
    let charges = charges(policies, 3);
    let planned = (operations(), 0..8usize, 0..3usize, charges, callers);
    let planned = planned.prop_map(|(operation, admission, key, charges, callers)| Planned {
        operation,
        admission,
        key,
        charges,
        callers,
    });
    // Over the boundary of an hour, from time to time.
    let moves = prop_oneof![30 => moves(window), 1 => 0..=5_400_000_000i64];
    let step = (moves, vec(planned, 1..=6)).prop_map(|(moves, requests)| Step { moves, requests });
    step.boxed()
}

/// The number of bans of [`banned`].
const BANS: usize = 5;

/// Operations on charges of which most have bans.
fn banned(window: Duration, policies: usize) -> BoxedStrategy<Step> {
    let lengths = prop_oneof![2 => Just(1), 1 => 1..=4 * window.as_micros() as u64];
    let begins = lengths.prop_map(|micros| Operation::Ban {
        length: Duration::from_micros(micros),
    });
    let operations = prop_oneof![30 => operations(), 3 => begins];
    let charge = (0..policies, costs(), option::weighted(0.85, 0..BANS));
    let charges = vec(charge, 1..=2).prop_map(of_different_limits);
    let planned = (operations, 0..8usize, 0..2usize, charges, 1..=2usize);
    let planned = planned.prop_map(|(operation, admission, key, mut charges, callers)| {
        if matches!(operation, Operation::Ban { .. }) {
            charges.iter_mut().for_each(|(.., ban)| *ban = ban.or(Some(0)));
        }
        Planned {
            operation,
            admission,
            key,
            charges,
            callers,
        }
    });
    let step = (moves(window), vec(planned, 1..=3)).prop_map(|(moves, requests)| Step { moves, requests });
    step.boxed()
}

/// Many renewals and ends of few leases that are still held, of all slots of a limit or of some.
fn leased(window: Duration, policies: usize) -> BoxedStrategy<Step> {
    let operation = prop_oneof![
        4 => Just(Operation::Check),
        1 => Just(Operation::Charge),
        1 => Just(Operation::Peek),
        6 => Just(Operation::RenewLease),
        3 => Just(Operation::EndLease),
    ];
    let charges = vec((0..policies, 1..=4u64, Just(None)), 1..=3).prop_map(of_different_limits);
    let planned = (operation, 0..3usize, 0..2usize, charges);
    let planned = planned.prop_map(|(operation, admission, key, charges)| Planned {
        operation,
        admission,
        key,
        charges,
        callers: 1,
    });
    let moves = prop_oneof![8 => Just(0), 1 => moves(window)];
    let step = (moves, vec(planned, 1..=3)).prop_map(|(moves, requests)| Step { moves, requests });
    step.boxed()
}

/// One request, or a burst of charges of 1 that makes the log longer than one call may read.
fn bursts(window: Duration, policies: usize) -> BoxedStrategy<Step> {
    let span = window.as_micros() as i64;
    let moves = prop_oneof![
        6 => Just(0),
        4 => 0..=3i64,
        4 => 0..=span / 4,
        4 => Just(span),
        2 => 0..=2 * span,
        2 => -2 * span..=0,
    ];
    let costs = prop_oneof![12 => Just(1), 1 => 2..=4u64, 4 => 1_000..=3_000u64];
    let planned = (operations(), 0..3usize, 0..policies, costs);
    let planned = planned.prop_map(|(operation, admission, policy, cost)| Planned {
        operation,
        admission,
        key: 0,
        charges: std::vec![(policy, cost, None)],
        callers: 1,
    });
    let burst = (0..policies, 300..=1_600usize).prop_map(|(policy, callers)| Planned {
        operation: Operation::Charge,
        admission: 0,
        key: 0,
        charges: std::vec![(policy, 1, None)],
        callers,
    });
    let planned = prop_oneof![4 => planned, 1 => burst];
    let step = (moves, planned).prop_map(|(moves, planned)| Step {
        moves,
        requests: std::vec![planned],
    });
    step.boxed()
}

/// One request after the other within microseconds, so that a log with grains of one has more entries than one call may read.
fn dense(window: Duration, policies: usize) -> BoxedStrategy<Step> {
    let span = window.as_micros() as i64;
    let moves = prop_oneof![
        400 => 0..=3i64,
        2 => span - span / 5..=span,
        1 => -3..=0i64,
    ];
    let operations = prop_oneof![
        12 => Just(Operation::Check),
        1 => Just(Operation::Charge),
        1 => Just(Operation::Peek),
        3 => Just(Operation::Refund { admitted_at: Duration::ZERO }),
    ];
    let costs = prop_oneof![24 => 1..=4u64, 1 => 1_000..=3_000u64];
    let admission = prop_oneof![Just(0), 0..1_500usize];
    let planned = (operations, admission, 0..policies, costs);
    let step = (moves, planned).prop_map(|(moves, (operation, admission, policy, cost))| Step {
        moves,
        requests: std::vec![Planned {
            operation,
            admission,
            key: 0,
            charges: std::vec![(policy, cost, None)],
            callers: 1,
        }],
    });
    step.boxed()
}

/// Of how many steps the expiry times of one are compared.
const EXPIRY_EVERY: usize = 8;

/// Of the keys that were counted on last, those that expire before they are reset. Others may have the expiry time of another
/// version of their limit.
async fn expire_early<'a, 'b: 'a>(
    redis: &Redis,
    clock: &Clock,
    outcomes: impl Iterator<Item = (&'a StoreRequest<'b>, &'a Outcome)>,
) -> Vec<String> {
    const EARLY: &str = "
        local time, early = redis.call('TIME'), {}
        for n, key in ipairs(KEYS) do
            local expires = time[1] * 1000 + math.ceil(time[2] / 1000) + redis.call('PTTL', key)
            if expires < tonumber(ARGV[n]) then
                early[#early + 1] = key
            end
        end
        return early";
    let mut needed = HashMap::new();
    for (request, outcome) in outcomes {
        if matches!(request.operation(), Operation::Ban { .. }) {
            continue;
        }
        let counts = outcome.allowed && matches!(request.operation(), Operation::Check | Operation::Charge);
        for (charge, state) in request.charges().zip(outcome.states()) {
            let counts = counts && !state.reset_after.is_zero();
            let key = redis_key(charge.policy(), charge.limit(), charge.key());
            needed.insert(key, counts.then_some(state.reset_after));
        }
    }
    let needed = needed.into_iter().filter_map(|(key, reset)| Some((key, reset?)));
    let (keys, times): (Vec<_>, Vec<_>) = needed
        .map(|(key, reset)| (key, clock.expiry(reset).to_string()))
        .unzip();
    let mut words = std::vec![EARLY.to_owned(), keys.len().to_string()];
    words.extend(keys);
    words.extend(times);
    redis.command("EVAL", words).await
}

/// Runs both stores along one timeline of equal requests.
async fn agree(window: Duration, policies: &[&[Limit]]) {
    agree_on(steps(), alike, window, policies).await;
}

/// Runs both stores along one timeline. Each policy is given the versions that its limit has, one after the other.
async fn agree_on(
    steps: usize,
    step: fn(Duration, usize) -> BoxedStrategy<Step>,
    window: Duration,
    policies: &[&[Limit]],
) {
    let (redis, clock) = (Redis::start(), Clock::new());
    let shared = clock.redis_store(&redis).await;
    agree_in((&redis, &clock, &shared), steps, step, window, policies).await;
}

/// Runs a memory store, and a store in this Redis, along one timeline. Returns how many requests it has.
async fn agree_in(
    (redis, clock, shared): (&Redis, &Clock, &RedisStore),
    steps: usize,
    step: fn(Duration, usize) -> BoxedStrategy<Step>,
    window: Duration,
    policies: &[&[Limit]],
) -> usize {
    agree_for::<64>((redis, clock, shared), steps, step, window, (policies, &[])).await
}

/// As [`agree_in`], with versions that last so many steps.
async fn agree_for<const LASTS: usize>(
    (redis, clock, shared): (&Redis, &Clock, &RedisStore),
    steps: usize,
    step: fn(Duration, usize) -> BoxedStrategy<Step>,
    window: Duration,
    (policies, bans): (&[&[Limit]], &[Ban]),
) -> usize {
    redis.command::<()>("FLUSHALL", [""; 0]).await;
    let memory = clock.memory_store();
    let seed = seed();
    println!("TOWER_QUOTA_SEED={seed}");
    let mut seeds = [0; 32];
    seeds[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seeds);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let strategy = step(window, policies.len());

    let mut keys = ["j", "k", "l"].map(Key::from);
    let mut latest = 0;
    let mut admissions = Vec::new();
    let mut taken: Vec<Taken<'_>> = Vec::new();
    let mut recent = Vec::new();
    let mut total = 0;
    for number in 0..steps {
        let mut next = strategy.new_tree(&mut runner).expect("a step").current();
        // Before the year 2100, and so long before the largest integer of Lua, the clock starts again.
        let now = clock.now().saturating_add_signed(next.moves);
        clock.set(now);
        if now > 4_000_000_000_000_000 {
            clock.set(Clock::new().now());
            keys = ["j", "k", "l"].map(|name| Key::from(name).and(number as u64));
            latest = 0;
        }
        clock.write_to(redis).await;
        // Sent one by one, the first checks would return what is left with the entries ahead of the clock, and later checks
        // what is left without them.
        latest = latest.max(clock.now());
        let shortest = (window / 4).min(Duration::from_secs(1));
        if latest > clock.now() + shortest.as_micros() as u64 {
            next.requests.truncate(1);
            next.requests[0].callers = 1;
        }
        for planned in &mut next.requests {
            if let Operation::Refund { admitted_at } = &mut planned.operation {
                let earlier = admissions.len().saturating_sub(planned.admission + 1);
                *admitted_at = Duration::from_micros(admissions.get(earlier).copied().unwrap_or_default());
            }
        }

        let limit_of = |policy: usize| &policies[policy][number / LASTS % policies[policy].len()];
        let mut charges_of = |planned: &Planned| -> (Vec<_>, Vec<_>) {
            let charge_of =
                |(lease, ban): (_, Option<usize>)| planned.charge_of(lease, ban.map(|ban| &bans[ban]), &keys);
            let leases = planned.charges.iter().map(|(policy, cost, ban)| {
                let takes = matches!(planned.operation, Operation::Check | Operation::Charge);
                let same = |lease: &&Taken<'_>| lease.policy == *policy && lease.key == planned.key;
                let earlier = taken.iter().rev().filter(same).nth(planned.admission);
                let lease = earlier.copied().filter(|_| !takes).unwrap_or_else(|| Taken {
                    id: LeaseId::random(),
                    policy: *policy,
                    key: planned.key,
                    limit: limit_of(*policy),
                    cost: *cost,
                });
                if takes {
                    taken.push(lease);
                }
                (lease, *ban)
            });
            let leases: Vec<_> = leases.collect();
            let charges = leases.iter().copied().map(charge_of).collect();
            (leases, charges)
        };
        recent.push(format!("{} {next:?}", clock.now()));
        let sent = next.requests.iter();
        let sent: Vec<_> = sent
            .flat_map(|planned| std::iter::repeat_n(planned, planned.callers))
            .map(|planned| (planned.operation, charges_of(planned)))
            .collect();
        let requests = sent.iter();
        let requests: Vec<_> = requests
            .map(|(operation, (_, charges))| StoreRequest::new(*operation, charges))
            .collect();
        total += requests.len();
        // What the bans are afterwards.
        let with_bans = sent
            .iter()
            .filter(|(_, (leases, _))| leases.iter().any(|(_, ban)| ban.is_some()));
        let reads = Operation::Ban { length: Duration::ZERO };
        let bans_read = with_bans.map(|(_, (_, charges))| StoreRequest::new(reads, charges));
        let requests: Vec<_> = requests.into_iter().chain(bans_read).collect();
        let in_memory = memory.decide(&requests).await.expect("memory answers");
        let in_redis = shared.decide(&requests).await.expect("Redis answers");
        let differs = in_memory
            .outcomes()
            .iter()
            .zip(in_redis.outcomes())
            .position(|(a, b)| a != b);
        assert!(
            differs.is_none() && in_memory.outcomes().len() == in_redis.outcomes().len(),
            "memory {:?}, then Redis {:?}: request {differs:?} of step {number} under {policies:?}, after {:#?}\nTOWER_QUOTA_SEED={seed}",
            differs.map(|request| &in_memory.outcomes()[request]),
            differs.map(|request| &in_redis.outcomes()[request]),
            &recent[recent.len().saturating_sub(20)..],
        );
        if number % EXPIRY_EVERY == 0 {
            let early = expire_early(redis, clock, requests.iter().zip(in_redis.outcomes())).await;
            assert!(
                early.is_empty(),
                "{early:?} expire while they matter: step {number} under {policies:?}, after {:#?}\nTOWER_QUOTA_SEED={seed}",
                &recent[recent.len().saturating_sub(20)..],
            );
        }

        let is_admission = |(request, outcome): (&StoreRequest<'_>, &Outcome)| {
            outcome.allowed && matches!(request.operation(), Operation::Check | Operation::Charge)
        };
        if requests.iter().zip(in_redis.outcomes()).any(is_admission) {
            admissions.push(clock.now());
        }
    }
    total
}

const WINDOW: Duration = Duration::from_millis(10);

#[tokio::test]
async fn the_sliding_log_decides_alike_in_rust_and_in_lua() {
    agree(
        WINDOW,
        &[&[SlidingLog::new(6, WINDOW).into(), SlidingLog::new(3, WINDOW).into()]],
    )
    .await;
}

#[tokio::test]
async fn a_sliding_log_with_merged_checks_decides_alike_in_rust_and_in_lua() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let shared = clock.redis_store(&redis).await;
    let policies: &[&[Limit]] = &[&[SlidingLog::new(60, WINDOW).into(), SlidingLog::new(25, WINDOW).into()]];
    redis.command::<()>("CONFIG", ["RESETSTAT"]).await;
    // So many that the share of those that merge differs little from one seed to the next.
    let requests = agree_in((&redis, &clock, &shared), 4 * steps(), alike, WINDOW, policies).await;

    // A charge of a log reads its size once, for all callers that are merged.
    let sizes = redis.calls("zrevrank").await as usize;
    assert!(
        (1..requests * 9 / 10).contains(&sizes),
        "{sizes} of {requests} requests"
    );
}

/// As in a rolling deploy, and with plans: each window and each precision has counts of its own.
#[tokio::test]
async fn sliding_logs_of_several_windows_and_precisions_decide_alike_in_rust_and_in_lua() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let shared = clock.redis_store(&redis).await;
    let log = |quota, window| Limit::from(SlidingLog::new(quota, window));
    let coarse = |quota, window| Limit::from(SlidingLog::new(quota, window).precision(5));
    let versions = [
        log(6, WINDOW),
        log(3, WINDOW / 4),
        coarse(6, WINDOW),
        log(60, WINDOW / 2),
        log(9, WINDOW * 3 / 10),
        coarse(7, WINDOW * 2 / 5),
        log(8, WINDOW * 3),
    ];
    let many: &[&[Limit]] = &[&versions, &[log(20, WINDOW * 2), log(6, WINDOW)]];
    agree_for::<3>((&redis, &clock, &shared), steps(), alike, WINDOW, (&many[..1], &[])).await;
    agree_for::<7>((&redis, &clock, &shared), steps() / 2, mixed, WINDOW, (many, &[])).await;
}

#[tokio::test]
async fn slots_are_taken_renewed_and_released_alike_in_rust_and_in_lua() {
    let lease = Duration::from_secs(1);
    let versions = [
        Concurrency::new(4).lease(lease).into(),
        Concurrency::new(2).lease(lease).into(),
        Concurrency::new(4).lease(2 * lease).into(),
        Concurrency::new(70).lease(lease).into(),
    ];
    let log = [SlidingLog::new(6, lease).into()];
    agree(lease, &[&versions]).await;
    agree_on(steps() / 2, mixed, lease, &[&versions, &log]).await;
    agree_on(steps() / 2, leased, lease, &[&versions, &log]).await;
}

#[tokio::test]
async fn the_coarse_sliding_log_decides_alike_in_rust_and_in_lua() {
    let coarse = |limit, window| Limit::from(SlidingLog::new(limit, window).precision(7));
    let versions = [
        coarse(9, WINDOW),
        SlidingLog::new(9, WINDOW).into(),
        coarse(20, WINDOW / 4),
        // A grain of a microsecond.
        SlidingLog::new(9, WINDOW).precision(10_000).into(),
    ];
    agree(WINDOW, &[&versions]).await;
}

#[tokio::test]
async fn the_sliding_counter_decides_alike_in_rust_and_in_lua() {
    let versions = [
        SlidingCounter::new(6, WINDOW).into(),
        SlidingCounter::new(13, WINDOW).into(),
        SlidingCounter::new(13, WINDOW / 4).into(),
    ];
    agree(WINDOW, &[&versions]).await;
}

#[tokio::test]
async fn a_sliding_counter_with_large_numbers_decides_alike_in_rust_and_in_lua() {
    let month = Duration::from_secs(30 * 86_400);
    agree(
        month,
        &[&[
            SlidingCounter::new(7, month).into(),
            SlidingCounter::new(1_000_000_007, month).into(),
        ]],
    )
    .await;
}

#[tokio::test]
async fn the_fixed_window_decides_alike_in_rust_and_in_lua() {
    let versions = [
        FixedWindow::new(6, WINDOW).into(),
        FixedWindow::new(4, WINDOW * 2).into(),
    ];
    agree(WINDOW, &[&versions]).await;
}

#[tokio::test]
async fn the_aligned_fixed_window_decides_alike_in_rust_and_in_lua() {
    let versions = [
        FixedWindow::new(6, WINDOW).aligned().into(),
        FixedWindow::new(4, WINDOW * 2).aligned().into(),
        FixedWindow::new(4, WINDOW).into(),
    ];
    agree(WINDOW, &[&versions]).await;
}

#[tokio::test]
async fn calendar_windows_decide_alike_in_rust_and_in_lua() {
    let calendar = |calendar| Limit::from(FixedWindow::calendar(9, calendar, "Europe/Berlin").unwrap());
    let versions = [
        Calendar::Hour,
        Calendar::Day,
        Calendar::Week,
        Calendar::Month,
        Calendar::Year,
    ]
    .map(calendar);
    agree(Duration::from_secs(86_400), &[&versions]).await;
}

#[tokio::test]
async fn the_token_bucket_decides_alike_in_rust_and_in_lua() {
    let versions = [
        TokenBucket::new(7, WINDOW).into(),
        TokenBucket::new(7, WINDOW).burst(3).into(),
        TokenBucket::new(3, WINDOW).burst(11).into(),
        // Two tokens in an odd number of microseconds: not one in half of them.
        TokenBucket::new(2, WINDOW + Duration::from_micros(1)).burst(5).into(),
    ];
    agree(WINDOW, &[&versions]).await;
}

#[tokio::test]
async fn a_token_bucket_with_large_numbers_decides_alike_in_rust_and_in_lua() {
    let month = Duration::from_secs(30 * 86_400);
    let versions = [
        TokenBucket::new(999_983, month).burst(5).into(),
        TokenBucket::new(999_983, month).burst(999_983).into(),
        TokenBucket::new(1, Duration::from_secs(10 * 365 * 86_400)).into(),
    ];
    agree(month / 999_983 * 5, &[&versions]).await;
}

#[tokio::test]
async fn several_policies_decide_alike_in_rust_and_in_lua() {
    agree(
        WINDOW,
        &[
            &[
                SlidingLog::new(6, WINDOW).into(),
                SlidingLog::new(9, WINDOW).precision(5).into(),
            ],
            &[SlidingCounter::new(7, WINDOW * 2).into()],
            &[
                FixedWindow::new(8, WINDOW).into(),
                FixedWindow::new(8, WINDOW).aligned().into(),
            ],
            &[TokenBucket::new(5, WINDOW).burst(6).into()],
        ],
    )
    .await;
}

#[tokio::test]
async fn batches_of_many_operations_and_algorithms_decide_alike_in_rust_and_in_lua() {
    let hours = FixedWindow::calendar(5, Calendar::Hour, "UTC").unwrap();
    agree_on(
        steps() / 2,
        mixed,
        WINDOW,
        &[
            &[SlidingLog::new(6, WINDOW).into(), SlidingLog::new(3, WINDOW).into()],
            &[SlidingLog::new(9, WINDOW).precision(5).into()],
            &[SlidingCounter::new(7, WINDOW * 2).into()],
            &[FixedWindow::new(8, WINDOW).into()],
            &[FixedWindow::new(8, WINDOW).aligned().into()],
            &[hours.into()],
            &[
                TokenBucket::new(5, WINDOW).burst(6).into(),
                TokenBucket::new(7, WINDOW).burst(3).into(),
            ],
            &[FixedWindow::new(2, WINDOW).into()],
        ],
    )
    .await;
}

fn bans() -> [Ban; BANS] {
    let ban = |denials, window, first, longest| Ban::after(denials, window).first(first).longest(longest);
    [
        ban(3, WINDOW * 2, WINDOW / 4, WINDOW * 4),
        ban(2, WINDOW * 2, WINDOW / 4, WINDOW),
        ban(3, WINDOW / 2, WINDOW / 10, WINDOW / 10),
        ban(1, WINDOW, WINDOW / 8, WINDOW * 9),
        Ban::by_hand(),
    ]
}

#[tokio::test]
async fn bans_decide_alike_in_rust_and_in_lua() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let shared = clock.redis_store(&redis).await;
    let limits: &[&[Limit]] = &[
        &[SlidingLog::new(6, WINDOW).into(), SlidingLog::new(3, WINDOW).into()],
        &[FixedWindow::new(2, WINDOW).into()],
        &[TokenBucket::new(5, WINDOW).burst(3).into()],
    ];
    agree_for::<64>((&redis, &clock, &shared), steps(), banned, WINDOW, (limits, &bans())).await;
}

#[tokio::test]
async fn logs_of_more_entries_than_a_call_may_read_decide_alike_in_rust_and_in_lua() {
    let versions = [
        SlidingLog::new(3_000, WINDOW).into(),
        SlidingLog::new(3_000, WINDOW).precision(3).into(),
        SlidingLog::new(1_200, WINDOW).into(),
        SlidingLog::new(3_000, WINDOW * 3).into(),
    ];
    agree_on(steps() / 10, bursts, WINDOW, &[&versions]).await;
    let fine = SlidingLog::new(4_000, WINDOW).precision(10_000).into();
    agree_on(2 * steps(), dense, WINDOW, &[&[fine]]).await;
}

#[tokio::test]
async fn the_script_decides_alike_in_the_lua_of_dragonfly() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let lua = Lua54::start(&redis);
    let shared = clock.redis_store_at(&redis, &lua.url()).await;
    let policies: &[&[Limit]] = &[
        &[
            SlidingLog::new(6, WINDOW).into(),
            SlidingLog::new(9, WINDOW).precision(5).into(),
        ],
        &[SlidingCounter::new(7, WINDOW * 2).into()],
        &[FixedWindow::new(8, WINDOW).into()],
        &[FixedWindow::calendar(5, Calendar::Hour, "UTC").unwrap().into()],
        &[TokenBucket::new(5, WINDOW).burst(6).into()],
        &[Concurrency::new(3).into()],
    ];
    let timeline = (&redis, &clock, &shared);
    agree_in(timeline, steps() / 50, mixed, WINDOW, policies).await;
    agree_in(timeline, steps() / 50, alike, WINDOW, &policies[..3]).await;
    let limits = [policies[2], policies[0], policies[1], policies[4]];
    agree_for::<64>(timeline, steps() / 50, banned, WINDOW, (&limits, &bans())).await;
    let long: &[&[Limit]] = &[&[SlidingLog::new(3_000, WINDOW).into()]];
    agree_in(timeline, steps() / 500, bursts, WINDOW, long).await;
}

/// Without a clock of the test: Redis decides by its own time, then the memory store by the same time. Meanwhile keys of
/// Redis expire.
#[tokio::test]
async fn keys_that_expire_decide_alike_in_rust_and_in_lua() {
    const ROUNDS: usize = 6;
    let redis = Redis::start();
    let shared = connected(patient().deny_cache(false), &redis.url()).await;
    let clock = Clock::new();
    let memory = clock.memory_store();
    let limits: [Limit; 7] = [
        SlidingLog::new(4, WINDOW).into(),
        SlidingLog::new(6, WINDOW * 30).into(),
        SlidingLog::new(6, WINDOW).precision(3).into(),
        SlidingCounter::new(5, WINDOW * 10).into(),
        FixedWindow::new(5, WINDOW).into(),
        FixedWindow::new(5, WINDOW * 20).aligned().into(),
        TokenBucket::new(9, WINDOW * 20).burst(4).into(),
    ];
    let keys = ["j", "k", "l"].map(Key::from);

    let seed = seed();
    println!("TOWER_QUOTA_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut admissions = vec![Duration::ZERO];
    let mut expired = 0;
    for round in 0..ROUNDS {
        for step in 0..300 {
            let operation = match rng.u32(..10) {
                0 => Operation::Charge,
                1 => Operation::Peek,
                2 => Operation::Refund {
                    admitted_at: admissions[rng.usize(admissions.len().saturating_sub(8)..admissions.len())],
                },
                _ => Operation::Check,
            };
            let number = rng.usize(..limits.len());
            let limit = &limits[number];
            // A key that was kept for a shorter window may be gone before a longer one ends; a log outlives both.
            let policy = ["log", "log", "log", "counter", "anchored", "aligned", "bucket"][number];
            let charges = [Charge::new(
                policy,
                limit,
                &keys[rng.usize(..keys.len())],
                rng.u64(1..4),
            )];
            let request = [StoreRequest::new(operation, &charges)];
            let in_redis = shared.decide(&request).await.expect("Redis replies");
            clock.set(in_redis.server_time.as_micros() as u64);
            let in_memory = memory.decide(&request).await.expect("memory replies");
            assert_eq!(
                in_memory, in_redis,
                "memory, then Redis: round {round}, step {step}, {request:?}"
            );
            if in_redis.outcomes()[0].allowed {
                admissions.push(in_redis.server_time);
            }
        }

        // In some rounds a part of the keys is left, in others none.
        let before: usize = redis.command("DBSIZE", [""; 0]).await;
        let left = [before.saturating_sub(1), before / 2, 0][round % 3];
        eventually("keys expire", async || {
            redis.command::<usize>("DBSIZE", [""; 0]).await <= left
        })
        .await;
        expired += before - left;
    }
    assert!(expired > ROUNDS, "{expired} keys expired");
}
