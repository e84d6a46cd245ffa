use std::{borrow::Cow, error::Error, fmt, time::Duration};

use http::StatusCode;

/// The reason why a [`ReadBodyLayer`](crate::ReadBodyLayer) rejects a request.
///
/// | the body | status |
/// | --- | --- |
/// | is longer than the bound | `413 Content Too Large` |
/// | is not complete in time | `408 Request Timeout` |
/// | is not JSON, not UTF-8, or breaks off | `400 Bad Request` |
/// | is JSON of another shape | `422 Unprocessable Content` |
///
/// `400` and `422` are those of axum's `Json`, so that a client sees the same status with and without the layer. The text is for
/// the client: it has no part of the body.
///
/// ```
/// use bytes::Bytes;
/// use http::{Request, Response, request::Parts};
/// use http_body_util::{BodyExt, Full};
/// use std::time::Duration;
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_quota::{ReadBodyLayer, response::Rejection};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = ReadBodyLayer::bytes(4, Duration::from_secs(10)).format(|rejection: Rejection<'_>, _: &Parts| {
///     let mut response = Response::new(Bytes::new());
///     *response.status_mut() = rejection.status();
///     if let Rejection::Unread(error) = rejection {
///         *response.body_mut() = error.to_string().into();
///     }
///     response
/// });
/// let service = layer.layer(service_fn(async |request: Request<Full<Bytes>>| {
///     Ok::<_, std::convert::Infallible>(Response::new(request.into_body()))
/// }));
///
/// let rejected = service.oneshot(Request::post("/").body(Full::from("hello"))?).await?;
/// assert_eq!(rejected.status(), 413);
/// assert_eq!(rejected.into_body().collect().await?.to_bytes(), "the body is longer than 4 bytes");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct BodyError(Kind);

#[derive(Debug)]
enum Kind {
    TooLarge {
        most: u64,
    },
    TooSlow {
        time: Duration,
    },
    Broken,
    Malformed(Cow<'static, str>),
    #[cfg(feature = "serde")]
    Mismatched(String),
}

impl BodyError {
    pub(crate) fn too_large(most: u64) -> Self {
        Self(Kind::TooLarge { most })
    }

    pub(crate) fn too_slow(time: Duration) -> Self {
        Self(Kind::TooSlow { time })
    }

    pub(crate) fn broken() -> Self {
        Self(Kind::Broken)
    }

    pub(crate) fn malformed(reason: impl Into<Cow<'static, str>>) -> Self {
        Self(Kind::Malformed(reason.into()))
    }

    #[cfg(feature = "serde")]
    pub(crate) fn of_json(error: &serde_json::Error) -> Self {
        match error.is_data() {
            true => Self(Kind::Mismatched(error.to_string())),
            false => Self::malformed(error.to_string()),
        }
    }

    /// The HTTP status, as in the [table](Self).
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self.0 {
            Kind::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Kind::TooSlow { .. } => StatusCode::REQUEST_TIMEOUT,
            Kind::Broken | Kind::Malformed(_) => StatusCode::BAD_REQUEST,
            #[cfg(feature = "serde")]
            Kind::Mismatched(_) => StatusCode::UNPROCESSABLE_ENTITY,
        }
    }
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::TooLarge { most } => write!(f, "the body is longer than {most} bytes"),
            Kind::TooSlow { time } => write!(f, "the body is not complete after {time:?}"),
            Kind::Broken => f.write_str("the body breaks off"),
            Kind::Malformed(reason) => write!(f, "the body is malformed: {reason}"),
            #[cfg(feature = "serde")]
            Kind::Mismatched(reason) => write!(f, "the body does not have the expected shape: {reason}"),
        }
    }
}

impl Error for BodyError {}
