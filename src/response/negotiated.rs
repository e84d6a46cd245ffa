use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::{Response, request::Parts};

use super::{Grpc, Problem, Rejection, ResponseFormat};

/// Answers gRPC calls in gRPC, and everything else in another format.
///
/// What is gRPC is known by its content type alone. The default for everything else is [`Problem`].
///
/// ```
/// use tower_quota::response::{Grpc, Negotiated, Plain};
///
/// let plain = Negotiated::new(Plain).grpc(Grpc::new().pushback());
/// # let _ = plain;
/// ```
#[derive(Clone)]
#[must_use]
pub struct Negotiated {
    grpc: Grpc,
    otherwise: Arc<dyn ResponseFormat>,
}

impl Negotiated {
    /// Answers gRPC calls in gRPC, and everything else in this format.
    pub fn new(otherwise: impl ResponseFormat) -> Self {
        Self {
            grpc: Grpc::new(),
            otherwise: Arc::new(otherwise),
        }
    }

    /// How gRPC calls are answered.
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
