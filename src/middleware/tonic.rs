//! Denials and failures as a gRPC status of tonic.

use std::sync::Arc;

use http::{HeaderMap, header::RETRY_AFTER};
use tonic::{Code, Status, metadata::MetadataMap};

use crate::{
    AcquireError, Denied,
    decision::{
        GRPC_RETRY_PUSHBACK,
        response::{GrpcStatus, RETRY_AFTER_FAILURE, Rejection},
    },
    store::StoreError,
};

/// The status that [`Grpc`](crate::decision::response::Grpc) responds with, and the rate limit fields as metadata.
impl From<Denied> for Status {
    fn from(denied: Denied) -> Self {
        let decision = denied.decision();
        let mut metadata = decision.headers();
        // The wait is part of the status.
        metadata.remove(RETRY_AFTER);
        let mut status = status(GrpcStatus::new(Rejection::Limited(decision)), metadata);
        status.set_source(Arc::new(denied));
        status
    }
}

/// `UNAVAILABLE`, as [`Grpc`](crate::decision::response::Grpc) responds.
impl From<StoreError> for Status {
    fn from(error: StoreError) -> Self {
        let failed = Rejection::Failed {
            error: &error,
            retry_after: RETRY_AFTER_FAILURE,
        };
        let mut status = status(GrpcStatus::new(failed), HeaderMap::new());
        status.set_source(Arc::new(error));
        status
    }
}

/// The status of the denial or of the failure.
impl From<AcquireError> for Status {
    fn from(error: AcquireError) -> Self {
        match error {
            AcquireError::Denied(denied) => denied.into(),
            AcquireError::Store(error) => error.into(),
        }
    }
}

fn status(status: GrpcStatus, mut metadata: HeaderMap) -> Status {
    metadata.insert(GRPC_RETRY_PUSHBACK, status.pushback);
    let (code, metadata) = (Code::from(i32::from(status.code)), MetadataMap::from_headers(metadata));
    Status::with_details_and_metadata(code, status.message, status.details.into(), metadata)
}
