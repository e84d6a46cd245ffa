use redis::RedisError;

use crate::store::redis::{acl::Refusal, failure::Failure};

/// The text of an error reply as Redis sent it.
pub(super) fn error_text(code: &str, details: Option<&str>) -> String {
    match details {
        Some(details) => format!("{code} {details}"),
        None => code.to_owned(),
    }
}

/// The failure for an error of a new connection.
pub(super) fn connect_failure(error: &RedisError) -> Failure {
    use redis::ErrorKind::{AuthenticationFailed, InvalidClientConfig, RESP3NotSupported};

    match (error.kind(), error.code()) {
        (_, Some(code)) => Failure::of_connection(error_text(code, error.detail())),
        (AuthenticationFailed | InvalidClientConfig | RESP3NotSupported, None) => {
            Failure::Forbidden(Refusal::new(error.to_string()))
        }
        _ => Failure::Unreachable(error.to_string().into()),
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
            let failure = connect_failure(&RedisError::from((kind, "no")));
            assert!(matches!(failure, Failure::Forbidden(_)), "{failure:?}");
        }
        let failure = connect_failure(&RedisError::from((ErrorKind::Io, "no")));
        assert!(matches!(failure, Failure::Unreachable(_)), "{failure:?}");
    }
}
