//! Policies from text and from files, and the task that reloads a file.

use std::{
    fs, io,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{
    runtime::Handle,
    task::spawn_blocking,
    time::{self, Instant, MissedTickBehavior},
};

use super::{File, Policies, config::Config};
use crate::{ConfigError, file::read_text};

/// Constructors.
impl Policies {
    /// Policies from TOML.
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// let policies = Policies::from_toml("policies.login = { limit = 'sliding-log 5/min', key = 'ip' }")?;
    /// assert!(policies.get("login").is_ok());
    ///
    /// let error = Policies::from_toml("policies.login = { limit = 'sliding-log 5' }").unwrap_err();
    /// assert!(error.to_string().contains("line 1") && error.to_string().contains("`sliding-log 100/min`"));
    /// // What a `main` prints that returns the error.
    /// assert_eq!(format!("{error:?}"), error.to_string());
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the text does not describe policies; the message shows the place.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        Config::from_toml(text).map(Self::from)
    }

    /// Policies from JSON.
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// let policies = Policies::from_json(r#"{"policies": {"login": {"limit": "sliding-log 5/min", "key": "ip"}}}"#)?;
    /// assert!(policies.get("login").is_ok());
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the text does not describe policies; the message shows the place.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        Config::from_json(text).map(Self::from)
    }

    /// Policies from a file whose name ends in `.toml` or `.json`.
    ///
    /// The file is read once. It is read again by [`reload`](Self::reload), and by [`reload_on_change`](Self::reload_on_change)
    /// whenever it has changed:
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tower_quota::{MemoryStore, Policies};
    ///
    /// # async fn run() -> Result<(), tower_quota::ConfigError> {
    /// let policies = Policies::from_file("limits.toml")?;
    /// policies.reload_on_change(Duration::from_secs(1))?;
    /// let layer = policies.layer(MemoryStore::new(), ["search"])?;
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// let error = Policies::from_file("limits.yaml").unwrap_err();
    /// assert_eq!(error.to_string(), "`limits.yaml`: the name of a file of limits ends in `.toml` or `.json`");
    /// ```
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is not a regular file of at most 1 MiB, or does not describe policies; the message shows the
    /// place.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let text = read(path)?;
        let config = Config::parse(path, &text)?;
        let file = File::new(config, Some((path.to_owned(), text)));
        Ok(Self { file: Arc::new(file) })
    }
}

impl Config {
    fn from_toml(text: &str) -> Result<Self, ConfigError> {
        toml::from_str(text).map_err(|error| ConfigError::new(error.to_string().trim_end().to_owned()))
    }

    fn from_json(text: &str) -> Result<Self, ConfigError> {
        serde_json::from_str(text).map_err(|error| ConfigError::new(error.to_string()))
    }

    /// Parses the content of a file.
    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let parsed = parser_of(path)?(text);
        parsed.map_err(|error| ConfigError::new(format!("`{}`: {error}", path.display())))
    }
}

/// Reads a file of limits.
pub(super) fn read(path: &Path) -> Result<String, ConfigError> {
    parser_of(path)?;
    read_text(path)
        .map_err(|error| ConfigError::because(format!("`{}` cannot be read: {error}", path.display()), error))
}

type Parser = fn(&str) -> Result<Config, ConfigError>;

fn parser_of(path: &Path) -> Result<Parser, ConfigError> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => Ok(Config::from_toml),
        Some("json") => Ok(Config::from_json),
        _ => {
            let fault = "the name of a file of limits ends in `.toml` or `.json`";
            Err(ConfigError::new(format!("`{}`: {fault}", path.display())))
        }
    }
}

/// The shortest time for which a content is the same before it is applied, at shorter intervals than this.
const QUIET: Duration = Duration::from_secs(1);

/// The time after which a reading is reported that does not end, such as one on a network that fails.
const PATIENCE: Duration = Duration::from_secs(10);

/// The content of a file, or the reason why it cannot be read.
type Content = Result<String, String>;

