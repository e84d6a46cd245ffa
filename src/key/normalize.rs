//! Spellings of paths: one that keys have, and those that a service may take for the same path.

use std::{cell::RefCell, collections::VecDeque, rc::Rc};

use smallvec::{SmallVec, smallvec};

pub(crate) type PathBytes = SmallVec<[u8; 64]>;

/// Paths that differ.
pub(crate) type Forms = SmallVec<[PathBytes; 1]>;

/// How a path, or the template of one, is spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// As it is in the request.
    Written,
    /// As [`trimmed`] returns it.
    Trimmed,
    /// With its escapes decoded once, except for `%2F`.
    Decoded,
    /// As one of its [normal forms](reachable_forms).
    Normal,
}

/// Whether one of the spellings of a path is such. If there are too many to look at, one is taken to be.
pub(crate) fn any_spelling(path: &str, mut is_such: impl FnMut(Form, &[u8]) -> bool) -> bool {
    let written = path.as_bytes();
    if is_such(Form::Written, written) {
        return true;
    }
    // All spellings of a normal path are the same. Those of a template may not be.
    if is_normal(written) {
        return is_such(Form::Normal, written);
    }
    is_such(Form::Trimmed, trimmed(written))
        || is_such(Form::Decoded, &decoded(path))
        || several_forms(path).is_none_or(|forms| forms.iter().any(|form| is_such(Form::Normal, form)))
}

/// The normal forms of a path, unless there are too many to look at.
pub(crate) fn normal_forms(path: &str) -> Option<Forms> {
    if is_normal(path.as_bytes()) {
        return Some(smallvec![PathBytes::from_slice(path.as_bytes())]);
    }
    reachable_forms(path)
}

/// The same of a path of a request that is not normal. Those of the last ones are kept, since all policies look at its paths.
fn several_forms(path: &str) -> Option<Rc<Forms>> {
    type Found = (Box<str>, Option<Rc<Forms>>);
    thread_local! {
        static LAST: RefCell<VecDeque<Found>> = RefCell::default();
    }
    LAST.with_borrow_mut(|last| {
        if let Some((_, forms)) = last.iter().find(|(known, _)| **known == *path) {
            return forms.clone();
        }
        let forms = reachable_forms(path).map(Rc::new);
        last.truncate(MOST_KEPT - 1);
        last.push_front((path.into(), forms.clone()));
        forms
    })
}

/// The most paths of a thread whose forms are kept.
const MOST_KEPT: usize = 3;

/// What services may take a path for, one after the other: each does some of the [`STEPS`], in any order. `None` if that is too much to
/// look at.
///
/// The first form is that in which nothing but a written slash is syntax. The case of ASCII does not matter, and there are no empty
/// segments, and no trailing slashes but for those of a rest. An empty path is `/` (RFC 9110 §4.2.3).
fn reachable_forms(path: &str) -> Option<Forms> {
    let first = with_marks(path);
    // A decoded `%` is no syntax.
    let without_slash = first.strip_suffix(b"/").unwrap_or(&first);
    if is_normal_but_for_percent(without_slash) {
        return Some(smallvec![PathBytes::from_slice(without_slash)]);
    }
    let mut reached = 0;
    let mut marked: Forms = smallvec![first];
    let mut normal = Forms::new();
    while let Some(form) = marked.get(reached).cloned() {
        let unmarked = without_marks(&form);
        // Several slashes are the rest of a path for `/files/{*rest}`.
        let has_rest = form.ends_with(b"//") && unmarked.len() > 1;
        let with_rest = has_rest.then(|| [&unmarked[..], b"//"].concat().into());
        for found in [unmarked].into_iter().chain(with_rest) {
            if !normal.contains(&found) {
                normal.push(found);
            }
        }
        for step in STEPS {
            let mut next = form.clone();
            step(&mut next);
            if next == form || marked.contains(&next) {
                continue;
            }
            marked.push(next);
            if marked.len() > MOST_FORMS || marked.len() * path.len() > MOST_BYTES {
                return None;
            }
        }
        reached += 1;
    }
    Some(normal)
}

/// The most forms of a path, before marks are removed.
const MOST_FORMS: usize = 32;
/// The most bytes in the forms of a path that has several.
const MOST_BYTES: usize = 32 * 1_024;

pub(crate) fn has_dot_segment(path: &[u8]) -> bool {
    path.split(|byte| *byte == b'/')
        .any(|segment| matches!(segment, b"." | b".."))
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
    !path.contains(&b'%') && is_normal_but_for_percent(path)
}

