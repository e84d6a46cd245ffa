//! The files of the project agree with each other, and its code has the structure that `CONTRIBUTING.md` describes.

mod auto_traits;
mod compile_errors;
mod docs;
mod language;
mod lua;
mod manifest;
mod public_types;
mod rooms;
mod sizes;
mod suite;
mod workflow;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// The folder of the package.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The text of a file of the package.
fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The files of text below a folder, by their paths in the package; none if there is no such folder.
fn files(folder: &str) -> Vec<String> {
    let (mut files, mut folders) = (Vec::new(), vec![PathBuf::from(folder)]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root().join(&folder)).into_iter().flatten() {
            let entry = entry.expect("an entry");
            let path = folder.join(entry.file_name());
            if entry.path().is_dir() {
                folders.push(path);
            } else if path.extension().is_none_or(|extension| extension != "png") {
                files.push(path.to_str().expect("a name in Unicode").to_owned());
            }
        }
    }
    files.sort();
    files
}

/// The lines of a file of Rust without those of its unit tests.
fn without_tests(text: &str) -> &str {
    text.split("\nmod tests {").next().unwrap_or(text)
}

/// The lines of a file of Rust without comments and unit tests.
fn code(text: &str) -> String {
    let lines = without_tests(text).lines();
    let code: Vec<_> = lines.filter(|line| !line.trim_start().starts_with("//")).collect();
    code.join("\n")
}

/// The output of `cargo metadata`.
fn metadata(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline"])
        .args(arguments)
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo writes JSON")
}

/// The packages of the workspace in the output of `cargo metadata`.
fn packages() -> Vec<Value> {
    let metadata = metadata(&["--no-deps"]);
    metadata["packages"].as_array().expect("packages").clone()
}

/// This package among them.
fn package() -> Value {
    let mut packages = packages().into_iter();
    let package = packages.find(|package| package["name"] == env!("CARGO_PKG_NAME"));
    package.expect("this package")
}
