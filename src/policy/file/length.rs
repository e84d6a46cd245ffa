use std::{fmt, time::Duration};

use serde::{
    Deserialize, Deserializer,
    de::{Error, Visitor},
};

use crate::limit::parse_length;

/// A length of time, such as `10min`.
pub(super) struct Length(pub(super) Duration);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Length;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a length of time such as \"10min\"")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Length, E> {
                let length = parse_length(text).map(Length);
                length.ok_or_else(|| {
                    E::custom(format_args!(
                        "`{text}` is not a length of time; one looks like `10min` or `500ms`"
                    ))
                })
            }
        }

        deserializer.deserialize_str(Text)
    }
}
