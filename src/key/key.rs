use std::{borrow::Cow, fmt, net::Ipv4Addr, sync::Arc};

use smallvec::SmallVec;

use crate::ConfigError;

/// The identity that a request is counted under: one component or several, such as an address and a path.
///
/// | component | constructor | extractor |
/// | --- | --- | --- |
/// | `ip=203.0.113.7`, `ip=2001:db8:1:2::/64` | [`Key::ip`] | [`ip`](super::ip()), [`client_ip`](super::client_ip()) |
/// | `ip=unix` | [`Key::unix_peer`] | [`ip`](super::ip()), [`client_ip`](super::client_ip()) |
/// | `path=/login` | [`Key::path`] | [`path`](super::path()) |
/// | `route=/login` | [`Key::route`] | [`route`](fn@super::route) |
/// | `unmatched=` | [`Key::unmatched_route`] | [`route`](fn@super::route) |
/// | `method=GET`, `other-method=` | [`Key::method`] | [`method`](super::method()) |
/// | `header:x-user-id=42` | [`Key::header`] | [`header`](fn@super::header) |
/// | `ext:user=42` | [`Key::extension`] | [`extension`](super::extension()) |
/// | `const=all` | [`Key::constant`] | [`constant`](super::constant()) |
/// | `key=42` | [`Key::from`] | [`from_fn`](super::from_fn()) |
/// | several, such as `ip=203.0.113.7\|path=/login` | [`and`](Key::and) | a tuple |
///
/// Keys are equal if and only if their lists of components are equal. Each component names its type, and bytes that could be
/// read as a delimiter are escaped (`^7C` for `|`).
///
/// ```
/// use tower_quota::Key;
///
/// let key = Key::ip("203.0.113.7".parse()?).and(Key::path("/login"));
/// assert_eq!(key.to_string(), "ip=203.0.113.7|path=/login");
///
/// // A bare string is a type of its own.
/// assert_eq!(Key::from("42").to_string(), "key=42");
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
///
/// [`Debug`](fmt::Debug) does not show the components, so that they do not get into a log by accident.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[must_use]
pub struct Key {
    // Printable ASCII.
    text: SmallVec<[u8; 64]>,
}

/// Composition.
impl Key {
    /// The components of both keys, as a tuple of extractors makes them.
    ///
    /// ```
    /// use tower_quota::Key;
    ///
    /// assert_eq!(Key::from(42).and(Key::path("/login")).to_string(), "key=42|path=/login");
    /// ```
    pub fn and(mut self, other: impl Into<Self>) -> Self {
        self.push(&other.into());
        self
    }

    /// No component, to be extended.
    pub(super) fn empty() -> Self {
        Self { text: SmallVec::new() }
    }

    /// A component with a kind without delimiters, a label and a value, such as `header:`, `x-user-id` and `42`.
    pub(super) fn component(kind: &str, label: &[u8], value: &[u8]) -> Self {
        let mut key = Self::labelled(kind, label);
        key.escape(value, None);
        key
    }

    /// The same of a value that is formatted.
    pub(super) fn formatted(kind: &'static str, label: &[u8], value: impl fmt::Display) -> Self {
        use fmt::Write;

        let mut key = Self::labelled(kind, label);
        let _ = write!(Escaped(&mut key), "{value}"); // writing to memory does not fail
        key
    }

    /// A component whose value is still empty.
    fn labelled(kind: &str, label: &[u8]) -> Self {
        let mut key = Self::empty();
        key.text.extend_from_slice(kind.as_bytes());
        key.escape(label, Some(b'='));
        key.text.push(b'=');
        key
    }

    /// A component of ASCII text that holds no delimiter.
    pub(super) fn plain(kind: &'static str, value: impl fmt::Display) -> Self {
        use std::io::Write;

        let mut key = Self::empty();
        let _ = write!(key.text, "{kind}={value}"); // writing to memory does not fail
        key
    }

