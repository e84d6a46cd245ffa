//! README, docs, examples and changelog are complete, and read well on a code host.

use std::{collections::BTreeSet, fs};

use super::{files, package, packages, read, root};

#[test]
fn the_version_is_in_the_changelog() {
    let heading = format!("## [{}]", env!("CARGO_PKG_VERSION"));
    assert!(
        read("CHANGELOG.md").contains(&heading),
        "CHANGELOG.md has no `{heading}`"
    );
}

/// Two pages, of a first version that has no earlier one to compare with.
#[test]
fn the_changelog_of_the_first_version_is_two_pages() {
    let changelog = read("CHANGELOG.md");
    let (_, first) = changelog.split_once("\n## [0.1.0]").expect("the first version");
    let lines = first.lines().count();
    assert!(lines <= 110, "it has {lines} lines");
    let long = changelog.lines().find(|line| line.chars().count() > 120);
    assert_eq!(long, None, "CHANGELOG.md has lines of at most 120 columns");
}

#[test]
fn the_docs_have_every_feature() {
    let (docs, package) = (read("src/lib.rs"), package());
    let features = package["features"].as_object().expect("features");
    for feature in features
        .keys()
        .filter(|feature| *feature != "default" && !feature.starts_with('_'))
    {
        assert!(
            docs.contains(&format!("//! | `{feature}` |")),
            "`{feature}` is not in the table of src/lib.rs"
        );
    }
}

/// A client that changes such a value with every request has a new quota each time.
#[test]
fn no_example_has_a_key_that_a_client_chooses() {
    let mut all: Vec<_> = ["src", "examples", "docs"].into_iter().flat_map(files).collect();
    all.push("README.md".to_owned());
    // Its docs describe which headers may be keys.
    all.retain(|file| file != "src/key/header.rs");

    for file in all {
        let (text, is_source) = (read(&file), file.starts_with("src/"));
        let mut in_example = false;
        for line in text.lines() {
            let docs = line
                .trim_start()
                .strip_prefix("///")
                .or(line.trim_start().strip_prefix("//!"));
            if docs.unwrap_or(line).trim_start().starts_with("```") {
                in_example = !in_example;
            }
            let example = if is_source {
                docs.filter(|_| in_example)
            } else {
                Some(line)
            };
            // An id is chosen by the client, and is not a key.
            let example = example.unwrap_or_default().replace("once_per(key::header(", "");
            for chosen in [
                "key::header(",
                "\"header:",
                ".host()",
                "key(key::path())",
                "key(key::method())",
            ] {
                assert!(!example.contains(chosen), "{file}: `{chosen}` in `{line}`");
            }
        }
    }
}

#[test]
fn the_guide_to_algorithms_has_every_one() {
    let page = read("docs/choosing.md");
    let texts: Vec<_> = files("src/limit").iter().map(|file| read(file)).collect();
    let (_, variants) = texts
        .iter()
        .find_map(|text| text.split_once("pub enum Limit {"))
        .expect("the enum");
    let (variants, _) = variants.split_once("\n}").expect("its end");
    let names = variants
        .lines()
        .filter_map(|line| line.trim().split_once('('))
        .map(|(name, _)| name);
    // A ban is not a limit of a policy.
    let names = names.filter(|name| *name != "Ban");
    for name in names.filter(|name| name.chars().all(char::is_alphanumeric)) {
        assert!(
            page.contains(&format!("| `{name}` |")),
            "`{name}` is not in the table of docs/choosing.md"
        );
    }
}

#[test]
fn every_example_has_the_command_that_runs_it() {
    let packages = packages();
    let targets = packages
        .iter()
        .flat_map(|package| package["targets"].as_array().expect("targets"));
    for target in targets {
        if target["kind"][0] == "example" {
            let name = target["name"].as_str().expect("a name");
            let source = read(&format!("examples/{name}.rs"));
            let command = format!("cargo run --example {name}");
            assert!(
                source.contains(&command),
                "examples/{name}.rs does not have `{command}`"
            );
        }
    }
}

#[test]
fn the_list_of_examples_is_complete() {
    let page = read("examples/README.md");
    let (_, list) = page.split_once("| --- |").expect("the table");
    let (list, _) = list.split_once("\n\n").expect("its end");
    let listed: BTreeSet<_> = list.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    let packages = packages();
    let targets = packages
        .iter()
        .flat_map(|package| package["targets"].as_array().expect("targets"));
    let examples = targets.filter(|target| target["kind"][0] == "example");
    let examples = examples.map(|target| target["name"].as_str().expect("a name").to_owned());
    assert_eq!(listed, examples.collect());
}

