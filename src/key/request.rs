use std::{any::type_name, fmt, sync::Arc};

use http::request::Parts;
use smallvec::SmallVec;

use super::{Key, KeyError, KeyExtractor};

/// The path of the request, without the query.
///
/// Spellings of a path that axum decodes alike are one key: percent-encoded characters are decoded once, whether they are
/// unreserved (`%41`), reserved (`%2B`) or not ASCII (`%C3%A9`), and an invalid escape such as `%zz` is kept. Only `%2F` stays apart
/// from `/`. In a nested axum router it is the whole path, not only what the prefix left (feature `axum`).
///
/// # What remains
///
/// The caller chooses the path, and each spelling that is not listed above is a quota of its own:
///
/// * on a wildcard route such as `/files/{*rest}` every URL, and `a%2Fb` beside `a/b`;
/// * on a route with a parameter such as `/users/{id}` every value, and of a value that the handler parses every form of it:
///   `/users/42`, `/users/042` and `/users/+42` are the same number, as upper-case and lower-case letters are the same UUID;
/// * trailing slashes, repeated slashes, dot segments and upper case, where the service answers them alike; the
///   [settings](Path#implementations) of the extractor make them one key.
///
/// [`route`](super::route), the template that matched, has none of these and is the safe choice (feature `axum`). With `path`
/// add a policy that counts the caller alone, such as by [`ip`](super::ip()).
///
/// ```
/// use http::Request;
/// use tower_quota::{key, KeyExtractor};
///
/// let (parts, ()) = Request::get("/%68ello%2fworld?x=1").body(())?.into_parts();
/// assert_eq!(key::path().extract(&parts)?.unwrap().to_string(), "path=/hello%2Fworld");
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

/// Settings: more spellings that count as one, for services that answer them alike.
impl Path {
    /// Makes `/a/` and `/a//` the same key as `/a`.
    ///
    /// The default is to keep them apart.
    pub fn strip_trailing_slash(mut self) -> Self {
        self.strip_trailing_slash = true;
        self
    }

    /// Makes `//a//b` the same key as `/a/b`.
    ///
    /// The default is to keep them apart.
    pub fn collapse_slashes(mut self) -> Self {
        self.collapse_slashes = true;
        self
    }

    /// Makes `/a/./b` and `/a/c/../b` the same key as `/a/b` (RFC 3986 §5.2.4).
    ///
    /// The default is to keep them apart.
    pub fn remove_dot_segments(mut self) -> Self {
        self.remove_dot_segments = true;
        self
    }

    /// Makes `/A` the same key as `/a`.
    ///
    /// The default is to keep them apart.
    pub fn ignore_case(mut self) -> Self {
        self.ignore_case = true;
        self
    }

