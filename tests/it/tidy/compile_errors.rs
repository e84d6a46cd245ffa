//! Mistakes in the use of the crate, and what the compiler prints for them.
//!
//! Each file in `tests/it/tidy/compile_errors/` is a program with one mistake. The compiler prints its lines after `//~`, whatever
//! else it prints: these are sentences of this crate, and the rest differs between compilers.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::support::cargo;

/// The program of a mistake, and the sentences that the compiler prints for it.
struct Mistake {
    program: PathBuf,
    sentences: Vec<String>,
}

fn mistakes() -> Vec<Mistake> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/tidy/compile_errors");
    let entries = fs::read_dir(folder).expect("the folder");
    let mistakes = entries.map(|entry| {
        let program = entry.expect("an entry").path();
        let text = fs::read_to_string(&program).expect("a program");
        let sentences = text.lines().filter_map(|line| line.strip_prefix("//~ "));
        Mistake {
            sentences: sentences.map(str::to_owned).collect(),
            program,
        }
    });
    mistakes.collect()
}

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

/// What the compiler prints for a program that does not compile.
fn printed(program: &Path, library: &Path) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let dependencies = library.parent().expect("a folder").display();
    let output = Command::new("rustc")
        .args(["--edition", "2024", "--emit", "metadata", "--out-dir"])
        .arg(folder.path())
        .args(["-L", &format!("dependency={dependencies}")])
        .args(["--extern", &format!("tower_quota={}", library.display())])
        .arg(program)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("rustc runs");
    assert!(!output.status.success(), "{} compiles", program.display());
    String::from_utf8(output.stderr).expect("rustc writes text")
}

#[test]
fn the_compiler_prints_the_fix_of_a_mistake() {
    let (mistakes, library) = (mistakes(), library());
    assert!(mistakes.len() >= 10, "the programs were found");

    for Mistake { program, sentences } in mistakes {
        let printed = printed(&program, &library);
        assert!(!sentences.is_empty(), "{} names no sentence", program.display());
        for sentence in sentences {
            assert!(
                printed.contains(&sentence),
                "{}: no `{sentence}` in\n{printed}",
                program.display()
            );
        }
    }
}
