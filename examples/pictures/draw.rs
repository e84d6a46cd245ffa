//! SVG, in whole numbers, so that a picture is the same on each machine.

use std::{fmt::Write, ops::Range};

use super::{Sent, WINDOW};

/// What an algorithm admits of some traffic.
pub(super) struct Timeline {
    pub(super) name: &'static str,
    pub(super) most: u64,
    pub(super) sent: Vec<Sent>,
}

const WIDTH: u64 = 760;

const STYLE: &str = "\
.picture { max-width: 100%; height: auto; }
.picture .page { fill: #ffffff; }
.picture text { fill: #1b2430; font: 14px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; }
.picture .name { font-weight: 600; }
.picture .quiet { fill: #586474; font-size: 12px; }
.picture .over { fill: #b93815; font-weight: 600; }
.picture .line { stroke: #d3d9e1; }
.picture .quota { stroke: #586474; stroke-dasharray: 4 4; }
.picture .count { fill: #cfe3f3; }
.picture .count-over { fill: #f0c2b3; }
.picture .admitted { fill: #0a6aa8; }
.picture .denied { fill: none; stroke: #b93815; stroke-width: 2; stroke-linecap: round; }
@media (prefers-color-scheme: dark) {
.picture .page { fill: #12161c; }
.picture text { fill: #e6eaf0; }
.picture .quiet { fill: #9fabb9; }
.picture .over { fill: #ff9270; }
.picture .line { stroke: #36404d; }
.picture .quota { stroke: #9fabb9; }
.picture .count { fill: #1f4361; }
.picture .count-over { fill: #6e3423; }
.picture .admitted { fill: #6cc0f2; }
.picture .denied { stroke: #ff9270; }
}
";

/// A picture that can be part of a page: its styles are only for what is in it.
pub(super) fn picture(name: &str, height: u64, title: &str, description: &str, content: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         class=\"picture\" role=\"img\" aria-labelledby=\"{name}-title {name}-description\">\n\
         <title id=\"{name}-title\">{title}</title>\n<desc id=\"{name}-description\">{description}.</desc>\n<style>\n{STYLE}</style>\n\
         <rect class=\"page\" width=\"{WIDTH}\" height=\"{height}\" rx=\"8\"/>\n{content}</svg>\n"
    )
}

/// Appends a line of text to a picture.
macro_rules! add {
    ($to:ident, $($format:tt)*) => {
        writeln!($to, $($format)*).expect("a string")
    };
}

pub(super) use add;

/// The algorithms below one another: the requests as marks, and the admissions in the last window as an area.
pub(super) fn timelines(quota: u64, timelines: &[Timeline]) -> String {
    const LEFT: u64 = 20;
    const TOP: u64 = 78;
    const PANEL: u64 = 150;
    let x = |at: u64| LEFT + at / 250_000;
    let (right, last) = (x(END), TOP + PANEL * timelines.len() as u64);

    let (mut content, mut results) = (String::new(), Vec::new());
    add!(
        content,
        r#"<text class="name" x="{LEFT}" y="28">{quota} requests in 60 s, for the same traffic</text>"#
    );
    for (x, class, meaning) in [
        (LEFT, "admitted", "admitted"),
        (LEFT + 90, "denied", "denied"),
        (LEFT + 165, "count", "admitted in the last 60 s"),
        (LEFT + 345, "count-over", "above the quota"),
    ] {
        let mark = match class {
            "admitted" => format!(r#"<circle class="{class}" cx="{}" cy="50" r="4"/>"#, x + 8),
            "denied" => format!(r#"<path class="{class}" d="M{} 47l6 6m0 -6l-6 6"/>"#, x + 5),
            _ => format!(r#"<rect class="{class}" x="{x}" y="45" width="16" height="10"/>"#),
        };
        add!(
            content,
            r#"{mark}<text class="quiet" x="{}" y="54">{meaning}</text>"#,
            x + 22
        );
    }
    for (Timeline { name, most, sent }, top) in timelines.iter().zip((TOP..).step_by(PANEL as usize)) {
        let base = top + 116;
        let y = |count: u64| base - count * 11;
        add!(
            content,
            r#"<text class="name" x="{LEFT}" y="{}">{name}</text>"#,
            top + 14
        );
        let class = if *most > quota { "over" } else { "quiet" };
        add!(
            content,
            r#"<text class="{class}" x="{right}" y="{}" text-anchor="end">most in any 60 s: {most}</text>"#,
            top + 14
        );
        add_areas(&mut content, quota, &counts(sent, 0, END), x, y);
        add_quota(&mut content, quota, LEFT..right, y(quota));
        add!(content, r#"<path class="line" d="M{LEFT} {base}H{right}"/>"#);
        for Sent { at, admitted } in sent {
            let x = x(*at);
            match admitted {
                true => add!(content, r#"<circle class="admitted" cx="{x}" cy="{base}" r="4"/>"#),
                false => add!(
                    content,
                    r#"<path class="denied" d="M{} {}l6 6m0 -6l-6 6"/>"#,
                    x - 3,
                    base - 3
                ),
            }
        }
        for (second, anchor) in [(0, "start"), (60, "middle"), (120, "middle"), (180, "end")] {
            let (x, y) = (x(second * 1_000_000), base + 20);
            add!(
                content,
                r#"<text class="quiet" x="{x}" y="{y}" text-anchor="{anchor}">{second} s</text>"#
            );
        }
        let admitted = sent.iter().filter(|sent| sent.admitted).count();
        results.push(format!(
            "{name} admits {admitted} of {}, at most {most} in any 60 s",
            sent.len()
        ));
    }
    let title = format!("What each algorithm admits of the same traffic, with a quota of {quota} in 60 seconds");
    picture("timelines", last, &title, &results.join("; "), &content)
}

/// The algorithms beside one another: the admissions in the last window, from the end of a window on.
pub(super) fn edge(quota: u64, timelines: &[Timeline]) -> String {
    const TOP: u64 = 78;
    const BASE: u64 = 262;
    const PANEL: u64 = 185;
    let y = |count: u64| BASE - count * 3 / 4;

    let (mut content, mut results) = (String::new(), Vec::new());
    let legend = "admitted in the last 60 s, when each request is sent as soon as it is admitted, from 60 s on";
    add!(
        content,
        r#"<text class="name" x="20" y="28">{quota} requests in 60 s, at the edge of a window</text>"#
    );
    add!(content, r#"<text class="quiet" x="20" y="50">{legend}</text>"#);
    for (Timeline { name, most, sent }, left) in timelines.iter().zip((20..).step_by(PANEL as usize)) {
        let (from, until) = (45_000_000, 120_000_000);
        let x = |at: u64| left + (at - from) * (PANEL - 20) / (until - from);
        let right = x(until);
        add!(
            content,
            r#"<text class="name" x="{left}" y="{}">{name}</text>"#,
            TOP + 6
        );
        let class = if *most > quota { "over" } else { "quiet" };
        add!(
            content,
            r#"<text class="{class}" x="{left}" y="{}">at most {most}</text>"#,
            TOP + 26
        );
        add_areas(&mut content, quota, &counts(sent, from, until), x, y);
        add_quota(&mut content, quota, left..right, y(quota));
        add!(content, r#"<path class="line" d="M{left} {BASE}H{right}"/>"#);
        for (second, anchor) in [(60, "middle"), (90, "middle"), (120, "end")] {
            let (x, y) = (x(second * 1_000_000), BASE + 20);
            add!(
                content,
                r#"<text class="quiet" x="{x}" y="{y}" text-anchor="{anchor}">{second} s</text>"#
            );
        }
        results.push(format!("{name} {most}"));
    }
    let title = format!("The most admissions in any 60 seconds at the edge of a window, with a quota of {quota}");
    picture("edge", BASE + 36, &title, &results.join(", "), &content)
}

/// A dashed line at the quota, with its value above the left end.
fn add_quota(content: &mut String, quota: u64, Range { start, end }: Range<u64>, y: u64) {
    add!(content, r#"<path class="quota" d="M{start} {y}H{end}"/>"#);
    add!(
        content,
        r#"<text class="quiet" x="{start}" y="{}">{quota}</text>"#,
        y - 5
    );
}

/// Where the timelines end.
const END: u64 = 180_000_000;

/// The admissions in the last window, as the times between which there are so many.
fn counts(sent: &[Sent], from: u64, until: u64) -> Vec<(u64, u64, u64)> {
    let window = WINDOW.as_micros() as u64;
    let admitted: Vec<_> = sent.iter().filter(|sent| sent.admitted).map(|sent| sent.at).collect();
    let mut changes: Vec<_> = admitted.iter().flat_map(|at| [*at, at + window]).collect();
    changes.retain(|at| (from..until).contains(at));
    changes.extend([from, until]);
    changes.sort_unstable();
    changes.dedup();

    let between = changes.windows(2).map(|times| {
        let in_window = |at: &&u64| **at <= times[0] && times[0] < **at + window;
        (times[0], times[1], admitted.iter().filter(in_window).count() as u64)
    });
    between.collect()
}

/// The counts up to the quota as one area, and those above it as another.
fn add_areas(
    content: &mut String,
    quota: u64,
    counts: &[(u64, u64, u64)],
    x: impl Fn(u64) -> u64,
    y: impl Fn(u64) -> u64,
) {
    for (class, least, most) in [("count", 0, quota), ("count-over", quota, u64::MAX)] {
        let (mut path, mut height) = (format!("M{} {}", x(counts[0].0), y(least)), y(least));
        for (from, to, count) in counts {
            let level = y((*count).clamp(least, most));
            if level != height {
                write!(path, "H{}V{level}", x(*from)).expect("a string");
                height = level;
            }
            if *to == counts[counts.len() - 1].1 {
                write!(path, "H{}V{}Z", x(*to), y(least)).expect("a string");
            }
        }
        add!(content, r#"<path class="{class}" d="{path}"/>"#);
    }
}
