use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    io::AsyncBufReadExt,
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};
use tower_quota::{
    Key, RedisStore,
    store::{Charge, ErrorKind, Operation, Store, StoreError, StoreRequest},
};

use super::{
    history::{BESIDE, Check, KEYS, POLICY, Quota, Reply, quotas, random_cost},
    process::{PROCESSES, Processes, connect, now, report},
    run::Setup,
};

/// Processes of an application that check at a steady rate.
pub(super) struct Callers(Processes<Check>);

/// The time between ticks of a caller, and the checks in a tick: two of each key.
pub(super) const PAUSE: Duration = Duration::from_millis(20);
const CHECKS: usize = 4;

/// The test that calls [`call`].
const TEST: &str = "chaos::a_caller_checks_until_its_input_is_closed";

impl Callers {
    /// How many checks they make in this time.
    pub(super) fn checks_in(time: Duration) -> u64 {
        (PROCESSES * CHECKS) as u64 * (time.as_millis() / PAUSE.as_millis()) as u64
    }

    /// Starts them, and waits until all are connected. For each key so much is sent in all.
    pub(super) fn start(url: &str, setup: Setup, sent: u64) -> Self {
        Self(Processes::start(TEST, url, setup, sent))
    }

    /// Whether each of them has a decision of Redis on each key since then.
    pub(super) fn are_answered_since(&self, since: u64) -> bool {
        self.0.all(|checks| {
            let answered = |key| {
                let mut latest = checks.iter().rev().take_while(|check| check.ended() > since);
                latest.any(|check| check.key == key && check.sent > since && check.reply.is_by_redis())
            };
            (0..KEYS).all(answered)
        })
    }

    /// The resident memory of the largest, in KiB.
    pub(super) fn memory(&self) -> u64 {
        self.0.memory()
    }

    /// Ends them, and returns the checks of each.
    pub(super) fn stop(self) -> Vec<Vec<Check>> {
        let mut histories = self.0.stop();
        for checks in &mut histories {
            checks.sort_by_key(|check| check.sent);
        }
        histories
    }
}

/// The caller's side: checks until its input is closed.
pub(super) async fn call() {
    let Some((store, sent)) = connect().await else {
        return;
    };
    let quotas: Arc<[Quota]> = quotas(sent).into();
    let (mut ticks, mut checks) = (interval(PAUSE), JoinSet::new());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let begun = Instant::now();
    let mut pairs = (0..KEYS).cycle();
    let mut orders = tokio::io::BufReader::new(tokio::io::stdin()).lines();
    loop {
        tokio::select! {
            _ = orders.next_line() => break,
            Some(_) = checks.join_next() => {}
            _ = ticks.tick() => for key in pairs.by_ref().take(CHECKS / 2) {
                for _ in 0..2 {
                    let (store, quotas) = (store.clone(), quotas.clone());
                    checks.spawn(async move { report(check(&store, &quotas, key, begun).await) });
                }
            },
        }
    }
    checks.join_all().await;
}

async fn check(store: &RedisStore, quotas: &[Quota], key: usize, begun: Instant) -> Check {
    let (sent, started) = (now(), Instant::now());
    let name = Key::from(Quota::name(key));
    let (quota, cost) = (&quotas[key], random_cost());
    let mut charges = vec![Charge::new(POLICY, &quota.limit, &name, cost)];
    if let Some((limit, is_first)) = &quota.beside {
        let place = usize::from(!is_first);
        charges.insert(place, Charge::new(BESIDE, limit, &name, cost));
    }
    let reply = match store
        .decide(&[StoreRequest::new(Operation::Check, &charges)])
        .try_ready()
    {
        // What is ready at once was not sent.
        Ok(Ok(_)) => Reply::DeniedFromCache,
        Ok(Err(_)) => Reply::NotSent,
        Err(answer) => match answer.await {
            Ok(answer) if answer.outcomes()[0].allowed => {
                let at = answer.outcomes()[0].states()[0]
                    .decided_at
                    .unwrap_or(answer.server_time);
                Reply::Admitted(at.as_micros() as u64)
            }
            Ok(_) => Reply::Denied,
            Err(error) => failed(&error),
        },
    };
    Check {
        key,
        cost,
        sent,
        after: started - begun,
        took: started.elapsed(),
        reply,
    }
}

fn failed(error: &StoreError) -> Reply {
    match error.kind() {
        ErrorKind::Refused => Reply::Refused,
        _ => Reply::Missing,
    }
}
