//! An allocator that counts while [`count`] runs, and otherwise costs a branch for each allocation.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed},
};

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicI64 = AtomicI64::new(0);

/// The system's allocator with a count, for `#[global_allocator]`.
pub struct Counting;

/// Allocations of the process while a future ran.
#[derive(Clone, Copy, Debug)]
pub struct Allocations {
    /// Number of allocations and reallocations.
    pub count: u64,
    /// Bytes that were allocated and not freed.
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
