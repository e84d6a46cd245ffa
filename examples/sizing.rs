//! The size of Redis for a limit: memory, processor, connections and network, by the figures of the pages about Redis and speed.
//!
//! ```console
//! $ cargo run --example sizing -- --checks-per-second 50000 --keys 1000000 --limit "sliding-log 100/min"
//! ```
//!
//! The keys are those that are active within a window, and `--processes`, 4 by default, those with a store. Each check is one of a
//! request with one policy. The figures are of Redis 7.0 on the machine of the page about speed: `cargo bench` measures others.

use std::{collections::HashMap, env, error::Error, fmt};

use tower_quota::Limit;

/// Figures of a check or a key. A test compares them with the pages, and those of the network with a Redis.
pub(crate) mod figures {
    /// Bytes of a key that has a fixed size.
    pub(crate) const FIXED_SIZE: f64 = 192.0;
    /// Admissions in a sliding log, and the bytes of its key.
    pub(crate) const LOG: [(f64, f64); 3] = [(1.0, 160.0), (10.0, 356.0), (100.0, 2_185.0)];
    /// The same of one with a precision, whose entries are parts of the window.
    pub(crate) const PRECISE_LOG: [(f64, f64); 2] = [(1.0, 224.0), (10.0, 464.0)];
    /// Entries up to which Redis stores a sorted set as a list, and the bytes of each entry of a larger one.
    pub(crate) const LARGEST_LIST: f64 = 128.0;
    pub(crate) const ENTRY: f64 = 130.0;
    /// Checks that a server decides in a second, and its share of that in a cluster.
    pub(crate) const CHECKS_OF_LOG: f64 = 209_000.0;
    pub(crate) const CHECKS_OF_BUCKET: f64 = 364_000.0;
    pub(crate) const IN_CLUSTER: f64 = 0.9;
    /// Bytes of a check alone in its call, and of one in a batch of 128: to Redis, and from it.
    pub(crate) const TO_REDIS: [f64; 2] = [190.0, 38.0];
    pub(crate) const FROM_REDIS: [f64; 2] = [50.0, 32.0];
}

/// The share of its capacity that a server is planned for.
const PLANNED: f64 = 0.7;

/// What a limit needs of Redis.
#[derive(Debug)]
pub(crate) struct Sizing {
    /// Admissions that a key holds.
    pub(crate) admissions: f64,
    /// Bytes of a key, with its name.
    pub(crate) key: f64,
    /// Bytes of all keys.
    pub(crate) memory: f64,
    /// The checks as a share of those that one server decides.
    pub(crate) load: f64,
    pub(crate) servers: f64,
    pub(crate) connections: f64,
    /// Bytes in a second: of checks alone in their calls, and of checks in batches.
    pub(crate) to_redis: [f64; 2],
    pub(crate) from_redis: [f64; 2],
}

impl Sizing {
    pub(crate) fn new(limit: &Limit, checks: f64, keys: f64, processes: f64) -> Result<Self, Box<dyn Error>> {
        let window = limit.window().ok_or_else(|| format!("`{limit}` has no window"))?;
        let window = window.as_secs_f64();
        // A key is there because of at least one.
        let admissions = (checks * window / keys).min(limit.quota() as f64).max(1.0);
        let (key, most) = match limit {
            Limit::SlidingLog(_) => {
                // As in `sliding-log 1000000/10s precision 1000`.
                let text = limit.to_string();
                let precision = text
                    .rsplit_once(" precision ")
                    .and_then(|(_, n)| n.split(' ').next()?.parse::<f64>().ok());
                let bytes = match precision {
                    Some(parts) => bytes_of_precise_log(admissions.min(parts)),
                    None => bytes_of_log(admissions),
                };
                (bytes, figures::CHECKS_OF_LOG)
            }
            _ => (figures::FIXED_SIZE, figures::CHECKS_OF_BUCKET),
        };
        let load = checks / most;
        let servers = match load / PLANNED {
            servers if servers <= 1.0 => 1.0,
            servers => (servers / figures::IN_CLUSTER).ceil(),
        };
        Ok(Self {
            admissions,
            key,
            memory: key * keys,
            load,
            servers,
            connections: processes * servers,
            to_redis: figures::TO_REDIS.map(|bytes| bytes * checks),
            from_redis: figures::FROM_REDIS.map(|bytes| bytes * checks),
        })
    }
}

