//! Keys that are written by an operator, in the text that stores have.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{
    form::{bytes, is_shown, shown},
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
        let mut escaped = String::with_capacity(text.len());
        for character in text.chars() {
            if is_shown(character) {
                let mut bytes = [0; 4];
                let bytes = character.encode_utf8(&mut bytes).bytes();
                escaped.extend(bytes.map(|byte| format!("^{byte:02X}")));
            } else {
                escaped.push(character);
            }
        }
        escaped.split('|').try_for_each(validate)?;
        let components = escaped.split('|').map(|component| {
            let header = component
                .strip_prefix("header:")
                .and_then(|header| header.split_once('='));
            match header.map(|(name, value)| (name, bytes(value))) {
                Some((name, value)) if is_readable_credential(name, &value) => Self::of_header(name, &value),
                _ => Self::of_text(component),
            }
        });
        Ok(components.fold(Self::empty(), Self::and))
    }

    /// The [text](Self::as_str) with printable characters in place of their escapes, such as `ext:user=张三`.
    ///
    /// [`parse`](Self::parse) makes the key of it.
    pub(crate) fn readable(&self) -> String {
        shown(self.as_str())
    }
}

fn validate(component: &str) -> Result<(), ConfigError> {
    let Some((name, value)) = component.split_once('=') else {
        return Err(ConfigError::new(format!(
            "`{component}` is not a key; one is written like `ip=203.0.113.7`, `header:x-user-id=42`, `key=42` or \
             `ip=203.0.113.7|path=/login`"
        )));
    };
    let (kind, label) = match name.find(':') {
        Some(colon) => name.split_at(colon + 1),
        None => (name, ""),
    };
    match kind {
        "keyed" | "once" => {
            return Err(ConfigError::new(format!(
                "`{kind}=` is a hash that a store makes of a key or of the id of a request; write the key itself, such as \
                 `ip=203.0.113.7`"
            )));
        }
        "ip" => validate_address(value)?,
        "header:" if label.bytes().any(|byte| byte.is_ascii_uppercase()) => {
            return Err(ConfigError::new(format!(
                "the name of a header is in lower case: `header:{}=`",
                label.to_ascii_lowercase()
            )));
        }
        _ if !KINDS.contains(&kind) => {
            let kinds = KINDS.join("`, `");
            return Err(ConfigError::new(format!(
                "`{kind}` is not a kind of key; those are `{kinds}`"
            )));
        }
        _ => {}
    }
    validate_escapes(label, Some(b'='))?;
    validate_escapes(value, None)
}

fn validate_address(value: &str) -> Result<(), ConfigError> {
    if value == "unix" {
        return Ok(());
    }
    let address = value
        .parse::<IpAddr>()
        .map(|address| address.to_canonical().to_string());
    let network = value.parse::<IpNet>().map(|network| network.trunc().to_string());
    match address.or(network) {
        Ok(written) if written == value => Ok(()),
        Ok(written) => Err(ConfigError::new(format!("the key of `{value}` is `ip={written}`"))),
        Err(_) => Err(ConfigError::new(format!(
            "`{value}` is not an address; the key of one is written like `ip=203.0.113.7`, and of IPv6 the network by which \
             addresses are counted, like `ip=2001:db8:1:2::/64`"
        ))),
    }
}

/// Each byte has one spelling: itself, or `^` and two digits.
fn validate_escapes(text: &str, delimiter: Option<u8>) -> Result<(), ConfigError> {
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte == b'^' {
            let digits: Vec<u8> = bytes.by_ref().take(2).collect();
            let digits = std::str::from_utf8(&digits).unwrap_or_default();
            let is_upper = digits.len() == 2 && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'A'..=b'F'));
            let escaped = u8::from_str_radix(digits, 16).ok().filter(|_| is_upper);
            match escaped {
                None => {
                    return Err(ConfigError::new(
                        "`^` begins the two digits of an escaped byte, such as `^7C`; by itself it is written `^5E`",
                    ));
                }
                Some(byte) if Key::is_plain(byte, delimiter) => {
                    return Err(ConfigError::new(format!(
                        "`^{digits}` is written `{}`",
                        char::from(byte)
                    )));
                }
                Some(_) => {}
            }
        } else if !Key::is_plain(byte, delimiter) {
            let shown = char::from(byte);
            let what = if byte.is_ascii_graphic() {
                format!("`{shown}`")
            } else {
                "a byte that is not a printable ASCII character".to_owned()
            };
            return Err(ConfigError::new(format!("{what} is written `^{byte:02X}` in a key")));
        }
    }
    Ok(())
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
            ("header:X-User-Id=42", "`header:x-user-id=`"),
            ("key=a b", "`^20`"),
            ("key={a}", "`^7B`"),
            ("key=\u{FFFD}", "`^EF`"),
            ("key=a\u{202E}b", "`^E2`"),
            ("key=a^7cb", "`^7C`"),
            ("key=a^4", "`^5E`"),
            ("key=a^41", "written `A`"),
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
