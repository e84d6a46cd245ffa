//! The keys that are made of values which an operator enters, such as an address or the name of a user.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;

use super::{
    form,
    form::{Component, Form, KeyForm, Value},
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
        if values.len() > MOST {
            return Err(ConfigError::new(format!("a search has at most {MOST} values")));
        }
        let key = Key::parse(text).ok();
        Ok(Self { key, values })
    }
}

impl SearchedValue {
    fn of(text: &str) -> Self {
        let named = text.split_once('=').filter(|(name, _)| !name.is_empty());
        let (name, value) = named.map_or((None, text), |(name, value)| (Some(name.to_owned()), value));
        Self {
            name,
            value: form::bytes(value),
        }
    }

    /// The component of this form, if the value is one.
    fn as_component(&self, form: &Component) -> Option<Key> {
        if let Some(name) = &self.name {
            let written = form.without_value();
            let written = written.as_str().trim_end_matches('=');
            let kind = form.kind.trim_end_matches(':');
            let names = [&form::shown(written), written, &form.label, kind];
            if !names.iter().any(|other| other.eq_ignore_ascii_case(name)) {
                return None;
            }
        }
        form.key_of(&self.value)
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
            Value::Only(only) => self.fixed().filter(|_| value == form::bytes(only)),
            Value::Address(_) if value == b"unix" => Some(Key::unix_peer()),
            Value::Address(grouping) => {
                let address = text()?.parse::<IpAddr>().ok();
                let network = || Some(text()?.parse::<IpNet>().ok()?.network());
                Some(grouping.key(grouping.canonical(address.or_else(network)?)))
            }
        }
    }

    /// The component, if it has one value alone.
    fn fixed(&self) -> Option<Key> {
        let Value::Only(value) = &self.value else { return None };
        Key::parse(&format!("{}{value}", self.without_value())).ok()
    }
}

impl KeyForm {
    /// The keys of this form with all values of a search, or, if there are none, what keys with them look like.
    pub(crate) fn keys_with(&self, search: &Search) -> Vec<FoundKey> {
        if let Some(key) = search.key.as_ref().filter(|key| self.has(key)) {
            return vec![FoundKey::Key(key.clone())];
        }
        let mut found = self.0.filled(&search.values);
        found.retain(|filled| filled.values == (1 << search.values.len()) - 1);
        if found.iter().any(|filled| filled.missing == 0) {
            found.retain(|filled| filled.missing == 0);
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
    missing: usize,
}

impl Filled {
    fn of(component: Result<Key, String>, values: u32) -> Self {
        Self {
            missing: usize::from(component.is_err()),
            components: vec![component],
            values,
        }
    }

    /// Both, one after the other, unless they have a value in common.
    fn and(&self, other: &Self) -> Option<Self> {
        let mut components = self.components.clone();
        components.extend_from_slice(&other.components);
        (self.values & other.values == 0).then(|| Self {
            components,
            values: self.values | other.values,
            missing: self.missing + other.missing,
        })
    }
}

impl From<Filled> for FoundKey {
    fn from(filled: Filled) -> Self {
        if filled.missing == 0 {
            let keys = filled.components.into_iter().flatten();
            return Self::Key(keys.fold(Key::empty(), Key::and));
        }
        let texts = filled.components.into_iter();
        let texts = texts.map(|component| component.map_or_else(|missing| missing, |key| key.readable()));
        Self::Incomplete(texts.collect::<Vec<_>>().join("|"))
    }
}

impl Form {
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
