//! The fields and bodies of HTTP responses: the rows of `tests/vectors/http.md` by their ids.

use std::{
    collections::{BTreeSet, HashSet},
    convert::Infallible,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{Router, body::Body, middleware::map_request, routing::get};
use bytes::Bytes;
use http::{HeaderName, Method, Request, Response, StatusCode, header, request::Parts};
use http_body_util::Full;
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_http::cors::{Any, CorsLayer};
use tower_quota::{
    Decision, FailureMode, FixedWindow, Headers, KeyExtractor, Limit, Policy, RateLimitLayer, SlidingLog, TokenBucket,
    key,
    limit::Calendar,
    response::{self, Grpc, Problem, Rejection},
    store::ChargeState,
};

use crate::support::{self, Broken, Browser, Clock, Fixed, Received, get_from, send, serve};

/// 100 a minute for each address, as in the vectors.
fn default() -> Policy {
    Policy::new("default", SlidingLog::per_minute(100)).key(key::ip())
}

/// State S1 of the vectors: 60 left, and all of it in 58.2 s.
fn s1() -> Fixed {
    Fixed::admitted(60, 58_200)
}

/// State S2: denied, wait 41.2 s.
fn s2() -> Fixed {
    Fixed::denied(Duration::from_millis(41_200))
}

fn hello(layer: RateLimitLayer) -> Router {
    Router::new().route("/", get(async || "hi")).layer(layer)
}

async fn call(layer: RateLimitLayer) -> Received {
    send(&hello(layer), support::get("/")).await
}

/// The response to a request to a service that responds with this status and these fields.
async fn call_behind(layer: RateLimitLayer, status: u16, fields: &[(&'static str, &'static str)]) -> Received {
    let fields = fields.to_vec();
    let answer = async move || {
        let mut response = Response::builder().status(status);
        for (name, value) in fields {
            response = response.header(name, value);
        }
        response.body(axum::body::Body::from("hi")).expect("a good response")
    };
    send(&Router::new().route("/", get(answer)).layer(layer), support::get("/")).await
}

/// The rate limit fields of a response.
fn lines(received: &Received) -> Vec<String> {
    let ours = Headers::names();
    let mut lines: Vec<_> = received
        .headers
        .iter()
        .filter(|(name, _)| ours.contains(name))
        .map(|(name, value)| format!("{name}: {}", value.to_str().expect("fields are text")))
        .collect();
    lines.sort();
    lines
}

#[tokio::test]
async fn each_dialect_has_its_fields() {
    for (id, style, expected) in [
        ("HD-01", Headers::None, &[][..]),
        (
            "HD-02",
            Headers::LegacyEpoch,
            &[
                "x-ratelimit-limit: 100",
                "x-ratelimit-remaining: 60",
                "x-ratelimit-reset: 1800000059",
            ],
        ),
        (
            "HD-03",
            Headers::LegacyDelta,
            &[
                "x-ratelimit-limit: 100",
                "x-ratelimit-remaining: 60",
                "x-ratelimit-reset: 59",
            ],
        ),
        (
            "draft -06",
            Headers::Draft06,
            &[
                "ratelimit-limit: 100",
                "ratelimit-policy: 100;w=60",
                "ratelimit-remaining: 60",
                "ratelimit-reset: 59",
            ],
        ),
        (
            "HD-06",
            Headers::Draft07,
            &[
                "ratelimit-policy: 100;w=60",
                "ratelimit: limit=100, remaining=60, reset=59",
            ],
        ),
        (
            "HD-07",
            Headers::Draft08,
            &[
                "ratelimit-policy: \"default\";q=100;w=60",
                "ratelimit: \"default\";r=60;t=59",
            ],
        ),
    ] {
        let admitted = call(RateLimitLayer::new(s1(), default()).headers(style)).await;
        assert_eq!(admitted.status, StatusCode::OK, "{id}");
        assert_eq!(lines(&admitted), expected, "{id}");
    }
}

#[tokio::test]
async fn a_denial_has_the_wait_in_each_dialect() {
    for (id, style, expected) in [
        ("HD-01, denied", Headers::None, &["retry-after: 42"][..]),
        (
            "HD-02, denied",
            Headers::LegacyEpoch,
            &[
                "retry-after: 42",
                "x-ratelimit-limit: 100",
                "x-ratelimit-remaining: 0",
                "x-ratelimit-reset: 1800000042",
            ],
        ),
        (
            "HD-06, denied",
            Headers::Draft07,
            &[
                "ratelimit-policy: 100;w=60",
                "ratelimit: limit=100, remaining=0, reset=42",
                "retry-after: 42",
            ],
        ),
        (
            "HD-08",
            Headers::Draft08,
            &[
                "ratelimit-policy: \"default\";q=100;w=60",
                "ratelimit: \"default\";r=0;t=42",
                "retry-after: 42",
            ],
        ),
    ] {
        let denied = call(RateLimitLayer::new(s2(), default()).headers(style)).await;
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS, "{id}");
        assert_eq!(lines(&denied), expected, "{id}");
        assert_eq!(denied.field("cache-control"), Some("no-store"), "{id}");
    }
}

#[tokio::test]
async fn the_wait_is_whole_seconds_of_at_least_one() {
    for (id, wait, retry_after, t) in [
        ("HD-10", Duration::from_secs(1), "1", "1"),
        ("HD-12", Duration::ZERO, "1", "1"),
        (
            "HD-13",
            Duration::from_secs(1_000_000_000_000),
            "2147483647",
            "1000000000000",
        ),
        // More than an integer of a structured field can hold (RFC 9651 §3.3.1).
        ("the longest", Duration::MAX, "2147483647", "999999999999999"),
    ] {
        let denied = call(RateLimitLayer::new(Fixed::denied(wait), default())).await;
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS, "{id}");
        assert_eq!(denied.field("retry-after"), Some(retry_after), "{id}");
        assert_eq!(
            denied.field("ratelimit"),
            Some(&*format!("\"default\";r=0;t={t}")),
            "{id}"
        );
    }
}

#[tokio::test]
async fn numbers_of_any_store_fit_in_the_fields() {
    let most = || Fixed(vec![ChargeState::new(u64::MAX, None, Duration::MAX)]);
    let admitted = call(RateLimitLayer::new(most(), default())).await;
    assert_eq!(
        admitted.field("ratelimit"),
        Some("\"default\";r=999999999999999;t=999999999999999")
    );
    for legacy in [Headers::LegacyEpoch, Headers::LegacyDelta] {
        let admitted = call(RateLimitLayer::new(most(), default()).headers(legacy)).await;
        assert_eq!(admitted.status, StatusCode::OK);
    }
}

