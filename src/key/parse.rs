//! Keys that are written by an operator, in the text that stores have.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{
    form::{bytes, shown},
    header::is_readable_credential,
    key::Key,
};
use crate::ConfigError;

/// The kinds of components. Those with a colon have a label, such as the name of a header.
const KINDS: [&str; 11] = [
    "ip",
    "path",
    "route",
    "unmatched",
    "method",
    "other-method",
    "header:",
    "ext:",
    "const",
    "key",
    "hash",
];

impl Key {
    /// The key with this [text](Self::as_str), such as `ip=203.0.113.7|path=/login`.
    ///
    /// What no request can have as its key is an error, since its counts would be empty without a reason.
    pub(crate) fn parse(text: &str) -> Result<Self, ConfigError> {
        text.split('|')
            .try_fold(Self::empty(), |key, text| Ok(key.and(component(text)?)))
    }

    /// The [text](Self::as_str) with printable characters in place of their escapes, such as `ext:user=张三`.
    ///
    /// [`parse`](Self::parse) makes the key of it.
    pub(crate) fn readable(&self) -> String {
        shown(self.as_str())
    }
}

fn component(text: &str) -> Result<Key, ConfigError> {
    let Some((name, value)) = text.split_once('=') else {
        return Err(ConfigError::new(format!(
            "`{text}` is not a key; one is written like `ip=203.0.113.7`, `header:x-user-id=42`, `key=42` or \
             `ip=203.0.113.7|path=/login`"
        )));
    };
    let (kind, label) = match name.find(':') {
        Some(colon) => name.split_at(colon + 1),
        None => (name, ""),
    };
    let key = match kind {
        "keyed" | "once" => {
            return Err(ConfigError::new(format!(
                "`{kind}=` is a hash that a store makes of a key or of the id of a request; write the key itself, such as \
                 `ip=203.0.113.7`"
            )));
        }
        "ip" => Key::plain("ip", address(value)?),
        "header:" => Key::component(kind, &bytes(&label.to_ascii_lowercase()), &bytes(value)),
        _ if KINDS.contains(&kind) => Key::component(kind, &bytes(label), &bytes(value)),
        _ => {
            let kinds = KINDS.join("`, `");
            return Err(ConfigError::new(format!(
                "`{kind}` is not a kind of key; those are `{kinds}`"
            )));
        }
    };
    // Each byte has one spelling: itself, or `^` and two digits.
    if key.readable() != shown(text) {
        return Err(ConfigError::new(format!(
            "the key `{text}` is written `{}`",
            key.readable()
        )));
    }
    match kind {
        "header:" if is_readable_credential(label, &bytes(value)) => Ok(Key::of_header(label, &bytes(value))),
        _ => Ok(key),
    }
}

fn address(value: &str) -> Result<String, ConfigError> {
    if value == "unix" {
        return Ok(value.to_owned());
    }
    let address = value
        .parse::<IpAddr>()
        .map(|address| address.to_canonical().to_string());
    let network = || value.parse::<IpNet>().map(|network| network.trunc().to_string());
    address.or_else(|_| network()).map_err(|_| {
        ConfigError::new(format!(
            "`{value}` is not an address; the key of one is written like `ip=203.0.113.7`, and of IPv6 the network by which \
             addresses are counted, like `ip=2001:db8:1:2::/64`"
        ))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert_eq, proptest};

    use super::*;

    proptest! {
        #[test]
        fn a_key_is_parsed_from_its_text(value in any::<Vec<u8>>(), text in ".{0,40}", v4 in any::<[u8; 4]>(), v6 in any::<u128>()) {
            let keys = [
                Key::from(text.as_str()),
                Key::header("x-user-id", &value).and(Key::path(&text)),
                Key::extension(&text, &text).and(Key::constant("all")),
                Key::ip(v4.into()).and(Key::method(&http::Method::GET)),
                Key::ip(std::net::Ipv6Addr::from_bits(v6).into()).and(Key::unix_peer()),
            ];
            for key in keys {
                prop_assert_eq!(&Key::parse(key.as_str()).map_err(|error| error.to_string()), &Ok(key.clone()));
                prop_assert_eq!(&Key::parse(&key.readable()).map_err(|error| error.to_string()), &Ok(key.clone()));
                let mut bound = key;
                bound.bound();
                prop_assert_eq!(Key::parse(bound.as_str()).map_err(|error| error.to_string()), Ok(bound));
            }
        }

        #[test]
        fn no_text_makes_it_panic(text in "[a-z:=|^0-9A-F{} \\PC]{0,30}") {
            let _ = Key::parse(&text);
        }
    }

    #[test]
    fn text_of_any_language_is_read_and_shown_as_it_is_written() {
        for text in [
            "ext:用户=张三",
            "header:x-user=Łukasz^20Żak",
            "key=हिन्दी",
            "key=أمل",
            "key=🙂",
            "path=/é",
        ] {
            let key = Key::parse(text).unwrap();
            assert!(key.as_str().is_ascii() && key.as_str().contains('^'), "{key}");
            assert_eq!(key.readable(), text);
        }
        assert_eq!(Key::parse("ext:用户=张三").unwrap(), Key::extension("用户", "张三"));
        // Bytes that are no text, delimiters, and characters that are not seen.
        for key in [
            Key::header("x-user", b"\xE6\x9D"),
            Key::header("x-user", b"\xFF\xC3\xA9"),
            Key::from("a|b^{c}\u{202E}\u{FFFD}\n"),
        ] {
            assert_eq!(key.readable().replace('é', "^C3^A9"), key.as_str());
        }
    }

    /// An operator enters the header of a complaint, or the hash of a list.
    #[test]
    fn credentials_are_hashed_unless_they_are() {
        let key = Key::header("x-api-key", "sk live|1").and(Key::constant("all"));
        assert_eq!(Key::parse("header:x-api-key=sk^20live^7C1|const=all").unwrap(), key);
        assert_eq!(Key::parse(key.as_str()).unwrap(), key);
        // A credential can be 32 digits.
        let digits = "0123456789abcdef0123456789abcdef";
        assert_eq!(
            Key::parse(&format!("header:x-api-key={digits}")).unwrap(),
            Key::header("x-api-key", digits)
        );
    }

    #[test]
    fn a_text_that_no_request_has_as_its_key_is_an_error_with_the_fix() {
        for (text, fix) in [
            ("", "`ip=203.0.113.7`"),
            ("203.0.113.7", "`ip=203.0.113.7`"),
            ("header=42", "`header:`"),
            ("header:X-User-Id=42", "`header:x-user-id=42`"),
            ("key=a b", "`key=a^20b`"),
            ("key={a}", "`key=^7Ba^7D`"),
            ("key=\u{FFFD}", "`key=^EF^BF^BD`"),
            ("key=a\u{202E}b", "`key=a^E2^80^AEb`"),
            ("key=a^7cb", "`key=a^7Cb`"),
            ("key=a^4", "`key=a^5E4`"),
            ("key=a^41", "written `key=aA`"),
            ("ip=localhost", "`ip=203.0.113.7`"),
            ("ip=::ffff:192.0.2.1", "`ip=192.0.2.1`"),
            ("ip=2001:DB8::/64", "`ip=2001:db8::/64`"),
            ("ip=192.0.2.1|keyed=0123456789abcdef0123456789abcdef", "the key itself"),
        ] {
            let error = Key::parse(text).unwrap_err().to_string();
            assert!(error.contains(fix), "{text}: {error}");
        }
    }
}
