use std::{
    mem,
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use tokio::time::{Instant, sleep, timeout};

use super::{
    acl::{Refusal, ReplyingServer},
    backend::{Backend, Deadline, LONG_CALL},
    call::ScriptCall,
    failure::Failure,
    key_format::slot_of,
    script::ScriptName,
    task::run_together,
};
use crate::store::{ErrorKind, StoreError};

/// Runs each command of the script on each primary, all at the same time, and then loads the scripts of checks. Of several failures it
/// returns a refusal first.
pub(super) async fn run_trial(backend: &Backend) -> Result<(), Failure> {
    let key = |tag| backend.key_format.trial_key(tag);
    let of_node = |(first, _)| {
        let key = key(first);
        let node = backend.client.node_of(slot_of(&key));
        let address = node.as_ref().and_then(|node| node.address());
        let server = address.map(|address| ReplyingServer::Node(address.into()));
        (ScriptCall::trial([key], None), server)
    };
    let trials: Vec<_> = match backend.client.is_clustered() {
        true => backend.client.hash_tags()?.into_iter().map(of_node).collect(),
        false => vec![(ScriptCall::trial(ONE_SERVER.map(key), None), None)],
    };
    let explained = |tried: Result<(), Failure>, server: &Option<ReplyingServer>| match server {
        Some(node) => tried.map_err(|failure| failure.of(node.clone())),
        // It is a node of a cluster, perhaps the only one.
        None => match tried {
            Err(Failure::Refused(error)) if error.starts_with("CROSSSLOT") => {
                Err(Failure::Forbidden(Refusal::new(error)))
            }
            tried => tried,
        },
    };
    let tried = trials.iter();
    all_or_refusal(tried.map(async |(trial, server)| explained(run_trial_at(backend, trial).await, server))).await?;
    // Only then: while a primary is dead, the trial is repeated.
    let taught = trials.iter();
    all_or_refusal(taught.map(async |(trial, server)| explained(teach(backend, trial).await, server))).await
}

/// Hash tags of keys in each quarter of the slots, which a node of a cluster refuses together.
const ONE_SERVER: [u32; 4] = [0, 1, 2, 3];

/// Runs these at the same time, until one is refused. That is the failure, or else one of the others.
async fn all_or_refusal<F: Future<Output = Result<(), Failure>>>(
    trials: impl Iterator<Item = F>,
) -> Result<(), Failure> {
    let is_refused = |tried: &Result<(), Failure>| tried.as_ref().is_err_and(Failure::is_refusal);
    let mut tried = run_together(trials, is_refused).await;
    tried.sort_by_key(|tried| !is_refused(tried));
    tried.into_iter().collect()
}

async fn run_trial_at(backend: &Backend, call: &ScriptCall) -> Result<(), Failure> {
    let reply = match backend.run_long_call(call).await {
        Err(Failure::Forbidden(refusal)) => return Err(Failure::Forbidden(refusal.before_the_commands())),
        reply => reply?,
    };

    let [command, error] = &*reply.errors else {
        return Ok(());
    };
    let refusal = Refusal::of_trial(command, error);
    Err(refusal.map_or_else(|| Failure::Refused(error.clone()), Failure::Forbidden))
}

/// Calls each script of checks without a check, so that Redis knows it before the first one. It fails if Redis refuses a script.
async fn teach(backend: &Backend, trial: &ScriptCall) -> Result<(), Failure> {
    let calls = ScriptName::of_checks().map(|script| async move {
        let call = ScriptCall::empty(script, trial.keys.clone());
        let refused = backend.run_long_call(&call).await.err().filter(Failure::is_refusal);
        refused.map_or(Ok(()), Err)
    });
    all_or_refusal(calls).await
}

/// Finds whether the script can use keys of several slots of each node of a cluster, of which only one is declared. Without that,
/// each call contains requests of one slot.
async fn try_several_slots(backend: &Backend) -> Result<(), Failure> {
    // The slots of the keys may be moving, or others than those that are known.
    const TRIALS: usize = 3;

    if !backend.client.is_clustered() || backend.several_slots.get().is_some() {
        return Ok(());
    }
    let mut refused = None;
    for _ in 0..TRIALS {
        match try_two_slots(backend).await {
            Ok(()) => {
                let _ = backend.several_slots.set(true);
                return Ok(());
            }
            Err(failure) if failure.is_no_reply() => return Err(failure),
            Err(failure) => {
                if failure.is_passing() {
                    sleep(2 * LONGEST_PAUSE).await;
                }
                refused = Some(failure);
            }
        }
    }
    let _ = backend.several_slots.set(false);
    tracing::info!(
        error = refused.as_ref().map(|failure| failure.cause()).as_deref(),
        "a script can use the keys of one slot of this cluster only; each call of the store contains checks of one slot"
    );
    Ok(())
}

/// Runs the commands of the script on a key that is not declared, in another slot than the one that is, on each primary.
async fn try_two_slots(backend: &Backend) -> Result<(), Failure> {
    let tags = backend.client.hash_tags()?.into_iter();
    let trials = tags.filter_map(|(first, second)| {
        let [declared, other] = [first, second?].map(|tag| backend.key_format.trial_key(tag));
        Some(async move { run_trial_at(backend, &ScriptCall::trial([declared], Some(other))).await })
    });
    let tried = run_together(trials, |_| false).await;
    let (silent, replied): (Vec<_>, Vec<_>) = tried
        .into_iter()
        .partition(|tried| tried.as_ref().is_err_and(Failure::is_no_reply));
    // Of those that do not reply nothing is known.
    let decisive = if replied.is_empty() { silent } else { replied };
    decisive.into_iter().collect()
}

/// A trial of all that the store requires, then of what it can do without.
async fn try_all(backend: &Backend) -> Result<(), Failure> {
    let tried = run_trial(backend).await;
    // A primary that does not reply says nothing of what the others permit.
    if tried.as_ref().err().is_none_or(Failure::is_no_reply) {
        try_several_slots(backend).await?;
    }
    tried?;
    if !backend.settings_checked.swap(true, Ordering::Relaxed) {
        check_settings(backend).await;
    }
    Ok(())
}

/// Logs the settings of Redis with which limits are lost, as far as its user may read them.
async fn check_settings(backend: &Backend) {
    let settings = &SETTINGS[..1 + usize::from(backend.client.is_clustered())];
    for (setting, expected) in settings {
        let value = Deadline::new(LONG_CALL).wait(backend.client.setting(setting)).await;
        if let Some(value) = value.flatten().filter(|value| value != expected) {
            tracing::warn!(
                setting,
                value,
                expected,
                "with this setting of Redis limits are lost; the page `redis` of the guide has the checklist"
            );
        }
    }
}

/// The second one is of clusters.
const SETTINGS: [(&str, &str); 2] = [
    ("maxmemory-policy", "noeviction"),
    ("cluster-require-full-coverage", "no"),
];

/// The pauses between trials double from the first one to the longest, and to the rare one after [`LONG_WAIT`].
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
const RARE_PAUSE: Duration = Duration::from_secs(1);
/// After this time trials are rare: each writes on every primary that replies, while one does not.
const LONG_WAIT: Duration = Duration::from_secs(5);

/// Waits until a trial succeeds, at most for the connect timeout. A refusal is an error at once.
pub(super) async fn connected(
    backend: &Arc<Backend>,
    server: &str,
    connect_timeout: Duration,
) -> Result<(), StoreError> {
    let (store, mut last) = (Arc::downgrade(backend), Failure::Timeout);
    let (mut warned, mut is_running) = (false, false);
    let trials = until_success(&store, |tried| {
        is_running = tried.is_none();
        let Some(failure) = tried else { return };
        // A Redis that is starting refuses connections too; a wrong port is seen at once.
        if failure.is_refused_connection() {
            warn_once(&mut warned, server, &failure);
        }
        last = failure;
    });
    match timeout(connect_timeout, trials).await {
        Ok(tried) => tried.map_err(|failure| explain(failure, backend)),
        Err(_) => {
            // Without a connection to the only server a trial ends at once.
            let is_connected = is_running && !backend.client.is_clustered() && !last.is_of_no_redis();
            let fix = if is_connected && matches!(last, Failure::Unreachable(_)) {
                last = Failure::Unreachable("Redis is connected, and had not replied to all calls of the trial".into());
                "`connect_timeout` sets a longer one"
            } else if last.is_of_certificate() {
                "its certificate is refused, and one of an own authority needs the file that `SSL_CERT_FILE` names"
            } else if server.starts_with("rediss")
                && last.is_no_reply()
                && !last.is_refused_connection()
                && !last.is_of_network()
            {
                "if the server has no TLS at this port, the URL begins with `redis`"
            } else if server.starts_with("redis") && last.is_of_no_redis() {
                "if the server has TLS at this port, the URL begins with `rediss`; else it may be no Redis, or one that \
                 restarts: a service that must start without it uses `connect_lazy`"
            } else {
                "a service that must start without Redis uses `connect_lazy`"
            };
            let cause = last.cause();
            let message =
                format!("{server} could not be used within the connect timeout of {connect_timeout:?}: {cause}; {fix}");
            Err(StoreError::new(last.kind(), message))
        }
    }
}

fn warn_once(warned: &mut bool, server: &str, failure: &Failure) {
    if !mem::replace(warned, true) {
        let error = &*failure.cause();
        tracing::warn!(server, error, "Redis cannot be used yet; the store keeps connecting");
    }
}

/// Waits until a trial succeeds. A refusal is an error at once, and so is the end of the runtime of the store.
pub(super) async fn ready(backend: &Arc<Backend>) -> Result<(), StoreError> {
    let trials = until_success(&Arc::downgrade(backend), drop).await;
    trials.map_err(|failure| explain(failure, backend))
}

/// The error of a failure, with the fix if it is a refusal.
pub(super) fn explain(failure: Failure, backend: &Backend) -> StoreError {
    let Failure::Forbidden(refusal) = failure else {
        return failure.into();
    };
    StoreError::new(ErrorKind::Refused, backend.explain(&refusal))
}

/// Tries until all is permitted, or the store is gone; fails with a refusal, and if its runtime has ended. `tried` is called before
/// each trial, and with each other failure.
async fn until_success(backend: &Weak<Backend>, mut tried: impl FnMut(Option<Failure>)) -> Result<(), Failure> {
    let (started, mut pause) = (Instant::now(), FIRST_PAUSE);
    loop {
        let Some(backend) = backend.upgrade() else {
            return Ok(());
        };
        tried(None);
        match try_all(&backend).await {
            Ok(()) => return Ok(()),
            Err(refused) if refused.is_refusal() => return Err(refused),
            Err(_) if backend.has_lost_its_runtime() => return Err(Failure::ended_runtime()),
            Err(failure) => tried(Some(failure)),
        }
        drop(backend);
        sleep(pause).await;
        let is_rare = started.elapsed() >= LONG_WAIT;
        let longest = if is_rare { RARE_PAUSE } else { LONGEST_PAUSE };
        pause = longest.min(2 * pause);
    }
}

/// Tries until all is permitted, and logs once that Redis cannot be used after this time.
pub(super) async fn connect_in_background(backend: Weak<Backend>, server: String, connect_timeout: Duration) {
    let (started, mut warned) = (Instant::now(), false);
    loop {
        let tried = until_success(&backend, |tried| {
            if let Some(failure) = tried.filter(|_| started.elapsed() >= connect_timeout) {
                warn_once(&mut warned, &server, &failure);
            }
        });
        let (tried, Some(backend)) = (tried.await, backend.upgrade()) else {
            return;
        };
        let Err(failure) = tried else {
            if warned {
                tracing::info!("Redis can be used now");
            }
            return;
        };
        let Failure::Forbidden(refusal) = failure else { return };
        if backend.may_log_refusal() {
            backend.log_refusal(&refusal);
        }
        warned = true;
        drop(backend);
        sleep(PERMISSION_PAUSE).await;
    }
}

/// How long after a refusal all is tried again: until then a permission may have been granted.
const PERMISSION_PAUSE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::redis::simulation::{
        history::ROUND_TRIP,
        network::{Network, simulated_backend},
    };

    #[tokio::test(start_paused = true)]
    async fn a_trial_takes_few_round_trips() {
        for is_clustered in [false, true] {
            let backend = simulated_backend(Network::new(0, is_clustered));
            let begun = Instant::now();
            run_trial(&backend).await.expect("the network is good");
            // The trial, then all scripts; each by its digest, and then with its text.
            assert!(begun.elapsed() <= 4 * ROUND_TRIP, "{:?}", begun.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn after_some_seconds_trials_are_rare() {
        let network = Network::new(0, false);
        network.cut_off();
        let backend = Arc::new(simulated_backend(network.clone()));
        let counting = async {
            sleep(2 * LONG_WAIT).await;
            let before = network.calls();
            sleep(Duration::from_secs(60)).await;
            network.calls() - before
        };
        let calls = tokio::select! {
            _ = ready(&backend) => unreachable!("the network is cut off"),
            calls = counting => calls,
        };
        assert!((20..=61).contains(&calls), "{calls}");
    }
}
