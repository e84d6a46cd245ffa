use http::request::Parts;
use smallvec::SmallVec;

use super::{
    error::KeyError,
    extractor::{KeyExtractor, inherent_or},
    key::Key,
};

/// The path of the request, without the query.
///
/// Percent-encoded characters are decoded once, whether they are unreserved (`%41`), reserved (`%2B`) or not ASCII
/// (`%C3%A9`), so spellings of a path that axum decodes alike are one key. `%2F` is not decoded, and an invalid escape such as
/// `%zz` is kept. In a nested axum router the key is the whole path, not the part that the prefix left (feature `axum`).
///
/// # What an attacker can do
///
/// The caller chooses the path, and each spelling that is not listed above is a key with a quota of its own:
///
/// * on a route with a wildcard such as `/files/{*rest}`, every URL, and `a%2Fb` beside `a/b`;
/// * on a route with a parameter such as `/users/{id}`, every value. If the handler parses the value, every form of it:
///   `/users/42`, `/users/042` and `/users/+42` are one number, and letters of both cases are one UUID;
/// * trailing slashes, repeated slashes, dot segments and upper case, where the service treats them alike. The
///   [settings](Path#implementations) make them one key.
///
/// [`route`](fn@super::route), the template of the matched route, has none of these (feature `axum`). With `path`, add a
/// policy that counts the caller alone, such as by [`ip`](super::ip()).
///
/// ```
/// use http::Request;
/// use tower_quota::{Key, KeyExtractor, key};
///
/// let (parts, ()) = Request::get("/%68ello%2fworld?x=1").body(())?.into_parts();
/// let key = key::path().extract(&parts)?.unwrap();
/// assert_eq!(key.to_string(), "path=/hello%2Fworld");
/// assert_eq!(key, Key::path("/hello%2Fworld"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn path() -> Path {
    Path::default()
}

/// A [`KeyExtractor`] made by [`path`].
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub struct Path {
    strip_trailing_slash: bool,
    collapse_slashes: bool,
    remove_dot_segments: bool,
    ignore_case: bool,
}

inherent_or!(Path);

/// Settings: more spellings of a path that are one key, for services that treat them alike.
impl Path {
    /// Makes `/a/` and `/a//` the same key as `/a`.
    ///
    /// The default is to keep them apart.
    ///
    /// ```
    /// use tower_quota::{Key, key};
    ///
    /// assert_eq!(key::path().strip_trailing_slash().key_of("/a/"), Key::path("/a"));
    /// ```
    pub fn strip_trailing_slash(mut self) -> Self {
        self.strip_trailing_slash = true;
        self
    }

    /// Makes `//a//b` the same key as `/a/b`.
    ///
    /// The default is to keep them apart.
    ///
    /// ```
    /// use tower_quota::{Key, key};
    ///
    /// assert_eq!(key::path().collapse_slashes().key_of("//a//b"), Key::path("/a/b"));
    /// ```
    pub fn collapse_slashes(mut self) -> Self {
        self.collapse_slashes = true;
        self
    }

    /// Makes `/a/./b` and `/a/c/../b` the same key as `/a/b` (RFC 3986 §5.2.4).
    ///
    /// The default is to keep them apart.
    ///
    /// ```
    /// use tower_quota::{Key, key};
    ///
    /// assert_eq!(key::path().remove_dot_segments().key_of("/a/c/../b"), Key::path("/a/b"));
    /// ```
    pub fn remove_dot_segments(mut self) -> Self {
        self.remove_dot_segments = true;
        self
    }

    /// Makes `/A` the same key as `/a`. Letters that are not ASCII keep their case.
    ///
    /// The default is to keep them apart.
    ///
    /// ```
    /// use tower_quota::{Key, key};
    ///
    /// assert_eq!(key::path().ignore_case().key_of("/A"), Key::path("/a"));
    /// ```
    pub fn ignore_case(mut self) -> Self {
        self.ignore_case = true;
        self
    }
}

/// Keys made by hand.
impl Path {
    /// The key that this extractor returns for a request to the path, with its settings.
    ///
    /// The path has no query. Without settings it is [`Key::path`].
    ///
    /// ```
    /// use tower_quota::{Key, key};
    ///
    /// assert_eq!(key::path().key_of("/%68ello"), Key::path("/hello"));
    /// ```
    pub fn key_of(&self, path: &str) -> Key {
        Key::component("path", b"", &self.canonical(path))
    }

    fn canonical(self, path: &str) -> SmallVec<[u8; 64]> {
        let mut canonical = canonical_path(path);
        if self.collapse_slashes {
            canonical.dedup_by(|a, b| (*a, *b) == (b'/', b'/'));
        }
        if self.remove_dot_segments {
            canonical = without_dot_segments(&canonical);
        }
        while self.strip_trailing_slash && canonical.len() > 1 && canonical.ends_with(b"/") {
            canonical.pop();
        }
        if self.ignore_case {
            canonical.make_ascii_lowercase();
        }
        canonical
    }
}

impl Key {
    /// The key that [`path`] returns for a request to the path, which has no query.
    ///
    /// [`Path::key_of`] makes the key of an extractor with settings.
    ///
    /// ```
    /// use tower_quota::Key;
    ///
    /// assert_eq!(Key::path("/%68ello").to_string(), "path=/hello");
    /// ```
    pub fn path(path: &str) -> Self {
        Path::default().key_of(path)
    }
}

