use std::borrow::Cow;

use fred::error::{Error, ErrorKind};

use crate::store::redis::{
    acl::Refusal,
    failure::{Failure, shortened},
};

/// The failure for an error of a call.
#[expect(clippy::needless_pass_by_value, reason = "it maps an error")]
pub(super) fn call_failure(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::Timeout => Failure::Timeout,
        ErrorKind::Canceled => lost(),
        ErrorKind::IO | ErrorKind::Routing | ErrorKind::Unknown => {
            Failure::Unreachable(shortened(plain_text(error.details())).into())
        }
        _ => Failure::of_call(error.details()),
    }
}

fn lost() -> Failure {
    Failure::Unreachable("the connection was lost".into())
}

/// The failure for an error while a client connects.
pub(super) fn connect_failure(error: &Error) -> Failure {
    match error.kind() {
        ErrorKind::Auth | ErrorKind::Config | ErrorKind::Url => {
            Failure::Forbidden(Refusal::new(shortened(error.details())))
        }
        ErrorKind::Canceled => lost(),
        // No reply, also if a provider of credentials has an error that looks like one.
        ErrorKind::IO => Failure::Unreachable(shortened(plain_text(error.details())).into()),
        _ => Failure::of_connection(plain_text(error.details())),
    }
}

/// The text of a system error, of which fred keeps only the `Debug` text:
/// `Os { code: 111, kind: ConnectionRefused, message: "Connection refused" }`
fn plain_text(details: &str) -> Cow<'_, str> {
    let is_debug = ["Os {", "Custom {"].iter().any(|begin| details.starts_with(begin));
    let quoted = details.split_once('"').and_then(|(_, rest)| rest.rsplit_once('"'));
    match (is_debug, quoted) {
        (true, Some((message, _))) => message.replace("\\\"", "\"").into(),
        _ => details.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_fred_cancels_has_lost_its_connection() {
        let canceled = || Error::new(ErrorKind::Canceled, "Canceled.");
        for failure in [call_failure(canceled()), connect_failure(&canceled())] {
            let Failure::Unreachable(cause) = failure else {
                panic!("{failure:?}");
            };
            assert_eq!(cause.to_string(), "the connection was lost");
        }
    }

    #[test]
    fn the_kind_of_an_error_of_fred_is_kept() {
        let timeout = Error::new(ErrorKind::Timeout, "Request timed out.");
        assert!(matches!(call_failure(timeout), Failure::Timeout));
        for kind in [ErrorKind::Auth, ErrorKind::Config, ErrorKind::Url] {
            let failure = connect_failure(&Error::new(kind, "no"));
            assert!(matches!(failure, Failure::Forbidden(_)), "{failure:?}");
        }
        let failure = connect_failure(&Error::new(ErrorKind::IO, "no"));
        assert!(matches!(failure, Failure::Unreachable(_)), "{failure:?}");
    }

    #[test]
    fn a_system_error_is_shown_in_plain_words() {
        for (details, text) in [
            (
                r#"Os { code: 111, kind: ConnectionRefused, message: "Connection refused" }"#,
                "Connection refused",
            ),
            (
                r#"Custom { kind: Uncategorized, error: "failed to lookup address information" }"#,
                "failed to lookup address information",
            ),
            ("Request timed out.", "Request timed out."),
        ] {
            assert_eq!(plain_text(details), text);
        }
    }
}
