//! A `POST` of 5 MB that is denied, on HTTP/1.1.

use std::{net::SocketAddr, process::Stdio, time::Duration};

use axum::{Router, routing::post};
use tokio::{net::TcpListener, process::Command};
use tower_quota::{Limit, MemoryStore, Policy, RateLimitLayer, key};

use crate::file;

const TRIES: usize = 20;
const LENGTH: usize = 5_000_000;

pub async fn run() {
    let denies = || {
        let none = Policy::new("uploads", Limit::DenyAll).key(key::constant("all"));
        RateLimitLayer::new(MemoryStore::new(), none)
    };
    let router = || Router::new().route("/", post(async || "stored"));
    let without = serve(router().layer(denies())).await;
    let with = serve(router().layer(denies().drain_body(8 << 20, Duration::from_secs(10)))).await;

    let upload = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(upload.path(), vec![b'x'; LENGTH]).expect("a file");
    println!("| client | without | with `drain_body` |");
    println!("| --- | --- | --- |");
    for client in ["curl", "curl, no `Expect`", "reqwest", "http.client", "fetch"] {
        let mut cells = Vec::new();
        for url in [&without, &with] {
            let mut seen = std::collections::BTreeMap::new();
            for _ in 0..TRIES {
                *seen.entry(post_with(client, url, upload.path()).await).or_insert(0) += 1;
            }
            let seen: Vec<_> = seen.iter().map(|(what, times)| format!("{what} ({times})")).collect();
            cells.push(seen.join(", "));
        }
        println!("| {client} | {} |", cells.join(" | "));
    }
}

async fn serve(app: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr: SocketAddr = listener.local_addr().expect("a bound port");
    tokio::spawn(async { axum::serve(listener, app).await });
    format!("http://{addr}/")
}

/// The status that a client received, or its error.
async fn post_with(client: &str, url: &str, upload: &std::path::Path) -> String {
    let data = format!("@{}", upload.display());
    match client {
        "reqwest" => {
            let body = std::fs::read(upload).expect("the file");
            match reqwest::Client::new().post(url).body(body).send().await {
                Ok(response) => response.status().as_u16().to_string(),
                Err(error) => last_source(&error),
            }
        }
        "curl" => {
            output(
                "curl",
                &[
                    "-sS",
                    "-o",
                    "/dev/null",
                    "-w",
                    "%{http_code}",
                    "--data-binary",
                    &data,
                    url,
                ],
            )
            .await
        }
        "curl, no `Expect`" => {
            let options = [
                "-sS",
                "-o",
                "/dev/null",
                "-w",
                "%{http_code}",
                "-H",
                "Expect:",
                "--data-binary",
                &data,
                url,
            ];
            output("curl", &options).await
        }
        "http.client" => output("python3", &[&file("upload/http_client.py").display().to_string(), url]).await,
        "fetch" => output("node", &[&file("upload/fetch.mjs").display().to_string(), url]).await,
        _ => unreachable!("no such client"),
    }
}

fn last_source(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => last_source(source),
        None => error.to_string(),
    }
}

async fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .await;
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let status = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    match errors.is_empty() {
        true => status,
        false => format!("{status} and `{errors}`"),
    }
}