    /// The component of an IPv4 address, formatted without `fmt`, since most requests have one.
    #[inline]
    pub(super) fn ipv4(address: Ipv4Addr) -> Self {
        // Each octet is copied with its point, and no length is checked.
        let mut text = [b'='; 64];
        text[..3].copy_from_slice(b"ip=");
        let mut end = 3;
        for octet in address.octets() {
            let (digits, length) = OCTETS[usize::from(octet)];
            text[end..end + 4].copy_from_slice(&digits);
            end += length;
        }
        Self {
            text: SmallVec::from_buf_and_len(text, end - 1),
        }
    }

    pub(super) fn push(&mut self, other: &Self) {
        if !self.text.is_empty() && !other.text.is_empty() {
            self.text.push(b'|');
        }
        self.text.extend_from_slice(&other.text);
    }

    fn escape(&mut self, mut bytes: &[u8], delimiter: Option<u8>) {
        const HEX: &[u8; 16] = b"0123456789ABCDEF";

        while let Some(next) = bytes.iter().position(|byte| !Self::is_plain(*byte, delimiter)) {
            let byte = bytes[next];
            self.text.extend_from_slice(&bytes[..next]);
            self.text
                .extend_from_slice(&[b'^', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
            bytes = &bytes[next + 1..];
        }
        self.text.extend_from_slice(bytes);
    }

    /// Whether a byte is written as itself.
    #[inline]
    fn is_plain(byte: u8, delimiter: Option<u8>) -> bool {
        byte.is_ascii_graphic() && !matches!(byte, b'^' | b'|' | b'{' | b'}') && Some(byte) != delimiter
    }
}

/// The text of each octet with a point, and its length.
static OCTETS: [([u8; 4], usize); 256] = {
    let mut octets = [([b'.'; 4], 2); 256];
    let mut n = 0;
    while n < 256 {
        let digits = [b'0' + n as u8 / 100, b'0' + n as u8 / 10 % 10, b'0' + n as u8 % 10];
        octets[n] = match n {
            0..10 => ([digits[2], b'.', b'.', b'.'], 2),
            10..100 => ([digits[1], digits[2], b'.', b'.'], 3),
            _ => ([digits[0], digits[1], digits[2], b'.'], 4),
        };
        n += 1;
    }
    octets
};

/// Appends text to the value of the last component.
struct Escaped<'a>(&'a mut Key);

impl fmt::Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.escape(text.as_bytes(), None);
        Ok(())
    }
}

/// Conversions.
impl Key {
    /// The components as printable ASCII text.
    ///
    /// Stores keep a hash instead of a text of more than 128 bytes.
    ///
    /// ```
    /// use tower_quota::Key;
    ///
    /// assert_eq!(Key::from("a|b").as_str(), "key=a^7Cb");
    /// ```
    #[must_use]
    pub fn as_str(&self) -> &str {
        // The text is printable ASCII.
        std::str::from_utf8(&self.text).unwrap_or_default()
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.text
    }

    /// Replaces a text that is too long for a store by its hash.
    #[inline(always)]
    pub(crate) fn bound(&mut self) {
        if self.text.len() > MAX_TEXT {
            self.shorten();
        }
    }

    #[cold]
    fn shorten(&mut self) {
        // 128 bits of a cryptographic hash: a collision takes about 2^64 attempts to find.
        let hash = blake3::hash(&self.text).to_hex();
        *self = Self::plain("hash", &hash.as_str()[..32]);
    }

    /// A keyed hash of the text, as a key.
    #[cfg(feature = "_redis")]
    pub(crate) fn hashed(&self, secret: &Secret) -> Self {
        // An operator has read it from the store.
        if self.is_hashed() {
            return self.clone();
        }
        let digest = u128::from_be_bytes(secret.digest(&self.text));
        Self::plain(KEYED, format_args!("{digest:032x}"))
    }