fn burst_and_daily() -> [Policy; 2] {
    [
        Policy::new("burst", SlidingLog::per_second(10)).key(key::ip()),
        Policy::new("daily", SlidingLog::per_day(1_000)).key(key::ip()),
    ]
}

#[tokio::test]
async fn hd_14_two_policies_are_one_list_in_their_order() {
    let store = Fixed(vec![
        ChargeState::new(9, None, Duration::from_secs(1)),
        ChargeState::new(999, None, Duration::from_secs(86_400)),
    ]);
    let admitted = call(RateLimitLayer::new(store, burst_and_daily())).await;
    assert_eq!(
        lines(&admitted),
        [
            "ratelimit-policy: \"burst\";q=10;w=1, \"daily\";q=1000;w=86400",
            "ratelimit: \"burst\";r=9;t=1, \"daily\";r=999;t=86400",
        ],
    );
}

#[tokio::test]
async fn hd_16_the_policies_that_deny_are_named_and_the_longest_wait_counts() {
    let wait = |seconds| Some(Duration::from_secs(seconds));
    for (waits, violated, retry_after) in [
        ([wait(1), wait(3_600)], &["burst", "daily"][..], "3600"),
        ([wait(1), None], &["burst"], "1"),
        ([None, wait(3_600)], &["daily"], "3600"),
    ] {
        let states = waits.map(|wait| ChargeState::new(3, wait, Duration::from_secs(3_600)));
        let layer = RateLimitLayer::new(Fixed(states.to_vec()), burst_and_daily());
        let denied = call(layer).await;
        assert_eq!(denied.json()["violated-policies"], serde_json::json!(violated));
        assert_eq!(denied.field("retry-after"), Some(retry_after));

        // A policy that denies has 0 remaining, though 3 are left and the cost is higher.
        let shown = waits.map(|wait| wait.map_or(3, |_| 0));
        let fields = denied.field("ratelimit").expect("fields");
        assert!(fields.starts_with(&format!("\"burst\";r={};t=", shown[0])), "{fields}");
        assert!(fields.contains(&format!(", \"daily\";r={};t=", shown[1])), "{fields}");
        assert_eq!(denied.extensions.get::<Decision>().expect("a decision").remaining(), 3);
    }
}

#[tokio::test]
async fn of_several_policies_single_values_are_those_of_the_one_that_matters_most() {
    for (states, expected) in [
        // 5 of 10 is less of its limit than 900 of 1000.
        (
            [(5, None), (900, None)],
            ["x-ratelimit-limit: 10", "x-ratelimit-remaining: 5"],
        ),
        (
            [(9, None), (10, None)],
            ["x-ratelimit-limit: 1000", "x-ratelimit-remaining: 10"],
        ),
        // The longest wait of the policies that deny.
        (
            [(0, Some(9)), (0, Some(5))],
            ["x-ratelimit-limit: 10", "x-ratelimit-remaining: 0"],
        ),
        (
            [(0, None), (1, Some(5))],
            ["x-ratelimit-limit: 1000", "x-ratelimit-remaining: 0"],
        ),
    ] {
        let store = Fixed(
            states
                .map(|(left, wait)| ChargeState::new(left, wait.map(Duration::from_secs), Duration::from_secs(9)))
                .to_vec(),
        );
        let layer = RateLimitLayer::new(store, burst_and_daily()).headers(Headers::LegacyDelta);
        let lines = lines(&call(layer).await);
        assert!(
            expected.iter().all(|line| lines.contains(&(*line).to_owned())),
            "{lines:?}"
        );
    }
}

#[tokio::test]
async fn hd_18_a_window_is_whole_seconds_of_at_least_one() {
    let half_a_second = SlidingLog::new(5, Duration::from_millis(500));
    for (style, line) in [
        (Headers::Draft08, "\"default\";q=5;w=1"),
        (Headers::Draft07, "5;w=1"),
        (Headers::Draft06, "5;w=1"),
    ] {
        let policy = Policy::new("default", half_a_second).key(key::ip());
        let admitted = call(RateLimitLayer::new(Fixed::admitted(4, 500), policy).headers(style.clone())).await;
        assert_eq!(admitted.field("ratelimit-policy"), Some(line), "{style:?}");
    }
}

#[tokio::test]
async fn each_algorithm_has_its_policy_item() {
    let month = FixedWindow::calendar(3, Calendar::Month, "UTC").unwrap();
    for (limit, described) in [
        // Months differ in length.
        (Limit::from(month), "\"default\";q=3"),
        // A burst of 25 at 10 a second is restored after 2.5 s.
        (TokenBucket::per_second(10).burst(25).into(), "\"default\";q=25;w=3"),
        (TokenBucket::per_minute(1).burst(2).into(), "\"default\";q=2;w=120"),
        (FixedWindow::per_hour(7).into(), "\"default\";q=7;w=3600"),
    ] {
        let policy = Policy::new("default", limit).key(key::ip());
        let admitted = call(RateLimitLayer::new(Clock::new().memory_store(), policy)).await;
        assert_eq!(admitted.field("ratelimit-policy"), Some(described));
    }
}

#[test]
#[should_panic(expected = "\"naïve\" is not a policy name")]
fn hd_20_a_name_that_is_no_word_cannot_be_built() {
    let _ = Policy::new("naïve", SlidingLog::per_minute(100));
}

