//! The permissions that a store requires in Redis, and the errors that name a missing one.

use std::fmt;

/// The commands that the script calls.
const COMMANDS: &str = "time get set getrange setrange unlink pexpireat pttl zadd zcard zcount zincrby zrange \
                        zrangebyscore zrevrangebyscore zrem zremrangebyrank zremrangebyscore zrevrank zscore";

/// The commands for the messages that wake requests which wait. A store works without them.
const MESSAGES: &str = "publish subscribe";

/// The command that creates a user with the permissions of a store with this prefix. Up to Redis 6.2 a user has all channels, and
/// none can be added to these. A strict user may only run scripts that
/// Redis has already.
fn acl_line(prefix: &str, strict: bool, more: &[&str]) -> String {
    let (user, eval) = match strict {
        true => ("strict-limiter", ""),
        false => ("limiter", " +eval"),
    };
    let commands = [COMMANDS, MESSAGES]
        .into_iter()
        .flat_map(|commands| commands.split(' '));
    let commands: String = commands
        .chain(more.iter().copied())
        .map(|command| format!(" +{command}"))
        .collect();
    format!(
        "ACL SETUSER {user} reset on >password ~{prefix}:* resetchannels &{prefix}:* +ping{eval} +evalsha{commands}"
    )
}

/// The errors up to Redis 7.0 and since 7.2 if a script calls a command without permission.
const IN_SCRIPT: [&str; 2] = ["The user executing the script", "ACL failure in script"];

/// An error reply of Redis that does not change until the settings of Redis or of the store are changed.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    /// The command without permission, in upper case.
    command: Option<String>,
    /// The reply.
    pub(super) error: String,
    pub(super) replied_by: ReplyingServer,
}

/// The server that refuses.
#[derive(Clone, Debug)]
pub(super) enum ReplyingServer {
    Redis,
    /// The node of a cluster at this address.
    Node(Box<str>),
    Sentinel,
}

impl fmt::Display for ReplyingServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Redis => f.write_str("Redis"),
            Self::Node(address) => write!(f, "the node {address}"),
            Self::Sentinel => f.write_str("a sentinel"),
        }
    }
}

impl Refusal {
    /// The refusal in an error of a script call, if it is one.
    pub(super) fn of_call(error: &str) -> Option<Self> {
        const CODES: [&str; 4] = ["DENIED", "NOAUTH", "NOPERM", "WRONGPASS"];
        const TEXTS: [&str; 4] = [
            "no permissions to",
            "nknown Redis command",
            "unauthenticated",
            "unknown command",
        ];
        let is_final =
            CODES.iter().any(|code| error.starts_with(code)) || has_any(error, &TEXTS) || has_any(error, &IN_SCRIPT);
        is_final.then(|| Self::new(error))
    }

    /// The refusal in an error of a new connection, if it is one.
    pub(super) fn of_connection(error: &str) -> Option<Self> {
        // About the credentials or the database. redis-rs replaces the code of an error of `SELECT`, such as `BUSY`.
        let is_final =
            error.starts_with("ERR ") && !has_any(error, &["max number of clients", "busy running a script"]);
        is_final.then(|| Self::new(error)).or_else(|| Self::of_call(error))
    }

    /// The refusal in an error of a command of the trial, if it is one.
    pub(super) fn of_trial(command: &str, error: &str) -> Option<Self> {
        // `OOM` and `READONLY` are temporary; an error without a code of its own is about the command.
        let is_final = error.starts_with("ERR ") || Self::of_call(error).is_some();
        is_final.then(|| Self {
            command: Some(command.to_uppercase()),
            ..Self::new(error)
        })
    }

    /// The same refusal if the trial received it before its first command: it is about `TIME`, which the script calls first.
    pub(super) fn before_the_commands(mut self) -> Self {
        if self.command.is_none() && has_any(&self.error, &IN_SCRIPT) {
            self.command = Some("TIME".to_owned());
        }
        self
    }

    pub(super) fn new(error: impl Into<String>) -> Self {
        let error = error.into();
        Self {
            command: command_in(&error),
            error,
            replied_by: ReplyingServer::Redis,
        }
    }

    fn is_of_sentinel(&self) -> bool {
        let is_command = |command: &String| command.starts_with("SENTINEL");
        matches!(self.replied_by, ReplyingServer::Sentinel) || self.command.as_ref().is_some_and(is_command)
    }

