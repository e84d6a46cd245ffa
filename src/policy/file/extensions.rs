use std::{any::type_name, collections::BTreeMap, fmt, sync::Arc};

use http::request::Parts;

use crate::{ConfigError, KeyExtractor, key};

/// The extensions of requests that a file names, as the application has registered them.
#[derive(Clone, Default)]
pub(super) struct Extensions(BTreeMap<String, Extension>);

#[derive(Clone)]
struct Extension {
    type_name: &'static str,
    key: Arc<dyn KeyExtractor>,
    text: Arc<Text>,
}

/// The value of a request as text, if the request has one.
type Text = dyn Fn(&Parts) -> Option<String> + Send + Sync;

impl Extensions {
    pub(super) fn add<T, V>(&mut self, name: String, value: impl Fn(&T) -> V + Send + Sync + 'static)
    where
        T: Send + Sync + 'static,
        V: fmt::Display,
    {
        let value = Arc::new(value);
        let of_key = value.clone();
        let extension = Extension {
            type_name: type_name::<T>(),
            key: Arc::new(key::extension(&name, move |extension: &T| of_key(extension))),
            text: Arc::new(move |parts| {
                parts
                    .extensions
                    .get::<T>()
                    .map(|extension| value(extension).to_string())
            }),
        };
        self.0.insert(name, extension);
    }

    /// Adds those that were registered for an earlier load of the file.
    pub(super) fn inherit(&mut self, earlier: &Self) {
        for (name, extension) in &earlier.0 {
            self.0.entry(name.clone()).or_insert_with(|| extension.clone());
        }
    }

    pub(super) fn key(&self, name: &str) -> Result<Arc<dyn KeyExtractor>, ConfigError> {
        Ok(self.get(name)?.key.clone())
    }

    pub(super) fn text(&self, name: &str) -> Result<Arc<Text>, ConfigError> {
        Ok(self.get(name)?.text.clone())
    }

    fn get(&self, name: &str) -> Result<&Extension, ConfigError> {
        self.0.get(name).ok_or_else(|| {
            ConfigError::new(format!(
                "`extension:{name}` is not registered; call `with_extension(\"{name}\", |value: &Type| ..)` on the policies \
                 before it is used"
            ))
        })
    }
}

impl fmt::Debug for Extensions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let types = self.0.iter().map(|(name, extension)| (name, extension.type_name));
        f.debug_map().entries(types).finish()
    }
}