#[tokio::test]
async fn hd_22_of_single_values_the_lower_remaining_wins_whole() {
    let theirs = &[
        ("x-ratelimit-limit", "70"),
        ("x-ratelimit-remaining", "5"),
        ("x-ratelimit-reset", "7"),
    ];
    let ours =
        |remaining| RateLimitLayer::new(Fixed::admitted(remaining, 58_200), default()).headers(Headers::LegacyDelta);
    assert_eq!(
        lines(&call_behind(ours(60), 200, theirs).await),
        [
            "x-ratelimit-limit: 70",
            "x-ratelimit-remaining: 5",
            "x-ratelimit-reset: 7"
        ],
    );
    assert_eq!(
        lines(&call_behind(ours(4), 200, theirs).await),
        [
            "x-ratelimit-limit: 100",
            "x-ratelimit-remaining: 4",
            "x-ratelimit-reset: 59"
        ],
    );

    // A number is compared in each spelling; other text has no number. The service adds no reset.
    for (theirs, is_kept) in [
        (&["0"][..], true),
        (&["-3"], true),
        (&["0.0"], true),
        (&["5.9"], true),
        (&["-0.5"], true),
        (&["5", "99"], true),
        (&["5, 99"], true),
        (&["99,5"], true),
        (&["61, 99"], false),
        (&["61.5"], false),
        (&["1e3"], false),
        (&["9999999999999999999999"], false),
        (&["inf"], false),
        (&["NaN"], false),
        (&["many"], false),
    ] {
        let mut fields = vec![("x-ratelimit-limit", "70")];
        fields.extend(theirs.iter().map(|line| ("x-ratelimit-remaining", *line)));
        let lines = lines(&call_behind(ours(60), 200, &fields).await);
        let kept = [
            "x-ratelimit-limit: 70",
            &*format!("x-ratelimit-remaining: {}", theirs[0]),
        ];
        let replaced = [
            "x-ratelimit-limit: 100",
            "x-ratelimit-remaining: 60",
            "x-ratelimit-reset: 59",
        ];
        assert_eq!(lines, if is_kept { &kept[..] } else { &replaced }, "{theirs:?}");
    }

    let theirs = &[
        ("ratelimit", "limit=70, remaining=5, reset=7"),
        ("ratelimit-policy", "70;w=9"),
    ];
    let admitted = call_behind(
        RateLimitLayer::new(s1(), default()).headers(Headers::Draft07),
        200,
        theirs,
    )
    .await;
    assert_eq!(
        lines(&admitted),
        [
            "ratelimit-policy: 70;w=9, 100;w=60",
            "ratelimit: limit=70, remaining=5, reset=7"
        ],
    );

    let theirs = &[
        ("ratelimit-limit", "70"),
        ("ratelimit-remaining", "61"),
        ("ratelimit-reset", "7"),
    ];
    let admitted = call_behind(
        RateLimitLayer::new(s1(), default()).headers(Headers::Draft06),
        200,
        theirs,
    )
    .await;
    assert_eq!(
        lines(&admitted),
        [
            "ratelimit-limit: 100",
            "ratelimit-policy: 100;w=60",
            "ratelimit-remaining: 60",
            "ratelimit-reset: 59",
        ],
    );
}

#[tokio::test]
async fn lists_of_the_service_and_of_inner_layers_are_continued_on_one_line() {
    let theirs = &[
        ("ratelimit", "\"a\";r=1;t=1"),
        ("ratelimit", ""),
        // With one of these the field would have no value.
        ("ratelimit", "\"c\";r=3;t=3\u{ff}"),
        ("ratelimit", "\"d\";r=4, \"open"),
        ("ratelimit", "(\"e\""),
        ("ratelimit", ")(\"f\""),
        ("ratelimit", ",\"b,\";r=2;t=2;p=%\"\\\",,\"g\";r=5,"),
        ("ratelimit-policy", "\"a\";q=1;w=1, \"b\";q=2;w=2"),
    ];
    assert_eq!(
        lines(&call_behind(RateLimitLayer::new(s1(), default()), 200, theirs).await),
        [
            "ratelimit-policy: \"a\";q=1;w=1, \"b\";q=2;w=2, \"default\";q=100;w=60",
            "ratelimit: \"a\";r=1;t=1, \"b,\";r=2;t=2;p=%\"\\\", \"g\";r=5, \"default\";r=60;t=59",
        ],
    );
}

#[tokio::test]
async fn of_a_dictionary_and_a_list_the_one_with_less_left_is_shown() {
    const OURS_AS_LIST: &str = "\"default\";r=60;t=59";
    const OURS_AS_DICTIONARY: &str = "limit=100, remaining=60, reset=59";
    for (style, ours, theirs, is_kept) in [
        (Headers::Draft08, OURS_AS_LIST, "limit=70, remaining=5, reset=7", true),
        (
            Headers::Draft08,
            OURS_AS_LIST,
            "limit=70, remaining=60;x=1, reset=7",
            true,
        ),
        (Headers::Draft08, OURS_AS_LIST, "limit=70, remaining=61, reset=7", false),
        (
            Headers::Draft08,
            OURS_AS_LIST,
            "remaining=5, limit=70, remaining=61, reset=7",
            false,
        ), // the last one counts
        (Headers::Draft08, OURS_AS_LIST, "limit=70", false),
        (
            Headers::Draft07,
            OURS_AS_DICTIONARY,
            "\"a\";r=61;t=1, \"b\";r=2;t=2",
            true,
        ),
        (
            Headers::Draft07,
            OURS_AS_DICTIONARY,
            "\"a\"; r=60, \"b\";t=1;r=900",
            true,
        ),
        (
            Headers::Draft07,
            OURS_AS_DICTIONARY,
            "\"a;r=1\";r=61;t=1, \"b\";r=99",
            false,
        ),
        // RFC 9651 §3.3.3: a quotation mark in a string is escaped.
        (Headers::Draft07, OURS_AS_DICTIONARY, "\"a\\\";r=99\";r=2;t=1", true),
        (Headers::Draft07, OURS_AS_DICTIONARY, "\"a\"", false),
    ] {
        let layer = RateLimitLayer::new(s1(), default()).headers(style.clone());
        let admitted = call_behind(layer, 200, &[("ratelimit", theirs)]).await;
        let shown = admitted.field("ratelimit");
        assert_eq!(shown, Some(if is_kept { theirs } else { ours }), "{style:?}");
    }
}

#[tokio::test]
async fn a_list_on_two_lines_beside_a_dictionary_stays_or_goes_whole() {
    const LOW: &[(&str, &str)] = &[("ratelimit", "\"a\";r=99"), ("ratelimit", "\"b\";r=1")];
    const HIGH: &[(&str, &str)] = &[("ratelimit", "\"a\";r=99"), ("ratelimit", "\"b\";r=98")];
    const OURS: &str = "ratelimit: limit=100, remaining=60, reset=59";
    for (theirs, shown) in [(LOW, "ratelimit: \"a\";r=99, \"b\";r=1"), (HIGH, OURS)] {
        let layer = RateLimitLayer::new(s1(), default()).headers(Headers::Draft07);
        let mut lines = lines(&call_behind(layer, 200, theirs).await);
        lines.retain(|line| line.starts_with("ratelimit:"));
        assert_eq!(lines, [shown]);
    }

    // Ours is a member of the list.
    const LISTS: &[(&str, &str)] = &[
        ("ratelimit", "\"a\";r=99"),
        ("ratelimit", "limit=90, remaining=50"),
        ("ratelimit", "\"b\";r=5"),
    ];
    let shown = lines(&call_behind(RateLimitLayer::new(s1(), default()), 200, LISTS).await);
    assert_eq!(shown[1..], ["ratelimit: \"a\";r=99, \"b\";r=5, \"default\";r=60;t=59"]);
}

