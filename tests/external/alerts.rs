//! The rules for alerts, which promtool evaluates on the series of `tests/alerts.yml` for the times of `docs/operating.md`.

use std::{env, fs, process::Command};

/// The minutes of `tests/alerts.yml` in which there are faults.
const FAULT: std::ops::Range<u32> = 130..190;

/// The labels of each alert that fires by these series, beside its severity.
const FIRES: [(&str, &[&str]); 14] = [
    ("LimitStoreFails", &["job: a"]),
    ("LimitRedisDoesNotReply", &["job: a"]),
    ("LimitRedisNodeDown", &["job: a", "node: 'a:6379'"]),
    ("LimitRejectsByFailure", &["job: a", "policy: pay"]),
    ("LimitFindsNoKey", &["job: a", "policy: api"]),
    ("LimitSettlementsLost", &["job: a"]),
    ("LimitMemoryStoreFull", &["job: a"]),
    ("LimitRedisNearlyFull", &["instance: limits"]),
    ("LimitReplicasDiffer", &["job: a", "policy: api"]),
    ("LimitReplicasDiffer", &["job: a", "file: limits.toml"]),
    ("LimitReloadRefused", &["job: a", "file: limits.toml"]),
    ("LimitTooLow", &["job: a", "policy: low"]),
    ("LimitTooLow", &["job: a", "policy: logins"]),
    ("LimitAttack", &["job: a", "policy: logins"]),
];

/// What a rule says.
struct Rule<'a> {
    name: &'a str,
    severity: &'a str,
    summary: &'a str,
    /// The minutes of the page from the begin and the end of a fault.
    fires: u32,
    ends: u32,
}

fn rules() -> Vec<Rule<'static>> {
    let page = include_str!("../../docs/operating.md");
    let rules = include_str!("../../docs/alerts.yml").split("  - alert: ").skip(1);
    let rules = rules.map(|rule| {
        let between = |begin: &str, end: &str| {
            let (_, after) = rule.split_once(begin).unwrap_or_else(|| panic!("{begin} in {rule}"));
            after.split_once(end).expect("its end").0
        };
        let name = rule.lines().next().expect("a name");
        let row = page.lines().find(|line| line.starts_with(&format!("| `{name}`")));
        let row = row.unwrap_or_else(|| panic!("the page has no {name}"));
        let minutes: Vec<_> = row.rsplit('|').skip(1).take(3).map(str::trim).collect();
        let minutes = |cell: usize| minutes[cell].strip_suffix(" min").expect("minutes");
        assert_eq!(minutes(2), between("for: ", "m\n"), "{name}");
        Rule {
            name,
            severity: between("severity: ", " }"),
            summary: between("summary: \"", "\""),
            fires: minutes(1).parse().expect("a number"),
            ends: minutes(0).parse().expect("a number"),
        }
    });
    rules.collect()
}

/// The cases of a rule, at each minute in which the page says whether the alert fires.
fn cases(rule: &Rule<'_>) -> String {
    let fired: String = FIRES
        .iter()
        .filter(|(name, _)| *name == rule.name)
        .map(|(_, labels)| {
            let mut summary = rule.summary.to_owned();
            for label in *labels {
                let (name, value) = label.split_once(": ").expect("a name and a value");
                summary = summary.replace(&format!("{{{{ $labels.{name} }}}}"), value.trim_matches('\''));
            }
            let summary = summary
                .replace("{{ $labels.policy }}", "")
                .replace("{{ $labels.file }}", "");
            format!(
                "    - exp_labels: {{ severity: {}, {} }}\n      exp_annotations: {{ summary: \"{summary}\" }}\n",
                rule.severity,
                labels.join(", ")
            )
        })
        .collect();
    assert!(!fired.is_empty(), "{} never fires in the test", rule.name);
    let silent = (1..=FAULT.start).chain(FAULT.end + rule.ends..=FAULT.end + 60);
    // The rule notices a fault that is in the first scrape after its begin.
    let firing = FAULT.start + rule.fires..=FAULT.end;
    silent
        .map(|minute| (minute, ""))
        .chain(firing.map(|minute| (minute, &*fired)))
        .map(|(minute, alerts)| {
            let expected = if alerts.is_empty() { "" } else { "    exp_alerts:\n" };
            format!(
                "  - eval_time: {minute}m\n    alertname: {}\n{expected}{alerts}",
                rule.name
            )
        })
        .collect()
}

#[test]
#[ignore = "needs promtool: `.ci/test`"]
fn each_alert_fires_and_ends_in_the_time_that_the_page_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = env!("CARGO_MANIFEST_DIR");
    let series = include_str!("../alerts.yml").replace("../docs/", &format!("{root}/docs/"));
    let cases: String = rules().iter().map(cases).collect();
    let file = folder.path().join("alerts.yml");
    fs::write(&file, format!("{series}  alert_rule_test:\n{cases}")).expect("a file");

    let promtool = Command::new("promtool").args(["test", "rules"]).arg(&file).output();
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
}
