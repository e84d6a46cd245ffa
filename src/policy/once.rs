use std::sync::Arc;

use http::request::Parts;

use crate::{Key, KeyExtractor, Limit, decision::Marker, key::KeyError};

/// The ids of requests, and how often a request with one is repeated without being counted.
#[derive(Clone)]
pub(crate) struct Once {
    id: Option<Arc<dyn KeyExtractor>>,
    pub(super) repetitions: u64,
}

impl Once {
    pub(super) const DEFAULT: Self = Self {
        id: None,
        repetitions: 10,
    };

    /// Extracts the id from requests.
    pub(super) fn extract(&mut self, id: impl KeyExtractor) {
        self.id = Some(Arc::new(id));
    }

    /// Whether an id is extracted from requests.
    pub(super) fn has_id(&self) -> bool {
        self.id.is_some()
    }

    /// The marker of a request by this limit, if the request has an id.
    #[inline]
    pub(crate) fn marker_of(
        &self,
        (limit, cost): (&Limit, u64),
        key: &Key,
        parts: &Parts,
    ) -> Result<Option<Arc<Marker>>, KeyError> {
        match &self.id {
            Some(extractor) => self.extract_marker(&**extractor, (limit, cost), key, parts),
            None => Ok(None),
        }
    }

    #[inline(never)] // most policies have no ids
    fn extract_marker(
        &self,
        extractor: &dyn KeyExtractor,
        charge: (&Limit, u64),
        key: &Key,
        parts: &Parts,
    ) -> Result<Option<Arc<Marker>>, KeyError> {
        match extractor.extract(parts) {
            Ok(Some(id)) => Ok(self.marker(charge, key, &id)),
            Ok(None) => Ok(None),
            Err(error) if error.is_absent() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The marker of a request of this key with this id, if the limit counts.
    pub(crate) fn marker(&self, (limit, cost): (&Limit, u64), key: &Key, id: &Key) -> Option<Arc<Marker>> {
        let markers = limit.for_markers(self.repetitions + 1)?;
        Some(Arc::new(Marker::new(markers, key.marker(id, cost))))
    }
}
