//! The page for operators: its search, its refreshes, its order, and many policies.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::Request as AxumRequest,
    middleware::{self, Next},
    response::{IntoResponse, Redirect, Response},
    routing::get as route,
};
use http::{StatusCode, header};
use serde_json::Value;

use tower_quota::{
    Admin, Ban, Concurrency, FailureMode, Key, Limiter, ManualClock, MemoryStore, Plans, Policies, Policy,
    RateLimitLayer, SlidingLog, TokenBucket, key,
    store::{Store, StoreFuture, StoreRequest},
};

use crate::{
    admin_page::Visit,
    chromium::Chromium,
    support::{Broken, Redis, connected, eventually, get_from, patient, send},
};

fn store() -> MemoryStore {
    MemoryStore::builder().manual_clock(&ManualClock::new()).build()
}

fn page_of(limiter: &Limiter, show_keys: bool) -> Router {
    let admin = Admin::new().limiter(limiter).show_keys(show_keys).instance("api-7");
    Router::new().nest("/operators/limits", admin.router_behind_authentication())
}

/// Responds with an error to the requests for a path with this end, while that is set.
fn failing(app: Router, path: &'static str, fails: &Arc<AtomicBool>) -> Router {
    let fails = fails.clone();
    app.layer(middleware::from_fn(move |request: AxumRequest, next: Next| {
        let refused = request.uri().path().ends_with(path) && fails.load(Ordering::Relaxed);
        async move {
            match refused {
                true => StatusCode::SERVICE_UNAVAILABLE.into_response(),
                false => next.run(request).await,
            }
        }
    }))
}

