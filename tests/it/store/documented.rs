//! Every Redis URL and every ACL user of the README, the docs, the pages of examples and rustdoc works, with each client.
//!
//! The test finds them in the files. A new one is tested without a change here, or fails by its name.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, iter,
    path::Path,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{Mutex, Semaphore},
    task::{JoinSet, LocalSet, spawn_blocking},
};
use tower_quota::{ClientLibrary, Limiter, Policy, RedisStore, SlidingLog, store::ErrorKind};

use super::{
    acl::{do_all, is_needless, wait_for_a_slot},
    topologies::tls,
};
use crate::support::{Cluster, Redis, Sentinel, Worker, each_client, patient};

each_client! {
    each_url_and_each_user_of_the_docs_works
}

/// The texts that users read, by their files: whole pages, and the rustdoc of the source.
fn texts() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut texts, mut paths) = (
        Vec::new(),
        ["README.md", "docs", "examples", "src"]
            .map(|path| root.join(path))
            .to_vec(),
    );
    while let Some(path) = paths.pop() {
        if path.is_dir() {
            let entries = fs::read_dir(&path).expect("a folder");
            paths.extend(entries.map(|entry| entry.expect("an entry").path()));
            continue;
        }
        let file = path.strip_prefix(root).expect("below the root").display().to_string();
        let read = || fs::read_to_string(&path).expect("a text");
        if file.ends_with(".md") {
            texts.push((file, read()));
        } else if file.starts_with("src") && file.ends_with(".rs") {
            texts.push((file, rustdoc(&read())));
        }
    }
    texts.sort();
    texts
}

