//! Chromium visits the page of the example `hello`.

use std::time::Duration;

use serde_json::{Value, json};
use tower_quota::{ManualClock, MemoryStore};

use crate::{chromium::Chromium, support::serve};

#[path = "../../examples/hello.rs"]
#[allow(dead_code)]
mod hello;

/// The clock of the page and its timers, which wait for the test.
const CLOCK: &str = "
    let now = 0;
    performance.now = () => now;
    const timers = [];
    window.setTimeout = (task, after) => timers.push({ task, after });
";

/// A tab with the page, and the clock of its server.
struct Visit {
    tab: Chromium,
    url: String,
    clock: ManualClock,
}

impl Visit {
    /// None if no Chromium is installed.
    async fn begin() -> Option<Self> {
        let mut tab = Chromium::start().await?;
        let clock = ManualClock::new();
        let url = serve(hello::app(MemoryStore::builder().manual_clock(&clock).build())).await;
        tab.command("Page.addScriptToEvaluateOnNewDocument", json!({ "source": CLOCK }))
            .await;
        tab.command("Page.navigate", json!({ "url": url })).await;
        tab.until("document.querySelector('.state')?.textContent === 'no response yet'")
            .await;
        Some(Self { tab, url, clock })
    }

    /// Sets the clocks, and waits until the page has drawn: a route that admits again then replaces the status.
    async fn advance(&mut self, time: Duration) {
        self.clock.advance(time);
        let drawn = "new Promise((drawn) => requestAnimationFrame(() => drawn()))";
        self.tab
            .evaluate(&format!("now += {}, {drawn}", time.as_millis()))
            .await;
    }

    /// Waits until the text of a part of a route is this.
    async fn shows(&mut self, route: &str, part: &str, text: &str) {
        let part = format!("document.querySelector('[data-path=\"/hello/{route}\"] {part}')");
        self.tab.until(&format!("{part}.textContent === '{text}'")).await;
    }

    async fn has_status(&mut self, text: &str) {
        let status = "document.querySelector('[role=status]').textContent";
        self.tab.until(&format!("{status} === '{text}'")).await;
    }

    /// The heights of all charts, in pixels.
    async fn charts(&mut self) -> Value {
        let charts = "[...document.querySelectorAll('.timeline')]";
        self.tab
            .evaluate(&format!("{charts}.map((chart) => chart.clientHeight)"))
            .await
    }

    /// The number of marks of a kind in the timeline of `sayHi`.
    async fn marks(&mut self, kind: &str) -> Value {
        let marks = format!("document.querySelectorAll('[data-path=\"/hello/sayHi\"] .timeline .{kind}').length");
        self.tab.evaluate(&marks).await
    }

    /// Lets the page play the edge of a window.
    async fn play(&mut self) {
        self.tab.evaluate("document.querySelector('[data-play]').click()").await;
        let mut last = 0;
        for timer in 0..9 {
            let after = self.tab.evaluate(&format!("Math.round(timers[{timer}].after)")).await;
            let after = after.as_u64().expect("milliseconds");
            self.advance(Duration::from_millis(after - last)).await;
            self.tab.evaluate(&format!("timers[{timer}].task()")).await;
            last = after;
        }
        self.tab
            .until("document.querySelector('[data-play]').ariaPressed === 'false'")
            .await;
    }