#[tokio::test]
async fn a_policy_that_is_no_list_is_that_of_what_remains() {
    const LOW: &[(&str, &str)] = &[
        ("ratelimit-policy", "limit=10, window=60"),
        ("ratelimit", "limit=100, remaining=0, reset=5"),
        ("ratelimit-remaining", "0"),
    ];
    const HIGH: &[(&str, &str)] = &[
        ("ratelimit-policy", "limit=10, window=60"),
        ("ratelimit", "limit=100, remaining=61, reset=5"),
        ("ratelimit-remaining", "61"),
    ];
    for style in [Headers::Draft08, Headers::Draft07, Headers::Draft06] {
        for (theirs, is_kept) in [(LOW, true), (HIGH, false)] {
            let layer = RateLimitLayer::new(s1(), default()).headers(style.clone());
            let admitted = call_behind(layer, 200, theirs).await;
            let is_theirs = admitted.field("ratelimit-policy") == Some("limit=10, window=60");
            assert_eq!(is_theirs, is_kept, "{style:?} {theirs:?}");
        }
    }
}

#[tokio::test]
async fn of_nested_layers_with_single_values_the_closest_to_exhaustion_is_shown() {
    let style = Headers::LegacyDelta;
    for (inner, outer, shown) in [(3, 4, ["100", "3"]), (4, 3, ["50", "3"]), (0, 4, ["100", "0"])] {
        let inner = RateLimitLayer::new(Fixed::admitted(inner, 1_000), default()).headers(style.clone());
        let everyone = Policy::new("everyone", SlidingLog::per_minute(50)).key(key::constant("all"));
        let outer = RateLimitLayer::new(Fixed::admitted(outer, 1_000), everyone).headers(style.clone());
        let admitted = send(&hello(inner).layer(outer), support::get("/")).await;
        let fields = ["x-ratelimit-limit", "x-ratelimit-remaining"].map(|name| admitted.field(name).expect("a field"));
        assert_eq!(fields, shown);
    }
}

#[tokio::test]
async fn of_several_lines_of_a_single_value_the_one_with_the_least_is_kept() {
    let style = Headers::LegacyDelta;
    const LIMIT: (&str, &str) = ("x-ratelimit-limit", "200");
    const HIGH: [(&str, &str); 2] = [("x-ratelimit-remaining", "99"), ("x-ratelimit-reset", "9")];
    // Its value may have parameters.
    const LOW: [(&str, &str); 2] = [("x-ratelimit-remaining", "5;x=1"), ("x-ratelimit-reset", "7")];
    for theirs in [
        &[LIMIT, HIGH[0], HIGH[1], LOW[0], LOW[1]],
        &[LIMIT, LOW[0], LOW[1], HIGH[0], HIGH[1]],
    ] {
        let admitted = call_behind(RateLimitLayer::new(s1(), default()).headers(style.clone()), 200, theirs).await;
        assert_eq!(
            lines(&admitted),
            [
                "x-ratelimit-limit: 200",
                "x-ratelimit-remaining: 5;x=1",
                "x-ratelimit-reset: 7"
            ]
        );
    }

    // Of what lacks a line for it, the first one is kept.
    let theirs = &[HIGH[0], HIGH[1], HIGH[0], HIGH[1], LOW[0]];
    let admitted = call_behind(RateLimitLayer::new(s1(), default()).headers(style), 200, theirs).await;
    assert_eq!(
        lines(&admitted),
        ["x-ratelimit-remaining: 5;x=1", "x-ratelimit-reset: 9"]
    );

    let theirs = &[
        ("ratelimit", "limit=200, remaining=99, reset=9"),
        ("ratelimit", "limit=20, remaining=5, reset=7"),
    ];
    let layer = RateLimitLayer::new(s1(), default()).headers(Headers::Draft07);
    let admitted = call_behind(layer, 200, theirs).await;
    assert_eq!(
        lines(&admitted),
        [
            "ratelimit-policy: 100;w=60",
            "ratelimit: limit=20, remaining=5, reset=7"
        ]
    );
}

/// RFC 9651 §4.2.
#[tokio::test]
async fn the_lines_of_one_dictionary_are_joined() {
    for [one, other] in [
        ["limit=10,remaining=5", "reset=7"],
        ["limit=10", "remaining=5, reset=7"],
        ["reset=7", "limit=10, remaining=5"],
    ] {
        let theirs = &[("ratelimit", one), ("ratelimit", other)];
        let layer = RateLimitLayer::new(s1(), default()).headers(Headers::Draft07);
        assert_eq!(
            lines(&call_behind(layer, 200, theirs).await),
            [
                "ratelimit-policy: 100;w=60".to_owned(),
                format!("ratelimit: {one}, {other}")
            ]
        );

        // A list goes, or this stays whole.
        let shown = lines(&call_behind(RateLimitLayer::new(s1(), default()), 200, theirs).await);
        assert_eq!(shown[1..], [format!("ratelimit: {one}, {other}")]);
    }

    // Of two dictionaries, or one beside a list, the one with less left stays.
    let least = "limit=10, remaining=5, reset=3";
    for other in ["limit=20, remaining=7, reset=9", "\"u\";r=7"] {
        for theirs in [[other, least], [least, other]].map(|lines| lines.map(|line| ("ratelimit", line))) {
            for style in [Headers::Draft08, Headers::Draft07] {
                let layer = RateLimitLayer::new(s1(), default()).headers(style.clone());
                let shown = lines(&call_behind(layer, 200, &theirs).await);
                assert_eq!(shown[1..], [format!("ratelimit: {least}")], "{style:?} {theirs:?}");
            }
        }
    }

    let observing = RateLimitLayer::new(s1(), default().observe_only()).observed_header(true);
    let shown = call_behind(observing, 200, &[("ratelimit-observed", "limit=10")]).await;
    assert_eq!(shown.field("ratelimit-observed"), Some("\"default\";r=60;t=59"));

    // So does one on two lines beside a list, and nothing of a line that is no list.
    const APART: &[(&str, &str)] = &[
        ("ratelimit", "\"u\";r=99"),
        ("ratelimit", "limit=10"),
        ("ratelimit", "remaining=5"),
    ];
    const OPEN: &[(&str, &str)] = &[("ratelimit", "\"u\";r=0;x=\"o")];
    for (style, ours) in [
        (Headers::Draft08, "\"default\";r=60;t=59"),
        (Headers::Draft07, "limit=100, remaining=60, reset=59"),
    ] {
        for (theirs, expected) in [(APART, "limit=10, remaining=5"), (OPEN, ours)] {
            let layer = RateLimitLayer::new(s1(), default()).headers(style.clone());
            let shown = call_behind(layer, 200, theirs).await;
            assert_eq!(shown.field("ratelimit"), Some(expected), "{style:?} {theirs:?}");
        }
    }

    let theirs = &[("ratelimit", "limit=100, remaining=61"), ("ratelimit", "reset=7")];
    let layer = RateLimitLayer::new(s1(), default()).headers(Headers::Draft07);
    let shown = lines(&call_behind(layer, 200, theirs).await);
    assert_eq!(shown[1..], ["ratelimit: limit=100, remaining=60, reset=59"]);
}

