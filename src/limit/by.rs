use std::{fmt, sync::Arc};

use http::request::Parts;

use super::limit::Limit;

/// A limit that is chosen for each request, such as by the plan of a user.
///
/// The function gets the head of the request, with the extensions that authentication has inserted. It returns one algorithm,
/// or a [`Limit`].
///
/// ```
/// use bytes::Bytes;
/// use http::{Request, Response};
/// use http_body_util::Empty;
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_quota::{key, limit, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// /// What authentication inserts.
/// #[derive(Clone)]
/// struct User { id: u64, pro: bool }
///
/// # type Body = Empty<Bytes>;
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let api = Policy::new("api", limit::by(|parts| match parts.extensions.get::<User>() {
///     Some(user) if user.pro => SlidingLog::per_minute(100),
///     _ => SlidingLog::per_minute(10),
/// }))
/// .key(key::extension("user", |user: &User| user.id));
/// let service = RateLimitLayer::new(MemoryStore::new(), api).layer(service_fn(async |_: Request<Body>| {
///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
/// }));
///
/// // The second request is made after an upgrade. The first one still counts.
/// for (pro, policy, state) in [
///     (false, r#""api";q=10;w=60"#, r#""api";r=9;t=60"#),
///     (true, r#""api";q=100;w=60"#, r#""api";r=98;t=60"#),
/// ] {
///     let request = Request::get("/").extension(User { id: 42, pro }).body(Body::new())?;
///     let response = service.clone().oneshot(request).await?;
///     assert_eq!(response.headers()["ratelimit-policy"], policy);
///     assert_eq!(response.headers()["ratelimit"], state);
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Counts of several plans
///
/// Counts are stored under the name of the policy and of the algorithm, whatever the numbers:
///
/// * Limits of one algorithm and one window share the count of a key. A caller whose plan changes keeps what was counted,
///   and a plan decides about the requests of the others too.
/// * Limits of one algorithm and windows of different lengths share it as [after a change](crate::limit#when-a-limit-changes): a
///   request under a shorter window may remove what counts in a longer one. Choose one length where callers change plans at
///   will, such as by a header.
/// * Limits of different algorithms have separate counts.
///
/// # What applies to a request
///
/// The chosen limit is that of the [`Decision`](crate::Decision), of the response, of the count in this process while the store
/// fails, and of a [`Receipt`](crate::Receipt). With [`Limit::Unlimited`] the policy does not apply, and no key is extracted.
/// A limit that [`Policy::new`](crate::Policy::new) would not take refuses the request with `500 Internal Server Error`, and the
/// first one is logged. So does a limit of [`Concurrency`](crate::Concurrency) if the policy has
/// [`refund_if`](crate::Policy::refund_if), [`charge_if`](crate::Policy::charge_if) or
/// [`once_per`](crate::Policy::once_per), which have no meaning for slots.
///
/// A [`Limiter`](crate::Limiter) has no requests. Make one for each plan, with the same store and policy name: they share
/// their counts.
///
/// # Costs
///
/// The function runs on the path of the request. Its limits are rendered once and kept, up to some hundred of them; further ones
/// are rendered for each request. A request makes no other call of the store than with a fixed limit.
pub fn by<L: Into<Limit>>(choose: impl Fn(&Parts) -> L + Send + Sync + 'static) -> LimitSource {
    LimitSource(Source::Chosen(Arc::new(move |parts| choose(parts).into())))
}

/// The limit of a [`Policy`](crate::Policy): one for all requests, or one that [`by`] chooses for each.
///
/// ```
/// use tower_quota::{Limit, Policy, SlidingLog, limit};
///
/// let limit = SlidingLog::per_minute(10);
/// assert_eq!(Policy::new("api", limit).limit(), Some(&Limit::from(limit)));
/// assert_eq!(Policy::new("api", limit::by(move |_| limit)).limit(), None);
/// ```
#[derive(Clone)]
pub struct LimitSource(pub(crate) Source);

#[derive(Clone)]
pub(crate) enum Source {
    Fixed(Limit),
    Chosen(ChooseLimit),
}

/// Chooses the limit of a request.
pub(crate) type ChooseLimit = Arc<dyn Fn(&Parts) -> Limit + Send + Sync>;

impl<L: Into<Limit>> From<L> for LimitSource {
    fn from(limit: L) -> Self {
        Self(Source::Fixed(limit.into()))
    }
}

impl fmt::Debug for LimitSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Fixed(limit) => limit.fmt(f),
            Source::Chosen(_) => f.write_str("<fn>"),
        }
    }
}
