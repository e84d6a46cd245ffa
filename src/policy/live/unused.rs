use super::LivePolicies;
use crate::policy::file::warn_of_unused;

/// Policies that limit nothing.
impl LivePolicies {
    /// The names of the policies of the last load that no layer or limiter was given, as [`Policies::unused`](crate::Policies::unused).
    ///
    /// ```
    /// use tower_quota::{LivePolicies, Policies};
    ///
    /// # #[cfg(feature = "file")] {
    /// let policies = LivePolicies::from(Policies::from_toml("policies.mails.limit = 'sliding-log 3/h'")?);
    /// assert_eq!(policies.unused(), ["mails"]);
    /// assert!(policies.unkeyed("mails").is_ok());
    /// assert!(policies.unused().is_empty());
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    #[must_use]
    pub fn unused(&self) -> Vec<String> {
        self.file.state().unused()
    }

    /// Logs the names of the [unused](Self::unused) policies as one warning, if there are any, as
    /// [`Policies::warn_of_unused`](crate::Policies::warn_of_unused).
    ///
    /// `reload_on_change` does so by itself after its first interval.
    ///
    /// ```
    /// use tower_quota::{LivePolicies, Policies};
    ///
    /// # #[cfg(feature = "file")] {
    /// let policies = LivePolicies::from(Policies::from_toml("policies.mails.limit = 'sliding-log 3/h'")?);
    /// assert_eq!(policies.unused(), ["mails"]);
    /// policies.warn_of_unused(); // of `mails`
    /// # }
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    pub fn warn_of_unused(&self) {
        warn_of_unused(&self.unused());
    }
}
