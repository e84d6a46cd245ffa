//! The responses to rejected requests as components of OpenAPI 3.1.

use serde_json::{Map, Value, json};

use crate::{
    FailureMode, Headers,
    decision::{CheckContext, PolicyContext},
};

/// The responses to requests that these policies reject.
pub(crate) fn components(limits: &[String], context: &CheckContext) -> Value {
    let mut headers = Map::new();
    headers.insert("Retry-After".into(), retry_after());
    for (name, header) in fields_of(&context.fields.dialect) {
        headers.insert(name.into(), header);
    }
    let mut responses = Map::new();
    responses.insert(
        "TooManyRequests".into(),
        json!({
            "description": format!("A limit denies the request: {}.", limits.join(", ")),
            "headers": headers,
            "content": problem(429, &json!({ "violated-policies": { "type": "array", "items": { "type": "string" } } })),
        }),
    );
    let closes = |policy: &PolicyContext| policy.settings.failure_mode == Some(FailureMode::Closed);
    if context.policies.iter().any(closes) {
        responses.insert(
            "ServiceUnavailable".into(),
            json!({
                "description": "The requests cannot be counted.",
                "headers": { "Retry-After": retry_after() },
                "content": problem(503, &json!({})),
            }),
        );
    }
    json!({ "responses": responses })
}

fn retry_after() -> Value {
    let schema = json!({ "type": "integer", "minimum": 1 });
    json!({ "description": "The seconds to wait before the next attempt.", "schema": schema })
}

fn number(description: &str) -> Value {
    json!({ "description": description, "schema": { "type": "integer", "minimum": 0 } })
}

fn text(description: &str, example: &str) -> Value {
    json!({ "description": description, "schema": { "type": "string" }, "example": example })
}

fn problem(status: u16, more: &Value) -> Value {
    let mut properties = json!({
        "type": { "type": "string", "format": "uri-reference" },
        "title": { "type": "string" },
        "status": { "type": "integer", "const": status },
    });
    if let (Value::Object(properties), Value::Object(more)) = (&mut properties, more) {
        properties.extend(more.clone());
    }
    let schema = json!({ "type": "object", "required": ["type", "title", "status"], "properties": properties });
    json!({ "application/problem+json": { "schema": schema } })
}

/// The rate limit fields of a denial.
fn fields_of(dialect: &Headers) -> Vec<(&'static str, Value)> {
    let dictionary = "limit=100, remaining=0, reset=30";
    match dialect {
        Headers::Draft08 => vec![
            (
                "RateLimit",
                text(
                    "What remains of each limit, and the seconds to wait.",
                    "\"default\";r=0;t=30",
                ),
            ),
            ("RateLimit-Policy", text("The limits.", "\"default\";q=100;w=60")),
        ],
        Headers::Draft07 => vec![
            (
                "RateLimit",
                text("What remains of the limit, and the seconds to wait.", dictionary),
            ),
            ("RateLimit-Policy", text("The limit.", "100;w=60")),
        ],
        Headers::Draft06 => vec![
            ("RateLimit-Limit", number("The limit.")),
            ("RateLimit-Remaining", number("What remains of the limit.")),
            ("RateLimit-Reset", number("The seconds to wait.")),
            ("RateLimit-Policy", text("The limit.", "100;w=60")),
        ],
        Headers::LegacyDelta => legacy("The seconds to wait.").into(),
        Headers::LegacyEpoch => legacy("When the limit admits again, in seconds since the Unix epoch.").into(),
        Headers::Both(both) => both.iter().flat_map(fields_of).collect(),
        Headers::Custom(_) | Headers::None => Vec::new(),
    }
}

fn legacy(reset: &str) -> [(&'static str, Value); 3] {
    [
        ("X-RateLimit-Limit", number("The limit.")),
        ("X-RateLimit-Remaining", number("What remains of the limit.")),
        ("X-RateLimit-Reset", number(reset)),
    ]
}
