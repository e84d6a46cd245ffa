use std::time::Duration;

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// How often each figure is measured; the median counts.
    pub rounds: usize,
    /// How long each of these takes, after as long a warm-up.
    pub time: Duration,
    /// Only subjects whose name contains this, and those they are compared with.
    pub only: String,
    /// A second in all, to see that everything still runs.
    pub quick: bool,
    /// JSON in place of tables.
    pub json: bool,
}

const USAGE: &str = "\
options:
  --rounds <N>         how often each figure is measured, in turn; the medians are printed [5]
  --seconds <S>        how long each of these takes, after as long a warm-up [1]
  --only <SUBSTRING>   only subjects whose name contains this, and those they are compared with
  --quick              a second in all, to see that everything still runs
  --json               JSON in place of tables";

impl Options {
    /// Reads them, or ends the program with what went wrong.
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
        };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--rounds" => {
                    let rounds = value()?.parse().ok().filter(|rounds| *rounds > 0);
                    options.rounds = rounds.ok_or("--rounds is a number above 0")?;
                }
                "--seconds" => {
                    let time = value()?
                        .parse()
                        .ok()
                        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                    options.time = time
                        .filter(|time| !time.is_zero())
                        .ok_or("--seconds is a number above 0")?;
                }
                "--only" => options.only = value()?,
                "--quick" => (options.quick, options.rounds, options.time) = (true, 1, Duration::from_millis(5)),
                "--json" => options.json = true,
                "--bench" => {} // from cargo
                "--help" => {
                    println!("{USAGE}");
                    std::process::exit(0);
                }
                _ => return Err(format!("{argument} is no option")),
            }
        }
        Ok(options)
    }

    /// Whether to measure the subject of this name.
    pub fn wants(&self, name: &str) -> bool {
        name.contains(&self.only)
    }
}
