//! Connections to a server, which are replaced when they are lost, and are used in turn.

use std::{
    fmt::Display,
    future::{pending, poll_fn},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
};

use tokio::sync::watch;

use crate::store::redis::{
    credentials::{Authenticator, Credentials},
    failure::Failure,
    task::AbortOnDrop,
};

/// What is used in turn.
pub(super) struct InTurn<T> {
    pub(super) all: Box<[T]>,
    next: AtomicUsize,
}

impl<T> InTurn<T> {
    pub(super) fn new(all: impl IntoIterator<Item = T>) -> Self {
        Self {
            all: all.into_iter().collect(),
            next: AtomicUsize::new(0),
        }
    }

    /// All, from the next one on.
    pub(super) fn iter_from_next(&self) -> impl Iterator<Item = &T> {
        let next = self.next.fetch_add(1, Ordering::Relaxed) % self.all.len().max(1);
        let (before, after) = self.all.split_at(next);
        after.iter().chain(before)
    }

    /// The next connection that is established and not suspect. Without one, the next that is established, or why there is none: a
    /// refusal, if one was refused.
    pub(super) fn connection<'a, C>(
        &'a self,
        connected: impl Fn(&'a T) -> Result<C, Option<Failure>>,
        is_suspect: impl Fn(&C) -> bool,
    ) -> Result<C, Failure> {
        let (mut suspect, mut failure) = (None, None);
        for one in self.iter_from_next() {
            match connected(one) {
                Ok(connection) if !is_suspect(&connection) => return Ok(connection),
                Ok(connection) => suspect = suspect.or(Some(connection)),
                Err(error) if !failure.as_ref().is_some_and(Failure::is_refusal) => failure = error.or(failure),
                Err(_) => {}
            }
        }
        // Without a failure, no attempt has ended since the start, or since the connection was lost.
        suspect.ok_or_else(|| failure.unwrap_or_else(|| Failure::Unreachable("still connecting".into())))
    }
}

/// A connection that a task keeps, which ends with this.
pub(super) struct ManagedConnection<C> {
    state: watch::Receiver<ConnectionState<C>>,
    keeper: AbortOnDrop<()>,
    /// Authenticates the connection again, if the credentials are those of a provider.
    _authenticating: Option<AbortOnDrop<()>>,
}

pub(super) enum ConnectionState<C> {
    Connecting,
    Connected(C),
    Failed(Failure),
}

impl<C: Clone + Send + Sync + 'static> ManagedConnection<C> {
    /// Spawns the task that keeps it, and one that authenticates it again.
    pub(super) fn open<K, A>(
        authenticator: Option<Arc<Authenticator>>,
        keep: impl FnOnce(watch::Sender<ConnectionState<C>>, Option<Arc<Authenticator>>) -> K,
        authenticate: impl Fn(C, Credentials) -> A + Send + Sync + 'static,
    ) -> Self
    where
        K: Future<Output = ()> + Send + 'static,
        A: Future<Output = Result<(), String>> + Send,
    {
        let (sender, state) = watch::channel(ConnectionState::Connecting);
        let keeper = AbortOnDrop(tokio::spawn(keep(sender, authenticator.clone())));
        let of_authenticator = state.clone();
        let authenticating = authenticator.map(|authenticator| {
            authenticator.keep_authenticated(move |credentials| match &*of_authenticator.borrow() {
                ConnectionState::Connected(connection) => Some(authenticate(connection.clone(), credentials)),
                // The next one is authenticated when it is made.
                ConnectionState::Connecting | ConnectionState::Failed(_) => None,
            })
        });
        Self {
            state,
            keeper,
            _authenticating: authenticating,
        }
    }

    /// The connection, or why there is none, from the latest attempt, if one has ended.
    pub(super) fn connected(&self) -> Result<C, Option<Failure>> {
        Err(Some(match &*self.state.borrow() {
            ConnectionState::Failed(failure) if failure.is_refusal() => failure.clone(),
            _ if self.keeper.0.is_finished() => Failure::ended_runtime(),
            ConnectionState::Connected(connection) => return Ok(connection.clone()),
            ConnectionState::Failed(failure) => failure.clone(),
            ConnectionState::Connecting => return Err(None),
        }))
    }

    /// Waits until it is connected, or refused.
    #[cfg(feature = "cluster")]
    pub(super) async fn settled(&self) {
        let mut state = self.state.clone();
        let settled = state.wait_for(|state| match state {
            ConnectionState::Connected(_) => true,
            ConnectionState::Failed(failure) => failure.is_refusal(),
            ConnectionState::Connecting => false,
        });
        let _ = settled.await; // an error means that the store is dropped
    }
}