/// Bytes of a key of a log, on the lines between the figures.
fn bytes_of_log(entries: f64) -> f64 {
    let [first, second, third] = figures::LOG;
    if entries > figures::LARGEST_LIST {
        return entries * figures::ENTRY;
    }
    let ((from, bytes), (to, more)) = if entries < second.0 {
        (first, second)
    } else {
        (second, third)
    };
    bytes + (entries - from) * (more - bytes) / (to - from)
}

/// The same with a precision.
fn bytes_of_precise_log(parts: f64) -> f64 {
    let [(from, bytes), (to, more)] = figures::PRECISE_LOG;
    bytes + (parts - from) * (more - bytes) / (to - from)
}

/// A number with three digits, and its unit.
fn bytes(bytes: f64) -> String {
    let (number, unit) = match bytes {
        bytes if bytes >= 1e9 => (bytes / 1e9, "GB"),
        bytes if bytes >= 1e6 => (bytes / 1e6, "MB"),
        bytes => (bytes / 1e3, "kB"),
    };
    let digits = if number < 10.0 { 2 } else { usize::from(number < 100.0) };
    format!("{number:.digits$} {unit}")
}

impl fmt::Display for Sizing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let range = |[alone, batch]: [f64; 2]| format!("{} to {}", bytes(batch), bytes(alone));
        let rows = [
            ("admissions that a key holds", format!("{:.0}", self.admissions.ceil())),
            ("a key, with its name", format!("{:.0} B", self.key)),
            ("all keys", bytes(self.memory)),
            ("memory of the host, twice that", bytes(2.0 * self.memory)),
            ("load of one server", format!("{:.0} %", 100.0 * self.load)),
            ("servers, for a load of at most 70 %", format!("{:.0}", self.servers)),
            (
                "connections, without those for waiting",
                format!("{:.0}", self.connections),
            ),
            ("to Redis in a second, in batches or alone", range(self.to_redis)),
            ("from Redis in a second", range(self.from_redis)),
        ];
        writeln!(f, "| {:<42} | {:>18} |", "Redis", "")?;
        writeln!(f, "| {:-<42} | {:->17}: |", "", "")?;
        rows.iter()
            .try_for_each(|(row, value)| writeln!(f, "| {row:<42} | {value:>18} |"))
    }
}

/// The table for these arguments.
pub(crate) fn sizing(arguments: impl IntoIterator<Item = String>) -> Result<Sizing, Box<dyn Error>> {
    let mut arguments = arguments.into_iter();
    let mut given = HashMap::from([("--processes".to_owned(), "4".to_owned())]);
    while let Some(name) = arguments.next() {
        let known = ["--checks-per-second", "--keys", "--limit", "--processes"].contains(&name.as_str());
        let value = arguments.next().filter(|_| known);
        given.insert(
            name.clone(),
            value.ok_or_else(|| format!("`{name}` is unknown, or has no value"))?,
        );
    }
    let text = |name: &str| given.get(name).ok_or_else(|| format!("`{name}` is missing"));
    let number = |name: &str| -> Result<f64, Box<dyn Error>> {
        let number: u64 = text(name)?.parse().map_err(|error| format!("`{name}`: {error}"))?;
        match number {
            0 => Err(format!("`{name}` is at least 1").into()),
            number => Ok(number as f64),
        }
    };
    let limit: Limit = text("--limit")?.parse()?;
    Sizing::new(
        &limit,
        number("--checks-per-second")?,
        number("--keys")?,
        number("--processes")?,
    )
}

fn main() -> Result<(), Box<dyn Error>> {
    print!("{}", sizing(env::args().skip(1))?);
    Ok(())
}
