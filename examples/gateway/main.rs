//! A gateway to language models: see the README of this folder.

mod app;

use std::{env, error::Error, sync::Arc, time::Duration};

use axum::{routing::get, serve::ListenerExt};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::{
    net::TcpListener,
    signal::{
        ctrl_c,
        unix::{SignalKind, signal},
    },
    sync::watch,
    time::{interval, sleep, timeout},
};
use tower_quota::{MemoryStore, RedisStore, store::Store};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt::init();
    let metrics = app::prometheus()?.install_recorder()?;
    tokio::spawn(keep_up(metrics.clone()));

    let store: Arc<dyn Store> = match env::var("REDIS_URL") {
        Ok(url) => {
            let store = RedisStore::builder().url(&url).connect_lazy()?;
            // It also starts while Redis is down.
            match timeout(Duration::from_secs(1), store.ready()).await {
                Ok(ready) => ready?, // an error if Redis refuses the user or the script
                Err(_) => println!("this process counts alone until Redis replies"),
            }
            Arc::new(store)
        }
        Err(_) => {
            println!("this process counts alone; set REDIS_URL for replicas");
            Arc::new(MemoryStore::new())
        }
    };
    let (running, mut stopped) = watch::channel(());
    let app::Gateway { customers, operators } = app::gateway(store.clone(), stopped.clone());
    if let Ok(addr) = env::var("OPERATORS_ADDR") {
        let password = env::var("OPERATORS_PASSWORD")
            .ok()
            .filter(|password| !password.is_empty());
        let password = password.ok_or("`OPERATORS_ADDR` needs `OPERATORS_PASSWORD`, which must not be empty")?;
        let operators = operators.route("/metrics", get(async move || metrics.render()));
        let operators = app::behind_password(operators, &password);
        let listener = TcpListener::bind(&addr).await?;
        tokio::spawn(async { axum::serve(listener, operators).await });
    }

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    let mut terminated = signal(SignalKind::terminate())?;
    println!("listening on http://{}", listener.local_addr()?);
    // Else a token waits for the acknowledgement of the one before.
    let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
    let server = axum::serve(listener, customers).with_graceful_shutdown(async move {
        tokio::select! {
            _ = terminated.recv() => {}
            _ = ctrl_c() => {}
        }
        drop(running); // which cuts off the streams
    });
    tokio::select! {
        served = server => served?,
        // Else a request that is never complete would keep the process from ending.
        () = async { drop(stopped.changed().await); sleep(Duration::from_secs(20)).await } => {}
    }
    // The last settlements, and the slots of the streams.
    store.drained(Duration::from_secs(5)).await?;
    Ok(())
}

/// Without it the values of histograms stay in memory until the next scrape.
async fn keep_up(metrics: PrometheusHandle) {
    let mut ticks = interval(Duration::from_secs(5));
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
    }
}
