//! A global rate limit service for Envoy: `envoy.service.ratelimit.v3.RateLimitService`.
//!
//! Envoy sends the descriptors of each request, and admits it if the reply is `OK`. The limits are those of
//! `examples/envoy/limits.toml`, or of the file that `LIMITS` names, and follow it, also those that are added. Requests are counted
//! in memory, or in Redis if `REDIS_URL` is set.
//!
//! ```console
//! $ cargo run --example envoy
//! listening on 127.0.0.1:8081
//! ```
//!
//! The name of a policy is the domain and the keys of a descriptor, and the key is its values: `shop.remote_address` is the limit
//! of `{"remote_address": "203.0.113.7"}` in the domain `shop`. A value may have a policy of its own, such as
//! `shop.database--users` beside `shop.database`. Of a `generic_key`, which the configuration of Envoy has and no client chooses,
//! the name has the value only. A name has no upper case: the domain, the keys and the value of a `generic_key` are compared in
//! lower case, and other values as they are. A descriptor whose name no policy has is admitted, which is logged once for each of
//! the first 100 names. `examples/envoy/envoy.yaml` is a configuration of Envoy for it, and `examples/envoy/Dockerfile` makes an
//! image.
//!
//! Hits that do not fit are not counted. So limits of hits that have happened, as Envoy reports them at the end of a stream
//! (`apply_on_stream_done`), do not work.

use std::{
    collections::{HashMap, HashSet},
    env,
    error::Error,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use envoy_types::pb::{
    envoy::{
        config::core::v3::HeaderValue,
        extensions::common::ratelimit::v3::RateLimitDescriptor,
        service::ratelimit::v3::{
            RateLimitRequest, RateLimitResponse,
            rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit},
            rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
        },
    },
    google::protobuf,
};
use tokio::{net::TcpListener, signal};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};
use tower_quota::{
    ConfigError, Decision, Key, Limiter, MemoryStore, Policies, PolicyDecision, RedisStore, store::Store,
};

/// A limiter for each policy of the file, by its name.
pub(crate) struct RateLimits<S> {
    policies: Policies,
    store: S,
    limiters: RwLock<HashMap<String, Limiter>>,
    /// The names of descriptors that no policy has.
    unknown: Mutex<HashSet<String>>,
}

impl<S: Store + Clone> RateLimits<S> {
    pub(crate) fn new(policies: Policies, store: S) -> Result<Self, ConfigError> {
        let limits = Self {
            policies,
            store,
            limiters: RwLock::default(),
            unknown: Mutex::default(),
        };
        for name in limits.policies.names() {
            limits.limiter(name)?;
        }
        Ok(limits)
    }

    /// That of a policy, which may have been added to the file; none if there is no such policy.
    fn limiter(&self, name: String) -> Result<Option<Limiter>, ConfigError> {
        let limiters = self.limiters.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(limiter) = limiters.get(&name) {
            return Ok(Some(limiter.clone()));
        }
        drop(limiters);
        let Ok(policy) = self.policies.unkeyed(&name) else {
            return Ok(None);
        };
        let limiter = Limiter::try_new(self.store.clone(), policy)?;
        let mut limiters = self.limiters.write().unwrap_or_else(PoisonError::into_inner);
        limiters.insert(name, limiter.clone());
        Ok(Some(limiter))
    }

    /// The decision about a descriptor; none if no policy is for it.
    async fn decide(
        &self,
        domain: &str,
        descriptor: &RateLimitDescriptor,
        hits: u64,
    ) -> Result<Option<Decision>, Status> {
        let names = policy_names(domain, descriptor);
        for name in &names {
            let limiter = self.limiter(name.clone());
            if let Some(limiter) = limiter.map_err(|error| Status::failed_precondition(error.to_string()))? {
                return Ok(Some(limiter.request(key(descriptor)).cost(hits).check().await?));
            }
        }
        // The last one has no value that a client chooses.
        let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(name) = names.last().filter(|_| unknown.len() < MOST_UNKNOWN)
            && unknown.insert(name.clone())
        {
            tracing::warn!(?name, "no policy has this name; such descriptors are admitted");
        }
        Ok(None)
    }
}

#[tonic::async_trait]
impl<S: Store + Clone> RateLimitService for RateLimits<S> {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let request = request.into_inner();
        let mut decisions = Vec::new();
        if request.descriptors.iter().any(|descriptor| descriptor.is_negative_hits) {
            return Err(Status::unimplemented("hits are not given back"));
        }
        if request.descriptors.iter().any(|descriptor| descriptor.limit.is_some()) {
            return Err(Status::unimplemented("limits are those of the file"));
        }
        if request
            .descriptors
            .iter()
            .any(|descriptor| descriptor.entries.len() > MOST_ENTRIES)
        {
            let fault = format!("a descriptor has at most {MOST_ENTRIES} entries");
            return Err(Status::invalid_argument(fault));
        }
        for descriptor in &request.descriptors {
            let hits = match &descriptor.hits_addend {
                Some(hits) => hits.value,
                None => u64::from(request.hits_addend.max(1)),
            };
            match self.decide(&request.domain, descriptor, hits).await {
                Ok(decision) => decisions.push(decision),
                Err(status) => {
                    refund(&decisions).await;
                    return Err(status);
                }
            }
        }

