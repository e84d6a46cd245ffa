//! Spellings of paths: one that keys have, and those that a service may take for the same path.

use http::request::Parts;
use smallvec::SmallVec;

pub(crate) type PathBytes = SmallVec<[u8; 64]>;

/// The path of a request, with the prefix of a nested router.
pub(super) fn whole_path(parts: &Parts) -> &str {
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
    Normalized,
}

/// The spellings of the path of a request.
pub(crate) struct Spellings<'a> {
    written: &'a [u8],
    others: SmallVec<[(Form, PathBytes); 3]>,
}

impl<'a> Spellings<'a> {
    pub(crate) fn of(parts: &'a Parts) -> Self {
        Self::of_path(whole_path(parts))
    }

    pub(crate) fn of_path(path: &'a str) -> Self {
        let mut spellings = Self {
            written: path.as_bytes(),
            others: SmallVec::new(),
        };
        if !is_normal(path.as_bytes()) {
            let decoded = decoded(path);
            let normal = [Segments::Merged, Segments::Resolved].map(|first| normalized(&decoded, first));
            spellings.others.push((Form::Decoded, decoded));
            let [merged, resolved] = normal;
            if merged != resolved {
                spellings.others.push((Form::Normalized, resolved));
            }
            spellings.others.push((Form::Normalized, merged));
        }
        spellings
    }

    pub(crate) fn written(&self) -> &'a [u8] {
        self.written
    }

    pub(crate) fn normalized(&self) -> &[u8] {
        self.others.last().map_or(self.written, |(_, path)| path)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Form, &[u8])> {
        // A path in normal form is the same in all spellings; a template may not be.
        let normal = self.others.is_empty().then_some((Form::Normalized, self.written));
        let trimmed = (!self.others.is_empty()).then(|| (Form::Trimmed, trimmed(self.written)));
        let others = self.others.iter().map(|(form, path)| (*form, &path[..]));
        std::iter::once((Form::Written, self.written))
            .chain(trimmed)
            .chain(others)
            .chain(normal)
    }
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
    let has_odd_segment = || path.windows(2).any(|pair| pair == b"//" || pair == b"/.");
    let ends_in_slash = path.len() > 1 && path.ends_with(b"/");
    path.starts_with(b"/") && !ends_in_slash && path.iter().all(is_plain) && !has_odd_segment()
}

/// What is done first with the segments of a path. Services differ in it: `/a//../b` becomes `/b` or `/a/b`.
#[derive(Clone, Copy)]
pub(crate) enum Segments {
    /// Empty segments are removed.
    Merged,
    /// Dot segments are removed.
    Resolved,
}

/// The path that the most lenient service makes of a decoded one.
///
/// `%2F` and `\` are slashes, a segment ends at its parameters (`;v=1`), the path ends at a decoded `?` or `#`, the case of ASCII
/// does not matter, and there are no empty segments, dot segments and trailing slashes. An empty path is `/`
/// (RFC 9110 §4.2.3).
pub(crate) fn normalized(decoded: &[u8], first: Segments) -> PathBytes {
    // `*` too: a layer that appends slashes makes `/*/` of it.
    let mut path = PathBytes::from_slice(b"/");
    let mut rest = decoded.strip_prefix(b"/").unwrap_or(decoded);
    let mut is_parameter = false;
    while let [byte, tail @ ..] = rest {
        let (byte, tail) = rest.strip_prefix(b"%2F").map_or((*byte, tail), |tail| (b'/', tail));
        rest = tail;
        match byte {
            b'/' | b'\\' => {
                is_parameter = false;
                path.push(b'/');
            }
            b';' => is_parameter = true,
            // Decoded before the query was split off.
            b'?' | b'#' => break,
            _ if is_parameter => {}
            _ => path.push(byte.to_ascii_lowercase()),
        }
    }

    path = match first {
        Segments::Merged => without_dot_segments(&merged(path)),
        Segments::Resolved => merged(without_dot_segments(&path)),
    };
    strip_trailing_slashes(&mut path);
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
    let mut rest = path.as_bytes();
    if !rest.contains(&b'%') {
        return SmallVec::from_slice(rest);
    }

    let mut decoded = PathBytes::new();
    while let Some((character, tail)) = decode_first(rest) {
        match character {
            b'/' if rest[0] == b'%' => decoded.extend_from_slice(b"%2F"),
            b'%' if begins_with_hex_digits(tail) => decoded.extend_from_slice(b"%25"),
            byte => decoded.push(byte),
        }
        rest = tail;
    }
    decoded
}

/// The first byte after percent-decoding, and the rest. A `%` without two hexadecimal digits is a `%`, as in axum.
fn decode_first(path: &[u8]) -> Option<(u8, &[u8])> {
    match path {
        [b'%', high, low, tail @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
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
        decode_first(rest).is_some_and(|(character, tail)| {
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

    #[test]
    fn a_path_has_the_spellings_of_lenient_services() {
        for (written, normal) in [
            ("/", &["/"][..]),
            ("/a/b", &["/a/b"]),
            ("/a/", &["/a"]),
            ("/a//", &["/a"]),
            ("//a", &["/a"]),
            ("/a//b", &["/a/b"]),
            ("/a/./b", &["/a/b"]),
            ("/a/.", &["/a"]),
            ("/x/../a", &["/a"]),
            ("/../a", &["/a"]),
            ("/a//../b", &["/a/b", "/b"]),
            ("/%61", &["/a"]),
            ("/x/%2e%2E/a", &["/a"]),
            ("/x%2f..%2Fa", &["/a"]),
            ("/x\\..\\a", &["/a"]),
            ("/A", &["/a"]),
            ("/a;v=1/b;w", &["/a/b"]),
            ("/x/..;/a", &["/a"]),
            ("/x/..;v=1%2Fa", &["/a"]),
            ("", &["/"]),
            ("*", &["/*"]),
            ("/a%3Fb/c", &["/a"]),
            ("/%2561", &["/%2561"]),
        ] {
            let spellings = Spellings::of_path(written);
            let found: Vec<_> = spellings
                .iter()
                .filter(|(form, _)| *form == Form::Normalized)
                .map(|(_, path)| std::str::from_utf8(path).unwrap())
                .collect();
            assert_eq!(found, normal, "{written}");
            assert_eq!(spellings.iter().next(), Some((Form::Written, written.as_bytes())));
            for normal in normal {
                let again = Spellings::of_path(normal);
                assert!(
                    again.iter().all(|(_, path)| path == normal.as_bytes()),
                    "{normal} again"
                );
            }
        }
    }
}
