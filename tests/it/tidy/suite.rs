//! The files and tests of this suite are where others look for them.

use std::{collections::HashSet, fs, process::Command};

use super::{read, root};

#[test]
fn every_file_of_this_suite_is_part_of_it() {
    let main = read("tests/it/main.rs");
    for entry in fs::read_dir(root().join("tests/it")).expect("the suite") {
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

/// The names of the tests of this suite.
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
        // `--skip` takes a part of a name.
        let skipped: Vec<_> = tests.iter().filter(|name| name.contains(test)).collect();
        assert_eq!(skipped, [test]);
        assert!(!reason.is_empty(), "{test} has no reason");
    }
}
