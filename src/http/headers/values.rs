use std::{cell::Cell, time::Duration};

use bytes::BytesMut;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::PolicyDecision;

/// The value of a field while it is written.
///
/// The values that a thread writes lie one after the other in a block of memory, which is reused when they are dropped, so
/// that most take no allocation of their own.
pub(super) struct Text(BytesMut);

/// Small, since a value that is not dropped keeps its block.
const BLOCK: usize = 1_024;

/// The space reserved for a value. Longer ones may allocate.
const ORDINARY: usize = 64;

thread_local! {
    static REST: Cell<BytesMut> = Cell::new(BytesMut::with_capacity(BLOCK));
}

impl Text {
    pub(super) fn new() -> Self {
        let mut rest = REST.try_with(Cell::take).unwrap_or_default();
        rest.reserve(ORDINARY);
        Self(rest)
    }

    #[inline]
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    #[inline]
    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    pub(super) fn number(&mut self, number: u64) -> &mut Self {
        self.text(itoa::Buffer::new().format(number))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Begins a member of a list.
    pub(super) fn delimit(&mut self) -> &mut Self {
        match self.is_empty() {
            true => self,
            false => self.text(", "),
        }
    }
}

impl From<Text> for HeaderValue {
    fn from(Text(mut rest): Text) -> Self {
        let text = rest.split().freeze();
        let _ = REST.try_with(|cell| cell.set(rest));
        // It is always a value: it consists of policy names, numbers and other values.
        Self::from_maybe_shared(text).unwrap_or(const { Self::from_static("") })
    }
}

impl From<u64> for Text {
    fn from(number: u64) -> Self {
        let mut text = Self::new();
        text.number(number);
        text
    }
}

/// What remains, and the time until all is restored; of a policy that denies, 0, and the wait if it helps, which is never rounded to 0.
pub(super) fn standing(policy: &PolicyDecision) -> (u64, Option<Duration>) {
    match policy.denial() {
        None => (policy.remaining().min(MAX_INTEGER), Some(policy.reset_after())),
        Some(_) => (0, policy.retry_after().map(|wait| wait.max(Duration::from_nanos(1)))),
    }
}

pub(crate) fn retry_after(wait: Duration) -> HeaderValue {
    Text::from(delay_secs(wait)).into()
}

/// RFC 9110 §10.2.3: delay-seconds is a non-negative integer, so round up; and at least 1, since 0 invites a loop.
pub(crate) fn delay_secs(wait: Duration) -> u64 {
    ceil_secs(wait).clamp(1, MAX_DELAY)
}

/// The largest delay that every recipient can hold in 32 bits (RFC 9111 §1.2.2).
const MAX_DELAY: u64 = i32::MAX as u64;

/// RFC 9651 §3.3.1: an integer has at most 15 digits. The number of a store may be larger.
const MAX_INTEGER: u64 = 999_999_999_999_999;

pub(super) fn ceil_secs(duration: Duration) -> u64 {
    let seconds = duration
        .as_secs()
        .saturating_add(u64::from(duration.subsec_nanos() > 0));
    seconds.min(MAX_INTEGER)
}

/// Adds to a list, in one line, since many clients read only the first. Returns whether it is there: beside a dictionary as
/// [`join`] has it.
///
/// The name is made anew from its constant, since a clone of it is a call through a table of functions.
pub(super) fn append(
    headers: &mut HeaderMap,
    name: impl Fn() -> HeaderName,
    ours: HeaderValue,
    replaces: bool,
) -> bool {
    !headers.append(name(), ours) || join(headers, &name(), replaces)
}

/// Makes one line of those that are there, of which the last is ours and of a list. Returns whether it is that list.
///
/// The dictionary of an earlier draft is no list: the one with less remaining stays, whole. Where the dictionary does not say what
/// remains, the list `replaces` it, or does not.
#[cold]
pub(super) fn join(headers: &mut HeaderMap, name: &HeaderName, replaces: bool) -> bool {
    let Some(list) = take_list(headers, name) else {
        return false;
    };
    join_dictionary(headers, name);
    let dictionary = keep_one_line(headers, [name], name, remaining);
    let is_list = match (headers.contains_key(name), dictionary) {
        (false, _) => true,
        (true, None) => replaces,
        (true, Some(dictionary)) => least_remaining([&list]).is_some_and(|list| list < dictionary),
    };
    if is_list {
        headers.insert(name, list);
    }
    is_list
}

/// Takes the members of a list out of all lines. Those of dictionaries stay.
pub(super) fn take_list(headers: &mut HeaderMap, name: &HeaderName) -> Option<HeaderValue> {
    let lines: Vec<HeaderValue> = headers.get_all(name).iter().cloned().collect();
    headers.remove(name);
    let mut list = Text::new();
    for line in lines {
        let Some(text) = line.to_str().ok().filter(|text| is_whole(text)) else {
            continue;
        };
        if is_dictionary(text) {
            headers.append(name, line);
            continue;
        }
        let members = split(text, ',').map(|member| member.trim_matches([' ', '\t']));
        // An empty one is a list without a value (RFC 9651 §4.2.1).
        for member in members.filter(|member| !member.is_empty()) {
            list.delimit().text(member);
        }
    }
    (!list.is_empty()).then(|| list.into())
}

/// Whether no string or inner list is open at its end. With one, or with other characters, no line of a field has a value (RFC 9651 §4.2).
fn is_whole(line: &str) -> bool {
    let (mut is_string, mut has_escapes, mut depth, mut before) = (false, true, 0, b' ');
    let mut bytes = line.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => {
                is_string = !is_string;
                // A display string, `%"..."`, has others.
                has_escapes = before != b'%';
            }
            b'\\' if is_string && has_escapes => _ = bytes.next(),
            b'(' if !is_string => depth += 1,
            b')' if !is_string => depth -= 1,
            _ => {}
        }
        if depth < 0 {
            return false;
        }
        before = byte;
    }
    !is_string && depth == 0
}

