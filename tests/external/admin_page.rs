//! The page for operators.

use axum::{Router, body::Body, routing::get as route};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use http::{Request, StatusCode};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use tower::ServiceExt;
use tower_quota::{
    Admin, Ban, Limiter, ManualClock, MemoryStore, Policy, RateLimitLayer, SlidingLog, TokenBucket, key,
};

use crate::{
    chromium::Chromium,
    support::{get_from, send, serve},
};

/// A key that a caller has chosen, as text that a page must not read as a part of itself.
const SCRIPT: &str = "<img src=x onerror=document.title='read'><script>document.title='run'</script>";

/// The paths of the requests of the page.
const PATHS: [&str; 7] = [
    "",
    "/report?subjects=50",
    "/subject",
    "/search",
    "/reset",
    "/override",
    "/end-override",
];

async fn page() -> (String, String) {
    let router = Admin::new().router_behind_authentication();
    let received = send(&router, Request::get("/")).await;
    assert_eq!(received.status, StatusCode::OK);
    assert_eq!(received.field("content-type"), Some("text/html; charset=utf-8"));
    let policy = received.field("content-security-policy").expect("a policy").to_owned();
    (String::from_utf8(received.body.to_vec()).expect("text"), policy)
}

#[tokio::test]
async fn the_page_runs_its_own_script_and_style_only() {
    let (page, policy) = page().await;
    for (element, directive) in [("style", "style-src"), ("script", "script-src")] {
        let begin = page.find(&format!("<{element}")).expect("an element");
        let content = page[begin..].split_once('>').expect("an element").1;
        let content = content.split_once(&format!("</{element}>")).expect("an end").0;
        let hash = BASE64_STANDARD.encode(digest(&SHA256, content.as_bytes()));
        assert!(
            policy.contains(&format!("{directive} 'sha256-{hash}';")),
            "{directive} of src/admin/router.rs is to be 'sha256-{hash}'"
        );
        assert_eq!(page.matches(&format!("<{element}")).count(), 1);
    }
    let rest = "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    assert!(
        policy.starts_with("default-src 'none'; ") && policy.ends_with(rest),
        "{policy}"
    );
}

#[tokio::test]
async fn the_page_names_no_other_server_and_writes_no_html() {
    let (page, _) = page().await;
    for part in [
        "://",
        "\"//",
        "'//",
        "url(",
        "@import",
        " style=",
        " onclick=\"",
        "innerHTML",
        "insertAdjacentHTML",
        "eval(",
    ] {
        assert!(!page.contains(part), "the page has `{part}`");
    }
}

/// A tab with the page of an application with limits, some of which deny.
pub(super) struct Visit {
    pub(super) tab: Chromium,
    url: String,
    credentials: String,
    pub(super) app: Router,
}

impl Visit {
    /// None if no Chromium is installed.
    pub(super) async fn begin(show_keys: bool) -> Option<Self> {
        let tab = Chromium::start().await?;
        let store = MemoryStore::builder().manual_clock(&ManualClock::new()).build();
        let api = Policy::new("api", SlidingLog::per_minute(3)).key(key::ip());
        let logins = Policy::new("logins", TokenBucket::per_minute(5))
            .key((key::ip(), key::path()))
            .ban(Ban::after(10, std::time::Duration::from_secs(600)))
            .observe_only();
        let layer = RateLimitLayer::new(store.clone(), [api, logins]);
        let mails = Limiter::new(store, Policy::new("mails", SlidingLog::per_hour(1)));
        let admin = Admin::new()
            .layer(&layer)
            .limiter(&mails)
            .show_keys(show_keys)
            .instance("api-7");
        let app = Router::new()
            .route("/", route(async || "hi").layer(layer))
            .nest("/operators/limits", admin.router_behind_authentication());
        for (address, times) in [
            ("192.0.2.1", 12),
            ("2001:db8::1", 5),
            ("192.0.2.3", 1),
            ("192.0.2.4", 4),
        ] {
            for _ in 0..times {
                send(&app, get_from(address, "/")).await;
            }
        }
        for _ in 0..3 {
            let _ = mails.check(SCRIPT).await.expect("a memory store replies");
        }

        Some(Self::of(tab, app, "").await)
    }

