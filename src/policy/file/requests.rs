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
    clients: Option<Clients>,
    #[serde(default)]
    networks: Networks,
    #[serde(default)]
    routes: Routes,
    #[serde(default)]
    methods: Methods,
}

/// Clients that have no network.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Clients {
    Unknown,
}

impl TryFrom<Fields> for Described {
    type Error = &'static str;

    fn try_from(fields: Fields) -> Result<Self, &'static str> {
        match &fields.routes {
            Routes::Others => Err("the routes `others` are for a policy; list the routes of these requests"),
            _ if fields.clients.is_some() && !fields.networks.0.is_empty() => {
                Err("an unknown client is in no network; use two tables, which are alternatives")
            }
            Routes::All if fields.networks.0.is_empty() && fields.methods.0.is_empty() && fields.clients.is_none() => {
                Err("without `networks`, `clients`, `routes` or `methods` these would be all requests")
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
            let of_client = match (fields.clients, client_ip) {
                (Some(Clients::Unknown), _) if spelling == Spelling::Both => {
                    return Err(ConfigError::new("an unknown client is never skipped, only blocked"));
                }
                (Some(Clients::Unknown), None) => {
                    return Err(ConfigError::new(
                        "unknown are clients that no proxy has recorded; `[client-ip]` describes the proxies",
                    ));
                }
                (Some(Clients::Unknown), Some(client_ip)) => client_ip.clone().unknown(),
                (None, _) if fields.networks.0.is_empty() => {
                    return Ok(Arc::new(move |parts| scope.contains(parts, spelling)));
                }
                (None, _) => {
                    let address = client_ip.cloned().unwrap_or_else(key::ip);
                    address.try_within(&fields.networks.0)?
                }
            };
            Ok(Arc::new(move |parts| {
                scope.contains(parts, spelling) && of_client(parts)
            }))
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
