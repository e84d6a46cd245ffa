use std::{borrow::Cow, fmt::Display};

use super::acl::{Refusal, ReplyingServer};
use crate::store::{ErrorKind, StoreError};

/// Why a script call has no reply, or one that is an error.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// No reply arrived within the deadline.
    Timeout,
    /// There is no connection, or it was lost before the reply arrived.
    Unreachable(Cow<'static, str>),
    /// The server replied with this error.
    Refused(String),
    /// The server will reply with this error until its settings or those of the store are changed.
    Forbidden(Refusal),
    /// The reply is not one of the script.
    Protocol(&'static str),
}

impl Failure {
    /// The failure for an error reply to a script call.
    pub(super) fn of_call(error: impl Display) -> Self {
        let error = shortened(error);
        let error = of_script(&error).to_owned();
        Refusal::of_call(&error).map_or(Self::Refused(error), Self::Forbidden)
    }

    /// The failure for an error while a connection is set up.
    pub(super) fn of_connection(error: impl Display) -> Self {
        let error = shortened(error);
        Refusal::of_connection(&error).map_or(Self::Unreachable(error.into()), Self::Forbidden)
    }

    /// The same failure, of this server.
    pub(super) fn of(mut self, server: ReplyingServer) -> Self {
        if let Self::Forbidden(refusal) = &mut self {
            refusal.replied_by = server;
        }
        self
    }

    /// The tasks of the connections have ended, without the store.
    pub(super) fn ended_runtime() -> Self {
        Self::Unreachable(
            "the runtime in which the store was connected has shut down; connect a store in each runtime".into(),
        )
    }

    pub(super) fn malformed_reply() -> Self {
        Self::Protocol("the reply of Redis is not one of the script")
    }

    /// The kind of the error that it becomes.
    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            Self::Timeout => ErrorKind::Timeout,
            Self::Unreachable(_) => ErrorKind::Unreachable,
            Self::Refused(_) | Self::Forbidden(_) => ErrorKind::Refused,
            Self::Protocol(_) => ErrorKind::Protocol,
        }
    }

    /// The cause in plain words.
    pub(super) fn cause(&self) -> Cow<'_, str> {
        match self {
            Self::Timeout => "Redis did not reply".into(),
            Self::Unreachable(source) => (&**source).into(),
            Self::Refused(error) => format!("Redis replied: {error}").into(),
            Self::Forbidden(Refusal { error, replied_by, .. }) => format!("{replied_by} replied: {error}").into(),
            Self::Protocol(fault) => (*fault).into(),
        }
    }

    /// Whether there was no reply, not even an error.
    pub(super) fn is_no_reply(&self) -> bool {
        matches!(self, Self::Timeout | Self::Unreachable(_))
    }

    /// Whether the server replies so until its settings or those of the store are changed.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, Self::Forbidden(_))
    }

    /// Whether nothing listens where Redis should.
    pub(super) fn is_refused_connection(&self) -> bool {
        matches!(self, Self::Unreachable(cause) if cause.contains("refused"))
    }

    /// Whether there is no way to the server: its name has no address, or no network leads to it.
    pub(super) fn is_of_network(&self) -> bool {
        let causes = ["lookup", "unreachable", "No route"];
        matches!(self, Self::Unreachable(cause) if causes.iter().any(|part| cause.contains(part)))
    }

    /// Whether what listens there does not reply as a Redis without TLS does: it closes the connection, or sends what is no reply.
    pub(super) fn is_of_no_redis(&self) -> bool {
        let causes = ["Decode Error", "Parse error", "onnection reset", "roken pipe", "closed"];
        matches!(self, Self::Unreachable(cause) if causes.iter().any(|part| cause.contains(part)))
    }

    /// Whether the certificate of the server is refused.
    pub(super) fn is_of_certificate(&self) -> bool {
        matches!(self, Self::Unreachable(cause) if cause.contains("ertificate"))
    }

    /// Whether a cluster node has only some of the keys because their slot is being moved. Nothing was executed.
    pub(super) fn is_try_again(&self) -> bool {
        matches!(self, Self::Refused(error) if error.starts_with("TRYAGAIN"))
    }

    /// Whether another node has a key: of the call, or of a command in a script.
    ///
    /// Of the latter Redis 6.2 says `Lua script attempted to access a non local key in a cluster node`; later ones begin with `Script
    /// attempted`, and those of Valkey with `Attempted`.
    pub(super) fn is_elsewhere(&self) -> bool {
        const NOT_LOCAL: &str = "ttempted to access a non local key";

        let is_other =
            |error: &str| error.starts_with("MOVED ") || error.starts_with("ASK ") || error.contains(NOT_LOCAL);
        matches!(self, Self::Refused(error) if is_other(error))
    }

    /// Whether the server may reply so while it starts or is replaced, whatever it is asked for.
    pub(super) fn is_passing(&self) -> bool {
        const CODES: [&str; 4] = ["MOVED ", "CLUSTERDOWN", "BUSY", "LOADING"];

        matches!(self, Self::Refused(error) if CODES.iter().any(|code| error.starts_with(code)))
    }

    /// Whether the key holds what is not of this crate.
    pub(super) fn is_of_key(&self) -> bool {
        matches!(self, Self::Refused(error) if error.starts_with("WRONGTYPE"))
    }
}

