use serde::{Deserialize, Deserializer, de::Error as _};

use super::length::Length;
use crate::Ban;

/// The bans of a policy, as files have them.
#[derive(Deserialize)]
#[serde(
    deny_unknown_fields,
    rename_all = "kebab-case",
    expecting = "a table such as { after = 10, within = \"1h\" }"
)]
struct Table {
    after: u64,
    within: Length,
    first: Option<Length>,
    longest: Option<Length>,
}

pub(super) fn ban<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Ban>, D::Error> {
    let table = Table::deserialize(deserializer)?;
    let mut ban = Ban::after(table.after, table.within.0);
    if let Some(Length(first)) = table.first {
        ban = ban.first(first);
    }
    if let Some(Length(longest)) = table.longest {
        ban = ban.longest(longest);
    }
    ban.validate().map_err(D::Error::custom)?;
    Ok(Some(ban))
}
