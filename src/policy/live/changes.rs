use std::{path::Path, sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    task::spawn_blocking,
    time::{self, MissedTickBehavior},
};

use super::{super::file::read, shared::Shared};
use crate::ConfigError;

/// The content of a file, or the reason why it cannot be read.
type Content = Result<String, String>;

/// Reloads a file whenever its content has changed, in a task.
pub(super) fn follow(shared: Arc<Shared>, interval: Duration) -> Result<(), ConfigError> {
    let path: Arc<Path> = shared.path()?.into();
    if interval.is_zero() {
        return Err(ConfigError::new(
            "an interval is above zero, such as `Duration::from_secs(5)`",
        ));
    }
    let runtime = Handle::try_current().map_err(|error| {
        ConfigError::because(
            "`reload_on_change` spawns a task, so it is called in a tokio runtime",
            error,
        )
    })?;

    runtime.spawn(async move {
        let mut ticks = time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut changes = Changes::default();
        while shared.is_used() {
            ticks.tick().await;
            let path = path.clone();
            let content = spawn_blocking(move || read(&path).map_err(|error| error.to_string()));
            let Ok(content) = content.await else { return };
            changes.see(&shared, content);
        }
    });
    Ok(())
}

/// What was seen in a file that is not applied.
#[derive(Default)]
struct Changes {
    last: Option<Content>,
    /// The content that could not be applied.
    refused: Option<Content>,
}

impl Changes {
    fn see(&mut self, shared: &Shared, content: Content) {
        if content.as_ref().is_ok_and(|text| shared.has_loaded(text)) {
            if self.refused.is_some() {
                let _ = shared.note_outcome::<String>(Ok(()));
            }
            *self = Self::default();
            return;
        }
        let is_complete = self.last.as_ref() == Some(&content);
        if is_complete && self.refused.as_ref() != Some(&content) {
            let loaded = content
                .clone()
                .and_then(|text| shared.load(text).map_err(|error| error.to_string()));
            if let Err(error) = shared.note_outcome(loaded) {
                #[cfg(feature = "tracing")]
                tracing::warn!(error, "a changed file of limits is not applied");
                let _ = error;
                self.refused = Some(content.clone());
            }
        }
        self.last = Some(content);
    }
}
