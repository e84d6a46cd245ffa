/// The slot of a key in Redis Cluster.
///
/// <https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#hash-tags>
pub(super) fn slot_of(key: &[u8]) -> u16 {
    const SLOTS: u16 = 16_384;
    crc16(hash_tag(key).unwrap_or(key)) % SLOTS
}

/// The bytes between the first `{` and the first `}` after it, unless there are none.
fn hash_tag(key: &[u8]) -> Option<&[u8]> {
    let (_, rest) = split(key, b'{')?;
    let (tag, _) = split(rest, b'}')?;
    (!tag.is_empty()).then_some(tag)
}

fn split(bytes: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let position = bytes.iter().position(|byte| *byte == at)?;
    Some((&bytes[..position], &bytes[position + 1..]))
}

/// CRC-16 of XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes
        .iter()
        .fold(0, |crc, byte| (crc << 8) ^ CRC16[usize::from((crc >> 8) as u8 ^ byte)])
}

static CRC16: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < table.len() {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 {
                crc << 1
            } else {
                (crc << 1) ^ 0x1021
            };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
    }

    #[test]
    fn only_the_first_hash_tag_counts() {
        assert_eq!(slot_of(b"{user1000}.following"), slot_of(b"{user1000}.followers"));
        assert_eq!(slot_of(b"foo{{bar}}zap"), slot_of(b"{bar"));
        assert_eq!(slot_of(b"foo{bar}{zap}"), slot_of(b"bar"));
        assert_eq!(slot_of(b"foo{}{bar}"), crc16(b"foo{}{bar}") % 16_384);
    }

    #[test]
    fn all_policies_of_one_caller_share_a_slot() {
        let (log, bucket) = ("quota:1:log:a:{ip=1|path=/x}", "quota:1:bucket:b:{ip=1|path=/x}");
        assert_eq!(slot_of(log.as_bytes()), slot_of(bucket.as_bytes()));
    }
}
