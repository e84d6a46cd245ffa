//! Bars of the figures that pages of the documentation have in tables.

use std::fmt::Write;

use super::draw::{add, picture};

/// A table of a page: its rows, as the texts of their cells.
fn table(page: &'static str, heading: &str) -> Vec<Vec<&'static str>> {
    let rows = page.lines().skip_while(|line| !line.starts_with(heading)).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|'));
    let cells = |row: &'static str| row.trim_matches('|').split(" | ").map(str::trim).collect();
    let rows: Vec<_> = rows.map(cells).collect();
    assert!(!rows.is_empty(), "a page has no table `{heading}`");
    rows
}

/// Bars of one color.
struct Row {
    name: &'static str,
    is_ours: bool,
    /// As the table has them.
    values: Vec<&'static str>,
}

/// A number in hundredths.
fn hundredths(text: &str) -> u64 {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "00"));
    let digits = whole.chars().chain(fraction.chars()).filter(char::is_ascii_digit);
    digits
        .collect::<String>()
        .parse()
        .expect("a number with two decimals or none")
}

/// Rows of bars, with a panel for each column. `scales` has the values of the longest bars; the bar of a larger value is broken.
fn bars(name: &str, texts: [&str; 2], columns: &[&str], scales: &[u64], rows: &[Row]) -> String {
    const TOP: u64 = 84;
    const LABELS: u64 = 270;
    const PANELS: u64 = 480;
    const VALUE: u64 = 62;
    let [title, subtitle] = texts;
    let panel = PANELS / columns.len() as u64;
    let longest = panel - VALUE;

    let (mut content, mut results) = (String::new(), Vec::new());
    add!(content, r#"<text class="name" x="20" y="28">{title}</text>"#);
    add!(content, r#"<text class="quiet" x="20" y="50">{subtitle}</text>"#);
    for (column, left) in columns.iter().zip((LABELS..).step_by(panel as usize)) {
        add!(content, r#"<text class="quiet" x="{left}" y="{TOP}">{column}</text>"#);
    }
    for (row, y) in rows.iter().zip((TOP + 26..).step_by(26)) {
        let class = if row.is_ours { "admitted" } else { "count" };
        add!(content, r#"<text x="20" y="{y}">{}</text>"#, row.name);
        for ((value, scale), left) in row.values.iter().zip(scales).zip((LABELS..).step_by(panel as usize)) {
            let is_broken = hundredths(value) > *scale;
            let width = (hundredths(value).min(*scale) * longest / scale).max(1);
            let (top, after) = (y - 11, left + width + 6);
            add!(
                content,
                r#"<rect class="{class}" x="{left}" y="{top}" width="{width}" height="13"/>"#
            );
            if is_broken {
                let (from, bottom) = (left + width - 16, top + 13);
                add!(content, r#"<path class="page" d="M{from} {bottom}l4 -13h4l-4 13z"/>"#);
            }
            add!(content, r#"<text class="quiet" x="{after}" y="{y}">{value}</text>"#);
        }
        results.push(format!("{}: {}", row.name, row.values.join(", ")));
    }
    let description = format!("{}. {}", columns.join(", "), results.join("; "));
    picture(name, TOP + 26 * rows.len() as u64 + 24, title, &description, &content)
}

/// Checks per second beside other crates, by the table of the page about speed.
pub(super) fn speed() -> String {
    let page = include_str!("../../docs/speed.md");
    let row = |cells: Vec<&'static str>| {
        let is_ours = cells[0].starts_with("tower-quota");
        let name = match is_ours {
            true => cells[0],
            false => cells[0].split([',', ':']).next().unwrap_or_default(),
        };
        Row {
            name: name.trim_start_matches("the "),
            is_ours,
            values: vec![cells[1], cells[3], cells[5]],
        }
    };
    let rows: Vec<_> = table(page, "| checks per second").into_iter().map(row).collect();
    let scales = [0, 1, 2].map(|column| {
        let values = rows.iter().map(|row| hundredths(row.values[column]));
        values.max().expect("a row")
    });
    let texts = [
        "Checks per second",
        "256 callers, counted in one Redis 7.0; each column has its own scale",
    ];
    bars(
        "speed",
        texts,
        &["10,000 keys", "one hot key", "denied"],
        &scales,
        &rows,
    )
}

/// What each failure mode admits while Redis fails, by the table of the page about faults that is measured through redis-rs.
pub(super) fn failures() -> String {
    let page = include_str!("../../docs/faults.md");
    let (_, through_redis_rs) = page.split_once("Through redis-rs:").expect("a table for each client");
    let modes = ["Local", "local_share(1, 3)", "Open", "Closed"];
    let rows = table(through_redis_rs, "| Redis is | requests |")
        .into_iter()
        .filter_map(|cells| {
            let name = [
                ("failed over by Sentinel", "failed over by Sentinel"),
                ("failed over in a cluster", "failed over in a cluster"),
                ("killed, with nothing saved", "killed, with nothing saved"),
                ("cut off", "cut off from the network"),
                ("200 ms late", "200 ms late with each answer"),
                ("out of memory", "out of memory"),
            ];
            let (_, name) = name.into_iter().find(|(start, _)| cells[0].starts_with(start))?;
            // The second number includes what is admitted after the fault.
            let values = cells[2..]
                .iter()
                .map(|cell| cell.split(", ").last().unwrap_or_default());
            Some(Row {
                name,
                is_ours: true,
                values: values.collect(),
            })
        });
    let rows: Vec<_> = rows.collect();
    assert_eq!(rows.len(), 6, "a row of docs/faults.md has another name");
    let texts = [
        "What three processes admit while Redis fails, as multiples of the limit",
        "through redis-rs, until Redis denies again; each sends 50 requests a second for 4 s; bars above 5.00 are broken",
    ];
    // So that the multiples of all modes but `Open` are bars of some length.
    bars("failures", texts, &modes, &[500; 4], &rows)
}