/// The lines of comments and attributes for rustdoc.
fn rustdoc(source: &str) -> String {
    let mut in_attribute = false;
    let lines = source.lines().filter(|line| {
        let line = line.trim_start();
        in_attribute = (in_attribute || line.starts_with("doc = \"")) && line != "\"";
        in_attribute || line.starts_with("///") || line.starts_with("//!")
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The URLs of Redis in a text, without those that are cut short: `redis://` and `redis-cluster://..`
fn urls(text: &str) -> Vec<&str> {
    let found = text.match_indices("://").filter_map(|(middle, _)| {
        let is_of_scheme = |char: char| char.is_ascii_lowercase() || char == '-' || char == '+';
        let begin = text[..middle].rfind(|char| !is_of_scheme(char)).map_or(0, |at| at + 1);
        let end = text[middle..].find(|char: char| char.is_whitespace() || "`\"'<>()|,;\\".contains(char));
        let url = text[begin..end.map_or(text.len(), |end| middle + end)].trim_end_matches('.');
        let base = url.split([':', '-', '+']).next().unwrap_or_default();
        let is_of_redis = ["redis", "rediss", "valkey", "valkeys"].contains(&base);
        (is_of_redis && !url.ends_with("://")).then_some(url)
    });
    found.collect()
}

/// The rules of the users in a text: the words after `ACL SETUSER <name>`, or `user <name>` in a block.
fn users(text: &str) -> Vec<Vec<&str>> {
    let commands = text.split("ACL SETUSER ").skip(1);
    let commands = commands.map(|rest| &rest[..rest.find(['`', '\n']).unwrap_or(rest.len())]);
    let lines = text.lines().filter_map(|line| line.strip_prefix("user "));
    let rules = commands
        .chain(lines)
        .map(|words| words.split_whitespace().skip(1).collect::<Vec<_>>());
    rules.filter(|rules| !rules.is_empty()).collect()
}

/// The permissions that the docs add in some case, such as `+select` for `a database other than 0`.
fn additions(page: &str) -> BTreeMap<&str, &str> {
    let (_, sentence) = page
        .split_once("\nAdd `+")
        .expect("docs/redis.md has a sentence `Add `");
    let (sentence, _) = sentence.split_once('.').expect("it ends");
    let parts = sentence.split("`+");
    parts
        .map(|part| {
            let (permission, case) = part.split_once('`').expect("the permission ends");
            let case = case.trim_end_matches(" and ").trim_end_matches([',', ' ']).trim();
            (case, permission)
        })
        .collect()
}

#[test]
fn urls_and_users_are_found_in_texts() {
    let text = "at `redis://a:1/0`, \"rediss-cluster://u:p@b?node=c:2\", or redis://d. http://no, `redis://`, `redis-sentinel://..`";
    assert_eq!(
        urls(text),
        ["redis://a:1/0", "rediss-cluster://u:p@b?node=c:2", "redis://d"]
    );
    let text = "the `ACL SETUSER` line\n(`ACL SETUSER a >new`)\nACL SETUSER b reset on\nuser c on ~*\n";
    assert_eq!(users(text), [vec![">new"], vec!["reset", "on"], vec!["on", "~*"]]);
    let page = "\nAdd `+cluster|slots` in a cluster, and `+select` for a database other than 0. And";
    let added = [("a database other than 0", "select"), ("in a cluster", "cluster|slots")];
    assert_eq!(additions(&page.replace("for a data", "a data")), added.into());
    assert_eq!(
        rustdoc("//! a\ncode\n    doc = \"\nb\n\"\ncode\n    /// c\n"),
        "//! a\n    doc = \"\nb\n    /// c"
    );
}

/// The connections at a time. Each waits most of its time, for what the store sends once a second.
const AT_ONCE: usize = 16;

/// Servers of each kind.
struct Servers {
    single: Redis,
    /// One with the password `password` for the default user.
    locked: Redis,
    encrypted: (Redis, u16),
    sentinel: Sentinel,
    cluster: Cluster,
    /// Held while a store of a place waits for a slot, which looks at all that is subscribed there.
    slots: [Mutex<()>; 4],
    connections: Semaphore,
}

/// A documented URL, at one of the servers.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct At {
    place: Place,
    /// The user and the password, such as `user:password`.
    credentials: Option<String>,
    /// The path and the parameters.
    rest: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Single,
    Encrypted,
    Socket,
    Sentinel,
    Cluster,
    /// Nothing listens there.
    Nowhere,
}

impl At {
    /// The server for a URL; `None` if there is none of its kind.
    fn of(url: &str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let (authority, rest) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let (credentials, host) = match authority.rsplit_once('@') {
            Some((credentials, host)) => (Some(credentials.to_owned()), host),
            None => (None, authority),
        };
        let port = host.rsplit_once(':').map(|(_, port)| port);
        let place = match (scheme, port) {
            ("redis" | "valkey", None | Some("6379")) => Place::Single,
            ("redis" | "valkey", Some("1")) => Place::Nowhere,
            ("rediss" | "valkeys", None | Some("6379")) => Place::Encrypted,
            ("redis+unix", None) => Place::Socket,
            ("redis-sentinel", None | Some("26379")) => Place::Sentinel,
            ("redis-cluster", None | Some("6379")) => Place::Cluster,
            _ => return None,
        };
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        // The servers have other names.
        let parameters = query.split_terminator('&').filter(|parameter| {
            let is_named = ["node=", "sentinelServiceName="]
                .iter()
                .any(|name| parameter.starts_with(name));
            !is_named
        });
        let path = if place == Place::Socket { "" } else { path };
        let rest = iter::once(path).chain(parameters).collect::<Vec<_>>().join("&");
        Some(Self {
            place,
            credentials,
            rest,
        })
    }

    fn database(&self) -> &str {
        let path = self.rest.split('&').next().unwrap_or_default();
        path.trim_start_matches('/')
    }

    /// The URL with these credentials.
    fn url(&self, servers: &Servers, credentials: Option<&str>) -> String {
        let with_at = credentials
            .map(|credentials| format!("{credentials}@"))
            .unwrap_or_default();
        let base = match self.place {
            Place::Single if self.is_locked(credentials) => servers.locked.url(),
            Place::Single => servers.single.url(),
            Place::Encrypted => format!("rediss://localhost:{}", servers.encrypted.1),
            Place::Socket => format!("redis+unix://{}", servers.single.path("redis.sock").display()),
            Place::Sentinel => servers.sentinel.url(),
            Place::Cluster => servers.cluster.url(),
            Place::Nowhere => "redis://127.0.0.1:1".to_owned(),
        };
        let host = if self.place == Place::Socket && credentials.is_some() {
            "localhost"
        } else {
            ""
        };
        let base = base.replacen("://", &format!("://{with_at}{host}"), 1);
        let (path, parameters) = self.rest.split_once('&').unwrap_or((&self.rest, ""));
        let (base, query) = base.split_once('?').unwrap_or((&base, ""));
        let parameters: Vec<_> = [query, parameters]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect();
        let mark = if parameters.is_empty() { "" } else { "?" };
        format!("{base}{path}{mark}{}", parameters.join("&"))
    }

    fn is_locked(&self, credentials: Option<&str>) -> bool {
        self.place == Place::Single && credentials.is_some_and(|credentials| credentials.starts_with(':'))
    }

    /// Its number among the servers that have subscribers of their own.
    fn server(&self) -> usize {
        match self.place {
            Place::Single | Place::Socket | Place::Nowhere => 0,
            Place::Encrypted => 1,
            Place::Sentinel => 2,
            Place::Cluster => 3,
        }
    }

    /// The servers that the store uses.
    fn nodes<'a>(&self, servers: &'a Servers, credentials: Option<&str>) -> Vec<&'a Redis> {
        match self.place {
            Place::Single if self.is_locked(credentials) => vec![&servers.locked],
            Place::Single | Place::Socket => vec![&servers.single],
            Place::Encrypted => vec![&servers.encrypted.0],
            Place::Sentinel => vec![&servers.sentinel.primary],
            Place::Cluster => servers
                .cluster
                .primaries
                .iter()
                .chain(&servers.cluster.replicas)
                .collect(),
            Place::Nowhere => Vec::new(),
        }
    }

    /// Whether the docs add a permission in this case.
    fn is(&self, case: &str, library: ClientLibrary) -> bool {
        match case {
            "in a cluster" => self.place == Place::Cluster,
            "for fred with Sentinel" => self.place == Place::Sentinel && library == ClientLibrary::Fred,
            "for a database other than 0" => !["", "0"].contains(&self.database()),
            _ => panic!("docs/redis.md adds a permission `{case}`, and this test does not know when that is"),
        }
    }
}

