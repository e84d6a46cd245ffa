use std::{
    env,
    process::{Command as Lookup, Stdio},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use crate::support::eventually;

const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// A tab of a headless Chromium, which is controlled by the DevTools protocol over pipes.
pub(crate) struct Chromium {
    session: Value,
    commands: u64,
    /// What was reported beside the replies to commands.
    events: Vec<Value>,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    _process: Child,
    _profile: TempDir,
}

impl Chromium {
    /// A tab with an empty page; none if no Chromium is installed.
    ///
    /// # Panics
    ///
    /// If none is installed and the environment variable `CI` is set.
    pub(crate) async fn start() -> Option<Self> {
        let is_installed = |name: &&&str| Lookup::new(name).arg("--version").output().is_ok();
        let Some(name) = NAMES.iter().find(is_installed) else {
            assert!(
                env::var_os("CI").is_none(),
                "no Chromium is installed; `CI` requires one"
            );
            eprintln!("skipped: no Chromium is installed");
            return None;
        };
        let profile = tempfile::tempdir().expect("a folder");
        // Commands are read from descriptor 3, and replies written to descriptor 4.
        let mut process = Command::new("sh")
            .args(["-c", r#"exec "$0" "$@" 3<&0 4>&1 >/dev/null 2>&1"#, name])
            .args([
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
            ])
            .arg("--remote-debugging-pipe")
            .arg(format!("--user-data-dir={}", profile.path().display()))
            // What it leaves there when it is killed is deleted with the profile.
            .env("TMPDIR", profile.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("a shell");
        let mut tab = Self {
            session: Value::Null,
            commands: 0,
            events: Vec::new(),
            input: process.stdin.take().expect("a pipe"),
            output: BufReader::new(process.stdout.take().expect("a pipe")),
            _process: process,
            _profile: profile,
        };

        let target = tab
            .command("Target.createTarget", json!({ "url": "about:blank" }))
            .await;
        let target = json!({ "targetId": target["targetId"], "flatten": true });
        tab.session = tab.command("Target.attachToTarget", target).await["sessionId"].take();
        for domain in ["Log", "Network", "Page", "Runtime"] {
            tab.command(&format!("{domain}.enable"), json!({})).await;
        }
        Some(tab)
    }

    /// Sends a command, and returns its result.
    pub(crate) async fn command(&mut self, method: &str, parameters: Value) -> Value {
        self.commands += 1;
        let mut message = json!({ "id": self.commands, "method": method, "params": parameters });
        if !self.session.is_null() {
            message["sessionId"] = self.session.clone();
        }
        let message = format!("{message}\0");
        self.input.write_all(message.as_bytes()).await.expect("Chromium reads");
        loop {
            let mut message = Vec::new();
            self.output.read_until(0, &mut message).await.expect("Chromium writes");
            assert_eq!(message.pop(), Some(0), "Chromium has ended");
            let mut message: Value = serde_json::from_slice(&message).expect("JSON");
            if message["id"] == self.commands {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].take();
            }
            self.events.push(message);
        }
    }

    /// The value of an expression in the page, of a promise when it is resolved.
    pub(crate) async fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let mut result = self.command("Runtime.evaluate", parameters).await;
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].take()
    }

    /// Waits until an expression in the page is true.
    pub(crate) async fn until(&mut self, expression: &str) {
        eventually(expression, async || self.evaluate(expression).await == true).await;
    }

    /// The URLs that were requested. Panics if an error was reported, other than that of a request.
    pub(crate) fn requests(&self) -> Vec<&str> {
        let requested = self.events.iter().filter_map(|event| {
            match event["method"].as_str().expect("a name") {
                "Network.requestWillBeSent" => return event["params"]["request"]["url"].as_str(),
                "Runtime.exceptionThrown" => panic!("{event}"),
                "Log.entryAdded" => assert_eq!(event["params"]["entry"]["source"], "network", "{event}"),
                _ => {}
            }
            None
        });
        requested.collect()
    }

    /// The directive of the policy of the page by which the browser blocks requests to other servers.
    pub(crate) async fn blocked_by(&mut self) -> Value {
        let blocked = "new Promise((resolve) => {
            document.addEventListener('securitypolicyviolation', (event) => resolve(event.effectiveDirective));
            fetch('http://127.0.0.1:1/').catch(() => {});
        })";
        self.evaluate(blocked).await
    }

    /// Gives the page a width, and returns whether it fits without scrolling sideways.
    pub(crate) async fn fits(&mut self, width: u32) -> bool {
        let screen = json!({ "width": width, "height": 800, "deviceScaleFactor": 1, "mobile": false });
        self.command("Emulation.setDeviceMetricsOverride", screen).await;
        self.until(&format!("innerWidth === {width}")).await;
        let fits = "document.scrollingElement.scrollWidth <= document.scrollingElement.clientWidth";
        self.evaluate(fits).await == true
    }

    /// The whole page as a PNG of this width.
    pub(crate) async fn picture(&mut self, width: u32) -> Vec<u8> {
        let height = self.evaluate("document.documentElement.scrollHeight").await;
        let clip = json!({ "x": 0, "y": 0, "width": width, "height": height, "scale": 1 });
        let settings = json!({ "captureBeyondViewport": true, "clip": clip });
        let picture = self.command("Page.captureScreenshot", settings).await;
        let picture = picture["data"].as_str().expect("a picture");
        BASE64_STANDARD.decode(picture).expect("base64")
    }

    /// Prefers `light` or `dark` colors.
    pub(crate) async fn prefer(&mut self, scheme: &str) {
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.command("Emulation.setEmulatedMedia", features).await;
        self.until(&format!("matchMedia('(prefers-color-scheme: {scheme})').matches"))
            .await;
    }

    /// Presses and releases a key.
    pub(crate) async fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            _ => panic!("`{key}` has no code here"),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            if kind == "keyDown" {
                event["text"] = text.into();
            }
            self.command("Input.dispatchKeyEvent", event).await;
        }
    }
}
