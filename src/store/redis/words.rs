use bytes::BytesMut;

/// Writes a word and numbers, a space before each: `log 1 5`.
pub(super) fn write_words(text: &mut BytesMut, word: &str, numbers: impl IntoIterator<Item = u64>) {
    text.extend_from_slice(word.as_bytes());
    for number in numbers {
        write_number(text, b' ', number);
    }
}

/// Writes a number after a delimiter.
pub(super) fn write_number(text: &mut BytesMut, delimiter: u8, number: u64) {
    text.extend_from_slice(&[delimiter]);
    text.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}