    /// Whether it is such a hash: no key of a request is.
    pub(crate) fn is_hashed(&self) -> bool {
        let hash = self
            .as_str()
            .strip_prefix(KEYED)
            .and_then(|text| text.strip_prefix('='));
        hash.is_some_and(|hash| !hash.contains('|'))
    }

    /// The key with this text, as a store has it; `None` if no key has such a text.
    #[cfg(feature = "_redis")]
    pub(crate) fn from_stored(text: &str) -> Option<Self> {
        let is_text =
            !text.is_empty() && text.len() <= MAX_TEXT && text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        is_text.then(|| Self {
            text: SmallVec::from_slice(text.as_bytes()),
        })
    }
}

/// The longest text of a key in a store, in bytes.
const MAX_TEXT: usize = 128;

/// The name of the part of a key that is a keyed hash.
const KEYED: &str = "keyed";

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        Self::component("key", b"", text.as_bytes())
    }
}

macro_rules! key_from {
    (text: $($text:ty),*; number: $($number:ty),*) => {
        $(impl From<$text> for Key {
            fn from(text: $text) -> Self {
                let text: &str = &text;
                text.into()
            }
        })*
        $(impl From<$number> for Key {
            fn from(number: $number) -> Self {
                Self::plain("key", number)
            }
        })*
    };
}
key_from! {
    text: String, &String, Arc<str>, Cow<'_, str>;
    number: i8, i16, i32, i64, i128, isize, u8, u16, u32, u64, u128, usize
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(<{} bytes>)", self.text.len())
    }
}

/// A key for keyed hashes, derived from the secret of the operator for one purpose.
#[derive(Clone)]
pub(crate) struct Secret([u8; 32]);

/// The shortest secret, in bytes: 128 bits, the length of a digest.
const MIN_SECRET: usize = 16;

impl Secret {
    /// For keys in a store.
    #[cfg(feature = "_redis")]
    pub(crate) const STORED_KEYS: &str = "tower-quota 2026 keys of callers";
    /// For partition keys in header fields, which callers receive.
    pub(crate) const PARTITION_KEYS: &str = "tower-quota 2026 partition keys in header fields";
    /// For the names of subjects that operators see.
    #[cfg(any(feature = "admin", feature = "_redis"))]
    pub(crate) const SUBJECTS: &str = "tower-quota 2026 hashes of subjects";

    /// With one secret for several purposes, the contexts still make the digest that a caller receives differ from the stored one.
    pub(crate) fn derive(context: &str, secret: impl AsRef<[u8]>) -> Result<Self, ConfigError> {
        let secret = secret.as_ref();
        if secret.len() < MIN_SECRET {
            return Err(ConfigError::new(format!(
                "a secret has at least {MIN_SECRET} bytes, not {}; generate a random one, such as with `openssl rand -hex 32`",
                secret.len(),
            )));
        }
        Ok(Self(blake3::derive_key(context, secret)))
    }

    /// The secret for the names of subjects from random bytes.
    #[cfg(feature = "admin")]
    pub(crate) fn of_subjects(bytes: &[u8; 32]) -> Self {
        Self(blake3::derive_key(Self::SUBJECTS, bytes))
    }

    /// Random bytes, which cannot be predicted.
    #[cfg(feature = "admin")]
    pub(crate) fn random_bytes() -> [u8; 32] {
        use std::hash::{BuildHasher, RandomState};

        // The keys of `RandomState` are from the entropy of the operating system.
        let words: [u64; 4] = std::array::from_fn(|word| RandomState::new().hash_one(word));
        blake3::derive_key("tower-quota 2026 random bytes", &words.map(u64::to_ne_bytes).concat())
    }

    /// Bytes for the secret of the names of subjects, from that of stored keys.
    #[cfg(feature = "_redis")]
    pub(crate) fn derived_for_subjects(&self) -> [u8; 32] {
        blake3::derive_key(Self::SUBJECTS, &self.0)
    }

