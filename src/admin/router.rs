//! The routes of the router.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{DefaultBodyLimit, Query, State, rejection::QueryRejection},
    http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    middleware,
    response::Response,
    routing::{get, post},
};
use serde::Serialize;

use super::{
    NamesOfUnused, page, report,
    report::{DeniedSubject, OverrideReport},
    request::{NewOverride, OwnOrigin, Posted, Selection, missing},
    response::{AdminError, json},
    subject,
    subject::{Counts, SubjectNames},
    watched::{Watched, WatchedPolicy},
};
use crate::{Key, Limit, decision::DenialWatch, store::StoreId};

/// What the routes share.
pub(super) struct Shared {
    pub(super) watched: Vec<Watched>,
    /// The names of unused policies of each file.
    pub(super) files: Vec<NamesOfUnused>,
    pub(super) instance: String,
    pub(super) names: SubjectNames,
    /// Denials are counted for as long as there is a router.
    pub(super) _denials: Vec<DenialWatch>,
}

/// The most bytes of a body. A key has at most some thousands.
const MOST: usize = 16 << 10;

pub(super) fn router(shared: Shared) -> Router {
    Router::new()
        .route("/", get(page::page))
        .route("/report", get(report))
        .route("/subject", get(subject).post(subject_of_body))
        .route("/reset", post(reset))
        .route("/override", post(set_override))
        .route("/end-override", post(end_override))
        .fallback(async |uri: Uri| {
            AdminError::new(
                StatusCode::NOT_FOUND,
                format!(
                    "there is no `{}`; the routes are `/`, `/report`, `/subject`, `/reset`, `/override` and `/end-override`",
                    uri.path()
                ),
            )
        })
        .method_not_allowed_fallback(async |method: Method| {
            AdminError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                format!(
                    "`{method}` is not a method of this route; use `POST` for `/reset`, `/override` and `/end-override`, and \
                     `GET` for the others"
                ),
            )
        })
        .layer(DefaultBodyLimit::max(MOST))
        .layer(middleware::map_response(protect))
        .with_state(Arc::new(shared))
}

/// Adds the fields by which a browser keeps the content to the page and out of caches.
async fn protect(mut response: Response) -> Response {
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, page::CONTENT_POLICY),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn report(_: OwnOrigin, State(shared): State<Arc<Shared>>) -> Response {
    json(&report::report(&shared).await)
}

/// The response to `/subject` and to all changes of a subject.
#[derive(Serialize)]
struct Subject {
    instance: String,
    policy: String,
    store: usize,
    key: String,
    /// The name in the lists of the report.
    subject: String,
    /// None if it is not listed.
    denied: Option<DeniedSubject>,
    /// None if it has no limit of its own.
    #[serde(rename = "override")]
    own_limit: Option<OverrideReport>,
    counts: Vec<Counts>,
}

async fn subject(
    _: OwnOrigin,
    State(shared): State<Arc<Shared>>,
    query: Result<Query<Selection>, QueryRejection>,
) -> Result<Response, AdminError> {
    let Query(selection) = query.map_err(|error| {
        AdminError::bad_request(format!(
            "{error}; one looks like `/subject?policy=api&key=ip%3D203.0.113.7`"
        ))
    })?;
    let selected = Selected::find(&shared, selection)?;
    Ok(json(&selected.peek(&shared).await?))
}

/// The same with the selection in the body, so that no log of requests has the key.
async fn subject_of_body(
    State(shared): State<Arc<Shared>>,
    Posted(selection): Posted<Selection>,
) -> Result<Response, AdminError> {
    let selected = Selected::find(&shared, selection)?;
    Ok(json(&selected.peek(&shared).await?))
}

async fn reset(
    State(shared): State<Arc<Shared>>,
    Posted(selection): Posted<Selection>,
) -> Result<Response, AdminError> {
    let selected = Selected::find(&shared, selection)?;
    // Before the reset, which may take effect although its reply is lost or the operator leaves.
    #[cfg(feature = "tracing")]
    tracing::info!(
        policy = selected.policy.name,
        subject = shared.names.hash(&selected.key),
        "an operator resets the counts of a subject"
    );
    subject::reset(
        &shared.watched,
        &selected.policy.name,
        selected.store_id(),
        &selected.key,
    )
    .await?;
    Ok(json(&selected.peek(&shared).await?))
}

