use std::{error::Error, fmt};

use crate::{ConfigError, error::write_with_cause, store::StoreError};

/// The error of [`RedisStore::connect`](super::RedisStore::connect).
///
/// A program can connect again after [`Timeout`](crate::store::ErrorKind::Timeout) and
/// [`Unreachable`](crate::store::ErrorKind::Unreachable); [`Refused`](crate::store::ErrorKind::Refused) is an error reply of
/// Redis, such as for a wrong password.
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{ConnectError, RedisStore, store::ErrorKind};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// fn is_temporary(error: &ConnectError) -> bool {
///     match error {
///         ConnectError::Store(error) => matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unreachable),
///         _ => false,
///     }
/// }
///
/// // Nothing listens there.
/// let builder = RedisStore::builder().connect_timeout(Duration::from_millis(50));
/// let error = builder.url("redis://127.0.0.1:1").connect().await.unwrap_err();
/// assert!(is_temporary(&error));
///
/// let error = RedisStore::connect("http://127.0.0.1").await.unwrap_err();
/// assert!(!is_temporary(&error));
/// # }
/// ```
///
/// [`Debug`](fmt::Debug) is that of [`ConfigError`]: the message as it is, and the cause.
#[non_exhaustive]
pub enum ConnectError {
    /// The URL or a setting cannot work.
    Config(ConfigError),
    /// Redis refuses the credentials, a command, the keys or the script; or cannot be used within the
    /// [connect timeout](super::RedisStoreBuilder::connect_timeout).
    Store(StoreError),
}

impl From<ConfigError> for ConnectError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl From<StoreError> for ConnectError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl fmt::Debug for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => fmt::Debug::fmt(error, f),
            Self::Store(error) => write_with_cause(f, &error.to_string(), error.source()),
        }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl Error for ConnectError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Config(error) => error.source(),
            Self::Store(error) => error.source(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ErrorKind;

    #[test]
    fn debug_is_the_message_and_the_cause() {
        let error = StoreError::new(ErrorKind::Unreachable, "Redis cannot be used").with_source("connection refused");
        assert_eq!(
            format!("{:?}", ConnectError::from(error)),
            "Redis cannot be used: connection refused"
        );
        let error = ConfigError::because("this URL cannot be used", "no port");
        assert_eq!(
            format!("{:?}", ConnectError::from(error)),
            "this URL cannot be used: no port"
        );
    }
}
