use std::{
    convert::Infallible,
    net::SocketAddr,
    pin::Pin,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    task::{Context, Poll},
    time::Duration,
};

use axum::{body::Body, extract::ConnectInfo};
use bench_harness::Bare;
use fred::{
    bytes_utils::Str,
    clients::Client,
    interfaces::ClientLike,
    types::{
        Builder, ClusterHash, CustomCommand, Resp3Frame, Value,
        config::{Config, Options, ReconnectPolicy, TcpConfig},
    },
};
use http::{Request, Response, StatusCode};
use tower_service::Service;

/// The reference for other limiters: one `EVALSHA` for each check, sent by fred, and nothing else.
#[derive(Clone)]
pub(crate) struct Evalsha {
    client: Client,
    sha1: Str,
    limit: i64,
    window: Duration,
}

/// The textbook script of a sliding log.
const SLIDING_LOG: &str = include_str!("sliding_log.lua");
/// No algorithm: the cost of a round trip.
const NOTHING: &str = "return { 1, 0 }";

impl Evalsha {
    pub(crate) async fn sliding_log(url: &str, limit: i64, window: Duration) -> Self {
        Self::new(url, SLIDING_LOG, limit, window).await
    }

    pub(crate) async fn nothing(url: &str) -> Self {
        Self::new(url, NOTHING, 0, Duration::ZERO).await
    }

    async fn new(url: &str, script: &str, limit: i64, window: Duration) -> Self {
        let mut builder = Builder::from_config(Config::from_url(url).expect("the URL is good"));
        builder
            .set_policy(ReconnectPolicy::new_constant(0, 150))
            .with_connection_config(|connection| {
                connection.max_command_attempts = 1;
                connection.tcp = TcpConfig {
                    nodelay: Some(true),
                    ..TcpConfig::default()
                };
            });
        let client = builder.build().expect("a client");
        client.init().await.expect("the server answers");

        let command = CustomCommand::new_static("SCRIPT", ClusterHash::Random, false);
        let sha1 = client
            .custom(command, vec!["LOAD", script])
            .await
            .expect("the script compiles");
        Self {
            client,
            sha1,
            limit,
            window,
        }
    }

    async fn admits(&self, address: SocketAddr) -> bool {
        static MEMBERS: AtomicU64 = AtomicU64::new(0);
        let arguments = vec![
            Value::String(self.sha1.clone()),
            Value::Integer(1),
            Value::from(format!("quota:1:log:bench:{{ip={}}}", address.ip())),
            Value::Integer(self.limit),
            Value::Integer(self.window.as_micros() as i64),
            Value::from(MEMBERS.fetch_add(1, Relaxed).to_string()),
        ];
        let options = Options {
            max_attempts: Some(1),
            fail_fast: true,
            timeout: Some(Duration::from_secs(10)),
            ..Options::default()
        };

        let command = CustomCommand::new_static("EVALSHA", ClusterHash::Random, false);
        match self.client.with_options(&options).custom_raw(command, arguments).await {
            Ok(Resp3Frame::Array { data, .. }) => matches!(data[0], Resp3Frame::Number { data: 1, .. }),
            other => panic!("the script fails: {other:?}"),
        }
    }

    /// The limited service.
    pub(crate) fn around(self, inner: Bare) -> Limited {
        Limited { limiter: self, inner }
    }
}

#[derive(Clone)]
pub(crate) struct Limited {
    limiter: Evalsha,
    inner: Bare,
}

impl Service<Request<Body>> for Limited {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (limiter, mut inner) = (self.limiter.clone(), self.inner);
        Box::pin(async move {
            let ConnectInfo(address) = request.extensions().get().expect("requests have an address");
            if limiter.admits(*address).await {
                return inner.call(request).await;
            }
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            Ok(response)
        })
    }
}
