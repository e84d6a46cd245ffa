//! Spellings of paths: one that keys have, and those that a service may take for the same path.

use http::request::Parts;
use smallvec::{SmallVec, smallvec};

pub(crate) type PathBytes = SmallVec<[u8; 64]>;

/// The path of a request, with the prefix of a nested router.
pub(crate) fn whole_path(parts: &Parts) -> &str {
    let path = parts.uri.path();
    #[cfg(feature = "axum")]
    if let Some(::axum::extract::OriginalUri(original)) = parts.extensions.get() {
        // A router of axum leaves the end of the path. Any other path was set since, such as by a proxy that calls another server.
        let [path, original_path] = [path, original.path()].map(|path| path.trim_end_matches('/'));
        let is_rest = original_path.ends_with(path);
        if is_rest && original.authority() == parts.uri.authority() {
            return original.path();
        }
    }
    path
}

/// How a path, or the template of one, is spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// As it is in the request.
    Written,
    /// As [`trimmed`] returns it.
    Trimmed,
    /// With its escapes decoded once, except for `%2F`.
    Decoded,
    /// As [`normalized`] returns it.
    Normalized(Reading),
}

/// Whether one of the spellings of a path is such. If there are too many to look at, one is taken to be.
pub(crate) fn any_spelling(path: &str, mut is_such: impl FnMut(Form, &[u8]) -> bool) -> bool {
    let written = path.as_bytes();
    if is_such(Form::Written, written) {
        return true;
    }
    if is_normal(written) {
        // It is the same in all spellings; a template may not be.
        return is_such(Form::Normalized(Reading::LENIENT), written);
    }
    if is_such(Form::Trimmed, trimmed(written)) || is_such(Form::Decoded, &decoded(path)) {
        return true;
    }

    let ambiguities = Reading::ambiguities(path);
    let readings = 1 << ambiguities.count_ones();
    if readings > 1 && readings * path.len() > LONGEST_READINGS {
        return true;
    }
    Reading::all(ambiguities).any(|reading| {
        normal_forms(reading.read(written)).into_iter().any(|form| {
            // The next service may take for syntax what this one has left.
            let next = || (reading != Reading::LENIENT).then(|| normal_forms(Reading::LENIENT.read(&form)));
            let mut is_next = |next: &PathBytes| *next != form && is_such(Form::Normalized(Reading::LENIENT), next);
            next().is_some_and(|next| next.iter().any(&mut is_next)) || is_such(Form::Normalized(reading), &form)
        })
    })
}

/// The most bytes of a path in several readings.
const LONGEST_READINGS: usize = 16 * 1_024;

/// What services make of a path that was read: as it is, and without dot segments, the most lenient last.
fn normal_forms(read: PathBytes) -> SmallVec<[PathBytes; 3]> {
    if !has_odd_segment(&read) {
        return smallvec![finished(read)];
    }
    smallvec![
        finished(merged(read.clone())),
        resolved_first(&read),
        merged_first(read)
    ]
}

/// The path without trailing slashes, and with one leading slash, as of `NormalizePathLayer`.
pub(crate) fn trimmed(path: &[u8]) -> &[u8] {
    let is_slash = |byte: &u8| *byte == b'/';
    let end = path.iter().rposition(|byte| !is_slash(byte)).map_or(1, |last| last + 1);
    let path = path.get(..end).unwrap_or(b"/");
    let slashes = path.iter().take_while(|byte| is_slash(byte)).count();
    &path[slashes.saturating_sub(1)..]
}

/// Whether all spellings of a path are this one.
fn is_normal(path: &[u8]) -> bool {
    let is_plain = |byte: &u8| !byte.is_ascii_uppercase() && !matches!(byte, b'%' | b';' | b'\\');
    let ends_in_slash = path.len() > 1 && path.ends_with(b"/");
    path.starts_with(b"/") && !ends_in_slash && path.iter().all(is_plain) && !has_odd_segment(path)
}

/// Whether it has empty segments, dot segments, or others that begin with a dot.
fn has_odd_segment(path: &[u8]) -> bool {
    path.windows(2).any(|pair| pair == b"//" || pair == b"/.")
}

/// What a service takes for syntax in a path, beside written slashes and dots: bits, each of which some services have.
///
/// What a path does not have is taken for syntax, as by the most lenient service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reading(u8);