impl Servers {
    async fn start() -> Self {
        let servers = Self {
            single: Redis::start_with(&["--unixsocket", "redis.sock"]),
            locked: Redis::start_with(&["--requirepass", "password"]),
            encrypted: tls(),
            sentinel: Sentinel::start().await,
            cluster: Cluster::start().await,
            slots: Default::default(),
            connections: Semaphore::new(AT_ONCE),
        };
        for watcher in servers
            .sentinel
            .watchers_cli(&["ACL", "SETUSER", "user", "on", ">password", "+@all"])
        {
            assert_eq!(watcher.trim(), "OK");
        }
        let Self {
            single,
            encrypted,
            sentinel,
            cluster,
            ..
        } = &servers;
        let nodes = cluster.primaries.iter().chain(&cluster.replicas);
        // For users that may not load it.
        for node in nodes.chain([single, &encrypted.0, &sentinel.primary]) {
            // The log has what is refused to all users.
            node.command::<()>("CONFIG", ["SET", "acllog-max-len", "10000"]).await;
            for script in tower_quota::RedisStore::scripts() {
                node.command::<()>("SCRIPT", ["LOAD", script]).await;
            }
        }
        servers
    }
}

/// A documented URL, and a user to connect as.
struct Trial {
    /// Its number among all.
    number: usize,
    at: At,
    credentials: Option<String>,
    rules: Vec<String>,
    what: String,
}

/// Connects as the user, and does all that a limiter does.
async fn works(library: ClientLibrary, servers: Arc<Servers>, trial: Trial) {
    let _connection = servers.connections.acquire().await.expect("it stays open");
    let Trial {
        number,
        at,
        credentials,
        rules,
        what,
    } = trial;
    let credentials = credentials.as_deref();
    let url = at.url(&servers, credentials);
    let nodes = at.nodes(&servers, credentials);
    let user = credentials
        .and_then(|credentials| credentials.split(':').next())
        .filter(|user| !user.is_empty());
    for node in &nodes {
        if let Some(user) = user {
            let set = ["SETUSER", user].into_iter().chain(rules.iter().map(String::as_str));
            node.command::<()>("ACL", set).await;
        }
    }

    if at.place == Place::Encrypted {
        let certificate = servers.encrypted.0.path("certificate.pem");
        let admitted = spawn_blocking(move || {
            let mut worker = Worker::start_trusting(&url, library, &certificate);
            worker.order(&format!("{number}"), 3, 5);
            worker.outcome().0
        });
        assert_eq!(admitted.await.expect("no panic"), 3, "{what}");
        return;
    }
    let builder = patient().client_library(library).overrides(true).url(&url);
    if at.place == Place::Nowhere {
        let error = builder
            .connect_timeout(Duration::from_millis(50))
            .connect()
            .await
            .unwrap_err();
        let kind = match &error {
            tower_quota::ConnectError::Store(error) => error.kind(),
            _ => panic!("{what}: {error}"),
        };
        assert_ne!(kind, ErrorKind::Refused, "{what}: {error}");
        return;
    }
    let store = builder
        .connect()
        .await
        .unwrap_or_else(|error| panic!("{what}: {error:?}"));
    do_all(&store).await;
    is_overridden(&store, &format!("exports-{number}"), &what).await;
    let turn = servers.slots[at.server()].lock().await;
    wait_for_a_slot(&nodes, &store, &format!("{url} {rules:?}")).await;
    drop((store, turn));

    for node in nodes {
        let log: Vec<HashMap<String, String>> = node.command("ACL", ["LOG", "10000"]).await;
        let refused = log
            .iter()
            .filter(|entry| user.is_some_and(|user| entry["username"] == user));
        let refused: Vec<_> = refused
            .map(|entry| &entry["object"])
            .filter(|object| !is_needless(object))
            .collect();
        assert!(refused.is_empty(), "{what}: Redis refuses {refused:?}");
    }
}

