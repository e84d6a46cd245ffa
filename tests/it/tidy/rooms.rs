//! A folder of `src/` uses only the folders below it.

use std::collections::HashMap;

use super::{code, files, read};

/// The folders and the files beside them, from top to bottom.
const ROOMS: [&str; 12] = [
    "admin",
    "middleware",
    "limiter",
    "policy",
    "check",
    "decision",
    "store",
    "key",
    "limit",
    "observe",
    "error",
    "sync",
];

/// Files that are compiled for tests only.
const FOR_TESTS: [&str; 3] = [
    "src/decision/slots/threads.rs",
    "src/store/redis/simulation/",
    "src/store/redis/threads.rs",
];

/// The paths in a `use`, such as `a::b` and `a::c` in `a::{b, c}`.
fn paths(tree: &str) -> Vec<String> {
    let Some((start, list)) = tree.split_once('{') else {
        return vec![tree.trim().to_owned()];
    };
    let list = list.trim_end().strip_suffix('}').expect("a list ends");
    let mut depth = 0;
    let branches = list.split(|c: char| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    let branches = branches.filter(|branch| !branch.trim().is_empty());
    branches
        .flat_map(paths)
        .map(|path| format!("{}{path}", start.trim()))
        .collect()
}

/// The paths that follow each `root` in the code.
fn paths_from(root: &str, code: &str) -> Vec<String> {
    let ends = |rest: &&str| {
        let mut depth = 0;
        rest.find(|c: char| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            depth == 0 && !(c.is_alphanumeric() || "_:}".contains(c))
        })
    };
    let trees = code.split(root).skip(1);
    trees
        .flat_map(|rest| paths(&rest[..ends(&rest).unwrap_or(rest.len())]))
        .collect()
}

fn first(path: &str) -> &str {
    path.split("::").next().unwrap_or_default()
}

/// The uses that lead to the same folder or to one above it: a line each.
fn upward(files: &[(String, String)]) -> Vec<String> {
    let (_, lib) = files.iter().find(|(file, _)| file == "src/lib.rs").expect("lib.rs");
    let exports: HashMap<_, _> = paths_from("self::", lib)
        .into_iter()
        .filter_map(|path| Some((path.rsplit("::").next()?.to_owned(), first(&path).to_owned())))
        .collect();
    let floor = |room: &str| ROOMS.iter().position(|one| *one == room);

    let mut found = Vec::new();
    for (file, code) in files {
        let modules: Vec<_> = file["src/".len()..].trim_end_matches(".rs").split('/').collect();
        if ["lib", "guide"].contains(&modules[0]) {
            continue;
        }
        let own = floor(modules[0]).unwrap_or_else(|| panic!("{file} is in no room"));
        for path in paths_from("crate::", code) {
            let name = first(&path);
            let room = floor(name).or_else(|| floor(exports.get(name)?));
            // A macro of the crate has no room.
            if room.is_some_and(|room| room < own) {
                found.push(format!("{file}: crate::{path}"));
            }
        }
        // Out of the folder only by `crate`.
        let depth = modules.len() - usize::from(modules.ends_with(&["mod"]));
        if code.contains(&"super::".repeat(depth)) {
            found.push(format!("{file}: {}", "super::".repeat(depth)));
        }
    }
    found
}

#[test]
fn a_folder_uses_only_the_folders_below_it() {
    let is_code = |file: &String| file.ends_with(".rs") && !FOR_TESTS.iter().any(|start| file.starts_with(start));
    let sources = files("src").into_iter().filter(is_code);
    let sources: Vec<_> = sources.map(|file| (file.clone(), code(&read(&file)))).collect();
    assert!(sources.len() > 50, "the files were found");
    let found = upward(&sources);
    assert!(found.is_empty(), "uses of a folder above:\n{}", found.join("\n"));
}

#[test]
fn a_use_of_a_folder_above_is_found() {
    let found = |file: &str, text: &str| {
        let lib = "pub use self::{limiter::{Acquire, Limiter}, key::Key};";
        upward(&[("src/lib.rs".into(), lib.into()), (file.into(), code(text))])
    };
    for text in [
        "use crate::limiter::Limiter;",
        "use crate::{\n    key::Key,\n    store::{Store, other::{A, B}},\n    policy::Policy,\n};",
        "fn f(limiter: &crate::Limiter) {}",
        "use crate::{Key, Limiter};",
        "pub(crate) use crate::check::Check;",
        "use super::super::check;",
    ] {
        assert_eq!(found("src/decision/plan.rs", text).len(), 1, "{text}");
    }
    for text in [
        "use crate::{Key, decision::Decision, store::{self, Store}, sync};",
        "use super::plan; use std::sync::Arc;",
        "/// See [`crate::Limiter`].\nfn f() {}",
        "fn f() {}\n\n#[cfg(test)]\nmod tests {\n    use crate::Limiter;\n}\n",
    ] {
        assert!(found("src/decision/plan.rs", text).is_empty(), "{text}");
    }
    assert_eq!(found("src/key/mod.rs", "use super::policy;").len(), 1);
}