/// Whether it begins with a key and `=` (RFC 9651 §3.2).
fn is_dictionary(line: &str) -> bool {
    let key = line.split_once('=').map_or("", |(key, _)| key);
    !key.is_empty()
        && key
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'*' | b'_' | b'-' | b'.'))
}

/// Splits at delimiters outside of strings (RFC 9651 §3.3.3), of which those after `%` have no escapes by `\` (§3.3.8).
pub(crate) fn split(text: &str, delimiter: char) -> impl Iterator<Item = &str> {
    let (mut is_string, mut is_escaped, mut has_escapes, mut last) = (false, false, false, delimiter);
    text.split(move |char| {
        let before = std::mem::replace(&mut last, char);
        if is_escaped {
            is_escaped = false;
            return false;
        }
        match char {
            '\\' => is_escaped = is_string && has_escapes,
            '"' => (is_string, has_escapes) = (!is_string, before != '%'),
            _ => {}
        }
        char == delimiter && !is_string
    })
}

/// What is left by lines of `RateLimit`; of several, the least.
fn least_remaining<'a>(lines: impl IntoIterator<Item = &'a HeaderValue>) -> Option<u64> {
    let lines = lines.into_iter();
    lines.filter_map(|line| remaining(line.to_str().ok()?)).min()
}

/// What is left by a line of `RateLimit`: the least of its limits.
pub(super) fn remaining(line: &str) -> Option<u64> {
    limits(line).filter_map(|(_, [remaining, _])| count(remaining?)).min()
}

/// The limits in a line of `RateLimit`, each with what remains of it and the seconds until its reset: the members of a list such as
/// `"name";r=0;t=30`, of the drafts -08 to -11, or a dictionary such as `limit=10, remaining=0, reset=30`, of draft -07.
pub(crate) fn limits(line: &str) -> impl Iterator<Item = (&str, [Option<&str>; 2])> {
    // A dictionary is one limit: no line has a line break to split it at.
    let (between_limits, delimiter, names) = match is_dictionary(line) {
        true => ('\n', ',', ["remaining", "reset"]),
        false => (',', ';', ["r", "t"]),
    };
    split(line, between_limits).map(move |limit| {
        let value_of = |name| {
            let parameters = split(limit, delimiter).filter_map(|parameter| parameter.split_once('='));
            // Of equal names the last one counts (RFC 9651 §4.2.3.2).
            let (_, value) = parameters.filter(|(key, _)| key.trim() == name).last()?;
            // Without its own parameters (§3.2).
            value.split(';').next().map(str::trim)
        };
        (limit, names.map(value_of))
    })
}

