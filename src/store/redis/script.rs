//! The scripts, and what they need to know of each algorithm: its rule with the numbers that it reads, and the bounds of its replies.

use std::{collections::HashSet, sync::LazyLock, time::Duration};

use crate::{
    Limit,
    limit::{
        BOUND, BUDGET, FEW, HEAVIEST, LEVELS, LONGEST_WAIT_US, MAX_EXACT, MAX_QUOTA, MAX_TOTAL, MOST_AHEAD_US, NEVER,
        PLACE_SIZE, PLACE_US, RETRY_US, SLACK, SOON_US, STEPS,
    },
    store::LeaseId,
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
    Secret,
}

impl ScriptName {
    /// Those that decide checks.
    pub(super) fn of_checks() -> impl Iterator<Item = Self> {
        let checks = (0..RULES.len()).map(Self::Checks);
        let drivers = (0..RULES.len()).map(Self::DriverOf);
        checks.chain(drivers).chain([Self::Driver, Self::DriverWithLines])
    }
}

pub(super) struct Scripts {
    checks: [Script; RULES.len()],
    drivers: [Script; RULES.len()],
    driver: Script,
    driver_with_lines: Script,
    trial: Script,
    overrides: Script,
    secret: Script,
}

pub(super) static SCRIPTS: LazyLock<Scripts> = LazyLock::new(|| Scripts::new(str::to_owned));

macro_rules! lua {
    ($name:literal) => {
        include_str!(concat!("../../../lua/", $name, ".lua"))
    };
}

/// The name of each rule, and the files that it needs.
pub(super) const RULES: [(&str, [&str; 2]); 6] = [
    ("log", [lua!("log"), ""]),
    ("precise", [lua!("precise"), ""]),
    ("counter", [lua!("numbers"), lua!("counter")]),
    ("fixed", [lua!("numbers"), lua!("fixed")]),
    ("bucket", [lua!("numbers"), lua!("bucket")]),
    ("concurrency", [lua!("concurrency"), ""]),
];

const PRELUDE: &str = lua!("prelude");
/// In the file of a rule, what follows is not needed for checks.
const FOR_DRIVER: &str = "-- What only the driver needs.\n";

/// How many members of sorted sets a call may read for the waits of denied charges, beside the first of each.
const ALL_READS: u64 = 8 * BUDGET as u64;

/// The constants of the scripts, which a call would otherwise make anew.
const CONSTANTS: [(&str, u64); 20] = [
    ("ALL_READS", ALL_READS),
    ("BOUND", BOUND as u64),
    ("BUDGET", BUDGET as u64),
    // How many checks of a key there are, on average, for one that looks whether the key has lost its expiry.
    ("CHANCE", 16),
    ("EXACT", MAX_EXACT),
    ("FEW", FEW),
    ("HEAVIEST", HEAVIEST),
    ("LEVELS", LEVELS),
    ("LONGEST_WAIT_US", LONGEST_WAIT_US),
    ("MAX_TOTAL", MAX_TOTAL),
    ("MOST_AHEAD_US", MOST_AHEAD_US),
    // The header and the newest member are read too.
    ("MOST_EXPIRED", BUDGET as u64 - 2),
    ("NEVER", NEVER),
    ("PLACE_SIZE", PLACE_SIZE as u64),
    ("PLACE_US", PLACE_US),
    ("RETRY_US", RETRY_US),
    ("SLACK", SLACK),
    ("SOON_US", SOON_US),
    ("STEPS", STEPS),
    ("YEAR_US", 366 * 86_400 * 1_000_000),
];

/// The functions of a rule, as a field of a table.
fn functions(rule: &str) -> String {
    let others: &[&str] = match rule {
        "concurrency" => &["held_until", "renew"],
        "bucket" | "counter" | "fixed" => &["wait_behind"],
        _ => &[],
    };
    let names = ["read", "add", "wait", "give_back"].iter().chain(others);
    let fields: Vec<_> = names
        .map(|function| format!("{function} = {rule}_{function}"))
        .collect();
    format!("{rule} = {{ {}, is_set = {} }}", fields.join(", "), is_set(rule))
}

/// Whether the keys of a rule are sorted sets; the others are texts.
fn is_set(rule: &str) -> bool {
    matches!(rule, "log" | "concurrency")
}

