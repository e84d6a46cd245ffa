//! The path of a request within routers, which remove prefixes, and services, which set other paths.

use std::borrow::Cow;

use http::request::Parts;
use smallvec::{SmallVec, smallvec};

/// The path of a request, with the prefix of a nested router.
pub(crate) fn whole_path(parts: &Parts) -> &str {
    original_path(parts).unwrap_or_else(|| parts.uri.path())
}

/// The path that the request had, unless another one was set since.
fn original_path(parts: &Parts) -> Option<&str> {
    #[cfg(feature = "axum")]
    if let Some(::axum::extract::OriginalUri(original)) = parts.extensions.get() {
        // A router of axum leaves the end of the path. Any other path was set since, such as by a proxy that calls another server.
        let [path, original_path] = [parts.uri.path(), original.path()].map(|path| path.trim_end_matches('/'));
        return (original_path.ends_with(path) && is_of_host(parts, original)).then(|| original.path());
    }
    let _ = parts;
    None
}

#[cfg(feature = "axum")]
fn is_of_host(parts: &Parts, original: &http::Uri) -> bool {
    [original.authority(), None].contains(&parts.uri.authority())
}

/// The [whole path](whole_path), where one that a service has set within a nested router has the prefix of that.
pub(crate) fn routed_path(parts: &Parts) -> Cow<'_, str> {
    if let Some(original) = original_path(parts) {
        return original.into();
    }
    let path = parts.uri.path();
    #[cfg(feature = "axum")]
    if let Some(::axum::extract::OriginalUri(original)) = parts.extensions.get()
        && let Some(nested) = parts.extensions.get::<::axum::extract::NestedPath>()
        && is_of_host(parts, original)
    {
        return format!("{}{path}", with_values(nested, segments(original.path()))).into();
    }
    path.into()
}

/// The paths that services may have left of the whole one, unless it is a nested router that has left it. In a nested service, the
/// prefix of that comes before what is left.
pub(crate) fn rests_of_path(parts: &Parts) -> SmallVec<[Cow<'_, str>; 2]> {
    let path = parts.uri.path();
    let [whole, rest] = [whole_path(parts), path].map(|path| path.trim_end_matches('/'));
    let Some(removed) = whole.strip_suffix(rest).filter(|removed| !removed.is_empty()) else {
        return SmallVec::new();
    };
    #[cfg(feature = "axum")]
    if let Some(nested) = parts.extensions.get::<::axum::extract::NestedPath>() {
        let [in_prefix, in_removed] = [nested.as_str(), removed].map(|path| segments(path).count());
        // The service is within the router, or around it.
        let begins = [0, in_removed.saturating_sub(in_prefix)];
        let begins = begins.into_iter().filter(|_| in_prefix != in_removed);
        let rests = begins.map(|begin| format!("{}{path}", with_values(nested, segments(removed).skip(begin))).into());
        let mut rests: SmallVec<_> = rests.collect();
        rests.dedup();
        return rests;
    }
    let _ = removed;
    smallvec![path.into()]
}

#[cfg(feature = "axum")]
fn segments(path: &str) -> impl Iterator<Item = &str> {
    path.trim_end_matches('/').split('/').skip(1)
}

/// The prefix of a nested router, with these segments of a path in place of its parameters.
#[cfg(feature = "axum")]
fn with_values<'a>(nested: &'a ::axum::extract::NestedPath, values: impl Iterator<Item = &'a str>) -> String {
    let mut values = values;
    let segments = segments(nested.as_str()).map(|segment| match values.next() {
        Some(value) if segment.contains('{') => value,
        _ => segment,
    });
    segments.flat_map(|segment| ["/", segment]).collect()
}