    /// Names the missing permission and what grants it, for a store with this prefix, on servers that require more permissions.
    pub(super) fn explain(&self, prefix: &str, of_servers: &[&str]) -> String {
        let Self { error, replied_by, .. } = self;
        let permission = self.command.as_ref();
        let permission = permission.map(|command| command.replace(' ', "|").to_lowercase());
        let permission = permission.unwrap_or_default();
        let commands = [COMMANDS, MESSAGES, "ping eval evalsha"].into_iter();
        let mut listed = commands
            .flat_map(|commands| commands.split(' '))
            .chain(of_servers.iter().copied());
        // Redis 6.2 names no subcommand.
        let is_named = |listed: &str| listed == permission || listed.split('|').next() == Some(&permission);
        let mut more = of_servers.to_vec();
        if !permission.is_empty() && !listed.any(is_named) {
            more.push(&permission);
        }
        let user = acl_line(prefix, false, &more);
        let user = format!("; a user with all permissions of the store: `{user}` ({replied_by} replied: {error})");
        match self.command.as_deref() {
            _ if error.starts_with("CROSSSLOT") => format!(
                "Redis is a node of a cluster, which refuses keys of several slots together; use the URL `redis-cluster://..` \
                 with the feature `cluster` ({replied_by} replied: {error})"
            ),
            _ if error.contains("cluster support disabled") => {
                format!("Redis is no cluster; use the URL `redis://..` ({replied_by} replied: {error})")
            }
            _ if has_any(error, &["unknown command 'SENTINEL'", "unknown command `SENTINEL`"]) => format!(
                "no Sentinel listens there; use the URL `redis://..`, or the address of a Sentinel, which is often port 26379 \
                 ({replied_by} replied: {error})"
            ),
            Some(command) if self.is_of_sentinel() => format!(
                "a sentinel refuses the command `{command}` to the user that `sentinelUsername` in the URL names; grant it on each \
                 sentinel with `+{permission}` (a sentinel replied: {error})"
            ),
            None if self.is_of_sentinel() => format!(
                "a sentinel refuses the connection; sentinels have credentials of their own, which are parameters of the URL, \
                 `&sentinelUsername=user&sentinelPassword=password` (a sentinel replied: {error})"
            ),
            _ if error.starts_with("NOSCRIPT") => format!(
                "Redis does not keep the script of the store, and `EVAL` does not load it ({replied_by} replied: {error})"
            ),
            Some("EVAL") => {
                let strict = acl_line(prefix, true, of_servers);
                format!(
                    "Redis does not have the script of the store and refuses `EVAL`, which would load it; load the texts of \
                     `RedisStore::scripts()` with `SCRIPT LOAD` for a user such as `{strict}`, or permit `EVAL`{user}"
                )
            }
            Some(command) if has_any(error, &["syntax error", "nknown"]) => format!(
                "this Redis has no command `{command}` as of Redis 6.2, which the store requires ({replied_by} replied: {error})"
            ),
            Some(command) => format!("Redis refuses the command `{command}`; grant it with `+{permission}`{user}"),
            None if has_any(error, &ABOUT_KEYS) => format!("Redis refuses the keys `{prefix}:*`{user}"),
            None if has_any(error, &ABOUT_CREDENTIALS) => {
                let url = "; they are part of the URL, `redis://user:password@host:6379`, or set by \
                           `RedisStoreBuilder::credentials` or `RedisStoreBuilder::password_file`";
                format!("Redis refuses the credentials{url}{user}")
            }
            None => format!("Redis refuses the connection ({replied_by} replied: {error})"),
        }
    }
}

fn has_any(error: &str, texts: &[&str]) -> bool {
    texts.iter().any(|text| error.contains(text))
}

const ABOUT_KEYS: [&str; 3] = [
    "access one of the keys",
    "access a key",
    "access at least one of the keys",
];
const ABOUT_CREDENTIALS: [&str; 3] = ["AUTH", "WRONGPASS", "uthenticat"];

