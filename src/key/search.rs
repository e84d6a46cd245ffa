//! The keys that an operator enters: in the text that stores have, or as values such as an address or the name of a user.

use std::{fmt, net::IpAddr};

use super::{
    address::parse_network,
    form::{Component, KeyForm, Value, bytes, shown},
    header::is_readable_credential,
    key::Key,
};
use crate::ConfigError;

/// What an operator looks for: a key, or values that are components of keys.
pub(crate) struct Search {
    /// The key, if the text is one.
    key: Option<Key>,
    values: Vec<SearchedValue>,
}

struct SearchedValue {
    /// Such as `user` in `user=alice`, and `header:x-user-id`.
    name: Option<String>,
    /// With what escapes stand for.
    value: Vec<u8>,
}

/// A key of a policy with the values of a search.
pub(crate) enum FoundKey {
    Key(Key),
    /// The key as text, with `..` for each value that the search does not have.
    Incomplete(String),
}

impl fmt::Display for FoundKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => f.write_str(&key.readable()),
            Self::Incomplete(key) => f.write_str(key),
        }
    }
}

/// The most values of a search, and the most keys of a policy for one.
const MOST: usize = 8;

impl Search {
    /// Values with `|` between them: each alone, or with the name of its component.
    pub(crate) fn parse(text: &str) -> Result<Self, ConfigError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(ConfigError::new(
                "nothing to search for; enter a value such as `alice`, `203.0.113.7` or `user=alice`",
            ));
        }
        let values: Vec<_> = text.split('|').map(|value| SearchedValue::of(value.trim())).collect();
        if text.split('|').any(|value| value.trim().starts_with("keyed=")) {
            return Err(keyed());
        }
        let key = Key::parse(text).ok();
        if values.len() > MOST && key.is_none() {
            return Err(ConfigError::new(format!(
                "a search has at most {MOST} values; enter fewer of them, or a whole key such as `ip=203.0.113.7|path=/login`"
            )));
        }
        Ok(Self { key, values })
    }

    /// The text as one value, such as `q=1` or `auth0|5f7c`; none if one of its values has the name of a component.
    ///
    /// For a text that is no key of these forms, value by value.
    pub(crate) fn whole(&self, text: &str, forms: &[KeyForm]) -> Option<Self> {
        let names = |name: &str| KINDS.contains(&kind_of(name).0) || forms.iter().any(|form| form.has_name(name));
        let mut named = self.values.iter().filter_map(|value| value.name.as_deref());
        let value = SearchedValue {
            name: None,
            value: bytes(text.trim()),
        };
        (!named.any(names)).then(|| Self {
            key: None,
            values: vec![value],
        })
    }
}

impl SearchedValue {
    fn of(text: &str) -> Self {
        let named = text.split_once('=').filter(|(name, _)| !name.is_empty());
        let (name, value) = named.map_or((None, text), |(name, value)| (Some(name.to_owned()), value));
        Self {
            name,
            value: bytes(value),
        }
    }

    /// The component of this form, if the value is one.
    fn as_component(&self, form: &Component) -> Option<Key> {
        let is_meant = self.name.as_ref().is_none_or(|name| form.has_name(name));
        form.key_of(&self.value).filter(|_| is_meant)
    }

    /// A component of a key of which nothing is known.
    fn as_any_component(&self) -> Option<Key> {
        match &self.name {
            None => Some(Key::component("key", b"", &self.value)),
            Some(name) => {
                let value = Key::component("", b"", &self.value);
                Key::parse(&format!("{name}{value}")).ok()
            }
        }
    }
}

impl Component {
    /// Whether an operator may call it so, such as `user`, `ext:user` and `ext`.
    fn has_name(&self, name: &str) -> bool {
        let written = self.without_value();
        let written = written.as_str().trim_end_matches('=');
        let names = [&shown(written), written, &self.label, self.kind.trim_end_matches(':')];
        names.iter().any(|other| other.eq_ignore_ascii_case(name))
    }

    /// The component with this value, if the value can be one.
    pub(super) fn key_of(&self, value: &[u8]) -> Option<Key> {
        let text = || std::str::from_utf8(value).ok();
        let path = || text().filter(|path| path.starts_with('/'));
        match &self.value {
            Value::Text if self.kind == "header:" && is_readable_credential(&self.label, value) => {
                Some(Key::of_header(&self.label, value))
            }
            Value::Text => Some(Key::component(self.kind, self.label.as_bytes(), value)),
            Value::Path(rule) => path().map(|path| rule.key_of(path)),
            Value::Route => path().map(Key::route),
            Value::Method => {
                let method = text()?.to_ascii_uppercase().parse().ok()?;
                Some(Key::method(&method)).filter(|key| key.as_str().starts_with("method="))
            }
            Value::Only(only) => self.fixed().filter(|_| value == bytes(only)),
            Value::Address(grouping) => grouping.parse(text()?),
        }
    }

    /// The component, if it has one value alone.
    fn fixed(&self) -> Option<Key> {
        let Value::Only(value) = &self.value else { return None };
        Key::parse(&format!("{}{value}", self.without_value())).ok()
    }
}

impl KeyForm {
    fn has_name(&self, name: &str) -> bool {
        match self {
            Self::Any => false,
            Self::Component(component) => component.has_name(name),
            Self::All(forms) | Self::First(forms) => forms.iter().any(|form| form.has_name(name)),
        }
    }

