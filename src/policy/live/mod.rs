//! Policies that follow a file.

mod reload;
#[cfg(feature = "file")]
mod watch;

use std::{fmt, path::PathBuf, sync::Arc};
#[cfg(feature = "file")]
use std::{path::Path, time::Duration};

pub(super) use self::reload::Live;
#[cfg(feature = "admin")]
pub(crate) use self::reload::RefusedReload;
pub(crate) use self::reload::{File, Place};
#[cfg(feature = "file")]
use super::file::read;
use super::{Policy, Unkeyed, file::Policies};
use crate::ConfigError;

/// [`Policies`] that follow their file: a reload changes the limits of layers and limiters that are in use.
///
/// [`get`](Self::get) and [`unkeyed`](Self::unkeyed) return policies as those of `Policies` do. The layers, limiters and tonic
/// services that are made of them apply the new limits from the first request after [`reload`](Self::reload).
///
/// ```
/// # #[cfg(feature = "file")] {
/// use std::fs;
/// use tower_quota::{Limiter, MemoryStore, Policies};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let file = folder.path().join("limits.toml");
/// fs::write(&file, "policies.mails.limit = 'sliding-log 3/h'")?;
/// let policies = Policies::watch(&file)?;
/// let mails = Limiter::new(MemoryStore::new(), policies.unkeyed("mails")?);
/// assert_eq!(mails.check("42").await?.remaining(), 2);
///
/// fs::write(&file, "policies.mails.limit = 'sliding-log 10/h'")?;
/// policies.reload()?;
/// assert_eq!(mails.check("42").await?.remaining(), 8);
///
/// fs::write(&file, "policies.mails.limit = 'sliding-log 10'")?;
/// assert!(policies.reload().is_err());
/// assert_eq!(mails.check("42").await?.remaining(), 7);
/// # Ok(())
/// # }
/// # main().unwrap();
/// # }
/// ```
///
/// # What a reload changes
///
/// * The limit, cost, key and failure mode of each policy become those of the file. Settings in code, such as
///   [`cost_fn`](Policy::cost_fn), [`apply_if`](Policy::apply_if) or [`failure_mode`](Policy::failure_mode), and the key of a
///   policy without one in the file, stay and take precedence.
/// * The requests that the file [skips and blocks](Policies#skipped-and-blocked-requests) are skipped and blocked. Those of
///   [`RateLimitLayer::skip`](crate::RateLimitLayer::skip) and [`block`](crate::RateLimitLayer::block) stay.
/// * Counts are kept, and the new numbers apply to them. With another algorithm [counts start at
///   zero](crate::limit#when-a-limit-changes).
/// * A file that cannot be read or has a wrong line changes nothing.
/// * Nor does a file that contradicts the settings in code of a layer or limiter in use, such as a limit of
///   [`Concurrency`](crate::Concurrency) for a policy with [`refund_if`](Policy::refund_if). The error names the setting.
/// * A policy that the file has no more keeps its last numbers, with a warning. `enabled = false` at the top of the file turns
///   off that one, too.
/// * A request is decided by one load of the file, with all policies of the layer: never by parts of two.
///
/// # Cost
///
/// A request reads a pointer with `arc-swap`: some nanoseconds, without a lock. A reload builds what each layer and limiter
/// decides by, and then replaces all of it, so no request waits for it.
#[derive(Clone)]
#[must_use]
pub struct LivePolicies {
    pub(super) file: Arc<File>,
}

/// Constructors, with the feature `file`.
#[cfg(feature = "file")]
impl Policies {
    /// Policies from a file whose name ends in `.toml` or `.json`, which [follow the file](LivePolicies).
    ///
    /// The file is read once. It is read again by [`LivePolicies::reload`], and by
    /// [`reload_on_change`](LivePolicies::reload_on_change) whenever it has changed:
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tower_quota::{MemoryStore, Policies};
    ///
    /// # async fn run() -> Result<(), tower_quota::ConfigError> {
    /// let policies = Policies::watch("limits.toml")?;
    /// policies.reload_on_change(Duration::from_secs(1))?;
    /// let layer = policies.layer(MemoryStore::new(), ["search"])?;
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or does not describe policies; the message shows the place.
    pub fn watch(path: impl AsRef<Path>) -> Result<LivePolicies, ConfigError> {
        let path = path.as_ref();
        let text = read(path)?;
        let policies = Self::parse(path, &text)?;
        Ok(LivePolicies::new(policies, Some((path.to_owned(), text))))
    }
}

