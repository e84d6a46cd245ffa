use std::{borrow::Cow, error::Error, fmt};

/// Something was built with a setting that cannot work, or in a Redis that cannot be used.
///
/// It comes up when a policy, a layer or a store is built, never while requests are served, and its message says what
/// would work.
#[derive(Debug)]
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
