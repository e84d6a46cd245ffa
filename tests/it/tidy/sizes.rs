//! No file of code is long.

use super::{files, read, without_tests};

/// The most lines that a file has, unit tests not counted.
const MOST: usize = 400;

#[test]
fn no_file_of_code_is_long() {
    let files: Vec<_> = ["src", "lua"].into_iter().flat_map(files).collect();
    let files = files
        .iter()
        .filter(|file| file.ends_with(".rs") || file.ends_with(".lua"));
    let lines: Vec<_> = files
        .map(|file| (file, without_tests(&read(file)).lines().count()))
        .collect();
    assert!(lines.len() > 50, "the files were found");
    let long: Vec<_> = lines.iter().filter(|(_, count)| *count > MOST).collect();
    assert!(
        long.is_empty(),
        "files with more than {MOST} lines, tests not counted: {long:?}"
    );
}
