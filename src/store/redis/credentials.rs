//! Credentials that change while the store runs.

use std::{
    error::Error,
    path::PathBuf,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, timeout, timeout_at},
};

use super::{
    builder::RedisStoreBuilder,
    failure::{Failure, shortened},
    task::AbortOnDrop,
};
use crate::{file::read_text, sync::lock};

/// A user of Redis with its password, or with a token in place of the password.
///
/// The provider of [`RedisStoreBuilder::credentials`] returns it. [`Debug`](std::fmt::Debug) omits the password.
///
/// ```
/// use std::time::Duration;
/// use tower_quota::Credentials;
///
/// let credentials = Credentials::new("limiter", "s3cret").reauthenticate_after(Duration::from_secs(45 * 60));
/// assert_eq!(format!("{credentials:?}"), "Credentials { user: \"limiter\", reauthenticate_after: Some(2700s), .. }");
/// ```
#[derive(Clone)]
#[must_use]
pub struct Credentials {
    pub(super) user: Box<str>,
    pub(super) password: Box<str>,
    reauthenticate_after: Option<Duration>,
}

impl Credentials {
    /// The credentials of a user, which is `default` where Redis has only a password (`requirepass`).
    pub fn new(user: impl Into<Box<str>>, password: impl Into<Box<str>>) -> Self {
        Self {
            user: user.into(),
            password: password.into(),
            reauthenticate_after: None,
        }
    }

    /// Sets the time after which a connection with these credentials is authenticated again, with new ones of the provider.
    ///
    /// It is for servers that close a connection when its token expires. Set it to less than the time that is left until
    /// then: if the provider or Redis refuses, the store tries again every 5 s. Less than 1 s is 1 s.
    ///
    /// By default a connection stays authenticated until it is lost, as Redis keeps it.
    pub fn reauthenticate_after(mut self, time: Duration) -> Self {
        self.reauthenticate_after = Some(time);
        self
    }

    /// When a connection that is made now is authenticated again.
    pub(super) fn due(&self) -> Option<Instant> {
        let after = self.reauthenticate_after?.max(MIN_REAUTHENTICATION);
        Instant::now().checked_add(after)
    }
}

impl_debug!(Credentials, own => user: own.user, reauthenticate_after: own.reauthenticate_after);

/// Settings of credentials.
impl RedisStoreBuilder {
    /// Sets a provider of credentials, in place of those in the [`url`](Self::url): for tokens that expire, and for passwords
    /// that are rotated.
    ///
    /// The store calls it for each connection that it makes, and again [before a token
    /// expires](Credentials::reauthenticate_after). Connections that are made at the same time share a call. A call takes at
    /// most 30 s. Credentials that arrive too late for an attempt to connect are used by the next one, within 5 s; so are those
    /// that were not sent, since Redis was down.
    ///
    /// If it returns an error, there is no connection, and the store calls it again with the next attempt, after some 200 ms.
    /// The error is the cause in the errors and the logs of the store, so it must not contain a secret.
    ///
    /// It is for data servers, of each topology. The credentials of sentinels are part of the URL, and Sentinel needs the client
    /// redis-rs. Connecting is an error if the URL or the client of the application has credentials too, or the client is one
    /// of fred, which has a provider of its own.
    ///
    /// [Rotating passwords](crate::guide::deploy#rotate-passwords) has sketches for AWS and Azure.
    ///
    /// ```
    /// use std::{convert::Infallible, time::Duration};
    /// use tower_quota::{Credentials, RedisStore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::ConfigError> {
    /// async fn token() -> Result<Credentials, Infallible> {
    ///     let (token, minutes) = ("eyJ0eXAi", 60); // from an identity provider
    ///     Ok(Credentials::new("limiter", token).reauthenticate_after(Duration::from_secs(minutes * 45)))
    /// }
    ///
    /// let builder = RedisStore::builder().credentials(token);
    /// assert!(builder.clone().url("redis://127.0.0.1:6379").connect_lazy().is_ok());
    /// assert!(builder.url("redis://user:password@127.0.0.1:6379").connect_lazy().is_err(), "which of the two?");
    /// # Ok(())
    /// # }
    /// ```
    pub fn credentials<F, Fut, E>(mut self, provider: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        let provider = move || -> ProviderFuture {
            let provided = provider();
            Box::pin(async { provided.await.map_err(|error| in_full(&*error.into())) })
        };
        self.credentials = Some(Arc::new(CredentialSource {
            provider: Box::new(provider),
            call: Mutex::default(),
        }));
        self
    }

