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

/// A panel of bars.
struct Column {
    name: &'static str,
    /// The value of the longest bar, in hundredths.
    most: u64,
    /// The length of that bar.
    longest: u64,
}

/// The space of a text beside the bars, with the gap after it.
fn space(font_size: u64, text: &str) -> u64 {
    text.len() as u64 * font_size * 14 / 25 + 18
}

/// Where the bars begin, and what their values take in each column.
fn spaces(rows: &[Row]) -> (u64, u64) {
    let names = rows.iter().map(|row| space(14, row.name));
    let values = rows.iter().flat_map(|row| &row.values);
    let (names, values) = (names.max(), values.map(|value| space(12, value)).max());
    (20 + names.expect("a row"), values.expect("a value"))
}

/// The right end of the columns.
const RIGHT: u64 = 746;

/// Rows of bars, with a panel for each column.
fn bars(name: &str, texts: [&str; 2], columns: &[Column], rows: &[Row]) -> String {
    const TOP: u64 = 84;
    let [title, subtitle] = texts;
    let (first, value_space) = spaces(rows);

    let (mut content, mut results) = (String::new(), Vec::new());
    add!(content, r#"<text class="name" x="20" y="28">{title}</text>"#);
    add!(content, r#"<text class="quiet" x="20" y="50">{subtitle}</text>"#);
    let lefts = columns.iter().scan(first, |next, column| {
        let left = *next;
        *next += column.width(value_space);
        Some(left)
    });
    let lefts: Vec<_> = lefts.collect();
    for (column, left) in columns.iter().zip(&lefts) {
        add!(
            content,
            r#"<text class="quiet" x="{left}" y="{TOP}">{}</text>"#,
            column.name
        );
    }
    for (row, y) in rows.iter().zip((TOP + 26..).step_by(26)) {
        let class = if row.is_ours { "admitted" } else { "count" };
        add!(content, r#"<text x="20" y="{y}">{}</text>"#, row.name);
        for ((value, column), left) in row.values.iter().zip(columns).zip(&lefts) {
            let width = (hundredths(value) * column.longest / column.most).max(1);
            let (top, after) = (y - 11, left + width + 6);
            add!(
                content,
                r#"<rect class="{class}" x="{left}" y="{top}" width="{width}" height="13"/>"#
            );
            add!(content, r#"<text class="quiet" x="{after}" y="{y}">{value}</text>"#);
        }
        results.push(format!("{}: {}", row.name, row.values.join(", ")));
    }
    let names: Vec<_> = columns.iter().map(|column| column.name).collect();
    let description = format!("{}. {}", names.join(", "), results.join("; "));
    picture(name, TOP + 26 * rows.len() as u64 + 24, title, &description, &content)
}

impl Column {
    fn width(&self, value_space: u64) -> u64 {
        (self.longest + value_space).max(space(12, self.name))
    }
}

/// The largest value of a column, in hundredths.
fn most(rows: &[Row], column: usize) -> u64 {
    let values = rows.iter().map(|row| hundredths(row.values[column]));
    values.max().expect("a row")
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
    let names = ["10,000 keys", "one hot key", "denied"];
    let (first, value_space) = spaces(&rows);
    let columns = names.iter().zip(0..).map(|(name, column)| Column {
        name,
        most: most(&rows, column),
        longest: (RIGHT - first) / names.len() as u64 - value_space,
    });
    let columns: Vec<_> = columns.collect();
    let texts = [
        "Checks per second",
        "256 callers, counted in one Redis 7.0; each column has its own scale",
    ];
    bars("speed", texts, &columns, &rows)
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
        "through redis-rs, until Redis denies again; each sends 50 requests a second for 4 s; all bars have one scale",
    ];
    let (first, value_space) = spaces(&rows);
    // The longest bars that fit, so many pixels for the limit.
    let of_scale = |scale: u64| {
        let columns = modes.iter().zip(0..).map(|(name, column)| Column {
            name,
            most: most(&rows, column),
            longest: most(&rows, column) * scale / 100,
        });
        columns.collect::<Vec<_>>()
    };
    let fits = |columns: &Vec<Column>| {
        let widths = columns.iter().map(|column| column.width(value_space));
        first + widths.sum::<u64>() <= RIGHT
    };
    let columns = (1..).map(of_scale).take_while(fits).last();
    bars("failures", texts, &columns.expect("bars that fit"), &rows)
}
