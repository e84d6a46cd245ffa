use serde_json::Value;

use crate::{RateLimitLayer, decision::response::openapi::components};

/// Documentation.
impl RateLimitLayer {
    /// The components of an OpenAPI 3.1 document for the responses to rejected requests: `TooManyRequests`, and
    /// `ServiceUnavailable` if a policy is [`Closed`](crate::FailureMode::Closed).
    ///
    /// Each has its header fields with their schemas, as the layer writes them, and the content of
    /// [`Problem`](crate::response::Problem); replace that if the layer has another format. The fields of
    /// [`Headers::custom`](crate::Headers::custom) are not known. The description names the limits, as of the call.
    ///
    /// ```
    /// use serde_json::json;
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// let search = Policy::new("search", SlidingLog::per_minute(5)).key(key::ip());
    /// let layer = RateLimitLayer::new(MemoryStore::new(), search);
    /// let document = json!({
    ///     "openapi": "3.1.0",
    ///     "info": { "title": "search", "version": "1" },
    ///     "components": layer.openapi(),
    ///     "paths": { "/search": { "get": { "responses": {
    ///         "429": { "$ref": "#/components/responses/TooManyRequests" },
    ///     } } } },
    /// });
    ///
    /// let denied = &document["components"]["responses"]["TooManyRequests"];
    /// assert_eq!(denied["description"], "A limit denies the request: `search` (sliding-log 5/min).");
    /// assert_eq!(denied["headers"]["Retry-After"]["schema"]["type"], "integer");
    /// assert_eq!(denied["headers"]["RateLimit"]["example"], "\"default\";r=0;t=30");
    /// ```
    #[must_use]
    pub fn openapi(&self) -> Value {
        let newest = self.enforcer.policies.newest();
        let limits = newest.policies.iter().map(|policy| {
            let limit = policy
                .limit()
                .map_or("chosen for each request".to_owned(), ToString::to_string);
            match policy.plan_name() {
                Some(plan) => format!("`{}` of the plan `{plan}` ({limit})", policy.name()),
                None => format!("`{}` ({limit})", policy.name()),
            }
        });
        components(&limits.collect::<Vec<_>>(), &newest.context)
    }
}
