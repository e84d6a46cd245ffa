//! The workflow of GitHub agrees with the scripts in `.ci` and with the package.

use super::{package, read, root};

#[test]
fn the_workflow_runs_the_tests_on_every_server() {
    let (workflow, script) = (read(".github/workflows/ci.yml"), read(".ci/test-servers"));
    let servers: Vec<_> = script
        .lines()
        .filter_map(|line| line.trim().split_once(") path=").map(|(server, _)| server))
        .collect();
    assert_eq!(servers.len(), 5);
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

/// A release runs what a pull request runs.
#[test]
fn a_release_runs_the_scripts_of_the_workflow_and_stops_before_it_publishes() {
    let (workflow, release) = (read(".github/workflows/ci.yml"), read(".ci/release"));
    let scripts = workflow
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- run: .ci/"));
    let scripts: Vec<_> = scripts.filter_map(|command| command.split(' ').next()).collect();
    assert!(scripts.len() > 3, "{scripts:?}");
    for script in scripts {
        assert!(
            release.contains(&format!("step .ci/{script}\n")),
            ".ci/release does not run .ci/{script}"
        );
    }
    let commands = release.split("\ncat <<END\n").next().expect("the commands");
    for line in commands
        .lines()
        .filter(|line| line.contains("cargo publish") && !line.starts_with('#'))
    {
        assert!(line.ends_with("--dry-run"), "{line}");
    }
}

#[test]
fn the_image_is_built_with_the_rust_that_the_package_declares() {
    let (package, image) = (package(), read("examples/envoy/Dockerfile"));
    let version = package["rust_version"].as_str().expect("a rust-version");
    assert!(image.contains(&format!("\nFROM rust:{version}-")), "not rust:{version}");
    let build = "docker build --file examples/envoy/Dockerfile ";
    for file in [".github/workflows/ci.yml", "examples/envoy/Dockerfile"] {
        assert!(read(file).contains(build), "{file} has no `{build}`");
    }
    for path in image.lines().filter_map(|line| line.strip_prefix("COPY examples/")) {
        let path = path.split(' ').next().expect("a path");
        assert!(root().join("examples").join(path).is_file(), "{path}");
    }
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
