//! Policies of a file that no layer or limiter has.

use std::{fs, time::Duration};

use http::Request;
use serde_json::json;
use tower_quota::{Admin, Limiter, MemoryStore, Policies};

use crate::support::{Log, eventually, send};

const FILE: &str = "policies.mails.limit = 'sliding-log 3/h'
policies.logins.limit = 'sliding-log 5/min'
policies.users.limit = 'sliding-log 9/min'";

const LINE: &str = "policies of a file of limits are not used";

#[test]
fn unused_policies_are_logged_in_one_line() {
    let log = Log::capture();
    let policies = Policies::from_toml(FILE).expect("a good file");
    let _mails = policies.unkeyed("mails").expect("the policy");
    policies.clone().warn_of_unused();
    let text = log.text();
    assert_eq!(text.matches(LINE).count(), 1, "{text}");
    assert!(text.contains("logins, users") && !text.contains("mails"), "{text}");

    for name in ["logins", "users"] {
        let _policy = policies.unkeyed(name).expect("the policy");
    }
    policies.warn_of_unused();
    assert_eq!(log.text().matches(LINE).count(), 1);
}

#[tokio::test]
async fn policies_that_follow_a_file_log_it_once_after_the_first_interval() {
    let log = Log::capture();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("limits.toml");
    fs::write(&path, FILE).expect("a file");
    let live = Policies::from_file(&path).expect("a good file");
    live.reload_on_change(Duration::from_millis(20)).expect("in a runtime");
    // After the file is first read, as an application does.
    let mails = Limiter::new(MemoryStore::new(), live.unkeyed("mails").expect("the policy"));
    eventually("the line is logged", async || log.text().contains(LINE)).await;
    fs::write(&path, FILE.replace("3/h", "4/h")).expect("a file");
    eventually("the file is read again", async || {
        mails.peek("42").await.expect("in memory").limit() == 4
    })
    .await;
    let text = log.text();
    assert_eq!(text.matches(LINE).count(), 1, "{text}");
    let fields = format!("policies=\"logins, users\" file={path:?}");
    assert!(text.contains(&fields), "{text}");
}

#[test]
fn a_plan_whose_policies_keep_their_numbers_meets_no_others() {
    let read = |file: &str| Policies::from_toml(file).expect("a good file");
    let file = "policies.b = { limit = '3/h', key = 'ip' }";
    let plans = "plan = 'header:plan'\nplans.pro.a = { limit = '3/h', key = 'ip' }\nplans.free = {}";
    let live = read(&format!("{file}\n{plans}"));
    let _layer = live.layer(MemoryStore::new(), ["a"]).expect("it fits");
    let log = Log::capture();
    live.replace(&read(file)).expect("it fits");
    let text = log.text();
    assert!(text.contains("it keeps its last numbers policy=\"pro/a\""), "{text}");
    assert!(!text.contains("no such plan"), "{text}");
}

#[test]
fn a_load_logs_once_what_it_adds_that_nothing_uses_and_the_plans_that_it_removes() {
    let read = |lines: &[&str]| {
        let file = "policies.a = { limit = '3/h', key = 'ip' }\npolicies.old = { limit = '3/h', key = 'ip' }";
        Policies::from_toml(&format!("{}\n{file}", lines.join("\n"))).expect("a good file")
    };
    let pro = "plan = 'header:plan'\nplans.pro.a.limit = '30/h'";
    let gold = "plans.gold.a.limit = '90/h'\nplans.gold.b = { limit = '4/h', key = 'ip' }";
    let at_start = "plans.pro.b = { limit = '4/h', key = 'ip' }";
    let live = read(&[pro, "policies.c = { limit = '4/h', key = 'ip' }"]);
    let log = Log::capture();
    live.replace(&read(&[pro, at_start])).expect("it fits");
    assert!(!log.text().contains("WARN"), "no layer is built: {}", log.text());
    let _layer = live.layer(MemoryStore::new(), ["a", "b"]).expect("it fits");

    const REMOVED: &str = "no such plan anymore; its policies have the numbers of the plan `default`, or those outside of plans plan=\"pro\"";
    const VANISHED: &str = "it keeps its last numbers policy=\"pro/b\"";
    const SELECTOR: &str = "another `plan`, which selects plans from the next start on";
    let unused = |names: &str| format!("{LINE}: no layer or limiter has them policies=\"{names}\"");
    let next_start = |names: &str| {
        format!(
            "policies of a file of limits apply from the next start on: layers and limiters have them then policies=\"{names}\""
        )
    };
    for (lines, expected) in [
        (
            &[
                pro,
                at_start,
                "policies.typo.limit = '1/h'",
                "policies.slip.limit = '1/h'",
            ][..],
            &[unused("slip, typo")][..],
        ),
        (
            &[
                pro,
                at_start,
                "policies.typo.limit = '2/h'",
                "policies.slip.limit = '1/h'",
            ],
            &[],
        ),
        (&[pro, at_start, gold], &[next_start("gold/a, gold/b")]),
        (
            &[pro, at_start, gold, "plans.gold.c.limit = '1/h'"],
            &[unused("gold/c"), next_start("gold/a, gold/b")],
        ),
        // Requests without a plan meet it after the next start.
        (
            &[pro, at_start, "policies.b = { limit = '1/h', key = 'ip' }"],
            &[next_start("b")],
        ),
        (
            &["plan = 'header:tier'\nplans.pro.a.limit = '30/h'", at_start],
            &[SELECTOR.to_owned()],
        ),
        (
            &["plan = 'header:tier'\nplans.default.a.limit = '2/h'"],
            &[REMOVED.to_owned(), VANISHED.to_owned()],
        ),
        (
            &["plan = 'header:tier'\nplans.pro.a.limit = '2/h'", at_start],
            &[REMOVED.replace("pro", "default")],
        ),
        (&[], &[REMOVED.to_owned(), VANISHED.to_owned()]),
    ] {
        let log = Log::capture();
        live.replace(&read(lines)).expect("it fits");
        let text = log.text();
        assert_eq!(text.matches("WARN").count(), expected.len(), "{lines:?}: {text}");
        for line in expected {
            assert!(text.contains(&**line), "{lines:?}: {text}");
        }
    }
}

