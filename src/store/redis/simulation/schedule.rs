//! Runs one schedule from a seed: the callers, the network and the runtimes.

use std::{iter, sync::Arc, time::Duration};

use fastrand::Rng;
use tokio::{
    runtime::Builder,
    time::{Instant, sleep, sleep_until},
};

use super::{
    caller::{Caller, Records, SimulatedRequest, Stage, Then},
    faults::Faults,
    history,
    network::{Network, simulated_backend},
    plan::{Kind, Plan},
    runtime::Runtime,
};
use crate::{
    Key, SlidingLog,
    store::{
        Charge, Operation, Store, StoreRequest,
        redis::{deny_cache::DenyCache, queues::CommitQueues, store::RedisStore},
    },
};

fn store(network: &Network, plan: &Plan) -> RedisStore {
    let mut backend = simulated_backend(network.clone());
    backend.deny_cache = Some(DenyCache::new());
    let _ = backend.several_slots.set(plan.reaches_several_slots);
    let queues = CommitQueues::new(backend);
    RedisStore::new(queues)
}

/// Runs a schedule, and panics if a promise is broken.
pub(super) fn run(seed: u64, plan: &Plan) {
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(play(seed, plan));
}

async fn play(seed: u64, plan: &Plan) {
    let mut rng = Rng::with_seed(seed);
    let network = Network::new(rng.u64(..), plan.clustered);
    let store = store(&network, plan);
    let started = Instant::now();
    let others = (1..plan.processes).map(|_| self::store(&network, plan));
    let stage = Stage {
        store: store.clone(),
        processes: iter::once(store.clone()).chain(others).collect(),
        network: network.clone(),
        records: Records::default(),
        polled: Arc::default(),
        counts_jump: plan.faults.clock_step > 0 || plan.resets,
    };
    let mut runtimes: Vec<Runtime> = (0..plan.runtimes).map(|_| Runtime::default()).collect();

    if plan.clustered {
        let full = SimulatedRequest::new(Kind::Across, usize::MAX, &mut rng);
        let (policy, limit, key) = &full.charges[2];
        let charges = [Charge::new(policy, limit, key, 1)];
        let filled = store.decide(&[StoreRequest::new(Operation::Charge, &charges)]).await;
        filled.expect("the network is good");
    }
    let loaded = SimulatedRequest::new(Kind::Own, usize::MAX, &mut rng)
        .call(&store)
        .await;
    loaded.expect("the network is good");
    network.set_faults(plan.faults);

    // The events by their time.
    let mut events: Vec<(Duration, Event)> = Vec::new();
    let at = |rng: &mut Rng| Duration::from_micros(rng.u64(..Plan::LASTS.as_micros() as u64));
    // Most requests come in bursts, since only then is there a queue.
    let bursts: Vec<_> = (0..rng.u32(1..6)).map(|_| at(&mut rng)).collect();
    let in_burst = |rng: &mut Rng| bursts[rng.usize(..bursts.len())] + Duration::from_micros(rng.u64(..6_000));
    for _ in 0..rng.u32(1..40) {
        events.push((in_burst(&mut rng), Event::Request));
    }
    events.extend((0..plan.endings).map(|_| (in_burst(&mut rng), Event::End)));
    events.extend((0..plan.stalls).map(|_| (in_burst(&mut rng), Event::Stall)));
    events.sort_by_key(|(at, _)| *at);

    for (number, (at, event)) in events.into_iter().enumerate() {
        sleep_until(started + at).await;
        let runtime = rng.usize(..runtimes.len());
        match event {
            Event::Request => {
                let request = SimulatedRequest::new(Kind::any(&mut rng, plan), number, &mut rng);
                let late = rng.u32(..10) == 0;
                let leaves_after = (rng.u32(..8) == 0).then(|| Duration::from_micros(rng.u64(..20_000)));
                let delay = late.then(|| Duration::from_micros(rng.u64(..500_000)));
                let then = match rng.u32(..12) {
                    0 if plan.endings > 0 => Then::End,
                    1 if plan.stalls > 0 => Then::Stall(Duration::from_micros(rng.u64(..600_000))),
                    _ => Then::Wait,
                };
                let caller = Caller {
                    request,
                    delay: delay.unwrap_or_default(),
                    leaves_after,
                    then,
                };
                if !runtimes[runtime].has_ended() {
                    stage.start(caller, &runtimes[runtime]);
                }
            }
            Event::End => {
                stage.end(&runtimes[runtime]);
                runtimes[runtime] = Runtime::default();
            }
            Event::Stall => stage.stall(&runtimes[runtime], Duration::from_micros(rng.u64(..600_000))),
        }
    }

    sleep_until(started + Plan::LASTS).await;
    network.set_faults(Faults::default());
    if plan.resets {
        // Requests of late callers may be in flight.
        while !store.queues.are_idle() {
            sleep(Duration::from_millis(1)).await;
        }
        verify_deny_cache(&store, &network);
    }
    let survivor = Runtime::default();
    verify_recovery(&store, &survivor).await;
    // Stalls follow each other, so that a late caller may begin seconds after the faults.
    stage.wait_for_callers().await;
    // Past every deadline, and every call that a caller left behind.
    sleep(Duration::from_secs(3)).await;
    verify_settled(plan, &stage).await;

    let records = stage.records.lock().expect("no panic").clone();
    if std::env::var_os("TOWER_QUOTA_SEED").is_some() {
        eprintln!("{:#?}", network.events());
    }
    history::check(plan, &records, &network);
}

