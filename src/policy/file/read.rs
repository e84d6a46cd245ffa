//! Policies from text and from files, reloads, and the task that reloads a file when it has changed.

use std::{
    fs,
    path::Path,
    sync::{Arc, Weak},
    time::{Duration, SystemTime},
};

use tokio::{
    runtime::Handle,
    task::spawn_blocking,
    time::{self, Instant},
};

use super::{File, Policies, config::Config, follow::lock_loads};
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
    /// Call it once for each file, and clone the policies: those of another call have the same metrics, and overwrite them.
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
        // RFC 8259 §8.1 permits to ignore the byte order mark, which some editors write.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        serde_json::from_str(text).map_err(|error| ConfigError::new(error.to_string()))
    }

    /// Parses the content of a file.
    fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let parsed = parser_of(path)?(text);
        parsed.map_err(|error| in_file(path, error))
    }
}

fn in_file(path: &Path, error: ConfigError) -> ConfigError {
    error.within(format_args!("`{}`", path.display()))
}

/// Reads a file of limits.
fn read(path: &Path) -> Result<String, ConfigError> {
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
            Err(in_file(path, ConfigError::new(fault)))
        }
    }
}

/// The shortest time for which a content is the same before it is applied, at shorter intervals than this.
const QUIET: Duration = Duration::from_secs(1);

/// The time after which a reading is reported that does not end, such as one on a network that fails.
const PATIENCE: Duration = Duration::from_secs(10);

/// After so many readings in a row that differ, a file is taken never to be left alone.
const UNSETTLED: u32 = 10;

/// Reloads.
impl Policies {
    /// Reads the file again. See [above](Self#what-a-reload-changes) for what that changes.
    ///
    /// A handler of `SIGHUP` calls it. It reads the file on the calling thread.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or does not describe policies; the message shows the place. Or if
    /// [`replace`](Self::replace) would refuse the policies. Or if the policies are not from a file: `replace` changes them
    /// then. Nothing is changed by an error.
    pub fn reload(&self) -> Result<(), ConfigError> {
        loop {
            let loads = self.file.state().loads;
            let text = self.path().and_then(read);
            if let Some(outcome) = self.load(text, loads) {
                return outcome;
            }
        }
    }

    /// Reloads the file whenever its content has changed: a task of the current tokio runtime reads it at this interval.
    ///
    /// The content is compared rather than the time of the last change, which has a granularity of up to 2 seconds, and the
    /// path is opened anew each time. So a change is seen however it is made: an editor that writes a new file in place of the
    /// old one, or Kubernetes, which redirects a symbolic link to the folder of a `ConfigMap`. A file that cannot be applied is
    /// logged as a warning once, changes nothing, and is the [`fault`](Self::fault).
    ///
    /// A file is not applied while it is written. It is applied when content, length and time of the last change are the same
    /// in two readings in a row, and for at least 1 second: one to two intervals after the change, for intervals of 1 second and
    /// longer. A writer that pauses for longer writes another file, and renames it to this one.
    ///
    /// A path that is not a regular file, such as a FIFO, is not read, and is a fault too; it is followed again when it is a
    /// regular file. So are a reading that does not end within 10 s, and a file that
    /// has another content in 10 readings, and never the same in two in a row.
    ///
    /// The task ends when no policy, layer or limiter of these is left, or when another call has begun one. If it ends before, since
    /// its runtime shuts down or has no timers (`enable_time`), a warning is logged, and it is the fault.
    ///
    /// # Errors
    ///
    /// If there is no file, no tokio runtime, or the interval is zero.
    ///
    /// ```
    /// # #[cfg(feature = "file")] {
    /// use std::{fs, time::Duration};
    /// use tower_quota::Policies;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let file = folder.path().join("limits.toml");
    /// fs::write(&file, "policies.mails.limit = 'sliding-log 3/h'")?;
    /// let policies = Policies::from_file(&file)?;
    /// let mails = policies.unkeyed("mails")?;
    ///
    /// let runtime = tokio::runtime::Runtime::new()?;
    /// let _in_runtime = runtime.enter();
    /// policies.reload_on_change(Duration::from_secs(1))?;
    /// assert_eq!(policies.fault(), None);
    /// # drop(_in_runtime);
    ///
    /// runtime.shutdown_timeout(Duration::from_secs(60));
    /// assert!(policies.fault().unwrap().to_string().contains("are not followed anymore"));
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    pub fn reload_on_change(&self, interval: Duration) -> Result<(), ConfigError> {
        let path: Arc<Path> = self.path()?.into();
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

        let follower = self.file.note(|state| {
            state.unseen = None;
            state.follower += 1;
            state.follower
        });
        let watch = Watch {
            file: Arc::downgrade(&self.file),
            follower,
        };
        runtime.spawn(async move {
            let mut changes = Changes::default();
            let mut readings = 0_u32;
            while let Some(policies) = watch.policies() {
                // The first reading is at once, when the application may still build its layers.
                readings = readings.saturating_add(1);
                if readings == 2 {
                    policies.warn_of_unused();
                }
                let (began, mut loads) = (Instant::now(), policies.file.state().loads);
                let path = path.clone();
                let mut reading = spawn_blocking(move || read_stamped(&path));
                let reading = match time::timeout(PATIENCE, &mut reading).await {
                    Ok(reading) => reading,
                    Err(_) => {
                        let error = "a reading of the file does not end";
                        policies.log_refused(error);
                        let _ = policies.file.note_outcome::<&str>(Err(error));
                        loads += 1; // that of this note
                        reading.await
                    }
                };
                let reading = reading.unwrap_or_else(|error| (Err(error.to_string()), None));
                changes.see(&policies, (began, loads), reading);
                drop(policies);
                time::sleep(interval).await;
            }
        });
        Ok(())
    }
}

