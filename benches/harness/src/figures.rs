use std::time::Duration;

/// The median; NaN of an empty slice.
pub fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        length if length % 2 == 0 => (values[length / 2 - 1] + values[length / 2]) / 2.0,
        length => values[length / 2],
    }
}

/// The median over the rounds of value divided by reference.
pub fn ratio(values: &[f64], references: &[f64]) -> f64 {
    let ratios: Vec<_> = values
        .iter()
        .zip(references)
        .map(|(value, reference)| value / reference)
        .collect();
    median(&ratios)
}

/// Latencies of requests, shortest first.
pub struct Latencies(Vec<Duration>);

impl Latencies {
    pub(crate) fn new(mut latencies: Vec<Duration>) -> Self {
        latencies.sort_unstable();
        Self(latencies)
    }

    /// The latency of this quantile, in microseconds; NaN of no requests.
    pub fn quantile(&self, share: f64) -> f64 {
        let rank = (self.0.len() as f64 * share).ceil() as usize;
        let latency = self.0.get(rank.saturating_sub(1));
        latency.map_or(f64::NAN, |latency| latency.as_secs_f64() * 1e6)
    }
}
