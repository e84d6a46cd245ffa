use crate::ConfigError;

/// The most bytes of a name.
const MAX_NAME: usize = 64;

/// Refuses a name that is not a lower-case word.
pub(super) fn validate_name(name: &str) -> Result<(), ConfigError> {
    let mut bytes = name.bytes();
    let well_formed = bytes.next().is_some_and(|first| first.is_ascii_lowercase())
        && bytes.all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-'))
        && name.len() <= MAX_NAME;
    if well_formed {
        return Ok(());
    }

    Err(ConfigError::new(format!(
        "{name:?} is not a policy name; one is a lower-case word such as `say-hi`: a letter, then letters, digits, `_`, \
         `.` and `-`, {MAX_NAME} at most"
    )))
}
