//! The responses to rejected requests as components of OpenAPI 3.1.

use serde_json::{Value, json};

use crate::{
    FailureMode, Headers,
    decide::{CheckContext, PolicyContext},
    http::Presentation,
};

/// The responses to requests that these policies reject.
pub(crate) fn components(limits: &[String], context: &CheckContext) -> Value {
    let fields = &Presentation::of(context).fields;
    let observed = text("What remains of limits that only observe.", "\"trial\";r=0;t=30;denied");
    let observed = fields.observed.then(|| json!({ "RateLimit-Observed": observed }));
    let description = match limits {
        [] => "A limit denies the request.".to_owned(),
        _ => format!("A limit denies the request: {}.", limits.join(", ")),
    };
    let mut responses = json!({
        "TooManyRequests": {
            "description": description,
            "headers": joined(&[json!({ "Retry-After": retry_after() }), fields_of(&fields.dialect), observed.into()]),
            "content": problem(429, json!({
                "violated-policies": { "type": "array", "items": { "type": "string" } },
                "detail": { "type": "string" },
            })),
        },
    });
    let closes = |policy: &PolicyContext| {
        policy.settings.failure_mode == Some(FailureMode::Closed) && !policy.settings.enforced.is_none()
    };
    if context.policies.iter().any(closes) {
        responses["ServiceUnavailable"] = json!({
            "description": "The requests cannot be counted.",
            "headers": { "Retry-After": retry_after() },
            "content": problem(503, json!({})),
        });
    }
    json!({ "responses": responses })
}

/// An object with the members of these.
fn joined(objects: &[Value]) -> Value {
    let members = objects.iter().filter_map(Value::as_object).flatten();
    members.map(|(name, member)| (name.clone(), member.clone())).collect()
}

fn retry_after() -> Value {
    let schema = json!({ "type": "integer", "minimum": 1 });
    json!({ "description": "The seconds to wait before the next attempt.", "schema": schema })
}

fn number(description: &str) -> Value {
    json!({ "description": description, "schema": { "type": "integer", "minimum": 0 } })
}

fn text(description: &str, example: &str) -> Value {
    json!({ "description": description, "schema": { "type": "string", "examples": [example] } })
}

fn problem(status: u16, more: Value) -> Value {
    let common = json!({
        "type": { "type": "string", "format": "uri-reference" },
        "title": { "type": "string" },
        "status": { "type": "integer", "enum": [status] },
    });
    let properties = joined(&[common, more]);
    let schema = json!({ "type": "object", "required": ["type", "title", "status"], "properties": properties });
    json!({ "application/problem+json": { "schema": schema } })
}

/// The rate limit fields of a denial.
fn fields_of(dialect: &Headers) -> Value {
    match dialect {
        Headers::Draft08 => json!({
            "RateLimit": text("What remains of each limit, and the seconds to wait.", "\"default\";r=0;t=30"),
            "RateLimit-Policy": text("The limits.", "\"default\";q=100;w=60"),
        }),
        Headers::Draft07 => json!({
            "RateLimit": text("What remains of the limit, and the seconds to wait.", "limit=100, remaining=0, reset=30"),
            "RateLimit-Policy": text("The limit.", "100;w=60"),
        }),
        Headers::Draft06 => json!({
            "RateLimit-Limit": number("The limit."),
            "RateLimit-Remaining": number("What remains of the limit."),
            "RateLimit-Reset": number("The seconds to wait."),
            "RateLimit-Policy": text("The limit.", "100;w=60"),
        }),
        Headers::LegacyDelta => legacy("The seconds to wait."),
        Headers::LegacyEpoch => legacy("When the limit admits again, in seconds since the Unix epoch."),
        Headers::Both(both) => joined(&both.0.each_ref().map(fields_of)),
        Headers::Custom(_) | Headers::None => json!({}),
    }
}

fn legacy(reset: &str) -> Value {
    json!({
        "X-RateLimit-Limit": number("The limit."),
        "X-RateLimit-Remaining": number("What remains of the limit."),
        "X-RateLimit-Reset": number(reset),
    })
}
