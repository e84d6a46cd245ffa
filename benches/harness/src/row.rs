use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{
    figures::{median, ratio},
    subject::Load,
};

/// What is measured, and its figures: for each cell one of every round.
pub struct Row {
    name: String,
    algorithm: &'static str,
    client: String,
    cells: BTreeMap<&'static str, Vec<f64>>,
    failed: u64,
}

impl Row {
    /// Of a limiter, by name and version; `client` is what talks to Redis.
    pub fn new(name: impl Into<String>, algorithm: &'static str, client: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            algorithm,
            client: client.into(),
            cells: BTreeMap::new(),
            failed: 0,
        }
    }

    /// Name, algorithm and client.
    pub fn title(&self) -> String {
        let parts = [self.name.as_str(), self.algorithm, &self.client];
        parts
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// Adds the figure of a round.
    pub fn note(&mut self, cell: &'static str, figure: f64) {
        self.cells.entry(cell).or_default().push(figure);
    }

    /// Adds what was decided per second in a round, and what was not decided.
    pub fn note_load(&mut self, cell: &'static str, load: Load) {
        self.note(cell, load.per_second());
        self.failed += load.failed;
    }

    /// Says how many checks failed, if any did.
    pub fn failures(&self) -> Option<String> {
        let (title, failed) = (self.title(), self.failed);
        (failed > 0).then(|| format!("{title}: {failed} checks failed"))
    }

    /// The figures of all rounds.
    pub fn rounds(&self, cell: &str) -> &[f64] {
        self.cells.get(cell).map_or(&[], Vec::as_slice)
    }

    /// The median over the rounds; NaN if it was not measured.
    pub fn median(&self, cell: &str) -> f64 {
        median(self.rounds(cell))
    }

    /// How many times the figure of another row this is, by the median over the rounds; NaN if one was not measured.
    pub fn ratio(&self, cell: &str, reference: &Self) -> f64 {
        ratio(self.rounds(cell), reference.rounds(cell))
    }

    /// All that is known.
    pub fn to_json(&self) -> Value {
        let medians: BTreeMap<_, _> = self.cells.iter().map(|(cell, rounds)| (cell, median(rounds))).collect();
        json!({
            "name": self.name,
            "algorithm": self.algorithm,
            "client": self.client,
            "failed": self.failed,
            "medians": medians,
            "rounds": self.cells,
        })
    }
}
