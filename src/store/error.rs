use std::{borrow::Cow, error::Error, fmt, sync::Arc};

/// The failure of a store.
///
/// It is not a denial: what happens to the request is defined by the policy's [`FailureMode`](super::FailureMode). The message
/// contains neither keys nor credentials.
///
/// ```
/// use tower_quota::store::{ErrorKind, StoreError};
///
/// let error = StoreError::new(ErrorKind::Unreachable, "connection refused");
/// assert_eq!(error.kind(), ErrorKind::Unreachable);
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
    /// There is no connection, or it was lost. A request that was already sent may have been counted.
    Unreachable,
    /// The server replied with an error, such as `OOM` or `NOPERM`.
    Refused,
    /// The reply cannot be decoded, or does not have one outcome for each request.
    Protocol,
}

impl ErrorKind {
    /// All kinds, in their order.
    #[cfg(feature = "metrics")]
    pub(crate) const ALL: [Self; 4] = [Self::Timeout, Self::Unreachable, Self::Refused, Self::Protocol];

    /// The name in logs and metrics.
    #[cfg(any(feature = "metrics", feature = "tracing"))]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
            Self::Protocol => "protocol",
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
    #[cfg(any(feature = "fred", feature = "redis"))]
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
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreError")
            .field("kind", &self.kind)
            .field("message", &self.message)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn Error + 'static))
    }
}