    /// A visit of the page at `/operators/limits` of an application, by an address with these credentials.
    pub(super) async fn of(tab: Chromium, app: Router, credentials: &str) -> Self {
        let mut visit = Self::open(tab, app, credentials).await;
        visit.has_status("Ready.").await;
        visit
    }

    /// The same before the first report.
    pub(super) async fn open(mut tab: Chromium, app: Router, credentials: &str) -> Self {
        let url = format!("{}/operators/limits", serve(app.clone()).await);
        let with_credentials = url.replace("://", &format!("://{credentials}"));
        tab.command("Page.navigate", json!({ "url": with_credentials })).await;
        let credentials = credentials.to_owned();
        Self {
            tab,
            url,
            credentials,
            app,
        }
    }

    pub(super) async fn has_status_with(&mut self, text: &str) {
        let status = "document.querySelector('[role=status]')?.textContent";
        let text = Value::from(text);
        self.tab.until(&format!("{status}?.includes({text})")).await;
    }

    pub(super) async fn has_status(&mut self, text: &str) {
        let status = "document.querySelector('[role=status]')?.textContent";
        let text = Value::from(text);
        self.tab.until(&format!("{status} === {text}")).await;
    }

    /// The text of an element.
    pub(super) async fn text(&mut self, selector: &str) -> String {
        let text = self
            .tab
            .evaluate(&format!("document.querySelector('{selector}').innerText"))
            .await;
        text.as_str().expect("text").to_owned()
    }

    /// Panics unless the focus is in the field with this id, and this text is in it.
    pub(super) async fn has_typed(&mut self, id: &str, text: &str) {
        let (focused, typed) = ("document.activeElement.id", "document.activeElement.value");
        assert_eq!(self.tab.evaluate(focused).await, id);
        assert_eq!(self.tab.evaluate(typed).await, text);
    }

    pub(super) async fn type_text(&mut self, text: &str) {
        self.tab.command("Input.insertText", json!({ "text": text })).await;
    }

    /// Moves the focus with the tabulator until it is on the element with this id, and verifies that it is seen.
    pub(super) async fn focus(&mut self, id: &str) {
        for _ in 0..40 {
            self.tab.press("Tab").await;
            if self.tab.evaluate("document.activeElement.id").await == id {
                let outline = "getComputedStyle(document.activeElement).outlineStyle";
                assert_eq!(
                    self.tab.evaluate(outline).await,
                    "solid",
                    "the focus on {id} is visible"
                );
                return;
            }
        }
        panic!("the focus does not get to {id}");
    }

    /// Searches for a text by the keyboard.
    pub(super) async fn find(&mut self, text: &str) {
        self.focus("key").await;
        self.type_text(text).await;
        self.tab.press("Enter").await;
    }

