//! What the keys of an extractor are made of, and the text of a key as a reader of any language reads it.

use std::{collections::BTreeSet, fmt};

use super::{address::Grouping, key::Key, normalize::characters, path::Path};

/// The form of the keys that an extractor makes: the components, and for each what its value can be.
///
/// The page of an `Admin` shows it, and refuses a key that has another form.
#[derive(Clone, Debug)]
#[must_use]
pub enum KeyForm {
    /// Nothing is known about the keys.
    Any,
    Component(Component),
    /// One after the other.
    All(Vec<Self>),
    /// One of these.
    First(Vec<Self>),
}

/// A component of a key.
#[derive(Clone, Debug)]
pub struct Component {
    /// Such as `ip`, or with a colon before a label, such as `header:`.
    pub(super) kind: &'static str,
    pub(super) label: Box<str>,
    pub(super) value: Value,
}

/// What the value of a component can be.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "admin"), expect(dead_code, reason = "operators enter paths"))]
pub(super) enum Value {
    Text,
    Address(Grouping),
    Path(Path),
    Route,
    Method,
    Only(Box<str>),
}

impl KeyForm {
    pub(super) fn of(kind: &'static str, label: &str, value: Value) -> Self {
        Self::Component(Component {
            kind,
            label: label.into(),
            value,
        })
    }

    pub(super) fn all(forms: impl IntoIterator<Item = Self>) -> Self {
        Self::several(forms, Self::All)
    }

    pub(super) fn first(forms: impl IntoIterator<Item = Self>) -> Self {
        Self::several(forms, Self::First)
    }

    fn several(forms: impl IntoIterator<Item = Self>, several: fn(Vec<Self>) -> Self) -> Self {
        let mut forms: Vec<_> = forms.into_iter().collect();
        match forms.len() {
            1 => forms.remove(0),
            _ => several(forms),
        }
    }
}

/// Keys of operators.
impl KeyForm {
    /// Whether requests can have this key.
    ///
    /// A hash that a store keeps of a long key, or of each, is that of any key.
    pub(crate) fn has(&self, key: &Key) -> bool {
        let components: Vec<&str> = key.as_str().split('|').collect();
        let is_hash = key.is_hashed() || matches!(components[..], [hash] if hash.starts_with("hash="));
        is_hash || self.ends(&components, &BTreeSet::from([0])).contains(&components.len())
    }

    /// The numbers of components after which a key of this form can end, if it begins after one of these.
    fn ends(&self, components: &[&str], begins: &BTreeSet<usize>) -> BTreeSet<usize> {
        match self {
            Self::Any => {
                let first = begins.first().map(|begin| begin + 1..=components.len());
                first.into_iter().flatten().collect()
            }
            Self::Component(component) => {
                let is_one = |begin: &&usize| components.get(**begin).is_some_and(|text| component.has(text));
                begins.iter().filter(is_one).map(|begin| begin + 1).collect()
            }
            Self::All(forms) => forms
                .iter()
                .fold(begins.clone(), |begins, form| form.ends(components, &begins)),
            Self::First(forms) => forms.iter().flat_map(|form| form.ends(components, begins)).collect(),
        }
    }
}

impl Component {
    fn has(&self, text: &str) -> bool {
        let begin = self.without_value();
        let Some(value) = text.strip_prefix(begin.as_str()) else {
            return false;
        };
        match &self.value {
            Value::Text | Value::Path(_) | Value::Route | Value::Method => true,
            Value::Only(only) => value == &**only,
            // A group of addresses may begin with those of a NAT64, which have other keys.
            Value::Address(grouping) => {
                let keys = grouping.keys_of(value);
                keys.is_some_and(|keys| keys.iter().any(|key| key.as_str() == text))
            }
        }
    }

    /// The component with an empty value, such as `header:x-user-id=`.
    pub(super) fn without_value(&self) -> Key {
        Key::component(self.kind, self.label.as_bytes(), b"")
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(self.without_value().as_str()))?;
        match &self.value {
            Value::Text | Value::Address(_) | Value::Method => f.write_str(".."),
            Value::Path(_) | Value::Route => f.write_str("/.."),
            Value::Only(only) => f.write_str(&shown(only)),
        }
    }
}

impl KeyForm {
    /// The text of the form as one of several that follow each other.
    pub(super) fn in_list(&self) -> String {
        match self {
            Self::First(_) => format!("({self})"),
            Self::Any | Self::Component(_) | Self::All(_) => self.to_string(),
        }
    }
}

impl fmt::Display for KeyForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any key"),
            Self::Component(component) => component.fmt(f),
            Self::All(forms) => f.write_str(&forms.iter().map(Self::in_list).collect::<Vec<_>>().join("|")),
            Self::First(forms) => f.write_str(&forms.iter().map(Self::to_string).collect::<Vec<_>>().join(" or ")),
        }
    }
}

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
    characters(b'^', text.as_bytes())
        .map(|character| character.byte)
        .collect()
}

/// The character that the escapes at the begin of a text stand for, and their length.
fn escaped(text: &str) -> Option<(char, usize)> {
    let escapes = characters(b'^', text.as_bytes()).take_while(|character| character.is_escaped);
    let mut bytes = Vec::new();
    for escape in escapes.take(4) {
        bytes.push(escape.byte);
        if let Ok(character) = std::str::from_utf8(&bytes) {
            let character = character.chars().next().filter(|character| is_shown(*character))?;
            return Some((character, 3 * bytes.len()));
        }
    }
    None
}

/// Whether a character is written as itself, and not by the escapes of its bytes. U+FFFD stands for bytes that are no text.
fn is_shown(character: char) -> bool {
    // Default_Ignorable_Code_Point (UAX #44), as far as it is printed, and the empty pattern of Braille.
    let is_invisible = matches!(
        character,
        '\u{34f}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{2800}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{ffa0}'
            | '\u{e0100}'..='\u{e01ef}'
    );
    let is_text = !character.is_ascii() && character != char::REPLACEMENT_CHARACTER && !is_invisible;
    // A character that combines with one before it is printed too.
    let after_another = format!("a{character}");
    is_text && after_another.escape_debug().count() == 2
}
