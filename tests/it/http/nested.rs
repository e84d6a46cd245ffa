//! Layers around each other, and the receipts of their charges.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty};
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxCloneSyncService};
use tower_quota::{
    Ban, ClientLibrary, Concurrency, Decision, FailureMode, FixedWindow, Limit, Limiter, MemoryStore, Policy,
    RateLimitLayer, RedisStore, SlidingLog, TokenBucket, key,
    store::{self, Store, StoreFuture},
};

use crate::support::{Broken, Clock, Counted, Log, PATIENCE, Redis, Wrapped, connected, each_store};

type Body = Empty<bytes::Bytes>;

/// Notes the decision that a request carries here, and takes its receipt.
#[derive(Clone)]
struct Spy<S> {
    inner: S,
    receipts: Arc<Mutex<Vec<tower_quota::Receipt>>>,
}

impl<S: Service<Request<Body>>> Service<Request<Body>> for Spy<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        let decision = request
            .extensions()
            .get::<Decision>()
            .expect("a layer around this one decided");
        self.receipts.lock().unwrap().push(decision.take_receipt());
        self.inner.call(request)
    }
}

fn policy(name: &'static str, limit: impl Into<tower_quota::Limit>) -> Policy {
    Policy::new(name, limit).key(key::constant("all"))
}

async fn answer(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::new()))
}

#[tokio::test]
async fn nested_layers_give_each_charge_back_once() {
    let store = MemoryStore::new();
    let (outer, inner) = (SlidingLog::per_hour(10), SlidingLog::per_hour(10));
    let limiter = |name, limit| Limiter::new(store.clone(), policy(name, limit));
    for _ in 0..5 {
        assert!(
            limiter("outer", outer)
                .check(tower_quota::Key::constant("all"))
                .await
                .unwrap()
                .is_allowed()
        );
    }

    let receipts = Arc::new(Mutex::new(Vec::new()));
    let spied = |service| Spy {
        inner: service,
        receipts: receipts.clone(),
    };
    let behind = RateLimitLayer::new(store.clone(), policy("inner", inner)).layer(Spy {
        inner: service_fn(answer),
        receipts: receipts.clone(),
    });
    let service = RateLimitLayer::new(store.clone(), policy("outer", outer)).layer(spied(behind));
    let response = service.oneshot(Request::new(Body::new())).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);

    // The middleware between the layers has the receipt of the outer one, the service behind that of the inner one.
    let receipts: Vec<_> = receipts
        .lock()
        .unwrap()
        .drain(..)
        .filter(|receipt| !receipt.is_empty())
        .collect();
    assert_eq!(receipts.len(), 2);
    for receipt in receipts {
        receipt.refund().await.unwrap();
    }
    for (name, limit, remaining) in [("outer", outer, 5), ("inner", inner, 10)] {
        let left = limiter(name, limit)
            .peek(tower_quota::Key::constant("all"))
            .await
            .unwrap()
            .remaining();
        assert_eq!(left, remaining, "{name}");
    }
}

#[tokio::test]
async fn the_decision_on_the_response_has_the_policies_of_all_layers() {
    let store = MemoryStore::new();
    let inner = RateLimitLayer::new(store.clone(), policy("inner", SlidingLog::per_hour(10))).response_extensions(true);
    let outer = RateLimitLayer::new(store, policy("outer", SlidingLog::per_hour(10)));
    for inner in [inner.clone(), inner.extensions(false)] {
        let service = outer.layer(inner.layer(service_fn(answer)));
        let response = service.oneshot(Request::new(Body::new())).await.unwrap();
        let decision = response.extensions().get::<Decision>().unwrap();
        let names: Vec<_> = decision.policies().map(|policy| policy.name().to_owned()).collect();
        assert_eq!(names, ["outer", "inner"]);
    }
}

#[tokio::test]
async fn the_decision_on_the_response_has_the_failure_of_the_outer_store() {
    let inner = RateLimitLayer::new(MemoryStore::new(), policy("inner", SlidingLog::per_hour(10)));
    let outer = policy("outer", SlidingLog::per_hour(10)).failure_mode(FailureMode::Open);
    let outer = RateLimitLayer::new(Broken::default(), outer);
    let service = outer.layer(inner.response_extensions(true).layer(service_fn(answer)));

    let response = service.oneshot(Request::new(Body::new())).await.unwrap();
    let decision = response.extensions().get::<Decision>().unwrap();
    assert!(decision.store_error().is_some() && decision.policies().count() == 1);
}