    fn spelling(self, path: &str) -> SmallVec<[u8; 64]> {
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

impl KeyExtractor for Path {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        #[cfg(feature = "axum")]
        let path = parts
            .extensions
            .get::<::axum::extract::OriginalUri>()
            .map_or(parts.uri.path(), |uri| uri.path());
        #[cfg(not(feature = "axum"))]
        let path = parts.uri.path();

        Ok(Some(Key::component("path", b"", &self.spelling(path))))
    }
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

/// One spelling for each path: escapes are decoded once, except for `%2F`.
///
/// Decoding the result once more gives the same characters, so two paths that differ after decoding have two spellings: a
/// `%` is written as `%25` where it would begin an escape.
pub(super) fn canonical_path(path: &str) -> SmallVec<[u8; 64]> {
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

/// The first byte after percent-decoding, and what follows it. A `%` without two hexadecimal digits stands for itself, as in
/// axum.
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

/// The template of the route that matched, such as `/users/{id}`.
///
/// Requests that matched none share one key.
///
/// ```
/// use axum::{Router, routing::get};
/// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// // All users together, 100 a minute.
/// let users = Policy::new("users", SlidingLog::per_minute(100)).key(key::route());
///
/// let app: Router = Router::new()
///     .route("/users/{id}", get(|| async { "hello" }))
///     .layer(RateLimitLayer::new(MemoryStore::new(), users));
/// # let _ = app;
/// ```
#[cfg(feature = "axum")]
pub fn route() -> Route {
    Route(())
}

/// A [`KeyExtractor`] made by [`route`].
#[cfg(feature = "axum")]
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Route(());

#[cfg(feature = "axum")]
impl KeyExtractor for Route {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        Ok(Some(match parts.extensions.get::<::axum::extract::MatchedPath>() {
            Some(matched) => Key::component("route", b"", matched.as_str().as_bytes()),
            None => Key::plain("unmatched", ""),
        }))
    }
}

/// The method of the request. Those that no RFC registers share one key, since callers can make them up.
pub fn method() -> Method {
    Method(())
}

/// A [`KeyExtractor`] made by [`method`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Method(());

impl KeyExtractor for Method {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        use http::Method;

        const STANDARD: [Method; 9] = [
            Method::CONNECT,
            Method::DELETE,
            Method::GET,
            Method::HEAD,
            Method::OPTIONS,
            Method::PATCH,
            Method::POST,
            Method::PUT,
            Method::TRACE,
        ];
        Ok(Some(match STANDARD.contains(&parts.method) {
            true => Key::plain("method", &parts.method),
            false => Key::plain("other-method", ""),
        }))
    }
}

/// The same key for every request: one limit for all requests together.
pub fn constant(value: &str) -> Constant {
    Constant(Key::constant(value))
}

/// A [`KeyExtractor`] made by [`constant`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Constant(Key);

impl KeyExtractor for Constant {
    fn extract(&self, _: &Parts) -> Result<Option<Key>, KeyError> {
        Ok(Some(self.0.clone()))
    }
}

/// A value in the extensions of the request, such as the user that authentication found.
///
/// A request that has none is refused with 500, since the layer that inserts it is missing or comes later; with
/// [`or`](KeyExtractor::or) it counts as something else. The key names the type `T` by its path, so counts start afresh
/// when the type moves.
///
/// ```
/// use http::Request;
/// use tower_quota::{key, KeyExtractor};
///
/// #[derive(Clone)]
/// struct UserId(u64);
///
/// let user = key::extension::<UserId>(|user| user.0.to_string());
///
/// let (parts, ()) = Request::get("/").extension(UserId(42)).body(())?.into_parts();
/// assert!(user.extract(&parts)?.unwrap().to_string().ends_with("UserId=42"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn extension<T>(f: impl Fn(&T) -> String + Send + Sync + 'static) -> Extension<T>
where
    T: Send + Sync + 'static,
{
    Extension(Arc::new(f))
}

/// A [`KeyExtractor`] made by [`extension`].
#[must_use]
pub struct Extension<T>(Arc<dyn Fn(&T) -> String + Send + Sync>);

impl<T> KeyExtractor for Extension<T>
where
    T: Send + Sync + 'static,
{
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        match parts.extensions.get::<T>() {
            Some(found) => Ok(Some(Key::extension::<T>(&(self.0)(found)))),
            None => Err(KeyError::misconfigured(format!(
                "no `{}` in the extensions of the request; put the layer that inserts it outside of this one, or add \
                 an alternative with `.or(..)`",
                type_name::<T>(),
            ))),
        }
    }
}

impl<T> Clone for Extension<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> fmt::Debug for Extension<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extension<{}>(<fn>)", type_name::<T>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelled(path: Path, text: &str) -> String {
        String::from_utf8(path.spelling(text).to_vec()).unwrap()
    }

    #[test]
    fn escapes_are_decoded_once_except_for_slashes() {
        for (text, canonical) in [
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
            assert_eq!(spelled(path(), text), canonical, "{text}");
            assert_eq!(spelled(path(), canonical), canonical, "{canonical} again");
        }
    }

    #[test]
    fn each_option_takes_more_spellings_for_one() {
        assert_eq!(spelled(path(), "//A/./b/../c/"), "//A/./b/../c/");
        assert_eq!(spelled(path().strip_trailing_slash(), "/a/"), "/a");
        assert_eq!(spelled(path().strip_trailing_slash(), "/a//"), "/a");
        assert_eq!(spelled(path().strip_trailing_slash(), "/"), "/");
        assert_eq!(spelled(path().collapse_slashes(), "//a///b"), "/a/b");
        assert_eq!(spelled(path().ignore_case(), "/A"), "/a");
        for (text, canonical) in [
            ("/a/./b", "/a/b"),
            ("/a/c/../b", "/a/b"),
            ("/../../a", "/a"),
            ("/a/b/..", "/a/"),
            ("/a/.", "/a/"),
            ("/.", "/"),
            ("/%2e%2E/a", "/a"),
            ("/a/...", "/a/..."),
        ] {
            assert_eq!(spelled(path().remove_dot_segments(), text), canonical, "{text}");
        }
    }
}
