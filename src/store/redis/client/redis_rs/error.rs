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
