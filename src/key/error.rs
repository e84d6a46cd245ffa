use std::{borrow::Cow, error::Error, fmt};

/// The reason why a request has no key.
///
/// | error | status | [`or`](super::KeyExtractor::or) |
/// | --- | --- | --- |
/// | [`absent`](Self::absent) | `400 Bad Request` | uses the alternative |
/// | [`malformed`](Self::malformed) | `400 Bad Request` | returns the error |
/// | [`misconfigured`](Self::misconfigured) | `500 Internal Server Error` | uses the alternative |
///
/// ```
/// use http::Request;
/// use tower_quota::{key, KeyExtractor};
///
/// let (parts, ()) = Request::get("/").body(())?.into_parts();
/// let error = key::ip().extract(&parts).unwrap_err();
/// assert!(error.is_misconfigured());
/// assert!(error.to_string().starts_with("no peer address on the request"));
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Debug)]
pub struct KeyError {
    kind: Kind,
    message: Cow<'static, str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Absent,
    Malformed,
    Misconfigured,
}

/// Constructors.
impl KeyError {
    /// The request lacks the value that the key is made of.
    ///
    /// The request is refused with `400 Bad Request`, or [`or`](super::KeyExtractor::or) uses its alternative.
    ///
    /// ```
    /// use tower_quota::key::KeyError;
    ///
    /// let error = KeyError::absent("the request has no query parameter `tenant`");
    /// assert!(error.is_absent());
    /// ```
    pub fn absent(message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind: Kind::Absent,
            message: message.into(),
        }
    }

    /// The value that the key is made of is present, but its form cannot be trusted.
    ///
    /// The request is refused with `400 Bad Request`, with and without [`or`](super::KeyExtractor::or): a caller could
    /// otherwise choose the alternative.
    ///
    /// ```
    /// use tower_quota::key::KeyError;
    ///
    /// assert!(KeyError::malformed("two query parameters `tenant`").is_malformed());
    /// ```
    pub fn malformed(message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind: Kind::Malformed,
            message: message.into(),
        }
    }

    /// The server does not provide the value that the key is made of.
    ///
    /// The request is refused with `500 Internal Server Error`, and the message is logged but not sent; or
    /// [`or`](super::KeyExtractor::or) uses its alternative. The message should name the fix.
    ///
    /// ```
    /// use tower_quota::key::KeyError;
    ///
    /// let error = KeyError::misconfigured("no account on the request; add the limit inside of authentication");
    /// assert!(error.is_misconfigured());
    /// ```
    pub fn misconfigured(message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind: Kind::Misconfigured,
            message: message.into(),
        }
    }
}

/// Accessors.
impl KeyError {
    /// Whether the error was made by [`absent`](Self::absent): the request lacks the key.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.kind == Kind::Absent
    }

    /// Whether the error was made by [`malformed`](Self::malformed), which [`or`](super::KeyExtractor::or) does not catch.
    #[must_use]
    pub fn is_malformed(&self) -> bool {
        self.kind == Kind::Malformed
    }

    /// Whether the error was made by [`misconfigured`](Self::misconfigured): the fault is the server's, not the caller's.
    #[must_use]
    pub fn is_misconfigured(&self) -> bool {
        self.kind == Kind::Misconfigured
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for KeyError {}
