use std::{fmt, pin::Pin, sync::Arc, time::Duration};

use fred::{
    clients::Client,
    error::{Error, ErrorKind},
    interfaces::ClientLike,
    types::{
        Builder,
        config::{Config, CredentialProvider, Options, ReconnectPolicy, Server, TcpConfig, UnresponsiveConfig},
    },
};

use crate::{
    ConfigError,
    store::redis::{backend::Deadline, credentials::Authenticator, url::FRED_IN_A_CLUSTER},
};

/// How much longer than the deadline fred may keep a command. A stall of this process for less than that is not a failure.
const MAX_STALL: Duration = Duration::from_secs(10);

/// Builds a client for a limiter. By default, a client of fred waits long, sends a command three times, and ends for good after
/// a disconnect.
pub(super) fn build(config: Config) -> Result<Client, Error> {
    const UNLIMITED_ATTEMPTS: u32 = 0;
    const DELAY_MS: u32 = 150;
    const JITTER_MS: u32 = 100;
    const UNBOUNDED: usize = 0; // a bounded queue ends the routing task of fred when it is full

    let mut policy = ReconnectPolicy::new_constant(UNLIMITED_ATTEMPTS, DELAY_MS);
    policy.set_jitter(JITTER_MS);

    Builder::from_config(config)
        .set_policy(policy)
        .with_connection_config(|connection| {
            connection.connection_timeout = Duration::from_secs(1);
            connection.internal_command_timeout = Duration::from_secs(1);
            connection.max_command_attempts = 1;
            connection.max_redirections = 0;
            connection.max_command_buffer_len = UNBOUNDED;
            // To the check of fred, a stall of this process is a Redis that does not reply.
            connection.unresponsive = UnresponsiveConfig::default();
            connection.tcp = TcpConfig {
                nodelay: Some(true),
                ..TcpConfig::default()
            };
        })
        .build()
}

/// The provider of the credentials of a client, if they are not part of the URL.
pub(super) fn provider(authenticator: Option<&Arc<Authenticator>>) -> Option<Arc<dyn CredentialProvider>> {
    Some(Arc::new(Provider(authenticator?.clone())))
}

struct Provider(Arc<Authenticator>);

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provider").finish_non_exhaustive()
    }
}

type Fetched<'a> = Pin<Box<dyn Future<Output = Result<(Option<String>, Option<String>), Error>> + Send + 'a>>;

impl CredentialProvider for Provider {
    fn fetch<'a, 'b, 'c>(&'a self, _: Option<&'b Server>) -> Fetched<'c>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async {
            let credentials = self.0.credentials().await;
            // fred connects again after an error of this kind.
            let credentials = credentials.map_err(|error| Error::new(ErrorKind::IO, error))?;
            self.0.used(); // it is connected
            Ok((Some(credentials.user.into()), Some(credentials.password.into())))
        })
    }
}

/// Builds a client for a subscription. It ends with its connection.
pub(super) fn subscriber(config: Config) -> Result<Client, Error> {
    Builder::from_config(config)
        .with_connection_config(|connection| {
            connection.connection_timeout = Duration::from_secs(1);
            connection.internal_command_timeout = Duration::from_secs(1);
        })
        .build()
}

/// Refuses a client that cannot serve a limiter, and names the setting to change.
pub(super) fn check_settings(client: &Client) -> Result<(), ConfigError> {
    let connection = client.connection_config();

    if client.is_clustered() {
        return Err(ConfigError::new(format!(
            "this fred client is clustered, and {FRED_IN_A_CLUSTER}; use the URL `redis-cluster://..` with the feature \
             `cluster`"
        )));
    }
    if client.client_reconnect_policy().is_none() {
        return Err(ConfigError::new(
            "this fred client has no reconnect policy, so it ends with its first disconnect; build it with \
             `.set_policy(ReconnectPolicy::new_constant(0, 150))`",
        ));
    }
    if connection.max_command_attempts != 1 {
        return Err(ConfigError::new(
            "this fred client sends a command again after a reconnect, which would count a request twice; build it with \
             `.with_connection_config(|config| config.max_command_attempts = 1)`",
        ));
    }
    if connection.max_command_buffer_len != 0 {
        return Err(ConfigError::new(
            "this fred client has a bounded queue, which ends it for good when it is full during a disconnect; build it \
             with `.with_connection_config(|config| config.max_command_buffer_len = 0)`",
        ));
    }

    #[cfg(feature = "tracing")]
    if connection.tcp.nodelay != Some(true) {
        tracing::warn!("this fred client delays small writes; set `config.tcp.nodelay = Some(true)`");
    }
    Ok(())
}

/// Options for a command that is written once, and only if there is a connection.
pub(super) fn send_once(deadline: Deadline) -> Options {
    Options {
        max_attempts: Some(1),
        fail_fast: true,
        timeout: Some(deadline.duration() + MAX_STALL),
        ..Options::default()
    }
}
