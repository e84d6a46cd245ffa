use std::{
    borrow::Cow,
    sync::{Arc, Mutex},
};

use http::request::Parts;

use super::{IntoPolicies, Policy};
use crate::{KeyExtractor, observe::NeverFound, sync::lock};

/// The plans of callers, such as `free` and `pro`: each has policies of its own, of which a request meets those of its plan.
///
/// A plan is everything that is set for its policies: limits, waits, slots, costs, bans, failure modes. A layer finds the plan of a
/// request by the function that [`by`](Self::by) takes; a [`Limiter`](crate::Limiter) is told by
/// [`LimiterRequest::plan`](crate::LimiterRequest::plan). The first plan is that of requests without one, and of those of a layer with
/// one that does not exist: let it be the strictest.
///
/// A layer or limiter has one `Plans`: another one in the same list, or in one of its plans, is an error.
///
/// ```
/// use std::time::Duration;
/// use bytes::Bytes;
/// use http::{Request, Response};
/// use http_body_util::Empty;
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_quota::{key, FailureMode, MemoryStore, Plans, Policy, RateLimitLayer, SlidingLog, TokenBucket};
///
/// /// What authentication inserts.
/// #[derive(Clone)]
/// struct User { id: u64, plan: &'static str }
///
/// # type Body = Empty<Bytes>;
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let user = || key::extension("user", |user: &User| user.id);
/// let plans = Plans::new("free", [Policy::new("requests", SlidingLog::per_minute(10)).key(user())])
///     .plan("pro", [
///         Policy::new("requests", SlidingLog::per_minute(100)).key(user()).wait_up_to(Duration::from_secs(2)),
///         Policy::new("exports", TokenBucket::per_minute(5)).key(user()).failure_mode(FailureMode::Closed),
///     ])
///     .by(|parts| parts.extensions.get::<User>().map(|user| user.plan));
/// let service = RateLimitLayer::new(MemoryStore::new(), plans).layer(service_fn(async |_: Request<Body>| {
///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
/// }));
///
/// // The second request is made after an upgrade. The first one still counts.
/// for (plan, state) in [
///     ("free", r#""requests";r=9;t=60"#),
///     ("pro", r#""requests";r=98;t=60, "exports";r=4;t=12"#),
///     ("unknown", r#""requests";r=7;t=60"#),
/// ] {
///     let request = Request::get("/").extension(User { id: 42, plan }).body(Body::new())?;
///     let response = service.clone().oneshot(request).await?;
///     assert_eq!(response.headers()["ratelimit"], state);
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Counts of several plans
///
/// Policies of one name in several plans share their counts as the limits of [`Policy::with_limit_fn`](crate::Policy::with_limit_fn) do: those
/// that differ in quota, burst or lease alone share the count of a key, so an upgrade keeps what was counted. Policies of
/// different names, algorithms, windows or rates of a bucket have separate counts. Those of one name have the same
/// [former](crate::Policy::formerly) one, if they have any.
///
/// A request is charged once where nested layers meet it with the same policy of the same plan. Where the plan becomes known between
/// them, each layer charges the limit of the plan that it finds, to one count if both limits share it: put such layers inside of
/// authentication.
#[derive(Clone)]
#[must_use]
pub struct Plans<K = Arc<dyn KeyExtractor>> {
    plans: Vec<(Arc<str>, Vec<Policy<K>>)>,
    in_each: Vec<Policy<K>>,
    choose: Option<ChoosePlan>,
}

/// The name of the plan of a request, if it has one.
pub(super) type ChoosePlan = Arc<dyn for<'a> Fn(&'a Parts) -> Option<Cow<'a, str>> + Send + Sync>;

impl<K> Plans<K> {
    /// The plan of requests that have no other one, with these policies.
    pub fn new(name: impl Into<Arc<str>>, policies: impl IntoPolicies<K>) -> Self {
        Self {
            plans: vec![(name.into(), policies.into_policies())],
            in_each: Vec::new(),
            choose: None,
        }
    }

    /// Another plan, of another name. An empty list of policies limits nothing.
    pub fn plan(mut self, name: impl Into<Arc<str>>, policies: impl IntoPolicies<K>) -> Self {
        self.plans.push((name.into(), policies.into_policies()));
        self
    }

    /// Policies that all requests meet, whatever their plan.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Plans, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = |n| Policy::new("mails", SlidingLog::per_day(n));
    /// let plans = Plans::new("free", mails(1)).plan("pro", mails(100));
    /// let mails = Limiter::new(MemoryStore::new(), plans.in_each(Policy::new("burst", SlidingLog::per_second(5))));
    ///
    /// assert_eq!(mails.request("42").plan("pro").check().await?.policies().count(), 2);
    /// assert!(!mails.check("42").await?.is_allowed(), "the free plan has had its mail");
    /// # Ok(())
    /// # }
    /// ```
    pub fn in_each(mut self, policies: impl IntoPolicies<K>) -> Self {
        self.in_each.extend(policies.into_policies());
        self
    }

