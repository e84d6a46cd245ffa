//! Policies of one name in several layers and limiters on one store.

use std::fs;

use tower_quota::{Limit, Limiter, MemoryStore, Plans, Policies, Policy, RateLimitLayer, SlidingLog, key};

use crate::support::Log;

fn api(quota: u64) -> Policy {
    Policy::new("api", SlidingLog::per_minute(quota)).key(key::ip())
}

fn assert_names_both(error: &str) {
    for part in [
        "`api`",
        "`sliding-log 10/min` here",
        "`sliding-log 100/min`",
        "give one of them another name",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn two_limits_under_one_name_are_an_error_that_names_both() {
    let store = MemoryStore::new();
    let outer = RateLimitLayer::try_new(store.clone(), api(100)).expect("the first of its name");
    let inner = RateLimitLayer::try_new(
        store.clone(),
        [Policy::new("other", SlidingLog::per_hour(1)).key(key::ip()), api(10)],
    );
    assert_names_both(&inner.unwrap_err().to_string());
    assert_names_both(&Limiter::try_new(store.clone(), api(10)).unwrap_err().to_string());

    // Of equal ones the count is shared, and other stores have counts of their own.
    assert!(RateLimitLayer::try_new(store.clone(), api(100).cost(5)).is_ok());
    assert!(Limiter::try_new(store.clone(), api(100)).is_ok());
    assert!(RateLimitLayer::try_new(MemoryStore::new(), api(10)).is_ok());

    drop(outer);
    assert!(RateLimitLayer::try_new(store, api(10)).is_ok(), "the other one is gone");
}

#[test]
fn a_constructor_without_a_result_logs_them_once() {
    let store = MemoryStore::new();
    let log = Log::capture();
    let _outer = RateLimitLayer::new(store.clone(), api(100));
    assert_eq!(log.text(), "");
    let _inner = RateLimitLayer::new(store.clone(), api(10)).retry_jitter(std::time::Duration::from_secs(1));
    let text = log.text();
    let [line] = text.lines().collect::<Vec<_>>()[..] else {
        panic!("{text}")
    };
    assert!(
        line.contains(" ERROR ") && line.contains("two limits have one name"),
        "{line}"
    );
    assert_names_both(line);

    let _limiter = Limiter::new(store, api(10));
    assert_eq!(log.text().lines().count(), 2, "{}", log.text());
}

#[test]
fn the_limits_of_plans_are_those_of_one_policy() {
    let store = MemoryStore::new();
    let plans = || Plans::new("free", api(10)).plan("pro", api(100)).by(|_| None);
    let _layer = RateLimitLayer::try_new(store.clone(), plans()).expect("the first of its name");
    assert!(RateLimitLayer::try_new(store.clone(), plans()).is_ok());
    assert!(Limiter::try_new(store.clone(), api(100)).is_ok(), "that of one plan");
    assert!(Limiter::try_new(store, api(50)).is_err(), "that of no plan");
}

#[test]
fn chosen_limits_and_those_that_count_nothing_are_no_error() {
    let store = MemoryStore::new();
    let _layer = RateLimitLayer::try_new(store.clone(), api(100)).expect("the first of its name");
    let chosen = Policy::with_limit_fn("api", |_| SlidingLog::per_minute(10)).key(key::ip());
    assert!(RateLimitLayer::try_new(store.clone(), chosen).is_ok());
    assert!(Limiter::try_new(store, Policy::new("api", tower_quota::Limit::DenyAll)).is_ok());
}

#[test]
fn policies_of_one_file_change_together_and_a_reload_beside_code_is_logged() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("limits.toml");
    let write = |quota| {
        let text = format!("[policies.api]\nlimit = \"sliding-log {quota}/min\"\nkey = \"ip\"\n");
        fs::write(&path, text).expect("a file");
    };
    write(100);
    let file = Policies::from_file(&path).expect("a valid file");
    let store = MemoryStore::new();
    let of_file = || RateLimitLayer::try_new(store.clone(), file.get("api").expect("a policy")).expect("a layer");
    let layers = [of_file(), of_file()];
    let log = Log::capture();
    write(10);
    file.reload().expect("a valid file");
    assert_eq!(log.text().matches("ERROR").count(), 0, "{}", log.text());

    drop(layers);
    let _layer = of_file();
    let _code = RateLimitLayer::try_new(store.clone(), api(10)).expect("the limit of the file");
    write(100);
    file.reload().expect("a valid file");
    let text = log.text();
    let errors: Vec<_> = text.lines().filter(|line| line.contains(" ERROR ")).collect();
    assert_eq!(errors.len(), 1, "{text}");
    assert!(
        errors[0].contains("`sliding-log 100/min` here, and `sliding-log 10/min`"),
        "{text}"
    );
}

/// `Asia/Calcutta` is a link to `Asia/Kolkata`, and counts have the name.
#[test]
fn two_names_of_one_time_zone_are_two_limits() {
    let leave = |zone: &str| {
        let limit: Limit = format!("fixed-window 3/day {zone}").parse().expect("a limit");
        Policy::new("leave", limit).key(key::ip())
    };
    let store = MemoryStore::new();
    let _layer = RateLimitLayer::try_new(store.clone(), leave("Asia/Calcutta")).expect("the first of its name");
    assert!(RateLimitLayer::try_new(store.clone(), leave("Asia/Calcutta")).is_ok());
    let error = RateLimitLayer::try_new(store, leave("Asia/Kolkata"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("Asia/Kolkata") && error.contains("Asia/Calcutta"),
        "{error}"
    );
}
