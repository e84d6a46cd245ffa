use std::time::Duration;

use tower_governor::{GovernorLayer, governor::GovernorConfigBuilder};

use crate::{HOUR, peer::Peer};

pub(crate) fn peers() -> Vec<Peer> {
    let limit = |period: Duration, burst| {
        let mut limit = GovernorConfigBuilder::default();
        limit.period(period).burst_size(burst);
        limit
    };
    let (mut ample, mut scarce) = (limit(Duration::from_millis(1), 1_000_000_000), limit(HOUR, 1));

    let with_headers = (
        GovernorLayer::new(ample.use_headers().finish().expect("a good limit")),
        GovernorLayer::new(scarce.use_headers().finish().expect("a good limit")),
    );
    let without = (
        GovernorLayer::new(ample.finish().expect("a good limit")),
        GovernorLayer::new(scarce.finish().expect("a good limit")),
    );
    vec![
        Peer::new("tower_governor", "GCRA, headers", "", &with_headers.0, &with_headers.1),
        Peer::new("tower_governor", "GCRA", "", &without.0, &without.1),
    ]
}
