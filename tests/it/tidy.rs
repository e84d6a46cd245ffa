//! The files of the project agree with each other.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::Path,
    process::Command,
};

use serde_json::Value;

fn read(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// What cargo knows of this package and of all that it may depend on.
fn metadata(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline"])
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo writes JSON")
}

fn package() -> Value {
    metadata(&["--no-deps"])["packages"][0].clone()
}

#[test]
fn the_version_is_in_the_changelog() {
    let heading = format!("## [{}]", env!("CARGO_PKG_VERSION"));
    assert!(
        read("CHANGELOG.md").contains(&heading),
        "CHANGELOG.md has no `{heading}`"
    );
}

#[test]
fn the_docs_and_the_readme_have_every_feature() {
    let (docs, readme, package) = (read("src/lib.rs"), read("README.md"), package());
    let features = package["features"].as_object().expect("features");
    for feature in features.keys().filter(|feature| *feature != "default") {
        assert!(
            docs.contains(&format!("//! | `{feature}` |")),
            "`{feature}` is not in the table of src/lib.rs"
        );
        assert!(
            readme.contains(&format!("| `{feature}` |")),
            "`{feature}` is not in the table of README.md"
        );
    }
}

#[test]
fn the_readme_has_every_algorithm() {
    let (readme, limit) = (read("README.md"), read("src/limit/mod.rs"));
    let (_, variants) = limit.split_once("pub enum Limit {").expect("the enum");
    let (variants, _) = variants.split_once("\n}").expect("its end");
    let names = variants
        .lines()
        .filter_map(|line| line.trim().split_once('('))
        .map(|(name, _)| name);
    for name in names.filter(|name| name.chars().all(char::is_alphanumeric)) {
        assert!(
            readme.contains(&format!("| `{name}` |")),
            "`{name}` is not in the table of README.md"
        );
    }
}

#[test]
fn every_example_says_how_to_run_it() {
    for target in package()["targets"].as_array().expect("targets") {
        if target["kind"][0] == "example" {
            let name = target["name"].as_str().expect("a name");
            let source = read(&format!("examples/{name}.rs"));
            let command = format!("cargo run --example {name}");
            assert!(source.contains(&command), "examples/{name}.rs does not say `{command}`");
        }
    }
}

#[test]
fn every_file_of_this_suite_is_part_of_it() {
    let main = read("tests/it/main.rs");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it");
    for entry in fs::read_dir(folder).expect("the suite") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name");
        if name != "main" {
            assert!(
                main.contains(&format!("mod {name};")),
                "tests/it/main.rs has no `mod {name};`"
            );
        }
    }
}

/// `BLESS=1` writes it anew.
#[test]
fn the_generated_module_of_the_examples_is_what_tonic_makes_of_the_proto() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().expect("a folder");
    let descriptors = protox::compile(["examples/hello.proto"], [root]).expect("the proto is good");
    tonic_prost_build::configure()
        .out_dir(folder.path())
        .compile_fds(descriptors)
        .expect("tonic takes it");
    let fresh = fs::read_to_string(folder.path().join("hello.rs")).expect("what it made");

    let checked_in = root.join("examples/generated/hello.rs");
    if std::env::var_os("BLESS").is_some() {
        fs::write(&checked_in, &fresh).expect("a file");
    }
    assert!(
        fs::read_to_string(&checked_in).is_ok_and(|old| old == fresh),
        "examples/generated/hello.rs is not what tonic makes of examples/hello.proto; \
         run this test with BLESS=1, and check in what it writes"
    );
}

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
fn no_dependency_needs_a_newer_rust_than_the_package_says() {
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

    // All that a user of the crate compiles: dependencies that are not only for tests.
    let (mut seen, mut next) = (HashSet::new(), vec![root]);
    while let Some(id) = next.pop() {
        if !seen.insert(id.clone()) {
            continue;
        }
        let package = &packages[&id];
        assert!(
            rust_version(package) <= Some(ours),
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
}
