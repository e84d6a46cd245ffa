use std::{
    io,
    sync::{Arc, LazyLock, Mutex},
};

use tracing::{Dispatch, Level, level_filters::LevelFilter, subscriber::DefaultGuard};
use tracing_subscriber::util::SubscriberInitExt;

/// While there is a single subscriber, `tracing` takes the interest in an event from the thread that meets the event first, which
/// may be that of another test. Of several, all are considered.
static ANOTHER: LazyLock<Dispatch> =
    LazyLock::new(|| Dispatch::new(tracing_subscriber::fmt().with_max_level(LevelFilter::OFF).finish()));

/// What this thread logs while it exists.
pub(crate) struct Log {
    sink: Sink,
    _guard: DefaultGuard,
}

impl Log {
    pub(crate) fn capture() -> Self {
        Self::capture_from(Level::INFO)
    }

    /// Down to the least important.
    pub(crate) fn capture_everything() -> Self {
        Self::capture_from(Level::TRACE)
    }

    fn capture_from(level: Level) -> Self {
        LazyLock::force(&ANOTHER);
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(level)
            .with_writer(move || writer.clone());
        Self {
            sink,
            _guard: subscriber.finish().set_default(),
        }
    }

    pub(crate) fn text(&self) -> String {
        let bytes = self.sink.0.lock().expect("no thread panics while writing");
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no thread panics while writing").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
