//! The public API names types of those crates only that `Cargo.toml` lists, since a new major version of such a crate is one of this
//! crate, too; and its types can be shared.
//!
//! The list is that of `cargo check-external-types`, which needs a nightly toolchain; this reads what rustdoc writes as JSON.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use serde_json::Value;

use super::{read, root};
use crate::support::cargo;

/// The public API, as rustdoc writes it.
fn rustdoc() -> Value {
    let output = cargo()
        .args([
            "rustdoc",
            "--package",
            env!("CARGO_PKG_NAME"),
            "--locked",
            "--offline",
            "--lib",
            "--all-features",
            "--",
        ])
        .args([
            "-Z",
            "unstable-options",
            "--output-format",
            "json",
            "--cap-lints",
            "allow",
        ])
        .env("RUSTDOC", root().join(".ci/rustdoc-json"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json = fs::read(Path::new(env!("CARGO_TARGET_TMPDIR")).join("../doc/tower_quota.json"))
        .expect("rustdoc writes a file");
    serde_json::from_slice(&json).expect("rustdoc writes JSON")
}

/// Adds the types and traits of other crates below a value, each with the place where it is first found: they have an `id`, a
/// `path` and `args`.
fn collect(docs: &Value, value: &Value, place: &Value, found: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(fields) => {
            if let (Some(id), Some(_), Some(_)) = (fields.get("id"), fields.get("path"), fields.get("args")) {
                let summary = &docs["paths"][id.to_string()];
                let segments = summary["path"].as_array().into_iter().flatten();
                let path: Vec<_> = segments.filter_map(Value::as_str).collect();
                let is_external = summary["crate_id"].as_u64().is_some_and(|number| number != 0);
                // `pin_project!` has one in its `Unpin`, which is no type for others.
                if is_external && !path.contains(&"__private") {
                    found.entry(path.join("::")).or_insert_with(|| place.clone());
                }
            }
            fields.values().for_each(|value| collect(docs, value, place, found));
        }
        Value::Array(elements) => elements.iter().for_each(|value| collect(docs, value, place, found)),
        _ => {}
    }
}

/// Whether a pattern such as `http::*` or `http::Method` allows this path.
fn allows(pattern: &str, path: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => path.starts_with(start),
        None => path == pattern,
    }
}

fn assert_types_of_other_crates_are_listed(docs: &Value, listed: &[&str]) {
    let mut found = BTreeMap::new();
    for item in docs["index"].as_object().expect("items").values() {
        let implementation = &item["inner"]["impl"];
        // Those that every type has, from other crates.
        let is_blanket = !implementation["blanket_impl"].is_null() || implementation["is_synthetic"] == true;
        if item["crate_id"] == 0 && !is_blanket {
            collect(docs, &item["inner"], &item["span"], &mut found);
        }
    }
    for pattern in listed {
        let is_used = found.keys().any(|path| allows(pattern, path));
        assert!(is_used, "nothing in the API is of `{pattern}`");
    }
    let own = ["alloc::*", "core::*", "std::*"];
    found.retain(|path, _| !own.iter().chain(listed).any(|pattern| allows(pattern, path)));
    assert!(
        found.is_empty(),
        "not in `allowed_external_types` of Cargo.toml: {found:#?}"
    );
}

/// The traits that a type has in this list, as rustdoc finds them.
fn traits<'a>(docs: &'a Value, kind: &Value) -> BTreeSet<&'a str> {
    let implementations = kind["impls"].as_array().into_iter().flatten();
    let implementations = implementations.map(|id| &docs["index"][id.to_string()]["inner"]["impl"]);
    implementations
        .filter(|implementation| implementation["is_negative"] == false)
        .filter_map(|implementation| implementation["trait"]["path"].as_str())
        .map(|path| path.rsplit("::").next().unwrap_or(path))
        .collect()
}

/// Types that are neither futures nor errors, of which there is one for each request or body.
const NOT_CLONED: &str = "Acquire MemoryStoreBuilder Permit Receipt ResponseBody Slots";

fn assert_types_can_be_shared(docs: &Value) {
    let mut count = 0;
    for item in docs["index"].as_object().expect("items").values() {
        let kind = ["struct", "enum"].map(|kind| &item["inner"][kind]);
        let Some(kind) = kind.into_iter().find(|kind| !kind.is_null()) else {
            continue;
        };
        if item["crate_id"] == 0 && item["visibility"] == "public" {
            count += 1;
            let (name, has) = (item["name"].as_str().expect("a name"), traits(docs, kind));
            let is_one =
                has.contains("Future") || has.contains("Error") || NOT_CLONED.split(' ').any(|one| one == name);
            assert!(
                ["Debug", "Send", "Unpin"].iter().all(|one| has.contains(one)),
                "{name}: {has:?}"
            );
            assert!(has.contains("Sync") || has.contains("Future"), "{name} is not `Sync`");
            assert!(has.contains("Clone") || is_one, "{name} is not `Clone`");
        }
    }
    assert!(count > 50, "{count} types were found");
}

/// One test, since rustdoc runs for seconds.
#[test]
#[ignore = "needs rustdoc, which compiles the dependencies again: `.ci/run`"]
fn public_types_can_be_shared_and_those_of_other_crates_are_listed() {
    let docs = rustdoc();
    let manifest: Value = toml::from_str(&read("Cargo.toml")).expect("TOML");
    let list = &manifest["package"]["metadata"]["cargo_check_external_types"]["allowed_external_types"];
    let listed: Vec<_> = list
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    assert_types_of_other_crates_are_listed(&docs, &listed);
    assert_types_can_be_shared(&docs);
}
