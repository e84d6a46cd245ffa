use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use fastrand::Rng;

/// The address of each request, in an order that is the same on every run.
pub struct Traffic {
    /// The name in tables.
    pub name: &'static str,
    addresses: Vec<SocketAddr>,
    /// Number of consecutive requests from the same address.
    hold: u64,
    requests: AtomicU64,
}

const KEYS: u32 = 10_000;
const DRAWS: usize = 1 << 17;

impl Traffic {
    /// 10,000 callers with the same rate.
    pub fn many() -> Self {
        let mut random = Rng::with_seed(1);
        let draws = (0..DRAWS).map(|_| random.u32(..KEYS));
        Self::new("10,000 keys", 0, draws, 1)
    }

    /// One caller at a time. After 50,000 requests the next one follows, so that no limit is reached.
    pub fn hot() -> Self {
        Self::new("one hot key", 1, 0..60_000, 50_000)
    }

    /// 10,000 callers; the rate of the n-th is 1/n of that of the first.
    pub fn zipf() -> Self {
        let mut shares = Vec::new();
        let mut total = 0.0;
        for rank in 1..=KEYS {
            total += 1.0 / f64::from(rank);
            shares.push(total);
        }
        let mut random = Rng::with_seed(2);
        let draws = (0..DRAWS).map(|_| {
            let drawn = random.f64() * total;
            shares.partition_point(|share| *share <= drawn) as u32
        });
        Self::new("Zipf", 2, draws, 1)
    }

    /// 1,000 callers with the same rate, to be denied.
    pub fn denied() -> Self {
        let mut random = Rng::with_seed(3);
        let draws = (0..DRAWS).map(|_| random.u32(..1_000));
        Self::new("denied", 3, draws, 1)
    }

    /// One caller for all requests.
    pub fn single() -> Self {
        Self::new("one key", 4, 0..1, 1)
    }

    fn new(name: &'static str, network: u32, callers: impl Iterator<Item = u32>, hold: u64) -> Self {
        let first = u32::from(Ipv4Addr::new(10, 0, 0, 0)) + (network << 16);
        Self {
            name,
            addresses: callers
                .map(|caller| SocketAddr::from((Ipv4Addr::from(first + caller), 4711)))
                .collect(),
            hold,
            requests: AtomicU64::new(0),
        }
    }

    /// Number of requests so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    /// The address of the next request.
    pub fn next_address(&self) -> SocketAddr {
        let turn = self.requests.fetch_add(1, Relaxed) / self.hold;
        self.addresses[turn as usize % self.addresses.len()]
    }
}
