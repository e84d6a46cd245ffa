use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::{Response, request::Parts};

use super::{Grpc, Problem, Rejection, ResponseFormat};

/// Responds to gRPC calls with [`Grpc`], and to all other requests in another format.
///
/// A gRPC call is a `POST` with a content type of gRPC or gRPC-Web. The default for other requests is [`Problem`].
///
/// ```
/// use tower_quota::response::{Grpc, Negotiated, Plain};
///
/// let plain = Negotiated::new(Plain).grpc(Grpc::new().pushback(false));
/// # let _ = plain;
/// ```
#[derive(Clone)]
#[must_use]
pub struct Negotiated {
    grpc: Grpc,
    otherwise: Arc<dyn ResponseFormat>,
}

impl Negotiated {
    /// Responds to gRPC calls with [`Grpc`], and to all other requests in this format.
    pub fn new(otherwise: impl ResponseFormat) -> Self {
        Self {
            grpc: Grpc::new(),
            otherwise: Arc::new(otherwise),
        }
    }

    /// The response to gRPC calls.
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
        match Grpc::answers(parts) {
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