    /// Whether the page fits this width, and no word is broken in its middle.
    pub(super) async fn has_whole_words(&mut self, width: u32) -> bool {
        const BROKEN: &str = r"(() => {
            const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            const broken = [];
            for (let text = texts.nextNode(); text; text = texts.nextNode()) {
                for (const word of text.data.matchAll(/[\w.:=,]+/g)) {
                    const range = document.createRange();
                    range.setStart(text, word.index);
                    range.setEnd(text, word.index + word[0].length);
                    const tops = new Set([...range.getClientRects()].map(({ top }) => Math.round(top)));
                    if (tops.size > 1) {
                        broken.push(`${word[0]} in ${text.parentElement.outerHTML.slice(0, 60)}`);
                    }
                }
            }
            return broken.join(' ');
        })()";
        let fits = self.tab.fits(width).await;
        let broken = self.tab.evaluate(BROKEN).await;
        assert_eq!(broken, "", "broken words at {width}");
        fits
    }

    /// Replaces the text of the field with this id, and sends its form.
    pub(super) async fn replace(&mut self, id: &str, text: &str) {
        let select = format!("document.querySelector('#{id}').focus(); document.activeElement.select()");
        self.tab.evaluate(&select).await;
        self.type_text(text).await;
        self.tab.press("Enter").await;
    }

    /// Panics if the page has loaded something from elsewhere, or an error was reported.
    pub(super) fn end(self) {
        for url in self.tab.requests() {
            let url = url.replace(&self.credentials, "");
            let path = url
                .strip_prefix(&self.url)
                .expect("the page loads nothing from elsewhere");
            // No key is in a URL, which logs of requests have.
            assert!(PATHS.contains(&path), "{url}");
        }
    }
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn an_operator_finds_a_caller_and_resets_its_counts_by_keyboard() {
    let Some(mut visit) = Visit::begin(false).await else {
        return;
    };
    let caller = get_from("192.0.2.1", "/");
    assert_eq!(send(&visit.app, caller).await.status, StatusCode::TOO_MANY_REQUESTS);

    visit.find("ip=192.0.2.1").await;
    visit.has_status("api denies ip=192.0.2.1.").await;
    let shown = visit.text("#subject").await;
    for part in [
        "ip=192.0.2.1",
        "10 times by api-7, last ",
        ", listed as ",
        "sliding-log 3/min",
        "denies: quota exceeded",
        "0 of 3",
    ] {
        assert!(shown.contains(part), "no `{part}` in {shown}");
    }
    let header = visit.text("#time").await;
    assert!(header.starts_with("api-7, as of "), "{header}");
    let hashes = visit.text("#hashes").await;
    assert!(hashes.contains("a secret of api-7 alone"), "{hashes}");
    let found = visit.text("li.found .look-up").await;
    assert!(shown.contains(&format!("listed as {found}")), "{found} in {shown}");

    // From the field of the search.
    let mut tabs = 0;
    while visit.tab.evaluate("document.activeElement.textContent").await != "Reset its counts and bans" {
        visit.tab.press("Tab").await;
        tabs += 1;
        assert!(tabs <= 2, "{tabs}");
    }
    // The question begins with the button that changes nothing.
    visit.tab.press("Enter").await;
    visit.tab.until("document.querySelector('dialog').open").await;
    assert_eq!(visit.tab.evaluate("document.activeElement.id").await, "cancel");
    visit.focus("reset").await;
    visit.tab.press("Enter").await;
    visit.has_status("The counts of ip=192.0.2.1 in api are reset.").await;
    assert!(visit.text("#subject").await.contains("3 of 3"));
    assert_eq!(
        send(&visit.app, get_from("192.0.2.1", "/")).await.status,
        StatusCode::OK
    );

    visit.focus("refresh").await;
    visit.tab.press("Enter").await;
    visit.has_status("Refreshed.").await;
    assert!(visit.text("#subject").await.contains("2 of 3"));
    visit.end();
}