#[tokio::test]
async fn the_decision_on_the_response_has_that_of_the_outer_layer_whatever_the_inner_one_leaves() {
    let layer = |name| {
        let layer = RateLimitLayer::new(MemoryStore::new(), policy(name, SlidingLog::per_hour(10)));
        layer.response_extensions(true)
    };
    let names = |response: Response<_>| -> Vec<String> {
        let decision = response.extensions().get::<Decision>().expect("a decision");
        decision.policies().map(|policy| policy.name().to_owned()).collect()
    };

    let inner = layer("inner").extensions(false).layer(service_fn(answer));
    let response = layer("outer").layer(inner).oneshot(Request::new(Body::new())).await;
    assert_eq!(names(response.unwrap()), ["outer", "inner"]);

    // A handler that sends a request of its own, and returns its response.
    let client = layer("client").layer(service_fn(answer));
    let handler = service_fn(move |_| client.clone().oneshot(Request::new(Body::new())));
    let response = layer("outer").layer(handler).oneshot(Request::new(Body::new())).await;
    assert_eq!(names(response.unwrap()).len(), 2);
}

#[tokio::test]
async fn a_policy_that_nested_layers_count_by_two_keys_is_logged() {
    let (log, store) = (Log::capture(), MemoryStore::new());
    let by = |key| Policy::new("api", SlidingLog::per_hour(10)).key(key::constant(key));
    for (inner, logged) in [("a", 0), ("b", 1)] {
        let layers = ["a", inner].map(|key| RateLimitLayer::new(store.clone(), by(key)));
        for _ in 0..2 {
            assert_eq!(through(layers.clone().into()).await.status(), StatusCode::OK);
        }
        assert_eq!(log.text().matches("under two keys").count(), logged, "{inner}");
    }
}

#[tokio::test]
async fn a_ban_that_only_the_inner_layer_regards_is_in_force() {
    let store = MemoryStore::new();
    let banning = || policy("api", SlidingLog::per_hour(10)).ban(Ban::by_hand());
    let limiter = Limiter::new(store.clone(), banning());
    let banned = limiter
        .ban(tower_quota::Key::constant("all"), Duration::from_secs(60))
        .await;
    banned.expect("the store replies");
    let inner = RateLimitLayer::new(store.clone(), banning());
    let outer = RateLimitLayer::new(store, policy("api", SlidingLog::per_hour(10)));
    assert_eq!(
        through(vec![outer, inner]).await.status(),
        StatusCode::TOO_MANY_REQUESTS
    );
}

