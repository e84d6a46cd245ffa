//! The package declares the oldest Rust that its dependencies allow, and docs/start.md how many these are.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    process::Command,
};

use serde_json::Value;

use super::{metadata, read, root};

/// `1.88.0` as (1, 88).
fn rust_version(package: &Value) -> Option<(u32, u32)> {
    let mut numbers = package["rust_version"].as_str()?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn host() -> String {
    let output = Command::new("rustc").arg("-vV").output().expect("rustc runs");
    let text = String::from_utf8(output.stdout).expect("rustc writes text");
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.expect("a host").to_owned()
}

#[test]
fn the_declared_rust_is_the_oldest_that_all_dependencies_allow() {
    let metadata = metadata(&["--locked", "--all-features", "--filter-platform", &host()]);
    let by_id = |list: &Value| -> HashMap<String, Value> {
        let elements = list.as_array().expect("a list").iter();
        elements
            .map(|element| (element["id"].as_str().expect("an id").to_owned(), element.clone()))
            .collect()
    };
    let (packages, nodes) = (by_id(&metadata["packages"]), by_id(&metadata["resolve"]["nodes"]));
    let root = metadata["resolve"]["root"].as_str().expect("this package").to_owned();
    let ours = rust_version(&packages[&root]).expect("a rust-version");

    // What a user of the crate compiles: no dependencies for tests.
    let (mut seen, mut next, mut newest) = (HashSet::new(), vec![root.clone()], (0, 0));
    while let Some(id) = next.pop() {
        if !seen.insert(id.clone()) {
            continue;
        }
        let package = &packages[&id];
        let needed = rust_version(package).filter(|_| id != root).unwrap_or_default();
        newest = newest.max(needed);
        assert!(
            needed <= ours,
            "{} {} needs Rust {}",
            package["name"],
            package["version"],
            package["rust_version"]
        );
        for dependency in nodes[&id]["deps"].as_array().expect("dependencies") {
            let kinds = dependency["dep_kinds"].as_array().expect("kinds");
            if kinds.iter().any(|kind| kind["kind"] != "dev") {
                next.push(dependency["pkg"].as_str().expect("an id").to_owned());
            }
        }
    }
    assert!(seen.len() > 10, "the dependencies were found");
    assert_eq!(newest, ours, "no dependency needs the Rust that Cargo.toml declares");
}

/// The number of crates in a build, this one included.
#[cfg(target_os = "linux")] // other systems have crates of their own
fn crates(features: &[&str]) -> usize {
    let tree = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--locked",
            "--offline",
            "--package",
            "tower-quota",
            "--edges",
            "normal",
        ])
        .args(["--prefix", "none"])
        .args(features)
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let tree = String::from_utf8(tree.stdout).expect("text");
    // A line is a name, a version, and remarks in parentheses.
    let crates = tree.lines().filter_map(|line| line.split(" (").next());
    crates.filter(|line| !line.is_empty()).collect::<BTreeSet<_>>().len()
}

#[test]
#[cfg(target_os = "linux")]
fn the_docs_have_the_number_of_crates_in_a_build() {
    let page = read("docs/start.md");
    for (build, features) in [
        ("default: Redis through fred", &[][..]),
        (
            "`default-features = false`, feature `cluster`: Redis through redis-rs",
            &["--no-default-features", "--features", "cluster"],
        ),
        (
            "`default-features = false`: `MemoryStore` only",
            &["--no-default-features"],
        ),
        (
            "`default-features = false`, feature `axum`: `MemoryStore` and axum itself",
            &["--no-default-features", "--features", "axum"],
        ),
        (
            "`default-features = false`, feature `admin`: `MemoryStore`, axum and the page for operators",
            &["--no-default-features", "--features", "admin"],
        ),
        ("all", &["--all-features"]),
    ] {
        let row = format!("| {build} | {} |", crates(features));
        assert!(page.contains(&row), "docs/start.md has no `{row}`");
    }
}
