use std::{borrow::Cow, collections::BTreeMap};

use http::{HeaderName, request::Parts};
use serde::Deserialize;

use super::extensions::Extensions;
use crate::{
    ConfigError, Limit,
    limit::{self, PolicyLimit},
};

/// What selects the plan of a request, in a file: `extension:tier` or `header:x-plan`.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "String")]
pub(super) enum Selector {
    Extension(String),
    Header(HeaderName),
}

impl TryFrom<String> for Selector {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if let Some(name) = text.strip_prefix("extension:") {
            return Ok(Self::Extension(name.to_owned()));
        }
        let header = text.strip_prefix("header:").map(HeaderName::try_from);
        match header {
            Some(Ok(name)) => Ok(Self::Header(name)),
            _ => Err(format!(
                "`{text}` does not select a plan; what does looks like `extension:plan` or `header:x-plan`"
            )),
        }
    }
}

/// The plan of a request, if it has one.
type Select = Box<dyn for<'a> Fn(&'a Parts) -> Option<Cow<'a, str>> + Send + Sync>;

impl Selector {
    fn select(&self, extensions: &Extensions) -> Result<Select, ConfigError> {
        match self {
            Self::Extension(name) => {
                let text = extensions.text(name)?;
                Ok(Box::new(move |parts| text(parts).map(Cow::Owned)))
            }
            Self::Header(name) => {
                let name = name.clone();
                Ok(Box::new(move |parts| {
                    let mut lines = parts.headers.get_all(&name).iter();
                    match (lines.next(), lines.next()) {
                        (Some(only), None) => only.to_str().ok().map(Cow::Borrowed),
                        _ => None,
                    }
                }))
            }
        }
    }
}

/// The limits of a policy by the plan of a request.
#[derive(Clone, Debug)]
pub(super) struct Plans {
    pub(super) selector: Selector,
    pub(super) limits: BTreeMap<String, Limit>,
}

impl Plans {
    /// The limit of each request: that of its plan, or this one if it has none of them.
    pub(super) fn limit(&self, without: Limit, extensions: &Extensions) -> Result<PolicyLimit, ConfigError> {
        let select = self.selector.select(extensions)?;
        let limits = self.limits.clone();
        Ok(limit::by(move |parts| {
            let planned = select(parts).and_then(|plan| limits.get(&*plan));
            planned.unwrap_or(&without).clone()
        }))
    }
}
