//! Calls to the servers of tenants, which say themselves how many they accept.

use std::time::Duration;

use axum::{
    body::Body,
    http::{Request, Uri},
};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::time::sleep;
use tower::{Layer, ServiceExt};
use tower_quota::{
    ConfigError, Decision, Headers, Key, Policy, RateLimit, RateLimitLayer, Unkeyed,
    key::{self, KeyError},
    store::Store,
};

#[derive(Clone)]
pub(crate) struct Webhooks {
    pub(crate) limit: RateLimitLayer,
    client: RateLimit<Client<HttpConnector, Body>>,
}

impl Webhooks {
    pub(crate) fn new(store: impl Store, policy: Policy<Unkeyed>) -> Result<Self, ConfigError> {
        let receiver = key::from_fn(|parts| {
            let receiver = parts.uri.authority().map(|authority| Key::from(authority.as_str()));
            receiver.ok_or_else(|| KeyError::absent("the URL of a webhook has no host"))
        });
        let limit = RateLimitLayer::try_new(store, policy.key(receiver).learn_from_responses())?;
        let limit = limit.headers(Headers::None);
        let client = limit.layer(Client::builder(TokioExecutor::new()).build_http());
        Ok(Self { limit, client })
    }

    /// Sends an event until the receiver accepts it, and waits as long as the receiver requires. A queue on a disk would keep it.
    pub(crate) async fn deliver(self, receiver: Uri, event: String) {
        for attempt in 0..10 {
            let request = Request::post(&receiver).body(Body::from(event.clone()));
            let response = self.client.clone().oneshot(request.expect("a URL with a host")).await;
            let mut pause = Duration::from_secs(1 << attempt);
            if let Ok(response) = response {
                if response.status().is_success() {
                    return;
                }
                // Denied before it was sent, or by the receiver.
                let decision = response.extensions().get::<Decision>();
                let wait = decision.and_then(|decision| decision.retry_after().or(decision.requested_pause()));
                pause = wait.unwrap_or(pause);
            }
            sleep(pause).await;
        }
        eprintln!("{receiver} does not accept {event}");
    }
}