#[tokio::test]
async fn without_extensions_there_is_no_decision_and_each_layer_counts() {
    let behind = service_fn(async |request: Request<Body>| {
        assert!(request.extensions().get::<Decision>().is_none());
        answer(request).await
    });
    let layer = RateLimitLayer::new(MemoryStore::new(), policy("api", SlidingLog::per_hour(4))).extensions(false);
    let service = layer.layer(layer.layer(behind));

    let mut answers = Vec::new();
    for _ in 0..3 {
        let response = service.clone().oneshot(Request::new(Body::new())).await.unwrap();
        assert!(response.extensions().get::<Decision>().is_none());
        answers.push((
            response.status(),
            response.headers()["ratelimit"].to_str().unwrap().to_owned(),
        ));
    }
    let response = |status, fields: &str| (status, fields.to_owned());
    assert_eq!(
        answers,
        [
            response(StatusCode::OK, r#""api";r=2;t=3600, "api";r=3;t=3600"#),
            response(StatusCode::OK, r#""api";r=0;t=3600, "api";r=1;t=3600"#),
            response(StatusCode::TOO_MANY_REQUESTS, r#""api";r=0;t=3600"#),
        ]
    );
}

#[tokio::test]
async fn a_policy_of_the_same_name_with_other_numbers_is_enforced() {
    let store = MemoryStore::new();
    let inner = RateLimitLayer::new(store.clone(), policy("api", FixedWindow::per_hour(1)));
    let outer = RateLimitLayer::new(store, policy("api", TokenBucket::per_second(1_000)));
    let service = outer.layer(inner.layer(service_fn(answer)));

    let mut statuses = Vec::new();
    for _ in 0..2 {
        statuses.push(
            service
                .clone()
                .oneshot(Request::new(Body::new()))
                .await
                .unwrap()
                .status(),
        );
    }
    assert_eq!(statuses, [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS]);
}

#[tokio::test]
async fn a_refund_goes_to_the_store_that_was_charged() {
    let mail = || Policy::new("mail", SlidingLog::per_hour(3));
    let (here, elsewhere) = (
        Limiter::new(MemoryStore::new(), mail()),
        Limiter::new(MemoryStore::new(), mail()),
    );
    let decision = here.check("42").await.unwrap();
    assert!(elsewhere.check("42").await.unwrap().is_allowed());

    decision.take_receipt().refund().await.unwrap();
    assert_eq!(here.peek("42").await.unwrap().remaining(), 3);
    assert_eq!(elsewhere.peek("42").await.unwrap().remaining(), 2);
}

/// A store whose refunds fail.
#[derive(Clone)]
struct NoRefunds(MemoryStore);

impl Store for NoRefunds {
    fn decide(&self, requests: &[store::StoreRequest<'_>]) -> StoreFuture {
        match requests[0].operation() {
            store::Operation::Refund { .. } => {
                let error = store::StoreError::new(store::ErrorKind::Timeout, "no refunds");
                StoreFuture::ready(Err(error))
            }
            _ => self.0.decide(requests),
        }
    }
}

#[tokio::test]
async fn a_refund_that_fails_in_one_store_is_made_in_the_other() {
    let (outer, inner) = (NoRefunds(MemoryStore::new()), MemoryStore::new());
    let service = RateLimitLayer::new(outer.clone(), shared(1)).layer(
        RateLimitLayer::new(inner.clone(), shared(1)).layer(service_fn(async |request: Request<Body>| {
            let decision = request.extensions().get::<Decision>().expect("a decision");
            let receipt = decision.take_receipt();
            let error = receipt.refund().await.expect_err("one store fails");
            assert_eq!(error.to_string(), "no refunds");
            answer(request).await
        })),
    );

    service.oneshot(Request::new(Body::new())).await.unwrap();
    assert_eq!((remaining_in(&outer).await, remaining_in(&inner).await), (9, 10));
}

#[tokio::test]
async fn of_stores_without_an_identity_each_is_settled() {
    for actual in [0, 1, 4] {
        let [outer, inner] = [(); 2].map(|()| Counted::new(MemoryStore::new()));
        let [around, within] = [(&outer, 2), (&inner, 3)].map(|(store, cost)| {
            let layer = RateLimitLayer::new(store.clone(), shared(cost));
            layer.response_extensions(true)
        });
        let response = around.layer(within.layer(service_fn(answer)));
        let response = response.oneshot(Request::new(Body::new())).await.unwrap();
        assert_eq!((remaining_in(&outer).await, remaining_in(&inner).await), (8, 7));

        let decision = response.extensions().get::<Decision>().expect("a decision");
        decision.take_receipt().settle(actual).await.expect("both answer");
        let left = 10 - actual;
        assert_eq!((remaining_in(&outer).await, remaining_in(&inner).await), (left, left));
    }
}

#[tokio::test]
async fn methods_that_are_not_registered_share_a_key() {
    let by_method = Policy::new("method", SlidingLog::per_hour(1)).key(key::method());
    let service = RateLimitLayer::new(MemoryStore::new(), by_method).layer(service_fn(answer));
    let mut statuses = Vec::new();
    for method in ["GET", "POST", "MADE-UP-1", "MADE-UP-2"] {
        let request = Request::builder().method(method).body(Body::new()).unwrap();
        statuses.push(service.clone().oneshot(request).await.unwrap().status());
    }
    let ok = StatusCode::OK;
    assert_eq!(statuses, [ok, ok, ok, StatusCode::TOO_MANY_REQUESTS]);
}

/// Layers around each other, from the outside to the inside.
async fn through(layers: Vec<RateLimitLayer>) -> Response<()> {
    type Boxed = BoxCloneSyncService<Request<Body>, Response<()>, Infallible>;

    let innermost = Boxed::new(service_fn(async |_: Request<Body>| Ok(Response::new(()))));
    let service = layers.into_iter().rev().fold(innermost, |inner, layer| {
        let inner = inner.map_response(|response| response.map(|()| Body::new()));
        Boxed::new(layer.layer(inner).map_response(|response| response.map(drop)))
    });
    service.oneshot(Request::new(Body::new())).await.expect("an answer")
}

/// The policy that the layers have in common, at this cost.
fn shared(cost: u64) -> Policy {
    policy("shared", SlidingLog::per_hour(10)).cost(cost)
}

async fn remaining_in(store: &(impl Store + Clone)) -> u64 {
    let limiter = Limiter::new(store.clone(), shared(1));
    let decision = limiter.peek(tower_quota::Key::constant("all")).await;
    decision.expect("an answer").remaining()
}

/// What is charged to a policy that several layers have, for stores of one kind.
async fn a_policy_of_several_layers_is_charged_its_largest_cost<S: Store + Clone>(stores: [S; 8]) {
    let [by_one, by_more, by_less, by_three, denied, impossible, here, there] = stores;
    let layer = |store: &S, cost| RateLimitLayer::new(store.clone(), shared(cost));

    for (store, costs, remaining) in [
        (&by_one, vec![1, 1], 9),
        (&by_more, vec![1, 4], 6),
        (&by_less, vec![4, 1], 6),
        (&by_three, vec![1, 3, 2, 5], 5),
    ] {
        let response = through(costs.iter().map(|cost| layer(store, *cost)).collect()).await;
        assert_eq!(response.status(), StatusCode::OK, "{costs:?}");
        assert_eq!(remaining_in(store).await, remaining, "{costs:?}");
    }

    // 7, then 1, and not the rest of 4.
    assert_eq!(through(vec![layer(&denied, 7)]).await.status(), StatusCode::OK);
    let response = through(vec![layer(&denied, 1), layer(&denied, 4)]).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(response.headers().contains_key("retry-after"));
    assert_eq!(remaining_in(&denied).await, 2);

    // 12 of 10 is never admitted, although 7 are charged outside and 5 would be left.
    let above = RateLimitLayer::new(impossible.clone(), shared(1).cost_fn(|_| 12));
    let response = through(vec![layer(&impossible, 7), above]).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(!response.headers().contains_key("retry-after"));
    assert_eq!(remaining_in(&impossible).await, 3);

    // Another store counts too.
    let response = through(vec![layer(&here, 1), layer(&there, 3), layer(&here, 2)]).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!((remaining_in(&here).await, remaining_in(&there).await), (8, 7));
}

#[tokio::test]
async fn a_policy_of_several_layers_is_charged_its_largest_cost_in_memory() {
    let stores = || [(); 8].map(|()| MemoryStore::new());
    a_policy_of_several_layers_is_charged_its_largest_cost(stores()).await;
    a_policy_of_several_layers_is_charged_its_largest_cost(stores().map(Wrapped)).await;
    let erased = stores().map(|store| Arc::new(store) as Arc<dyn Store>);
    a_policy_of_several_layers_is_charged_its_largest_cost(erased).await;
}

#[tokio::test]
async fn a_policy_of_several_layers_is_charged_its_largest_cost_in_redis() {
    let redis = Redis::start();
    for library in [ClientLibrary::Fred, ClientLibrary::RedisRs] {
        let mut stores = Vec::new();
        for n in 0..8 {
            let builder = RedisStore::builder().prefix(format!("{library:?}:{n}"));
            let builder = builder.client_library(library).deadline(Duration::from_secs(10));
            stores.push(connected(builder.connect_timeout(PATIENCE), &redis.url()).await);
        }
        let stores = stores.try_into().expect("eight stores");
        a_policy_of_several_layers_is_charged_its_largest_cost::<RedisStore>(stores).await;
    }
}

/// Refunds what two layers have charged to the policy that they share, 2 and 3 of 10.
async fn the_receipts_of_several_layers_give_back_the_largest_cost(store: impl Store + Clone) {
    let layer = |cost| RateLimitLayer::new(store.clone(), shared(cost));
    let receipts = Arc::new(Mutex::new(Vec::new()));
    let spied = |inner| Spy {
        inner,
        receipts: receipts.clone(),
    };
    let inner = layer(5).layer(Spy {
        inner: service_fn(answer),
        receipts: receipts.clone(),
    });

    // One receipt is taken between the layers, and one by the service.
    let response = layer(2).layer(spied(inner)).oneshot(Request::new(Body::new())).await;
    assert_eq!(response.unwrap().status(), StatusCode::OK);
    assert_eq!(remaining_in(&store).await, 5);
    let taken: Vec<_> = receipts
        .lock()
        .unwrap()
        .drain(..)
        .filter(|receipt| !receipt.is_empty())
        .collect();
    for (receipt, remaining) in taken.into_iter().zip([7, 10]) {
        receipt.refund().await.expect("an answer");
        assert_eq!(remaining_in(&store).await, remaining);
    }
    assert_eq!(remaining_in(&store).await, 10);

    // One receipt for both layers.
    let service = layer(2).layer(layer(5).layer(service_fn(async |request: Request<Body>| {
        let decision = request.extensions().get::<Decision>().expect("a decision");
        let receipt = decision.take_receipt();
        receipt.refund().await.expect("an answer");
        answer(request).await
    })));
    let response = service.oneshot(Request::new(Body::new())).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(remaining_in(&store).await, 10);
}

#[tokio::test]
async fn the_receipts_of_several_layers_settle_one_cost() {
    for actual in [0, 1, 2, 4, 5, 9] {
        let store = MemoryStore::new();
        let layer = |cost| RateLimitLayer::new(store.clone(), shared(cost));
        let service = layer(2).layer(layer(5).layer(service_fn(async |request: Request<Body>| {
            let decision = request.extensions().get::<Decision>().expect("a decision");
            let receipt = decision.take_receipt_of("shared");
            receipt.settle(actual).await.expect("an answer");
            answer(request).await
        })));

        let response = service.oneshot(Request::new(Body::new())).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(remaining_in(&store).await, 10 - actual);
    }
}

each_store! { with crate::support::Unclocked: the_receipts_of_several_layers_give_back_the_largest_cost }

#[tokio::test]
async fn the_decision_on_a_denial_of_an_inner_layer_has_the_policies_of_all_layers() {
    let store = MemoryStore::new();
    let layer = |name, quota| RateLimitLayer::new(store.clone(), policy(name, SlidingLog::per_hour(quota)));
    let service = layer("outer", 10).layer(layer("between", 10).layer(layer("inner", 1).layer(service_fn(answer))));
    let admitted = service.clone().oneshot(Request::new(Body::new())).await.unwrap();
    assert_eq!(admitted.status(), StatusCode::OK);

    let denied = service.oneshot(Request::new(Body::new())).await.unwrap();
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    let decision = denied.extensions().get::<Decision>().expect("a decision");
    let policies: Vec<_> = decision
        .policies()
        .map(|policy| (policy.name(), policy.denies(), policy.remaining()))
        .collect();
    assert_eq!(
        policies,
        [("outer", false, 8), ("between", false, 8), ("inner", true, 0)]
    );
    assert!(!decision.is_allowed());
    assert_eq!((decision.limit(), decision.remaining()), (1, 0));
    assert!(decision.retry_after().is_some());

    // What the outer layers have charged can be refunded.
    decision.take_receipt().refund().await.unwrap();
    for (name, quota, remaining) in [("outer", 10, 9), ("between", 10, 9), ("inner", 1, 0)] {
        let limiter = Limiter::new(store.clone(), policy(name, SlidingLog::per_hour(quota)));
        let left = limiter.peek(tower_quota::Key::constant("all")).await.unwrap();
        assert_eq!(left.remaining(), remaining, "{name}");
    }
}

#[tokio::test]
async fn of_a_policy_that_is_met_again_the_largest_cost_is_charged_also_beside_other_layers() {
    for costs in [[2, 5, 3], [5, 2, 3], [1, 3, 5], [5, 5, 5]] {
        let store = MemoryStore::new();
        let shared = |cost| policy("shared", SlidingLog::per_hour(10)).cost(cost);
        let other = |name| RateLimitLayer::new(store.clone(), policy(name, SlidingLog::per_hour(10)));
        let [outer, middle, inner] = costs.map(|cost| RateLimitLayer::new(store.clone(), shared(cost)));
        let inner = other("within").layer(inner.layer(service_fn(answer)));
        let service = outer.layer(other("between").layer(middle.layer(inner)));
        let response = service.oneshot(Request::new(Body::new())).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);

        for (name, charged) in [("shared", 5), ("between", 1), ("within", 1)] {
            let limiter = Limiter::new(store.clone(), policy(name, SlidingLog::per_hour(10)));
            let left = limiter.peek(tower_quota::Key::constant("all")).await.unwrap();
            assert_eq!(left.remaining(), 10 - charged, "{name} of {costs:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_delay_of_a_request_is_that_of_all_layers() {
    let store = MemoryStore::new();
    let layer = |name, seconds| {
        let policy = policy(name, SlidingLog::new(1, Duration::from_secs(seconds)));
        RateLimitLayer::new(store.clone(), policy.wait_up_to(Duration::from_secs(9)))
    };
    let service = service_fn(async |request: Request<Body>| {
        let decision = request.extensions().get::<Decision>().expect("a decision");
        Ok::<_, Infallible>(Response::new(decision.waited().as_secs().to_string()))
    });
    // The second request waits for 1 s, for 2 s, and for 4 s.
    let service = layer("outer", 1).layer(layer("between", 3).layer(layer("inner", 7).layer(service)));
    for delay in ["0", "7"] {
        let response = service.clone().oneshot(Request::new(Body::new())).await.unwrap();
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        assert_eq!(body, delay);
    }
}

/// A cost above the share of this process takes all of it in the outer layer, and nothing more in the inner one.
#[tokio::test]
async fn a_cost_above_the_share_of_a_process_is_charged_once_while_the_store_fails() {
    let limits: [Limit; 2] = [SlidingLog::per_minute(20).into(), Concurrency::new(20).into()];
    for limit in limits {
        let store: Arc<dyn Store> = Arc::new(Broken::default());
        let layer = || {
            let policy = policy("shared", limit.clone()).cost(5);
            RateLimitLayer::new(store.clone(), policy.failure_mode(FailureMode::local_share(1, 10)))
        };
        let response = through(vec![layer(), layer()]).await;
        assert_eq!(response.status(), StatusCode::OK, "{limit}");
    }
}

/// What this process has counted in place of the store is no count for a policy that requires the store.
#[tokio::test]
async fn a_policy_that_is_closed_does_not_rely_on_counts_of_this_process() {
    let store: Arc<dyn Store> = Arc::new(Broken::default());
    for (mode, status) in [
        (FailureMode::default(), StatusCode::OK),
        (FailureMode::Open, StatusCode::OK),
        (FailureMode::Closed, StatusCode::SERVICE_UNAVAILABLE),
    ] {
        let inner = RateLimitLayer::new(store.clone(), shared(1).failure_mode(mode));
        let outer = RateLimitLayer::new(store.clone(), shared(1));
        assert_eq!(through(vec![outer, inner]).await.status(), status, "{mode:?}");
    }
}

/// A client that retries five times a second, in an hour.
async fn served_in_an_hour<S, R>(clock: &Clock, service: S) -> usize
where
    S: Service<Request<Body>, Response = Response<R>, Error = Infallible> + Clone,
{
    let mut served = 0;
    for _ in 0..5 * 60 * 60 {
        let response = service.clone().oneshot(Request::new(Body::new())).await.unwrap();
        served += usize::from(response.status() == StatusCode::OK);
        clock.advance(Duration::from_millis(200));
    }
    served
}

/// As `docs/start.md` says.
#[tokio::test]
async fn retries_that_an_inner_layer_denies_use_up_the_outer_quota() {
    let (second, hour) = (SlidingLog::per_second(1), SlidingLog::per_hour(10));
    let (second, hour) = (policy("second", second), policy("hour", hour));

    let clock = Clock::new();
    let layer = |policies: Vec<Policy>| RateLimitLayer::new(clock.memory_store(), policies);
    let together = layer(vec![second.clone(), hour.clone()]).layer(service_fn(answer));
    assert_eq!(served_in_an_hour(&clock, together).await, 10);

    let nested = layer(vec![hour]).layer(layer(vec![second]).layer(service_fn(answer)));
    assert_eq!(served_in_an_hour(&clock, nested).await, 2);
}
