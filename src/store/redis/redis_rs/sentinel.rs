use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use redis::{AsyncConnectionConfig, Client, ConnectionInfo, ErrorKind, RedisError};

use super::at;

/// Those who know which server is the primary.
pub(super) struct Sentinels {
    sentinels: Vec<ConnectionInfo>,
    service: String,
    /// How to connect to the primary, wherever it is.
    template: ConnectionInfo,
    /// The one that answered last is asked first.
    first: AtomicUsize,
}

/// How long one of them may take, for connecting and again for its answer.
const PATIENCE: Duration = Duration::from_millis(300);

impl Sentinels {
    pub(super) fn new(sentinels: Vec<ConnectionInfo>, service: String, template: ConnectionInfo) -> Self {
        Self {
            sentinels,
            service,
            template,
            first: AtomicUsize::new(0),
        }
    }

    /// The primary, by the first of them that answers.
    ///
    /// <https://redis.io/docs/latest/develop/reference/sentinel-clients/>. It is not asked for its role: one that has
    /// become a replica answers `READONLY`, and then they are asked again.
    pub(super) async fn primary(&self) -> Result<ConnectionInfo, RedisError> {
        let first = self.first.load(Ordering::Relaxed);
        let mut last_error = RedisError::from((ErrorKind::EmptySentinelList, "there is no sentinel"));
        for offset in 0..self.sentinels.len() {
            let position = (first + offset) % self.sentinels.len();
            match self.ask(&self.sentinels[position]).await {
                Ok((host, port)) => {
                    self.first.store(position, Ordering::Relaxed);
                    return Ok(at(&self.template, host, port));
                }
                Err(error) => {
                    last_error = error;
                    // This attempt may be cut short, and the next one is to begin behind whoever is silent.
                    self.first.store(position + 1, Ordering::Relaxed);
                }
            }
        }
        Err(last_error)
    }

    async fn ask(&self, sentinel: &ConnectionInfo) -> Result<(String, u16), RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(Some(PATIENCE));
        let mut connection = Client::open(sentinel.clone())?
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        let primary: Option<(String, u16)> = redis::cmd("SENTINEL")
            .arg("get-master-addr-by-name")
            .arg(&self.service)
            .query_async(&mut connection)
            .await?;
        primary.ok_or_else(|| {
            let error = "no sentinel knows a primary of this name";
            RedisError::from((ErrorKind::MasterNameNotFoundBySentinel, error))
        })
    }
}
