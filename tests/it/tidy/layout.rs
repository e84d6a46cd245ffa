//! A folder of `src/` uses only the folders below it, a rule of the script shares no variable, no file of code is long, and the manifest
//! for threads has all that it needs.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
};

use super::{read, root};

/// The folders of `src/` and the files beside them, from top to bottom.
const ROOMS: &str = "admin limiter http policy decide store key limit observe error file sync";

/// The files that read the arguments, decide which request is next, and reply. The others are rules, and what rules call.
const NO_RULES: &str = "checks driver line lone_log numbers overrides prelude secret trial";

/// The files below a folder that end so, with their texts without unit tests.
fn files(folder: &str, end: &str) -> Vec<(String, String)> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root().join(&folder)).expect("a folder") {
            let entry = entry.expect("an entry");
            let path = format!("{folder}/{}", entry.file_name().to_str().expect("a name"));
            if entry.path().is_dir() {
                folders.push(path);
            } else if path.ends_with(end) {
                let text = read(&path);
                let code = text.split("\nmod tests {").next().unwrap_or_default();
                files.push((path, code.to_owned()));
            }
        }
    }
    assert!(files.len() > 10, "the files of {folder} were found");
    files
}

fn is_for_tests(file: &str) -> bool {
    file.ends_with("threads.rs") || file.contains("/simulation/")
}

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

#[test]
fn a_folder_uses_only_the_folders_below_it() {
    let first = |path: &str| path.split("::").next().unwrap_or_default().to_owned();
    let floor = |room: &str| ROOMS.split(' ').position(|one| one == room);
    let exports: HashMap<_, _> = paths_from("self::", &read("src/lib.rs"))
        .into_iter()
        .filter_map(|path| Some((path.rsplit("::").next()?.to_owned(), first(&path))))
        .collect();

    let (mut upward, mut downward) = (Vec::new(), 0);
    for (file, text) in files("src", ".rs") {
        let modules: Vec<_> = file["src/".len()..].trim_end_matches(".rs").split('/').collect();
        if ["lib", "guide"].contains(&modules[0]) || is_for_tests(&file) {
            continue;
        }
        let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let code = lines.collect::<Vec<_>>().join("\n");
        let own = floor(modules[0]).unwrap_or_else(|| panic!("{file} is in no room"));
        for path in paths_from("crate::", &code) {
            let name = first(&path);
            // A macro of the crate has no room.
            let Some(room) = floor(&name).or_else(|| floor(exports.get(&name)?)) else {
                continue;
            };
            downward += usize::from(room > own);
            if room < own {
                upward.push(format!("{file}: crate::{path}"));
            }
        }
        // Out of the folder only by `crate`.
        let depth = modules.len() - usize::from(modules.ends_with(&["mod"]));
        if code.contains(&"super::".repeat(depth)) {
            upward.push(format!("{file}: {}", "super::".repeat(depth)));
        }
    }
    assert!(downward > 500, "{downward} uses were found");
    assert!(upward.is_empty(), "uses of a folder above:\n{}", upward.join("\n"));
}

#[test]
fn no_file_of_code_is_long() {
    for (file, text) in files("src", ".rs").into_iter().chain(files("lua", ".lua")) {
        let lines = text.lines().count();
        assert!(
            lines <= 400 || is_for_tests(&file),
            "{file} has {lines} lines, tests not counted"
        );
    }
}

/// A file that no module names is not compiled, and its tests do not run.
#[test]
fn every_file_of_this_suite_is_part_of_it() {
    for (file, _) in files("tests/it", ".rs") {
        let (folder, name) = file.trim_end_matches("/mod.rs").rsplit_once('/').expect("a folder");
        let parent = match folder {
            "tests/it" => "tests/it/main.rs".to_owned(),
            folder => format!("{folder}/mod.rs"),
        };
        let name = name.trim_end_matches(".rs");
        let is_part = ["main", "mistakes"].contains(&name) || read(&parent).contains(&format!("mod {name};"));
        assert!(is_part, "{parent} has no `mod {name};`");
    }
}

fn names(list: &str) -> impl Iterator<Item = String> {
    list.split(',').map(|name| name.trim().to_owned())
}

/// The names that lines declare.
fn declared<'a>(lines: impl Iterator<Item = &'a str>) -> impl Iterator<Item = String> {
    let lists = lines.filter_map(|line| line.strip_prefix("local "));
    let lists = lists.filter(|list| !list.starts_with("function "));
    lists.flat_map(|list| names(list.split('=').next().unwrap_or_default()))
}

/// The other charges of a request are decided between two steps of a rule: a value reaches the next step as an argument.
#[test]
fn a_rule_assigns_no_variable_of_the_whole_script() {
    let scripts = files("lua", ".lua");
    let shared: BTreeSet<_> = scripts.iter().flat_map(|(_, text)| declared(text.lines())).collect();
    assert!(shared.contains("passed") && shared.contains("reply"), "{shared:?}");

    let is_rule = |file: &str| NO_RULES.split(' ').all(|name| file != format!("lua/{name}.lua"));
    for (file, text) in scripts.iter().filter(|(file, _)| is_rule(file)) {
        let lines = || text.lines().map(str::trim_start);
        let functions = lines().filter(|line| line.strip_prefix("local ").unwrap_or(line).starts_with("function "));
        let parameters = functions.filter_map(|line| line.split_once('(')?.1.strip_suffix(')'));
        let own: BTreeSet<_> = declared(lines()).chain(parameters.flat_map(names)).collect();
        let assignments = lines().filter_map(|line| line.split_once(" = "));
        for (left, _) in assignments.filter(|(left, _)| !left.starts_with("local ")) {
            for name in names(left) {
                assert!(own.contains(&name) || !shared.contains(&name), "{file}: {name}");
            }
        }
    }
}