impl Scripts {
    /// The scripts with their texts changed, such as the tests do that set the time.
    pub(super) fn new(change: impl Fn(&str) -> String) -> Self {
        let text_of = |parts: &[&str]| {
            // A shell that passes the text on, to load it, drops a newline at its end.
            let text = parts.concat().trim_end().to_owned();
            CONSTANTS
                .iter()
                .fold(text, |text, (name, value)| text.replace(name, &value.to_string()))
        };
        let script = |parts: &[&str]| Script::new(change(&text_of(parts)).leak());
        let checks = RULES.map(|(rule, files)| {
            let lone = if rule == "log" { lua!("lone_log") } else { "" };
            let needed = files.map(|file| file.split(FOR_DRIVER).next().unwrap_or(file));
            let choice = format!("\nlocal read, add, wait = {rule}_read, {rule}_add, {rule}_wait\n");
            let nothing = if is_set(rule) {
                "'ZADD', KEYS[1], 'XX', '0', ''"
            } else {
                "'SETRANGE', KEYS[1], '0', ''"
            };
            let decides = lua!("checks").replace("NOTHING", nothing);
            script(&[PRELUDE, lone, &needed.concat(), &choice, &decides])
        });
        let drivers = RULES.map(|(rule, files)| {
            let choice = format!("\nlocal rules, ban = {{ {} }}, nil\n", functions(rule));
            script(&[PRELUDE, &files.concat(), &choice, lua!("driver")])
        });
        let mut files = RULES.map(|(_, files)| files).concat();
        let mut seen = HashSet::new();
        files.retain(|file| seen.insert(*file));
        let rules = RULES.map(|(rule, _)| functions(rule)).join(", ");
        let all = format!(
            "{}{}\nlocal rules = {{ {rules}, ban = ban }}\n",
            files.concat(),
            lua!("ban")
        );
        Self {
            checks,
            drivers,
            driver: script(&[PRELUDE, &all, lua!("driver")]),
            driver_with_lines: script(&[PRELUDE, &all, lua!("line"), lua!("driver")]),
            trial: script(&[PRELUDE, lua!("trial")]),
            overrides: Script::new(text_of(&[PRELUDE, lua!("overrides")]).leak()),
            secret: Script::new(text_of(&[PRELUDE, lua!("secret")]).leak()),
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
            ScriptName::Secret => &self.secret,
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Script> {
        let others = [ScriptName::Trial, ScriptName::Secret, ScriptName::Overrides];
        ScriptName::of_checks().chain(others).map(|name| self.get(name))
    }
}

/// A command that runs a script, and its first argument.
pub(super) type EvalCommand = (&'static str, &'static str);

impl Script {
    fn new(source: &'static str) -> Self {
        Self {
            source,
            sha1: sha1_smol::Sha1::from(source).hexdigest(),
        }
    }

    /// By the digest, and by the text, which Redis then keeps in its script cache.
    pub(super) fn commands(&'static self) -> [EvalCommand; 2] {
        [("EVALSHA", &self.sha1), ("EVAL", self.source)]
    }
}

/// The rule of a limit, by its position in [`RULES`].
pub(super) fn rule_of(limit: &Limit) -> usize {
    match limit {
        Limit::SlidingLog(log) if log.grain_us() == 0 => 0,
        Limit::SlidingLog(_) => 1,
        Limit::SlidingCounter(_) => 2,
        Limit::FixedWindow(_) => 3,
        Limit::TokenBucket(_) | Limit::Unlimited | Limit::DenyAll => 4,
        Limit::Concurrency(_) => 5,
    }
}

/// The numbers of a limit besides its quota: x, y and z of its rule.
pub(super) fn parameters(limit: &Limit, lease: Option<LeaseId>) -> [u64; 3] {
    match limit {
        Limit::SlidingLog(log) => [log.window_us(), log.grain_us(), 0],
        Limit::SlidingCounter(counter) => [counter.window_us(), counter.tick(), counter.cap()],
        Limit::FixedWindow(fixed) => {
            let window = fixed.window().unwrap_or_default();
            [window.as_micros() as u64, u64::from(!fixed.is_aligned()), 0]
        }
        Limit::TokenBucket(bucket) => {
            let (rate, period) = bucket.reduced;
            [rate, period, bucket.cap]
        }
        Limit::Concurrency(slots) => {
            let [high, low] = lease.unwrap_or_else(LeaseId::random).parts();
            [slots.lease_us(), high, low]
        }
        Limit::Unlimited | Limit::DenyAll => [0; 3],
    }
}

/// The boundaries of the windows of a calendar around an approximate time of Redis in microseconds; `None` without a calendar.
pub(super) fn boundaries(limit: &Limit, now_us: u64) -> Option<[u64; 5]> {
    let Limit::FixedWindow(fixed) = limit else { return None };
    fixed.boundaries(now_us)
}

/// Whether the outcome of each of several equal checks can be computed from that of the last one.
pub(super) fn merges(limit: &Limit) -> bool {
    if let Limit::TokenBucket(bucket) = limit {
        // Only if each token takes a whole number of microseconds.
        return bucket.reduced.0 == 1;
    }
    // Each has a lease of its own.
    !limit.is_held()
}

/// How much later the quota of a key in use is fully restored because of one more charge of this weight.
pub(super) fn reset_delay(limit: &Limit, weight: u64) -> Duration {
    let Limit::TokenBucket(bucket) = limit else {
        return Duration::ZERO;
    };
    Duration::from_micros(bucket.time(weight))
}

/// How far ahead of the clock an entry of a clock that is gone may be: 31 years.
pub(super) const FAR_US: u64 = MAX_QUOTA;
/// A leap year, and a day for a time zone that changes sides of the date line.
const LONGEST_PERIOD: Duration = Duration::from_secs(367 * 86_400);

/// The longest wait of a denied charge, and the longest time until nothing counts, in microseconds.
pub(super) fn longest(limit: &Limit) -> [u64; 2] {
    match limit {
        // An entry counts for a window. One may be ahead: one of many of a clock that is gone, of which a call removes a part.
        Limit::SlidingLog(log) => [log.window_us() + FAR_US; 2],
        // The current window may be ahead by the slack. Its count is the previous one of the next window.
        Limit::SlidingCounter(counter) => [2 * counter.window_us() + SLACK; 2],
        // The window may be ahead by the slack.
        Limit::FixedWindow(fixed) => [fixed.window().unwrap_or(LONGEST_PERIOD).as_micros() as u64 + SLACK; 2],
        // A debt is at most the cap, and may have begun ahead by the slack.
        Limit::TokenBucket(bucket) => [bucket.time(bucket.cap) + SLACK; 2],
        Limit::Concurrency(_) => [RETRY_US, MOST_AHEAD_US],
        Limit::Unlimited | Limit::DenyAll => [0; 2],
    }
}
