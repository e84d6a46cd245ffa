//! The share of the keys that a policy is enforced for.

use crate::{ConfigError, Key};

/// The share of the keys that a policy is enforced for, in billionths; the others are observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EnforcedShare(u32);

const WHOLE: u32 = 1_000_000_000;

impl EnforcedShare {
    pub(crate) const NONE: Self = Self(0);

    pub(crate) fn new(fraction: f64) -> Result<Self, ConfigError> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(ConfigError::new(format!(
                "{fraction} is not a share of the keys, which is from 0 to 1, as in `.enforce_share(0.1)`"
            )));
        }
        Ok(Self((fraction * f64::from(WHOLE)).round() as u32))
    }

    /// Whether keys differ in whether the policy is enforced or observed, or all are observed.
    #[inline]
    pub(crate) fn is_whole(self) -> bool {
        self.0 == WHOLE
    }

    #[inline]
    pub(crate) fn is_none(self) -> bool {
        self == Self::NONE
    }

    /// The share as a fraction.
    #[cfg(feature = "admin")]
    pub(crate) fn fraction(self) -> f64 {
        f64::from(self.0) / f64::from(WHOLE)
    }

    /// Whether the policy of this name is enforced for this key.
    #[inline]
    pub(crate) fn contains(self, name: &str, key: &Key) -> bool {
        match self.0 {
            WHOLE => true,
            0 => false,
            share => place(name, key) < share,
        }
    }
}

impl Default for EnforcedShare {
    fn default() -> Self {
        Self(WHOLE)
    }
}

/// The place of a key among all, from 0 to [`WHOLE`]: the same in each process and version, and another for each policy, so that
/// the policies of an application are not tried on the same callers first.
#[inline(never)] // most policies are enforced for all keys
fn place(name: &str, key: &Key) -> u32 {
    // FNV-1a.
    let bytes = name.bytes().chain([0]).chain(key.as_bytes().iter().copied());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    // The last step of MurmurHash3: short keys differ in the low bits of the sum alone.
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    let hash = (hash ^ (hash >> 33)) >> 32;
    ((hash * u64::from(WHOLE)) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contained(share: f64, name: &str) -> Vec<usize> {
        let share = EnforcedShare::new(share).expect("a share");
        let contains = |number: &usize| share.contains(name, &Key::from(number.to_string()));
        (0..10_000).filter(contains).collect()
    }

    #[test]
    fn a_share_has_its_part_of_the_keys_and_keeps_them_when_it_grows() {
        let mut earlier = Vec::new();
        for (share, expected) in [(0.0, 0), (0.01, 100), (0.1, 1_000), (0.5, 5_000), (1.0, 10_000)] {
            let now = contained(share, "mails");
            assert!(now.len().abs_diff(expected) <= 150, "{share}: {}", now.len());
            assert!(earlier.iter().all(|key| now.contains(key)), "{share}");
            earlier = now;
        }
    }

    #[test]
    fn policies_have_other_keys_first() {
        let (mails, logins) = (contained(0.1, "mails"), contained(0.1, "logins"));
        let common = mails.iter().filter(|key| logins.contains(key)).count();
        assert!((50..200).contains(&common), "{common}");
    }

    /// Replicas of two versions enforce a policy for the same keys.
    #[test]
    fn the_place_of_a_key_is_the_same_in_all_versions() {
        let places = ["", "42", "ip=203.0.113.7"].map(|key| place("mails", &Key::from(key)));
        assert_eq!(places, [958_422_614, 489_390_295, 944_812_597]);
    }

    #[test]
    fn what_is_no_share_is_an_error() {
        for fraction in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let error = EnforcedShare::new(fraction).expect_err("no share").to_string();
            assert!(error.contains("is not a share of the keys"), "{error}");
        }
    }
}
