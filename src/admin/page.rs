//! The page, in one file: wherever the router is nested, it has no address of another file to find.

use std::sync::LazyLock;

use axum::response::Html;

/// Functions of one file may call those of the others.
const SCRIPT: &str = concat!(
    include_str!("page_search.js"),
    include_str!("page_chart.js"),
    include_str!("page.js")
);
const STYLE: &str = include_str!("page.css");

/// A browser runs this script and this style only, by their SHA-256, and sends requests to this server only. A test has the
/// hashes of the files.
pub(super) const CONTENT_POLICY: &str = "default-src 'none'; \
     script-src 'sha256-qm9ZzPLyFJeMjKkMw7FGFefuEOAYkAbpHIrPEPJqRNU='; \
     style-src 'sha256-k0VNUIy1yMJmIDXYrZhJGcJn2byIuXiK5flNaqswe7s='; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

static PAGE: LazyLock<String> = LazyLock::new(|| {
    let page = include_str!("page.html");
    page.replace("{style}", STYLE).replace("{script}", SCRIPT)
});

pub(super) async fn page() -> Html<&'static str> {
    Html(PAGE.as_str())
}
