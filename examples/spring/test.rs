//! Sends requests over HTTP to the example, which counts in memory or in a Redis that the test starts and stops.

#[path = "../../tests/it/support/log.rs"]
#[allow(dead_code)]
mod log;
#[path = "../../tests/it/support/redis.rs"]
#[allow(dead_code)]
mod redis;
#[path = "../spring.rs"]
#[allow(dead_code)]
mod spring;

use std::{
    fmt::Write,
    future::pending,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower_quota::{ManualClock, MemoryStore, RedisStore, store::Store};

use self::{log::Log, redis::Redis};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/limits.toml");

/// The application on a free port, which ends with the test.
struct App {
    addr: SocketAddr,
    server: JoinHandle<io::Result<()>>,
}

impl App {
    async fn serve(store: Arc<dyn Store>) -> Self {
        let app = spring::app(store, FILE).expect("the file has the policies");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound port");
        let server = tokio::spawn(spring::serve(listener, app, pending()));
        Self { addr, server }
    }

    /// With counts in memory, by a clock that stands still until it is advanced.
    async fn in_memory() -> (Self, ManualClock) {
        let clock = ManualClock::new();
        let store = MemoryStore::builder().manual_clock(&clock).build();
        (Self::serve(Arc::new(store)).await, clock)
    }

    async fn in_redis(redis: &Redis) -> Self {
        // On a busy machine the default deadline passes.
        let store = RedisStore::builder()
            .url(&redis.url())
            .deadline(Duration::from_secs(60));
        Self::serve(Arc::new(store.connect().await.expect("Redis replies"))).await
    }

    /// The response as `curl -i` prints it, without the date.
    async fn send(&self, method: &str, path: &str, fields: &str) -> Response {
        let exchange = async {
            let mut stream = TcpStream::connect(self.addr).await?;
            let host = self.addr;
            let request = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{fields}\r\n");
            stream.write_all(request.as_bytes()).await?;
            let mut response = String::new();
            stream.read_to_string(&mut response).await?;
            Ok::<_, io::Error>(response)
        };
        let response = timeout(Duration::from_secs(30), exchange).await;
        let response = response.expect("a response in time").expect("a response");
        let hidden = ["date: ", "connection: "];
        let shown = response
            .lines()
            .filter(|line| !hidden.iter().any(|name| line.starts_with(name)));
        Response(shown.fold(String::new(), |text, line| text + line + "\n"))
    }

    async fn get(&self, path: &str) -> Response {
        self.send("GET", path, "").await
    }

    /// The statuses of as many requests as are expected.
    async fn expect(&self, path: &str, fields: &str, statuses: &[u16]) {
        for (number, status) in statuses.iter().enumerate() {
            let response = self.send("GET", path, fields).await;
            assert_eq!(response.status(), *status, "request {number} to {path}: {response:?}");
        }
    }
}

impl Drop for App {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[derive(Debug)]
struct Response(String);

impl Response {
    fn status(&self) -> u16 {
        let status = self.0.split(' ').nth(1).and_then(|status| status.parse().ok());
        status.expect("a status line")
    }

    fn has(&self, line: &str) -> bool {
        self.0.lines().any(|of_response| of_response == line)
    }
}

/// The block of the README that begins with this command.
fn session(first: &str) -> &'static str {
    let page = include_str!("README.md");
    let mut blocks = page
        .split("```console\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next());
    let block = blocks.find(|block| block.starts_with(first));
    block.unwrap_or_else(|| panic!("the README has no block that begins with `{first}`"))
}

/// Compares a session of the README with what its calls of curl print.
async fn assert_prints(session: &str, app: &App) {
    let mut printed = String::new();
    for command in session.lines().filter_map(|line| line.strip_prefix("$ ")) {
        writeln!(printed, "$ {command}").expect("a string");
        let Some(arguments) = command.strip_prefix("curl -i ") else {
            continue;
        };
        let (options, url) = arguments
            .rsplit_once("http://127.0.0.1:3000")
            .unwrap_or_else(|| panic!("{command}"));
        let (method, fields) = match options.trim() {
            "" => ("GET", String::new()),
            "-X POST" => ("POST", String::new()),
            options => {
                let field = options.strip_prefix("-H '").and_then(|field| field.strip_suffix('\''));
                ("GET", format!("{}\r\n", field.expect("a field")))
            }
        };
        let response = app.send(method, url, &fields).await;
        writeln!(printed, "{}", response.0.trim_end().to_owned() + "\n").expect("a string");
    }
    assert_eq!(printed.trim_end(), session.trim_end(), "\n{printed}");
}

#[tokio::test]
async fn the_session_of_the_readme_is_what_curl_prints() {
    let (app, _) = App::in_memory().await;
    assert_prints(session("$ curl -i http://127.0.0.1:3000/hello/sayHi"), &app).await;
    assert_prints(session("$ curl -i http://127.0.0.1:3000/search"), &app).await;
}

#[test]
fn the_lines_of_the_table_are_in_the_example() {
    let page = include_str!("README.md");
    let files = concat!(include_str!("../spring.rs"), include_str!("limits.toml"));
    let rows = page.lines().filter(|line| line.starts_with("| ")).skip(1);
    let cells = rows.map(|row| row.split(" | ").nth(1).expect("a second cell"));
    let lines: Vec<_> = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    assert!(lines.len() > 10, "the table was found");
    for line in lines {
        assert!(files.contains(line), "no `{line}` in the example");
    }
}

#[tokio::test]
async fn the_session_without_redis_is_what_curl_prints() {
    let mut redis = Redis::start();
    let app = App::in_redis(&redis).await;
    app.expect("/hello/sayHi", "authorization: Bearer bob\r\n", &[200])
        .await;
    redis.kill();
    assert_prints(session("$ redis-cli shutdown"), &app).await;
}

#[tokio::test]
async fn users_and_uris_have_counts_of_their_own_and_replicas_share_them() {
    let redis = Redis::start();
    let (one, other) = (App::in_redis(&redis).await, App::in_redis(&redis).await);
    for path in ["/hello/sayHi", "/hello/sayGoodMorning", "/hello/sayBye"] {
        for fields in ["", "authorization: Bearer alice\r\n", "authorization: Bearer bob\r\n"] {
            one.expect(path, fields, &[200]).await;
            other.expect(path, fields, &[200, 429]).await;
            one.expect(path, fields, &[429]).await;
        }
        one.expect(path, "authorization: bearer alice\r\n", &[429]).await;
        one.expect(path, "authorization: Bearer mallory\r\n", &[401]).await;
    }
    one.expect("/news", "", &[200, 200, 429]).await;
    other.expect("/news", "", &[429]).await;
}

#[tokio::test]
async fn a_log_frees_each_request_after_its_period() {
    let (app, clock) = App::in_memory().await;
    for path in ["/hello/sayHi", "/hello/sayBye"] {
        app.expect(path, "", &[200]).await;
        clock.advance(Duration::from_secs(10));
        app.expect(path, "", &[200, 429]).await;
        assert!(app.get(path).await.has("retry-after: 20"));
        clock.advance(Duration::from_secs(20));
        app.expect(path, "", &[200, 429]).await;
    }
}

#[tokio::test]
async fn three_in_a_calendar_hour_are_six_across_its_end_and_three_in_any_hour_are_three() {
    let (app, clock) = App::in_memory().await;
    clock.advance(Duration::from_secs(59 * 60));
    for path in ["/reports/calendarHour", "/reports/anyHour"] {
        app.expect(path, "", &[200, 200, 200, 429]).await;
    }
    assert!(app.get("/reports/calendarHour").await.has("retry-after: 60"));
    assert!(app.get("/reports/anyHour").await.has("retry-after: 3600"));

    clock.advance(Duration::from_secs(60));
    app.expect("/reports/calendarHour", "", &[200, 200, 200, 429]).await;
    app.expect("/reports/anyHour", "", &[429]).await;
    clock.advance(Duration::from_secs(59 * 60));
    app.expect("/reports/anyHour", "", &[200, 200, 200, 429]).await;
}

#[tokio::test]
async fn redis_counts_calendar_hours_and_any_hours() {
    let redis = Redis::start();
    let app = App::in_redis(&redis).await;
    app.expect("/reports/anyHour", "", &[200, 200, 200, 429]).await;

    let hour = || {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("a time after 1970")
            .as_secs()
            / 3_600
    };
    // An hour that ends meanwhile admits more; the users begin with nothing counted.
    for fields in ["", "authorization: Bearer alice\r\n"] {
        let begin = hour();
        let mut statuses = Vec::new();
        for _ in 0..4 {
            statuses.push(app.send("GET", "/reports/calendarHour", fields).await.status());
        }
        if begin == hour() {
            assert_eq!(statuses, [200, 200, 200, 429]);
            return;
        }
    }
    panic!("two hours have ended");
}

#[tokio::test]
async fn search_degrades_before_and_after_its_limit() {
    let redis = Redis::start();
    let app = App::in_redis(&redis).await;
    for answer in ["all results", "the first results", "results of yesterday"] {
        let response = app.get("/search").await;
        assert_eq!(response.status(), 200);
        assert!(response.has(answer), "{response:?}");
    }
    // The limit is that of the cluster: it has no user in its key.
    let of_alice = app.send("GET", "/search", "authorization: Bearer alice\r\n").await;
    assert!(of_alice.has("results of yesterday"), "{of_alice:?}");
}

#[tokio::test]
async fn each_failure_mode_holds_while_redis_is_stopped_and_ends_when_it_is_back() {
    let log = Log::capture();
    let mut redis = Redis::start();
    let app = App::in_redis(&redis).await;
    assert_eq!(app.send("POST", "/pay", "").await.status(), 200);
    let failures = || log.text().matches("Redis does not count").count();
    assert_eq!(failures(), 0, "{}", log.text());

    redis.kill();
    // Rejected, admitted uncounted, and counted in the process.
    let paid = app.send("POST", "/pay", "").await;
    assert_eq!(paid.status(), 503);
    assert!(paid.has("payments are closed for a moment"), "{paid:?}");
    assert!(paid.has("retry-after: 1"), "{paid:?}");
    assert_eq!(failures(), 1, "{}", log.text());
    app.expect("/reports/anyHour", "", &[200, 200, 200, 200, 200]).await;
    assert_eq!(failures(), 6, "{}", log.text());
    for (path, so_far) in [("/hello/sayHi", 9), ("/hello/sayBye", 12), ("/news", 15)] {
        app.expect(path, "", &[200, 200, 429]).await;
        assert_eq!(failures(), so_far, "{path}: {}", log.text());
    }

    redis.restart();
    let deadline = Instant::now() + Duration::from_secs(30);
    while app.send("POST", "/pay", "").await.status() != 200 {
        assert!(Instant::now() < deadline, "payments are open again");
        sleep(Duration::from_millis(20)).await;
    }
    app.expect("/reports/anyHour", "", &[200, 200, 200, 429]).await;
}

#[tokio::test]
async fn without_a_url_the_log_names_the_store() {
    let log = Log::capture();
    let app = App::serve(spring::store(None).await.expect("memory")).await;
    let text = log.text();
    assert!(text.contains("WARN") && text.contains("REDIS_URL is not set"), "{text}");
    app.expect("/hello/sayHi", "", &[200, 200, 429]).await;
    assert_eq!(log.text().lines().count(), 1, "{text}");
}