    /// The function that a layer finds the name of the plan of a request by; `None` for the first plan.
    ///
    /// It runs once for each request. A name that does not exist means the first plan too, and the first 16 such names are logged. So
    /// is a function that returns `None` for each of the first 1,000 requests, for example because the layer runs before authentication. A layer with several plans needs this function, and is an error without it.
    pub fn by(self, choose: impl Fn(&Parts) -> Option<&str> + Send + Sync + 'static) -> Self {
        self.chosen_by(Arc::new(move |parts| choose(parts).map(Cow::Borrowed)))
    }

    pub(super) fn chosen_by(mut self, choose: ChoosePlan) -> Self {
        self.choose = Some(choose);
        self
    }
}

impl<K> IntoPolicies<K> for Plans<K> {
    /// The policies of each plan after each other, then those that all plans have.
    fn into_policies(self) -> Vec<Policy<K>> {
        let (names, of_plans): (Vec<_>, Vec<_>) = self.plans.into_iter().unzip();
        let choice = Arc::new(PlanChoice {
            names,
            choose: self.choose,
            unknown: Mutex::default(),
            never: NeverFound::default(),
        });
        let of_plans = of_plans
            .into_iter()
            .enumerate()
            .flat_map(|(position, policies)| policies.into_iter().map(move |policy| (Some(position), policy)));
        let of_all = self.in_each.into_iter().map(|policy| (None, policy));
        let with_choice = |(position, policy): (_, Policy<K>)| Policy {
            plan: Some(PlanOf {
                choice: choice.clone(),
                position,
                is_within_another: policy.plan.is_some(),
            }),
            ..policy
        };
        of_plans.chain(of_all).map(with_choice).collect()
    }
}

impl_debug!(Plans[K], plans => plans: plans.plans, in_each: plans.in_each);

/// Which plan of a layer or limiter a policy is of.
#[derive(Clone)]
pub(super) struct PlanOf {
    pub(super) choice: Arc<PlanChoice>,
    /// `None` if requests of all plans meet it.
    pub(super) position: Option<usize>,
    /// Whether the policy is one of a plan of other [`Plans`] too, by which no request is decided.
    is_within_another: bool,
}

impl PlanOf {
    /// Whether requests meet a policy of this plan and one of the other by different choices.
    pub(super) fn is_apart_from(&self, other: &Self) -> bool {
        self.is_within_another || other.is_within_another || !Arc::ptr_eq(&self.choice, &other.choice)
    }
}

/// How the plan of a request is found.
pub(crate) struct PlanChoice {
    pub(super) names: Vec<Arc<str>>,
    choose: Option<ChoosePlan>,
    /// The unknown names that were logged.
    unknown: Mutex<Vec<String>>,
    /// Whether no request had a plan yet.
    never: NeverFound,
}

/// How many unknown names are logged.
const MAX_LOGGED_NAMES: usize = 16;

/// How many characters of such a name are logged, which a request may have from its caller.
const MAX_LOGGED_LENGTH: usize = 64;

impl PlanChoice {
    /// The position of the plan of a request.
    pub(crate) fn of(&self, parts: &Parts) -> usize {
        let Some(choose) = &self.choose else { return 0 };
        let name = choose(parts);
        if self.names.len() > 1 && self.never.note(name.is_some()) {
            tracing::warn!(
                requests = NeverFound::LOGGED_AT,
                plans = self.list(),
                "no request yet had a plan, so the first one decides; put this layer inside of the one that inserts the plan"
            );
        }
        let Some(name) = name else { return 0 };
        self.position(&name).unwrap_or_else(|| {
            self.warn_of(&name);
            0
        })
    }

    #[cold]
    fn warn_of(&self, plan: &str) {
        let plan: String = plan.chars().take(MAX_LOGGED_LENGTH).collect();
        let is_new = {
            let mut unknown = lock(&self.unknown);
            let is_new = unknown.len() < MAX_LOGGED_NAMES && !unknown.contains(&plan);
            unknown.extend(is_new.then(|| plan.clone()));
            is_new
        };
        if is_new {
            tracing::warn!(
                plan,
                plans = self.list(),
                "a request has a plan that does not exist; the first plan decides it, and an empty table `[plans.<name>]` is one"
            );
        }
    }

    /// The names of the plans, for texts.
    pub(crate) fn list(&self) -> String {
        format!("`{}`", self.names.join("`, `"))
    }

    pub(crate) fn name(&self, position: usize) -> &str {
        self.names.get(position).map_or("", |name| name)
    }

    /// The name that two of the plans have, if there is one.
    pub(super) fn repeated(&self) -> Option<&str> {
        let mut names = self.names.iter().enumerate();
        names.find_map(|(nth, name)| self.names[..nth].contains(name).then_some(&**name))
    }

    /// Whether all requests of a layer would have the first of several plans.
    pub(crate) fn is_forgotten(&self) -> bool {
        self.choose.is_none() && self.names.len() > 1
    }

    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|known| **known == *name)
    }
}