/// Plans are built at a start, of all that the file has then.
#[test]
fn a_load_that_the_next_start_would_refuse_is_refused() {
    const BASE: &str = "plan = 'header:plan'
        policies.a = { limit = '7/min', key = 'ip' }
        plans.pro.a.limit = '30/min'";
    let parse = |text: &str| Policies::from_toml(text).expect("a good file");
    let live = parse(BASE);
    let _layer = live.layer(MemoryStore::new(), ["a"]).expect("it fits");
    for (text, fault) in [
        (BASE.replace("header:plan", "extension:plna"), "`extension:plna`"),
        (BASE.replace("plan = 'header:plan'", ""), "`plans` need a `plan`"),
        (
            format!("{BASE}\nplans.gold.a = {{ limit = '7/min', key = 'extension:nope' }}"),
            "`extension:nope`",
        ),
        (
            format!("{BASE}\nplans.gold.a = {{ limit = '7/min', cost = 9 }}"),
            "a cost of at most 7",
        ),
        (
            format!("{BASE}\nplans.gold.a = {{ limit = '7/min', max-waiting = 9 }}"),
            "max-waiting",
        ),
    ] {
        let start = parse(&text).layer(MemoryStore::new(), ["a"]);
        let start = start.map(drop).expect_err(&text).to_string();
        let error = live.replace(&parse(&text)).expect_err(&text).to_string();
        assert!(error.contains(fault), "{text}: {error}");
        assert!(start.contains(fault), "{text}: {start}");
        assert_eq!(live.fault().map(|fault| fault.to_string()), Some(error));
    }
    // The plan of requests without one.
    let with_plans = "plan = 'header:plan'
        policies.b = { limit = '7/min', key = 'ip' }
        plans.pro.a = { limit = '7/min', key = 'ip' }";
    let of_pro = parse(with_plans);
    let _plans = of_pro.plans(["a"]).expect("it fits");
    let without_key = parse(&format!("{with_plans}\npolicies.a.limit = '1/min'"));
    let error = of_pro.replace(&without_key).expect_err("it has no key");
    assert!(error.to_string().contains("has no key"), "{error}");

    live.replace(&parse(&format!(
        "{BASE}\nplans.gold.a = {{ limit = '7/min', cost = 7 }}"
    )))
    .expect("it can start");
}

#[test]
fn what_an_application_does_not_take_by_plans_is_not_announced_for_the_next_start() {
    let file = "policies.a = { limit = '3/h', key = 'ip' }";
    let live = Policies::from_toml(file).expect("a good file");
    let _policy = live.get("a").expect("a policy");
    let with_plans = format!("plan = 'header:plan'\n{file}\nplans.pro.a.limit = '9/h'");
    let log = Log::capture();
    live.replace(&Policies::from_toml(&with_plans).expect("a good file"))
        .expect("it fits");
    let text = log.text();
    assert!(text.contains(LINE) && text.contains("pro/a"), "{text}");

    let live = Policies::from_toml(file).expect("a good file");
    let _layer = live.layer(MemoryStore::new(), ["a"]).expect("it fits");
    let log = Log::capture();
    live.replace(&Policies::from_toml(&with_plans).expect("a good file"))
        .expect("it fits");
    let text = log.text();
    assert!(
        text.contains("from the next start on") && text.contains("pro/a"),
        "{text}"
    );
    assert_eq!(text.matches("WARN").count(), 1, "{text}");
}

#[tokio::test]
async fn the_report_of_an_admin_marks_them() {
    let policies = Policies::from_toml(FILE).expect("a good file");
    let live = Policies::from_toml("policies.live.limit = 'sliding-log 3/h'").expect("a good file");
    let mails = Limiter::new(MemoryStore::new(), policies.unkeyed("mails").expect("the policy"));
    let admin = Admin::new().limiter(&mails).policies(&policies).policies(&live);
    let admin = admin.router_behind_authentication();
    for (unused, name) in [
        (json!(["logins", "users", "live"]), "live"),
        (json!(["logins", "users"]), ""),
    ] {
        let report = send(&admin, Request::get("/report")).await.json();
        assert_eq!(report["unused_policies"], unused);
        if !name.is_empty() {
            let _policy = live.unkeyed(name).expect("the policy");
        }
    }
}
