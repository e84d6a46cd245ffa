//! The wait in the details of a gRPC status, which are in the encoding of protocol buffers.

use std::time::Duration;

use base64::{
    Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};

/// gRPC sends binary fields without padding, and some servers with it.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The delay of the `google.rpc.RetryInfo` in a `google.rpc.Status`, the value of `grpc-status-details-bin`.
pub(super) fn retry_delay(details: &[u8]) -> Option<Duration> {
    let status = BASE64.decode(details).ok()?;
    let mut details = Fields(&status).filter(|(number, _)| *number == 3);
    let delay = details.find_map(|(_, any)| {
        let is_retry_info = any.message()?.any(|(number, url)| {
            let url = url.bytes().filter(|_| number == 1);
            url.is_some_and(|url| url.ends_with(b"/google.rpc.RetryInfo"))
        });
        let (_, info) = any.message()?.find(|(number, _)| is_retry_info && *number == 2)?;
        let (_, delay) = info.message()?.find(|(number, _)| *number == 1)?;
        delay.message()
    })?;

    let (mut seconds, mut nanos) = (0, 0);
    for (number, value) in delay {
        match (number, value) {
            (1, Value::Number(value)) => seconds = value,
            (2, Value::Number(value)) => nanos = value,
            _ => {}
        }
    }
    // A negative number is large as an unsigned one.
    let nanos = u32::try_from(nanos).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    i64::try_from(seconds).ok().map(|_| Duration::new(seconds, nanos))
}

/// The fields of a message, with their numbers, up to the first one that is malformed.
struct Fields<'a>(&'a [u8]);

enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Of a fixed length, which the messages here do not have.
    Fixed,
}

impl<'a> Value<'a> {
    fn bytes(&self) -> Option<&'a [u8]> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            Self::Number(_) | Self::Fixed => None,
        }
    }

    fn message(&self) -> Option<Fields<'a>> {
        self.bytes().map(Fields)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = (u64, Value<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Number(self.varint()?),
            1 => self.take(8).map(|_| Value::Fixed)?,
            2 => {
                let length = self.varint()?;
                Value::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Value::Fixed)?,
            _ => return None,
        };
        Some((tag >> 3, value))
    }
}

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut number = 0;
        for position in 0..10 {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << (7 * position);
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn take(&mut self, length: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(length).ok()?)?;
        self.0 = rest;
        Some(taken)
    }
}

#[cfg(all(test, feature = "tonic"))]
mod tests {
    use proptest::{collection::vec, prelude::any, proptest};
    use tonic_types::{ErrorDetails, StatusExt};

    use super::*;

    fn details(details: ErrorDetails) -> Vec<u8> {
        let status = tonic::Status::with_error_details(tonic::Code::ResourceExhausted, "slow down", details);
        status.details().to_vec()
    }

    #[test]
    fn the_delay_is_read_from_what_tonic_writes() {
        for delay in [
            Duration::ZERO,
            Duration::from_millis(1_500),
            Duration::from_secs(86_400),
            Duration::new(3, 1),
        ] {
            let mut all = ErrorDetails::new();
            all.add_quota_failure_violation("policy:a", "10 a minute")
                .set_retry_info(Some(delay))
                .set_request_info("id", "data");
            let written = details(all);
            assert_eq!(retry_delay(BASE64.encode(&written).as_bytes()), Some(delay));
            let padded = base64::engine::general_purpose::STANDARD.encode(&written);
            assert_eq!(retry_delay(padded.as_bytes()), Some(delay));
        }
        let without = details(ErrorDetails::with_request_info("id", "data"));
        assert_eq!(retry_delay(BASE64.encode(without).as_bytes()), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(mut bytes in vec(any::<u8>(), 0..64), cut in 0..80_usize) {
            let _ = retry_delay(&bytes);
            let _ = retry_delay(BASE64.encode(&bytes).as_bytes());
            let written = details(ErrorDetails::with_retry_info(Some(Duration::from_millis(1_500))));
            bytes.splice(0..0, written.into_iter().take(cut));
            let _ = retry_delay(BASE64.encode(&bytes).as_bytes());
        }
    }
}
