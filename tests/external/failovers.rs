//! The alerts while a replica takes over, slots of a cluster move, and the clock of Redis is set.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use tokio::time::{interval, sleep};

use crate::{
    fleet::{Replica, for_seven_callers, with_redis},
    prometheus::{Prometheus, in_seconds},
    support::{Cluster, Faketime, PATIENCE, Redis, Sentinel, eventually},
};

const FAILED_OVER: [&str; 2] = ["cluster-failed-over", "sentinel-failed-over"];

const HOUR_MS: i64 = 3_600_000;

/// Moves the slots of the callers from primary to primary, twenty a second at most, until it is stopped, and counts the moves.
async fn move_slots(cluster: &Cluster, moves: &Cell<usize>, stopped: &Cell<bool>) {
    let mut slots = Vec::new();
    for user in 0..7 {
        let slot = cluster.slot(&format!("{{header:user={user}}}")).await;
        slots.push((slot, Cluster::owner(slot)));
    }
    let mut pace = interval(Duration::from_millis(50));
    while !stopped.get() {
        pace.tick().await;
        let (slot, from) = &mut slots[moves.get() % 7];
        let to = (*from + 1) % cluster.primaries.len();
        cluster.begin_to_move(*slot, *from, to).await;
        cluster.move_keys(*slot, *from, to).await;
        cluster.end_moving(*slot, to).await;
        *from = to;
        moves.set(moves.get() + 1);
    }
}

/// The names of the alerts that fire, by job.
type Firing = BTreeMap<String, BTreeSet<String>>;

/// Panics if an alert fires that the job cannot have.
fn assert_possible(firing: &Firing) {
    let of_outages = [
        "LimitRedisDoesNotReply",
        "LimitRedisNodeDown",
        "LimitRejectsByFailure",
        "LimitSettlementsLost",
        "LimitStoreFails",
    ];
    for (job, alerts) in firing {
        let is_possible = |alert: &String| FAILED_OVER.contains(&&**job) && of_outages.contains(&&**alert);
        assert!(alerts.iter().all(is_possible), "{alerts:?} of {job}");
    }
}

/// The times of the rules are divided by 60, so a failover of seconds is one of minutes by the rules.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs Prometheus and faketime: `.ci/test`"]
async fn a_failover_ends_its_alerts_and_slots_that_move_or_a_clock_that_is_set_fire_none() {
    let (mut sentinel, mut failing, moving) = tokio::join!(
        Sentinel::start_that_fails_over(),
        Cluster::start_that_fails_over(),
        Cluster::start()
    );
    let clocks = [Faketime::new(), Faketime::new()];
    let clocked: Vec<Redis> = clocks.iter().map(Faketime::start_redis).collect();
    let urls = [
        ("clock-forward", clocked[0].url()),
        ("clock-back", clocked[1].url()),
        ("moving", moving.url()),
        (FAILED_OVER[0], failing.url()),
        (FAILED_OVER[1], sentinel.url()),
    ];
    let replicas = urls.map(|(job, url)| (job, Replica::start(|| with_redis(url), 24, for_seven_callers)));
    let jobs = replicas.iter().map(|(job, replica)| (*job, vec![replica.url.clone()]));
    let rules = in_seconds(include_str!("../../docs/alerts.yml"));
    let Some(prometheus) = Prometheus::start("250ms", &rules, &jobs.collect()).await else {
        return;
    };
    // The rates of the rules have values then.
    sleep(Duration::from_secs(6)).await;
    assert_eq!(prometheus.firing().await, Firing::new(), "there is no fault");

    clocks[0].set(HOUR_MS);
    clocks[1].set(-HOUR_MS);
    sentinel.primary.kill();
    failing.primaries[1].kill();
    let (began, mut fired) = (Instant::now(), BTreeMap::new());
    let mut observe = async || {
        let firing = prometheus.firing().await;
        assert_possible(&firing);
        for (job, alerts) in &firing {
            for alert in alerts {
                let fired = fired.entry((job.clone(), alert.clone()));
                let (_, last) = fired.or_insert((began.elapsed(), began.elapsed()));
                *last = began.elapsed();
            }
        }
        let has = |job: &str, alert: &str| fired.contains_key(&(job.to_owned(), alert.to_owned()));
        FAILED_OVER
            .iter()
            .all(|job| has(job, "LimitStoreFails") && has(job, "LimitRejectsByFailure"))
            && firing.is_empty()
    };
    let (moves, stopped) = (Cell::new(0), Cell::new(false));
    let observed = async {
        eventually("the alerts of the failovers fire and end", &mut observe).await;
        // The other alerts would have fired meanwhile, but for that of half an hour of denials. Each slot has moved twice.
        while began.elapsed() < Duration::from_secs(20) || moves.get() < 14 {
            assert!(began.elapsed() < PATIENCE, "{} moves", moves.get());
            observe().await;
            sleep(Duration::from_millis(250)).await;
        }
        stopped.set(true);
    };
    tokio::join!(move_slots(&moving, &moves, &stopped), observed);
    for ((job, alert), (first, last)) in &fired {
        eprintln!("{alert} of {job} from {first:.1?} to {last:.1?}");
    }
}