impl Reading {
    /// `%2F` is a slash.
    const ESCAPED_SLASH: u8 = 1;
    /// `%2E` is a dot of a dot segment.
    const ESCAPED_DOT: u8 = 1 << 1;
    /// The path ends at `%3F` or `%23`, decoded before the query was split off.
    const ESCAPED_END: u8 = 1 << 2;
    /// `\` is a slash.
    const BACKSLASH: u8 = 1 << 3;
    /// A segment ends at its parameters (`;v=1`).
    const PARAMETERS: u8 = 1 << 4;
    /// These two are read after decoding: `%5C` and `%3B` are the same, and any slash ends parameters. Else only a written one does.
    const DECODED: u8 = 1 << 5;

    pub(crate) const LENIENT: Self = Self(u8::MAX);

    /// The bits in which the readings of a path may differ.
    fn ambiguities(path: &str) -> u8 {
        let bits = characters(b'%', path.as_bytes()).fold(0, |bits, character| bits | Self::bits(character));
        match bits & Self::PARAMETERS != 0 && bits != Self::PARAMETERS {
            true => bits | Self::DECODED,
            false => bits,
        }
    }

    /// All readings that differ in these bits, the most lenient last.
    fn all(ambiguities: u8) -> impl Iterator<Item = Self> {
        let some = (0..=ambiguities).filter(move |bits| bits & !ambiguities == 0);
        some.map(move |bits| Self(bits | !ambiguities))
    }

    /// The bits with which a character is syntax.
    fn bits(character: Character<'_>) -> u8 {
        match (character.byte, character.is_escaped) {
            (b'/', true) => Self::ESCAPED_SLASH,
            (b'.', true) => Self::ESCAPED_DOT,
            (b'?' | b'#', true) => Self::ESCAPED_END,
            (b'\\', false) => Self::BACKSLASH,
            (b'\\', true) => Self::BACKSLASH | Self::DECODED,
            (b';', false) => Self::PARAMETERS,
            (b';', true) => Self::PARAMETERS | Self::DECODED,
            _ => 0,
        }
    }

    /// The path with what is syntax as slashes and dots, and in lower case.
    fn read(self, path: &[u8]) -> PathBytes {
        let has = |bits| self.0 & bits == bits;
        // `*` too: a layer that appends slashes makes `/*/` of it.
        let mut read = PathBytes::from_slice(b"/");
        let mut is_parameter = false;
        for character in characters(b'%', path.strip_prefix(b"/").unwrap_or(path)) {
            let Character { byte, is_escaped, tail } = character;
            match byte {
                _ if is_parameter && !has(Self::DECODED) && (byte != b'/' || is_escaped) => {}
                b'/' | b'\\' if has(Self::bits(character)) => {
                    is_parameter = false;
                    read.push(b'/');
                }
                b'?' | b'#' if has(Self::bits(character)) => break,
                b';' if has(Self::bits(character)) => is_parameter = true,
                _ if is_parameter => {}
                b'.' if !has(Self::bits(character)) => read.push(ESCAPED_DOT),
                _ => push_decoded(byte.to_ascii_lowercase(), is_escaped, tail, &mut read),
            }
        }
        read
    }
}

/// A dot that is no part of a dot segment. It is no letter of a path in lower case.
const ESCAPED_DOT: u8 = b'D';

/// The path that a service with a reading makes of one.
///
/// The case of ASCII does not matter, and there are no empty segments, dot segments and trailing slashes. An empty path is `/`
/// (RFC 9110 §4.2.3).
pub(crate) fn normalized(path: &str, reading: Reading) -> PathBytes {
    match is_normal(path.as_bytes()) {
        true => SmallVec::from_slice(path.as_bytes()),
        false => merged_first(reading.read(path.as_bytes())),
    }
}

/// `/a//../b` is `/b`.
fn merged_first(read: PathBytes) -> PathBytes {
    finished(without_dot_segments(&merged(read)))
}

/// `/a//../b` is `/a/b`, as in RFC 3986.
fn resolved_first(read: &[u8]) -> PathBytes {
    finished(merged(without_dot_segments(read)))
}

fn finished(mut path: PathBytes) -> PathBytes {
    strip_trailing_slashes(&mut path);
    for byte in path.iter_mut().filter(|byte| **byte == ESCAPED_DOT) {
        *byte = b'.';
    }
    path
}

