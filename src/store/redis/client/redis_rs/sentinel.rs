use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use redis::{AsyncConnectionConfig, Client, ConnectionInfo, ErrorKind, RedisError};

use super::connection::at;

/// The sentinels, which report the address of the primary.
pub(super) struct Sentinels {
    sentinels: Vec<ConnectionInfo>,
    service: String,
    /// The settings of connections to the primary.
    template: ConnectionInfo,
    /// The position of the sentinel that replied last, to which the next query is sent first.
    first: AtomicUsize,
}

/// The time for a connection to a sentinel, and again for its reply.
const SENTINEL_TIMEOUT: Duration = Duration::from_millis(300);

impl Sentinels {
    pub(super) fn new(sentinels: Vec<ConnectionInfo>, service: String, template: ConnectionInfo) -> Self {
        Self {
            sentinels,
            service,
            template,
            first: AtomicUsize::new(0),
        }
    }

    /// The primary that the first sentinel with a reply reports.
    ///
    /// <https://redis.io/docs/latest/develop/reference/sentinel-clients/>. The role of the server is not verified: if it has
    /// become a replica, it replies `READONLY`, and the sentinels are queried again.
    pub(super) async fn primary(&self) -> Result<ConnectionInfo, RedisError> {
        let first = self.first.load(Ordering::Relaxed);
        let mut last_error = RedisError::from((ErrorKind::EmptySentinelList, "the URL has no sentinel"));
        for offset in 0..self.sentinels.len() {
            let position = (first + offset) % self.sentinels.len();
            match self.query(&self.sentinels[position]).await {
                Ok((host, port)) => {
                    self.first.store(position, Ordering::Relaxed);
                    return Ok(at(&self.template, host, port));
                }
                Err(error) => {
                    last_error = error;
                    // This attempt may be canceled; the next one starts after the sentinel that did not reply.
                    self.first.store(position + 1, Ordering::Relaxed);
                }
            }
        }
        Err(last_error)
    }

    async fn query(&self, sentinel: &ConnectionInfo) -> Result<(String, u16), RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(SENTINEL_TIMEOUT))
            .set_response_timeout(Some(SENTINEL_TIMEOUT));
        let mut connection = Client::open(sentinel.clone())?
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        let primary: Option<(String, u16)> = redis::cmd("SENTINEL")
            .arg("get-master-addr-by-name")
            .arg(&self.service)
            .query_async(&mut connection)
            .await?;
        primary.ok_or_else(|| {
            let error = "the sentinel has no primary of this name";
            RedisError::from((ErrorKind::MasterNameNotFoundBySentinel, error))
        })
    }
}
