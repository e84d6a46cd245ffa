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

/// A caller that changes such a value with every request has a new quota each time.
#[test]
fn no_example_counts_by_what_a_client_chooses() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![root.join("README.md")];
    let mut folders = vec![root.join("src"), root.join("examples"), root.join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten() {
            let path = entry.expect("an entry").path();
            match path.is_dir() {
                true => folders.push(path),
                false => files.push(path),
            }
        }
    }

    for path in files {
        let text = fs::read_to_string(&path).unwrap_or_default();
        // Its docs describe which headers may be keys.
        let is_source = path.starts_with(root.join("src"));
        if path.ends_with("src/key/header.rs") {
            continue;
        }
        let mut in_example = false;
        for line in text.lines() {
            let docs = line
                .trim_start()
                .strip_prefix("///")
                .or(line.trim_start().strip_prefix("//!"));
            if docs.unwrap_or(line).trim_start().starts_with("```") {
                in_example = !in_example;
            }
            let example = if is_source {
                docs.filter(|_| in_example)
            } else {
                Some(line)
            };
            let example = example.unwrap_or_default();
            for chosen in [
                "key::header(",
                "\"header:",
                ".host()",
                "key(key::path())",
                "key(key::method())",
            ] {
                assert!(!example.contains(chosen), "{}: `{chosen}` in `{line}`", path.display());
            }
        }
    }
}

#[test]
fn the_readme_has_every_algorithm() {
    let (readme, limit) = (read("README.md"), read("src/limit/limit.rs"));
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

/// The tests of this suite.
fn tests() -> HashSet<String> {
    let program = std::env::current_exe().expect("this binary");
    let output = Command::new(program)
        .args(["--list", "--format", "terse"])
        .output()
        .expect("this binary runs");
    let text = String::from_utf8(output.stdout).expect("names are text");
    let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
    names.map(str::to_owned).collect()
}

#[test]
fn a_test_that_a_server_skips_exists_and_has_a_reason() {
    let (tests, script) = (tests(), read(".ci/test-servers"));
    assert!(tests.len() > 1_000, "the tests were found");
    for line in read(".ci/skipped-tests").lines().filter(|line| !line.starts_with('#')) {
        let [server, test, reason] = line.split(" | ").collect::<Vec<_>>()[..] else {
            panic!("`{line}` is not: server | test | reason")
        };
        assert!(script.contains(&format!("{server}) path=")), "no server is {server}");
        // The harness looks for a part of a name.
        let skipped: Vec<_> = tests.iter().filter(|name| name.contains(test)).collect();
        assert_eq!(skipped, [test]);
        assert!(!reason.is_empty(), "{test} has no reason");
    }
}

#[test]
fn the_workflow_runs_the_tests_on_every_server() {
    let (workflow, script) = (read(".github/workflows/ci.yml"), read(".ci/test-servers"));
    let servers: Vec<_> = script
        .lines()
        .filter_map(|line| line.trim().split_once(") path=").map(|(server, _)| server))
        .collect();
    assert_eq!(servers.len(), 3);
    let matrix = format!("server: [{}]", servers.join(", "));
    assert!(workflow.contains(&matrix), "ci.yml has no `{matrix}`");
}

#[test]
fn the_workflow_builds_with_the_oldest_rust_that_the_package_declares() {
    let package = package();
    let version = package["rust_version"].as_str().expect("a rust-version");
    assert!(read("README.md").contains(&format!("It needs Rust {version}.")));
    let install = "rustup toolchain install \"$(sed -n 's/^rust-version = \"\\(.*\\)\"/\\1/p' Cargo.toml)\"";
    let workflow = read(".github/workflows/ci.yml");
    assert!(workflow.contains(install), "ci.yml has no `{install}`");
}

/// A tag can be moved; a commit cannot.
#[test]
fn the_workflow_pins_each_action_by_commit() {
    let workflow = read(".github/workflows/ci.yml");
    for action in workflow
        .lines()
        .filter_map(|line| line.split_once("uses: ").map(|(_, action)| action))
    {
        let (commit, version) = action
            .split_once('@')
            .and_then(|(_, pin)| pin.split_once(" # v"))
            .unwrap_or_else(|| panic!("`{action}` is not: action@commit # version"));
        let hex = commit.len() == 40 && commit.chars().all(|char| char.is_ascii_hexdigit());
        assert!(hex && !version.is_empty(), "{action}");
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
