//! The policies of a layer for code without requests, and the keys of a request for what follows it.

use std::collections::BTreeSet;

use http::request::Parts;

use super::{Limiter, LimiterRequest};
use crate::{Key, Limit, RateLimitLayer, decide::PolicyContext, key::KeyForm, store::StoreError};

/// The policies of a layer, counted where the layer counts them, so that one definition serves requests and code without them.
///
/// Settings that need an HTTP request are ignored: a [computed](crate::Policy::cost_fn) cost is 1 unless a
/// [`request`](Limiter::request) has another, nothing is [refunded](crate::Policy::refund_if) by itself, all policies
/// [apply](crate::Policy::apply_if), and only [fixed](crate::Policy::wait_up_to) waits are made, in the order of arrival.
/// [`request_of`](Limiter::request_of) has what it needs of an HTTP request: keys, plan and conditions. A policy whose limit is
/// [chosen](crate::Policy::with_limit_fn) for each request does not apply, except to [`reset`](Limiter::reset),
/// [`ban`](Limiter::ban) and [`override_limit`](Limiter::override_limit). These refuse a key that no request has, such as an
/// address where the keys are an address and a path, or a text, unless a policy has a key by an extractor of the application; a ban
/// looks at the policies with bans. A key that some of the policies have is accepted. The presentation of decisions and [`on_settled`](RateLimitLayer::on_settled) are those of the
/// layer, as all settings that it has then; its [`on_decision`](RateLimitLayer::on_decision) and
/// [`on_failure`](RateLimitLayer::on_failure) observe its own requests, and [those](Self::on_decision) of the limiter the others.
///
/// ```
/// use tower_quota::{key, Key, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_quota::store::StoreError> {
/// let api = Policy::new("api", SlidingLog::per_minute(10)).key(key::header("x-user-id")).cost_fn(|_| 5);
/// let layer = RateLimitLayer::new(MemoryStore::new(), api);
/// let messages = Limiter::from(&layer);
/// assert_eq!(messages.check(Key::header("x-user-id", "42")).await?.remaining(), 9);
/// # Ok(())
/// # }
/// ```
impl From<&RateLimitLayer> for Limiter {
    fn from(layer: &RateLimitLayer) -> Self {
        Self {
            policies: layer.policies().clone(),
            has_extractors: true,
            on_decision: None,
            on_failure: None,
        }
    }
}