impl Policies {
    fn path(&self) -> Result<&Path, ConfigError> {
        self.file.path.as_deref().ok_or_else(|| {
            ConfigError::new(
                "these policies have no file; use `Policies::replace`, or `Policies::from_file` to read one",
            )
        })
    }

    /// Applies what was read of the file when there had been so many loads. Not if there was another one since, which may have
    /// read a newer content.
    fn load(&self, text: Result<String, ConfigError>, loads: u64) -> Option<Result<(), ConfigError>> {
        let parsed = text.and_then(|text| Ok((Config::parse(self.path()?, &text)?, text)));
        let _loads = lock_loads();
        if self.file.state().loads != loads {
            return None;
        }
        let applied = parsed.and_then(|(config, text)| {
            let path = self.path()?;
            let applied = self.file.replace(config, Some(text));
            applied.map_err(|error| in_file(path, error))
        });
        Some(self.file.note_outcome(applied))
    }
}

/// Reports when the task ends although the policies are used: if its runtime shuts down, or if it panics.
struct Watch {
    file: Weak<File>,
    follower: u64,
}

impl Watch {
    /// The policies, if anything uses them and no newer task follows the file.
    fn policies(&self) -> Option<Policies> {
        let file = self.file.upgrade()?;
        let is_last = file.state().follower == self.follower;
        is_last.then_some(Policies { file })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(policies) = self.policies() {
            let error = "changes of the file are not followed anymore: the task of `reload_on_change` has ended";
            let fault = (SystemTime::now(), error.to_owned());
            policies.file.note(|state| state.unseen = Some(fault));
            let file = policies.file.displayed();
            tracing::warn!(file, "changes of a file of limits are not followed anymore");
        }
    }
}

/// The content of a file, or the reason why it cannot be read.
type Content = Result<String, String>;

/// The content, and the time of the last change before it was read.
type Reading = (Content, Option<SystemTime>);

fn read_stamped(path: &Path) -> Reading {
    let changed_at = fs::metadata(path).and_then(|file| file.modified());
    (read(path).map_err(|error| error.to_string()), changed_at.ok())
}

/// What was seen in a file that is not applied.
#[derive(Default)]
struct Changes {
    /// The last reading, and when the first one of the same ended.
    last: Option<(Reading, Instant)>,
    /// How many readings have differed from the one before, and from what is in force, since two in a row were the same.
    differing: u32,
    /// The content that could not be applied, and how many loads there had been then.
    refused: Option<(Content, u64)>,
}

impl Changes {
    /// Compares a reading with the last one. It began at this time, when there had been so many loads.
    fn see(&mut self, policies: &Policies, (began, loads): (Instant, u64), reading: Reading) {
        let (content, _) = &reading;
        let same = self.last.take().filter(|(last, _)| *last == reading);
        if same.is_some() {
            self.differing = 0;
        }
        let is_in_force = policies.file.note(|state| {
            let is_in_force = content.is_ok() && state.text.as_ref() == content.as_ref().ok();
            if is_in_force && state.loads == loads {
                state.refused = None;
            }
            is_in_force
        });
        if is_in_force {
            self.refused = None;
            self.last = Some((reading, Instant::now()));
            return;
        }
        // Another load since then, or a reading that did not end, has replaced the fault.
        let is_refused = matches!(&self.refused, Some((refused, at)) if refused == content && *at == loads);
        self.differing += u32::from(same.is_none());
        if self.differing == UNSETTLED {
            let error = "the file changes from each reading to the next";
            policies.log_refused(error);
            let _ = policies.file.note_outcome::<&str>(Err(error));
        }
        let since = same.map_or_else(Instant::now, |(_, since)| since);
        if began.saturating_duration_since(since) >= QUIET && !is_refused {
            match policies.load(content.clone().map_err(ConfigError::new), loads) {
                None => return,
                Some(Ok(())) => {}
                Some(Err(error)) => {
                    policies.log_refused(&error.to_string());
                    self.refused = Some((content.clone(), policies.file.state().loads));
                }
            }
        }
        self.last = Some((reading, since));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_before_another_load_is_not_applied_after_it() {
        let text = |quota| Ok(format!("policies.api.limit = 'sliding-log {quota}/min'"));
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("limits.toml");
        fs::write(&path, "policies = {}").expect("a file");
        let policies = Policies::from_file(&path).expect("policies");
        let loads = policies.file.state().loads;
        assert!(matches!(policies.load(text(2), loads), Some(Ok(()))));
        assert!(policies.load(text(1), loads).is_none());
        let api = policies.unkeyed("api").expect("a policy");
        assert_eq!(
            api.limit().map(ToString::to_string).as_deref(),
            Some("sliding-log 2/min")
        );
    }

    #[test]
    fn a_reading_of_before_a_load_that_is_refused_leaves_its_fault() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("limits.toml");
        fs::write(&path, "policies.api.limit = 'sliding-log 1/h'").expect("a file");
        let policies = Policies::from_file(&path).expect("policies");
        let (loads, reading) = (policies.file.state().loads, read_stamped(&path));
        fs::write(&path, "policies.api.limit = 'sliding-log 1'").expect("a file");
        policies.reload().unwrap_err();
        Changes::default().see(&policies, (Instant::now(), loads), reading);
        assert!(policies.fault().is_some());
    }
}
