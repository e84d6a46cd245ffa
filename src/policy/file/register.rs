use std::{fmt::Display, sync::Arc};

use super::{Policies, client_ip::ClientIp, of_policy};
use crate::{ConfigError, KeyExtractor, key::Registered};

/// Settings.
impl Policies {
    /// Registers the type of an extension of requests under a name that the file uses, with the text of its value.
    ///
    /// As a key, `extension:<name>` is [`key::extension`](crate::key::extension()) of this name. As the `plan` of a policy it
    /// selects one of its [plans](Policies#plans). Registering a name again replaces it.
    ///
    /// ```
    /// use tower_quota::Policies;
    ///
    /// /// The user that authentication found.
    /// #[derive(Clone)]
    /// struct UserId(u64);
    ///
    /// let policies: Policies = serde_json::from_str(
    ///     r#"{"policies": {"mails": {"limit": "sliding-log 3/h", "key": "extension:user"}}}"#,
    /// )?;
    /// let error = policies.get("mails").unwrap_err();
    /// assert!(error.to_string().contains(r#"`with_extension("user", "#));
    ///
    /// let policies = policies.with_extension("user", |user: &UserId| user.0);
    /// assert!(policies.get("mails").is_ok());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_extension<T, V>(
        mut self,
        name: impl Into<String>,
        value: impl Fn(&T) -> V + Send + Sync + 'static,
    ) -> Self
    where
        T: Send + Sync + 'static,
        V: Display,
    {
        self.register(name.into(), value);
        self
    }

    pub(in crate::policy) fn register<T, V>(&mut self, name: String, value: impl Fn(&T) -> V + Send + Sync + 'static)
    where
        T: Send + Sync + 'static,
        V: Display,
    {
        self.extensions.add(name, value);
    }
}

/// Keys.
impl Policies {
    /// The key of a policy.
    pub(in crate::policy) fn key(&self, name: &str) -> Result<Arc<dyn KeyExtractor>, ConfigError> {
        let Some(key) = &self.entry(name)?.fields.key else {
            return Err(ConfigError::new(format!(
                "the policy `{name}` has no key; add a `key` such as `\"ip\"` where it is configured, or one in code, to the \
                 policy that `unkeyed` returns"
            )));
        };
        let registered = Registered {
            client_ip: self.client_ip.as_ref().map(|ClientIp(client_ip)| client_ip),
            extension: &|name| self.extensions.key(name),
        };
        of_policy(name, key.extractor(&registered))
    }
}