    /// Sets a file with the password of a user, in place of credentials in the [`url`](Self::url).
    ///
    /// It is read for each connection that is made, so a password that was rotated is used by new connections; spaces and line
    /// breaks around the password are removed. The file is a regular one of at most 1 MiB. The user is `default` where Redis has only a password (`requirepass`). Without
    /// the file there is no connection, and the error names it. For the rest it is a provider of
    /// [`credentials`](Self::credentials).
    ///
    /// ```
    /// use tower_quota::RedisStore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let builder = RedisStore::builder().url("redis://127.0.0.1:6379").password_file("limiter", "/run/secrets/redis");
    /// assert!(builder.connect_lazy().is_ok());
    /// # }
    /// ```
    pub fn password_file(self, user: impl Into<Box<str>>, path: impl Into<PathBuf>) -> Self {
        let (user, path) = (user.into(), Arc::new(path.into()));
        self.credentials(move || {
            let (user, path) = (user.clone(), path.clone());
            async move {
                let file = path.clone();
                let read = spawn_blocking(move || read_text(&file)).await;
                let password = read.map_err(|error| error.to_string())?.map_err(|error| {
                    let path = path.display();
                    format!(
                        "the file `{path}` cannot be read: {error}; write the password to it, readable to this process"
                    )
                })?;
                Ok::<_, String>(Credentials::new(user, password.trim()))
            }
        })
    }
}

type ProviderFuture = Pin<Box<dyn Future<Output = Result<Credentials, String>> + Send>>;

/// The provider of the credentials of a store.
pub(super) struct CredentialSource {
    provider: Box<dyn Fn() -> ProviderFuture + Send + Sync>,
    /// The call that is made, or has a result that no connection has used.
    call: Mutex<Option<Call>>,
}

struct Call {
    returned: watch::Receiver<Option<Returned>>,
    _task: AbortOnDrop<()>,
}

#[derive(Clone)]
struct Returned {
    at: Instant,
    credentials: Result<Credentials, String>,
}

/// The most time of a call of the provider.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// The time that an attempt to connect waits for credentials: less than the attempt has.
const CONNECT_WAIT: Duration = Duration::from_millis(700);
/// The time for which credentials are used that were returned too late for an attempt, or that no server has seen.
const KEPT: Duration = Duration::from_secs(5);
/// The least time after which a connection is authenticated again: the provider may return a token that expires now.
const MIN_REAUTHENTICATION: Duration = Duration::from_secs(1);
/// The pause before a connection is authenticated again after a failure.
const RETRY_PAUSE: Duration = Duration::from_secs(5);

impl CredentialSource {
    /// The credentials for a connection that is made now, or why there are none.
    async fn latest(self: &Arc<Self>, wait: Duration) -> Result<Credentials, String> {
        let mut call = self.call();
        let returned = match timeout(wait, call.wait_for(Option::is_some)).await {
            Ok(Ok(returned)) => returned.clone(),
            Ok(Err(_)) => None,
            Err(_) => {
                return Err(format!(
                    "the provider of `RedisStoreBuilder::credentials` has not returned credentials within {wait:?}; they \
                     are used when it does"
                ));
            }
        };
        let credentials = returned.map_or(Err("it panicked".to_owned()), |returned| returned.credentials);
        credentials.map_err(|error| {
            self.used();
            format!(
                "the provider of `RedisStoreBuilder::credentials` fails: {error} (the store calls it again with each attempt \
                 to connect)"
            )
        })
    }

    /// A server has seen the credentials that were returned last: the next connection gets others.
    fn used(&self) {
        let mut call = lock(&self.call);
        call.take_if(|call| call.returned.borrow().is_some());
    }