fn is_normal_but_for_percent(path: &[u8]) -> bool {
    let is_plain = |byte: &u8| !byte.is_ascii_uppercase() && !matches!(byte, 0..=b' ' | b';' | b'\\');
    let Some(rest) = path.strip_prefix(b"/") else {
        return false;
    };
    let mut segments = rest.split(|byte| *byte == b'/');
    rest.is_empty() || rest.iter().all(is_plain) && !segments.any(|segment| matches!(segment, b"" | b"." | b".."))
}

/// What a service does to a path, which may leave syntax to the next service.
const STEPS: [fn(&mut PathBytes); 12] = [
    // A reference to another host, for parsers of URLs (RFC 3986 §4.2).
    strip_authority,
    |path| replace(path, |byte| byte == ESCAPED_SLASH, b'/'),
    // As browsers do, and as services do that decode first.
    |path| replace(path, |byte| byte == b'\\', b'/'),
    |path| replace(path, |byte| matches!(byte, b'\\' | ESCAPED_BACKSLASH), b'/'),
    |path| strip_parameters(path, |byte| byte == b';'),
    |path| strip_parameters(path, |byte| matches!(byte, b';' | ESCAPED_SEMICOLON)),
    // Decoded before the query is split off. Not all know fragments.
    |path| strip_from(path, |byte| byte == ESCAPED_QUERY),
    |path| strip_from(path, |byte| matches!(byte, ESCAPED_QUERY | ESCAPED_FRAGMENT)),
    // As the URL Standard does with a decoded path.
    strip_controls,
    merge,
    // RFC 3986 takes written dots only for those of dot segments, and browsers escaped ones too.
    |path| *path = without_dot_segments(path),
    |path| {
        replace(path, |byte| byte == ESCAPED_DOT, b'.');
        *path = without_dot_segments(path);
    },
];

// Escaped characters that are syntax for some services. They are no letters of a path in lower case.
const ESCAPED_SLASH: u8 = b'S';
const ESCAPED_DOT: u8 = b'D';
const ESCAPED_BACKSLASH: u8 = b'B';
const ESCAPED_SEMICOLON: u8 = b'P';
const ESCAPED_QUERY: u8 = b'Q';
const ESCAPED_FRAGMENT: u8 = b'F';

/// A path in lower case, decoded except for marks of what may be syntax.
fn with_marks(path: &str) -> PathBytes {
    // `*` too: a layer that appends slashes makes `/*/` of it.
    let mut marked = PathBytes::from_slice(b"/");
    for Character { byte, is_escaped, tail } in characters(b'%', path.strip_prefix('/').unwrap_or(path).as_bytes()) {
        match byte {
            b'/' if is_escaped => marked.push(ESCAPED_SLASH),
            b'.' if is_escaped => marked.push(ESCAPED_DOT),
            b'\\' if is_escaped => marked.push(ESCAPED_BACKSLASH),
            b';' if is_escaped => marked.push(ESCAPED_SEMICOLON),
            b'?' => marked.push(ESCAPED_QUERY),
            b'#' => marked.push(ESCAPED_FRAGMENT),
            byte => push_decoded(byte.to_ascii_lowercase(), is_escaped, tail, &mut marked),
        }
    }
    marked
}

/// The form without empty segments, trailing slashes and marks.
fn without_marks(marked: &[u8]) -> PathBytes {
    let mut path = PathBytes::new();
    for byte in marked {
        match *byte {
            b'/' if path.ends_with(b"/") => {}
            ESCAPED_SLASH => path.extend_from_slice(b"%2F"),
            ESCAPED_DOT => path.push(b'.'),
            ESCAPED_BACKSLASH => path.push(b'\\'),
            ESCAPED_SEMICOLON => path.push(b';'),
            ESCAPED_QUERY => path.push(b'?'),
            ESCAPED_FRAGMENT => path.push(b'#'),
            byte => path.push(byte),
        }
    }
    strip_trailing_slashes(&mut path);
    path
}

fn replace(path: &mut [u8], is_replaced: impl Fn(u8) -> bool, by: u8) {
    for byte in path.iter_mut().filter(|byte| is_replaced(**byte)) {
        *byte = by;
    }
}

fn strip_authority(path: &mut PathBytes) {
    if let Some(reference) = path.strip_prefix(b"//") {
        let host = reference.iter().position(|byte| *byte != b'/').unwrap_or(0);
        let end = reference[host..].iter().position(|byte| *byte == b'/');
        *path = end.map_or_else(
            || PathBytes::from_slice(b"/"),
            |end| PathBytes::from_slice(&reference[host + end..]),
        );
    }
}