#[tokio::test]
async fn hd_24_a_status_of_3xx_has_no_fields_in_any_dialect() {
    for style in [Headers::Draft08, Headers::Draft07, Headers::Draft06] {
        let layer = RateLimitLayer::new(s1(), default()).headers(style.clone().and(Headers::LegacyEpoch));
        // A cache stores the fields of a 304 (RFC 9111 section 4.3.4).
        for status in [300, 301, 302, 303, 304, 305, 307, 308] {
            let redirect = call_behind(layer.clone(), status, &[]).await;
            assert_eq!(redirect.status, status);
            assert!(lines(&redirect).is_empty(), "{style:?} {status}");
        }
        // Nor `Retry-After`, which would be the time until the other location is asked for (RFC 9110 section 10.2.3).
        let format = response::axum(|_, _| (StatusCode::SEE_OTHER, [("location", "/later")]));
        let layer = RateLimitLayer::new(s2(), default()).headers(style).format(format);
        let redirect = call_behind(layer, 200, &[]).await;
        assert_eq!(redirect.field("location"), Some("/later"));
        assert!(lines(&redirect).is_empty() && redirect.field("retry-after").is_none());
    }
}

/// A shared cache would send the fields of one caller to others (RFC 9111 sections 3 and 5.2.2, RFC 9213).
#[tokio::test]
async fn a_response_for_shared_caches_has_no_fields_of_a_caller() {
    let styles = [
        Headers::Draft08,
        Headers::Draft07,
        Headers::Draft06,
        Headers::LegacyDelta,
        Headers::custom(|_, headers| {
            headers.insert("ratelimit", 1.into());
        }),
    ];
    for style in styles {
        let call = async |status, fields: &[(&'static str, &'static str)]| {
            let layer = RateLimitLayer::new(s1(), default()).headers(style.clone());
            let layer = layer.partition_key("a secret of 26 characters!").expect("long");
            lines(&call_behind(layer, status, fields).await)
        };
        for status in [200, 404] {
            for shared in [
                &[("cache-control", "public")][..],
                &[("cache-control", "max-age=60, Public")],
                &[("cache-control", "max-age=60"), ("cache-control", "s-maxage=60")],
                &[("cache-control", "S-MaxAge=\"60\" ,no-transform")],
                &[("cdn-cache-control", "max-age=60"), ("cache-control", "no-store")],
                &[("cdn-cache-control", "s-maxage=60")],
                &[("cdn-cache-control", "public")],
            ] {
                assert!(call(status, shared).await.is_empty(), "{style:?} {status} {shared:?}");
            }
            for own in [
                &[][..],
                &[("cache-control", "private, max-age=60")],
                &[("cache-control", "no-store")],
                &[("cache-control", "max-age=60, x-public")],
                &[("cdn-cache-control", "no-store")],
            ] {
                assert!(!call(status, own).await.is_empty(), "{style:?} {status} {own:?}");
            }
        }
    }
}

/// RFC 9213 §2.2: for such a cache the field is in place of `Cache-Control`.
#[tokio::test]
async fn a_denial_that_a_format_lets_a_cdn_store_has_no_fields() {
    for (value, has_fields) in [("max-age=10", false), ("no-store", true)] {
        let format =
            response::axum(move |_, _| (StatusCode::TOO_MANY_REQUESTS, [("cdn-cache-control", value)], "later"));
        let layer = RateLimitLayer::new(Fixed::denied(Duration::from_secs(5)), default()).format(format);
        let denied = call_behind(layer, 200, &[]).await;
        assert_eq!(denied.status, 429);
        assert_eq!(denied.field("cache-control"), Some("no-store"));
        assert_eq!(denied.field("ratelimit").is_some(), has_fields, "{value}");
    }
}

#[tokio::test]
async fn hd_25_an_error_of_the_service_has_fields() {
    for status in [500, 404, 201] {
        let failed = call_behind(RateLimitLayer::new(s1(), default()), status, &[]).await;
        assert_eq!(failed.status, status);
        assert_eq!(failed.field("ratelimit"), Some("\"default\";r=60;t=59"), "{status}");
        assert_eq!(failed.field("cache-control"), None, "{status}");
    }
}

#[tokio::test]
async fn the_legacy_fields_go_beside_a_draft() {
    let layer = |store| RateLimitLayer::new(store, default()).headers(Headers::Draft08.and(Headers::LegacyEpoch));
    assert_eq!(
        lines(&call(layer(s1())).await),
        [
            "ratelimit-policy: \"default\";q=100;w=60",
            "ratelimit: \"default\";r=60;t=59",
            "x-ratelimit-limit: 100",
            "x-ratelimit-remaining: 60",
            "x-ratelimit-reset: 1800000059",
        ],
    );
    assert_eq!(call(layer(s2())).await.field("x-ratelimit-reset"), Some("1800000042"));
}

/// It is the same in each denial until it has passed.
#[tokio::test]
async fn the_epoch_of_a_denial_stays_until_it_comes() {
    let clock = Clock::new();
    let start = clock.now();
    let policy = Policy::new("default", SlidingLog::per_second(1)).key(key::ip());
    let app = hello(RateLimitLayer::new(clock.memory_store(), policy).headers(Headers::LegacyEpoch));
    clock.set(start + 300_000);
    assert_eq!(send(&app, support::get("/")).await.status, StatusCode::OK);
    for us in [300_001, 999_999, 1_000_000, 1_000_001, 1_299_999] {
        clock.set(start + us);
        let denied = send(&app, support::get("/")).await;
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(denied.field("x-ratelimit-reset"), Some("1800000002"), "after {us} us");
    }
}

