use std::fmt;

use serde_json::{Value, json};

/// A Markdown table: text in the first column, figures in the others.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    pub fn new(columns: &[&str]) -> Self {
        Self {
            rows: vec![columns.iter().map(ToString::to_string).collect()],
        }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows[0].len();
        let width = |column: usize| {
            self.rows
                .iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<_> = (0..columns).map(width).collect();

        for (number, row) in self.rows.iter().enumerate() {
            write!(f, "| {:<1$}", row[0], widths[0])?;
            for (cell, width) in row.iter().zip(&widths).skip(1) {
                write!(f, " | {cell:>width$}")?;
            }
            writeln!(f, " |")?;

            if number == 0 {
                write!(f, "| {}", "-".repeat(widths[0]))?;
                for width in &widths[1..] {
                    write!(f, " | {}:", "-".repeat(width - 1))?;
                }
                writeln!(f, " |")?;
            }
        }
        Ok(())
    }
}

/// Targets: a name, the measured ratio, and its bound, such as `>= 1.8`.
pub fn targets(targets: &[(&str, f64, &str)]) -> (Table, Value) {
    let mut table = Table::new(&["target", "measured", "bound", ""]);
    let mut values = Vec::new();
    for (what, measured, limit) in targets {
        let (relation, bound) = limit.split_once(' ').expect("a relation and a bound");
        let bound: f64 = bound.parse().expect("a bound");
        let met = if relation == ">=" {
            *measured >= bound
        } else {
            *measured <= bound
        };
        let verdict = match (measured.is_nan(), met) {
            (true, _) => "not measured",
            (false, true) => "met",
            (false, false) => "missed",
        };
        table.row([
            what.to_string(),
            format!("{measured:.2}"),
            limit.to_string(),
            verdict.to_owned(),
        ]);
        values.push(json!({ "target": what, "measured": measured, "bound": limit, "verdict": verdict }));
    }
    (table, Value::Array(values))
}

/// A count such as 115,000; a dash for NaN.
pub fn count(figure: f64) -> String {
    if figure.is_nan() {
        return "-".to_owned();
    }
    // The measurements do not justify more than three digits.
    let unit = 10_f64.powf((figure.max(1.0).log10().floor() - 2.0).max(0.0));
    let digits = format!("{:.0}", (figure / unit).round() * unit);
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A figure with one decimal; a dash for NaN.
pub fn decimal(figure: f64) -> String {
    match figure.is_nan() {
        true => "-".to_owned(),
        false => format!("{figure:.1}"),
    }
}

/// A ratio such as 1.80x; a dash for NaN.
pub fn times(ratio: f64) -> String {
    match ratio.is_nan() {
        true => "-".to_owned(),
        false => format!("{ratio:.2}x"),
    }
}