    /// The call that is made, or a new one.
    fn call(self: &Arc<Self>) -> watch::Receiver<Option<Returned>> {
        let mut call = lock(&self.call);
        let is_usable = call.as_ref().is_some_and(|call| match &*call.returned.borrow() {
            Some(returned) => returned.at.elapsed() < KEPT,
            None => call.returned.has_changed().is_ok(),
        });
        if let (true, Some(call)) = (is_usable, &*call) {
            return call.returned.clone();
        }
        let (sender, returned) = watch::channel(None);
        let source = self.clone();
        let task = tokio::spawn(async move {
            let credentials = timeout(CALL_TIMEOUT, (source.provider)()).await;
            let credentials = credentials.unwrap_or_else(|_| Err(format!("it did not return within {CALL_TIMEOUT:?}")));
            sender.send_replace(Some(Returned {
                at: Instant::now(),
                credentials,
            }));
        });
        *call = Some(Call {
            returned: returned.clone(),
            _task: AbortOnDrop(task),
        });
        returned
    }
}

/// The credentials of one connection, which is made again when it is lost.
pub(super) struct Authenticator {
    source: Arc<CredentialSource>,
    /// When the connection is authenticated again.
    due: watch::Sender<Option<Instant>>,
    /// The same of one that is being made.
    next_due: Mutex<Option<Instant>>,
}

impl Authenticator {
    /// The credentials for a connection that is made now, or why there are none. Other connections get the same until a server has
    /// [seen](Self::tried) them.
    pub(super) async fn credentials(&self) -> Result<Credentials, String> {
        let credentials = self.source.latest(CONNECT_WAIT).await?;
        *lock(&self.next_due) = credentials.due();
        Ok(credentials)
    }

    /// A connection was made with the credentials, or why not. If a server has seen them, the next connection gets others: while Redis
    /// is down, the provider is not called with each attempt.
    pub(super) fn tried(&self, failure: Option<&Failure>) {
        if !matches!(failure, Some(Failure::Unreachable(_))) {
            self.source.used();
        }
        if failure.is_none() {
            self.due.send_replace(*lock(&self.next_due));
        }
    }

    /// When the connection is authenticated again.
    pub(super) fn due(&self) -> Option<Instant> {
        *self.due.borrow()
    }

    /// Authenticates the connection again whenever that is due, by a function that sends the credentials, if there is a connection.
    pub(super) fn keep_authenticated<Fut>(
        self: Arc<Self>,
        authenticate: impl Fn(Credentials) -> Option<Fut> + Send + Sync + 'static,
    ) -> AbortOnDrop<()>
    where
        Fut: Future<Output = Result<(), String>> + Send,
    {
        let mut due = self.due.subscribe();
        AbortOnDrop(tokio::spawn(async move {
            let mut fails = false;
            loop {
                let at = *due.borrow_and_update();
                // The sender is borrowed, so an error of `changed` means that the time has passed.
                if until(at, due.changed()).await.is_some() {
                    continue;
                }
                let authenticated = async {
                    let credentials = self.source.latest(CALL_TIMEOUT).await?;
                    if let Some(sent) = authenticate(credentials.clone()) {
                        let sent = sent.await;
                        self.source.used();
                        sent?;
                    }
                    Ok::<_, String>(credentials)
                };
                match authenticated.await {
                    Ok(credentials) => {
                        fails = false;
                        self.due.send_replace(credentials.due());
                    }
                    Err(error) => {
                        if !fails {
                            tracing::warn!(
                                error,
                                "a connection to Redis cannot be authenticated again; the store tries every 5 s"
                            );
                        }
                        fails = true;
                        self.due.send_replace(Instant::now().checked_add(RETRY_PAUSE));
                    }
                }
            }
        }))
    }
}

/// An error with its causes, in one line.
fn in_full(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    shortened(text)
}

/// The output of a future; `None` if it is not ready when the time has come.
pub(super) async fn until<T>(time: Option<Instant>, future: impl Future<Output = T>) -> Option<T> {
    match time {
        Some(time) => timeout_at(time, future).await.ok(),
        None => Some(future.await),
    }
}

/// The connections of a store to each server.
#[derive(Clone)]
pub(super) struct ConnectionSettings {
    /// How many there are.
    pub(super) number: usize,
    pub(super) credentials: Option<Arc<CredentialSource>>,
}

