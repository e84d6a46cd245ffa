use bench_harness::{Bare, Row, Subject};
use tower_layer::Layer;

/// A limiter to measure: the same service, with the address of the peer as the key.
pub(crate) struct Peer {
    pub(crate) row: Row,
    /// Behind a limit that is never reached.
    pub(crate) admitting: Box<dyn Subject>,
    /// Behind a limit of one an hour.
    pub(crate) denying: Box<dyn Subject>,
}

impl Peer {
    /// The limiter of a crate: the service within its layer.
    pub(crate) fn new<L>(
        package: &str,
        algorithm: &'static str,
        client: impl Into<String>,
        admitting: &L,
        denying: &L,
    ) -> Self
    where
        L: Layer<Bare>,
        L::Service: Subject + 'static,
    {
        Self {
            row: Row::new(format!("{package} {}", version(package)), algorithm, client),
            admitting: Box::new(admitting.layer(Bare)),
            denying: Box::new(denying.layer(Bare)),
        }
    }
}

/// The version of a measured package.
pub(crate) fn version(package: &str) -> &'static str {
    let entry = format!("[[package]]\nname = \"{package}\"\nversion = \"");
    let found = include_str!("../Cargo.lock")
        .split_once(&entry)
        .and_then(|(_, rest)| rest.split_once('"'));
    found.map_or("", |(version, _)| version)
}
