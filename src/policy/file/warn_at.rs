use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, SeqAccess, Visitor},
};

use crate::decision::Thresholds;

/// A fraction, or a list of fractions that is not empty.
#[derive(Clone, Debug, Default)]
pub(super) struct WarnAt(pub(super) Thresholds);

impl<'de> Deserialize<'de> for WarnAt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrSeveral;

        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = WarnAt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a fraction of the quota such as 0.8, or a list of fractions")
            }

            fn visit_f64<E: serde::de::Error>(self, fraction: f64) -> Result<WarnAt, E> {
                let mut thresholds = Thresholds::default();
                thresholds.try_add(fraction).map_err(E::custom)?;
                Ok(WarnAt(thresholds))
            }

            fn visit_u64<E: serde::de::Error>(self, fraction: u64) -> Result<WarnAt, E> {
                self.visit_f64(fraction as f64)
            }

            fn visit_i64<E: serde::de::Error>(self, fraction: i64) -> Result<WarnAt, E> {
                self.visit_f64(fraction as f64)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<WarnAt, A::Error> {
                let mut thresholds = Thresholds::default();
                while let Some(fraction) = list.next_element()? {
                    thresholds.try_add(fraction).map_err(A::Error::custom)?;
                }
                if thresholds.is_empty() {
                    return Err(A::Error::custom("an empty list has no threshold; leave it out"));
                }
                Ok(WarnAt(thresholds))
            }
        }

        deserializer.deserialize_any(OneOrSeveral)
    }
}
