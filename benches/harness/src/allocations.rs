//! Allocations, counted while asked for: what is not counted costs no more than a branch.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed},
};

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicI64 = AtomicI64::new(0);

/// The system's allocator, to be made the `#[global_allocator]`.
pub struct Counting;

/// What was allocated while a future ran, by the whole process.
#[derive(Clone, Copy, Debug)]
pub struct Allocations {
    /// How often memory was asked for, or more of it.
    pub count: u64,
    /// What was not given back.
    pub bytes_kept: i64,
}

/// Counts while the future runs. One at a time.
pub async fn count<T>(future: impl Future<Output = T>) -> (T, Allocations) {
    ALLOCATIONS.store(0, Relaxed);
    BYTES.store(0, Relaxed);
    COUNTING.store(true, Relaxed);
    let output = future.await;
    COUNTING.store(false, Relaxed);

    let allocations = Allocations {
        count: ALLOCATIONS.load(Relaxed),
        bytes_kept: BYTES.load(Relaxed),
    };
    (output, allocations)
}

fn note(count: u64, bytes: i64) {
    if COUNTING.load(Relaxed) {
        ALLOCATIONS.fetch_add(count, Relaxed);
        BYTES.fetch_add(bytes, Relaxed);
    }
}

// SAFETY: each call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(1, layout.size() as i64);
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(1, layout.size() as i64);
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(1, size as i64 - layout.size() as i64);
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        note(0, -(layout.size() as i64));
        unsafe { System.dealloc(block, layout) }
    }
}
