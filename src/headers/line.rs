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
    if lines.iter().all(|line| line.to_str().is_ok()) {
        let mut all = Text::new();
        for line in &lines {
            all.delimit().bytes(line.as_bytes());
        }
        headers.insert(name, all.into());
        return;
    }

    // A line that is no text is not a list of this field; it stays as it is, without ours.
    lines.pop();
    headers.remove(name);
    for line in lines {
        headers.append(name, line);
    }
}

/// A field with a single value has one line (RFC 9110 §5.3).
pub(super) fn keep_one_line(headers: &mut HeaderMap, name: &HeaderName) {
    if headers.get_all(name).iter().nth(1).is_some()
        && let Some(first) = headers.get(name).cloned()
    {
        headers.insert(name, first);
    }
}