/// What becomes of the requests for a path.
#[derive(Clone, Copy, Default)]
enum Fault {
    #[default]
    None,
    Fails(&'static str),
    Hangs(&'static str),
    /// To a page, such as one on which an operator signs in.
    Redirects(&'static str),
}

fn faulty(app: Router, fault: &Arc<Mutex<Fault>>) -> Router {
    let fault = fault.clone();
    app.layer(middleware::from_fn(move |request: AxumRequest, next: Next| {
        let fault = *fault.lock().expect("no test panics with it");
        let requested = request.uri().path().to_owned();
        async move {
            let is_for = |path| requested.ends_with(path);
            match fault {
                Fault::Fails(path) if is_for(path) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
                Fault::Hangs(path) if is_for(path) => std::future::pending().await,
                Fault::Redirects(path) if is_for(path) => Redirect::to("/operators/limits").into_response(),
                Fault::None | Fault::Fails(_) | Fault::Hangs(_) | Fault::Redirects(_) => next.run(request).await,
            }
        }
    }))
}

async fn check(limiter: &Limiter, key: impl Into<Key>, times: usize) {
    let key = key.into();
    for _ in 0..times {
        let _ = limiter.check(key.clone()).await.expect("a memory store replies");
    }
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn an_operator_finds_a_customer_in_all_policies() {
    let Some(tab) = Chromium::start().await else { return };
    let by_name = |name, quota| Policy::new(name, SlidingLog::per_minute(quota)).key(key::header("x-user"));
    let layer = RateLimitLayer::new(
        store(),
        [
            by_name("reads", 9),
            by_name("writes", 1),
            Policy::new("logins", SlidingLog::per_minute(5)).key((key::ip(), key::path())),
        ],
    );
    let admin = Admin::new().layer(&layer).instance("api-7");
    let app = Router::new()
        .route("/", route(async || "hi").layer(layer))
        .nest("/operators/limits", admin.router_behind_authentication());
    for _ in 0..3 {
        send(&app, get_from("192.0.2.1", "/").header("x-user", "张三".as_bytes())).await;
    }
    let mut visit = Visit::of(tab, app, "").await;

    visit.find("张三").await;
    visit.has_status("writes denies header:x-user=张三.").await;
    let rows = visit.text("#found tbody").await;
    for part in [
        "reads",
        "8 of 9",
        "admits",
        "writes",
        "0 of 1",
        "denies: quota exceeded for 1 min",
        "2 times",
    ] {
        assert!(rows.contains(part), "no `{part}` in {rows}");
    }
    assert!(!rows.contains("logins"), "{rows}");
    assert!(rows.find("writes") < rows.find("reads"), "what denies is first: {rows}");
    let shown = visit.text("#subject").await;
    assert!(
        shown.contains("header:x-user=张三") && shown.contains("writes"),
        "{shown}"
    );

    visit
        .tab
        .evaluate("document.querySelector('#found tr:last-child button').click()")
        .await;
    visit.has_status("reads admits header:x-user=张三.").await;
    assert!(visit.text("#found tr.found").await.contains("reads"));

    for (text, status) in [
        ("nobody", "Nothing is counted for nobody."),
        // What `logins` counts for this path is not known.
        ("/nowhere", "2 policies have counted nothing for /nowhere."),
        ("ip=192.0.2.1", "No policy has ip=192.0.2.1 alone as its key."),
    ] {
        visit.replace("key", text).await;
        visit.has_status(status).await;
    }
    assert!(visit.text("#found tbody").await.contains("ip=192.0.2.1|path=/.."));
    for width in [360, 1280] {
        assert!(visit.has_whole_words(width).await, "{width}");
        let is_seen =
            "(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)(document.querySelector('#found'))";
        assert_eq!(visit.tab.evaluate(is_seen).await, true, "{width}");
    }
    visit.end();
}

/// The counts of this process alone say nothing about the customer.
#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_search_while_a_store_fails_has_no_verdict_from_the_counts_of_one_process() {
    let Some(tab) = Chromium::start().await else { return };
    let one = |name| Policy::new(name, SlidingLog::per_hour(1));
    let (shared, local) = (
        Limiter::new(Broken::default(), [one("shared"), one("same")]),
        Limiter::new(store(), one("local")),
    );
    // Both deny it, one by the counts of this process.
    check(&local, "42", 2).await;
    check(&shared, "42", 2).await;
    let admin = Admin::new().limiter(&shared).limiter(&local).show_keys(true);
    let app = Router::new().nest("/operators/limits", admin.router_behind_authentication());
    let mut visit = Visit::of(tab, app, "").await;
    visit.find("42").await;
    visit
        .has_status("shared (store 1), same (store 1): the store is away. local (store 2) denies key=42.")
        .await;
    let rows = visit.text("#found tbody").await;
    assert!(rows.contains("not known: the store fails"), "{rows}");
    assert!(rows.find("local") < rows.find("shared"), "{rows}");
    assert!(visit.text("#subject").await.contains("local"));
    visit
        .tab
        .evaluate("document.querySelector('#found tr:last-child button').click()")
        .await;
    visit.has_status("same (store 1): the store is away.").await;
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_search_has_no_verdict_from_a_policy_that_has_chosen_no_limit_yet() {
    let Some(tab) = Chromium::start().await else { return };
    let chosen = Policy::with_limit_fn("api", |parts| match parts.uri.query() {
        Some("hourly") => SlidingLog::per_hour(5),
        _ => SlidingLog::per_minute(5),
    });
    let layer = RateLimitLayer::new(store(), chosen.key(key::header("x-user")));
    let admin = Admin::new().layer(&layer).show_keys(true);
    let app = Router::new()
        .route("/", route(async || "hi").layer(layer))
        .nest("/operators/limits", admin.router_behind_authentication());
    let mut visit = Visit::of(tab, app, "").await;
    visit.find("42").await;
    visit
        .has_status("No limit was chosen for 42 in this process yet.")
        .await;
    let rows = visit.text("#found tbody").await;
    assert!(rows.contains("not known: no limit was chosen yet"), "{rows}");
    visit
        .tab
        .evaluate("document.querySelector('#subject button').click()")
        .await;
    let question = visit.text("#question").await;
    assert!(
        question.ends_with(
            "? Its limits are chosen for each request: counts of a limit that this instance does not know stay."
        ),
        "{question}"
    );
    visit.tab.evaluate("document.querySelector('#cancel').click()").await;

    visit.focus("lasts").await;
    visit.type_text("3d").await;
    for path in ["/", "/?hourly"] {
        send(&visit.app, get_from("192.0.2.1", path).header("x-user", "42")).await;
    }
    visit
        .tab
        .until("document.querySelectorAll('#subject .count').length === 2")
        .await;
    visit.has_typed("lasts", "3d").await;
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn the_page_works_where_its_address_has_a_user_and_a_password() {
    async fn authenticate(request: AxumRequest, next: Next) -> Response {
        let is_operator = request.headers().get(header::AUTHORIZATION);
        // `operator:secret`
        if is_operator.is_some_and(|value| value == "Basic b3BlcmF0b3I6c2VjcmV0") {
            return next.run(request).await;
        }
        (
            StatusCode::UNAUTHORIZED,
            [(header::WWW_AUTHENTICATE, "Basic realm=\"limits\"")],
        )
            .into_response()
    }

    let Some(tab) = Chromium::start().await else { return };
    let limiter = Limiter::new(store(), Policy::new("mails", SlidingLog::per_hour(1)));
    let app = page_of(&limiter, false).layer(middleware::from_fn(authenticate));
    check(&limiter, "42", 2).await;
    let mut visit = Visit::of(tab, app, "operator:secret@").await;
    let relative = "fetch(location.pathname + '/report').then(() => 'sent', () => 'refused')";
    assert_eq!(visit.tab.evaluate(relative).await, "refused");
    visit.find("42").await;
    visit.has_status("mails denies key=42.").await;
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn of_the_limits_of_plans_the_page_says_how_many_deny() {
    let Some(tab) = Chromium::start().await else { return };
    let mails = |quota| Policy::new("mails", SlidingLog::per_hour(quota));
    let plans = Plans::new("free", mails(1)).plan("paid", mails(100));
    let limiter = Limiter::new(store(), plans);
    check(&limiter, "42", 2).await;
    let mut visit = Visit::of(tab, page_of(&limiter, true), "").await;
    visit.find("42").await;
    visit.has_status("mails denies key=42 by 1 of its 2 limits.").await;
    visit
        .tab
        .evaluate("document.querySelector('[role=status]').textContent = ''")
        .await;
    visit
        .tab
        .evaluate("document.querySelector('#found button').click()")
        .await;
    visit.has_status("mails denies key=42 by 1 of its 2 limits.").await;
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_refresh_keeps_what_an_operator_has_typed_and_the_focus() {
    let Some(tab) = Chromium::start().await else { return };
    let policies = [
        Policy::new("mails", SlidingLog::per_hour(1)),
        Policy::new("exports", SlidingLog::per_hour(9)),
    ];
    let limiter = Limiter::new(store(), policies);
    let is_away = Arc::new(AtomicBool::new(false));
    let app = failing(page_of(&limiter, true), "/subject", &is_away);
    check(&limiter, "42", 2).await;
    check(&limiter, "43", 3).await;
    let mut visit = Visit::of(tab, app, "").await;
    visit.find("42").await;
    visit.has_status("mails denies key=42.").await;

    let denials = "document.querySelector('#policies').innerText.includes('7 since')";
    visit.focus("lasts").await;
    visit.type_text("3d").await;
    // The subject gets to the top of the list.
    check(&limiter, "42", 4).await;
    visit.tab.until(denials).await;
    visit.has_typed("lasts", "3d").await;
    assert!(visit.text("#subject").await.contains("5 times by api-7"));
    assert!(visit.text("#found tbody").await.contains("5 times"));
    for fails in [true, false] {
        is_away.store(fails, Ordering::Relaxed);
        let error = "document.querySelector('#subject').innerText.includes('As it was: 503 ')";
        visit.tab.until(&format!("{error} === {fails}")).await;
        visit.has_typed("lasts", "3d").await;
    }

    let label = "document.activeElement.textContent";
    visit
        .tab
        .evaluate("document.querySelector('ol li:nth-child(2) button').focus()")
        .await;
    assert_eq!(visit.tab.evaluate(label).await, "key=43");
    check(&limiter, "43", 9).await;
    visit
        .tab
        .until("document.querySelector('#policies').innerText.includes('16 since')")
        .await;
    assert_eq!(visit.tab.evaluate(label).await, "key=43");
    assert_eq!(
        visit
            .tab
            .evaluate("document.activeElement === document.querySelector('ol li button')")
            .await,
        true
    );
    // The status is of what an operator does, and is read aloud.
    visit.has_status("mails denies key=42.").await;

    let chart = visit.text("#chart").await;
    assert!(
        chart.contains("mails: ") && chart.contains("per second denied"),
        "{chart}"
    );
    assert_eq!(
        visit
            .tab
            .evaluate("document.querySelectorAll('#chart > svg polyline').length")
            .await,
        2
    );

    visit.tab.evaluate("document.querySelector('#auto').click()").await;
    visit.tab.evaluate("document.querySelector('#filter').focus()").await;
    visit.type_text("exp").await;
    assert_eq!(
        visit
            .tab
            .evaluate("document.querySelectorAll('#policies article').length")
            .await,
        1
    );
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn slots_and_bans_are_listed_with_the_subjects_that_have_them() {
    let Some(tab) = Chromium::start().await else { return };
    let policies = [
        Policy::new("exports", Concurrency::new(9)),
        Policy::new("mails", SlidingLog::per_minute(4))
            .ban(Ban::after(2, Duration::from_secs(60)).first(Duration::from_secs(600))),
    ];
    let limiter = Limiter::new(store(), policies);
    let app = page_of(&limiter, true);
    let mut held = Vec::new();
    for key in ["42", "42", "43"] {
        held.push(limiter.check(key).await.expect("a memory store replies"));
    }
    check(&limiter, "44", 9).await;
    check(&limiter, "45", 4).await;
    let waiting = tokio::spawn({
        let limiter = limiter.clone();
        async move {
            let longest = Duration::from_secs(600);
            limiter.request("45").wait_up_to(longest).acquire().await.map(drop)
        }
    });
    let mut visit = Visit::of(tab, app, "").await;
    let rows = visit.text("#holders tbody").await;
    for part in [
        "key=42",
        "2 slots",
        "key=43",
        "1 slot",
        "key=44",
        "a ban",
        "for 10 min",
        "until ",
        "key=45",
        "1 waiting request",
    ] {
        assert!(rows.contains(part), "no `{part}` in {rows}");
    }
    drop(held);
    waiting.abort();
    visit
        .tab
        .until("!/ slots?|waiting request\\b/.test(document.querySelector('#holders tbody').innerText)")
        .await;
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_hash_by_which_no_subject_is_known_anymore_stops_no_refresh() {
    let Some(tab) = Chromium::start().await else { return };
    let limiter = Limiter::new(store(), Policy::new("exports", Concurrency::new(9)));
    let app = page_of(&limiter, false);
    // No hash contains it.
    let held = limiter.check("zoe").await.expect("a memory store replies");
    let mut visit = Visit::of(tab, app, "").await;
    let hash = visit.text("#holders .look-up").await;
    visit.find(&hash).await;
    visit.has_status(&format!("exports admits {hash}.")).await;
    assert!(!visit.text("#subject").await.contains("zoe"), "its key is not shown");

    drop(held);
    visit.focus("refresh").await;
    visit.tab.press("Enter").await;
    visit.has_status_with("Refreshed in part: ").await;
    let shown = visit.text("#subject").await;
    assert!(
        shown.contains(&format!("{hash}\nexports")) && shown.contains("knows no subject"),
        "{shown}"
    );
    visit.replace("key", &hash).await;
    visit
        .has_status_with(&format!("knows no subject by the hash {hash}."))
        .await;
    visit.end();
}

/// A store in memory that can be away.
#[derive(Clone)]
struct Leaving(MemoryStore, Arc<AtomicBool>);

impl Store for Leaving {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        match self.1.load(Ordering::Relaxed) {
            true => Broken::default().decide(requests),
            false => self.0.decide(requests),
        }
    }
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn an_error_of_the_subject_or_of_the_search_stops_no_refresh() {
    let Some(tab) = Chromium::start().await else { return };
    let is_away = Arc::new(AtomicBool::new(false));
    let mails = Policy::new("mails", SlidingLog::per_hour(1)).failure_mode(FailureMode::Closed);
    let limiter = Limiter::new(Leaving(store(), is_away.clone()), mails);
    let app = failing(page_of(&limiter, true), "/search", &is_away);
    check(&limiter, "42", 2).await;
    let mut visit = Visit::of(tab, app, "").await;
    visit.find("42").await;
    visit.has_status("mails denies key=42.").await;

    let stores = "document.querySelector('#stores').innerText";
    is_away.store(true, Ordering::Relaxed);
    visit.tab.until(&format!("{stores}.includes('does not reply')")).await;
    let (subject, found) = (visit.text("#subject").await, visit.text("#found tbody").await);
    assert!(
        subject.contains("As it was: the store of the counts fails: the store is away."),
        "{subject}"
    );
    assert!(subject.contains("denies"), "{subject}");
    assert!(found.contains("As it was: 503 ") && found.contains("key=42"), "{found}");
    visit.focus("refresh").await;
    visit.tab.press("Enter").await;
    visit
        .has_status("Refreshed in part: the store of the counts fails: the store is away.")
        .await;

    is_away.store(false, Ordering::Relaxed);
    visit.tab.until(&format!("!{stores}.includes('does not reply')")).await;
    let (subject, found) = (visit.text("#subject").await, visit.text("#found tbody").await);
    assert!(
        !subject.contains("As it was") && subject.contains("denies"),
        "{subject}"
    );
    assert!(!found.contains("As it was") && found.contains("key=42"), "{found}");
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn what_an_operator_does_is_shown_whichever_request_fails() {
    const EXPIRE: &str = "(() => {
        const began = [];
        window.expire = () => began.forEach((one) => one.abort());
        AbortSignal.timeout = (longest) => {
            const one = new AbortController();
            window.longest = longest;
            began.push(one);
            return one.signal;
        };
    })()";
    let Some(tab) = Chromium::start().await else { return };
    let limiter = Limiter::new(store(), Policy::new("mails", SlidingLog::per_hour(1)));
    let fault = Arc::new(Mutex::new(Fault::Fails("/report")));
    let set = |new| *fault.lock().expect("no test panics with it") = new;
    check(&limiter, "42", 2).await;
    let mut visit = Visit::open(tab, faulty(page_of(&limiter, true), &fault), "").await;
    visit.has_status("503 Service Unavailable").await;
    visit.focus("filter").await;
    visit.type_text("ma").await;

    let failure = "The page is not refreshed: 503 Service Unavailable.";
    let replace = "document.querySelector('#key').value = ''";
    visit.tab.evaluate(replace).await;
    visit.tab.evaluate("document.querySelector('#key').focus()").await;
    visit.type_text("42").await;
    visit.tab.press("Enter").await;
    visit.has_status(&format!("mails denies key=42. {failure}")).await;
    let rows = visit.text("#found tbody").await;
    assert!(rows.contains("denies: quota exceeded"), "{rows}");
    visit
        .tab
        .evaluate("document.querySelector('#status').textContent = ''")
        .await;
    visit
        .tab
        .evaluate("document.querySelector('#found button').click()")
        .await;
    visit.has_status(&format!("mails denies key=42. {failure}")).await;
    let shown = visit.text("#subject").await;
    assert!(shown.contains("key=42") && shown.contains("0 of 1"), "{shown}");

    set(Fault::None);
    visit
        .tab
        .until("document.querySelector('#policies article') !== null")
        .await;
    visit.tab.evaluate("document.querySelector('#auto').click()").await;
    set(Fault::Redirects("/search"));
    visit.replace("key", "43").await;
    visit
        .has_status("the response is not of this router; sign in again and reload the page")
        .await;

    visit.tab.evaluate(EXPIRE).await;
    set(Fault::Hangs("/search"));
    visit.replace("key", "44").await;
    visit.has_status("Working.").await;
    visit.tab.until("window.longest === 30_000").await;
    visit.tab.evaluate("expire()").await;
    visit.has_status("no response within 30 s").await;
    visit.end();
}

/// What was sent before is received after it, and older.
#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_late_response_replaces_nothing_that_a_later_action_has_shown() {
    // Holds the next response to a path, and counts the reports.
    const HOLD: &str = "(() => {
        const real = fetch;
        window.reports = 0;
        window.fetch = async (url, ...options) => {
            const response = await real(url, ...options);
            if (window.held && url.includes(window.held)) {
                window.held = '';
                await new Promise((release) => { window.release = release; });
                window.release = undefined;
            }
            window.reports += url.includes('/report') ? 1 : 0;
            return response;
        };
    })()";
    let Some(tab) = Chromium::start().await else { return };
    let clock = ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let limiter = Limiter::new(store, Policy::new("mails", SlidingLog::per_hour(1)));
    check(&limiter, "42", 2).await;
    check(&limiter, "43", 2).await;
    let mut visit = Visit::of(tab, page_of(&limiter, true), "").await;
    visit.tab.evaluate("document.querySelector('#auto').click()").await;
    visit.find("42").await;
    visit.has_status("mails denies key=42.").await;
    visit.tab.evaluate(HOLD).await;

    let later = "mails denies key=43.";
    for (held, late) in [
        ("/subject", "document.querySelector('#refresh').click()"),
        ("/report", "document.querySelector('#found button').click()"),
        ("/report", "document.querySelector('#look-up').requestSubmit()"),
    ] {
        visit.tab.evaluate("window.held = ''").await;
        visit.replace("key", "42").await;
        visit.has_status("mails denies key=42.").await;
        visit.tab.evaluate(&format!("window.held = '{held}'; {late}")).await;
        visit.tab.until("window.release !== undefined").await;
        visit.replace("key", "43").await;
        visit.has_status(later).await;
        visit.tab.evaluate("window.reports = 0; release()").await;
        visit.tab.until("window.reports === 1").await;
        // The page has read the response and what follows it.
        let drawn = "new Promise((drawn) => setTimeout(() => requestAnimationFrame(drawn)))";
        visit.tab.evaluate(&format!("{drawn}.then(() => true)")).await;
        visit.has_status(later).await;
        let shown = visit.text("#subject").await;
        assert!(shown.contains("key=43"), "{late}: {shown}");
    }

    // What a change has done is shown in any case.
    visit
        .tab
        .evaluate("window.held = '/reset'; document.querySelector('#subject button').click()")
        .await;
    visit.tab.evaluate("document.querySelector('#reset').click()").await;
    visit.tab.until("window.release !== undefined").await;
    visit.replace("key", "42").await;
    visit.has_status("mails denies key=42.").await;
    visit.tab.evaluate("release()").await;
    visit
        .has_status("mails denies key=42. The counts of key=43 in mails are reset.")
        .await;
    assert!(visit.text("#subject").await.contains("key=42"));

    // A status of counts is as new as they are.
    visit.replace("key", "42").await;
    visit.has_status("mails denies key=42.").await;
    clock.advance(Duration::from_secs(3_600));
    visit.tab.evaluate("document.querySelector('#auto').click()").await;
    visit.has_status("Nothing is counted for 42.").await;
    visit.end();
}

/// A policy of two stores, and one that two limiters have with other settings.
#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_store_and_a_key_are_not_taken_for_others_and_no_row_is_there_twice() {
    // The places of the characters of a text, from left to right.
    const PLACES: &str = "((element) => {
        const texts = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
        const places = [];
        for (let text = texts.nextNode(); text; text = texts.nextNode()) {
            for (let place = 0; place < text.length; place += 1) {
                const range = document.createRange();
                range.setStart(text, place);
                range.setEnd(text, place + 1);
                places.push(range.getBoundingClientRect().left);
            }
        }
        return places;
    })";
    let Some(tab) = Chromium::start().await else { return };
    let (one, other) = (store(), store());
    let mails = || Policy::new("mails", SlidingLog::per_hour(1));
    let exports = Policy::new("exports", Concurrency::new(9));
    let limiters = [
        Limiter::new(one.clone(), [mails(), exports.clone()]),
        Limiter::new(one, exports.failure_mode(FailureMode::Closed)),
        Limiter::new(other, mails()),
    ];
    let key = "\u{5d0}-1";
    let held = limiters[0]
        .request("7")
        .key_of("mails", "7")
        .check()
        .await
        .expect("a memory store replies");
    let admin = limiters
        .iter()
        .fold(Admin::new().show_keys(true), |admin, limiter| admin.limiter(limiter));
    let app = Router::new().nest("/operators/limits", admin.router_behind_authentication());
    check(&limiters[2], key, 2).await;
    for subject in 0..=200_u64 {
        let set = limiters[0].override_limit("mails", subject, SlidingLog::per_hour(2), Duration::from_secs(9));
        set.await.expect("there is room");
    }
    let mut visit = Visit::of(tab, app, "").await;

    let cards =
        "[...document.querySelectorAll('#policies h3')].filter(({ textContent }) => textContent === 'exports').length";
    assert_eq!(visit.tab.evaluate(cards).await, 2);
    let overrides = visit.text("#overrides").await;
    assert!(overrides.contains("The first 200 of 201."), "{overrides}");
    let rows = "document.querySelectorAll('#overrides tbody tr').length";
    assert_eq!(visit.tab.evaluate(rows).await, 200);
    let rows = visit.text("#holders tbody").await;
    assert_eq!(rows.matches("1 slot").count(), 1, "{rows}");
    drop(held);

    visit.find(key).await;
    visit.has_status(&format!("mails (store 2) denies key={key}.")).await;
    visit
        .tab
        .evaluate("document.querySelector('#subject button').click()")
        .await;
    visit.tab.until("document.querySelector('dialog').open").await;
    let question = visit.text("#question").await;
    assert_eq!(
        question,
        format!("Remove all counts and bans of key={key} in mails (store 2)?")
    );
    for element in ["#question", "#status", "#subject h3", "li .look-up"] {
        let places = visit
            .tab
            .evaluate(&format!("{PLACES}(document.querySelector('{element}'))"))
            .await;
        let places: Vec<_> = places
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(Value::as_f64)
            .collect();
        assert!(places.is_sorted() && places.len() >= 7, "{element}: {places:?}");
    }
    visit.tab.evaluate("document.querySelector('#reset').click()").await;
    visit
        .has_status(&format!("The counts of key={key} in mails (store 2) are reset."))
        .await;
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn fifty_policies_and_ten_thousand_subjects_fit_the_page() {
    let Some(tab) = Chromium::start().await else { return };
    let policies: Vec<_> = (0..50)
        .map(|number| Policy::new(format!("policy-{number:02}"), SlidingLog::per_hour(1)))
        .collect();
    let limiters = policies.into_iter().map(|policy| Limiter::new(store(), policy));
    let limiters: Vec<_> = limiters.collect();
    for (number, limiter) in limiters.iter().enumerate() {
        for subject in 0..200 {
            check(limiter, format!("a-customer-with-a-long-name-{number}-{subject}"), 2).await;
        }
        check(limiter, "often", number).await;
    }
    let admin = limiters
        .iter()
        .fold(Admin::new().most_denied(10_000).show_keys(true), |admin, limiter| {
            admin.limiter(limiter)
        });
    let app = Router::new().nest("/operators/limits", admin.router_behind_authentication());
    let mut visit = Visit::of(tab, app, "").await;
    for (number, limiter) in limiters.iter().enumerate() {
        for subject in 0..200 {
            check(limiter, format!("a-customer-with-a-long-name-{number}-{subject}"), 1).await;
        }
        check(limiter, "often", number + 2).await;
    }

    let count = "document.querySelectorAll('#policies article').length";
    let first = "document.querySelector('#policies h3').textContent";
    visit.focus("refresh").await;
    visit.tab.press("Enter").await;
    visit.has_status("Refreshed.").await;
    assert_eq!(visit.tab.evaluate(count).await, 50);
    assert_eq!(visit.tab.evaluate(first).await, "policy-49");
    assert_eq!(
        visit
            .tab
            .evaluate("document.querySelectorAll('#policies li').length")
            .await,
        50 * 50
    );
    for width in [360, 1280] {
        assert!(visit.tab.fits(width).await, "{width}");
    }

    visit.tab.evaluate("document.querySelector('#sort').value = 'name'; document.querySelector('#sort').dispatchEvent(new Event('input'))").await;
    assert_eq!(visit.tab.evaluate(first).await, "policy-00");
    visit.focus("filter").await;
    visit.type_text("name-17-").await;
    assert_eq!(visit.tab.evaluate(count).await, 1);
    assert_eq!(visit.tab.evaluate(first).await, "policy-17");

    visit.tab.evaluate("document.querySelector('#key').focus()").await;
    visit.type_text("a-customer-with-a-long-name-17-3").await;
    visit.tab.press("Enter").await;
    visit
        .has_status("policy-17 (store 18) denies key=a-customer-with-a-long-name-17-3.")
        .await;
    assert_eq!(
        visit
            .tab
            .evaluate("document.querySelectorAll('#found tbody tr').length")
            .await,
        50
    );
    assert!(visit.text("#subject").await.contains("policy-17"));
    assert!(visit.tab.fits(360).await);
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn two_reports_of_one_second_are_one_sample_and_a_report_that_is_late_is_dropped() {
    const HOLD: &str = "(() => {
        const real = fetch;
        const released = new Promise((release) => { window.release = release; });
        window.fetch = async (...request) => {
            const response = await real(...request);
            if (!window.isHeld) {
                window.isHeld = true;
                await released;
            }
            return response;
        };
    })()";
    const REFRESH: &str =
        "document.querySelector('#status').textContent = '', document.querySelector('#refresh').click()";
    let Some(tab) = Chromium::start().await else { return };
    let limiter = Limiter::new(store(), Policy::new("mails", SlidingLog::per_hour(1)));
    let mut visit = Visit::of(tab, page_of(&limiter, true), "").await;
    visit.tab.evaluate("document.querySelector('#auto').click()").await;
    visit.tab.evaluate("void (performance.now = () => window.clock)").await;
    for (clock, checks) in [(100_000, 0), (110_000, 10), (110_001, 10)] {
        check(&limiter, "42", checks).await;
        visit.tab.evaluate(&format!("window.clock = {clock}")).await;
        visit.tab.evaluate(REFRESH).await;
        visit.has_status("Refreshed.").await;
    }
    let chart = visit.text("#chart").await;
    assert!(chart.contains("at most 2 per second"), "{chart}");

    visit.tab.evaluate(HOLD).await;
    visit.tab.evaluate("window.clock = 120_000").await;
    visit.tab.evaluate(REFRESH).await;
    visit.tab.until("window.isHeld === true").await;
    check(&limiter, "42", 10).await;
    visit.tab.evaluate("window.clock = 130_000").await;
    visit.tab.evaluate(REFRESH).await;
    visit.has_status("Refreshed.").await;
    visit
        .tab
        .evaluate("document.querySelector('#status').textContent = ''")
        .await;
    visit.tab.evaluate("release()").await;
    visit.has_status("Refreshed.").await;
    let chart = visit.text("#chart").await;
    assert!(chart.contains("mails: 0.5 per second"), "{chart}");
    let decisions = "[...document.querySelectorAll('#policies dt')].find((term) => term.textContent === 'Decisions').nextSibling.textContent";
    assert_eq!(visit.tab.evaluate(decisions).await, "30");
    visit.end();
}

/// Otherwise an operator resets a caller twice.
#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_change_that_is_done_is_shown_as_done_if_no_report_follows() {
    let Some(tab) = Chromium::start().await else { return };
    let limiter = Limiter::new(store(), Policy::new("mails", SlidingLog::per_hour(1)));
    let is_away = Arc::new(AtomicBool::new(false));
    let app = failing(page_of(&limiter, true), "/report", &is_away);
    check(&limiter, "42", 2).await;
    let mut visit = Visit::of(tab, app, "").await;
    visit.find("42").await;
    visit.has_status("mails denies key=42.").await;
    is_away.store(true, Ordering::Relaxed);
    visit
        .tab
        .evaluate("document.querySelector('#subject button').click()")
        .await;
    visit.tab.until("document.querySelector('dialog').open").await;
    visit.tab.evaluate("document.querySelector('#reset').click()").await;
    visit
        .has_status_with("The counts of key=42 in mails are reset. The page is not refreshed: 503 ")
        .await;
    assert_eq!(
        visit.tab.evaluate("document.querySelector('#status.error')").await,
        Value::Null
    );
    let shown = visit.text("#subject").await;
    assert!(shown.contains("1 of 1"), "{shown}");
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn of_the_limits_that_deny_a_row_has_the_enforced_one_with_the_longest_wait() {
    let Some(tab) = Chromium::start().await else { return };
    let store = store();
    let hourly = || Policy::new("mails", SlidingLog::per_hour(1));
    let limiters = [
        hourly().observe_only(),
        Policy::new("mails", SlidingLog::per_minute(1)),
        hourly(),
    ]
    .map(|policy| Limiter::new(store.clone(), policy));
    let mut admin = Admin::new();
    for limiter in &limiters {
        check(limiter, "42", 2).await;
        admin = admin.limiter(limiter);
    }
    let app = Router::new().nest("/operators/limits", admin.router_behind_authentication());
    let mut visit = Visit::of(tab, app, "").await;
    visit.find("42").await;
    visit.has_status("mails denies key=42 by 2 of its 3 limits.").await;
    let rows = visit.text("#found tbody").await;
    assert!(rows.contains("denies: quota exceeded for 1 h"), "{rows}");
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn the_share_of_the_keys_is_as_it_is_written() {
    let Some(tab) = Chromium::start().await else { return };
    let mails = Policy::new("mails", SlidingLog::per_hour(1)).enforce_share(0.07);
    let mut visit = Visit::of(tab, page_of(&Limiter::new(store(), mails), true), "").await;
    let card = visit.text("#policies").await;
    assert!(card.contains("enforced for 7 % of the keys"), "{card}");
    visit.end();
}

#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_policy_that_is_off_or_not_in_its_file_and_an_override_that_does_not_fit_are_not_shown_as_in_force() {
    let Some(tab) = Chromium::start().await else { return };
    let file = |text: &str| Policies::from_toml(text).expect("a file");
    let policies = file(
        "[policies.mails]\nlimit = 'sliding-log 9/h'\n[policies.calls]\nlimit = 'sliding-log 9/h'\n\
         [policies.orders]\nlimit = 'sliding-log 9/h'\n",
    );
    let all = ["mails", "calls", "orders"].map(|name| policies.unkeyed(name).expect("a policy"));
    let limiter = Limiter::new(store(), all);
    let set = limiter.override_limit("mails", "42", SlidingLog::per_hour(2), Duration::from_secs(9));
    set.await.expect("there is room");
    policies
        .replace(&file(
            "[policies.mails]\nlimit = 'token-bucket 9/h'\n[policies.calls]\nlimit = 'sliding-log 9/h'\nenabled = false\n",
        ))
        .expect("a file");
    let mut visit = Visit::of(tab, page_of(&limiter, true), "").await;
    let card = async |visit: &mut Visit, name: &str| {
        let cards = "[...document.querySelectorAll('#policies article')]";
        let card = format!("{cards}.find((card) => card.innerText.startsWith('{name}')).innerText");
        visit.tab.evaluate(&card).await.as_str().expect("text").to_owned()
    };
    let calls = card(&mut visit, "calls").await;
    assert!(calls.contains("off") && !calls.contains("enforced"), "{calls}");
    let orders = card(&mut visit, "orders").await;
    assert!(orders.contains("not in the file; keeps its last numbers"), "{orders}");
    let row = visit.text("#overrides tbody").await;
    assert!(
        row.contains("sliding-log 2/h; does not fit the limit of the policy"),
        "{row}"
    );
    visit.end();
}

/// Redis returns counts, and decides about no request.
#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn a_search_has_no_verdict_from_a_redis_that_refuses_writes() {
    let Some(tab) = Chromium::start().await else { return };
    let redis = Redis::start_with(&["--maxmemory-policy", "noeviction"]);
    let limiter = Limiter::new(
        connected(patient(), &redis.url()).await,
        Policy::new("mails", SlidingLog::per_hour(9)),
    );
    redis.command::<()>("CONFIG", ["SET", "maxmemory", "1"]).await;
    let mut visit = Visit::of(tab, page_of(&limiter, true), "").await;
    eventually("the failure is shown", async || {
        check(&limiter, "42", 1).await;
        visit.tab.evaluate("document.querySelector('#refresh').click()").await;
        let shown = visit.text("#stores .state").await;
        ["degraded", "down"].contains(&&*shown)
    })
    .await;
    visit.find("42").await;
    visit.has_status_with("mails: checks fail at 127.0.0.1:").await;
    let shown = visit.text("#subject").await;
    assert!(
        shown.contains("not known: the store fails") && !shown.contains("admits"),
        "{shown}"
    );
    visit.end();
}

/// Draws `docs/pictures/admin.png` if the environment variable `TOWER_QUOTA_PICTURES` is set.
#[tokio::test]
#[ignore = "needs Chromium: `.ci/test`"]
async fn the_picture_of_the_documentation_shows_the_page() {
    let Some(tab) = Chromium::start().await else { return };
    let redis = Redis::start();
    let policies = [
        Policy::new("search", SlidingLog::per_minute(20)).key(key::ip()),
        Policy::new("search-next", TokenBucket::per_minute(10))
            .key(key::ip())
            .observe_only()
            .apply_if(|parts| parts.uri.path() == "/search"),
        Policy::new("logins", SlidingLog::per_minute(5))
            .key((key::ip(), key::path()))
            .ban(Ban::after(10, Duration::from_secs(3_600)).first(Duration::from_secs(600)))
            .apply_if(|parts| parts.uri.path() == "/login"),
    ];
    let store = connected(patient(), &redis.url()).await;
    let layer = RateLimitLayer::new(store.clone(), policies);
    let exports = Limiter::new(store, Policy::new("exports", Concurrency::new(4)));
    let admin = Admin::new()
        .layer(&layer)
        .limiter(&exports)
        .show_keys(true)
        .instance("api-7");
    let app = Router::new()
        .route("/", route(async || "hi"))
        .route("/search", route(async || "hi"))
        .route("/login", route(async || "hi"))
        .layer(layer)
        .nest("/operators/limits", admin.router_behind_authentication());
    let _held = exports
        .check(Key::extension("user", "Łukasz"))
        .await
        .expect("Redis replies");
    let mut visit = Visit::of(tab, app, "").await;
    let app = visit.app.clone();
    let traffic = async |step: usize| {
        for (address, path, times) in [
            ("203.0.113.7", "/", 3 + step % 5),
            ("2001:db8:1:2::3", "/search", 2 + step % 3),
            ("203.0.113.9", "/login", if step > 8 { 4 } else { 1 }),
        ] {
            for _ in 0..times {
                send(&app, get_from(address, path)).await;
            }
        }
    };
    // The chart has one sample a second.
    let faster = "((now) => { performance.now = () => 20 * now(); })(performance.now.bind(performance))";
    visit.tab.evaluate(faster).await;
    for step in 0..24 {
        traffic(step).await;
        let pause = "document.querySelector('#refresh').click(), new Promise((done) => setTimeout(done, 100))";
        visit.tab.evaluate(pause).await;
    }
    visit.focus("key").await;
    visit.type_text("203.0.113.9|/login").await;
    traffic(24).await;
    visit.tab.press("Enter").await;
    visit.has_status("logins denies ip=203.0.113.9|path=/login.").await;
    visit.tab.evaluate("document.querySelector('#auto').click()").await;
    assert!(visit.tab.fits(1_000).await);
    let picture = visit.tab.picture(1_000).await;
    assert!(picture.starts_with(b"\x89PNG"));
    if std::env::var_os("TOWER_QUOTA_PICTURES").is_some() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/pictures/admin.png");
        std::fs::write(file, picture).expect("a file");
    }
}
