use std::{error::Error, fmt};

/// Error of a text that is not a limit. The message has an example of the correct spelling.
///
/// ```
/// use tower_quota::Limit;
///
/// let error = "sliding-log 0/min".parse::<Limit>().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "a limit is at least 1, `deny-all` admits nothing, and `unlimited` everything; one looks like `sliding-log 100/min`",
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseLimitError {
    message: String,
}

impl ParseLimitError {
    pub(super) fn new(fault: impl fmt::Display, example: impl fmt::Display) -> Self {
        Self {
            message: format!("{fault}; one looks like `{example}`"),
        }
    }
}

impl fmt::Display for ParseLimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for ParseLimitError {}
