use std::{fs, process::Command};

use jiff::Timestamp;
use tempfile::TempDir;

use super::{Redis, redis::server};

/// A clock of other processes, which a test sets while they run.
pub(crate) struct Faketime {
    folder: TempDir,
}

impl Faketime {
    /// A clock that is right.
    pub(crate) fn new() -> Self {
        let clock = Self {
            folder: tempfile::tempdir().expect("a folder for the clock"),
        };
        clock.set(0);
        clock
    }

    /// The library that a process preloads.
    pub(crate) fn library() -> String {
        // faketime fails where a killed process of the same number has left its semaphore.
        let library = (0..100).find_map(|_| {
            let output = Command::new("faketime").args(["-f", "+0", "env"]).output();
            let output = output.expect("faketime runs; `.ci/test` installs it");
            let environment = String::from_utf8(output.stdout).expect("the environment is text");
            let library = environment.lines().find_map(|line| line.strip_prefix("LD_PRELOAD="));
            library.map(str::to_owned)
        });
        library.expect("faketime preloads its library")
    }

    /// Sets the clock so many milliseconds ahead of the right time, or behind it.
    pub(crate) fn set(&self, ahead: i64) {
        let (sign, ms) = (if ahead < 0 { '-' } else { '+' }, ahead.unsigned_abs());
        let offset = format!("{sign}{}.{:03}", ms / 1_000, ms % 1_000);
        self.write(&offset);
    }

    /// Stops the clock at this time, in microseconds since the Unix epoch.
    ///
    /// The library reads the fraction of a second as a floating-point number, so that only multiples of 1/64 s are exact.
    pub(crate) fn stop_at(&self, now: u64) {
        let now = Timestamp::from_microsecond(now as i64).expect("a time that jiff supports");
        self.write(&now.strftime("%Y-%m-%d %H:%M:%S%.6f").to_string());
    }

    fn write(&self, time: &str) {
        // In one step, since the library may read the file at any moment.
        let (fresh, read) = (self.folder.path().join("fresh"), self.folder.path().join("time"));
        fs::write(&fresh, time).expect("a file");
        fs::rename(fresh, read).expect("the same folder");
    }

    /// A Redis that goes by this clock.
    pub(crate) fn start_redis(&self) -> Redis {
        let mut redis = server();
        redis
            // The allocator of Redis, jemalloc, reads the time while it starts, when faketime needs an allocator.
            .env("LD_PRELOAD", format!("{}:libc.so.6", Self::library()))
            .env("FAKETIME_TIMESTAMP_FILE", self.folder.path().join("time"))
            .env("TZ", "UTC")
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        Redis::start_by(redis)
    }
}
