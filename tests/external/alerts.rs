//! The rules for alerts, which Prometheus evaluates on the series of `tests/alerts.yml`.

use std::{env, process::Command};

#[test]
#[ignore = "needs promtool: `.ci/test`"]
fn each_alert_fires_when_it_should() {
    let promtool = Command::new("promtool")
        .args(["test", "rules", "tests/alerts.yml"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    let Ok(output) = promtool else {
        assert!(
            env::var_os("CI").is_none(),
            "no promtool is installed; `CI` requires it"
        );
        eprintln!("skipped: no promtool is installed");
        return;
    };
    let output = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.contains("SUCCESS"), "{output}");
    let cases = include_str!("../alerts.yml");
    let rules = include_str!("../../docs/alerts.yml");
    for name in rules.lines().filter_map(|line| line.strip_prefix("  - alert: ")) {
        assert!(
            cases.contains(&format!("alertname: {name}\n    exp_alerts:")),
            "{name} never fires in the test"
        );
    }
}
