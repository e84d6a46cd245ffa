//! Docs, comments and names are written in plain technical English: the subject of a sentence is a thing.

use super::{files, read};

const WORDS: [&str; 7] = ["who", "whom", "whoever", "nobody", "somebody", "everybody", "anybody"];

/// Whether a line has one of the words by itself: `a_who_b` and `who's` have it, `whole` has not.
fn has_word(line: &str) -> bool {
    let mut words = line.split(|char: char| !char.is_alphanumeric());
    words.any(|word| WORDS.iter().any(|one| word.eq_ignore_ascii_case(one)))
}

#[test]
fn sentences_are_about_things() {
    let folders = ["src", "lua", "docs", "examples"];
    let mut all: Vec<_> = folders.into_iter().flat_map(files).collect();
    all.extend(["README.md".to_owned(), "CHANGELOG.md".to_owned()]);
    // Made by tonic.
    all.retain(|file| !file.starts_with("examples/generated/"));

    let mut found = Vec::new();
    for file in &all {
        let text = read(file);
        let lines = text.lines().zip(1..).filter(|(line, _)| has_word(line));
        found.extend(lines.map(|(line, number)| format!("{file}:{number}: {}", line.trim())));
    }
    assert!(
        found.is_empty(),
        "write what the thing is or does:\n{}",
        found.join("\n")
    );
}

#[test]
fn a_word_is_found_in_names_and_not_in_other_words() {
    for line in ["Who was denied", "fn nobody_asks()", "the one (who)", "who's", "`whom`"] {
        assert!(has_word(line), "{line}");
    }
    for line in ["the whole", "whose", "anybodys", ""] {
        assert!(!has_word(line), "{line}");
    }
}