/// Policies of the application's own configuration, which [`LivePolicies::replace`] replaces.
///
/// ```
/// use tower_quota::{LivePolicies, Policies};
///
/// # #[cfg(feature = "file")] {
/// let policies = LivePolicies::from(Policies::from_toml("policies.mails.limit = 'sliding-log 3/h'")?);
/// assert_eq!(policies.names(), ["mails"]);
/// assert!(policies.unkeyed("mails").is_ok());
/// # }
/// # Ok::<(), tower_quota::ConfigError>(())
/// ```
impl From<Policies> for LivePolicies {
    fn from(policies: Policies) -> Self {
        Self::new(policies, None)
    }
}

/// Policies by name.
impl LivePolicies {
    /// Policies, with the path and the content of their file.
    fn new(policies: Policies, file: Option<(PathBuf, String)>) -> Self {
        Self {
            file: Arc::new(File::new(policies, file)),
        }
    }

    /// Registers the type of an extension of requests, as [`Policies::with_extension`] does, for this file and its reloads.
    ///
    /// ```
    /// use tower_quota::{LivePolicies, Policies};
    ///
    /// /// The user that authentication found.
    /// #[derive(Clone)]
    /// struct UserId(u64);
    ///
    /// # #[cfg(feature = "file")] {
    /// let describe = |limit| Policies::from_toml(&format!("policies.api = {{ limit = '{limit}', key = 'extension:user' }}"));
    /// let policies = LivePolicies::from(describe("sliding-log 3/h")?)
    ///     .with_extension("user", |user: &UserId| user.0);
    /// assert!(policies.get("api").is_ok());
    /// assert!(policies.replace(describe("sliding-log 10/h")?).is_ok());
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    pub fn with_extension<T, V>(self, name: impl Into<String>, value: impl Fn(&T) -> V + Send + Sync + 'static) -> Self
    where
        T: Send + Sync + 'static,
        V: fmt::Display,
    {
        self.file.state().policies.register(name.into(), value);
        self
    }

    /// The policy of this name, for a layer. Its limit, cost, key and failure mode follow the file.
    ///
    /// [`Policy::limit`] returns the limit at the time of this call.
    ///
    /// ```
    /// use tower_quota::{LivePolicies, Policies, SlidingLog};
    ///
    /// # #[cfg(feature = "file")] {
    /// let describe = |limit| Policies::from_toml(&format!("policies.search = {{ limit = '{limit}', key = 'ip' }}"));
    /// let policies = LivePolicies::from(describe("sliding-log 3/min")?);
    /// assert_eq!(policies.get("search")?.limit(), Some(&SlidingLog::per_minute(3).into()));
    ///
    /// policies.replace(describe("sliding-log 10/min")?)?;
    /// assert_eq!(policies.get("search")?.limit(), Some(&SlidingLog::per_minute(10).into()));
    /// assert!(policies.get("find").is_err());
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If there is no such policy, or it has no key.
    pub fn get(&self, name: &str) -> Result<Policy, ConfigError> {
        let mut state = self.file.state();
        let described = state.take_up(name, true)?;
        let policy = Policy::described(described, &state.policies, Some(&self.file));
        Ok(policy.with_file_key(state.policies.key(name)?))
    }

    /// The policy of this name without its key: for a limiter, or for a key that only code can extract. Its limit, cost and
    /// failure mode follow the file.
    ///
    /// ```
    /// use tower_quota::{LivePolicies, Policies, key};
    ///
    /// # #[cfg(feature = "file")] {
    /// let policies = LivePolicies::from(Policies::from_toml("policies.search.limit = 'sliding-log 3/min'")?);
    /// assert!(policies.get("search").is_err(), "it has no key");
    /// let search = policies.unkeyed("search")?.key(key::constant("all"));
    /// assert_eq!(search.name(), "search");
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If there is no such policy.
    pub fn unkeyed(&self, name: &str) -> Result<Policy<Unkeyed>, ConfigError> {
        let mut state = self.file.state();
        let described = state.take_up(name, false)?;
        Ok(Policy::described(described, &state.policies, Some(&self.file)))
    }

    /// The names of all policies of the last load, in alphabetical order.
    ///
    /// ```
    /// use tower_quota::{LivePolicies, Policies};
    ///
    /// # #[cfg(feature = "file")] {
    /// let policies = LivePolicies::from(Policies::from_toml("policies.mails.limit = 'sliding-log 3/h'")?);
    /// assert_eq!(policies.names(), ["mails"]);
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.file.state().policies.names().map(str::to_owned).collect()
    }
}