enum Event {
    Request,
    End,
    Stall,
}

/// The server would deny what the deny cache denies, once no reset is in flight.
fn verify_deny_cache(store: &RedisStore, network: &Network) {
    for key in ["shared-0", "shared-1", "shared-2"] {
        let request = SimulatedRequest::of_shared(key);
        let denied = request.is_denied_by(network);
        if let Ok(Ok(_)) = request.call(store).try_ready() {
            assert!(denied, "the deny cache denies {key}, and the server would admit it");
        }
    }
}

/// Checks succeed again once the server replies, whatever happened to the tasks that probed it.
async fn verify_recovery(store: &RedisStore, runtime: &Runtime) {
    let (store, since) = (store.clone(), Instant::now());
    let (sender, recovered) = tokio::sync::oneshot::channel();
    runtime.spawn(async move {
        let mut successes = 0;
        while successes < 3 {
            let request = SimulatedRequest {
                kind: Kind::Own,
                charges: vec![("recovery", SlidingLog::per_hour(1_000).into(), Key::from("full"))],
                ban: None,
            };
            match request.call(&store).await {
                Ok(_) => successes += 1,
                Err(error) => assert!(
                    since.elapsed() < Plan::RECOVERS,
                    "the server replies, and still: {error}"
                ),
            }
            sleep(Duration::from_millis(20)).await;
        }
        let _ = sender.send(());
    });
    recovered.await.expect("the store recovers");
}

/// In the end no call counts as in flight, no request waits, and the charges of denied requests are refunded.
async fn verify_settled(plan: &Plan, stage: &Stage) {
    let Stage {
        store,
        processes,
        network,
        records,
        ..
    } = stage;
    assert!(
        processes.iter().all(|store| store.queues.are_idle()),
        "a queue has calls in flight or waiting requests"
    );
    let calls = network.calls();
    sleep(Duration::from_secs(2)).await;
    assert_eq!(network.calls(), calls, "a server that replies is probed");

    // Entries ahead of a clock that was set back may count now.
    let shared = match plan.faults.clock_step {
        0 => &["shared-0", "shared-1", "shared-2"][..],
        _ => &[],
    };
    for key in shared {
        let response = SimulatedRequest::of_shared(key).call(store).await;
        let denied = !matches!(response, Ok(response) if response.outcomes[0].allowed);
        assert!(!denied, "{key} is denied, and nothing was charged for seconds");
    }

    let has_replies = plan.faults.slow + plan.faults.reply_lost + plan.faults.cut_before == 0;
    if plan.clustered && has_replies {
        let records = records.lock().expect("no panic");
        for record in records.iter().filter(|record| record.kind == Kind::Across) {
            let (_full, others) = record.keys.split_last().expect("it has keys");
            for key in others {
                let charged = network.charged(key).len() as u64;
                let refunded = network.refunded(key);
                assert_eq!(refunded, charged, "{key} is charged for a denied request: {record:?}");
            }
        }
    }
}