/// What an HTTP request is, for what follows it.
impl Limiter {
    /// A request by the caller of an HTTP request, for the messages of a WebSocket or of a gRPC stream, which are counted one by one.
    ///
    /// The limiter is [made of a layer](#impl-From<%26RateLimitLayer>-for-Limiter): the request has the keys and the plan by which the
    /// layer decides about the HTTP request. A policy that does not [apply](crate::Policy::apply_if) to that, or for which it costs
    /// nothing, does not apply here either, unless it is given a [key](LimiterRequest::key_of), nor does one whose limit is
    /// [chosen](crate::Policy::with_limit_fn). Another [`plan`](LimiterRequest::plan) has the keys of policies
    /// of the same names. The cost is that of the message: 1, that of the policy, or a [`cost`](LimiterRequest::cost).
    ///
    /// A handler of tonic has no `Parts`: a `tower::util::MapRequestLayer` around the layer puts a clone of them into the extensions of
    /// the request, which a `tonic::Request` has too. Without their path, `routes`, [`apply_if`](crate::Policy::apply_if) and
    /// [`key::path`](crate::key::path) are those of another request.
    ///
    /// ```
    /// use http::{Request, request::Parts};
    /// use tokio::sync::mpsc;
    /// use tower_quota::{Limiter, MemoryStore, Policy, RateLimitLayer, TokenBucket, key, store::StoreError};
    ///
    /// /// The messages of one connection, until it has sent too many. A handler of axum takes `Parts` as an argument.
    /// async fn serve(messages: Limiter, head: Parts, mut socket: mpsc::Receiver<String>) -> Result<usize, StoreError> {
    ///     let caller = messages.request_of(&head)?;
    ///     let mut served = 0;
    ///     while let Some(text) = socket.recv().await {
    ///         // A unit for each 1,000 bytes.
    ///         let message = caller.clone().cost(1 + text.len() as u64 / 1_000);
    ///         if !message.check().await.is_ok_and(|decision| decision.is_allowed()) {
    ///             break;
    ///         }
    ///         served += 1;
    ///     }
    ///     Ok(served)
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let chat = Policy::new("chat", TokenBucket::per_minute(10)).key(key::header("x-user-id"));
    /// let layer = RateLimitLayer::new(MemoryStore::new(), chat);
    ///
    /// let (head, ()) = Request::get("/chat").header("x-user-id", "42").body(())?.into_parts();
    /// let (sender, socket) = mpsc::channel(9);
    /// for length in [10, 20, 5_000, 10, 10, 10] {
    ///     sender.send("a".repeat(length)).await?;
    /// }
    /// assert_eq!(serve(Limiter::from(&layer), head, socket).await?, 5);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Of the kind [`Invalid`](crate::store::ErrorKind::Invalid), with the response of the layer, if that refuses the HTTP request, since
    /// it has no key or is blocked; and if the limiter is not made of a layer: then its policies have no extractors. The parts are those that the layer gets: [nested](https://docs.rs/axum/0.8/axum/struct.Router.html#method.nest)
    /// routes of axum change the path.
    pub fn request_of(&self, parts: &Parts) -> Result<LimiterRequest<'_>, StoreError> {
        if !self.has_extractors {
            return Err(StoreError::invalid(
                "the limiter has no keys of requests; make it of a layer, as in `Limiter::from(&layer)`",
            ));
        }
        let basis = self.policies.newest();
        let context = basis.context.here();
        let is_skipped = match &basis.access {
            Some(access) if access.blocks(parts) => return Err(StoreError::of_refusal(None)),
            access => access.as_ref().is_some_and(|access| access.skips(parts)),
        };
        let plan = basis.plans.as_ref().map(|plans| (plans.of(parts), plans));
        let mut request = self.request(Key::from(""));
        // Those of other plans are off, since a name may have a plan only.
        for policy in &basis.policies {
            request.set_key(policy.name(), None);
        }
        for (policy, PolicyContext { settings, limit, .. }) in basis.policies.iter().zip(&*context.policies) {
            let applies = !is_skipped
                && policy.is_of_plan(plan.map_or(0, |(position, _)| position))
                && settings.apply_to(parts)
                && settings.cost_of(parts) > 0;
            if !applies {
                continue;
            }
            match policy.extractor().extract(parts) {
                Ok(key) => request.set_key(policy.name(), key),
                // The layer does not refuse such a request.
                Err(error) if settings.lets_pass(&error) || limit.limit == Limit::Unlimited => {}
                Err(error) => return Err(StoreError::of_refusal(Some(error))),
            }
        }
        request.plan = plan.map(|(position, plans)| plans.name(position).to_owned().into());
        Ok(request)
    }
}

impl Limiter {
    /// Refuses a key where it would change nothing, since requests of the layer have others.
    pub(super) fn refuse_useless_key(
        &self,
        key: &Key,
        changes: impl Fn(&PolicyContext) -> bool,
    ) -> Result<(), StoreError> {
        if !self.has_extractors {
            return Ok(());
        }
        let basis = self.policies.newest();
        let policies = basis.policies.iter().zip(&*basis.context.here().policies);
        let changed = policies.filter(|(_, context)| changes(context));
        let forms: Vec<_> = changed.map(|(policy, _)| policy.extractor().form()).collect();
        if forms.is_empty() || forms.iter().any(|form| form.has(key)) {
            return Ok(());
        }
        let forms: BTreeSet<_> = forms.iter().map(KeyForm::to_string).collect();
        let forms = forms.into_iter().collect::<Vec<_>>().join("`, `");
        Err(StoreError::invalid(format!(
            "no request of the layer has this key where it would change something, as its keys are `{forms}`; make one of the same \
             parts, such as `Key::ip(address)`, or `Ip::key_of` of an extractor with settings, and join them in this order by `.and(..)`"
        )))
    }
}

impl LimiterRequest<'_> {
    /// Sets the key for a policy, which does not apply without one.
    fn set_key(&mut self, policy: &str, key: Option<Key>) {
        let of = self.of(policy.to_owned().into());
        (of.is_off, of.key) = (key.is_none(), key);
    }
}