/// Waits until the connection to this server is lost, or one to another primary is made, on which the sentinels agree from now on.
/// A primary that works is left for no other one that cannot be used: the address may be out of date.
pub(super) async fn successor<A, C, F>(
    server: Option<&A>,
    lost: impl Future<Output = ()>,
    agreed: Option<watch::Receiver<Option<A>>>,
    connect: impl Fn(A) -> F,
) -> Option<C>
where
    A: Clone + Display + PartialEq,
    F: Future<Output = Result<C, Failure>>,
{
    let mut lost = pin!(lost);
    let mut replaced = pin!(async {
        let Some(mut agreed) = agreed else {
            return pending().await;
        };
        drop(agreed.borrow_and_update());
        let mut failing = None;
        while agreed.changed().await.is_ok() {
            let Some(primary) = agreed.borrow_and_update().clone() else {
                continue;
            };
            if Some(&primary) == server {
                continue;
            }
            match connect(primary.clone()).await {
                Ok(successor) => return successor,
                Err(failure) => {
                    let (times, is_logged) = match failing {
                        Some((failed, times, is_logged)) if failed == primary => (times + 1, is_logged),
                        Some(_) | None => (1, false),
                    };
                    // One that does not answer yet may be about to.
                    let is_due = times >= 3 || failure.is_refusal();
                    if is_due && !is_logged {
                        let (server, error) = (&*primary.to_string(), &*failure.cause());
                        tracing::warn!(
                            server,
                            error,
                            "the new primary cannot be used, so the store stays at the old one"
                        );
                    }
                    failing = Some((primary, times, is_due || is_logged));
                }
            }
        }
        pending().await
    });
    poll_fn(|cx| match lost.as_mut().poll(cx) {
        Poll::Ready(()) => Poll::Ready(None),
        Poll::Pending => replaced.as_mut().poll(cx).map(Some),
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::{
        cell::RefCell,
        future::{pending, ready},
    };

    use super::*;
    use crate::{observe::log::Log, store::redis::acl::Refusal};

    #[tokio::test(start_paused = true)]
    async fn a_new_primary_that_cannot_be_used_is_logged_once_however_its_failures_change() {
        let refused = Failure::Forbidden(Refusal::new("WRONGPASS"));
        for (failures, expected) in [
            (&[Failure::Timeout, Failure::Timeout][..], 0),
            (
                &[Failure::Timeout, Failure::Timeout, Failure::Timeout, refused.clone()],
                1,
            ),
            (
                &[refused.clone(), refused.clone(), Failure::Timeout, Failure::Timeout],
                1,
            ),
            (&[Failure::Timeout, refused.clone(), refused.clone()], 1),
        ] {
            let log = Log::capture();
            let (reports, agreed) = watch::channel(None);
            let left = RefCell::new(failures.iter());
            let (tried, mut attempts) = watch::channel(0);
            let connect = |_| {
                tried.send_modify(|attempts| *attempts += 1);
                let failure = left.borrow_mut().next().expect("as many as reports");
                ready(Err::<(), _>(failure.clone()))
            };
            let reporting = async {
                for _ in failures {
                    reports.send_replace(Some("new:6379"));
                    attempts.changed().await.expect("it is tried");
                }
                // The last failure follows its attempt.
                tokio::task::yield_now().await;
            };
            tokio::select! {
                biased; // what is reported before is no news
                _ = successor(Some(&"old:6379"), pending(), Some(agreed), connect) => unreachable!(),
                () = reporting => {}
            }
            let text = log.text();
            assert_eq!(text.matches("cannot be used").count(), expected, "{failures:?}: {text}");
        }
    }

    #[test]
    fn a_refusal_precedes_what_else_connections_lack() {
        let refused = || Some(Failure::Forbidden(Refusal::new("WRONGPASS")));
        let lost = || Some(Failure::Unreachable("reset by peer".into()));
        for (states, expected) in [
            ([refused(), lost(), None], "WRONGPASS"),
            ([None, lost(), None], "reset by peer"),
            ([None, None, None], "still connecting"),
        ] {
            let in_turn = InTurn::new(states);
            for _ in 0..3 {
                let connection = in_turn.connection(|state| Err::<(), _>(state.clone()), |()| false);
                let failure = format!("{:?}", connection.expect_err("none is connected"));
                assert!(failure.contains(expected), "{failure}");
            }
        }
    }
}
