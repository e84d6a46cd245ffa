//! The settings of clients.

use std::time::Duration;

#[cfg(feature = "tls")]
use fred::types::config::TlsConnector;
use fred::{
    clients::Client,
    error::Error,
    interfaces::ClientLike,
    types::{
        Builder,
        config::{Config, Options, ServerConfig, TcpConfig, UnresponsiveConfig},
    },
};
#[cfg(feature = "tls")]
use tokio::task::spawn_blocking;

use crate::{
    ConfigError,
    store::redis::{backend::Deadline, url::FRED_IN_A_CLUSTER},
};

/// How much longer than the deadline fred may keep a command. A stall of this process for less than that is not a failure.
const MAX_STALL: Duration = Duration::from_secs(10);

/// Builds a client for a limiter. By default, a client of fred waits long, and sends a command three times.
pub(super) fn build(config: Config) -> Result<Client, Error> {
    const UNBOUNDED: usize = 0; // a bounded queue ends the routing task of fred when it is full

    Builder::from_config(config)
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

/// Refuses a client that cannot serve a limiter, and names the setting to change.
pub(super) fn check_settings(client: &Client) -> Result<(), ConfigError> {
    let connection = client.connection_config();

    if client.is_clustered() {
        return Err(ConfigError::new(format!(
            "this fred client is clustered, and {FRED_IN_A_CLUSTER}; use the URL `redis-cluster://..` with the feature \
             `cluster`"
        )));
    }
    let fault = if client.client_reconnect_policy().is_none() {
        "this fred client has no reconnect policy, so it ends with its first disconnect; build it with \
         `.set_policy(ReconnectPolicy::new_constant(0, 150))`"
    } else if connection.max_command_attempts != 1 {
        "this fred client sends a command again after a reconnect, which would count a request twice; build it with \
         `.with_connection_config(|config| config.max_command_attempts = 1)`"
    } else if connection.max_command_buffer_len != 0 {
        "this fred client has a bounded queue, which ends it for good when it is full during a disconnect; build it \
         with `.with_connection_config(|config| config.max_command_buffer_len = 0)`"
    } else {
        if connection.tcp.nodelay != Some(true) {
            tracing::warn!("this fred client delays small writes; set `config.tcp.nodelay = Some(true)`");
        }
        return Ok(());
    };
    Err(ConfigError::new(fault))
}

/// Options for a command that is written once, and only if there is a connection.
pub(super) fn send_once(deadline: Deadline) -> Options {
    Options {
        max_attempts: Some(1),
        fail_fast: true,
        timeout: Some(deadline.duration + MAX_STALL),
        ..Options::default()
    }
}

/// A new client with the settings of another one.
pub(super) fn like(client: &Client, config: Config) -> Client {
    Client::new(
        config,
        Some(client.perf_config()),
        Some(client.connection_config().clone()),
        None,
    )
}

/// Changes which sentinel is asked first. fred asks no other one if that accepts the connection and does not reply, or reports a
/// server that is no longer the primary.
pub(super) fn rotate_sentinels(config: &mut Config, by: usize) {
    if let ServerConfig::Sentinel { hosts, .. } = &mut config.server {
        let by = by % hosts.len().max(1);
        hosts.rotate_left(by);
    }
}

/// Reads the authorities of the system again, which may have been replaced: fred reads them once.
#[cfg(feature = "tls")]
pub(super) async fn read_authorities(config: &mut Config) {
    if let Some(tls) = &mut config.tls
        && let Ok(Ok(connector)) = spawn_blocking(TlsConnector::default_rustls).await
    {
        tls.connector = connector;
    }
}
