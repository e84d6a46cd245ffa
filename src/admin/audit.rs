//! A line of the log for each change that is requested, with its actor and outcome.

use std::sync::{Arc, Mutex, PoisonError};

use axum::{
    extract::{Request, State},
    http::{StatusCode, header, request::Parts},
    middleware::Next,
    response::Response,
};
use base64::{Engine as _, prelude::BASE64_STANDARD};

use super::{response::ErrorText, router::AdminState, selected::Selected};

/// The operator of a request, as the authentication of the application has found it.
pub(super) type FindActor = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

/// The user of Basic authentication (RFC 7617 section 2).
pub(super) fn basic_user(parts: &Parts) -> Option<String> {
    let value = parts.headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, credentials) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let credentials = String::from_utf8(BASE64_STANDARD.decode(credentials.trim()).ok()?).ok()?;
    let (user, _) = credentials.split_once(':')?;
    Some(user.to_owned())
}

/// What a change is about, which its handler finds.
#[derive(Clone, Default)]
pub(super) struct Audited(Arc<Mutex<AuditedChange>>);

#[derive(Default)]
struct AuditedChange {
    policy: String,
    /// The hash of the key.
    subject: String,
    setting: String,
}

impl Audited {
    pub(super) fn is_of(&self, shared: &AdminState, selected: &Selected) {
        let mut change = self.change();
        change.policy.clone_from(&selected.policy.name);
        change.subject = shared.names.hash(&selected.key);
    }

    /// The limit of an override and its length, as text.
    pub(super) fn sets(&self, setting: String) {
        self.change().setting = setting;
    }

    fn change(&self) -> std::sync::MutexGuard<'_, AuditedChange> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Logs a change when its response is made, or is not awaited anymore.
pub(super) async fn audit(State(shared): State<Arc<AdminState>>, mut request: Request, next: Next) -> Response {
    let audited = Audited::default();
    request.extensions_mut().insert(audited.clone());
    let (parts, body) = request.into_parts();
    let mut line = AuditLine {
        action: match parts.uri.path() {
            "/reset" => "an operator resets the counts of a subject",
            "/override" => "an operator overrides the limit of a subject",
            _ => "an operator ends the override of a subject",
        },
        actor: (shared.actor)(&parts).unwrap_or_else(|| "not known".to_owned()),
        instance: shared.instance.clone(),
        audited,
        // The client has closed its connection before the response.
        outcome: "unknown",
        error: None,
    };
    let response = next.run(Request::from_parts(parts, body)).await;
    let error = response.extensions().get::<ErrorText>();
    let error = error.map_or_else(|| response.status().to_string(), |ErrorText(text)| text.to_string());
    (line.outcome, line.error) = match response.status() {
        status if status.is_success() => ("done", None),
        // The change may have taken effect.
        StatusCode::SERVICE_UNAVAILABLE => ("failed", Some(error)),
        // Nothing has changed.
        _ => ("refused", Some(error)),
    };
    response
}

struct AuditLine {
    action: &'static str,
    actor: String,
    instance: String,
    audited: Audited,
    outcome: &'static str,
    error: Option<String>,
}

impl Drop for AuditLine {
    fn drop(&mut self) {
        let (action, outcome) = (self.action, self.outcome);
        let change = self.audited.change();
        let (actor, instance) = (&*self.actor, &*self.instance);
        let error = self.error.as_deref();
        let (policy, subject) = (&*change.policy, &*change.subject);
        let setting = Some(&*change.setting).filter(|setting| !setting.is_empty());
        // The level of an event is a constant.
        if outcome == "done" {
            tracing::info!(target: "tower_quota::audit", actor, outcome, policy, subject, setting, instance, "{action}");
        } else {
            tracing::warn!(target: "tower_quota::audit", actor, outcome, error, policy, subject, setting, instance, "{action}");
        }
    }
}