#[tokio::test]
async fn a_cost_above_the_limit_has_no_wait_in_any_dialect() {
    for style in [
        Headers::Draft08,
        Headers::Draft07,
        Headers::Draft06,
        Headers::LegacyEpoch,
    ] {
        let denied = call(
            RateLimitLayer::new(Clock::new().memory_store(), default().cost_fn(|_| 101))
                .headers(style.clone())
                .retry_jitter(Duration::from_secs(9)),
        )
        .await;
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(denied.json()["violated-policies"], serde_json::json!(["default"]));
        for line in lines(&denied) {
            for promise in ["retry-after", "reset", ";t="] {
                assert!(!line.contains(promise), "{style:?}: {line}");
            }
        }
        let shows_none = |line: &String| {
            ["remaining: 0", "remaining=0", ";r=0"]
                .iter()
                .any(|none| line.contains(none))
        };
        assert!(lines(&denied).iter().any(shows_none), "{:?}", lines(&denied));
    }
}

#[tokio::test]
async fn of_a_format_with_fields_no_reset_stays_where_there_is_none() {
    let fields = [("x-ratelimit-remaining", "200"), ("x-ratelimit-reset", "7")];
    let format = response::axum(move |_, _| (StatusCode::TOO_MANY_REQUESTS, fields));
    let layer = RateLimitLayer::new(Clock::new().memory_store(), default().cost_fn(|_| 101));
    let denied = call(layer.headers(Headers::LegacyDelta).format(format)).await;
    assert_eq!(lines(&denied), ["x-ratelimit-limit: 100", "x-ratelimit-remaining: 0"]);
}

#[tokio::test]
async fn jitter_goes_upward_within_its_bound() {
    let (wait, jitter) = (10, 5);
    let layer = RateLimitLayer::new(Fixed::denied(Duration::from_secs(wait)), default())
        .retry_jitter(Duration::from_secs(jitter));
    let app = hello(layer);

    let mut seen = BTreeSet::new();
    for _ in 0..200 {
        let denied = send(&app, support::get("/")).await;
        let advice: u64 = denied.field("retry-after").expect("advice").parse().expect("a number");
        assert!((wait..=wait + jitter).contains(&advice), "{advice}");
        seen.insert(advice);

        let decision = denied.extensions.get::<Decision>().expect("a decision");
        let waits = [
            decision.retry_after(),
            decision.policies().next().expect("a policy").retry_after(),
        ];
        for wait in waits {
            assert_eq!(wait.expect("a wait").as_nanos().div_ceil(1_000_000_000), advice.into());
        }
    }
    assert!(seen.len() > 2, "{seen:?}");

    let denied = call(RateLimitLayer::new(Fixed::denied(Duration::from_secs(wait)), default())).await;
    assert_eq!(denied.field("retry-after"), Some("10"), "off by default");
}

