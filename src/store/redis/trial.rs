//! The trial of what a check needs, before the first one.

use std::{
    error::Error,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::{Instant, sleep, timeout};

use super::{
    link::Failure,
    patience::Patience,
    refusal::Refusal,
    script::{Call, RawReply},
    server::{LONGEST_STALL, Server},
    task::try_spawn,
};
use crate::{
    ConfigError,
    store::{ErrorKind, StoreError},
};

/// The pauses between trials double from the first to the second of these.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(100)];
/// How long Redis may take for a trial, in which it may have to compile the script.
const PATIENCE: Duration = Duration::from_secs(1);

impl Server {
    /// Runs each command that the scripts use, on each primary. A refusal comes before other failures.
    pub(super) async fn try_out(&self) -> Result<(), Failure> {
        let mut tried = Ok(());
        for tag in self.link.hash_tags()? {
            match self.try_out_at(&tag).await {
                Err(refused @ Failure::Forbidden(_)) => return Err(refused),
                other => tried = tried.and(other),
            }
        }
        tried
    }

    async fn try_out_at(&self, tag: &str) -> Result<(), Failure> {
        let call = Call::trial(self.names.trial_key(tag));
        let reply = self.link.run(self.script, &call, PATIENCE + LONGEST_STALL);
        let reply = Patience::new(PATIENCE).wait(reply, || {}).await;
        let reply = reply
            .unwrap_or(Err(Failure::Timeout))
            .map_err(|failure| match failure {
                Failure::Forbidden(refusal) => Failure::Forbidden(refusal.before_the_commands()),
                failure => failure,
            })?;

        let [command, error] = &*reply.errors else {
            return Ok(());
        };
        Err(match Refusal::of_trial(command, error) {
            Some(refusal) => Failure::Forbidden(refusal),
            None => Failure::Refused(error.clone()),
        })
    }

    /// Waits until a trial passes; fails if Redis refuses for good. It calls `missed` after each trial without a result.
    async fn pass(&self, mut missed: impl FnMut(Failure)) -> Result<(), Refusal> {
        let [mut pause, longest] = PAUSES;
        loop {
            match self.try_out().await {
                Ok(()) => return Ok(()),
                Err(Failure::Forbidden(refusal)) => return Err(refusal),
                Err(failure) => missed(failure),
            }
            sleep(pause).await;
            pause = longest.min(2 * pause);
        }
    }

    /// Waits until a trial passes, for so long.
    pub(super) async fn connected(&self, connect_timeout: Duration) -> Result<(), ConfigError> {
        let mut last = None;
        match timeout(connect_timeout, self.pass(|failure| last = Some(failure))).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(refusal)) => Err(ConfigError::new(self.explain(&refusal))),
            Err(_) => Err(ConfigError::because(
                format!(
                    "Redis could not be used within the connect timeout of {connect_timeout:?}; a service that must start \
                     without Redis takes `connect_lazy`"
                ),
                cause(last.unwrap_or(Failure::Timeout)),
            )),
        }
    }

    /// Waits until a trial passes.
    pub(super) async fn ready(&self) -> Result<(), StoreError> {
        let passed = self.pass(drop).await;
        passed.map_err(|refusal| StoreError::new(ErrorKind::Refused, self.explain(&refusal)))
    }

    fn explain(&self, refusal: &Refusal) -> String {
        refusal.explain(self.names.prefix())
    }

    /// Takes note of what Redis replied to a call. A refusal is logged once per change of state.
    pub(super) fn note(self: &Arc<Self>, reply: &Result<RawReply, Failure>) {
        let refusal = match reply {
            Ok(reply) => reply.errors.iter().find_map(|error| Refusal::of_call(error)),
            Err(Failure::Forbidden(refusal)) => Some(refusal.clone()),
            Err(_) => return,
        };
        let Some(refusal) = refusal else {
            self.refused.replies();
            return;
        };
        if self.refused.fails() {
            // An error of a command in a script may not name the command; a trial does.
            let server = self.clone();
            try_spawn(async move {
                let tried = server.try_out().await;
                server.report(match &tried {
                    Err(Failure::Forbidden(precise)) => precise,
                    _ => &refusal,
                });
            });
        }
    }

    fn report(&self, refusal: &Refusal) {
        #[cfg(feature = "tracing")]
        tracing::error!(
            error = %self.explain(refusal),
            "Redis refuses what the store needs, and checks fail"
        );
        let _ = refusal;
    }
}

/// Runs trials until one passes, Redis refuses for good, or the store is dropped.
pub(super) async fn connect_in_background(server: Weak<Server>, connect_timeout: Duration) {
    let [mut pause, longest] = PAUSES;
    let started = Instant::now();
    let mut warned = false;
    loop {
        let Some(server) = server.upgrade() else { return };
        match server.try_out().await {
            Ok(()) => {
                #[cfg(feature = "tracing")]
                if warned {
                    tracing::info!("Redis can be used now");
                }
                return;
            }
            Err(Failure::Forbidden(refusal)) => {
                if server.refused.fails() {
                    server.report(&refusal);
                }
                return;
            }
            Err(failure) if !warned && started.elapsed() >= connect_timeout => {
                warned = true;
                let error = cause(failure);
                #[cfg(feature = "tracing")]
                tracing::warn!(%error, "Redis cannot be used yet; the store keeps connecting");
                let _ = error;
            }
            Err(_) => {}
        }
        drop(server);
        sleep(pause).await;
        pause = longest.min(2 * pause);
    }
}

/// Why a trial had no result, in plain words.
fn cause(failure: Failure) -> Box<dyn Error + Send + Sync> {
    match failure {
        Failure::Timeout => "Redis did not reply".into(),
        Failure::Unreachable(source) => source,
        Failure::Refused(error) => format!("Redis replied: {error}").into(),
        Failure::Forbidden(refusal) => format!("Redis replied: {}", refusal.error).into(),
        Failure::Protocol(fault) => fault.into(),
    }
}
