//! No rule of the script hands a value to another one by a variable that both see: the other charges of a request are decided
//! between two steps of a rule. And its functions are short, each with a comment.

use std::collections::BTreeSet;

use super::{files, read};

/// The files that read the arguments, decide which request is next, and reply. The others are rules, and what rules call.
const NO_RULES: [&str; 8] = [
    "lua/again.lua",
    "lua/driver.lua",
    "lua/log_members.lua",
    "lua/numbers.lua",
    "lua/prelude.lua",
    "lua/runs.lua",
    "lua/single.lua",
    "lua/trial.lua",
];

/// The most lines of a function, without the functions within it.
const MOST: usize = 50;

fn names(list: &str) -> impl Iterator<Item = String> {
    list.split(',').map(|name| name.trim().to_owned())
}

/// The names that a file declares in lines with this indentation or, without one, anywhere.
fn declared(text: &str, everywhere: bool) -> BTreeSet<String> {
    let lines = text
        .lines()
        .map(|line| if everywhere { line.trim_start() } else { line });
    let lists = lines.filter_map(|line| line.strip_prefix("local "));
    let lists = lists.filter(|list| !list.starts_with("function "));
    lists
        .flat_map(|list| names(list.split('=').next().unwrap_or_default()))
        .collect()
}

/// The parameters of all functions of a file.
fn parameters(text: &str) -> BTreeSet<String> {
    let lists = text.lines().filter(|line| is_function(line));
    let lists = lists.filter_map(|line| line.split_once('(')?.1.strip_suffix(')'));
    lists.flat_map(names).collect()
}

fn is_function(line: &str) -> bool {
    let line = line.trim_start();
    line.strip_prefix("local ").unwrap_or(line).starts_with("function ")
}

#[test]
fn a_rule_assigns_no_variable_of_the_whole_script() {
    let shared: BTreeSet<_> = files("lua")
        .iter()
        .flat_map(|file| declared(&read(file), false))
        .collect();
    assert!(shared.contains("operation") && shared.contains("reply"), "{shared:?}");

    let rules: Vec<_> = files("lua")
        .into_iter()
        .filter(|file| !NO_RULES.contains(&&**file))
        .collect();
    assert!(rules.iter().any(|file| file == "lua/charges.lua"), "{rules:?}");
    let mut assigned = BTreeSet::new();
    for file in rules {
        let text = read(&file);
        let own: BTreeSet<_> = declared(&text, true).into_iter().chain(parameters(&text)).collect();
        let assignments = text.lines().filter_map(|line| line.trim_start().split_once(" = "));
        for (left, _) in assignments.filter(|(left, _)| !left.starts_with("local ")) {
            let shared = names(left).filter(|name| shared.contains(name) && !own.contains(name));
            assigned.extend(shared.map(|name| format!("{file}: {name}")));
        }
    }
    assert_eq!(assigned, BTreeSet::new());
}

/// A function of a file: its first line, the line after it, its name, and the number of its own lines.
struct Function<'a> {
    start: usize,
    end: usize,
    name: &'a str,
    length: usize,
}

fn functions(text: &str) -> Vec<Function<'_>> {
    let lines: Vec<_> = text.lines().collect();
    let mut functions = Vec::<Function<'_>>::new();
    for (start, line) in lines.iter().enumerate().rev().filter(|(_, line)| is_function(line)) {
        let indentation = &line[..line.len() - line.trim_start().len()];
        let is_end = |line: &&str| line.strip_prefix(indentation) == Some("end");
        let length = lines[start..].iter().position(is_end).expect("the end of a function") + 1;
        let end = start + length;
        // Those within it were found before. Of functions within functions the outer ones count for the inner.
        let mut within = 0;
        let mut after = start;
        for inner in functions.iter().rev().filter(|inner| inner.end <= end) {
            if inner.start >= after {
                within += inner.end - inner.start;
                after = inner.end;
            }
        }
        functions.push(Function {
            start,
            end,
            name: line.split('(').next().unwrap_or_default().trim(),
            length: length - within,
        });
    }
    functions
}

#[test]
fn the_functions_of_the_script_are_short_and_each_has_a_comment() {
    let mut count = 0;
    for file in files("lua") {
        let text = read(&file);
        let lines: Vec<_> = text.lines().collect();
        for Function {
            start, name, length, ..
        } in functions(&text)
        {
            count += 1;
            assert!(length <= MOST, "{file}: `{name}` has {length} lines");
            let is_described = start > 0 && lines[start - 1].trim_start().starts_with("-- ");
            assert!(is_described, "{file}: `{name}` has no comment");
        }
    }
    assert!(count > 50, "{count} functions were found");
}

#[test]
fn the_plain_sliding_log_is_a_file_of_sixty_lines() {
    let text = read("lua/sliding_log.lua");
    assert!(text.lines().count() <= 60);
    let steps = text.lines().filter_map(|line| line.trim_start().strip_prefix("-- "));
    let steps: String = steps
        .filter_map(|step| step.split_once(". ").map(|(number, _)| number))
        .filter(|number| number.len() == 1)
        .collect();
    assert_eq!(steps, "12345", "as the textbook has them");
}

#[test]
fn lines_of_functions_within_a_function_do_not_count() {
    let text = "-- A.\nlocal function a()\n  -- B.\n  function b(x, y)\n    return 1\n  end\n\n  return b\nend\n";
    let found = functions(text)
        .into_iter()
        .map(|function| (function.name, function.length));
    assert_eq!(found.collect::<Vec<_>>(), [("function b", 3), ("local function a", 5)]);
    assert_eq!(parameters(text).into_iter().collect::<Vec<_>>(), ["", "x", "y"]);
}
