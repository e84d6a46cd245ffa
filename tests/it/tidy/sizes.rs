//! No file of code is long.

use std::collections::BTreeMap;

use super::{assert_all_needed, files, read, source::Source};

/// The most lines that a file has, without modules that are compiled for tests only.
const MOST: usize = 400;

/// Files that are longer and will be split.
const KNOWN: &[&str] = &[];

/// The lines of each file of code, without modules that are compiled for tests only.
fn lines() -> BTreeMap<String, usize> {
    let scripts = files("lua").into_iter().filter(|file| file.ends_with(".lua"));
    let mut lines = Source::read("src").lines;
    lines.extend(scripts.map(|file| {
        let count = read(&file).lines().count();
        (file, count)
    }));
    lines
}

#[test]
fn no_file_of_code_is_long() {
    let lines = lines();
    assert!(lines.len() > 50, "the files were found");

    let is_long = |file: &&str| lines.get(*file).is_some_and(|lines| *lines > MOST);
    let long: Vec<_> = lines.keys().map(String::as_str).filter(is_long).collect();
    let new: Vec<_> = long
        .iter()
        .filter(|file| !KNOWN.contains(file))
        .map(|file| format!("{file}: {}", lines[*file]))
        .collect();
    assert!(
        new.is_empty(),
        "files with more than {MOST} lines, tests not counted:\n{}",
        new.join("\n")
    );
    assert_all_needed(KNOWN.iter().copied(), |file| is_long(&file));
}

#[test]
fn modules_for_tests_do_not_count() {
    let source = Source::of(&[
        ("lib.rs", "mod a;\n#[cfg(test)]\nmod b;\n#[cfg(test)]\nfn f() {}\n"),
        (
            "a.rs",
            "fn f() {}\nmod c {\n    #[cfg(test)]\n    mod tests {\n        fn g() {}\n    }\n}\n\n#[allow(unused)]\n#[cfg(test)]\nmod tests {\n}\n",
        ),
    ]);
    let expected = [("src/a.rs", 4), ("src/lib.rs", 5)];
    assert_eq!(
        source.lines,
        expected.map(|(file, lines)| (file.to_owned(), lines)).into()
    );
}
