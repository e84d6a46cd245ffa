use redis::RedisError;

use crate::store::redis::{
    acl::Refusal,
    failure::{Failure, shortened},
};

/// The beginning of the text of an error reply as Redis sent it.
pub(super) fn error_text(code: &str, details: Option<&str>) -> String {
    match details {
        Some(details) => shortened(format_args!("{code} {details}")),
        None => shortened(code),
    }
}

/// Why a server cannot be used. Of what it has sent only the beginning is kept.
#[derive(Clone, Debug)]
pub(super) enum ServerFailure {
    Unreachable(String),
    Forbidden(Refusal),
    Protocol(&'static str),
}

impl ServerFailure {
    /// The failure for an error of a new connection.
    pub(super) fn of_connection(error: &RedisError) -> Self {
        use redis::ErrorKind::{AuthenticationFailed, InvalidClientConfig, RESP3NotSupported};

        match (error.kind(), error.code()) {
            (_, Some(code)) => Self::of_reply(code, error.detail()),
            (AuthenticationFailed | InvalidClientConfig | RESP3NotSupported, None) => {
                Self::Forbidden(Refusal::new(shortened(error)))
            }
            _ => Self::Unreachable(shortened(error)),
        }
    }

    /// The failure for an error reply to a command that sets up a connection.
    pub(super) fn of_reply(code: &str, details: Option<&str>) -> Self {
        let text = error_text(code, details);
        Refusal::of_connection(&text).map_or(Self::Unreachable(text), Self::Forbidden)
    }
}

impl From<ServerFailure> for Failure {
    fn from(failure: ServerFailure) -> Self {
        match failure {
            ServerFailure::Unreachable(text) => Self::Unreachable(text.into()),
            ServerFailure::Forbidden(refusal) => Self::Forbidden(refusal),
            ServerFailure::Protocol(fault) => Self::Protocol(fault),
        }
    }
}

#[cfg(test)]
mod tests {
    use redis::ErrorKind;

    use super::*;

    #[test]
    fn an_error_that_connecting_again_does_not_mend_is_a_refusal() {
        for kind in [
            ErrorKind::AuthenticationFailed,
            ErrorKind::InvalidClientConfig,
            ErrorKind::RESP3NotSupported,
        ] {
            let failure = ServerFailure::of_connection(&RedisError::from((kind, "no")));
            assert!(matches!(failure, ServerFailure::Forbidden(_)), "{failure:?}");
        }
        let failure = ServerFailure::of_connection(&RedisError::from((ErrorKind::Io, "no")));
        assert!(matches!(failure, ServerFailure::Unreachable(_)), "{failure:?}");
    }
}
