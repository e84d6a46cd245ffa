use std::sync::LazyLock;

use crate::limit::{
    BOUND, BUDGET, FEW, HEAVIEST, LEVELS, LONGEST_WAIT_US, MAX_EXACT, MAX_TOTAL, NEVER, PLACE_SIZE, PLACE_US, RETRY_US,
    SLACK, SOON_US, STEPS,
};

/// A Lua script and its SHA-1 digest, by which `EVALSHA` names it.
pub(super) struct Script {
    pub(super) source: &'static str,
    sha1: String,
}

/// Names one of the [`Scripts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScriptName {
    /// Checks of this rule alone, at this position in [`RULES`], without bans, lines and calendars.
    Checks(usize),
    /// Other requests of this rule alone, without bans and lines.
    DriverOf(usize),
    /// All other requests.
    Driver,
    /// The same, where charges have lines.
    DriverWithLines,
    /// Each command once.
    Trial,
    Overrides,
}

impl ScriptName {
    /// Those that decide checks.
    pub(super) fn of_checks() -> impl Iterator<Item = Self> {
        let checks = (0..RULES.len()).map(Self::Checks);
        let drivers = (0..RULES.len()).map(Self::DriverOf);
        checks.chain(drivers).chain([Self::Driver, Self::DriverWithLines])
    }
}

/// The scripts of a store.
pub(super) struct Scripts {
    checks: [Script; RULES.len()],
    drivers: [Script; RULES.len()],
    driver: Script,
    driver_with_lines: Script,
    trial: Script,
    overrides: Script,
}

pub(super) static SCRIPTS: LazyLock<Scripts> = LazyLock::new(|| Scripts::new(str::to_owned));

macro_rules! lua {
    ($name:literal) => {
        include_str!(concat!("../../../lua/", $name, ".lua"))
    };
}

/// The name of each rule in a call, that of its functions, and the files that it needs.
pub(super) const RULES: [(&str, &str, [&str; 2]); 6] = [
    ("log", "log", [lua!("members"), lua!("log")]),
    ("precise", "precise", [lua!("members"), lua!("precise")]),
    ("counter", "counter", [lua!("numbers"), lua!("counter")]),
    ("fixed", "window", [lua!("numbers"), lua!("window")]),
    ("bucket", "bucket", [lua!("numbers"), lua!("bucket")]),
    ("concurrency", "slots", [lua!("slots"), ""]),
];

const PRELUDE: &str = lua!("prelude");
/// In the file of a rule, what follows is not needed for checks.
const FOR_DRIVER: &str = "-- What only the driver needs.\n";
/// All rules, each file once.
const ALL_RULES: [&str; 9] = [
    lua!("members"),
    lua!("log"),
    lua!("precise"),
    lua!("numbers"),
    lua!("counter"),
    lua!("window"),
    lua!("bucket"),
    lua!("slots"),
    lua!("ban"),
];

/// How many members of sorted sets a call may read for the waits of denied charges, beside the first of each.
const ALL_READS: u64 = 8 * BUDGET as u64;

/// The constants of the scripts, which a call would otherwise make anew.
const CONSTANTS: [(&str, u64); 17] = [
    ("ALL_READS", ALL_READS),
    ("BOUND", BOUND as u64),
    ("BUDGET", BUDGET as u64),
    ("EXACT", MAX_EXACT),
    ("FEW", FEW),
    ("HEAVIEST", HEAVIEST),
    ("LEVELS", LEVELS),
    ("LONGEST_WAIT_US", LONGEST_WAIT_US),
    ("MAX_TOTAL", MAX_TOTAL),
    // The header and the newest member are read too.
    ("MOST_EXPIRED", BUDGET as u64 - 2),
    ("NEVER", NEVER),
    ("PLACE_SIZE", PLACE_SIZE as u64),
    ("PLACE_US", PLACE_US),
    ("RETRY_US", RETRY_US),
    ("SLACK", SLACK),
    ("SOON_US", SOON_US),
    ("STEPS", STEPS),
];

/// The functions of a rule, as a field of a table.
fn functions(name: &str, rule: &str) -> String {
    let leases: &[&str] = if rule == "slots" { &["held_until", "renew"] } else { &[] };
    let names = ["read", "add", "wait", "give_back"].iter().chain(leases);
    let fields: Vec<_> = names
        .map(|function| format!("{function} = {rule}_{function}"))
        .collect();
    format!("{name} = {{ {} }}", fields.join(", "))
}

impl Scripts {
    /// The scripts with their texts changed, such as the tests do that set the time.
    pub(super) fn new(change: impl Fn(&str) -> String) -> Self {
        let script = |parts: &[&str]| {
            let mut text = parts.concat();
            for (name, value) in CONSTANTS {
                text = text.replace(name, &value.to_string());
            }
            Script::new(change(&text).leak())
        };
        let checks = RULES.map(|(name, rule, files)| {
            let lone = if name == "log" { lua!("lone_log") } else { "" };
            let needed = files.map(|file| file.split(FOR_DRIVER).next().unwrap_or(file));
            let choice = format!("\nlocal read, add, wait = {rule}_read, {rule}_add, {rule}_wait\n");
            script(&[PRELUDE, lone, &needed.concat(), &choice, lua!("checks")])
        });
        let drivers = RULES.map(|(name, rule, files)| {
            let choice = format!("\nlocal rules, ban = {{ {} }}, nil\n", functions(name, rule));
            script(&[PRELUDE, &files.concat(), &choice, lua!("driver")])
        });
        let rules = RULES.map(|(name, rule, _)| functions(name, rule)).join(", ");
        let all = format!("{}\nlocal rules = {{ {rules}, ban = ban }}\n", ALL_RULES.concat());
        Self {
            checks,
            drivers,
            driver: script(&[PRELUDE, &all, lua!("driver")]),
            driver_with_lines: script(&[PRELUDE, &all, lua!("line"), lua!("driver")]),
            trial: script(&[PRELUDE, lua!("trial")]),
            overrides: Script::new(lua!("overrides")),
        }
    }

    pub(super) fn get(&self, name: ScriptName) -> &Script {
        match name {
            ScriptName::Checks(rule) => &self.checks[rule],
            ScriptName::DriverOf(rule) => &self.drivers[rule],
            ScriptName::Driver => &self.driver,
            ScriptName::DriverWithLines => &self.driver_with_lines,
            ScriptName::Trial => &self.trial,
            ScriptName::Overrides => &self.overrides,
        }
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &Script> {
        let others = [&self.driver, &self.driver_with_lines, &self.trial, &self.overrides];
        self.checks.iter().chain(&self.drivers).chain(others)
    }
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
    fn new(source: &'static str) -> Self {
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
