//! The picture of the dashboard `docs/grafana.json`: ten minutes of two replicas, as a Prometheus has scraped them.

use std::{
    collections::BTreeMap,
    env,
    fmt::Write,
    fs,
    process::Command,
    time::{Duration, SystemTime},
};

use serde_json::Value;
use tokio::time::sleep;

use crate::{
    fleet::{Replica, of_the_callers, of_the_picture},
    prometheus::Prometheus,
    support::{Proxy, Redis},
};

const FILE: &str = "policies.api = { limit = 'sliding-log 60/min', key = 'header:user' }";

/// What happens, by minute.
const EVENTS: &str = "2:00 Redis killed for 1 min · 4:00 attack for 1 min · 6:00 Redis 200 ms late for 1 min · 8:00 another \
                      limit in one replica, and 1 min later in the other";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "draws docs/pictures/prometheus.png in ten minutes, if the environment variable `TOWER_QUOTA_PICTURE` is 60"]
async fn the_dashboard_is_drawn() {
    // Fewer seconds than those of a minute try the drawing.
    let minute = env::var("TOWER_QUOTA_PICTURE")
        .ok()
        .and_then(|seconds| seconds.parse::<u64>().ok());
    let Some(minute) = minute else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let paths = ["one", "other"].map(|name| folder.path().join(name).join("limits.toml"));
    let write = |replica: usize, text: &str| fs::write(&paths[replica], text).expect("a file");
    let mut redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let replicas = [0, 1].map(|replica| {
        let (url, path) = (proxy.url(), paths[replica].clone());
        fs::create_dir(path.parent().expect("a folder")).expect("a folder");
        write(replica, FILE);
        Replica::start(|| of_the_picture(url, path), 40, of_the_callers)
    });
    let urls = replicas.iter().map(|replica| replica.url.clone()).collect();
    let jobs = BTreeMap::from([("shop", urls)]);
    let prometheus = Prometheus::start("2s", "", &jobs).await.expect("Prometheus");
    // Rates have values then.
    sleep(Duration::from_secs(20)).await;

    let start = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .expect("a time")
        .as_secs();
    let minutes = |number| sleep(Duration::from_secs(number * minute));
    let attack = |has_fault| replicas.iter().for_each(|replica| replica.set_fault(has_fault));
    minutes(2).await;
    redis.kill();
    minutes(1).await;
    redis.restart();
    minutes(1).await;
    attack(true);
    minutes(1).await;
    attack(false);
    minutes(1).await;
    proxy.delay(Duration::from_millis(200));
    minutes(1).await;
    proxy.delay(Duration::ZERO);
    minutes(1).await;
    let changed = FILE.replace("60", "90");
    write(0, &changed);
    minutes(1).await;
    write(1, &changed);
    minutes(1).await;

    let dashboard: Value = serde_json::from_str(include_str!("../../docs/grafana.json")).expect("JSON");
    let (mut content, mut height) = (String::new(), 0);
    for panel in dashboard["panels"].as_array().expect("panels") {
        let lines = lines(&prometheus, panel, start, 10 * minute).await;
        let place = |name: &str| panel["gridPos"][name].as_u64().expect("a place");
        let (x, y) = (place("x") * WIDTH / 24, place("y") * UNIT + TOP);
        height = height.max(y + place("h") * UNIT);
        let panel = draw(panel, &lines, 10 * minute);
        writeln!(content, r#"<g transform="translate({x} {y})">{panel}</g>"#).expect("a string");
    }
    let page = format!(
        "<!doctype html><meta charset=utf-8><style>{STYLE}</style><svg width={WIDTH} height={height}>\
         <text class=head x=12 y=24>tower-quota: two replicas of the job shop</text>\
         <text class=quiet x=12 y=44>{EVENTS}</text>{content}</svg>"
    );
    let html = folder.path().join("page.html");
    fs::write(&html, page).expect("a file");
    let status = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
        .arg(format!("--window-size={WIDTH},{height}"))
        .arg(format!(
            "--screenshot={}/docs/pictures/prometheus.png",
            env!("CARGO_MANIFEST_DIR")
        ))
        .arg(format!("file://{}", html.display()))
        .status();
    assert!(status.expect("Chromium starts").success());
}

const WIDTH: u64 = 1240;
/// The height of a row of the grid of Grafana.
const UNIT: u64 = 29;
const TOP: u64 = 58;

const STYLE: &str = "
    body { margin: 0; background: #f4f5f5; }
    text { font: 12px system-ui, 'DejaVu Sans', sans-serif; fill: #24292e; }
    .head { font-size: 17px; font-weight: 600; }
    .title { font-weight: 600; font-size: 13px; }
    .quiet { fill: #59636e; font-size: 11px; }
    .box { fill: #fff; stroke: #d8dbe0; }
    .grid { stroke: #e9ebee; }
    .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
";
const COLORS: [&str; 8] = [
    "#1f77b4", "#d9531e", "#2e9e4f", "#9467bd", "#c49000", "#17a2b8", "#e377c2", "#6b7280",
];

/// A line of a panel: its name, its values by second, and whether it has the axis on the right.
struct Line {
    name: String,
    values: Vec<(u64, f64)>,
    is_right: bool,
}

/// The results of the queries of a panel.
async fn lines(prometheus: &Prometheus, panel: &Value, start: u64, length: u64) -> Vec<Line> {
    let mut lines = Vec::new();
    let right = panel["fieldConfig"]["overrides"][0]["matcher"]["options"].as_str();
    for target in panel["targets"].as_array().expect("targets") {
        let query = target["expr"].as_str().expect("a query");
        let query = query.replace("$__rate_interval", "10s");
        let query = query.replace("$job", ".*").replace("$policy", ".*");
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let end = start + length;
        let path = format!("query_range?query={encoded}&start={start}&end={end}&step=2");
        let data = prometheus.get(&path).await;
        for series in data["result"].as_array().expect("a result") {
            let mut name = target["legendFormat"]
                .as_str()
                .expect("a format")
                .replace("{{job}} ", "");
            for (label, value) in series["metric"].as_object().expect("labels") {
                let value = value.as_str().expect("text");
                // Of the paths of this test only their ends.
                let value: Vec<_> = value.rsplit('/').take(2).collect();
                let value: Vec<_> = value.into_iter().rev().collect();
                name = name.replace(&format!("{{{{{label}}}}}"), &value.join("/"));
            }
            let values = series["values"].as_array().expect("values").iter().filter_map(|value| {
                let number: f64 = value[1].as_str()?.parse().ok()?;
                let second = value[0].as_f64()? as u64 - start;
                number.is_finite().then_some((second, number))
            });
            lines.push(Line {
                name,
                values: values.collect(),
                is_right: target["refId"].as_str() == right,
            });
        }
    }
    // A series that is 0 all the time is no line.
    lines.retain(|line| line.values.iter().any(|(_, value)| *value != 0.0));
    lines
}

/// The least of 1, 2, 3, 5 and 10 times a power of ten that is not below a number.
fn rounded_up(number: f64) -> f64 {
    let power = 10_f64.powf(number.log10().floor());
    let steps = [1.0, 2.0, 3.0, 5.0, 10.0];
    power
        * steps
            .into_iter()
            .find(|step| step * power >= number * 0.999)
            .unwrap_or(10.0)
}

fn with_unit(unit: &str, value: f64) -> String {
    let plain = |value: f64| format!("{}", (value * 100.0).round() / 100.0);
    match unit {
        "percentunit" => format!("{} %", plain(value * 100.0)),
        "reqps" => format!("{} /s", plain(value)),
        "s" if value == 0.0 => "0".to_owned(),
        "s" if value < 0.001 => format!("{} us", plain(value * 1e6)),
        "s" if value < 1.0 => format!("{} ms", plain(value * 1e3)),
        "s" => format!("{} s", plain(value)),
        _ => plain(value),
    }
}

/// A panel with its lines and the names of these.
fn draw(panel: &Value, lines: &[Line], length: u64) -> String {
    let (width, height) = (WIDTH / 2, 8 * UNIT);
    let (left, right, top, base) = (62.0, width as f64 - 46.0, 34.0, height as f64 - 62.0);
    let unit = panel["fieldConfig"]["defaults"]["unit"].as_str().expect("a unit");
    let title = panel["title"].as_str().expect("a title");
    let mut content = format!(
        "<rect class=box x=5 y=4 width={} height={} rx=3 /><text class=title x=14 y=22>{title}</text>",
        width - 10,
        height - 8
    );
    let x = |second: u64| left + (right - left) * second as f64 / length as f64;
    let highest = |is_right: bool| {
        let values = lines.iter().filter(|line| line.is_right == is_right);
        let values = values.flat_map(|line| line.values.iter().map(|(_, value)| *value));
        values.reduce(f64::max).filter(|most| *most > 0.0).map(rounded_up)
    };
    let tops = [highest(false), highest(true)];
    for part in 0..=2 {
        let y = base - (base - top) * f64::from(part) / 2.0;
        write!(content, "<path class=grid d='M{left} {y}H{right}'/>").expect("a string");
        for (most, at, anchor, unit) in [
            (tops[0], left - 6.0, "end", unit),
            (tops[1], right + 6.0, "start", "short"),
        ] {
            let Some(most) = most else { continue };
            let value = with_unit(unit, most * f64::from(part) / 2.0);
            write!(
                content,
                "<text class=quiet x={at} y={} text-anchor={anchor}>{value}</text>",
                y + 4.0
            )
            .expect("a string");
        }
    }
    for minute in (0..=10).step_by(2) {
        let (x, y, text) = (x(length * minute / 10), base + 15.0, format!("{minute}:00"));
        write!(
            content,
            "<text class=quiet x={x} y={y} text-anchor=middle>{text}</text>"
        )
        .expect("a string");
    }
    let (mut at, mut row) = (left, base + 32.0);
    for (line, color) in lines.iter().zip(COLORS.iter().cycle()) {
        let most = tops[usize::from(line.is_right)].unwrap_or(1.0);
        let (mut path, mut last) = (String::new(), None);
        for (second, value) in &line.values {
            let command = if last.is_some_and(|last| second - last <= 4) {
                "L"
            } else {
                "M"
            };
            let y = base - (base - top) * (value / most).clamp(0.0, 1.0);
            write!(path, "{command}{:.1} {y:.1}", x(*second)).expect("a string");
            last = Some(*second);
        }
        let space = 20.0 + 6.3 * line.name.len() as f64;
        if at + space > right {
            (at, row) = (left, row + 14.0);
        }
        write!(
            content,
            "<path class=line stroke='{color}' d='{path}'/><rect x={at} y={} width=10 height=3 fill='{color}'/>\
             <text class=quiet x={} y={row}>{}</text>",
            row - 5.0,
            at + 14.0,
            line.name
        )
        .expect("a string");
        at += space;
    }
    if lines.is_empty() {
        write!(content, "<text class=quiet x={left} y={row}>all are 0</text>").expect("a string");
    }
    content
}
