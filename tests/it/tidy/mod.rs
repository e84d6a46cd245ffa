//! What no compiler checks: how the code is divided, and what the package promises to those that depend on it.

mod compile_errors;
mod layout;
mod public_api;

use std::{fs, path::Path};

/// The folder of the package.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The text of a file of the package.
fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// A release runs what a pull request runs, and stops at `--dry-run`. An action is pinned by its commit: a tag can be moved.
#[test]
fn a_release_runs_what_the_workflow_runs_and_publishes_nothing() {
    let (workflow, release) = (read(".github/workflows/ci.yml"), read(".ci/release"));
    let after = |start: &'static str| workflow.lines().filter_map(move |line| Some(line.split_once(start)?.1));
    for command in after("- run: .ci/") {
        let script = command.split(' ').next().unwrap_or_default();
        assert!(release.contains(&format!("step .ci/{script}\n")), "{script}");
    }
    let commands = release.split("\ncat <<END\n").next().expect("the commands");
    for line in commands
        .lines()
        .filter(|line| line.contains("cargo publish") && !line.starts_with('#'))
    {
        assert!(line.ends_with("--dry-run"), "{line}");
    }

    for action in after("uses: ") {
        let (commit, _) = action.split_once(" # v").unwrap_or_default();
        let (_, commit) = commit.split_once('@').unwrap_or_default();
        assert!(
            commit.len() == 40 && commit.chars().all(|c| c.is_ascii_hexdigit()),
            "{action}"
        );
    }
}

/// `.ci/mutate-lua` refuses to run otherwise.
#[test]
fn the_changes_that_no_test_notices_are_of_lines_of_the_scripts() {
    let known = read(".ci/lua-mutants.txt");
    let changes: Vec<_> = known.lines().filter(|line| line.starts_with("lua/")).collect();
    assert!(!changes.is_empty());
    for change in changes {
        let (file, change) = change.split_once(": ").expect("a file and a change");
        let (code, _) = change.split_once("  ->  ").expect("the line before the change");
        let text = read(file);
        let mut lines = text.lines().filter_map(|line| line.split("--").next());
        assert!(lines.any(|line| line.trim() == code), "{file} has no line: {code}");
    }
}
