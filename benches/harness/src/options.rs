use std::time::Duration;

/// Options of the command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of measurements of each figure; the median counts.
    pub rounds: usize,
    /// Time of each measurement, after a warm-up of the same length.
    pub time: Duration,
    /// Part of the names of the subjects to measure. References are always measured.
    pub only: String,
    /// A run of about a second, to verify that all subjects work.
    pub quick: bool,
    /// JSON instead of tables.
    pub json: bool,
    /// Requests over HTTP, where the benchmark has them.
    pub http: bool,
    /// The connections of `wrk`, each of which sends its next request after the response to the last one.
    pub connections: u32,
}

const USAGE: &str = "\
options:
  --rounds <N>         number of measurements of each figure; the medians are printed [5]
  --seconds <S>        time of each measurement, after a warm-up of the same length [1]
  --only <SUBSTRING>   only subjects whose name contains this, and the references
  --quick              a run of about a second, to verify that all subjects work
  --json               JSON instead of tables
  --http               requests over HTTP, from wrk; only of benches/peers
  --connections <N>    of wrk [64]";

impl Options {
    /// Parses the command line; ends the program with an error if it is wrong.
    pub fn from_command_line() -> Self {
        match Self::parse(std::env::args().skip(1)) {
            Ok(options) => options,
            Err(error) => {
                eprintln!("{error}\n\n{USAGE}");
                std::process::exit(2);
            }
        }
    }

    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            rounds: 5,
            time: Duration::from_secs(1),
            only: String::new(),
            quick: false,
            json: false,
            http: false,
            connections: 64,
        };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--rounds" => {
                    let rounds = value()?.parse().ok().filter(|rounds| *rounds > 0);
                    options.rounds = rounds.ok_or("--rounds must be a number above 0")?;
                }
                "--seconds" => {
                    let time = value()?
                        .parse()
                        .ok()
                        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                    options.time = time
                        .filter(|time| !time.is_zero())
                        .ok_or("--seconds must be a number above 0")?;
                }
                "--only" => options.only = value()?,
                "--quick" => (options.quick, options.rounds, options.time) = (true, 1, Duration::from_millis(5)),
                "--json" => options.json = true,
                "--http" => options.http = true,
                "--connections" => {
                    let connections = value()?.parse().ok().filter(|connections| *connections > 0);
                    options.connections = connections.ok_or("--connections must be a number above 0")?;
                }
                "--bench" => {} // from cargo
                "--help" => {
                    println!("{USAGE}");
                    std::process::exit(0);
                }
                _ => return Err(format!("unknown option {argument}")),
            }
        }
        Ok(options)
    }

    /// Whether the subject of this name is measured.
    pub fn includes(&self, name: &str) -> bool {
        name.contains(&self.only)
    }
}
