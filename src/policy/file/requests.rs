use std::{fmt, sync::Arc};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer},
};

use super::{
    super::scope::{Scope, Spelling},
    texts::{Methods, Networks, Routes},
};
use crate::{ConfigError, access::Condition, key};

/// The requests that a file skips or blocks: those of each of these tables.
#[derive(Clone, Debug, Default)]
pub(super) struct Requests(Vec<Described>);

/// Requests as a table describes them: those for which all of its fields hold.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "Fields")]
struct Described(Fields);

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    #[serde(default)]
    networks: Networks,
    #[serde(default)]
    routes: Routes,
    #[serde(default)]
    methods: Methods,
}

impl TryFrom<Fields> for Described {
    type Error = &'static str;

    fn try_from(fields: Fields) -> Result<Self, &'static str> {
        match &fields.routes {
            Routes::Others => Err("the routes `others` are for a policy; list the routes of these requests"),
            Routes::All if fields.networks.0.is_empty() && fields.methods.0.is_empty() => {
                Err("without `networks`, `routes` or `methods` these would be all requests")
            }
            Routes::All | Routes::These(_) => Ok(Self(fields)),
        }
    }
}

impl Requests {
    /// The conditions of these requests, where the file describes the client address so.
    pub(super) fn conditions(
        &self,
        client_ip: Option<&key::Ip>,
        spelling: Spelling,
    ) -> Result<Vec<Condition>, ConfigError> {
        let condition = |Described(fields): &Described| -> Result<Condition, ConfigError> {
            let scope = Scope {
                routes: fields.routes.scope(Vec::new),
                methods: fields.methods.0.clone(),
            };
            if fields.networks.0.is_empty() {
                return Ok(Arc::new(move |parts| scope.contains(parts, spelling)));
            }
            let address = client_ip.cloned().unwrap_or_else(key::ip);
            let within = address.try_within(&fields.networks.0)?;
            Ok(Arc::new(move |parts| scope.contains(parts, spelling) && within(parts)))
        };
        self.0.iter().map(condition).collect()
    }
}

impl<'de> Deserialize<'de> for Requests {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrSeveral;

        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = Requests;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table with `networks`, `routes` or `methods`, or a list of such tables")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Requests, A::Error> {
                let only = Described::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Requests(vec![only]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Requests, A::Error> {
                let mut all = Vec::new();
                while let Some(described) = list.next_element()? {
                    all.push(described);
                }
                match all.is_empty() {
                    true => Err(A::Error::custom("an empty list describes no request; leave it out")),
                    false => Ok(Requests(all)),
                }
            }
        }

        deserializer.deserialize_any(OneOrSeveral)
    }
}