/// The wait in seconds as each field of a response has it.
fn waits(received: &Received) -> Vec<String> {
    let after = |name: &str, mark: &str| {
        let value = received.field(name)?;
        let (_, wait) = value.rsplit_once(mark).expect("a wait");
        Some(wait.to_owned())
    };
    let epoch = |wait: String| (wait.parse::<u64>().expect("a number") - 1_800_000_000).to_string();
    [
        received.field("retry-after").map(str::to_owned),
        after("ratelimit", "="),
        received.field("ratelimit-reset").map(str::to_owned),
        received.field("x-ratelimit-reset").map(|reset| epoch(reset.to_owned())),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[tokio::test]
async fn hd_32_jitter_is_the_same_in_each_field() {
    for style in [Headers::Draft08, Headers::Draft07, Headers::Draft06] {
        let jitter = Duration::from_secs(1_000);
        let layer = RateLimitLayer::new(s2(), default()).headers(style.clone().and(Headers::LegacyEpoch));
        let app = hello(layer.retry_jitter(jitter));
        for _ in 0..20 {
            let denied = send(&app, support::get("/")).await;
            let waits = waits(&denied);
            assert_eq!(waits.len(), 3, "{style:?}: {waits:?}");
            assert!(waits.iter().all(|wait| *wait == waits[0]), "{style:?}: {waits:?}");
        }
    }
}

#[tokio::test]
async fn hd_32_jitter_of_several_policies_is_the_same_in_each() {
    let wait = |seconds| Some(Duration::from_secs(seconds));
    let states = [wait(10), wait(20), None].map(|wait| ChargeState::new(3, wait, Duration::from_secs(60)));
    let policies = ["a", "b", "c"].map(|name| Policy::new(name, SlidingLog::per_minute(100)).key(key::ip()));
    let layer = RateLimitLayer::new(Fixed(states.to_vec()), policies).retry_jitter(Duration::from_secs(1_000));

    let denied = call(layer).await;
    let longest: u64 = denied.field("retry-after").expect("a wait").parse().expect("a number");
    let states = format!("\"a\";r=0;t={}, \"b\";r=0;t={longest}, \"c\";r=3;t=60", longest - 10);
    assert_eq!(denied.field("ratelimit"), Some(&*states));
}

#[tokio::test]
async fn jitter_spreads_the_requests_that_the_store_failed_too() {
    let app = hello(fails(FailureMode::Closed).retry_jitter(Duration::from_secs(1_000)));
    let mut waits = BTreeSet::new();
    for _ in 0..50 {
        let failed = send(&app, support::get("/")).await;
        let wait: u64 = failed.field("retry-after").expect("a wait").parse().expect("a number");
        assert!((1..=1_001).contains(&wait), "{wait}");
        waits.insert(wait);
    }
    assert!(waits.len() > 2, "{waits:?}");
}

#[tokio::test]
async fn a_partition_key_is_a_digest_and_off_by_default() {
    assert!(
        lines(&call(RateLimitLayer::new(s1(), default())).await)
            .iter()
            .all(|line| !line.contains("pk="))
    );

    let app = |secret: &str| hello(RateLimitLayer::new(s1(), default()).partition_key(secret).unwrap());
    let pk_of = async |app: Router, address: &str| {
        let admitted = send(&app, get_from(address, "/")).await;
        let of = |name| {
            let (_, pk) = admitted
                .field(name)
                .expect("a field")
                .split_once(";pk=:")
                .expect("a partition key");
            pk.strip_suffix(':').expect("a byte sequence").to_owned()
        };
        assert_eq!(of("ratelimit"), of("ratelimit-policy"));
        assert!(!lines(&admitted).concat().contains(address));
        of("ratelimit")
    };
    let one = pk_of(app("a secret of 21 bytes"), "203.0.113.7").await;
    assert_eq!(one.len(), 24, "128 bits in base64");
    assert_eq!(one, pk_of(app("a secret of 21 bytes"), "203.0.113.7").await);
    assert_ne!(one, pk_of(app("a secret of 21 bytes"), "203.0.113.8").await);
    assert_ne!(one, pk_of(app("another secret of more"), "203.0.113.7").await);
}

#[tokio::test]
async fn hd_27_the_problem_names_the_policy_and_no_caller() {
    let policy =
        Policy::new("default", SlidingLog::per_minute(100)).key((key::ip(), key::header("x-user-id"), key::path()));
    let layer = RateLimitLayer::new(s2(), policy);
    let app = Router::new().fallback(async || "hi").layer(layer);
    let denied = send(&app, support::get("/secret/path").header("x-user-id", "ada")).await;

    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.field("content-type"), Some("application/problem+json"));
    assert_eq!(denied.json()["status"], 429);
    assert_eq!(
        denied.json()["type"],
        "https://iana.org/assignments/http-problem-types#quota-exceeded"
    );
    assert!(denied.json()["title"].is_string());
    assert_eq!(denied.json()["violated-policies"], serde_json::json!(["default"]));
    let text = String::from_utf8_lossy(&denied.body);
    for private in ["203.0.113", "ada", "x-user-id", "secret", "ip="] {
        assert!(!text.contains(private), "{private} in {text}");
    }
}

fn fails(mode: FailureMode) -> RateLimitLayer {
    let policy = default().failure_mode(mode);
    RateLimitLayer::new(Broken::default(), policy).headers(Headers::Draft08.and(Headers::LegacyDelta))
}

#[tokio::test]
async fn hd_28_a_store_that_fails_closed_is_503_without_fields() {
    let failed = call(fails(FailureMode::Closed)).await;
    assert_eq!(failed.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(lines(&failed), ["retry-after: 1"]);
    assert_eq!(failed.field("cache-control"), Some("no-store"));
    assert_eq!(failed.json()["status"], 503);
    assert_eq!(
        failed.json()["type"],
        "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
    );
}

#[tokio::test]
async fn hd_29_a_store_that_fails_open_leaves_the_response_as_it_is() {
    let theirs = &[("ratelimit", "\"theirs\";r=1;t=1"), ("cache-control", "public")];
    let passed = call_behind(fails(FailureMode::Open), 200, theirs).await;
    assert_eq!(passed.status, StatusCode::OK);
    assert_eq!(passed.body, "hi");
    assert_eq!(lines(&passed), ["ratelimit: \"theirs\";r=1;t=1"]);
    assert_eq!(passed.field("cache-control"), Some("public"));
}

/// A layer for each kind of response that a layer makes, with a format of success or failure, and the status.
fn each_rejection() -> Vec<(&'static str, RateLimitLayer, u16)> {
    struct User;

    let keyed = |key: Arc<dyn KeyExtractor>| {
        let policy = Policy::new("default", SlidingLog::per_minute(100)).key(key);
        RateLimitLayer::new(s1(), policy)
    };
    let success = || |_: Rejection<'_>, _: &Parts| Response::new("something less".into());
    let layers = [
        ("limited", RateLimitLayer::new(s2(), default()), 429),
        (
            "cost above the limit",
            RateLimitLayer::new(Clock::new().memory_store(), default().cost_fn(|_| 101)),
            429,
        ),
        (
            "no requests",
            RateLimitLayer::new(s1(), Policy::new("none", Limit::DenyAll).key(key::ip())),
            429,
        ),
        ("refused", keyed(Arc::new(key::header("x-user-id"))), 400),
        (
            "misconfigured",
            keyed(Arc::new(key::extension("user", |_: &User| ""))),
            500,
        ),
        ("failed", fails(FailureMode::Closed), 503),
    ];
    let formats: [fn(RateLimitLayer) -> RateLimitLayer; 4] = [
        |layer| layer,
        |layer| layer.format(response::text(|_, _| "later")),
        |layer| layer.format(response::text(|_, _| "")),
        |layer| layer.format(Grpc::new()),
    ];
    let mut rejections = Vec::new();
    for (why, layer, status) in layers {
        for format in formats {
            rejections.push((why, format(layer.clone()), status));
        }
        rejections.push((why, layer.format(success()), 200));
    }
    rejections
}

#[tokio::test]
async fn hd_31_no_response_of_the_layer_may_be_stored() {
    for (why, layer, status) in each_rejection() {
        for method in [Method::GET, Method::HEAD] {
            let rejected = send(&hello(layer.clone()), support::get("/").method(&method)).await;
            assert_eq!(rejected.status, status, "{why}, {method}");
            assert_eq!(rejected.field("cache-control"), Some("no-store"), "{why}, {method}");
        }
    }
}

#[tokio::test]
async fn cache_control_of_the_service_is_unchanged() {
    for theirs in [&[][..], &[("cache-control", "public, max-age=60")]] {
        let admitted = call_behind(RateLimitLayer::new(s1(), default()), 200, theirs).await;
        assert_eq!(admitted.field("cache-control"), theirs.first().map(|(_, value)| *value));
    }
}

#[tokio::test]
async fn each_field_that_a_layer_adds_is_in_the_list_for_cors() {
    // Of these a browser shows the first three in any case (Fetch standard, "CORS-safelisted response-header name"), and
    // the last one never.
    let apart = ["cache-control", "content-type", "content-length", "connection"];
    let styles = [
        Headers::Draft08.and(Headers::LegacyDelta),
        Headers::Draft07.and(Headers::LegacyEpoch),
        Headers::Draft06.and(Headers::LegacyDelta),
        Headers::LegacyEpoch,
        Headers::None,
    ];
    let mut seen = HashSet::new();
    let observing = RateLimitLayer::new(s1(), default().observe_only()).observed_header(true);
    let rejecting = each_rejection().into_iter().map(|(_, layer, _)| layer);
    for layer in rejecting.chain([observing]) {
        for style in styles.clone() {
            let app = Router::new()
                .fallback(async || "hi")
                .layer(layer.clone().headers(style));
            for content_type in ["application/json", "application/grpc", "application/grpc-web+proto"] {
                let request = support::get("/")
                    .method(Method::POST)
                    .header("content-type", content_type)
                    .header("content-length", "1000000");
                let rejected = send(&app, request).await;
                seen.extend(rejected.headers.keys().cloned());
            }
        }
    }
    let listed: BTreeSet<String> = Headers::names().iter().map(ToString::to_string).collect();
    let apart: BTreeSet<String> = apart.map(str::to_owned).into();
    let seen: BTreeSet<String> = seen.iter().map(ToString::to_string).collect();
    assert_eq!(seen, &listed | &apart);
}

#[tokio::test]
async fn each_format_has_its_content() {
    let denied = call(RateLimitLayer::new(s2(), default()).format(response::text(|_, _| "later"))).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.field("content-type"), Some("text/plain; charset=utf-8"));
    assert_eq!(denied.field("ratelimit"), Some("\"default\";r=0;t=42"));
    assert_eq!(denied.body, "later");
    assert_eq!(denied.field("retry-after"), Some("42"));

    let own = |rejection: Rejection<'_>, parts: &Parts| {
        let wait = match rejection {
            Rejection::Limited(decision) => decision.retry_after().expect("a wait"),
            _ => Duration::ZERO,
        };
        let response = Response::builder()
            .status(rejection.status())
            .header(header::RETRY_AFTER, "7")
            .header(header::CACHE_CONTROL, "private");
        response
            .body(format!("{} in {wait:?}", parts.uri).into())
            .expect("a good response")
    };
    let denied = call(RateLimitLayer::new(s2(), default()).format(own)).await;
    assert_eq!(denied.body, "/ in 41.2s");
    assert_eq!(denied.field("retry-after"), Some("7"), "a field of the format stays");
    assert_eq!(denied.field("cache-control"), Some("private"));
}

