//! Policies of a file that limit nothing.

use std::sync::PoisonError;

use super::Policies;
use crate::LivePolicies;

impl Policies {
    /// The names of the policies that neither [`get`](Self::get), [`unkeyed`](Self::unkeyed) nor [`layer`](Self::layer) of this
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
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let unused = self.places().filter(|place| !taken.contains(*place));
        unused.map(str::to_owned).collect()
    }

    /// Logs the names of the [unused](Self::unused) policies as one warning, if there are any.
    ///
    /// Call it when all layers are built, before the application serves requests: no later moment is known to the policies
    /// themselves.
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
        warn_of_unused(&self.unused());
    }
}

/// Logs these names, if there are any.
pub(in crate::policy) fn warn_of_unused(names: &[String]) {
    #[cfg(feature = "tracing")]
    if !names.is_empty() {
        tracing::warn!(
            policies = names.join(", "),
            "policies of a file of limits are not used: no layer or limiter has them"
        );
    }
    let _ = names;
}

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
