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
    tokio::time::sleep(Duration::from_millis(100)).await;
    let text = log.text();
    assert_eq!(text.matches(LINE).count(), 1, "{text}");
    assert!(text.contains("logins, users"), "{text}");
    drop(mails);
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
