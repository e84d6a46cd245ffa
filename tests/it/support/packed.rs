/// An argument of the script from its text: numbers are packed as little-endian doubles, words end with a zero byte.
///
/// `check 1 1 1 log 1 5 60000000 0 0`: for one request with one charge of one caller, a check of a log, of cost 1 and quota 5.
pub(crate) fn packed(text: &str) -> Vec<u8> {
    let words = text.split(' ').map(|word| match word.parse::<u64>() {
        Ok(number) => (number as f64).to_le_bytes().to_vec(),
        Err(_) => [word.as_bytes(), b"\0"].concat(),
    });
    words.flatten().collect()
}
