//! How fields of an inner layer and ours become one line.

use http::{HeaderMap, HeaderName, HeaderValue};

use super::text::Text;

/// Adds to a list, in one line, since many clients read only the first.
///
/// The name is made anew from its constant, since a clone of it is a call through a table of functions.
pub(super) fn append(headers: &mut HeaderMap, name: impl Fn() -> HeaderName, ours: HeaderValue) {
    if headers.append(name(), ours) {
        join(headers, &name());
    }
}

/// Makes one line of those that are there, of which the last is ours.
#[cold]
fn join(headers: &mut HeaderMap, name: &HeaderName) {
    let mut lines: Vec<HeaderValue> = headers.get_all(name).iter().cloned().collect();
    let is_list = |line: &HeaderValue| line.to_str().is_ok_and(|line| !is_dictionary(line));
    if lines.iter().all(is_list) {
        let mut all = Text::new();
        for line in lines.iter().filter(|line| !line.is_empty()) {
            all.delimit().bytes(line.as_bytes());
        }
        headers.insert(name, all.into());
        return;
    }

    // What is not text, or is the dictionary of an earlier draft, is not a list: either theirs stays or ours, whole.
    let Some(ours) = lines.pop() else { return };
    headers.remove(name);
    match least_remaining(&lines).zip(least_remaining([&ours])) {
        Some((theirs, remaining)) if remaining < theirs => lines = vec![ours],
        _ => {}
    }
    for line in lines {
        headers.append(name, line);
    }
}

/// Whether it begins with a key and `=` (RFC 9651 §3.2).
fn is_dictionary(line: &str) -> bool {
    let key = line.split_once('=').map_or("", |(key, _)| key);
    !key.is_empty()
        && key
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'*' | b'_' | b'-' | b'.'))
}

/// What is left by lines of `RateLimit`; of several, the least.
pub(super) fn least_remaining<'a>(lines: impl IntoIterator<Item = &'a HeaderValue>) -> Option<u64> {
    lines
        .into_iter()
        .filter_map(|line| remaining(line.to_str().ok()?))
        .min()
}

/// What is left by a line of `RateLimit`: `remaining` in the dictionary of draft -07, the least `r` in the list of later drafts.
pub(super) fn remaining(line: &str) -> Option<u64> {
    // A number is without its parameters (RFC 9651 §3.2).
    let number = |text: &str| count(text.split(';').next()?.trim_end());
    if is_dictionary(line) {
        let mut members = line.split(',').rev();
        return members.find_map(|member| number(member.trim().strip_prefix("remaining=")?));
    }

    let outside_quotes = line.split('"').step_by(2);
    let members = outside_quotes.flat_map(|text| text.split(','));
    let parameters = members.flat_map(|member| member.split(';').map(str::trim));
    parameters
        .filter_map(|parameter| count(parameter.strip_prefix("r=")?))
        .min()
}

/// A number that is at least 0. Some services write a negative one when a limit is exceeded.
pub(super) fn count(text: &str) -> Option<u64> {
    match text.strip_prefix('-') {
        Some(exceeded) => exceeded.parse().ok().map(|_: u64| 0),
        None => text.parse().ok(),
    }
}

/// Leaves one line of fields with a single value (RFC 9110 §5.3): of several, those with the least remaining.
///
/// Returns what that one has remaining.
pub(super) fn keep_one_line<const N: usize>(
    headers: &mut HeaderMap,
    names: [&HeaderName; N],
    remaining_name: &HeaderName,
    remaining_of: impl Fn(&str) -> Option<u64>,
) -> Option<u64> {
    let lines = headers.get_all(remaining_name).iter().enumerate();
    let numbers = lines.filter_map(|(nth, line)| Some((remaining_of(line.to_str().ok()?)?, nth)));
    let least = numbers.min();
    for name in names {
        let mut lines = headers.get_all(name).iter();
        let first = lines.next();
        if lines.next().is_some() {
            let nth = least.map_or(0, |(_, nth)| nth);
            if let Some(kept) = headers.get_all(name).iter().nth(nth).or(first).cloned() {
                headers.insert(name, kept);
            }
        }
    }
    least.map(|(remaining, _)| remaining)
}