/// The first page of the repository, read in half a minute.
#[test]
fn the_readme_has_at_most_200_lines() {
    let lines = read("README.md").lines().count();
    assert!(
        lines <= 200,
        "README.md has {lines} lines: move what is not for every reader to docs/"
    );
}

/// A code host shows the lines that rustdoc hides, and does not resolve paths of Rust.
#[test]
fn pages_read_the_same_on_a_code_host() {
    let mut pages = files("docs");
    pages.retain(|file| file.ends_with(".md"));
    pages.push("README.md".to_owned());

    for file in pages {
        let text = read(&file);
        let mut language = None;
        for (line, number) in text.lines().zip(1..) {
            if let Some(begin) = line.trim_start().strip_prefix("```") {
                language = language.is_none().then_some(begin);
                assert_ne!(language, Some(""), "{file}:{number}: a block without a language");
            } else if language.is_some_and(|language| language.starts_with("rust")) {
                let code = line.trim_start();
                assert!(
                    code != "#" && !code.starts_with("# "),
                    "{file}:{number}: rustdoc hides `{line}`"
                );
            } else if language.is_none() {
                assert!(
                    !line.contains("](crate::") && !line.contains("]: crate::"),
                    "{file}:{number}: link to docs.rs, not to `crate::`"
                );
            }
        }
    }
}

/// What a page adds in a diff is compiled and run in one of its programs.
#[test]
fn the_lines_that_a_diff_adds_are_in_a_program_of_the_page() {
    let page = read("docs/migration.md");
    let mut language = "";
    let (mut added, mut run) = (Vec::new(), BTreeSet::new());
    for line in page.lines() {
        match line.strip_prefix("```") {
            Some(begin) => language = begin,
            None if language == "rust" => drop(run.insert(line.trim())),
            None if language == "diff" => added.extend(line.strip_prefix('+').map(str::trim)),
            None => {}
        }
    }
    assert!(added.len() > 20, "{} lines are added", added.len());
    for line in added {
        assert!(run.contains(line), "`{line}` is not in a program of docs/migration.md");
    }
}

/// `BLESS=1` rewrites it.
#[test]
fn the_generated_module_of_the_examples_is_up_to_date() {
    let folder = tempfile::tempdir().expect("a folder");
    let descriptors = protox::compile(["examples/hello.proto"], [root()]).expect("the proto is valid");
    tonic_prost_build::configure()
        .out_dir(folder.path())
        .compile_fds(descriptors)
        .expect("tonic compiles it");
    let fresh = fs::read_to_string(folder.path().join("hello.rs")).expect("the module that tonic generated");

    let checked_in = root().join("examples/generated/hello.rs");
    if std::env::var_os("BLESS").is_some() {
        fs::write(&checked_in, &fresh).expect("a file");
    }
    assert!(
        fs::read_to_string(&checked_in).is_ok_and(|old| old == fresh),
        "examples/generated/hello.rs is not what tonic generates from examples/hello.proto; \
         run this test with BLESS=1 and commit the file"
    );
}

/// The numbered list names functions with their files.
#[test]
fn the_way_of_a_request_names_functions_that_exist() {
    let page = read("CONTRIBUTING.md");
    let (_, way) = page.split_once("## The way of a request").expect("the section");
    let (way, _) = way.split_once("\n## ").expect("the next section");
    let words: Vec<&str> = way.split('`').skip(1).step_by(2).collect();
    let steps: Vec<_> = words.windows(2).filter(|pair| pair[1].starts_with("src/")).collect();
    assert_eq!(steps.len(), 9, "each step begins with a function and its file");

    for step in steps {
        let (name, text) = (step[0].rsplit("::").next().unwrap_or(step[0]), read(step[1]));
        assert!(
            text.contains(&format!("fn {name}(")),
            "`{}` is not in {}",
            step[0],
            step[1]
        );
        if let Some((owner, _)) = step[0].split_once("::") {
            assert!(text.contains(&format!(" {owner}")), "`{owner}` is not in {}", step[1]);
        }
    }
}
