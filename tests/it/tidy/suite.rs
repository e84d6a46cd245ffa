//! The files and tests of this suite are where others look for them.

use std::{collections::HashSet, process::Command};

use super::{files, read};

#[test]
fn every_file_of_this_suite_is_part_of_it() {
    // Programs that do not compile.
    let is_test = |file: &String| file.ends_with(".rs") && !file.contains("/compile_errors/");
    for file in files("tests/it").into_iter().filter(is_test) {
        let (folder, name) = file.trim_end_matches("/mod.rs").rsplit_once('/').expect("a folder");
        let parent = match folder {
            "tests/it" => "tests/it/main.rs".to_owned(),
            folder => format!("{folder}/mod.rs"),
        };
        let name = name.trim_end_matches(".rs");
        let is_part = name == "main" || read(&parent).contains(&format!("mod {name};"));
        assert!(is_part, "{parent} has no `mod {name};`");
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
