//! GraphQL with a cost by complexity: 100 units at once and 10 more in each second, for each address.
//!
//! The complexity of a query is that of its fields together. A query that does not fit is an error of GraphQL with status `200`:
//! clients of GraphQL read errors in the body, and take another status for a failure of the transport. `extensions` has
//! `retryAfter` in seconds. A layer in front limits requests, since parsing costs too; its denials are `429`.
//!
//! ```console
//! $ cargo run --example graphql --features axum
//!
//! $ curl -i --json '{"query": "{ books(first: 30) { title author } }"}' http://127.0.0.1:3000/graphql
//! HTTP/1.1 200 OK
//! ratelimit: "complexity";r=39;t=7, "requests";r=29;t=60
//!
//! $ curl -i --json '{"query": "{ books(first: 30) { title author } }"}' http://127.0.0.1:3000/graphql
//! HTTP/1.1 200 OK
//! ratelimit: "complexity";r=0;t=3, "requests";r=28;t=60
//!
//! {"data":null,"errors":[{"message":"rate limit exceeded: complexity; try again in 3 s","extensions":{"code":"RATE_LIMITED","complexity":61,"retryAfter":3}}]}
//! ```
//!
//! The query costs 61: 1 for `books`, and 2 for each of 30 books. The second one is neither resolved nor counted. `first` is at
//! most 100: without a bound, a query with a number such as 9223372036854775807 has a sum that wraps to a small complexity.
//! `examples/graphql/test.rs` sends these requests.

use std::{env, error::Error, net::SocketAddr, sync::Arc};

use async_graphql::{
    EmptyMutation, EmptySubscription, ErrorExtensionValues, Object, Request, Response, Schema, ServerError,
    SimpleObject, ValidationResult, Value,
    async_trait::async_trait,
    extensions::{Extension, ExtensionContext, ExtensionFactory, NextValidation},
};
use axum::{
    Json, Router,
    extract::{ConnectInfo, DefaultBodyLimit, State},
    http::{HeaderMap, header::RETRY_AFTER},
    routing::post,
};
use tokio::{net::TcpListener, sync::OnceCell};
use tower_quota::{
    Decision, Key, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog, TokenBucket, key, store::Store,
};

#[derive(SimpleObject)]
struct Book {
    title: String,
    author: &'static str,
}

pub(crate) struct Query;

#[Object]
impl Query {
    // The products and sums of async-graphql are those of `usize`, which wrap in a release: a small type bounds them. The
    // validator is applied when the field is resolved, after the complexity is computed.
    #[graphql(complexity = "1 + usize::from(first.min(100)) * child_complexity")]
    async fn books(&self, #[graphql(validator(maximum = 100))] first: u8) -> Vec<Book> {
        let book = |number| Book {
            title: format!("Volume {number}"),
            author: "Ada",
        };
        (1..=first).map(book).collect()
    }
}

/// What a query is charged to, and the decision about it.
struct Caller {
    key: Key,
    decision: OnceCell<Decision>,
}

/// Charges each query for its complexity, after it was validated and before it is resolved.
struct Complexity(Limiter);

impl ExtensionFactory for Complexity {
    fn create(&self) -> Arc<dyn Extension> {
        Arc::new(Self(self.0.clone()))
    }
}

#[async_trait]
impl Extension for Complexity {
    async fn validation(
        &self,
        context: &ExtensionContext<'_>,
        next: NextValidation<'_>,
    ) -> Result<ValidationResult, Vec<ServerError>> {
        let valid = next.run(context).await?;
        let caller = context.data_unchecked::<Arc<Caller>>();
        let decision = self
            .0
            .request(caller.key.clone())
            .cost((valid.complexity as u64).max(1)) // that of `__typename` is 0
            .check()
            .await;
        let decision = decision.map_err(|error| ServerError::new(error.to_string(), None))?;
        let _ = caller.decision.set(decision.clone());

        if let Err(denied) = decision.require() {
            // At least 1 and rounded up, as `Retry-After` is. There is none if the query costs more than the burst.
            let wait = denied.decision().retry_after();
            let wait = wait.map(|wait| wait.as_secs_f64().ceil().max(1.0) as u64);
            let mut extensions = ErrorExtensionValues::default();
            extensions.set("code", "RATE_LIMITED");
            extensions.set("complexity", valid.complexity);
            extensions.set("retryAfter", wait.map_or(Value::Null, Value::from));
            let mut error = ServerError::new(denied.to_string(), None);
            error.extensions = Some(extensions);
            return Err(vec![error]);
        }
        Ok(valid)
    }
}

/// The most bytes of a request, and spreads of fragments in a query.
const LONGEST_BODY: usize = 16 << 10;
const MOST_FRAGMENTS: usize = 4;

type Books = Schema<Query, EmptyMutation, EmptySubscription>;

async fn graphql(
    State(schema): State<Books>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Json(request): Json<Request>,
) -> (HeaderMap, Json<Response>) {
    // Fragments in fragments multiply the fields that validation visits, before there is a complexity.
    if request.query.matches("...").count() > MOST_FRAGMENTS {
        let error = ServerError::new(format!("more than {MOST_FRAGMENTS} fragments"), None);
        return (HeaderMap::new(), Json(Response::from_errors(vec![error])));
    }
    let caller = Arc::new(Caller {
        key: Key::ip(peer.ip()),
        decision: OnceCell::new(),
    });
    let response = schema.execute(request.data(caller.clone())).await;
    let mut headers = caller.decision.get().map(Decision::headers).unwrap_or_default();
    // It is for a response with the status of a denial.
    headers.remove(RETRY_AFTER);
    (headers, Json(response))
}

pub(crate) fn app(store: impl Store + Clone) -> Router {
    let complexity = Policy::new("complexity", TokenBucket::per_second(10).burst(100));
    let schema = Schema::build(Query, EmptyMutation, EmptySubscription)
        .extension(Complexity(Limiter::new(store.clone(), complexity)))
        .limit_depth(8)
        .finish();
    let requests = Policy::new("requests", SlidingLog::per_minute(30)).key(key::ip());
    Router::new()
        .route("/graphql", post(graphql).layer(RateLimitLayer::new(store, requests)))
        .layer(DefaultBodyLimit::max(LONGEST_BODY))
        .with_state(schema)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let service = app(MemoryStore::new()).into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await?;
    Ok(())
}