/// Removes what begins with one of these characters from each segment.
fn strip_parameters(path: &mut PathBytes, begins: impl Fn(u8) -> bool) {
    let mut is_parameter = false;
    path.retain(|byte| {
        is_parameter = *byte != b'/' && (is_parameter || begins(*byte));
        !is_parameter
    });
}

fn strip_from(path: &mut PathBytes, is_end: impl Fn(u8) -> bool) {
    let end = path.iter().position(|byte| is_end(*byte));
    path.truncate(end.unwrap_or(path.len()));
}

fn strip_controls(path: &mut PathBytes) {
    let end = path.iter().rposition(|byte| *byte > b' ');
    path.truncate(end.map_or(0, |last| last + 1));
    path.retain(|byte| !matches!(*byte, b'\t' | b'\n' | b'\r'));
}

/// Removes empty segments.
pub(super) fn merge(path: &mut PathBytes) {
    path.dedup_by(|a, b| (*a, *b) == (b'/', b'/'));
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

/// The characters of a text in which escapes begin with this mark, such as `%`. A mark without two hexadecimal digits stands for
/// itself, as `%` does in axum.
pub(super) fn characters(mark: u8, text: &[u8]) -> impl Iterator<Item = Character<'_>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (byte, is_escaped, tail) = match rest {
            [first, high, low, tail @ ..] if *first == mark && high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                let digit = |byte: &u8| char::from(*byte).to_digit(16).unwrap_or_default() as u8;
                (digit(high) << 4 | digit(low), true, tail)
            }
            [first, tail @ ..] => (*first, false, tail),
            [] => return None,
        };
        rest = tail;
        Some(Character { byte, is_escaped, tail })
    })
}

fn begins_with_hex_digits(path: &[u8]) -> bool {
    let first = characters(b'%', path).take(2);
    first.filter(|character| character.byte.is_ascii_hexdigit()).count() == 2
}

#[cfg(test)]
#[cfg(feature = "serde")]
mod tests {
    use std::collections::BTreeSet;

    use proptest::{
        collection::vec,
        prelude::*,
        sample::select,
        strategy::ValueTree,
        test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
    };

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

    fn normal_forms(path: &str) -> Vec<String> {
        let forms = super::normal_forms(path).unwrap_or_else(|| panic!("too many of {path}"));
        let text = |form: &PathBytes| String::from_utf8(form.to_vec()).unwrap();
        forms.iter().map(text).collect()
    }