/// A path without empty segments.
pub(super) fn merged(mut path: PathBytes) -> PathBytes {
    path.dedup_by(|a, b| (*a, *b) == (b'/', b'/'));
    path
}

pub(super) fn strip_trailing_slashes(path: &mut PathBytes) {
    while path.len() > 1 && path.ends_with(b"/") {
        path.pop();
    }
}

/// RFC 3986 §5.2.4, for a path that begins with a slash.
pub(super) fn without_dot_segments(path: &[u8]) -> PathBytes {
    let mut output = SmallVec::new();
    let mut segments = path.split(|byte| *byte == b'/').peekable();
    if path.starts_with(b"/") {
        segments.next();
    } else if let Some(first) = segments.next() {
        output.extend_from_slice(first);
    }

    while let Some(segment) = segments.next() {
        let last = segments.peek().is_none();
        match segment {
            b"." | b".." => {
                if segment == b".." {
                    let parent = output.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
                    output.truncate(parent);
                }
                if last {
                    output.push(b'/');
                }
            }
            segment => {
                output.push(b'/');
                output.extend_from_slice(segment);
            }
        }
    }
    output
}

/// Decodes escapes once, except for `%2F`.
///
/// The result is the same after decoding it again, since `%` becomes `%25` where it would begin an escape. So two paths that
/// differ after decoding stay different.
pub(crate) fn decoded(path: &str) -> PathBytes {
    if !path.contains('%') {
        return SmallVec::from_slice(path.as_bytes());
    }
    let mut decoded = PathBytes::new();
    for Character { byte, is_escaped, tail } in characters(b'%', path.as_bytes()) {
        push_decoded(byte, is_escaped, tail, &mut decoded);
    }
    decoded
}

fn push_decoded(byte: u8, is_escaped: bool, tail: &[u8], decoded: &mut PathBytes) {
    match byte {
        b'/' if is_escaped => decoded.extend_from_slice(b"%2F"),
        b'%' if begins_with_hex_digits(tail) => decoded.extend_from_slice(b"%25"),
        byte => decoded.push(byte),
    }
}

/// A character of a text after its escape is decoded, and what is after it.
#[derive(Clone, Copy)]
pub(super) struct Character<'a> {
    pub(super) byte: u8,
    pub(super) is_escaped: bool,
    tail: &'a [u8],
}

/// The characters of a text whose escapes begin with this mark, such as `%`.
pub(super) fn characters(mark: u8, text: &[u8]) -> impl Iterator<Item = Character<'_>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (byte, tail) = decode_first(mark, rest)?;
        let is_escaped = rest.len() - tail.len() > 1;
        rest = tail;
        Some(Character { byte, is_escaped, tail })
    })
}

/// The first byte after decoding, and the rest. A mark without two hexadecimal digits stands for itself, as `%` does in axum.
fn decode_first(mark: u8, text: &[u8]) -> Option<(u8, &[u8])> {
    match text {
        [first, high, low, tail @ ..] if *first == mark && high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
            let digit = |byte: &u8| char::from(*byte).to_digit(16).unwrap_or_default() as u8;
            Some((digit(high) << 4 | digit(low), tail))
        }
        [first, tail @ ..] => Some((*first, tail)),
        [] => None,
    }
}

fn begins_with_hex_digits(path: &[u8]) -> bool {
    let mut rest = path;
    (0..2).all(|_| {
        decode_first(b'%', rest).is_some_and(|(character, tail)| {
            rest = tail;
            character.is_ascii_hexdigit()
        })
    })
}

