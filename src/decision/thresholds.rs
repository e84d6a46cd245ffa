use crate::ConfigError;

/// Fractions of a quota in billionths, the smallest first, each of them once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Thresholds(Vec<u32>);

/// A fraction of 1. Integers, since `0.07 * 100.0` is above 7.
const WHOLE: u32 = 1_000_000_000;

impl Thresholds {
    /// Adds a fraction, unless it is there.
    pub(crate) fn try_add(&mut self, fraction: f64) -> Result<(), ConfigError> {
        let billionths = (fraction * f64::from(WHOLE)).round();
        if !(1.0..=f64::from(WHOLE)).contains(&billionths) {
            return Err(ConfigError::new(format!(
                "{fraction} is not a fraction of a quota, which is above 0 and at most 1, as in `.warn_at(0.8)`"
            )));
        }
        self.0.push(billionths as u32);
        self.0.sort_unstable();
        self.0.dedup();
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The number of fractions that are reached when so much of a quota is used.
    pub(super) fn reached(&self, used: u64, quota: u64) -> usize {
        let used = u128::from(used) * u128::from(WHOLE);
        self.0
            .partition_point(|threshold| u128::from(*threshold) * u128::from(quota) <= used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thresholds(fractions: &[f64]) -> Thresholds {
        let mut thresholds = Thresholds::default();
        for fraction in fractions {
            thresholds.try_add(*fraction).unwrap();
        }
        thresholds
    }

    /// Computed without a product of floating-point numbers.
    #[test]
    fn a_hundredth_is_reached_by_one_of_a_hundred() {
        for hundredths in 1..=100 {
            let thresholds = thresholds(&[hundredths as f64 / 100.0]);
            for used in 0..=100 {
                let reached = usize::from(used >= hundredths);
                assert_eq!(thresholds.reached(used, 100), reached, "{used} of {hundredths}");
            }
        }
    }

    #[test]
    fn thresholds_are_counted_once_and_in_any_order() {
        let thresholds = thresholds(&[1.0, 0.5, 0.8, 0.5]);
        let reached = [0, 4, 5, 7, 8, 9, 10, 11].map(|used| thresholds.reached(used, 10));
        assert_eq!(reached, [0, 0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(thresholds.len(), 3);
    }

    #[test]
    fn a_large_quota_does_not_overflow() {
        let thresholds = thresholds(&[0.5, 1.0]);
        assert_eq!(thresholds.reached(u64::MAX - 1, u64::MAX), 1);
        assert_eq!(thresholds.reached(u64::MAX, u64::MAX), 2);
    }

    #[test]
    fn a_fraction_is_above_0_and_at_most_1() {
        for wrong in [0.0, -0.5, 1.000_001, 80.0, 1e-12, f64::NAN, f64::INFINITY] {
            let error = Thresholds::default().try_add(wrong).unwrap_err();
            assert!(error.to_string().contains("`.warn_at(0.8)`"), "{error}");
        }
    }
}