/// `NOPERM this user has no permissions to run the 'evalsha' command`
fn command_in(error: &str) -> Option<String> {
    let (_, rest) = error.split_once("permissions to run the '")?;
    let (command, _) = rest.split_once('\'')?;
    Some(command.to_uppercase().replace('|', " "))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::store::redis::{failure::Failure, script::SCRIPTS};

    #[test]
    fn the_page_about_redis_has_both_users() {
        let page = include_str!("../../../docs/redis.md");
        for strict in [false, true] {
            let line = acl_line("quota", strict, &[]);
            assert!(page.lines().any(|of_page| of_page == line), "{line}");
        }
    }

    #[test]
    fn the_users_may_run_the_commands_of_the_scripts_and_no_others() {
        let called: BTreeSet<_> = SCRIPTS
            .all()
            .flat_map(|script| script.source.split("call('").skip(1))
            .filter_map(|rest| rest.split_once('\''))
            .map(|(command, _)| command.to_lowercase())
            .collect();
        let permitted = COMMANDS.split(' ').chain(["publish"]);
        assert_eq!(called, permitted.map(str::to_owned).collect());
    }

    #[test]
    fn the_trial_runs_each_command_that_the_scripts_call() {
        let trial = include_str!("../../../lua/trial.lua");
        let tried = trial.lines().filter_map(|line| line.trim().strip_prefix("{ '"));
        let tried = tried.filter_map(|line| line.split_once('\''));
        let tried = tried.map(|(command, _)| command.to_lowercase());
        // The script begins with it.
        let tried: BTreeSet<_> = tried.chain(["time".to_owned()]).collect();
        assert_eq!(tried, COMMANDS.split(' ').map(str::to_owned).collect());
    }

    #[test]
    fn a_refusal_names_the_missing_permission() {
        // As Redis 6.2, 7.0 and 7.2 reply.
        for (error, names) in [
            (
                "NOPERM this user has no permissions to run the 'evalsha' command or its subcommand",
                "`+evalsha`",
            ),
            (
                "NOPERM This user has no permissions to run the 'evalsha' command",
                "`EVALSHA`",
            ),
            (
                "NOPERM User limiter has no permissions to run the 'cluster|slots' command",
                "`+cluster|slots`",
            ),
            (
                "NOPERM User limiter has no permissions to run the 'eval' command",
                "`SCRIPT LOAD`",
            ),
            (
                "NOPERM this user has no permissions to access one of the keys used as arguments",
                "`shop:*`",
            ),
            ("NOPERM No permissions to access a key", "`shop:*`"),
            ("NOAUTH Authentication required.", "credentials"),
            (
                "WRONGPASS invalid username-password pair or user is disabled.",
                "credentials",
            ),
            ("ERR Protocol error: unauthenticated multibulk length", "credentials"),
        ] {
            let refusal = Refusal::of_call(error).unwrap_or_else(|| panic!("{error}"));
            let text = refusal.explain("shop", &[]);
            assert!(text.contains(names) && text.contains(error), "{text}");
            assert!(
                text.contains("`ACL SETUSER limiter reset on >password ~shop:* resetchannels &shop:* +ping "),
                "{text}"
            );
        }
    }

    #[test]
    fn the_users_of_an_error_have_the_permissions_that_the_servers_require() {
        for (refused, ends) in [
            ("zadd", "+subscribe +cluster|slots +asking`"),
            ("cluster|slots", "+subscribe +cluster|slots +asking`"),
            ("cluster", "+subscribe +cluster|slots +asking`"),
            ("select", "+subscribe +cluster|slots +asking +select`"),
            ("eval", "+subscribe +cluster|slots +asking`"),
        ] {
            let error = format!("NOPERM this user has no permissions to run the '{refused}' command");
            let text = Refusal::new(error).explain("shop", &["cluster|slots", "asking"]);
            assert_eq!(
                text.matches(ends).count(),
                text.matches("`ACL SETUSER").count(),
                "{text}"
            );
        }
    }

    #[test]
    fn a_refusal_without_a_permission_has_its_own_words() {
        let unknown = "ERR unknown command 'ZADD', with args beginning with: ";
        let syntax = "ERR syntax error";
        let database = "ERR DB index is out of range";
        let script = "NOSCRIPT No matching script.";
        for (refusal, words) in [
            (Refusal::of_trial("zadd", unknown), "no command `ZADD` as of Redis 6.2"),
            (Refusal::of_trial("set", syntax), "no command `SET` as of Redis 6.2"),
            (Refusal::of_connection(database), "refuses the connection"),
            (Some(Refusal::new(script)), "does not keep the script"),
        ] {
            let text = refusal.expect("a refusal").explain("shop", &[]);
            assert!(text.contains(words) && !text.contains("ACL SETUSER"), "{text}");
        }
    }

    #[test]
    fn a_refusal_of_a_sentinel_names_its_own_credentials() {
        let command = "NOPERM User watcher has no permissions to run the 'sentinel|sentinels' command";
        for (error, words) in [
            (command, "`+sentinel|sentinels`"),
            (
                "NOAUTH Authentication required.",
                "`&sentinelUsername=user&sentinelPassword=password`",
            ),
        ] {
            let Failure::Forbidden(refusal) = Failure::of_connection(error).of(ReplyingServer::Sentinel) else {
                panic!("{error}");
            };
            let text = refusal.explain("shop", &["role"]);
            assert!(
                text.contains(words) && text.contains(error) && !text.contains("ACL SETUSER"),
                "{text}"
            );
            assert!(
                text.contains("`sentinelUsername`") || text.contains("sentinelUsername="),
                "{text}"
            );
        }
    }

    #[test]
    fn a_temporary_error_is_no_refusal() {
        for error in [
            "OOM command not allowed when used memory > 'maxmemory'.",
            "READONLY You can't write against a read only replica.",
            "LOADING Redis is loading the dataset in memory",
            "BUSY Redis is busy running a script.",
            "MASTERDOWN Link with MASTER is down",
            "NOREPLICAS Not enough good replicas to write.",
            "CLUSTERDOWN The cluster is down",
            "ERR max number of clients reached",
            "ERR Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        ] {
            assert!(Refusal::of_call(error).is_none(), "{error}");
            assert!(Refusal::of_connection(error).is_none(), "{error}");
        }
        assert!(Refusal::of_trial("set", "OOM command not allowed when used memory > 'maxmemory'.").is_none());
    }
}
