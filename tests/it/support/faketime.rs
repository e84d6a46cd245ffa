use std::{fs, process::Command};

use tempfile::TempDir;

use super::Redis;

/// A clock of other processes, which a test sets while they run.
pub(crate) struct Faketime {
    folder: TempDir,
    library: String,
}

impl Faketime {
    /// A clock that is right.
    pub(crate) fn new() -> Self {
        let output = Command::new("faketime")
            .args(["-f", "+0", "env"])
            .output()
            .expect("faketime runs; `.ci/test` installs it");
        let environment = String::from_utf8(output.stdout).expect("the environment is text");
        let library = environment.lines().find_map(|line| line.strip_prefix("LD_PRELOAD="));

        let clock = Self {
            folder: tempfile::tempdir().expect("a folder for the clock"),
            library: library.expect("faketime preloads its library").to_owned(),
        };
        clock.set(0);
        clock
    }

    /// Sets the clock so many milliseconds ahead of the right time, or behind it.
    pub(crate) fn set(&self, ahead: i64) {
        let (sign, ms) = (if ahead < 0 { '-' } else { '+' }, ahead.unsigned_abs());
        let offset = format!("{sign}{}.{:03}", ms / 1_000, ms % 1_000);
        // Nobody must read half of it.
        let (fresh, read) = (self.folder.path().join("fresh"), self.folder.path().join("offset"));
        fs::write(&fresh, offset).expect("a file");
        fs::rename(fresh, read).expect("the same folder");
    }

    /// A Redis that goes by this clock.
    pub(crate) fn start_redis(&self) -> Redis {
        let mut redis = Command::new("redis-server");
        redis
            // The allocator of Redis, jemalloc, asks for the time while it starts, when faketime needs an allocator.
            .env("LD_PRELOAD", format!("{}:libc.so.6", self.library))
            .env("FAKETIME_TIMESTAMP_FILE", self.folder.path().join("offset"))
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        Redis::start_by(redis)
    }
}
