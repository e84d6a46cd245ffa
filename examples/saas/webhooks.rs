//! Calls to the servers of tenants, which say themselves how many they accept.

use std::{collections::HashMap, sync::Arc, time::Duration};

use axum::{
    BoxError,
    body::{Body, Bytes, HttpBody},
    http::{Request, Response, Uri},
};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError},
    time::sleep,
};
use tower::{Layer, Service, ServiceExt, timeout::Timeout};
use tower_quota::{Ban, Decision, Policy, RateLimit, RateLimitLayer, key};

/// A receiver that requires a longer pause is called again after this one, so that no event waits for days.
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// A receiver that has not responded by then is called again.
const TIMEOUT: Duration = Duration::from_secs(10);
const ATTEMPTS: u32 = 10;
/// The events of a tenant that are not delivered yet, which a receiver could otherwise let grow without a bound.
const MOST_EVENTS: usize = 100;

/// The URL of each tenant.
pub(crate) type Receivers = HashMap<u64, Uri>;

/// The tenant that an event is for, in the extensions of a request.
#[derive(Clone)]
struct Tenant(u64);

/// The limit of calls. Its key is the tenant and not the server, which other tenants may have too: none of them pauses the others.
pub(crate) fn policy(unkeyed: Policy<()>) -> Policy {
    unkeyed
        .key(key::extension("tenant", |tenant: &Tenant| tenant.0))
        .learn_from_responses()
        .ban(Ban::by_hand().longest(LONGEST_PAUSE))
}

struct Receiver {
    url: Uri,
    places: Arc<Semaphore>,
}

#[derive(Clone)]
pub(crate) struct Webhooks<C = Client<HttpConnector, Body>> {
    receivers: Arc<HashMap<u64, Receiver>>,
    client: RateLimit<Timeout<C>>,
}

impl<C, B> Webhooks<C>
where
    C: Service<Request<Body>, Response = Response<B>, Error: Into<BoxError>> + Clone,
    B: HttpBody<Data = Bytes>,
{
    pub(crate) fn new(limit: &RateLimitLayer, client: C, receivers: Receivers) -> Self {
        // Inside of the limit: the time in its line does not count.
        let client = Timeout::new(client, TIMEOUT);
        let receivers = receivers.into_iter().map(|(tenant, url)| {
            let places = Arc::new(Semaphore::new(MOST_EVENTS));
            (tenant, Receiver { url, places })
        });
        Self {
            receivers: Arc::new(receivers.collect()),
            client: limit.clone().response_extensions(true).layer(client),
        }
    }

    /// A place for an event, which is held until it is delivered. An error if all are taken.
    pub(crate) fn place(&self, tenant: u64) -> Result<Option<OwnedSemaphorePermit>, TryAcquireError> {
        let receiver = self.receivers.get(&tenant);
        receiver
            .map(|receiver| receiver.places.clone().try_acquire_owned())
            .transpose()
    }

    /// Sends an event until the receiver accepts it, at most ten times, and waits as long as the limit and, within bounds, the
    /// receiver require. A queue on a disk would keep it.
    pub(crate) async fn deliver(self, tenant: u64, event: String) {
        let Some(Receiver { url, .. }) = self.receivers.get(&tenant) else {
            return;
        };
        let mut attempts = 0;
        loop {
            let pause = {
                let request = Request::post(url)
                    .extension(Tenant(tenant))
                    .body(Body::from(event.clone()));
                let response = self.client.clone().oneshot(request.expect("a URL with a host")).await;
                let response = response.as_ref().ok();
                if response.is_some_and(|response| response.status().is_success()) {
                    return;
                }
                let decision = response.and_then(|response| response.extensions().get::<Decision>());
                let own_wait = decision.and_then(Decision::retry_after);
                let pause = own_wait.or(decision.and_then(Decision::requested_pause));
                let pause = pause.unwrap_or(Duration::from_secs(1 << attempts));
                // An event that has to wait for the limit was not refused.
                attempts += u32::from(own_wait.is_none());
                pause
            }; // the connection of the response is free again
            if attempts == ATTEMPTS {
                break;
            }
            sleep(pause.min(LONGEST_PAUSE)).await;
        }
        // Without the event: text of a customer could look like other lines.
        tracing::warn!(tenant, %url, "the receiver does not accept an event");
    }
}
