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
    /// One check of one charge of this rule, at this position in [`RULES`].
    Single(usize),
    /// Requests of this rule alone, without bans and lines.
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
        let single = (0..RULES.len()).map(Self::Single);
        let drivers = (0..RULES.len()).map(Self::DriverOf);
        single.chain(drivers).chain([Self::Driver, Self::DriverWithLines])
    }
}

/// The scripts of a store.
pub(super) struct Scripts {
    single: [Script; RULES.len()],
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

/// The name of each rule in a call, the table of its functions, and the files that it needs.
pub(super) const RULES: [(&str, &str, &[&str]); 6] = [
    ("log", "log", &[lua!("log")]),
    ("precise", "precise", &[lua!("log"), lua!("precise")]),
    ("counter", "counter", &[lua!("numbers"), lua!("counter")]),
    ("fixed", "window", &[lua!("numbers"), lua!("window")]),
    ("bucket", "bucket", &[lua!("numbers"), lua!("bucket")]),
    ("concurrency", "slots", &[lua!("slots")]),
];

const PRELUDE: &str = lua!("prelude");
const HELPERS: &str = lua!("helpers");
/// In the file of a rule, what follows is not needed for one check.
const FOR_DRIVER: &str = "-- What only the driver needs.\n";
/// All rules, each file once.
const ALL_RULES: [&str; 8] = [
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
const CONSTANTS: [(&str, u64); 16] = [
    ("ALL_READS", ALL_READS),
    ("BOUND", BOUND as u64),
    ("BUDGET", BUDGET as u64),
    ("EXACT", MAX_EXACT),
    ("FEW", FEW),
    ("HEAVIEST", HEAVIEST),
    ("LEVELS", LEVELS),
    ("LONGEST_WAIT_US", LONGEST_WAIT_US),
    ("MAX_TOTAL", MAX_TOTAL),
    ("NEVER", NEVER),
    ("PLACE_SIZE", PLACE_SIZE as u64),
    ("PLACE_US", PLACE_US),
    ("RETRY_US", RETRY_US),
    ("SLACK", SLACK),
    ("SOON_US", SOON_US),
    ("STEPS", STEPS),
];

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
        let single = RULES.map(|(name, table, files)| {
            let lone = if name == "log" { lua!("lone_log") } else { "" };
            let needed = files.iter().map(|file| file.split(FOR_DRIVER).next().unwrap_or(file));
            let needed: String = needed.collect();
            let choice = format!("\nlocal rule = {table}\n");
            script(&[PRELUDE, lone, HELPERS, &needed, &choice, lua!("single")])
        });
        let drivers = RULES.map(|(name, table, files)| {
            let choice = format!("\nlocal rules, ban = {{ {name} = {table} }}, nil\n");
            script(&[PRELUDE, HELPERS, &files.concat(), &choice, lua!("driver")])
        });
        let tables = RULES.map(|(name, table, _)| format!("{name} = {table}")).join(", ");
        let all = format!("{}\nlocal rules = {{ {tables}, ban = ban }}\n", ALL_RULES.concat());
        Self {
            single,
            drivers,
            driver: script(&[PRELUDE, HELPERS, &all, lua!("driver")]),
            driver_with_lines: script(&[PRELUDE, HELPERS, &all, lua!("line"), lua!("driver")]),
            trial: script(&[PRELUDE, lua!("trial")]),
            overrides: Script::new(lua!("overrides")),
        }
    }

    pub(super) fn get(&self, name: ScriptName) -> &Script {
        match name {
            ScriptName::Single(rule) => &self.single[rule],
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
        self.single.iter().chain(&self.drivers).chain(others)
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
