use std::{borrow::Cow, error::Error, fmt, sync::Arc};

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
/// let error = Policy::new("say-hi", SlidingLog::per_minute(5)).cost(6).validate().unwrap_err();
/// assert!(error.to_string().contains("set a cost of at most 5"));
/// assert_eq!(format!("{error:?}"), error.to_string());
/// ```
#[derive(Clone)]
pub struct ConfigError {
    message: Cow<'static, str>,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

impl ConfigError {
    pub(crate) fn new(message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            message: message.into(),
            source: None,
        }
    }

    /// The same for a setting of this policy.
    pub(crate) fn of_policy(self, name: &str) -> Self {
        self.within(format_args!("the policy `{name}`"))
    }

    /// The same with the place of the setting.
    pub(crate) fn within(self, place: impl fmt::Display) -> Self {
        Self {
            message: format!("{place}: {self}").into(),
            ..self
        }
    }

    #[cfg(any(test, feature = "_redis", feature = "file"))]
    pub(crate) fn because(
        message: impl Into<Cow<'static, str>>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self {
            message: message.into(),
            source: Some(source.into().into()),
        }
    }
}

/// The value, or a panic with the message of the error: for a constructor that returns no error.
#[track_caller]
pub(crate) fn or_panic<T>(result: Result<T, impl fmt::Display>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

/// By the message.
impl PartialEq for ConfigError {
    fn eq(&self, other: &Self) -> bool {
        self.message == other.message
    }
}

impl Eq for ConfigError {}

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

/// The impls of an error, by its text and, if it has one, its source.
macro_rules! impl_error {
    ($error:ident, $this:ident => $text:expr $(, $source:expr)?) => {
        impl fmt::Debug for $error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                $crate::error::write_with_cause(f, &self.to_string(), self.source())
            }
        }

        impl fmt::Display for $error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let $this = self;
                fmt::Display::fmt($text, f)
            }
        }

        impl Error for $error {
            $(fn source(&self) -> Option<&(dyn Error + 'static)> {
                let $this = self;
                $source
            })?
        }
    };
}

/// The impl of `Debug` for a struct that shows these values.
macro_rules! impl_debug {
    ($name:ident $([$($parameter:tt),+])?, $this:ident => $($field:ident: $value:expr),*) => {
        impl$(<$($parameter),+>)? std::fmt::Debug for $name$(<$($parameter),+>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let $this = self;
                let mut shown = f.debug_struct(stringify!($name));
                $(shown.field(stringify!($field), &$value);)*
                shown.finish_non_exhaustive()
            }
        }
    };
}

impl_error!(ConfigError, error => &error.message, error.source.as_ref().map(|source| &**source as _));
impl_error!(StoreError, error => &error.message, error.source.as_ref().map(|source| &**source as _));

/// The failure of a store.
///
/// It is not a denial: what happens to the request is defined by the policy's [`FailureMode`](crate::store::FailureMode). The message
/// contains neither keys nor credentials.
///
/// ```
/// use tower_quota::store::{ErrorKind, StoreError};
///
/// let error = StoreError::new(ErrorKind::Unreachable, "connection refused");
/// assert_eq!(error.kind(), ErrorKind::Unreachable);
/// assert_eq!(error.kind().to_string(), "unreachable"); // as in logs and metrics
/// assert_eq!(error.to_string(), "connection refused");
/// ```
#[derive(Clone)]
pub struct StoreError {
    kind: ErrorKind,
    message: Cow<'static, str>,
    source: Option<Arc<dyn Error + Send + Sync>>,
    is_recorded: bool,
}

/// The kind of a [`StoreError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There was no reply within the deadline. The request may have been counted.
    Timeout,
    /// There is no connection, or it was lost: a request that was already sent may have been counted. Or a breaker is open, whatever has
    /// opened it, and nothing was sent.
    Unreachable,
    /// The server replied with an error, such as `OOM` or `NOPERM`; or the store has no room for another override, or a slot of a cluster moves
    /// and no node has all keys.
    Refused,
    /// The reply cannot be decoded, or does not have one outcome for each request.
    Protocol,
    /// What was asked for is not possible, such as for a policy that does not exist: the store has not failed, nothing was counted, and it
    /// would fail again.
    Invalid,
}

impl ErrorKind {
    /// The kinds of failures, in their order.
    pub(crate) const FAILURES: [Self; 4] = [Self::Timeout, Self::Unreachable, Self::Refused, Self::Protocol];

    /// The name in logs and metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
            Self::Protocol => "protocol",
            Self::Invalid => "invalid",
        }
    }
}

/// Its name in logs and metrics, such as `timeout`.
impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// That of what connects with the setting.
#[cfg(feature = "_redis")]
impl From<ConfigError> for StoreError {
    fn from(ConfigError { message, source }: ConfigError) -> Self {
        Self {
            source,
            ..Self::invalid(message)
        }
    }
}

impl StoreError {
    /// An error with a message.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            message: message.into(),
            source: None,
            is_recorded: false,
        }
    }

    /// A refusal of a request that cannot be sent as it is.
    pub(crate) fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Adds the cause of the error, for [`source`](Error::source).
    ///
    /// ```
    /// use std::{error::Error, io};
    /// use tower_quota::store::{ErrorKind, StoreError};
    ///
    /// let cause = io::Error::from(io::ErrorKind::ConnectionRefused);
    /// let error = StoreError::new(ErrorKind::Unreachable, "no connection").with_source(cause);
    /// assert!(error.source().is_some());
    /// ```
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.source = Some(Arc::from(source.into()));
        self
    }

    /// The same error, of a check that the store has recorded in the health of its nodes.
    #[cfg(feature = "_redis")]
    pub(crate) fn recorded(mut self) -> Self {
        self.is_recorded = true;
        self
    }

    /// Whether the store has recorded the failure in the health of its nodes.
    pub(crate) fn is_recorded(&self) -> bool {
        self.is_recorded
    }

    /// The kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether the store has not replied, or not in time.
    pub(crate) fn has_no_reply(&self) -> bool {
        matches!(self.kind, ErrorKind::Timeout | ErrorKind::Unreachable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_adds_a_cause_that_the_message_lacks() {
        let error = ConfigError::because("Redis cannot be used", "connection refused");
        assert_eq!(format!("{error:?}"), "Redis cannot be used: connection refused");
        assert!(error.source().is_some());

        let error = ConfigError::because("`limits.toml` cannot be read: no such file", "no such file");
        assert_eq!(format!("{error:?}"), error.to_string());

        let error = ConfigError::because("this URL cannot be used", "no port").of_policy("p");
        assert_eq!(error.to_string(), "the policy `p`: this URL cannot be used");
        let cause = error.source().expect("that of the URL").to_string();
        assert_eq!(cause, "no port", "a report prints no text twice");
    }
}