/// Reloads a file whenever its content has changed, in a task.
pub(super) fn follow(file: Arc<File>, interval: Duration) -> Result<(), ConfigError> {
    let path: Arc<Path> = file.path()?.into();
    if interval.is_zero() {
        return Err(ConfigError::new(
            "an interval is above zero, such as `Duration::from_secs(5)`",
        ));
    }
    let runtime = Handle::try_current().map_err(|error| {
        ConfigError::because(
            "`reload_on_change` spawns a task, so it is called in a tokio runtime",
            error,
        )
    })?;

    file.note_watch(None);
    let watch = Watch(file);
    runtime.spawn(async move {
        let mut ticks = time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut changes = Changes::default();
        let mut ticked = 0_u32;
        while watch.0.is_used() {
            let at = ticks.tick().await;
            // The first tick is at once, when the application may still build its layers.
            ticked = ticked.saturating_add(1);
            if ticked == 2 {
                watch.0.state().warn_of_unused();
            }
            let path = path.clone();
            let mut reading = spawn_blocking(move || Reading::of(&path));
            let reading = match time::timeout(PATIENCE, &mut reading).await {
                Ok(reading) => reading,
                Err(_) => {
                    let error = "a reading of the file does not end";
                    changes.refuse(&watch.0, Err(error.to_owned()), error.to_owned());
                    reading.await
                }
            };
            changes.see(
                &watch.0,
                at,
                reading.unwrap_or_else(|error| Reading::failed(error.to_string())),
            );
        }
    });
    Ok(())
}

/// Reports when the task ends although the policies are used: if its runtime shuts down, or if it panics.
struct Watch(Arc<File>);

impl Drop for Watch {
    fn drop(&mut self) {
        if self.0.is_used() {
            let error = "changes of the file are not followed anymore: the task of `reload_on_change` has ended";
            self.0.note_watch(Some(error.to_owned()));
            tracing::warn!("changes of a file of limits are not followed anymore");
        }
    }
}

/// What one reading of a file has found.
#[derive(PartialEq)]
struct Reading {
    content: Content,
    /// Its length and the time of its last change, unless they have changed while it was read.
    stamp: Option<(u64, Option<SystemTime>)>,
}

impl Reading {
    fn of(path: &Path) -> Self {
        let stamp = || -> io::Result<_> {
            let file = fs::metadata(path)?;
            Ok((file.len(), file.modified().ok()))
        };
        let before = stamp();
        let content = read(path).map_err(|error| error.to_string());
        let is_same = |(before, after)| (before == after).then_some(after);
        Self {
            content,
            stamp: before.ok().zip(stamp().ok()).and_then(is_same),
        }
    }

    fn failed(error: String) -> Self {
        Self {
            content: Err(error),
            stamp: None,
        }
    }

    /// Whether the file may be complete, rather than be written while it was read.
    fn is_stable(&self) -> bool {
        self.stamp.is_some() || self.content.is_err()
    }
}

/// What was seen in a file that is not applied.
#[derive(Default)]
struct Changes {
    /// The last reading, and when the first one of the same was made.
    last: Option<(Reading, Instant)>,
    /// The content that could not be applied.
    refused: Option<Content>,
}

impl Changes {
    fn see(&mut self, file: &File, at: Instant, reading: Reading) {
        if reading.content.as_ref().is_ok_and(|text| file.has_loaded(text)) {
            if self.refused.is_some() {
                let _ = file.note_outcome::<String>(Ok(()));
            }
            *self = Self::default();
            return;
        }
        let since = self
            .last
            .take()
            .filter(|(last, _)| *last == reading)
            .map(|(_, since)| since);
        let is_complete = reading.is_stable() && since.is_some_and(|since| at - since >= QUIET);
        if is_complete && self.refused.as_ref() != Some(&reading.content) {
            let loaded = reading
                .content
                .clone()
                .and_then(|text| file.load(text).map_err(|error| error.to_string()));
            if let Err(error) = loaded {
                self.refuse(file, reading.content.clone(), error);
            }
        }
        self.last = Some((reading, since.unwrap_or(at)));
    }

    fn refuse(&mut self, file: &File, content: Content, error: String) {
        tracing::warn!(error, "a changed file of limits is not applied");
        let _ = file.note_outcome(Err(error));
        self.refused = Some(content);
    }
}
