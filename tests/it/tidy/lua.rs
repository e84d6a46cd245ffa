//! No rule of the script hands a value to another one by a variable that both see: the other charges of a request are decided
//! between two steps of a rule.

use std::collections::BTreeSet;

use super::{files, read};

/// The rules, which are called for one charge each.
const RULES: [&str; 8] = [
    "lua/ban.lua",
    "lua/concurrency.lua",
    "lua/fixed_window.lua",
    "lua/log_entries.lua",
    "lua/sliding_counter.lua",
    "lua/sliding_log.lua",
    "lua/token_bucket.lua",
    "lua/weighted_log.lua",
];

/// The variables of the whole script that a rule assigns.
const ASSIGNED: [&str; 3] = [
    // A later ban of the request counts no denial; each rule assigns it before it decides the charges after its own.
    "lua/ban.lua: banned",
    // The bound of all members that a call reads for waits.
    "lua/weighted_log.lua: reads",
    // A rule that is made once.
    "lua/weighted_log.lua: weighted",
];

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

#[test]
fn a_rule_assigns_no_variable_of_the_whole_script() {
    let shared: BTreeSet<_> = files("lua")
        .iter()
        .flat_map(|file| declared(&read(file), false))
        .collect();
    assert!(shared.contains("reads") && shared.contains("following"), "{shared:?}");

    let mut assigned = BTreeSet::new();
    for file in RULES {
        let text = read(file);
        let own = declared(&text, true);
        let assignments = text.lines().filter_map(|line| line.trim_start().split_once(" = "));
        for (left, _) in assignments.filter(|(left, _)| !left.starts_with("local ")) {
            let shared = names(left).filter(|name| shared.contains(name) && !own.contains(name));
            assigned.extend(shared.map(|name| format!("{file}: {name}")));
        }
    }
    assert_eq!(assigned, ASSIGNED.map(str::to_owned).into());
}
