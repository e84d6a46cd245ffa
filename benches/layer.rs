//! Time and allocations of a request through the layer, and of its parts: `cargo bench --bench layer`.
//!
//! `benches/instructions.rs` counts instructions, which are the same on every run.

#[path = "support/bare.rs"]
mod bare;

use divan::{AllocProfiler, Bencher, black_box, counter::ItemsCount};
use http::Request;
use tower::Layer;
use tower_quota::{
    FixedWindow, Headers, Key, KeyExtractor, Limit, MemoryStore, SlidingCounter, SlidingLog, TokenBucket, key,
    store::{self, Charge, Operation, Store},
};

use self::bare::{Bare, admitting, denying, limited, request, send};

#[global_allocator]
static ALLOCATOR: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

/// Key extractors.
mod keys {
    use super::*;

    fn extract(bencher: Bencher<'_, '_>, extractor: &impl KeyExtractor) {
        let request = Request::get("/hello/sayHi").header("x-user-id", "42");
        let (mut parts, ()) = request.body(()).expect("a good request").into_parts();
        parts.extensions = super::request(1).into_parts().0.extensions;
        bencher.bench(|| black_box(&extractor).extract(black_box(&parts)));
    }

    #[divan::bench]
    fn ip(bencher: Bencher<'_, '_>) {
        extract(bencher, &key::ip());
    }

    #[divan::bench]
    fn ip_and_path(bencher: Bencher<'_, '_>) {
        extract(bencher, &(key::ip(), key::path()));
    }

    #[divan::bench]
    fn header(bencher: Bencher<'_, '_>) {
        extract(bencher, &key::header("x-user-id"));
    }
}

/// A decision of the store about one key.
mod store_in_memory {
    use super::*;

    fn decide(bencher: Bencher<'_, '_>, limit: &Limit, operation: Operation) {
        let store = MemoryStore::new();
        let key = Key::header("x-user-id", "42");
        let charges = [Charge::new("bench", limit, &key, 1)];
        let decide = |operation| match store
            .decide(&[store::StoreRequest::new(operation, &charges)])
            .try_ready()
        {
            Ok(answer) => answer.expect("the store replies"),
            Err(_) => unreachable!("it answers at once"),
        };
        decide(Operation::Charge);
        bencher
            .counter(ItemsCount::new(1_u32))
            .bench(|| decide(black_box(operation)));
    }

    /// A thousandth of a second, so that the log stays short.
    fn wide() -> [Limit; 4] {
        let window = std::time::Duration::from_millis(1);
        [
            SlidingLog::new(100_000, window).into(),
            SlidingCounter::new(1_000_000, window).into(),
            FixedWindow::new(1_000_000, window).into(),
            TokenBucket::new(1_000_000, window).into(),
        ]
    }

    fn narrow() -> [Limit; 4] {
        [
            SlidingLog::per_day(1).into(),
            SlidingCounter::per_day(1).into(),
            FixedWindow::per_day(1).into(),
            TokenBucket::per_day(1).into(),
        ]
    }

    #[divan::bench(args = wide())]
    fn admitted(bencher: Bencher<'_, '_>, limit: &Limit) {
        decide(bencher, limit, Operation::Check);
    }

    #[divan::bench(args = narrow())]
    fn denied(bencher: Bencher<'_, '_>, limit: &Limit) {
        decide(bencher, limit, Operation::Check);
    }
}

/// A request through the layer, key by address.
mod whole {
    use super::*;

    #[divan::bench]
    fn bare(bencher: Bencher<'_, '_>) {
        let mut service = Bare;
        bencher.bench_local(|| send(&mut service, request(1)));
    }

    #[divan::bench(args = [Headers::Draft08, Headers::None])]
    fn admitted(bencher: Bencher<'_, '_>, headers: &Headers) {
        let mut service = limited(admitting()).headers(headers.clone()).layer(Bare);
        bencher.bench_local(|| send(&mut service, request(1)));
    }

    #[divan::bench(args = [Headers::Draft08, Headers::None])]
    fn denied(bencher: Bencher<'_, '_>, headers: &Headers) {
        let mut service = limited(denying()).headers(headers.clone()).layer(Bare);
        send(&mut service, request(1));
        bencher.bench_local(|| send(&mut service, request(1)));
    }
}