#[cfg(test)]
#[cfg(feature = "serde")]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_trimmed_as_by_a_layer() {
        for (path, expected) in [
            ("/a/", "/a"),
            ("//a//b//", "/a//b"),
            ("/a%2F/", "/a%2F"),
            ("/", "/"),
            ("//", "/"),
            ("", "/"),
            ("*", "*"),
        ] {
            assert_eq!(trimmed(path.as_bytes()), expected.as_bytes(), "{path}");
        }
    }

    /// The normal forms of a path, the most lenient last.
    fn normal_forms(path: &str) -> Vec<String> {
        let mut found = Vec::new();
        let is_any = any_spelling(path, |form, path| {
            if matches!(form, Form::Normalized(_)) {
                let path = std::str::from_utf8(path).unwrap().to_owned();
                found.retain(|other| *other != path);
                found.push(path);
            }
            false
        });
        assert!(!is_any, "{path}");
        found
    }

    #[test]
    fn a_path_has_the_spellings_of_lenient_services() {
        for (written, normal) in [
            ("/", &["/"][..]),
            ("/a/b", &["/a/b"]),
            ("/a/", &["/a"]),
            ("/a//", &["/a"]),
            ("//a", &["/a"]),
            ("/a//b", &["/a/b"]),
            ("/a/./b", &["/a/./b", "/a/b"]),
            ("/a/.", &["/a/.", "/a"]),
            ("/x/../a", &["/x/../a", "/a"]),
            ("/../a", &["/../a", "/a"]),
            ("/a//../b", &["/a/../b", "/a/b", "/b"]),
            ("/%61", &["/a"]),
            ("/x/%2e%2E/a", &["/x/../a", "/a"]),
            ("/x%2f..%2Fa", &["/x%2F..%2Fa", "/x/../a", "/a"]),
            ("/x\\..\\a", &["/x\\..\\a", "/x/../a", "/a"]),
            ("/A", &["/a"]),
            ("/a;v=1/b;w", &["/a;v=1/b;w", "/a/b"]),
            ("/x/..;/a", &["/x/..;/a", "/x/../a", "/a"]),
            (
                "/x/..;v=1%2Fa",
                &["/x/..;v=1%2Fa", "/x/..;v=1/a", "/x/..", "/", "/x/../a", "/a"],
            ),
            ("", &["/"]),
            ("*", &["/*"]),
            ("/a%3Fb/c", &["/a?b/c", "/a"]),
            ("/%2561", &["/%2561"]),
        ] {
            assert_eq!(normal_forms(written), normal, "{written}");
            let lenient = normal.last().unwrap();
            let is_other = any_spelling(lenient, |_, path| path != lenient.as_bytes());
            assert!(!is_other, "{lenient} again");
        }
    }

    #[test]
    fn a_path_has_the_spellings_of_services_that_take_less_for_syntax() {
        for (written, expected) in [
            ("/a%2Fb/../c", "/c"),
            ("/a%5Cb/../c", "/c"),
            ("/a\\b/../c", "/c"),
            ("/a%3F/../c", "/c"),
            ("/a%23/../c", "/c"),
            ("/c;%2Fx", "/c"),
            ("/c;x%2Fy", "/c"),
            ("/c;%3F/d", "/c/d"),
            // Parameters are removed, and `%2F` is decoded afterwards.
            ("/c;%2Fx/d%2Fe", "/c/d/e"),
            ("/c%3Bx;y/d", "/c;x/d"),
            // One service resolves dots, and the next one takes `%2F` for a slash.
            ("/b/a%2Fb/../..%2Fc", "/c"),
            ("/a%2Fb/../c%2Fd", "/c/d"),
            ("/x;a%5Cb/..%5Cc", "/c"),
            ("/a%23/../c%3Fx", "/c"),
            // Dots stay.
            ("/C/d/..", "/c/d/.."),
            // Only a written backslash is a slash, as in browsers.
            ("/c/a%5Cb\\..\\d", "/c/d"),
            ("/c/a%5Cb\\%2e%2e\\d", "/c/d"),
            // Only written dots are those of dot segments.
            ("/c/%2e/../d%2Eh", "/c/d.h"),
            ("/a%2Fb/../C/d%2Fe/", "/c/d%2Fe"),
            ("/a%2Fb%3Fc%5Cd\\e;f%3Bg%2E/../c", "/c"),
        ] {
            let found = normal_forms(written);
            assert!(found.iter().any(|path| path == expected), "{written}: {found:?}");
        }
    }

    /// Else a short request would cost milliseconds.
    #[test]
    fn one_of_too_many_spellings_is_taken_to_be_any() {
        let all = "/a%2Fb%3F%5C\\;%3B%2E";
        for (path, expected) in [
            (all.repeat(12), false),
            (all.repeat(13), true),
            // Nothing in it has two readings.
            ("/A".repeat(10_000), false),
        ] {
            assert_eq!(any_spelling(&path, |_, _| false), expected, "{}", path.len());
        }
    }
}