    /// Panics if the page has loaded something from another server, or an error was reported.
    fn end(self) {
        let requests = self.tab.requests();
        assert!(requests.iter().all(|url| url.starts_with(&self.url)), "{requests:?}");
        assert!(requests.len() > 3, "the files of the page, and calls");
    }
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_visitor_sees_the_window_fill_the_denial_and_the_wait() {
    let Some(mut visit) = Visit::begin().await else { return };
    assert_eq!(visit.charts().await, json!([0, 0, 0, 0, 0]), "there is nothing to show");

    visit.tab.press("Tab").await;
    visit
        .tab
        .until("document.activeElement.dataset.call === 'say-hi'")
        .await;
    let outline = visit
        .tab
        .evaluate("getComputedStyle(document.activeElement).outlineStyle")
        .await;
    assert_eq!(outline, "solid", "the focus is visible");

    for (left, admitted) in [(1, 1), (0, 2)] {
        visit.tab.press("Enter").await;
        visit.has_status(&format!("Admitted: sayHi ({left} left).")).await;
        visit.shows("sayHi", ".state", &format!("{left} of 2 left")).await;
        assert_eq!(visit.marks("admitted").await, admitted);
    }
    visit.tab.press("Enter").await;
    visit.has_status("Denied: sayHi (wait 30 s).").await;
    assert_eq!(visit.charts().await, json!([132, 0, 0, 0, 0]));
    assert_eq!([visit.marks("admitted").await, visit.marks("denied").await], [2, 1]);
    assert_eq!(visit.marks("wait").await, 1);
    let fields = "429 Too Many Requests\\nRetry-After: 30\\n\
                  RateLimit-Policy: \"say-hi\";q=2;w=30\\nRateLimit: \"say-hi\";r=0;t=30";
    visit.shows("sayHi", "pre", fields).await;

    for (advanced, wait) in [(0, 30), (9, 21), (20, 1)] {
        visit.advance(Duration::from_secs(advanced)).await;
        visit.shows("sayHi", ".state", &format!("denied: wait {wait} s")).await;
    }
    visit.advance(Duration::from_secs(1)).await;
    visit.has_status("sayHi admits again.").await;
    visit.shows("sayHi", ".state", "2 of 2 left").await;
    visit.tab.press("Enter").await;
    visit.has_status("Admitted: sayHi (1 left).").await;
    visit.shows("sayHi", ".count", "1 admitted in the last 30 s").await;
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_page_that_is_loaded_again_says_what_it_counts() {
    let Some(mut visit) = Visit::begin().await else { return };
    let call = "document.querySelector('[data-call=say-hi]').click()";
    for status in ["Admitted: sayHi (1 left).", "Admitted: sayHi (0 left)."] {
        visit.tab.evaluate(call).await;
        visit.has_status(status).await;
    }
    visit
        .shows("sayHi", ".count", "2 admitted since the page was loaded")
        .await;

    visit.tab.command("Page.reload", json!({})).await;
    visit
        .tab
        .until("document.querySelector('.state')?.textContent === 'no response yet'")
        .await;
    visit.tab.evaluate(call).await;
    visit.has_status("Denied: sayHi (wait 30 s).").await;
    visit.shows("sayHi", ".state", "denied: wait 30 s").await;
    visit
        .shows("sayHi", ".count", "0 admitted since the page was loaded")
        .await;
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn the_play_shows_what_a_fixed_window_admits_and_a_log_denies() {
    let Some(mut visit) = Visit::begin().await else { return };
    visit.play().await;
    visit
        .has_status(
            "Admitted: fixed-window (0 left). \
             Denied: sliding-log (wait 9 s), sliding-counter (wait 2 s), token-bucket (wait 1 s).",
        )
        .await;
    visit
        .shows("fixed-window", ".over", "7 admitted in the last 10 s")
        .await;
    for route in ["sliding-log", "sliding-counter", "token-bucket"] {
        let over = format!("document.querySelector('[data-path=\"/hello/{route}\"] .over')");
        visit.tab.until(&format!("{over} === null")).await;
    }
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn the_page_fits_the_screen_and_the_settings_of_a_visitor() {
    let Some(mut visit) = Visit::begin().await else { return };
    let background = "getComputedStyle(document.body).backgroundColor";

    for width in [360, 1280] {
        assert!(visit.tab.fits(width).await, "{width}");
    }

    let mut colors = Vec::new();
    for scheme in ["light", "dark"] {
        visit.tab.prefer(scheme).await;
        colors.push(visit.tab.evaluate(background).await);
    }
    assert_ne!(colors[0], colors[1]);

    assert_eq!(visit.tab.evaluate("timers.length").await, 0);
    let features = json!({ "features": [{ "name": "prefers-reduced-motion", "value": "reduce" }] });
    visit.tab.command("Emulation.setEmulatedMedia", features).await;
    visit.tab.until("timers.some(({ after }) => after === 1000)").await;

    assert_eq!(visit.tab.blocked_by().await, "connect-src");
}

/// Draws `docs/pictures/hello.png` if the environment variable `TOWER_QUOTA_PICTURES` is set.
#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn the_picture_of_the_example_shows_the_page() {
    let Some(mut visit) = Visit::begin().await else { return };
    visit.play().await;
    for status in [
        "Admitted: sayHi (1 left).",
        "Admitted: sayHi (0 left).",
        "Denied: sayHi (wait 29 s).",
    ] {
        visit
            .tab
            .evaluate("document.querySelector('[data-call=say-hi]').click()")
            .await;
        visit.has_status(status).await;
        visit.advance(Duration::from_millis(600)).await;
    }
    visit.shows("sayHi", ".state", "denied: wait 29 s").await;
    assert!(visit.tab.fits(960).await);
    let picture = visit.tab.picture(960).await;
    assert!(picture.starts_with(b"\x89PNG"));
    if std::env::var_os("TOWER_QUOTA_PICTURES").is_some() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/pictures/hello.png");
        std::fs::write(file, picture).expect("a file");
    }
    visit.end();
}
