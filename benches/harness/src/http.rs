use std::{process::Command, sync::Arc};

use tokio::net::TcpListener;

use crate::{options::Options, row::Row, subject::Subject, traffic::Traffic};

/// Requests per second of an axum server with this service, and the quantiles of their latency in microseconds, by `wrk` on the
/// core of Redis.
///
/// # Panics
///
/// If there is no `wrk`.
pub async fn over_http(
    subject: &dyn Subject,
    traffic: &Arc<Traffic>,
    options: &Options,
    row: &mut Row,
    cell: &'static str,
) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}/", listener.local_addr().expect("an address"));
    let router = subject.router(traffic);
    let server = tokio::spawn(async move { axum::serve(listener, router).await });

    let seconds = format!("{}s", options.time.as_secs().max(1));
    let connections = options.connections.to_string();
    let wrk = tokio::task::spawn_blocking(move || {
        let mut wrk = Command::new("taskset");
        wrk.args([
            "--cpu-list",
            "1",
            "wrk",
            "--threads",
            "1",
            "--connections",
            &connections,
        ]);
        wrk.args(["--latency", "--duration", &seconds, &url]).output()
    });
    let output = wrk.await.expect("wrk runs").expect("taskset runs; it is in util-linux");
    server.abort();
    assert!(
        output.status.success(),
        "`wrk` failed; if it is missing, `apt-get install wrk`: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8_lossy(&output.stdout);
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.trim().strip_prefix(name))
            .map(str::trim)
    };
    let rate = field("Requests/sec:").and_then(|rate| rate.parse().ok());
    row.note(cell, rate.unwrap_or_else(|| panic!("wrk prints a rate, not {text}")));
    if cell == HTTP {
        row.note(HTTP_P50, microseconds(field("50%")));
        row.note(HTTP_P99, microseconds(field("99%")));
    }
}

/// The cell of admitted requests per second.
pub const HTTP: &str = "requests per second";
/// The cell of the median of their latency.
pub const HTTP_P50: &str = "p50, us";
/// The cell of the hundredth slowest of them.
pub const HTTP_P99: &str = "p99, us";

/// A time as wrk prints it: `1.23ms`; NaN for any other text.
fn microseconds(text: Option<&str>) -> f64 {
    let units = [("us", 1.0), ("ms", 1e3), ("s", 1e6)];
    let time = text.and_then(|text| {
        let (number, unit) = units
            .iter()
            .find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, scale)))?;
        Some(number.parse::<f64>().ok()? * unit)
    });
    time.unwrap_or(f64::NAN)
}