    /// 128 bits of a keyed hash.
    pub(crate) fn digest(&self, bytes: &[u8]) -> [u8; 16] {
        let hash = blake3::keyed_hash(&self.0, bytes);
        let mut digest = [0; 16];
        digest.copy_from_slice(&hash.as_bytes()[..16]);
        digest
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<secret>")
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::{
        collection::vec,
        prelude::{ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, prop_assert_ne, proptest},
        prop_oneof, sample,
    };

    use super::*;

    #[cfg(feature = "_redis")]
    #[test]
    fn a_stored_text_is_one_that_a_key_has() {
        let is_key = |length| Key::from_stored(&"a".repeat(length)).is_some();
        assert_eq!([0, 1, 128, 129].map(is_key), [false, true, true, false]);
        for text in ["key=\u{e9}", "key=a\n"] {
            assert!(Key::from_stored(text).is_none(), "{text}");
        }
    }

    /// A component: its kind, its label, its value.
    type Component = (&'static str, Vec<u8>, Vec<u8>);

    /// Bytes that mean something in the text of a key more often than by chance.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let pieces: Vec<&[u8]> = vec![
            b"|",
            b"=",
            b"^",
            b"{",
            b"}",
            b":",
            b"/",
            b" ",
            b"a",
            b"7C",
            b"^7C",
            b"%7C",
            b"\xff",
            b"\0",
            b"\r\n",
            b"header:x",
            b"path",
            b"key=",
            b"|path=/",
            b"|path=",
            b"hash=",
            b"ip=::/64",
            b"const",
        ];
        let pieces = vec(sample::select(pieces), 0..5).prop_map(|pieces| pieces.concat());
        prop_oneof![4 => pieces, 1 => vec(any::<u8>(), 0..8)]
    }

    fn components() -> impl Strategy<Value = Vec<Component>> {
        let labelled = (sample::select(vec!["header:", "ext:"]), bytes(), bytes());
        let kinds = sample::select(vec!["path", "const", "key", "route", "method"]);
        let ip = any::<IpAddr>().prop_map(|ip| ("ip", Vec::new(), ip.to_string().into_bytes()));
        let unlabelled = (kinds, bytes()).prop_map(|(kind, value)| (kind, Vec::new(), value));
        vec(prop_oneof![3 => labelled, 3 => unlabelled, 1 => ip], 1..5)
    }

    fn key_of(components: &[Component]) -> Key {
        components.iter().fold(Key::empty(), |key, (kind, label, value)| {
            key.and(Key::component(kind, label, value))
        })
    }

    /// The components that these would be taken for if nothing were escaped.
    fn cut_anew(components: &[Component]) -> Vec<Component> {
        let text = components
            .iter()
            .map(|(kind, label, value)| [kind.as_bytes(), label, b"=", value].concat());
        let text = text.collect::<Vec<_>>().join(&b'|');
        let cut = |component: &[u8]| {
            let equals = component.iter().position(|byte| *byte == b'=')?;
            let (name, value) = (&component[..equals], &component[equals + 1..]);
            let kinds = ["header:", "ext:", "path", "const", "key", "route", "method", "ip"];
            let kind = kinds.into_iter().find(|kind| match kind.ends_with(':') {
                true => name.starts_with(kind.as_bytes()),
                false => name == kind.as_bytes(),
            })?;
            Some((kind, name[kind.len()..].to_vec(), value.to_vec()))
        };
        let cut: Option<Vec<_>> = text.split(|byte| *byte == b'|').map(cut).collect();
        cut.unwrap_or_else(|| components.to_vec())
    }

    /// The components that a key was made of, read back from its text.
    fn read_back(key: &Key) -> Vec<(String, Vec<u8>, Vec<u8>)> {
        let unescaped = |text: &str| {
            let mut pieces = text.split('^');
            let mut bytes = pieces.next().unwrap_or_default().as_bytes().to_vec();
            for piece in pieces {
                bytes.push(u8::from_str_radix(&piece[..2], 16).unwrap());
                bytes.extend_from_slice(&piece.as_bytes()[2..]);
            }
            bytes
        };
        let components = key.as_str().split('|').map(|component| {
            let (name, value) = component.split_once('=').unwrap();
            let (kind, label) = name.find(':').map_or((name, ""), |colon| name.split_at(colon + 1));
            (kind.to_owned(), unescaped(label), unescaped(value))
        });
        components.collect()
    }

