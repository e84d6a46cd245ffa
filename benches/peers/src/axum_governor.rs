use axum_governor::{GovernorConfigBuilder, GovernorLayer, Quota, extractor::PeerIp, nz};

use crate::peer::Peer;

/// Its headers cannot be turned off.
pub(crate) fn peers() -> Vec<Peer> {
    let limit = |quota| {
        let config = GovernorConfigBuilder::default()
            .with_extractor(PeerIp::default())
            .expect_connect_info()
            .quota_default(quota)
            .finish();
        GovernorLayer::new(config.expect("a good limit"))
    };
    let ample = limit(Quota::requests_per_second(nz!(1_000u32)).burst(nz!(1_000_000_000u32)));
    let scarce = limit(Quota::requests_per_hour(nz!(1u32)));
    vec![Peer::new("axum-governor", "GCRA, headers", "", &ample, &scarce)]
}