impl LivePolicies {
    /// Those of the last load.
    pub(super) fn policies(&self) -> Policies {
        self.file.state().policies.clone()
    }
}

/// Reloads.
impl LivePolicies {
    /// Replaces all policies, for an application that has them in its own configuration.
    ///
    /// ```
    /// use tower_quota::{Limiter, LivePolicies, MemoryStore, Policies};
    ///
    /// # #[cfg(feature = "file")] {
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policies = LivePolicies::from(Policies::from_toml("policies.mails.limit = 'sliding-log 3/h'")?);
    /// let mails = Limiter::new(MemoryStore::new(), policies.unkeyed("mails")?);
    ///
    /// policies.replace(Policies::from_toml("policies.mails.limit = 'sliding-log 10/h'")?)?;
    /// assert_eq!(mails.check("42").await?.limit(), 10);
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If a policy that [`get`](Self::get) has returned has no key anymore, or if a policy
    /// [contradicts](LivePolicies#what-a-reload-changes) a layer or limiter. Nothing is changed then.
    pub fn replace(&self, policies: Policies) -> Result<(), ConfigError> {
        self.file.replace(policies, None)
    }

    /// Reads the file again. See [above](LivePolicies#what-a-reload-changes) for what that changes.
    ///
    /// A handler of `SIGHUP` calls it. It reads the file on the calling thread.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or does not describe policies; the message shows the place. Or if
    /// [`replace`](Self::replace) would refuse the policies. Or if there is no file: the policies are from [`Policies`] then,
    /// and `replace` changes them. Nothing is changed by an error.
    #[cfg(feature = "file")]
    pub fn reload(&self) -> Result<(), ConfigError> {
        self.file.reload()
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
    /// regular file.
    ///
    /// The task ends when no policy, layer or limiter of these is left. If it ends before, since its runtime shuts down, a
    /// warning is logged, and it is the fault.
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
    /// let policies = Policies::watch(&file)?;
    /// let mails = policies.unkeyed("mails")?;
    ///
    /// let runtime = tokio::runtime::Runtime::new()?;
    /// let _in_runtime = runtime.enter();
    /// policies.reload_on_change(Duration::from_secs(1))?;
    /// assert_eq!(policies.fault(), None);
    /// # drop(_in_runtime);
    ///
    /// runtime.shutdown_timeout(Duration::from_secs(60));
    /// assert!(policies.fault().unwrap().contains("are not followed anymore"));
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    #[cfg(feature = "file")]
    pub fn reload_on_change(&self, interval: Duration) -> Result<(), ConfigError> {
        watch::follow(self.file.clone(), interval)
    }
}

/// The state.
impl LivePolicies {
    /// Why the newest content of the file is not applied, or changes of it are not followed anymore; none in order.
    ///
    /// It is the error of the last load, whether by [`reload`](Self::reload), [`replace`](Self::replace) or
    /// [`reload_on_change`](Self::reload_on_change), until another load succeeds. An [`Admin`](crate::Admin) has it as
    /// `refused_reload` (feature `admin`).
    ///
    /// ```
    /// use tower_quota::{LivePolicies, Policies};
    ///
    /// # #[cfg(feature = "file")] {
    /// let policies = LivePolicies::from(Policies::from_toml("policies.mails = { limit = 'sliding-log 3/h', key = 'ip' }")?);
    /// let _mails = policies.get("mails")?;
    /// assert_eq!(policies.fault(), None);
    ///
    /// assert!(policies.replace(Policies::from_toml("policies.mails.limit = 'sliding-log 3/h'")?).is_err());
    /// assert!(policies.fault().unwrap().contains("`mails`"));
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        self.file.refused_reload().map(|refused| refused.error)
    }
}

impl fmt::Debug for LivePolicies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LivePolicies")
            .field("policies", &self.file.state().policies)
            .finish_non_exhaustive()
    }
}
