//! A line of the log for each change that is requested, with its actor and outcome.

use std::sync::{Arc, Mutex};

use axum::{
    extract::{Request, State},
    http::{StatusCode, header, request::Parts},
    middleware::Next,
    response::Response,
};
use base64::{Engine as _, prelude::BASE64_STANDARD};

use super::{message::ErrorText, router::AdminState, selected::Selected};
use crate::sync::lock;

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

/// The line of a change, which is logged when its response is made, or is not awaited anymore.
#[derive(Clone)]
pub(super) struct Audited(Arc<Mutex<AuditLine>>);

struct AuditLine {
    action: &'static str,
    actor: String,
    instance: String,
    policy: String,
    /// The hash of the key.
    subject: String,
    setting: Option<String>,
    outcome: &'static str,
    error: Option<String>,
}

/// What a change is about, which its handler finds.
impl Audited {
    pub(super) fn is_of(&self, shared: &AdminState, selected: &Selected) {
        let mut line = lock(&self.0);
        line.policy.clone_from(&selected.policy.name);
        line.subject = shared.names.hash(&selected.key);
    }

    /// The limit of an override and its length, as text.
    pub(super) fn sets(&self, setting: String) {
        lock(&self.0).setting = Some(setting);
    }
}

/// Logs each change.
pub(super) async fn audit(State(shared): State<Arc<AdminState>>, mut request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let audited = Audited(Arc::new(Mutex::new(AuditLine {
        action: match parts.uri.path() {
            "/reset" => "an operator resets the counts of a subject",
            "/override" => "an operator overrides the limit of a subject",
            _ => "an operator ends the override of a subject",
        },
        actor: (shared.actor)(&parts).unwrap_or_else(|| "not known".to_owned()),
        instance: shared.instance.clone(),
        policy: String::new(),
        subject: String::new(),
        setting: None,
        // The client has closed its connection before the response.
        outcome: "unknown",
        error: None,
    })));
    request = Request::from_parts(parts, body);
    request.extensions_mut().insert(audited.clone());
    let response = next.run(request).await;
    let error = response.extensions().get::<ErrorText>();
    let error = error.map_or_else(|| response.status().to_string(), |ErrorText(text)| text.to_string());
    let mut line = lock(&audited.0);
    (line.outcome, line.error) = match response.status() {
        status if status.is_success() => ("done", None),
        // The change may have taken effect.
        StatusCode::SERVICE_UNAVAILABLE => ("failed", Some(error)),
        // Nothing has changed.
        _ => ("refused", Some(error)),
    };
    drop(line);
    response
}

impl Drop for AuditLine {
    fn drop(&mut self) {
        let (action, outcome, error) = (self.action, self.outcome, self.error.as_deref());
        let (actor, instance) = (&*self.actor, &*self.instance);
        let (policy, subject, setting) = (&*self.policy, &*self.subject, self.setting.as_deref());
        // The level of an event is a constant.
        if outcome == "done" {
            tracing::info!(target: "tower_quota::audit", actor, outcome, policy, subject, setting, instance, "{action}");
        } else {
            tracing::warn!(target: "tower_quota::audit", actor, outcome, error, policy, subject, setting, instance, "{action}");
        }
    }
}