/// A response that comes late shows another subject while the question is open.
#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn what_is_reset_is_what_was_asked_for() {
    const HOLD: &str = "(() => {
        const real = fetch;
        const held = new Promise((release) => { window.release = release; });
        window.fetch = (url, ...options) => url.endsWith('/search') ? held.then(() => real(url, ...options)) : real(url, ...options);
    })()";
    const RESET: &str =
        "[...document.querySelectorAll('#subject button')].find(({ textContent }) => textContent.startsWith('Reset'))";
    let Some(mut visit) = Visit::begin(true).await else {
        return;
    };
    visit.find("ip=192.0.2.1").await;
    visit.has_status("api denies ip=192.0.2.1.").await;
    visit.tab.evaluate(HOLD).await;
    visit.replace("key", "ip=192.0.2.4").await;
    visit.tab.evaluate(&format!("{RESET}.click()")).await;
    let question = visit.text("#question").await;
    assert!(question.contains("ip=192.0.2.1"), "{question}");
    visit.tab.evaluate("release()").await;
    visit.has_status("api denies ip=192.0.2.4.").await;
    visit.tab.evaluate("document.getElementById('reset').click()").await;
    visit.has_status("The counts of ip=192.0.2.1 in api are reset.").await;
    let shown = visit.text("#subject").await;
    assert!(shown.contains("ip=192.0.2.1") && shown.contains("3 of 3"), "{shown}");
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn an_operator_overrides_a_limit_by_keyboard_and_ends_that() {
    let Some(mut visit) = Visit::begin(false).await else {
        return;
    };
    assert_eq!(
        visit.tab.evaluate("document.querySelector('#overrides').hidden").await,
        true
    );
    visit.find("ip=192.0.2.1").await;
    visit.has_status("api denies ip=192.0.2.1.").await;

    visit.focus("limit").await;
    visit.tab.evaluate("document.activeElement.select()").await;
    visit.type_text("token-bucket 5/min").await;
    visit.focus("lasts").await;
    visit.type_text("3d").await;
    visit.tab.press("Enter").await;
    visit
        .tab
        .until("document.querySelector('#status.error')?.textContent.includes('use the same algorithm')")
        .await;
    assert_eq!(visit.tab.evaluate("document.querySelector('#lasts').value").await, "3d");

    visit.replace("limit", "sliding-log 5/min").await;
    visit
        .has_status_with("ip=192.0.2.1 has the limit sliding-log 5/min in api until ")
        .await;
    let shown = visit.text("#subject").await;
    for part in [
        "sliding-log 5/min until ",
        "set by not known",
        "In place of",
        "sliding-log 3/min",
        "2 of 5",
    ] {
        assert!(shown.contains(part), "no `{part}` in {shown}");
    }
    let row = visit.text("#overrides tr.found").await;
    for part in ["api", "sliding-log 5/min", "3 d"] {
        assert!(row.contains(part), "no `{part}` in {row}");
    }
    assert!(!row.contains("192.0.2.1"), "{row}");
    for width in [360, 1280] {
        assert!(visit.has_whole_words(width).await, "{width}");
    }
    for expected in [StatusCode::OK, StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
        assert_eq!(send(&visit.app, get_from("192.0.2.1", "/")).await.status, expected);
    }

    let status = "document.querySelector('[role=status]').textContent";
    let midnight = "new Date(new Date().setHours(24, 0, 0, 0)).toLocaleString()";
    for (text, ends) in [
        ("tomorrow", midnight),
        ("2032-02-29", "new Date(2032, 1, 29).toLocaleString()"),
        ("2032-12-31 18:30", "new Date(2032, 11, 31, 18, 30).toLocaleString()"),
    ] {
        visit.replace("lasts", text).await;
        visit
            .tab
            .until(&format!("{status}.endsWith(` in api until ${{{ends}}}.`)"))
            .await;
    }
    for (text, error) in [
        ("2031-02-29", "use one such as 3d, 12h, tomorrow, 2030-12-31"),
        (
            "2199-01-01",
            "a time of the next 31 years; use one such as 3d, 12h, tomorrow",
        ),
        ("2001-01-01", "the end is over; use a later date"),
        ("yesterday", "is not a length of time"),
    ] {
        visit.replace("lasts", text).await;
        let shown = "document.querySelector('#status.error')?.textContent";
        visit.tab.until(&format!("{shown}?.includes('{error}')")).await;
    }

    visit.focus("end-override").await;
    visit.tab.press("Enter").await;
    visit.has_status("The override of ip=192.0.2.1 in api has ended.").await;
    assert!(visit.text("#subject").await.contains("0 of 3"));
    assert_eq!(
        visit.tab.evaluate("document.querySelector('#overrides').hidden").await,
        true
    );

    // Another operator ends it while the focus is on its button.
    visit.replace("lasts", "3d").await;
    visit.has_status_with("ip=192.0.2.1 has the limit ").await;
    visit.focus("end-override").await;
    let ends = Request::post("/operators/limits/end-override").header("content-type", "application/json");
    let ends = ends
        .body(Body::from(r#"{"policy":"api","key":"ip=192.0.2.1"}"#))
        .expect("a request");
    let ended = visit.app.clone().oneshot(ends).await.expect("it responds");
    assert_eq!(ended.status(), StatusCode::OK);
    visit.tab.until("!document.querySelector('#end-override')").await;
    assert_eq!(visit.tab.evaluate("document.activeElement.id").await, "subject");
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_mistake_is_shown_with_its_fix() {
    let Some(mut visit) = Visit::begin(false).await else {
        return;
    };
    visit.find("a|b|c|d|e|f|g|h|i").await;
    visit
        .tab
        .until("document.querySelector('#status.error')?.textContent.includes('at most 8 values')")
        .await;
    visit.replace("key", "ip=nowhere").await;
    visit.has_status("No policy has a key with ip=nowhere.").await;
    // A limiter may have such a key.
    visit.replace("key", "user=alice").await;
    visit.has_status("Nothing is counted for user=alice.").await;
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_key_that_looks_like_html_is_text() {
    let Some(mut visit) = Visit::begin(true).await else {
        return;
    };
    // The text of a key escapes spaces and braces, and leaves `<` as it is.
    let key = format!("key={}", SCRIPT.replace(' ', "^20"));
    let shown = visit
        .tab
        .evaluate(&format!(
            "[...document.querySelectorAll('li button')].some((button) => button.textContent === {})",
            Value::from(key.clone())
        ))
        .await;
    assert_eq!(shown, true);

    visit
        .tab
        .evaluate("[...document.querySelectorAll('li button')].at(-1).click()")
        .await;
    visit.has_status(&format!("mails denies {key}.")).await;
    assert!(visit.text("#subject h3").await.contains("<img"));
    assert_eq!(visit.tab.evaluate("document.title").await, "Rate limits");
    let made = "document.querySelectorAll('img').length + document.querySelectorAll('script').length";
    assert_eq!(visit.tab.evaluate(made).await, 1, "the script of the page");

    visit
        .tab
        .evaluate("document.querySelector('#subject button').click()")
        .await;
    visit.tab.until("document.querySelector('dialog').open").await;
    assert!(visit.text("#question").await.contains("<img"));
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn the_page_fits_the_screen_and_the_settings_of_an_operator() {
    let Some(mut visit) = Visit::begin(true).await else {
        return;
    };
    visit
        .tab
        .evaluate("[...document.querySelectorAll('li button')].at(-1).click()")
        .await;
    visit.tab.until("!document.querySelector('#subject').hidden").await;
    for width in [360, 768, 1280] {
        assert!(visit.tab.fits(width).await, "{width}");
    }

    let mut colors = Vec::new();
    for scheme in ["light", "dark"] {
        visit.tab.prefer(scheme).await;
        colors.push(
            visit
                .tab
                .evaluate("getComputedStyle(document.body).backgroundColor")
                .await,
        );
    }
    assert_ne!(colors[0], colors[1]);

    // Nothing moves, with or without a wish for reduced motion.
    assert_eq!(visit.tab.evaluate("document.getAnimations().length").await, 0);
    let transitions =
        "[...document.querySelectorAll('*')].every((element) => getComputedStyle(element).transitionDuration === '0s')";
    assert_eq!(visit.tab.evaluate(transitions).await, true);

    assert_eq!(visit.tab.blocked_by().await, "connect-src");
}
