//! Draws the pictures of `docs/pictures`, from what each algorithm admits and from the tables of measurements in `docs`. A test
//! compares them with these files.
//!
//! ```console
//! $ cargo run --example pictures
//! ```

use std::{error::Error, fs, path::Path, time::Duration};

use tower_quota::{
    FixedWindow, Limit, Limiter, ManualClock, MemoryStore, Policy, SlidingCounter, SlidingLog, TokenBucket,
    store::StoreError,
};

#[path = "pictures/draw.rs"]
mod draw;
#[path = "pictures/measured.rs"]
mod measured;

use draw::Timeline;

const WINDOW: Duration = Duration::from_secs(60);

/// A request: its time in microseconds after a full minute, and whether it was admitted.
struct Sent {
    at: u64,
    admitted: bool,
}

fn algorithms(quota: u64) -> [(&'static str, Limit); 4] {
    [
        ("SlidingLog", SlidingLog::new(quota, WINDOW).into()),
        ("SlidingCounter", SlidingCounter::new(quota, WINDOW).into()),
        ("FixedWindow", FixedWindow::new(quota, WINDOW).into()),
        ("TokenBucket", TokenBucket::new(quota, WINDOW).into()),
    ]
}

/// A limit that was not used before, and a clock that shows a full minute.
struct Subject {
    limiter: Limiter,
    clock: ManualClock,
    start: Duration,
    sent: Vec<Sent>,
}

impl Subject {
    fn new(limit: &Limit) -> Self {
        let clock = ManualClock::new();
        let store = MemoryStore::builder().manual_clock(&clock).build();
        Self {
            limiter: Limiter::new(store, Policy::new("pictures", limit.clone())),
            start: clock.now(),
            clock,
            sent: Vec::new(),
        }
    }

    /// Sends a request, and returns the wait in microseconds if it is denied.
    async fn request(&mut self, at: u64) -> Result<Option<u64>, StoreError> {
        let now = self.start + Duration::from_micros(at);
        self.clock.advance(now - self.clock.now());
        let wait = self.limiter.check("k").await?.retry_after();
        let admitted = wait.is_none();
        self.sent.push(Sent { at, admitted });
        Ok(wait.map(|wait| wait.as_micros() as u64))
    }

    /// The most admissions in a window that ends with one of them.
    fn most(&self) -> u64 {
        let admitted: Vec<_> = self.sent.iter().filter(|sent| sent.admitted).collect();
        let counts = admitted.iter().map(|last| {
            let in_window = |sent: &&&Sent| sent.at <= last.at && last.at - sent.at < WINDOW.as_micros() as u64;
            admitted.iter().filter(in_window).count() as u64
        });
        counts.max().unwrap_or_default()
    }
}

/// Few requests, then many around the end of the window that the first one opened, then one every 5 seconds.
fn traffic() -> impl Iterator<Item = u64> {
    let seconds = [2, 53, 55, 57, 59, 61, 63, 65, 67, 69]
        .into_iter()
        .chain((75..180).step_by(5));
    seconds.map(|second| second * 1_000_000)
}

/// What each algorithm admits of the same traffic.
async fn timelines() -> Result<String, StoreError> {
    let (quota, mut timelines) = (5, Vec::new());
    for (name, limit) in algorithms(quota) {
        let mut subject = Subject::new(&limit);
        for at in traffic() {
            subject.request(at).await?;
        }
        let (most, sent) = (subject.most(), subject.sent);
        timelines.push(Timeline { name, most, sent });
    }
    Ok(draw::timelines(quota, &timelines))
}

/// What each algorithm admits of a request at the start of a minute, and of as many as it admits from the end of that minute on.
async fn edge() -> Result<String, StoreError> {
    let (quota, window, mut timelines) = (100, WINDOW.as_micros() as u64, Vec::new());
    for (name, limit) in algorithms(quota) {
        let mut subject = Subject::new(&limit);
        subject.request(0).await?;
        let mut at = window - 1;
        while at < 2 * window {
            at += subject.request(at).await?.unwrap_or_default();
        }
        let (most, sent) = (subject.most(), subject.sent);
        timelines.push(Timeline { name, most, sent });
    }
    Ok(draw::edge(quota, &timelines))
}

/// The names of the pictures and their texts.
pub(crate) async fn pictures() -> Result<[(&'static str, String); 4], StoreError> {
    Ok([
        ("timelines.svg", timelines().await?),
        ("edge.svg", edge().await?),
        ("speed.svg", measured::speed()),
        ("failures.svg", measured::failures()),
    ])
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/pictures");
    fs::create_dir_all(&folder)?;
    for (name, text) in pictures().await? {
        fs::write(folder.join(name), text)?;
    }
    Ok(())
}
