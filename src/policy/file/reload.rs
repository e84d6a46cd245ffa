//! Other policies while a service runs, and those that limit nothing.

#[cfg(feature = "file")]
use std::time::Duration;

use super::Policies;
#[cfg(feature = "file")]
use super::read;
use crate::ConfigError;

/// Policies that limit nothing.
impl Policies {
    /// The names of the policies of the last load that neither [`get`](Self::get), [`unkeyed`](Self::unkeyed) nor [`layer`](Self::layer) of this
    /// value or a clone of it has returned: they are configured, and limit nothing. Look at it when all layers are built.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policies};
    ///
    /// # #[cfg(feature = "file")] {
    /// let policies = Policies::from_toml(
    ///     "policies.mails.limit = 'sliding-log 3/h'
    ///      policies.logins.limit = 'sliding-log 5/min'",
    /// )?;
    /// let mails = Limiter::new(MemoryStore::new(), policies.unkeyed("mails")?);
    /// assert_eq!(policies.unused(), ["logins"]);
    /// # let _ = mails;
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    #[must_use]
    pub fn unused(&self) -> Vec<String> {
        self.file.state().unused()
    }

    /// Logs the names of the [unused](Self::unused) policies as one warning, if there are any.
    ///
    /// Call it when all layers are built, before the application serves requests. [`reload_on_change`](Self::reload_on_change) does so
    /// by itself after its first interval.
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// let policies: Policies = serde_json::from_str(r#"{"policies": {"mails": {"limit": "sliding-log 3/h"}}}"#)?;
    /// assert_eq!(policies.unused(), ["mails"]);
    /// policies.warn_of_unused(); // of `mails`
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn warn_of_unused(&self) {
        self.file.state().warn_of_unused();
    }
}

/// Reloads.
impl Policies {
    /// Replaces all policies, for an application that has them in its own configuration.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policies};
    ///
    /// # #[cfg(feature = "file")] {
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policies = Policies::from_toml("policies.mails.limit = 'sliding-log 3/h'")?;
    /// let mails = Limiter::new(MemoryStore::new(), policies.unkeyed("mails")?);
    ///
    /// policies.replace(&Policies::from_toml("policies.mails.limit = 'sliding-log 10/h'")?)?;
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
    /// [contradicts](Self#what-a-reload-changes) a layer or limiter. Nothing is changed then.
    pub fn replace(&self, policies: &Self) -> Result<(), ConfigError> {
        self.file.replace(policies.file.config(), None)
    }

    /// Reads the file again. See [above](Self#what-a-reload-changes) for what that changes.
    ///
    /// A handler of `SIGHUP` calls it. It reads the file on the calling thread.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or does not describe policies; the message shows the place. Or if
    /// [`replace`](Self::replace) would refuse the policies. Or if the policies are not from a file: `replace` changes them
    /// then. Nothing is changed by an error.
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
    /// assert!(policies.fault().unwrap().contains("are not followed anymore"));
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    #[cfg(feature = "file")]
    pub fn reload_on_change(&self, interval: Duration) -> Result<(), ConfigError> {
        read::follow(self.file.clone(), interval)
    }
}

/// The state.
impl Policies {
    /// Why the newest content of the file is not applied, or changes of it are not followed anymore; none in order.
    ///
    /// It is the error of the last load, whether by [`reload`](Self::reload), [`replace`](Self::replace) or
    /// [`reload_on_change`](Self::reload_on_change), until another load succeeds. An [`Admin`](crate::Admin) has it as
    /// `refused_reload` (feature `admin`).
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// # #[cfg(feature = "file")] {
    /// let policies = Policies::from_toml("policies.mails = { limit = 'sliding-log 3/h', key = 'ip' }")?;
    /// let _mails = policies.get("mails")?;
    /// assert_eq!(policies.fault(), None);
    ///
    /// assert!(policies.replace(&Policies::from_toml("policies.mails.limit = 'sliding-log 3/h'")?).is_err());
    /// assert!(policies.fault().unwrap().contains("`mails`"));
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        self.file.refused_reload().map(|(_, error)| error)
    }
}