async fn set_override(
    State(shared): State<Arc<Shared>>,
    Posted(new): Posted<NewOverride>,
) -> Result<Response, AdminError> {
    let (limit, lasts) = new.limit()?;
    let selected = Selected::find(&shared, new.selection)?;
    #[cfg(feature = "tracing")]
    tracing::info!(
        policy = selected.policy.name,
        subject = shared.names.hash(&selected.key),
        %limit,
        lasts_seconds = lasts.as_secs_f64(),
        "an operator overrides the limit of a subject"
    );
    selected.set_override(Some((limit, lasts))).await?;
    Ok(json(&selected.peek(&shared).await?))
}

async fn end_override(
    State(shared): State<Arc<Shared>>,
    Posted(selection): Posted<Selection>,
) -> Result<Response, AdminError> {
    let selected = Selected::find(&shared, selection)?;
    #[cfg(feature = "tracing")]
    tracing::info!(
        policy = selected.policy.name,
        subject = shared.names.hash(&selected.key),
        "an operator ends the override of a subject"
    );
    selected.set_override(None).await?;
    Ok(json(&selected.peek(&shared).await?))
}

/// A key of a policy in a store.
struct Selected {
    policy: WatchedPolicy,
    store: usize,
    key: Key,
    policies: Vec<WatchedPolicy>,
}

impl Selected {
    fn find(shared: &Shared, selection: Selection) -> Result<Self, AdminError> {
        let name = selection.policy.ok_or_else(|| missing("policy", "api"))?;
        let text = selection.key.ok_or_else(|| missing("key", "ip=203.0.113.7"))?;
        let mut key = Key::parse(text.trim())?;
        key.bound();

        let policies: Vec<_> = shared.watched.iter().flat_map(Watched::policies).collect();
        let numbered: Vec<_> = (1..).zip(report::stores(&policies)).collect();
        let has_policy = |store: Option<StoreId>| {
            let is_it = |policy: &&WatchedPolicy| policy.name == name && policy.store() == store;
            policies.iter().find(is_it)
        };
        let of_name = numbered
            .iter()
            .filter_map(|(number, store)| Some((*number, has_policy(*store)?)));
        let of_name: Vec<_> = of_name.collect();
        let found = match (&of_name[..], selection.store) {
            ([], _) => {
                let mut names: Vec<_> = policies.iter().map(|policy| policy.name.as_str()).collect();
                names.sort_unstable();
                names.dedup();
                return Err(AdminError::new(
                    StatusCode::NOT_FOUND,
                    format!("there is no policy of this name; those are `{}`", names.join("`, `")),
                ));
            }
            ([only], None) => Some(only),
            (several, Some(number)) => several.iter().find(|(other, _)| *other == number),
            (_, None) => None,
        };
        let Some((store, policy)) = found else {
            let numbers: Vec<_> = of_name.iter().map(|(number, _)| number.to_string()).collect();
            return Err(AdminError::bad_request(format!(
                "select the store of this policy by its number in the report, as in `store={}`",
                numbers.join("` or `store=")
            )));
        };
        let (store, policy) = (*store, (*policy).clone());
        Ok(Self {
            policy,
            store,
            key,
            policies,
        })
    }

    fn store_id(&self) -> Option<StoreId> {
        self.policy.store()
    }

    async fn set_override(&self, limit: Option<(Limit, Duration)>) -> Result<(), AdminError> {
        subject::set_override(&self.policies, &self.policy, &self.key, limit).await
    }

    async fn peek(&self, shared: &Shared) -> Result<Subject, AdminError> {
        let counts = subject::peek(&shared.watched, &self.policy.name, self.store_id(), &self.key).await?;
        let denials = report::denials(&self.policies, &self.policy);
        Ok(Subject {
            instance: shared.instance.clone(),
            policy: self.policy.name.clone(),
            store: self.store,
            key: self.key.to_string(),
            subject: shared.names.name(&self.key),
            own_limit: report::override_of(&shared.names, &self.policy, self.store, &self.key),
            denied: denials.and_then(|(_, summary)| report::denied_subject(&shared.names, &summary, &self.key)),
            counts,
        })
    }
}