/// A subscriber escapes text that is a `str`, and writes what is recorded by `Display` as it is: a line break would forge a line.
#[test]
fn events_record_text_as_str() {
    for (file, text) in files("src", ".rs") {
        for (_, event) in text.match_indices("tracing::").filter_map(|(at, _)| {
            let event = &text[at..];
            let name = event["tracing::".len()..].split('!').next()?;
            ["error", "warn", "info", "debug"]
                .contains(&name)
                .then_some((at, event))
        }) {
            let event = &event[..event.find(");\n").unwrap_or(event.len())];
            for odd in ["%", "field::display", "field::debug"] {
                assert!(!event.contains(odd), "{file}: {odd} in {event}");
            }
        }
    }
}

/// Else the unit tests of the package do not compile.
#[test]
fn the_package_has_the_modules_that_its_sources_take_from_elsewhere() {
    let package = read("Cargo.toml").parse::<toml::Table>().expect("TOML");
    let included = package["package"]["include"].as_array().expect("a list");
    let mut found = 0;
    for (file, source) in files("src", ".rs") {
        for path in source.lines().filter_map(|line| line.strip_prefix("#[path = \"../../")) {
            let path = format!("/{}", path.trim_end_matches("\"]"));
            assert!(included.iter().any(|one| one.as_str() == Some(&path)), "{file}: {path}");
            found += 1;
        }
    }
    assert_eq!(found, 1);
}

/// Else `cargo run --locked` fails, of what is not part of this workspace.
#[test]
fn the_lock_files_have_what_the_manifests_ask_for() {
    let numbers = |version: &str| {
        version
            .split('.')
            .map_while(|part| part.parse().ok())
            .collect::<Vec<u64>>()
    };
    let package = read("Cargo.toml").parse::<toml::Table>().expect("TOML");
    let of_the_package = package["dependencies"].as_table().expect("a table");
    for folder in ["benches/peers", "tests/clients", "tests/threads"] {
        let parsed = |file| {
            read(&format!("{folder}/{file}"))
                .parse::<toml::Table>()
                .expect("a file of Cargo")
        };
        let (manifest, lock) = (parsed("Cargo.toml"), parsed("Cargo.lock"));
        let packages = lock["package"].as_array().expect("a list");
        let own = packages
            .iter()
            .find(|package| package["name"].as_str() == Some("tower-quota"));
        let versions = own.map(|own| (&own["version"], &package["package"]["version"]));
        assert!(
            versions.is_none_or(|(locked, version)| locked == version),
            "{folder}/Cargo.lock has another version"
        );
        for (name, wanted) in of_the_package.iter().filter(|_| own.is_some()) {
            let has = |of: &toml::Value| of.as_str().and_then(|of| of.split(' ').next()) == Some(name);
            let locked = own.and_then(|own| own["dependencies"].as_array()).expect("a list");
            let is_there = wanted.get("optional").is_some() || locked.iter().any(has);
            assert!(is_there, "{folder}/Cargo.lock lacks {name} of tower-quota");
        }
        for (name, wanted) in manifest["dependencies"].as_table().expect("a table") {
            let Some(version) = wanted.as_str().or_else(|| wanted.get("version")?.as_str()) else {
                continue;
            };
            let name = wanted.get("package").and_then(toml::Value::as_str).unwrap_or(name);
            let wanted = numbers(version);
            let fits = |package: &toml::Value| {
                let locked = numbers(package["version"].as_str().expect("a version"));
                let breaking = 1 + locked.iter().take_while(|number| **number == 0).count();
                let is_same = wanted
                    .iter()
                    .zip(&locked)
                    .take(breaking)
                    .all(|(wanted, locked)| wanted == locked);
                package["name"].as_str() == Some(name) && is_same && locked >= wanted
            };
            assert!(
                packages.iter().any(fits),
                "{folder}/Cargo.lock has no {name} {version}: run `cargo update -p {name}`"
            );
        }
    }
}

/// `.ci/threads` builds the source by a manifest of its own, which nothing else does.
#[test]
fn the_manifest_for_threads_has_all_that_its_features_need() {
    let manifest = |path| read(path).parse::<toml::Table>().expect("TOML");
    let (package, threads) = (manifest("Cargo.toml"), manifest("tests/threads/Cargo.toml"));
    let features = threads["features"].as_table().expect("a table");
    let needed = features
        .keys()
        .filter_map(|feature| package["features"].get(feature)?.as_array());
    let needed: Vec<_> = needed
        .flatten()
        .filter_map(|need| need.as_str()?.strip_prefix("dep:"))
        .collect();
    let of_the_package = package["dependencies"].as_table().expect("a table");
    let is_needed = |name: &str| {
        let is_optional = of_the_package[name]
            .get("optional")
            .is_some_and(|it| it.as_bool() == Some(true));
        !is_optional || needed.contains(&name)
    };
    let lacking = of_the_package
        .keys()
        .filter(|name| is_needed(name) && threads["dependencies"].get(name).is_none());
    assert_eq!(lacking.collect::<Vec<_>>(), Vec::<&String>::new());
}
