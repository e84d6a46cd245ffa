//! The changes that operators make, and a line of the log for each that is requested, with its actor and outcome.

use std::sync::Arc;

use axum::{
    extract::{FromRequest, Request, State},
    http::{StatusCode, header, request::Parts},
    response::Response,
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::Value;

use super::{
    Admin,
    message::{AdminError, Input, json},
    selected::Selected,
    subject,
};

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
struct AuditLine {
    action: &'static str,
    actor: String,
    instance: String,
    policy: String,
    /// The hash of the key.
    subject: String,
    /// The limit of an override and its length.
    setting: Option<String>,
    outcome: &'static str,
    error: Option<String>,
}

/// `POST /reset`, `/override` and `/end-override`.
pub(super) async fn change(State(shared): State<Arc<Admin>>, request: Request) -> Result<Response, AdminError> {
    let (parts, body) = request.into_parts();
    let mut line = AuditLine {
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
    };
    let changed = perform(&shared, Request::from_parts(parts, body), &mut line).await;
    line.error = changed.as_ref().err().map(ToString::to_string);
    line.outcome = match &changed {
        Ok(_) => "done",
        // The change may have taken effect.
        Err(error) if error.status == StatusCode::SERVICE_UNAVAILABLE => "failed",
        // Nothing has changed.
        Err(_) => "refused",
    };
    changed.map(|subject| json(&subject))
}

async fn perform(shared: &Admin, request: Request, line: &mut AuditLine) -> Result<Value, AdminError> {
    let path = request.uri().path().to_owned();
    let input = Input::from_request(request, &()).await?;
    let new_limit = (path == "/override").then(|| input.new_limit());
    if let Some(Ok((limit, lasts))) = &new_limit {
        line.setting = Some(format!("{limit} for {} s", lasts.as_secs()));
    }
    let selected = Selected::find(shared, &input)?;
    selected.policy.name().clone_into(&mut line.policy);
    line.subject = shared.names.hash(&selected.key);
    match path.as_str() {
        "/reset" => subject::reset(&selected).await?,
        _ => subject::set_override(&selected, new_limit.transpose()?).await?,
    }
    selected.peek(shared).await
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