/// The error of a check that is recorded in the health of its node.
impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        let kind = failure.kind();
        let error = match failure {
            Failure::Timeout => Self::new(kind, "Redis did not reply within the deadline of the check"),
            Failure::Unreachable(source) => Self::new(kind, "there is no connection to Redis").with_source(source),
            Failure::Refused(_) | Failure::Forbidden(_) | Failure::Protocol(_) => {
                Self::new(kind, failure.cause().into_owned())
            }
        };
        error.recorded()
    }
}

/// Whether it is the error of a replica, which cannot count.
pub(super) fn is_of_replica(error: &[u8]) -> bool {
    let error = String::from_utf8_lossy(error);
    let error = of_script(&error);
    error.starts_with("READONLY") || error.starts_with("MASTERDOWN")
}

/// An error reply without the place in a script where a command failed, which Redis up to 6.2 writes before it:
/// `ERR Error running script (call to f_1b1a): @user_script:1: @user_script: 1: -READONLY You can't write ..`
pub(super) fn of_script(error: &str) -> &str {
    const PLACES: [&str; 3] = ["ERR Error running script", "@user_script:", "=[C]:"];

    let mut message = error;
    for place in PLACES.iter().chain(&PLACES[1..]) {
        if let Some((_, after)) = message.strip_prefix(place).and_then(|rest| rest.split_once(": ")) {
            message = after.strip_prefix('-').unwrap_or(after);
        }
    }
    message
}

/// The most bytes of an error of a server that are kept.
const MAX_TEXT: usize = 1_000;

/// Before the arguments of a command that a server does not have. Those of `AUTH` and `HELLO` are a password.
const BEFORE_ARGUMENTS: &str = "with args beginning with";

/// The beginning of an error, in one line and without the arguments of a command: a server can send any bytes, and logs contain them.
pub(super) fn shortened(error: impl Display) -> String {
    let mut text = error.to_string();
    if let Some(at) = text.to_ascii_lowercase().find(BEFORE_ARGUMENTS) {
        text.truncate(text[..at].trim_end_matches([' ', ',']).len());
    }
    let ends = text.char_indices().map(|(at, char)| at + char.len_utf8());
    let end = ends.take_while(|end| *end <= MAX_TEXT).last().unwrap_or_default();
    text[..end].replace(char::is_control, " ")
}

/// The same of bytes, which may be no text.
pub(super) fn shortened_bytes(error: &[u8]) -> String {
    shortened(String::from_utf8_lossy(&error[..error.len().min(MAX_TEXT)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_an_error_its_beginning_is_kept_in_one_line() {
        let long = "x".repeat(100 * MAX_TEXT);
        assert_eq!(
            shortened(format_args!("ERR {long}")),
            format!("ERR {}", &long[4..MAX_TEXT])
        );
        assert_eq!(shortened_bytes(long.as_bytes()), long[..MAX_TEXT]);
        // Not in the middle of a character.
        assert_eq!(shortened(format_args!("x{}", "é".repeat(MAX_TEXT))).len(), MAX_TEXT - 1);
        assert_eq!(shortened("ERR a\r\nb\u{1b}[31m"), "ERR a  b [31m");
    }

    #[test]
    fn the_arguments_of_an_unknown_command_are_left_out() {
        for (begin, unknown) in [
            (
                "ERR unknown command 'HELLO'",
                ", with args beginning with: '3' 'AUTH' 'limiter' 'secret'",
            ),
            (
                "ERR unknown command `AUTH`",
                ", With Args Beginning With: `limiter`, `secret`, ",
            ),
        ] {
            let error = format!("{begin}{unknown}");
            assert_eq!(shortened(&error), begin);
            assert_eq!(shortened_bytes(error.as_bytes()), begin);
            // Also where they are beyond what is kept.
            let long = format!("{}{error}", "x".repeat(MAX_TEXT - begin.len() - unknown.len() + 10));
            assert!(!shortened_bytes(long.as_bytes()).contains("limiter"), "{long}");
        }
    }

    #[test]
    fn the_place_in_the_script_is_no_part_of_an_error() {
        let readonly = "READONLY You can't write against a read only replica.";
        for error in [
            readonly.to_owned(),
            format!("ERR Error running script (call to f_1b1a): @user_script:1: {readonly}"),
            format!("ERR Error running script (call to f_1b1a): @user_script:1: @user_script: 1: -{readonly}"),
            format!("@user_script: 12: -{readonly}"),
            format!("=[C]: -1: -{readonly}"),
        ] {
            assert_eq!(of_script(&error), readonly, "{error}");
            assert!(is_of_replica(error.as_bytes()), "{error}");
        }
    }

    #[test]
    fn a_server_that_starts_or_is_replaced_replies_with_passing_errors() {
        for (error, is_passing) in [
            ("MOVED 3999 127.0.0.1:6381", true),
            ("CLUSTERDOWN The cluster is down", true),
            ("BUSY Redis is busy running a script", true),
            ("LOADING Redis is loading the dataset in memory", true),
            ("WRONGTYPE Operation against a key", false),
            (
                "NOPERM this user has no permissions to run the 'publish' command",
                false,
            ),
        ] {
            assert_eq!(Failure::of_call(error).is_passing(), is_passing, "{error}");
        }
    }
}