    /// The keys of this form with all values of a search, or, if there are none, what keys with them look like.
    pub(crate) fn keys_with(&self, search: &Search) -> Vec<FoundKey> {
        if let Some(key) = search.key.as_ref().filter(|key| self.has(key)) {
            return vec![FoundKey::Key(key.clone())];
        }
        // The text is a key of another form.
        if search.values.len() > MOST {
            return Vec::new();
        }
        let mut found = self.filled(&search.values);
        found.retain(|filled| filled.values == (1 << search.values.len()) - 1);
        if found.iter().any(Filled::is_complete) {
            found.retain(Filled::is_complete);
        }
        found.truncate(MOST);
        found.into_iter().map(FoundKey::from).collect()
    }
}

/// A key of a form, as far as a search has values for it.
#[derive(Clone, Default)]
struct Filled {
    components: Vec<Result<Key, String>>,
    /// The values that it has, as bits.
    values: u32,
}

impl Filled {
    fn of(component: Result<Key, String>, values: u32) -> Self {
        Self {
            components: vec![component],
            values,
        }
    }

    fn is_complete(&self) -> bool {
        self.components.iter().all(Result::is_ok)
    }

    /// Both, one after the other, unless they have a value in common.
    fn and(&self, other: &Self) -> Option<Self> {
        let components = [&self.components[..], &other.components[..]].concat();
        let values = self.values | other.values;
        (self.values & other.values == 0).then_some(Self { components, values })
    }
}

impl From<Filled> for FoundKey {
    fn from(filled: Filled) -> Self {
        if filled.is_complete() {
            let keys = filled.components.into_iter().flatten();
            return Self::Key(keys.fold(Key::empty(), Key::and));
        }
        let texts = filled.components.into_iter();
        let texts = texts.map(|component| component.map_or_else(|missing| missing, |key| key.readable()));
        Self::Incomplete(texts.collect::<Vec<_>>().join("|"))
    }
}

impl KeyForm {
    /// The keys of this form with some of the values, at most 64.
    fn filled(&self, values: &[SearchedValue]) -> Vec<Filled> {
        const MOST: usize = 64;

        let with_each = |component: &dyn Fn(&SearchedValue) -> Option<Key>| -> Vec<Filled> {
            let numbered = values.iter().enumerate();
            let with = numbered.filter_map(|(number, value)| Some(Filled::of(Ok(component(value)?), 1 << number)));
            with.collect()
        };
        let mut without = Filled::of(Err(self.in_list()), 0);
        let mut filled = match self {
            Self::Component(form) => {
                if let Some(fixed) = form.fixed() {
                    without = Filled::of(Ok(fixed), 0);
                }
                with_each(&|value| value.as_component(form))
            }
            Self::Any => with_each(&SearchedValue::as_any_component),
            Self::First(forms) => {
                let filled = forms.iter().flat_map(|form| form.filled(values));
                filled.filter(|filled| filled.values > 0).collect()
            }
            Self::All(forms) => {
                return forms.iter().fold(vec![Filled::default()], |begun, form| {
                    let next = form.filled(values);
                    let pairs = begun
                        .iter()
                        .flat_map(|begun| next.iter().filter_map(|next| begun.and(next)));
                    pairs.take(MOST).collect()
                });
            }
        };
        filled.push(without);
        filled.truncate(MOST);
        filled
    }
}

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

/// The kind of key that a name begins with, and its label.
fn kind_of(name: &str) -> (&str, &str) {
    name.split_at(name.find(':').map_or(name.len(), |colon| colon + 1))
}

fn keyed() -> ConfigError {
    ConfigError::new("`keyed=` is a hash that a store makes of a key; write the key itself, such as `ip=203.0.113.7`")
}

fn component(text: &str) -> Result<Key, ConfigError> {
    let Some((name, value)) = text.split_once('=') else {
        return Err(ConfigError::new(format!(
            "`{text}` is not a key; one is written like `ip=203.0.113.7`, `header:x-user-id=42`, `key=42` or \
             `ip=203.0.113.7|path=/login`"
        )));
    };
    let (kind, label) = kind_of(name);
    let key = match kind {
        "keyed" => return Err(keyed()),
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
    let network = || parse_network(value).map(|network| network.trunc().to_string());
    address.ok().or_else(network).ok_or_else(|| {
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
    use crate::key::{KeyExtractor, ip};

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
            Key::from(
                "\u{34f}\u{115f}\u{1160}\u{17b4}\u{17b5}\u{180b}\u{180f}\u{2800}\u{3164}\u{fe00}\u{fe0f}\u{ffa0}\u{e0100}",
            ),
        ] {
            assert_eq!(key.readable().replace('é', "^C3^A9"), key.as_str());
        }
    }

    #[test]
    fn the_work_of_a_search_is_bounded() {
        let alternatives =
            |_| KeyForm::first((0..16).map(|nth| KeyForm::of("header:", &format!("x-{nth}"), Value::Text)));
        let form = KeyForm::all((0..3).map(alternatives));
        let search = Search::parse("a|b|c").unwrap();
        assert_eq!(form.filled(&search.values).len(), 64);
    }

    #[test]
    fn a_network_that_begins_with_those_of_a_nat64_is_a_key() {
        let form = ip().ipv6_prefix(32).form();
        for (text, is_key) in [("ip=64:ff9b::/32", true), ("ip=64:ff9b::/40", false)] {
            assert_eq!(form.has(&Key::parse(text).unwrap()), is_key, "{text}");
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