/// A number that is at least 0, rounded down. Some services write a negative one when a limit is exceeded, and some a fraction.
pub(crate) fn count(text: &str) -> Option<u64> {
    let fraction = || text.parse().ok().filter(|number: &f64| number.is_finite());
    text.parse().ok().or_else(|| fraction().map(|number| number as u64))
}

/// Makes one line of the lines of one dictionary (RFC 9651 §4.2). Those of which several have what remains are dictionaries of
/// their own.
pub(super) fn join_dictionary(headers: &mut HeaderMap, name: &HeaderName) {
    let lines = || headers.get_all(name).iter();
    let is_part = |line: &HeaderValue| line.to_str().is_ok_and(is_dictionary);
    let numbers = lines().filter_map(|line| remaining(line.to_str().ok()?));
    if lines().nth(1).is_none() || !lines().all(is_part) || numbers.count() > 1 {
        return;
    }
    let mut all = Text::new();
    for line in lines() {
        all.delimit().bytes(line.as_bytes());
    }
    headers.insert(name, all.into());
}

/// Leaves one line of fields with a single value (RFC 9110 §5.3): of several, those with the least remaining.
///
/// Returns what that one has remaining. Without a number, all stay.
pub(super) fn keep_one_line<const N: usize>(
    headers: &mut HeaderMap,
    names: [&HeaderName; N],
    remaining_name: &HeaderName,
    remaining_of: impl Fn(&str) -> Option<u64>,
) -> Option<u64> {
    let lines = headers.get_all(remaining_name).iter().enumerate();
    let numbers = lines.filter_map(|(nth, line)| Some((remaining_of(line.to_str().ok()?)?, nth)));
    let (least, nth) = numbers.min()?;
    for name in names {
        let lines = || headers.get_all(name).iter();
        if lines().nth(1).is_some()
            && let Some(kept) = lines().nth(nth).or(lines().next()).cloned()
        {
            headers.insert(name, kept);
        }
    }
    Some(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_do_not_change_while_others_are_written() {
        let values: Vec<HeaderValue> = (0..1_000).map(|number| Text::from(number).into()).collect();
        for (number, value) in values.iter().enumerate() {
            assert_eq!(value, &number.to_string());
        }
    }

    #[test]
    fn a_value_may_be_longer_than_a_block_and_written_beside_another() {
        let (mut short, mut long) = (Text::new(), Text::new());
        for _ in 0..BLOCK {
            long.delimit().number(42);
        }
        short.text("a");

        assert_eq!(HeaderValue::from(long), ["42"; BLOCK].join(", "));
        assert_eq!(HeaderValue::from(short), "a");
    }

    #[test]
    fn delimiters_in_strings_of_either_kind_split_nothing() {
        for (text, members) in [
            (r#"a="x;y";b"#, vec![r#"a="x;y""#, "b"]),
            (r#"a="x\";y";b"#, vec![r#"a="x\";y""#, "b"]),
            (r#"a=%"x\";b"#, vec![r#"a=%"x\""#, "b"]),
            (r#"a=%"x;y";b"#, vec![r#"a=%"x;y""#, "b"]),
        ] {
            assert_eq!(split(text, ';').collect::<Vec<_>>(), members, "{text}");
        }
    }

    // The rows HD-10, HD-12 and HD-13 of `tests/vectors/http.md`.
    #[test]
    fn retry_after_is_in_whole_seconds_and_at_least_one() {
        for (wait, value) in [
            (0, "1"),
            (1_000, "1"),
            (1_001, "2"),
            (41_200, "42"),
            (1_000_000_000_000_000, "2147483647"),
        ] {
            assert_eq!(retry_after(Duration::from_millis(wait)), value);
        }
    }
}