    #[test]
    fn a_path_has_the_spellings_of_lenient_services() {
        for (written, normal) in [
            ("/", &["/"][..]),
            ("/a/b", &["/a/b"]),
            ("/a/", &["/a"]),
            ("/a//", &["/a//", "/a"]),
            ("/.//", &["/.", "/.//", "/"]),
            ("//a", &["/a", "/"]),
            ("//a/b/c", &["/a/b/c", "/b/c"]),
            ("///a/b", &["/a/b", "/b"]),
            ("//", &["/"]),
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
            let (mut found, mut expected) = (normal_forms(written), normal.to_vec());
            found.sort();
            expected.sort_unstable();
            assert_eq!(found, expected, "{written}");
            // The last one is that of the most lenient service.
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

    #[test]
    fn the_policies_of_a_request_share_the_forms_of_its_path() {
        let forms = |path| several_forms(path).expect("few forms");
        // The first one of a thread too.
        assert_eq!(forms("")[..], [PathBytes::from_slice(b"/")]);
        let first = forms("/a%2Fb/../c");
        let others = ["/b%2Fb/../c", "/b%2Fb/../d"].map(forms);
        assert_ne!(others[0], others[1]);
        assert!(Rc::ptr_eq(&first, &forms("/a%2Fb/../c")));
        // Few are kept.
        let _ = ["/1;", "/2;", "/3;"].map(forms);
        assert!(!Rc::ptr_eq(&first, &forms("/a%2Fb/../c")));
        assert_eq!(first, forms("/a%2Fb/../c"));
    }

    /// Else a short request would cost milliseconds.
    #[test]
    fn one_of_too_many_spellings_is_taken_to_be_any() {
        let all = "/a%2Fb%3F%5C\\;%3B%2E";
        for (path, expected) in [
            (all.to_owned(), false),
            (all.repeat(12), false),
            (all.repeat(60), true),
            ("/login%5C..;x\\/../%5C..%2F//.;%3B%2e%2e/..".to_owned(), true),
            (format!("/{}a%2Fb", "a".repeat(MOST_BYTES / 2 - 10)), false),
            (format!("/{}a%2Fb", "a".repeat(MOST_BYTES / 2)), true),
            // Nothing in it has two readings.
            ("/A".repeat(50_000), false),
        ] {
            let mut compared = 0;
            let is_any = any_spelling(&path, |_, _| {
                compared += 1;
                false
            });
            assert_eq!(is_any, expected, "{path:.60} with {compared} spellings");
            assert!(compared <= MOST_FORMS + 3, "{path:.60}: {compared}");
        }
    }

    /// A service, by what it makes of a path.
    type Service = fn(&[u8]) -> Vec<u8>;

    /// What services forward.
    const FORWARDING: [Service; 13] = [
        <[u8]>::to_vec,
        // HAProxy.
        |path| resolve(path, b"."),
        |path| resolve(&merge(path), b"."),
        |path| {
            resolve(
                &unescape(path, |byte| byte.is_ascii_alphanumeric() || byte == b'.'),
                b".",
            )
        },
        // A parser of the URL Standard, such as that of Envoy.
        |path| resolve(&replace(path, b'\\', b'/'), b".D"),
        |path| merge(&resolve(&replace(path, b'\\', b'/'), b".D")),
        |path| {
            let path = unescape(path, |byte| !matches!(byte, b'/' | b'\\'));
            resolve(&replace(&path, b'\\', b'/'), b".")
        },
        // nginx, and Go.
        |path| escape(&resolve(&merge(&unescape(path, |_| true)), b"."), b"%?# "),
        |path| escape(&resolve(&merge(&unescape(path, |_| true)), b"."), b"%?# \\"),
        // Apache.
        |path| escape(&resolve(&merge(&unescape(path, |byte| byte != b'/')), b"."), b"?# "),
        // A second URL of the decoded path.
        |path| until_query(&unescape(path, |_| true), b"?#"),
        |path| until_query(&without_controls(&unescape(path, |_| true)), b"?#"),
        |path| until_query(&unescape(path, |_| true), b"?"),
    ];

    /// What services take as the path of a route.
    const ROUTING: [Service; 14] = [
        <[u8]>::to_vec,
        // axum.
        |path| unescape(path, |byte| byte != b'/'),
        // nginx, and Go.
        |path| resolve(&merge(&unescape(path, |_| true)), b"."),
        // Python.
        |path| unescape(path, |_| true),
        |path| until_query(&unescape(path, |_| true), b"?#"),
        // Tomcat.
        |path| resolve(&merge(&unescape(&strip(path), |_| true)), b"."),
        |path| resolve(&merge(&unescape(&strip(path), |byte| byte != b'/')), b"."),
        |path| resolve(&merge(&replace(&unescape(&strip(path), |_| true), b'\\', b'/')), b"."),
        // IIS.
        |path| {
            resolve(
                &merge(&replace(&unescape(path, |byte| byte != b'/'), b'\\', b'/')),
                b".",
            )
        },
        // RFC 3986, and the URL Standard, also for a reference.
        |path| resolve(path, b"."),
        |path| resolve(&path_of_reference(&replace(path, b'\\', b'/')), b".D"),
        |path| resolve(&replace(path, b'\\', b'/'), b".D"),
        // Jetty.
        |path| merge(&resolve(&strip(path), b".D")),
        |path| resolve(&merge(&strip(&unescape(path, |_| true))), b"."),
    ];

    fn unescape(path: &[u8], is_decoded: fn(u8) -> bool) -> Vec<u8> {
        let mut decoded = Vec::new();
        let mut rest = path;
        while let [first, tail @ ..] = rest {
            let digits = tail.get(..2).filter(|_| *first == b'%');
            let escaped = digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
            let (text, after) = match escaped {
                Some(byte) if is_decoded(byte) => (vec![byte], &tail[2..]),
                Some(_) => (rest[..3].to_vec(), &tail[2..]),
                None => (vec![*first], tail),
            };
            decoded.extend(text);
            rest = after;
        }
        decoded
    }

    fn escape(path: &[u8], escaped: &[u8]) -> Vec<u8> {
        let text = path.iter().map(|byte| match escaped.contains(byte) {
            true => format!("%{byte:02X}").into_bytes(),
            false => vec![*byte],
        });
        text.flatten().collect()
    }

    fn replace(path: &[u8], from: u8, to: u8) -> Vec<u8> {
        let text = path.iter().map(|byte| if *byte == from { to } else { *byte });
        text.collect()
    }

    fn merge(path: &[u8]) -> Vec<u8> {
        let mut path = path.to_vec();
        path.dedup_by(|a, b| *a == b'/' && *b == b'/');
        path
    }

    fn strip(path: &[u8]) -> Vec<u8> {
        let segments = path.split(|byte| *byte == b'/');
        let names = segments.map(|segment| segment.split(|byte| *byte == b';').next().unwrap());
        names.collect::<Vec<_>>().join(&b'/')
    }

    /// The URL Standard ignores further slashes before a host.
    fn path_of_reference(path: &[u8]) -> Vec<u8> {
        let Some(reference) = path.strip_prefix(b"//") else {
            return path.to_vec();
        };
        let mut parts = reference.splitn(2, |byte| *byte == b'/').collect::<Vec<_>>();
        while let [b"", rest] = parts[..] {
            parts = rest.splitn(2, |byte| *byte == b'/').collect();
        }
        [b"/", parts.get(1).copied().unwrap_or_default()].concat()
    }

    fn until_query(path: &[u8], ends: &[u8]) -> Vec<u8> {
        let end = path.iter().position(|byte| ends.contains(byte));
        path[..end.unwrap_or(path.len())].to_vec()
    }

    fn without_controls(path: &[u8]) -> Vec<u8> {
        let text = path.iter().filter(|byte| !b"\t\n\r".contains(byte)).copied();
        let mut text: Vec<_> = text.collect();
        while text.last().is_some_and(|last| *last <= b' ') {
            text.pop();
        }
        text
    }

    /// Without dot segments, which are of written dots, or of escaped ones too (`.D`).
    fn resolve(path: &[u8], dots: &[u8]) -> Vec<u8> {
        let mut kept = vec![];
        let mut segments = path.split(|byte| *byte == b'/').skip(1).peekable();
        while let Some(segment) = segments.next() {
            let name = match dots.contains(&b'D') {
                true => unescape(segment, |byte| byte == b'.'),
                false => segment.to_vec(),
            };
            match &name[..] {
                b"." => {}
                b".." => drop(kept.pop()),
                _ => kept.push(segment),
            }
            if segments.peek().is_none() && matches!(&name[..], b"." | b"..") {
                kept.push(b"");
            }
        }
        [b"/", &kept.join(&b'/')[..]].concat()
    }

    /// Without what no route differs in.
    fn compared(path: &[u8]) -> Vec<u8> {
        let mut path = merge(&unescape(path, |byte| byte != b'/')).to_ascii_lowercase();
        while path.len() > 1 && path.ends_with(b"/") {
            path.pop();
        }
        path
    }

    /// Up to seven of these are syntax for some services, and text for others.
    fn paths() -> impl Strategy<Value = String> {
        const PARTS: &[&str] = &[
            "/", "/", "/", "login", "a", "..", "..", ".", "%2F", "%2F", "%2e", "%2e%2e", ";", ";x", "%3B", "\\", "%5C",
            "//", "/../", "%5C..", "%2F..", "%3F", "%23", "%0A", "%20",
        ];
        vec(select(PARTS), 1..10).prop_map(|parts| format!("/{}", parts.concat()))
    }

    #[test]
    fn a_path_has_the_spellings_of_two_services_one_after_the_other() {
        let mut looked_at = 0;
        let mut random = TestRunner::new_with_rng(Config::default(), TestRng::deterministic_rng(RngAlgorithm::ChaCha));
        for _ in 0..2_000 {
            let path = paths().new_tree(&mut random).unwrap().current();
            let Some(forms) = super::normal_forms(&path) else {
                continue;
            };
            looked_at += 1;
            let forms: BTreeSet<_> = forms.iter().map(|form| compared(form)).collect();
            let forwarded: BTreeSet<_> = FORWARDING.iter().map(|service| service(path.as_bytes())).collect();
            let pairs = forwarded
                .iter()
                .flat_map(|first| ROUTING.iter().enumerate().map(move |last| (first, last)));
            for (first, (position, service)) in pairs {
                let routed = compared(&service(first));
                let text = |path: &[u8]| String::from_utf8_lossy(path).into_owned();
                assert!(
                    forms.contains(&routed),
                    "{path}, forwarded as {}, is {} for service {position}",
                    text(first),
                    text(&routed)
                );
            }
        }
        assert!(looked_at > 1_500, "{looked_at} paths had few enough spellings");
    }
}
