use std::cell::Cell;

use bytes::BytesMut;
use http::HeaderValue;

/// The value of a field while it is written.
///
/// The values that a thread writes lie one after the other in a block of memory, which is reused when they are dropped, so
/// that most take no allocation of their own.
pub(super) struct Text(BytesMut);

/// Small, since a value that is not dropped keeps its block.
const BLOCK: usize = 1_024;

/// The space reserved for a value. Longer ones may allocate.
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

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Begins a member of a list.
    pub(super) fn delimit(&mut self) -> &mut Self {
        match self.is_empty() {
            true => self,
            false => self.text(", "),
        }
    }
}

impl From<Text> for HeaderValue {
    fn from(Text(mut rest): Text) -> Self {
        let text = rest.split().freeze();
        let _ = REST.try_with(|cell| cell.set(rest));
        // It is always a value: it consists of policy names, numbers and other values.
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
    fn values_do_not_change_while_others_are_written() {
        let values: Vec<HeaderValue> = (0..1_000).map(|number| Text::from(number).into()).collect();
        for (number, value) in values.iter().enumerate() {
            assert_eq!(value, &number.to_string());
        }
    }

    #[test]
    fn a_value_may_be_longer_than_a_block_and_written_beside_another() {
        let (mut short, mut long) = (Text::new(), Text::new());
        for _ in 0..BLOCK {
            long.delimit().number(42);
        }
        short.text("a");

        assert_eq!(HeaderValue::from(long), ["42"; BLOCK].join(", "));
        assert_eq!(HeaderValue::from(short), "a");
    }
}