impl KeyExtractor for Path {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        Ok(Some(self.key_of(whole_path(parts))))
    }
}

/// The path of a request, with the prefix of a nested router.
fn whole_path(parts: &Parts) -> &str {
    #[cfg(feature = "axum")]
    if let Some(uri) = parts.extensions.get::<::axum::extract::OriginalUri>() {
        return uri.path();
    }
    parts.uri.path()
}

/// The path of a request with its escapes decoded, as [`path`] has it in keys.
#[cfg(feature = "serde")]
pub(crate) fn decoded_path(parts: &Parts) -> SmallVec<[u8; 64]> {
    canonical_path(whole_path(parts))
}

/// The path that a service may make of this one: with `%2F` as a slash, and without empty and dot segments.
#[cfg(feature = "serde")]
pub(crate) fn normalized_path(decoded: &[u8]) -> SmallVec<[u8; 64]> {
    let mut normalized = SmallVec::<[u8; 64]>::new();
    let mut rest = decoded;
    while let [first, tail @ ..] = rest {
        let escape = rest.strip_prefix(b"%2F");
        normalized.push(if escape.is_some() { b'/' } else { *first });
        rest = escape.unwrap_or(tail);
    }
    normalized.dedup_by(|a, b| (*a, *b) == (b'/', b'/'));
    without_dot_segments(&normalized)
}

/// RFC 3986 §5.2.4, for a path that begins with a slash.
fn without_dot_segments(path: &[u8]) -> SmallVec<[u8; 64]> {
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
fn canonical_path(path: &str) -> SmallVec<[u8; 64]> {
    let mut rest = path.as_bytes();
    if !rest.contains(&b'%') {
        return SmallVec::from_slice(rest);
    }

    let mut canonical = SmallVec::new();
    while let Some((character, tail)) = decode_first(rest) {
        match character {
            b'/' if rest[0] == b'%' => canonical.extend_from_slice(b"%2F"),
            b'%' if begins_with_hex_digits(tail) => canonical.extend_from_slice(b"%25"),
            byte => canonical.push(byte),
        }
        rest = tail;
    }
    canonical
}

/// The first byte after percent-decoding, and the rest. A `%` without two hexadecimal digits is a `%`, as in axum.
fn decode_first(path: &[u8]) -> Option<(u8, &[u8])> {
    match path {
        [b'%', high, low, tail @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
            Some((hex_value(*high) << 4 | hex_value(*low), tail))
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

fn hex_value(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => digit.to_ascii_lowercase() - b'a' + 10,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(path: Path, text: &str) -> String {
        String::from_utf8(path.canonical(text).to_vec()).unwrap()
    }

    #[test]
    fn escapes_are_decoded_once_except_for_slashes() {
        for (text, expected) in [
            ("/users/%31", "/users/1"),
            ("/a%2fb", "/a%2Fb"),
            ("/%7Ea%2D", "/~a-"),
            ("/%2541", "/%2541"),
            ("/%zz%4", "/%zz%4"),
            ("/%25zz%254", "/%zz%4"),
            ("/%%341", "/%2541"),
            ("/%4%31", "/%2541"),
            ("/%25%34%31", "/%2541"),
            ("/%%41", "/%A"),
            ("/%25%2541", "/%%2541"),
            ("/%252F", "/%252F"),
            ("/%25%32F", "/%252F"),
            ("/%%2F", "/%%2F"),
            ("/%2%2F", "/%2%2F"),
            ("/%21%24%26%27%28%29%2a%2B%2c%3b%3d%3a%40", "/!$&'()*+,;=:@"),
            ("/%5B%5D%7C%22%7b%7d%20%3f%23", "/[]|\"{} ?#"),
            ("/%C3%A9", "/é"),
            ("/%", "/%"),
            ("*", "*"),
            ("", ""),
        ] {
            assert_eq!(canonical(path(), text), expected, "{text}");
            assert_eq!(canonical(path(), expected), expected, "{expected} again");
        }
    }

    #[test]
    fn each_setting_makes_more_spellings_one_key() {
        assert_eq!(canonical(path(), "//A/./b/../c/"), "//A/./b/../c/");
        assert_eq!(canonical(path().strip_trailing_slash(), "/a/"), "/a");
        assert_eq!(canonical(path().strip_trailing_slash(), "/a//"), "/a");
        assert_eq!(canonical(path().strip_trailing_slash(), "/"), "/");
        assert_eq!(canonical(path().collapse_slashes(), "//a///b"), "/a/b");
        assert_eq!(canonical(path().ignore_case(), "/A"), "/a");
        for (text, expected) in [
            ("/a/./b", "/a/b"),
            ("/a/c/../b", "/a/b"),
            ("/../../a", "/a"),
            ("/a/b/..", "/a/"),
            ("/a/.", "/a/"),
            ("/.", "/"),
            ("/%2e%2E/a", "/a"),
            ("/a/...", "/a/..."),
        ] {
            assert_eq!(canonical(path().remove_dot_segments(), text), expected, "{text}");
        }
    }
}
