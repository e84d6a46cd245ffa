use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{
    figures::{median, ratio},
    subject::Load,
};

/// A row of a table: a subject and, for each cell, a figure of every round.
pub struct Row {
    name: String,
    algorithm: &'static str,
    client: String,
    cells: BTreeMap<&'static str, Vec<f64>>,
    failed: u64,
}

impl Row {
    /// A row for a limiter, by name and version. `client` is the client library of Redis.
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

    /// Adds the decisions per second of a round, and its failures.
    pub fn note_load(&mut self, cell: &'static str, load: Load) {
        self.note(cell, load.per_second());
        self.failed += load.failed;
    }

    /// A line with the number of failed checks, if any failed.
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

    /// The median over the rounds of this figure divided by that of another row; NaN if one was not measured.
    pub fn ratio(&self, cell: &str, reference: &Self) -> f64 {
        ratio(self.rounds(cell), reference.rounds(cell))
    }

    /// All figures as JSON.
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
