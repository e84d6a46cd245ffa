use http::request::Parts;

#[cfg(feature = "axum")]
use super::extractor::Extractor;
use super::{
    extractor::{KeyError, KeyExtractor},
    form::{KeyForm, Value},
    key::Key,
    nested_path::whole_path,
    normalize,
    normalize::PathBytes,
};

/// The path of the request, without the query.
///
/// Percent-encoded characters are decoded once, whether they are unreserved (`%41`), reserved (`%2B`) or not ASCII
/// (`%C3%A9`), so spellings of a path that axum decodes alike are one key. `%2F` is not decoded, and an invalid escape such as
/// `%zz` is kept. In a nested axum router the key is the whole path, not the part that the prefix left (feature `axum`);
/// of a request whose path was rewritten since, it is the path that it has now.
///
/// # What an attacker can do
///
/// The caller chooses the path, and each spelling that is not listed above is a key with a quota of its own:
///
/// * where middleware removes a prefix such as `/en` before an inner router of axum, every prefix: that looks like a nested router;
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
    /// assert_eq!(key::path().ignore_case().key_of("/A%2Fb"), Key::path("/a%2Fb"));
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

    fn canonical(self, path: &str) -> PathBytes {
        let mut canonical = normalize::decoded(path);
        if self.collapse_slashes {
            normalize::merge(&mut canonical);
        }
        if self.remove_dot_segments {
            canonical = normalize::without_dot_segments(&canonical);
        }
        if self.strip_trailing_slash {
            normalize::strip_trailing_slashes(&mut canonical);
        }
        if self.ignore_case {
            canonical.make_ascii_lowercase();
            // The only escape with a letter that is left is that of a slash.
            for at in 2..canonical.len() {
                if canonical[..=at].ends_with(b"%2f") {
                    canonical[at] = b'F';
                }
            }
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

    fn form(&self) -> KeyForm {
        KeyForm::of("path", "", Value::Path(*self))
    }
}

/// The template of the matched route, such as `/users/{id}`.
///
/// Requests that match no route share one key, so the number of keys is the number of routes and one more, whatever callers
/// send. The template is that of axum's `MatchedPath`: the layer is added to a router, not around
/// `Router::nest_service`, outside of which the template is not known.
///
/// ```
/// use axum::{Router, body::Body, routing::get};
/// use http::{Request, StatusCode};
/// use tower::ServiceExt;
/// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // All users together, 1 request per minute.
/// let users = Policy::new("users", SlidingLog::per_minute(1)).key(key::route());
///
/// let app: Router = Router::new()
///     .route("/users/{id}", get(|| async { "hello" }))
///     .layer(RateLimitLayer::new(MemoryStore::new(), users));
///
/// let response = app.clone().oneshot(Request::get("/users/1").body(Body::empty())?).await?;
/// assert_eq!(response.status(), StatusCode::OK);
/// let response = app.oneshot(Request::get("/users/2").body(Body::empty())?).await?;
/// assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "axum")]
pub fn route() -> Extractor {
    let route = KeyForm::of("route", "", Value::Route);
    let unmatched = KeyForm::of("unmatched", "", Value::Only("".into()));
    Extractor::new(KeyForm::first([route, unmatched]), |parts| {
        Ok(Some(match parts.extensions.get::<::axum::extract::MatchedPath>() {
            Some(matched) => Key::route(matched.as_str()),
            None => Key::unmatched_route(),
        }))
    })
}

impl Key {
    /// The key that [`route`](fn@super::route) returns for a request to a route with this template.
    ///
    /// In a nested router the template includes the prefix.
    ///
    /// ```
    /// use tower_quota::Key;
    ///
    /// assert_eq!(Key::route("/users/{id}").to_string(), "route=/users/^7Bid^7D");
    /// ```
    pub fn route(template: &str) -> Self {
        Self::component("route", b"", template.as_bytes())
    }

    /// The key that [`route`](fn@super::route) makes of all requests that match no route.
    ///
    /// ```
    /// use tower_quota::Key;
    ///
    /// assert_ne!(Key::unmatched_route(), Key::route(""));
    /// ```
    pub fn unmatched_route() -> Self {
        Self::plain("unmatched", "")
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
