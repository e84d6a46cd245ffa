use std::cell::Cell;

use bytes::BytesMut;
use http::HeaderValue;

/// The value of a field while it is written.
///
/// The values that a thread writes lie one after the other in a block of memory, which is used again when they are gone, so
/// that most take no allocation of their own.
pub(super) struct Text(BytesMut);

/// Small, since a value that stays keeps its block.
const BLOCK: usize = 1_024;

/// What most values fit in.
const ORDINARY: usize = 64;

thread_local! {
    static REST: Cell<BytesMut> = Cell::new(BytesMut::with_capacity(BLOCK));
}

impl Text {
    pub(super) fn new() -> Self {
        let mut rest = REST.try_with(Cell::take).unwrap_or_default();
        rest.reserve(ORDINARY);
        Self(rest)
    }

    #[inline]
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    #[inline]
    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    pub(super) fn number(&mut self, number: u64) -> &mut Self {
        self.text(itoa::Buffer::new().format(number))
    }

    /// Begins a member of a list.
    pub(super) fn delimit(&mut self) -> &mut Self {
        match self.0.is_empty() {
            true => self,
            false => self.text(", "),
        }
    }
}

impl From<Text> for HeaderValue {
    fn from(Text(mut rest): Text) -> Self {
        let text = rest.split().freeze();
        let _ = REST.try_with(|cell| cell.set(rest));
        // Always is a value: names, numbers, and what was one before.
        Self::from_maybe_shared(text).unwrap_or(const { Self::from_static("") })
    }
}

impl From<u64> for Text {
    fn from(number: u64) -> Self {
        let mut text = Self::new();
        text.number(number);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stay_what_they_are_while_others_are_written() {
        let values: Vec<HeaderValue> = (0..1_000).map(|number| Text::from(number).into()).collect();
        for (number, value) in values.iter().enumerate() {
            assert_eq!(value, &number.to_string());
        }
    }

    #[test]
    fn two_values_are_written_at_once_and_may_be_longer_than_a_block() {
        let (mut short, mut long) = (Text::new(), Text::new());
        for _ in 0..BLOCK {
            long.delimit().number(42);
        }
        short.text("a");

        assert_eq!(HeaderValue::from(long), ["42"; BLOCK].join(", "));
        assert_eq!(HeaderValue::from(short), "a");
    }
}
