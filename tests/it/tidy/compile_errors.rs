//! The compiler prints the fix of each mistake in `mistakes.rs`, whose lines after `//~` are sentences of this crate. What else it
//! prints differs between compilers.

use std::{path::PathBuf, process::Command};

use serde_json::Value;

use super::{read, root};
use crate::support::cargo;

const MISTAKES: &str = "tests/it/tidy/mistakes.rs";

/// The library as this suite uses it, which is built already.
fn library() -> PathBuf {
    let output = cargo()
        .args(["test", "--no-run", "--locked", "--offline", "--all-features"])
        .args(["--test", "it", "--message-format", "json"])
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let text = String::from_utf8(output.stdout).expect("cargo writes text");
    let artifacts = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut files = artifacts
        .filter(|artifact| artifact["target"]["name"] == "tower_quota" && artifact["target"]["kind"][0] == "lib")
        .flat_map(|artifact| artifact["filenames"].as_array().cloned().unwrap_or_default())
        .filter_map(|file| file.as_str().map(PathBuf::from));
    files
        .find(|file| file.extension().is_some_and(|extension| extension == "rlib"))
        .expect("cargo names the library")
}

#[test]
fn the_compiler_prints_the_fix_of_a_mistake() {
    let (folder, library) = (tempfile::tempdir().expect("a folder"), library());
    let output = Command::new("rustc")
        .args([
            "--edition",
            "2024",
            "--emit",
            "metadata",
            "--crate-type",
            "lib",
            "--out-dir",
        ])
        .arg(folder.path())
        .args([
            "-L",
            &format!("dependency={}", library.parent().expect("a folder").display()),
        ])
        .args(["--extern", &format!("tower_quota={}", library.display()), MISTAKES])
        .current_dir(root())
        .output()
        .expect("rustc runs");
    let printed = String::from_utf8(output.stderr).expect("rustc writes text");

    let mistakes = read(MISTAKES);
    let sentences: Vec<_> = mistakes
        .lines()
        .filter_map(|line| line.trim().strip_prefix("//~ "))
        .collect();
    assert!(sentences.len() > 15, "the sentences were found");
    for sentence in sentences {
        assert!(printed.contains(sentence), "no `{sentence}` in\n{printed}");
    }
}