impl ConnectionSettings {
    /// The credentials of a new connection, if they are not part of the URL.
    pub(super) fn authenticator(&self) -> Option<Arc<Authenticator>> {
        let (due, _) = watch::channel(None);
        let source = self.credentials.clone()?;
        Some(Arc::new(Authenticator {
            source,
            due,
            next_due: Mutex::default(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::{pending, ready},
        sync::atomic::{AtomicU64, Ordering},
    };

    use tokio::time::{advance, sleep};

    use super::*;
    use crate::{
        observe::log::Log,
        store::{ErrorKind, StoreError},
    };

    #[tokio::test(start_paused = true)]
    async fn a_call_that_does_not_return_ends_after_30_s_and_one_that_panics_at_once() {
        async fn panics() -> Result<Credentials, String> {
            panic!("as a provider may")
        }

        let builder = RedisStoreBuilder::new;
        for (builder, cause, seconds) in [
            (
                builder().credentials(pending::<Result<Credentials, String>>),
                "it did not return within 30s",
                30,
            ),
            (builder().credentials(panics), "it panicked", 0),
        ] {
            let (source, called) = (builder.credentials.expect("a provider"), Instant::now());
            let error = source.latest(2 * CALL_TIMEOUT).await.expect_err(cause);
            let expected = format!("the provider of `RedisStoreBuilder::credentials` fails: {cause} (");
            assert!(error.starts_with(&expected), "{error}");
            assert_eq!(called.elapsed().as_secs(), seconds, "{error}");
        }
    }

    /// The provider of the passwords 1, 2 and so on.
    fn numbered() -> Arc<CredentialSource> {
        let calls = Arc::new(AtomicU64::new(0));
        let provider = move || {
            let password = (calls.fetch_add(1, Ordering::Relaxed) + 1).to_string();
            ready(Ok::<_, String>(
                Credentials::new("user", password).reauthenticate_after(2 * MIN_REAUTHENTICATION),
            ))
        };
        let builder = RedisStoreBuilder::new().credentials(provider);
        builder.credentials.expect("a provider")
    }

    #[tokio::test(start_paused = true)]
    async fn credentials_that_no_server_has_seen_are_used_for_5_s() {
        let source = numbered();
        for (pause, expected) in [(0, "1"), (4, "1"), (2, "2"), (4, "2")] {
            sleep(Duration::from_secs(pause)).await;
            let credentials = source.latest(CONNECT_WAIT).await.expect("credentials");
            assert_eq!(&*credentials.password, expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_authenticated_again_with_new_credentials_and_each_outage_is_one_line() {
        let log = Log::capture();
        let settings = ConnectionSettings {
            number: 1,
            credentials: Some(numbered()),
        };
        let authenticator = settings.authenticator().expect("a provider");
        let first = authenticator.credentials().await.expect("credentials");
        authenticator.tried(None);
        assert_eq!(&*first.password, "1");
        // Another connection is not made.
        let due = authenticator.due();
        advance(MIN_REAUTHENTICATION / 2).await;
        let _unused = authenticator.credentials().await.expect("credentials");
        authenticator.tried(Some(&Failure::Unreachable("no".into())));
        assert_eq!(authenticator.due(), due);

        // Redis refuses the first two and the fourth.
        let (sender, mut sent) = tokio::sync::mpsc::unbounded_channel();
        let _task = authenticator.keep_authenticated(move |credentials| {
            let is_refused = ["2", "3", "5"].contains(&&*credentials.password);
            let _ = sender.send(credentials.password);
            Some(ready(if is_refused {
                Err("WRONGPASS".to_owned())
            } else {
                Ok(())
            }))
        });
        for expected in 2..=6 {
            let password = sent.recv().await.expect("the task runs");
            assert_eq!(*password, expected.to_string());
        }
        let text = log.text();
        assert_eq!(text.matches("cannot be authenticated again").count(), 2, "{text}");
    }

    #[test]
    fn the_error_of_a_provider_is_one_line_with_its_causes() {
        let error = |text| StoreError::new(ErrorKind::Unreachable, text);
        let error = error("no token").with_source(error("no reply\nof the vault"));
        assert_eq!(in_full(&error), "no token: no reply of the vault");
    }
}