/// Overrides the limit of a policy, and is denied by the override.
async fn is_overridden(store: &RedisStore, policy: &str, what: &str) {
    let limiter = Limiter::new(store.clone(), Policy::new(policy, SlidingLog::per_day(5)));
    let raised = limiter.override_limit(policy, "acme", SlidingLog::per_day(20), Duration::from_secs(60));
    raised.await.unwrap_or_else(|error| panic!("{what}: {error}"));
    let _ = limiter
        .charge("acme", 20)
        .await
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    let denied = limiter
        .check("acme")
        .await
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!((denied.is_allowed(), denied.limit()), (false, 20), "{what}");
}

async fn each_url_and_each_user_of_the_docs_works(library: ClientLibrary) {
    let texts = texts();
    let (mut places, mut all_rules) = (BTreeMap::new(), BTreeSet::new());
    for (file, text) in &texts {
        for url in urls(text) {
            let at = At::of(url).unwrap_or_else(|| panic!("{file}: this test has no server for `{url}`"));
            places.entry(at).or_insert_with(|| format!("{file}: {url}"));
        }
        all_rules.extend(users(text).into_iter().map(|rules| (rules, file)));
    }
    let found: BTreeSet<_> = places.keys().map(|at| at.place).collect();
    assert_eq!(found.len(), 5, "the URLs were found: {found:?}");
    assert!(all_rules.len() >= 3, "the users were found: {all_rules:?}");

    // As the docs say, any scheme may be `rediss`, and any database another one.
    let mut variants = Vec::new();
    for (at, what) in &places {
        if at.place == Place::Single && !at.is_locked(at.credentials.as_deref()) {
            let place = Place::Encrypted;
            variants.push((At { place, ..at.clone() }, format!("{what} with `rediss`")));
        }
        if at.database() == "0" {
            let rest = at.rest.replacen("/0", "/3", 1);
            variants.push((At { rest, ..at.clone() }, format!("{what} with database 3")));
        }
    }
    let of_other_databases = variants.iter().filter(|(at, _)| at.database() == "3");
    let of_other_databases: BTreeSet<_> = of_other_databases.map(|(at, _)| at.place).collect();
    assert_eq!(of_other_databases, [Place::Single, Place::Sentinel].into());
    places.extend(variants);

    let page = texts
        .iter()
        .find(|(file, _)| file == "docs/redis.md")
        .expect("the page");
    let additions = additions(&page.1);
    let whole = all_rules
        .iter()
        .find(|(rules, _)| rules[0] == "reset")
        .expect("a whole user")
        .0
        .clone();
    let servers = Arc::new(Servers::start().await);
    let mut trials = Vec::new();
    for (at, what) in &places {
        if at.place == Place::Cluster && library == ClientLibrary::Fred {
            continue;
        }
        let everything = ["reset", "on", ">password", "~*", "&*", "+@all"].map(str::to_owned);
        trials.push(Trial {
            number: trials.len(),
            at: at.clone(),
            credentials: at.credentials.clone(),
            rules: everything.into(),
            what: what.clone(),
        });

        if [Place::Encrypted, Place::Nowhere].contains(&at.place) {
            continue;
        }
        for (rules, file) in &all_rules {
            // A line that changes a user is one for a user that exists, and has the password that it removes.
            let base: &[&str] = if rules[0] == "reset" { &[] } else { &whole };
            let removed: Vec<_> = rules.iter().filter_map(|word| word.strip_prefix('<')).collect();
            let had = removed.iter().map(|password| format!(">{password}"));
            let mut rules: Vec<_> = had.chain(rules.iter().map(|&word| word.to_owned())).collect();
            rules.splice(..0, base.iter().map(|&word| word.to_owned()));
            let mut passwords = rules.iter().rev().filter_map(|word| word.strip_prefix('>'));
            let password = passwords.find(|password| !removed.contains(password));
            let number = trials.len();
            let credentials = format!("user-{number}:{}", password.expect("a user has a password"));
            let added = additions.iter().filter(|(case, _)| at.is(case, library));
            rules.extend(added.map(|(_, permission)| format!("+{permission}")));
            let what = format!("{what} as the user of {file}: {}", rules.join(" "));
            trials.push(Trial {
                number,
                at: at.clone(),
                credentials: Some(credentials),
                rules,
                what,
            });
        }
    }
    let mut all = JoinSet::new();
    let at_once = async {
        for trial in trials {
            all.spawn_local(works(library, servers.clone(), trial));
        }
        all.join_all().await
    };
    LocalSet::new().run_until(at_once).await;
}
