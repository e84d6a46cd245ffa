//! The text of a key as a reader of any language reads it.

/// The text with each escaped character that is not ASCII and can be printed in place of its escapes.
///
/// What is not UTF-8, what is not visible, and the delimiters of keys remain escaped.
pub(super) fn shown(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(place) = rest.find('^') {
        shown.push_str(&rest[..place]);
        rest = &rest[place..];
        let (character, length) = escaped(rest).unwrap_or(('^', 1));
        shown.push(character);
        rest = &rest[length..];
    }
    shown + rest
}

/// The bytes that a text with escapes stands for. What is no escape stands for itself.
#[cfg(feature = "admin")]
pub(super) fn bytes(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let (byte, after) = match escape(rest) {
            Some(byte) => (byte, &rest[3..]),
            None => (*first, after),
        };
        bytes.push(byte);
        rest = after;
    }
    bytes
}

/// The byte that the escape at the begin of a text stands for.
fn escape(text: &[u8]) -> Option<u8> {
    let &[b'^', high, low, ..] = text else { return None };
    let digit = |byte: u8| char::from(byte).to_digit(16).filter(|_| !byte.is_ascii_lowercase());
    u8::try_from(16 * digit(high)? + digit(low)?).ok()
}

/// The character that the escapes at the begin of a text stand for, and their length.
fn escaped(text: &str) -> Option<(char, usize)> {
    let mut bytes = Vec::new();
    for text in text.as_bytes().chunks(3).take(4) {
        bytes.push(escape(text)?);
        if let Ok(character) = std::str::from_utf8(&bytes) {
            let character = character.chars().next().filter(|character| is_shown(*character))?;
            return Some((character, 3 * bytes.len()));
        }
    }
    None
}

/// Whether a character is written as itself, and not by the escapes of its bytes. U+FFFD stands for bytes that are no text.
pub(super) fn is_shown(character: char) -> bool {
    // A character that combines with one before it is printed too.
    let after_another = format!("a{character}");
    !character.is_ascii() && character != char::REPLACEMENT_CHARACTER && after_another.escape_debug().count() == 2
}
