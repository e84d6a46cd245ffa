use bytes::{BufMut, BytesMut};

/// Writes a word and a zero byte.
pub(super) fn write_word(buffer: &mut BytesMut, word: &str) {
    buffer.extend_from_slice(word.as_bytes());
    buffer.put_u8(0);
}

/// Writes numbers as little-endian doubles, which Lua computes with. They are exact below 2^53.
pub(super) fn write_numbers(buffer: &mut BytesMut, numbers: impl IntoIterator<Item = u64>) {
    for number in numbers {
        buffer.put_f64_le(number as f64);
    }
}