#[tokio::test]
async fn head_gets_the_fields_of_get_without_a_body_in_every_format() {
    let formats = [
        RateLimitLayer::new(s2(), default()),
        RateLimitLayer::new(s2(), default()).format(Problem),
        RateLimitLayer::new(s2(), default()).format(response::text(|_, _| "later")),
        RateLimitLayer::new(s2(), default()).format(response::text(|_, _| "")),
        RateLimitLayer::new(s2(), default()).format(response::json(|_, _| serde_json::json!({ "code": "slow-down" }))),
        RateLimitLayer::new(s2(), default()).format(response::html(|_, parts| format!("<h1>{}</h1>", parts.uri))),
        RateLimitLayer::new(s2(), default()).format(response::axum(|rejection, _| (rejection.status(), "later"))),
        RateLimitLayer::new(s2(), default()).format(Grpc::new().or(response::text(|_, _| "later"))),
    ];
    for layer in formats {
        let app = hello(layer);
        let to_get = send(&app, support::get("/")).await;
        let to_head = send(&app, support::get("/").method(Method::HEAD)).await;
        assert_eq!(to_head.status, StatusCode::TOO_MANY_REQUESTS);
        assert!(to_head.body.is_empty());
        assert_eq!(lines(&to_head), lines(&to_get));
        assert_eq!(to_head.field("content-type"), to_get.field("content-type"));
        assert_eq!(to_head.field("content-length"), Some(&*to_get.body.len().to_string()));
    }
}

#[tokio::test]
async fn an_empty_response_ends_with_its_header_section() {
    let response = hello(RateLimitLayer::new(s2(), default()).format(response::text(|_, _| "")))
        .oneshot(
            support::get("/")
                .body(axum::body::Body::empty())
                .expect("a good request"),
        )
        .await;
    let Ok(response) = response;
    assert!(http_body::Body::is_end_stream(response.body()));
}

#[tokio::test]
async fn a_cors_layer_outside_shows_the_fields_to_browsers_on_denials_too() {
    let cors = CorsLayer::new().allow_origin(Any).expose_headers(Headers::names());
    let policy = Policy::new("one", SlidingLog::per_minute(1)).key(key::ip());
    let app = hello(
        RateLimitLayer::new(Clock::new().memory_store(), policy).headers(Headers::Draft08.and(Headers::LegacyDelta)),
    )
    .layer(cors);
    let url = serve(app).await;
    let browser = Browser::http1();

    for status in [200, 429] {
        let received = browser.get(&url).await;
        assert_eq!(received.status, status);
        assert_eq!(received.field("access-control-allow-origin"), Some("*"));
        let exposed: Vec<HeaderName> = received
            .field("access-control-expose-headers")
            .expect("the list")
            .split(',')
            .map(|name| name.trim().parse().expect("a name"))
            .collect();
        for name in ["ratelimit", "ratelimit-policy", "x-ratelimit-remaining", "retry-after"] {
            assert!(
                exposed.contains(&HeaderName::from_static(name)),
                "{name} in {exposed:?}"
            );
        }
        // No field of ours is hidden.
        for line in lines(&received) {
            let (name, _) = line.split_once(':').expect("a field");
            assert!(exposed.iter().any(|exposed| exposed == name), "{name}");
        }
    }
}

/// Without a router, which wraps the bodies of layers.
#[tokio::test]
async fn a_cors_layer_goes_around_the_service_itself() {
    let hello =
        service_fn(async |_: Request<Full<Bytes>>| Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("hi"))));
    let service = ServiceBuilder::new()
        .layer(CorsLayer::new().allow_origin(Any).expose_headers(Headers::names()))
        .layer(RateLimitLayer::new(s2(), default()))
        .service(hello);

    for (method, status) in [(Method::OPTIONS, 200), (Method::POST, 429)] {
        let request = support::get("/")
            .method(&method)
            .header("origin", "https://example.com");
        let Ok(response) = service
            .clone()
            .oneshot(request.body(Full::default()).expect("a good request"))
            .await;
        let received = Received::read(response).await;
        assert_eq!(received.status, status, "{method}");
        assert_eq!(received.field("access-control-allow-origin"), Some("*"), "{method}");
    }
}

/// By default curl waits for one second; `Retry-After` is two.
#[tokio::test]
async fn curl_waits_for_retry_after_and_is_then_admitted() {
    const WINDOW: Duration = Duration::from_secs(2);
    let (clock, requests) = (Clock::new(), Arc::new(AtomicUsize::new(0)));
    let policy = Policy::new("one", SlidingLog::new(1, WINDOW)).key(key::ip());
    let app = hello(RateLimitLayer::new(clock.memory_store(), policy));
    // The window ends after the denial, however long curl takes to start.
    let url = serve(app.layer(map_request(move |request: Request<Body>| {
        if requests.fetch_add(1, Ordering::Relaxed) == 2 {
            clock.advance(WINDOW);
        }
        async { request }
    })));
    let url = url.await;
    assert_eq!(Browser::http1().get(&url).await.status, StatusCode::OK);

    let body = tempfile::NamedTempFile::new().expect("a file");
    let started = Instant::now();
    let output = tokio::process::Command::new("curl")
        .args([
            "-q",
            "--noproxy",
            "*",
            "--retry",
            "1",
            "-sS",
            "-w",
            "%{http_code}",
            &url,
            "-o",
        ])
        .arg(body.path())
        .stdin(Stdio::null())
        .output()
        .await
        .expect("curl runs; this test needs it on the PATH");
    let waited = started.elapsed();

    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "200", "{errors}");
    assert_eq!(std::fs::read_to_string(body.path()).expect("a body"), "hi");
    assert!(
        waited >= Duration::from_millis(1_900),
        "curl came back after {waited:?}"
    );
}