        let denied = decisions.iter().flatten().filter(|decision| !decision.is_allowed());
        // A cost above a limit is denied at any time.
        let denied = denied.max_by_key(|decision| decision.retry_after().unwrap_or(Duration::MAX));
        if denied.is_some() {
            refund(&decisions).await;
        }
        let shown = denied.or_else(|| decisions.iter().flatten().min_by_key(|decision| decision.remaining()));
        Ok(Response::new(RateLimitResponse {
            overall_code: code(denied.is_none()),
            statuses: decisions.iter().map(status).collect(),
            response_headers_to_add: shown.map(headers).unwrap_or_default(),
            ..RateLimitResponse::default()
        }))
    }
}

/// A request counts for all descriptors or for none, as in a layer. A refund that is lost leaves a count, and no request above a
/// limit.
async fn refund(decisions: &[Option<Decision>]) {
    for decision in decisions.iter().flatten() {
        let _ = decision.take_receipt().refund().await;
    }
}

/// The names that the policy of a descriptor may have: the domain and the keys of the entries, such as `shop.remote_address`, of which
/// those with values are first.
fn policy_names(domain: &str, descriptor: &RateLimitDescriptor) -> Vec<String> {
    descriptor
        .entries
        .iter()
        .fold(vec![domain.to_lowercase()], |names, entry| {
            let (key, value) = (entry.key.to_lowercase(), &entry.value);
            let with_entry = |name: String| {
                let with_key = format!("{name}.{key}");
                match &*key {
                    "generic_key" => vec![format!("{name}.{}", value.to_lowercase())],
                    // What a client chooses may not look like further keys.
                    _ if value.contains('.') => vec![with_key],
                    _ => vec![format!("{with_key}--{value}"), with_key],
                }
            };
            names.into_iter().flat_map(with_entry).collect()
        })
}

/// Each entry doubles the names.
const MOST_ENTRIES: usize = 6;

const MOST_UNKNOWN: usize = 100;

/// The values of the entries; of the address of an IPv6 client its /64 network.
fn key(descriptor: &RateLimitDescriptor) -> Key {
    let values = descriptor
        .entries
        .iter()
        .map(|entry| match (&*entry.key.to_lowercase(), entry.value.parse()) {
            ("remote_address", Ok(address)) => Key::ip(address),
            ("generic_key", _) => Key::from(entry.value.to_lowercase()),
            _ => Key::from(&*entry.value),
        });
    values.reduce(Key::and).unwrap_or_else(|| Key::from("all"))
}

fn code(is_allowed: bool) -> i32 {
    let code = if is_allowed { Code::Ok } else { Code::OverLimit };
    code.into()
}

/// A descriptor without a policy is admitted, without a limit in its status.
fn status(decision: &Option<Decision>) -> DescriptorStatus {
    let policy = decision.as_ref().and_then(|decision| decision.policies().next());
    DescriptorStatus {
        code: code(policy.is_none_or(|policy| !policy.denies())),
        current_limit: policy.map(limit),
        limit_remaining: policy.map_or(0, |policy| number(policy.remaining())),
        duration_until_reset: policy.and_then(|policy| duration(policy.retry_after().unwrap_or(policy.reset_after()))),
        ..DescriptorStatus::default()
    }
}

/// Envoy has units of time in place of windows; for other windows the unit is unknown.
fn limit(policy: &PolicyDecision) -> RateLimit {
    let unit = match policy.window().map(|window| window.as_secs()) {
        Some(1) => Unit::Second,
        Some(60) => Unit::Minute,
        Some(3_600) => Unit::Hour,
        Some(86_400) => Unit::Day,
        Some(604_800) => Unit::Week,
        _ => Unit::Unknown,
    };
    RateLimit {
        name: policy.name().to_owned(),
        requests_per_unit: number(policy.limit()),
        unit: unit.into(),
    }
}

fn number(number: u64) -> u32 {
    number.try_into().unwrap_or(u32::MAX)
}

fn duration(duration: Duration) -> Option<protobuf::Duration> {
    Some(protobuf::Duration {
        seconds: duration.as_secs().try_into().ok()?,
        nanos: duration.subsec_nanos().try_into().ok()?,
    })
}

/// `RateLimit`, `RateLimit-Policy`, and `Retry-After` of a denial, which Envoy adds to the response.
fn headers(decision: &Decision) -> Vec<HeaderValue> {
    let headers = decision.headers();
    let fields = headers.iter().map(|(name, value)| HeaderValue {
        key: name.to_string(),
        value: String::from_utf8_lossy(value.as_bytes()).into_owned(),
        ..HeaderValue::default()
    });
    fields.collect()
}

/// Serves the limits of a file, and follows it, until `end`; then until the calls that are served have ended.
pub(crate) async fn serve(
    limits: &str,
    store: impl Store + Clone,
    listener: TcpListener,
    end: impl Future<Output = ()>,
) -> Result<(), Box<dyn Error>> {
    let policies = Policies::from_file(limits)?;
    policies.reload_on_change(Duration::from_secs(1))?;
    let service = RateLimitServiceServer::new(RateLimits::new(policies, store.clone())?);
    // Else small responses wait for the acknowledgement of earlier ones; the default of tonic is for its own listener.
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    Server::builder()
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, end)
        .await?;
    store.drained(Duration::from_secs(5)).await?; // the refunds of requests that a second limit has denied
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt::init();
    let store: Arc<dyn Store> = match env::var("REDIS_URL") {
        Ok(url) => Arc::new(RedisStore::connect(&url).await?),
        Err(_) => Arc::new(MemoryStore::new()),
    };
    let limits = env::var("LIMITS").unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/limits.toml").into());

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:8081".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on {}", listener.local_addr()?);
    serve(&limits, store, listener, async { drop(signal::ctrl_c().await) }).await
}
