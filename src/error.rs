use std::{borrow::Cow, error::Error, fmt};

/// A setting that cannot work.
///
/// Errors of this type occur when a policy, a layer or a store is built, and when a file of policies is read again; never
/// while a request is checked. The message contains a setting that works. The [`source`](Error::source) is the cause, if there
/// is one.
///
/// [`Debug`](fmt::Debug) shows the message as it is, with its lines, and the cause if the message does not contain it: a `main`
/// that returns the error, and `expect`, print it so.
///
/// ```
/// use tower_quota::{Policy, SlidingLog};
///
/// let error = Policy::try_new("Say Hi", SlidingLog::per_minute(5)).unwrap_err();
/// assert!(error.to_string().contains("such as `say-hi`"));
/// assert_eq!(format!("{error:?}"), error.to_string());
/// ```
pub struct ConfigError {
    message: Cow<'static, str>,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl ConfigError {
    pub(crate) fn new(message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            message: message.into(),
            source: None,
        }
    }

    #[cfg(any(feature = "fred", feature = "redis", feature = "serde"))]
    pub(crate) fn because(
        message: impl Into<Cow<'static, str>>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self {
            message: message.into(),
            source: Some(source.into()),
        }
    }
}

impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_with_cause(f, &self.message, self.source())
    }
}

/// Writes a message, and the cause if the message does not contain it.
pub(crate) fn write_with_cause(
    f: &mut fmt::Formatter<'_>,
    message: &str,
    cause: Option<&(dyn Error + 'static)>,
) -> fmt::Result {
    f.write_str(message)?;
    match cause.map(ToString::to_string) {
        Some(cause) if !message.contains(&cause) => write!(f, ": {cause}"),
        Some(_) | None => Ok(()),
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for ConfigError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn Error + 'static))
    }
}

#[cfg(all(test, any(feature = "fred", feature = "redis", feature = "serde")))]
mod tests {
    use super::*;

    #[test]
    fn debug_adds_a_cause_that_the_message_lacks() {
        let error = ConfigError::because("Redis cannot be used", "connection refused");
        assert_eq!(format!("{error:?}"), "Redis cannot be used: connection refused");

        let error = ConfigError::because("`limits.toml` cannot be read: no such file", "no such file");
        assert_eq!(format!("{error:?}"), error.to_string());
    }
}
