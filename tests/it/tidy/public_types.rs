//! The public API names types of those crates only that `Cargo.toml` lists: a new major version of such a crate is one of this
//! crate, too.
//!
//! The list is that of `cargo check-external-types`, which needs a nightly toolchain; this reads what rustdoc writes as JSON.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use serde_json::Value;

use super::{metadata, package, read, root};
use crate::support::cargo;

/// The test of what every public type can do.
const AUTO_TRAITS: &str = "tests/it/tidy/auto_traits.rs";

/// The public API, as rustdoc writes it.
fn rustdoc() -> Value {
    let metadata = metadata(&["--no-deps"]);
    let target = Path::new(metadata["target_directory"].as_str().expect("a folder"));
    let output = cargo()
        .args([
            "rustdoc",
            "--package",
            env!("CARGO_PKG_NAME"),
            "--locked",
            "--offline",
            "--lib",
        ])
        .args(["--all-features", "--"])
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
    let json = fs::read(target.join("doc/tower_quota.json")).expect("rustdoc writes a file");
    serde_json::from_slice(&json).expect("rustdoc writes JSON")
}

/// The types and traits of other crates in public signatures, and where each is first found.
fn external_types(docs: &Value) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for item in docs["index"].as_object().expect("items").values() {
        let implementation = &item["inner"]["impl"];
        // Those that every type has, from other crates.
        let is_blanket = !implementation["blanket_impl"].is_null() || implementation["is_synthetic"] == true;
        if item["crate_id"] == 0 && !is_blanket {
            collect(docs, &item["inner"], &place(item), &mut found);
        }
    }
    found
}

/// The name and the place of an item.
fn place(item: &Value) -> String {
    let (file, line) = (&item["span"]["filename"], &item["span"]["begin"][0]);
    let file = file.as_str().unwrap_or("a macro");
    match item["name"].as_str() {
        Some(name) => format!("`{name}` ({file}:{line})"),
        None => format!("{file}:{line}"),
    }
}

/// Adds the types below a value. A type and a trait have an `id`, a `path` and `args`.
fn collect(docs: &Value, value: &Value, place: &str, found: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(fields) => {
            if let (Some(id), Some(_), Some(_)) = (fields.get("id"), fields.get("path"), fields.get("args")) {
                let summary = &docs["paths"][id.to_string()];
                if summary["crate_id"].as_u64().is_some_and(|number| number != 0) {
                    let segments = summary["path"].as_array().into_iter().flatten();
                    let path: Vec<_> = segments.filter_map(Value::as_str).collect();
                    // `pin_project!` has one in its `Unpin`, which is no type for others.
                    if path.contains(&"__private") {
                        return;
                    }
                    found.entry(path.join("::")).or_insert_with(|| place.to_owned());
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

/// One test, since rustdoc runs for seconds.
#[test]
#[ignore = "needs rustdoc, which compiles the dependencies again: `.ci/test`"]
fn public_signatures_name_types_of_listed_crates_and_every_public_type_is_tested() {
    let docs = rustdoc();
    assert_signatures_name_types_of_listed_crates_only(&docs);
    assert_every_type_is_in_the_test_of_auto_traits(&docs);
}

fn assert_signatures_name_types_of_listed_crates_only(docs: &Value) {
    let package = package();
    let list = &package["metadata"]["cargo_check_external_types"]["allowed_external_types"];
    let patterns: Vec<_> = list
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let mut found = external_types(docs);
    found.retain(|path, _| {
        !["alloc::*", "core::*", "std::*"]
            .iter()
            .any(|pattern| allows(pattern, path))
    });

    for pattern in &patterns {
        assert!(
            found.keys().any(|path| allows(pattern, path)),
            "nothing in the API is of `{pattern}`"
        );
    }
    found.retain(|path, _| !patterns.iter().any(|pattern| allows(pattern, path)));
    let lines: Vec<_> = found.iter().map(|(path, place)| format!("{path} in {place}")).collect();
    assert!(
        lines.is_empty(),
        "types that are not in `allowed_external_types` of Cargo.toml:\n{}",
        lines.join("\n")
    );
}

fn assert_every_type_is_in_the_test_of_auto_traits(docs: &Value) {
    let text = read(AUTO_TRAITS);
    let tests = &text[text.find("#[test]").expect("a test")..];
    let tested: BTreeSet<_> = tests.split(|c: char| !c.is_alphanumeric()).collect();
    let items = docs["index"].as_object().expect("items").values();
    let types = items.filter(|item| {
        let is_type = ["struct", "enum", "union"]
            .iter()
            .any(|kind| !item["inner"][kind].is_null());
        item["crate_id"] == 0 && item["visibility"] == "public" && is_type
    });
    let names: Vec<_> = types.filter_map(|item| item["name"].as_str()).collect();
    assert!(names.contains(&"Decision"), "{names:?}");

    let missing: Vec<_> = names.iter().filter(|name| !tested.contains(**name)).collect();
    assert!(missing.is_empty(), "not in {AUTO_TRAITS}: {missing:?}");
}
