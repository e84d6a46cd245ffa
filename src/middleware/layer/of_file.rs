use crate::{ConfigError, Policies, RateLimitLayer, store::Store};

/// Layers.
impl Policies {
    /// A layer that counts in this store for the policies of these names, which are decided together.
    ///
    /// It is [`RateLimitLayer::try_new`] with what [`get`](Self::get) returns for each name or, if the file has plans, with
    /// [`plans`](Self::plans) of these names.
    ///
    /// ```
    /// use axum::{Router, body::Body, routing::get};
    /// use http::{Request, StatusCode};
    /// use tower::ServiceExt;
    /// use tower_quota::{MemoryStore, Policies, key::PeerAddr};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # #[cfg(feature = "file")] {
    /// let policies = Policies::from_toml(r#"
    ///     [block]
    ///     networks = "198.51.100.0/24"
    ///
    ///     [policies]
    ///     api = { limit = "sliding-log 100/min", key = "ip" }
    ///     search = { limit = "sliding-log 5/s", key = "ip" }
    /// "#)?;
    /// let app: Router = Router::new()
    ///     .route("/search", get(async || "found"))
    ///     .layer(policies.layer(MemoryStore::new(), ["api", "search"])?);
    ///
    /// for (peer, status) in [("203.0.113.7:4711", StatusCode::OK), ("198.51.100.9:4711", StatusCode::FORBIDDEN)] {
    ///     let request = Request::get("/search").extension(PeerAddr(peer.parse()?)).body(Body::empty())?;
    ///     assert_eq!(app.clone().oneshot(request).await?.status(), status);
    /// }
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If there is no policy of a name, or it has no key, a name occurs twice, or there are no names.
    pub fn layer<N: AsRef<str>>(
        &self,
        store: impl Store,
        names: impl IntoIterator<Item = N>,
    ) -> Result<RateLimitLayer, ConfigError> {
        let names: Vec<N> = names.into_iter().collect();
        if names.is_empty() {
            return Err(ConfigError::new(
                "a layer of a file has at least one of its policies, by which it finds the file; name one",
            ));
        }
        if self.has_plans() {
            return RateLimitLayer::try_new(store, self.plans(names)?);
        }
        let policies: Result<Vec<_>, _> = names.iter().map(|name| self.get(name.as_ref())).collect();
        RateLimitLayer::try_new(store, policies?)
    }
}
