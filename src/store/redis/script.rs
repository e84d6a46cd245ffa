use std::sync::LazyLock;

use super::call;
use crate::limit::{
    BOUND, BUDGET, HEAVIEST, LEVELS, LONGER_WINDOWS, LONGEST_WAIT_US, MAX_EXACT, MAX_TOTAL, NEVER, PLACE_SIZE,
    PLACE_US, RETRY_US, SLACK, SOON_US, STEPS,
};

/// A Lua script and its SHA-1 digest, by which `EVALSHA` names it.
pub(super) struct Script {
    pub(super) source: &'static str,
    sha1: String,
}

/// The script of the store.
pub(super) static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(with_constants(SOURCE).leak()));

/// The script of the overrides.
pub(super) static OVERRIDES: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("../../../lua/overrides.lua")));

const SOURCE: &str = concat!(
    include_str!("../../../lua/prelude.lua"),
    include_str!("../../../lua/lone_log.lua"),
    include_str!("../../../lua/trial.lua"),
    include_str!("../../../lua/runs.lua"),
    include_str!("../../../lua/numbers.lua"),
    include_str!("../../../lua/log_members.lua"),
    include_str!("../../../lua/sliding_log.lua"),
    include_str!("../../../lua/sliding_counter.lua"),
    include_str!("../../../lua/fixed_window.lua"),
    include_str!("../../../lua/token_bucket.lua"),
    include_str!("../../../lua/concurrency.lua"),
    include_str!("../../../lua/single.lua"),
    include_str!("../../../lua/line.lua"),
    include_str!("../../../lua/charges.lua"),
    include_str!("../../../lua/ban.lua"),
    include_str!("../../../lua/driver.lua"),
    include_str!("../../../lua/log_names.lua"),
    include_str!("../../../lua/log_waits.lua"),
    include_str!("../../../lua/coarse_log.lua"),
    include_str!("../../../lua/log_entries.lua"),
    include_str!("../../../lua/log_windows.lua"),
    include_str!("../../../lua/log_merges.lua"),
    include_str!("../../../lua/weighted_log.lua"),
    include_str!("../../../lua/again.lua"),
);

/// The most callers of one check that are an entry of a log each.
const FEW: u64 = 32;

/// How many members of sorted sets a call may read for the waits of denied charges, beside the first of each.
const ALL_READS: u64 = 8 * BUDGET as u64;

/// The constants of the script, which a call of the script would otherwise make anew.
///
/// Those that begin with `C_` are the places in a charge of a call with several: a table with names takes longer.
const CONSTANTS: [(&str, u64); 27] = [
    ("ALL_READS", ALL_READS),
    ("BOUND", BOUND as u64),
    ("BUDGET", BUDGET as u64),
    ("C_COST", 2),
    ("C_LINE", 9),
    ("C_NEXT", 7),
    ("C_QUOTA", 3),
    ("C_RETRY", 8),
    ("C_RULE", 1),
    ("C_X", 4),
    ("C_Y", 5),
    ("C_Z", 6),
    ("EXACT", MAX_EXACT),
    ("FEW", FEW),
    ("HEADERS", LONGER_WINDOWS as u64 + 2),
    ("HEAVIEST", HEAVIEST),
    ("LEVELS", LEVELS),
    ("LONGER_WINDOWS", LONGER_WINDOWS as u64),
    ("MAX_TOTAL", MAX_TOTAL),
    ("NEVER", NEVER),
    ("PLACE_SIZE", PLACE_SIZE as u64),
    ("LONGEST_WAIT_US", LONGEST_WAIT_US),
    ("PLACE_US", PLACE_US),
    ("RETRY_US", RETRY_US),
    ("SLACK", SLACK),
    ("SOON_US", SOON_US),
    ("STEPS", STEPS),
];

fn with_constants(source: &str) -> String {
    let lone = call::lone_log();
    let bytes = lone.iter().map(|byte| format!("\\{byte:03}")).collect::<String>();
    let source = source.replace("LONE_LOG", &format!("'{bytes}'"));
    let source = source.replace("LONE_BYTES", &lone.len().to_string());
    CONSTANTS
        .iter()
        .fold(source, |source, (name, value)| source.replace(name, &value.to_string()))
}

/// The command that runs a script.
#[derive(Clone, Copy, Debug)]
pub(super) enum EvalCommand {
    /// Sends the digest of the script.
    EvalSha,
    /// Sends the text of the script, which Redis keeps in its script cache.
    Eval,
}

impl Script {
    pub(super) fn new(source: &'static str) -> Self {
        Self {
            source,
            sha1: sha1_smol::Sha1::from(source).hexdigest(),
        }
    }

    /// The name of the command and its first argument.
    pub(super) fn command(&'static self, command: EvalCommand) -> (&'static str, &'static str) {
        match command {
            EvalCommand::EvalSha => ("EVALSHA", &self.sha1),
            EvalCommand::Eval => ("EVAL", self.source),
        }
    }
}
