use std::{path::Path, sync::Arc};

use super::{Policies, config::Config, follow::File};
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
        let parsed = match format_of(path)? {
            Format::Toml => Self::from_toml(text),
            Format::Json => Self::from_json(text),
        };
        parsed.map_err(|error| ConfigError::new(format!("`{}`: {error}", path.display())))
    }
}

/// Reads a file of limits.
pub(super) fn read(path: &Path) -> Result<String, ConfigError> {
    format_of(path)?;
    read_text(path)
        .map_err(|error| ConfigError::because(format!("`{}` cannot be read: {error}", path.display()), error))
}

enum Format {
    Toml,
    Json,
}

fn format_of(path: &Path) -> Result<Format, ConfigError> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => Ok(Format::Toml),
        Some("json") => Ok(Format::Json),
        _ => {
            let fault = "the name of a file of limits ends in `.toml` or `.json`";
            Err(ConfigError::new(format!("`{}`: {fault}", path.display())))
        }
    }
}
