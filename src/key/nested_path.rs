//! The paths of a request within routers, which remove prefixes, and services, which set other paths.

use std::borrow::Cow;

use http::request::Parts;
use smallvec::SmallVec;
#[cfg(feature = "axum")]
use {
    ::axum::extract::{NestedPath, OriginalUri},
    smallvec::smallvec,
};

/// The path of a request, with the prefix of a nested router.
pub(crate) fn whole_path(parts: &Parts) -> &str {
    let path = parts.uri.path();
    #[cfg(feature = "axum")]
    if let Some(original) = original_path(parts)
        && removed(original, path).is_some()
    {
        return original;
    }
    path
}

/// The path that the request had, unless a URI of another host was set since, such as by a proxy that calls another server.
#[cfg(feature = "axum")]
fn original_path(parts: &Parts) -> Option<&str> {
    let OriginalUri(original) = parts.extensions.get()?;
    let is_of_host = [original.authority(), None].contains(&parts.uri.authority());
    is_of_host.then(|| original.path())
}

/// What routers of axum have removed, which leave the end of a path. Any other path was set since.
#[cfg(feature = "axum")]
fn removed<'a>(original: &'a str, path: &str) -> Option<&'a str> {
    original.trim_end_matches('/').strip_suffix(path.trim_end_matches('/'))
}

/// The paths that routes are compared with.
pub(crate) struct RoutedPaths<'a> {
    /// The whole path. One that a service has set within a nested router has the prefix of that.
    pub(crate) whole: Cow<'a, str>,
    /// What services may have left of the whole path. In a nested service, the prefix of that comes before what is left.
    pub(crate) rests: SmallVec<[Cow<'a, str>; 2]>,
    /// Whether a service may have set the whole path, so that it needs no prefix.
    pub(crate) is_set: bool,
}

impl<'a> RoutedPaths<'a> {
    pub(crate) fn of(parts: &'a Parts) -> Self {
        let alone = |path: &'a str| Self {
            whole: path.into(),
            rests: SmallVec::new(),
            is_set: false,
        };
        let path = parts.uri.path();
        #[cfg(feature = "axum")]
        if let Some(original) = original_path(parts) {
            let nested = parts.extensions.get::<NestedPath>().map(NestedPath::as_str);
            return match (removed(original, path), nested) {
                (Some(removed), Some(nested)) => {
                    let is_set = is_set(removed, nested);
                    let mut rests = rests(removed, nested, path);
                    rests.extend(is_set.then(|| path.into()));
                    Self {
                        rests,
                        is_set,
                        ..alone(original)
                    }
                }
                (Some(""), None) => alone(original),
                (Some(_), None) => Self {
                    rests: smallvec![path.into()],
                    ..alone(original)
                },
                (None, Some(nested)) => Self {
                    whole: with_prefix(nested, segments(original), path).into(),
                    rests: smallvec![path.into()],
                    is_set: true,
                },
                (None, None) => alone(path),
            };
        }
        alone(path)
    }
}

/// What services around a nested router, or within it, may have left, unless the router alone has removed all of this.
#[cfg(feature = "axum")]
fn rests<'a>(removed: &str, nested: &str, path: &str) -> SmallVec<[Cow<'a, str>; 2]> {
    let [in_prefix, in_removed] = [nested, removed].map(|path| segments(path).count());
    let begins = [0, in_removed.saturating_sub(in_prefix)];
    let begins = begins.into_iter().filter(|_| in_prefix != in_removed);
    let rests = begins.map(|begin| with_prefix(nested, segments(removed).skip(begin), path).into());
    rests.collect()
}

/// Whether a service within a nested router has set the path, and that of the client only happens to end with it: what routers remove
/// ends with the prefix of the nested one.
#[cfg(feature = "axum")]
fn is_set(removed: &str, nested: &str) -> bool {
    let last_first = |path| str::rsplit(path, '/').filter(|segment| !segment.is_empty());
    let mut ends = last_first(nested).zip(last_first(removed));
    ends.any(|(segment, value)| value != segment && !segment.contains('{'))
}

#[cfg(feature = "axum")]
fn segments(path: &str) -> impl Iterator<Item = &str> {
    path.trim_end_matches('/').split('/').skip(1)
}

/// The path after the prefix of a nested router, with these segments in place of the parameters of the prefix.
#[cfg(feature = "axum")]
fn with_prefix<'a>(nested: &'a str, mut values: impl Iterator<Item = &'a str>, path: &str) -> String {
    let segments = segments(nested).map(|segment| match values.next() {
        Some(value) if segment.contains('{') => value,
        _ => segment,
    });
    let prefix: String = segments.flat_map(|segment| ["/", segment]).collect();
    prefix + path
}