    fn bounded(mut key: Key) -> Key {
        key.bound();
        key
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        #[test]
        fn the_components_can_be_read_back(components in components()) {
            let key = key_of(&components);
            let components: Vec<_> = components.into_iter().map(|(kind, a, b)| (kind.to_owned(), a, b)).collect();
            prop_assert_eq!(read_back(&key), components);
            let plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'{' | b'}');
            prop_assert!(key.as_str().bytes().all(plain), "{}", key);
        }

        #[test]
        fn two_lists_of_components_are_two_keys(a in components(), b in components()) {
            for b in [b, cut_anew(&a)] {
                prop_assert_eq!(bounded(key_of(&a)) == bounded(key_of(&b)), a == b, "{:?} and {:?}", a, b);
            }
        }

        /// Bytes move from one component to the next one.
        #[test]
        fn a_boundary_that_moves_is_another_key(a in bytes(), b in bytes(), c in bytes(), glue in bytes()) {
            let two = |a: Vec<u8>, b: Vec<u8>| key_of(&[("key", vec![], a), ("path", vec![], b)]);
            let joined = [a.clone(), glue.clone(), b.clone()].concat();
            if !glue.is_empty() {
                prop_assert_ne!(two([a.clone(), glue.clone()].concat(), b.clone()), two(a.clone(), [glue.clone(), b].concat()));
                let label = |label: &[&[u8]], value: &[&[u8]]| key_of(&[("header:", label.concat(), value.concat())]);
                prop_assert_ne!(label(&[&a, &glue], &[&c]), label(&[&a], &[&glue, &c]));
            }
            prop_assert_ne!(two(joined.clone(), c.clone()), key_of(&[("key", vec![], [joined, c].concat())]));
        }

        #[test]
        fn a_key_is_no_longer_than_its_bound(value in vec(any::<u8>(), 0..300)) {
            let key = key_of(&[("key", vec![], value)]);
            let short = bounded(key.clone());
            prop_assert!(short.as_str().len() <= MAX_TEXT);
            prop_assert_eq!(key == short, key.as_str().len() <= MAX_TEXT);
            prop_assert_eq!(bounded(short.clone()), short);
        }
    }

    #[test]
    fn a_secret_of_fewer_than_16_bytes_is_refused_with_the_fix() {
        assert!(Secret::derive(Secret::PARTITION_KEYS, [7; 16]).is_ok());
        for secret in [&b""[..], b"secret", &[7; 15]] {
            let error = Secret::derive(Secret::PARTITION_KEYS, secret).unwrap_err().to_string();
            assert!(
                error.contains("at least 16 bytes") && error.contains("openssl rand -hex 32"),
                "{error}"
            );
        }
    }

    #[cfg(feature = "_redis")]
    #[test]
    fn each_purpose_has_digests_of_its_own() {
        let secret = "0123456789abcdef";
        let stored = Secret::derive(Secret::STORED_KEYS, secret).unwrap();
        let partition = Secret::derive(Secret::PARTITION_KEYS, secret).unwrap();
        assert_ne!(stored.digest(b"ip=192.0.2.1"), partition.digest(b"ip=192.0.2.1"));
        #[cfg(feature = "admin")]
        {
            let subjects = Secret::derive(Secret::SUBJECTS, secret).unwrap();
            assert_ne!(stored.digest(b"ip=192.0.2.1"), subjects.digest(b"ip=192.0.2.1"));
            assert_ne!(partition.digest(b"ip=192.0.2.1"), subjects.digest(b"ip=192.0.2.1"));
        }
    }
}
