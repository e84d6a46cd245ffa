use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::{Response, request::Parts};

use super::{format::ResponseFormat, grpc::Grpc, problem::Problem, rejection::Rejection};

/// Responds to gRPC calls with [`Grpc`], and to all other requests in another format.
///
/// A gRPC call is a `POST` with a content type of gRPC or gRPC-Web, to any route. The default for other requests is [`Problem`].
/// [A service without gRPC](crate::response#a-service-without-grpc) uses [`Problem`] for all.
///
/// ```
/// use http::Request;
/// use tower_quota::{key, response::{Grpc, Negotiated, PlainText, Rejection, ResponseFormat}, KeyExtractor};
///
/// let format = Negotiated::new(PlainText).grpc(Grpc::new().pushback(false));
///
/// for (content_type, of_response) in [
///     ("application/grpc", "application/grpc"),
///     ("application/json", "text/plain; charset=utf-8"),
/// ] {
///     let (parts, ()) = Request::post("/").header("content-type", content_type).body(())?.into_parts();
///     let error = key::ip().extract(&parts).unwrap_err();
///     let refused = format.respond(Rejection::Refused(&error), &parts);
///     assert_eq!(refused.headers()["content-type"], of_response);
/// }
/// # Ok::<_, http::Error>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct Negotiated {
    grpc: Grpc,
    otherwise: Arc<dyn ResponseFormat>,
}

impl Negotiated {
    /// Responds to gRPC calls with [`Grpc::new`], and to all other requests in this format.
    pub fn new(otherwise: impl ResponseFormat) -> Self {
        Self {
            grpc: Grpc::new(),
            otherwise: Arc::new(otherwise),
        }
    }

    /// Sets the format for gRPC calls.
    ///
    /// The default is [`Grpc::new`].
    pub fn grpc(mut self, grpc: Grpc) -> Self {
        self.grpc = grpc;
        self
    }
}

impl Default for Negotiated {
    fn default() -> Self {
        Self::new(Problem)
    }
}

impl ResponseFormat for Negotiated {
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
        match Grpc::is_call(parts) {
            true => self.grpc.respond(rejection, parts),
            false => self.otherwise.respond(rejection, parts),
        }
    }
}

impl fmt::Debug for Negotiated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Negotiated")
            .field("grpc", &self.grpc)
            .finish_non_exhaustive()
    }
}
