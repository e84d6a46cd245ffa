//! Calls the service of the example as Envoy does.

#[path = "../../envoy.rs"]
#[allow(dead_code)]
mod envoy;

use std::{fs, future::pending, time::Duration};

use envoy_types::pb::{
    envoy::{
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor,
            rate_limit_descriptor::{Entry, RateLimitOverride},
        },
        service::ratelimit::v3::{
            RateLimitRequest, RateLimitResponse,
            rate_limit_response::{Code, DescriptorStatus, rate_limit::Unit},
            rate_limit_service_client::RateLimitServiceClient,
        },
    },
    google::protobuf::UInt64Value,
};
use tokio::{net::TcpListener, sync::oneshot, time::timeout};
use tonic::{Code as StatusCode, transport::Channel};
use tower_quota::{
    MemoryStore,
    store::{ErrorKind, Store, StoreError, StoreFuture, StoreRequest},
};

type Client = RateLimitServiceClient<Channel>;

const LIMITS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/limits.toml");
const LOGIN: [(&str, &str); 2] = [("generic_key", "login"), ("remote_address", "203.0.113.7")];
const ADDRESS: [(&str, &str); 1] = [("remote_address", "203.0.113.7")];

/// A client that is connected to the service.
async fn client(limits: &str, store: impl Store + Clone) -> Client {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    let limits = limits.to_owned();
    tokio::spawn(async move {
        envoy::serve(&limits, store, listener, pending())
            .await
            .map_err(|error| error.to_string())
    });
    Client::connect(format!("http://{addr}"))
        .await
        .expect("the service runs")
}

/// A file for one test, with these limits.
fn file(test: &str, limits: &str) -> String {
    let file = std::env::temp_dir().join(format!("tower-quota-envoy-{test}-{}.toml", std::process::id()));
    fs::write(&file, limits).expect("a file");
    file.to_str().expect("text").to_owned()
}

/// The limits of the example, with logins that are closed while the store fails.
const CLOSED: &str = concat!(include_str!("../limits.toml"), "failure-mode = 'closed'\n");

fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entries = entries.iter().map(|(key, value)| Entry {
        key: (*key).into(),
        value: (*value).into(),
    });
    RateLimitDescriptor {
        entries: entries.collect(),
        ..RateLimitDescriptor::default()
    }
}

fn request<const N: usize>(descriptors: [RateLimitDescriptor; N]) -> RateLimitRequest {
    RateLimitRequest {
        domain: "shop".into(),
        descriptors: descriptors.into(),
        hits_addend: 0,
    }
}

async fn call(client: &mut Client, request: RateLimitRequest) -> RateLimitResponse {
    let response = client.should_rate_limit(request).await;
    response.expect("a decision").into_inner()
}

/// The code of the request, and that of each descriptor with what remains.
fn codes(response: &RateLimitResponse) -> (Code, Vec<(Code, u32)>) {
    let statuses = response.statuses.iter();
    let statuses = statuses.map(|status| (status.code(), status.limit_remaining));
    (response.overall_code(), statuses.collect())
}

#[tokio::test]
async fn the_third_login_in_a_minute_is_over_the_limit() {
    let mut client = client(LIMITS, MemoryStore::new()).await;
    for remaining in [1, 0] {
        let response = call(&mut client, request([descriptor(&LOGIN)])).await;
        assert_eq!(codes(&response), (Code::Ok, vec![(Code::Ok, remaining)]));
    }

    let response = call(&mut client, request([descriptor(&LOGIN)])).await;
    assert_eq!(codes(&response), (Code::OverLimit, vec![(Code::OverLimit, 0)]));
    let status = &response.statuses[0];
    let limit = status.current_limit.as_ref().expect("a limit");
    assert_eq!(
        (limit.name.as_str(), limit.requests_per_unit, limit.unit()),
        ("shop.login.remote_address", 2, Unit::Minute)
    );
    let reset = status.duration_until_reset.as_ref().expect("a reset").seconds;
    assert!((50..=60).contains(&reset), "{reset} s");
    let fields: Vec<_> = response
        .response_headers_to_add
        .iter()
        .map(|field| field.key.as_str())
        .collect();
    assert_eq!(fields, ["ratelimit-policy", "ratelimit", "retry-after"]);

    let other = [LOGIN[0], ("remote_address", "203.0.113.8")];
    assert_eq!(
        call(&mut client, request([descriptor(&other)])).await.overall_code(),
        Code::Ok
    );
}

#[tokio::test]
async fn addresses_of_one_ipv6_network_share_a_limit() {
    let mut client = client(LIMITS, MemoryStore::new()).await;
    for (address, code) in [
        ("2001:db8:1:2::1", Code::Ok),
        ("2001:db8:1:2::2", Code::Ok),
        ("2001:db8:1:2:3::", Code::OverLimit),
        ("2001:db8:1:3::1", Code::Ok),
    ] {
        let login = [LOGIN[0], ("remote_address", address)];
        let response = call(&mut client, request([descriptor(&login)])).await;
        assert_eq!(response.overall_code(), code, "{address}");
    }
}

#[tokio::test]
async fn a_request_that_one_descriptor_denies_is_counted_by_none() {
    let mut client = client(LIMITS, MemoryStore::new()).await;
    let both = || request([descriptor(&ADDRESS), descriptor(&LOGIN)]);
    for (code, remaining) in [
        (Code::Ok, 99),
        (Code::Ok, 98),
        (Code::OverLimit, 97),
        (Code::OverLimit, 97),
    ] {
        let response = call(&mut client, both()).await;
        assert_eq!(
            (response.overall_code(), response.statuses[0].limit_remaining),
            (code, remaining)
        );
        assert_eq!(response.statuses[0].code(), Code::Ok);
    }
}

#[tokio::test]
async fn hits_are_the_cost() {
    let mut client = client(LIMITS, MemoryStore::new()).await;
    let of_request = RateLimitRequest {
        hits_addend: 40,
        ..request([descriptor(&ADDRESS)])
    };
    assert_eq!(codes(&call(&mut client, of_request.clone()).await).1, [(Code::Ok, 60)]);

    let mut own = of_request;
    own.descriptors[0].hits_addend = Some(UInt64Value { value: 61 });
    assert_eq!(call(&mut client, own.clone()).await.overall_code(), Code::OverLimit);
    own.descriptors[0].hits_addend = Some(UInt64Value { value: 60 });
    assert_eq!(codes(&call(&mut client, own).await).1, [(Code::Ok, 0)]);
}

#[tokio::test]
async fn a_descriptor_without_a_policy_is_admitted() {
    let mut client = client(LIMITS, MemoryStore::new()).await;
    let response = call(&mut client, request([descriptor(&[("path", "/")])])).await;
    assert_eq!(codes(&response), (Code::Ok, vec![(Code::Ok, 0)]));
    assert_eq!(response.statuses[0].current_limit, None);
    assert_eq!(response.response_headers_to_add, []);
}

#[tokio::test]
async fn a_store_that_fails_is_unavailable_if_the_policy_is_closed() {
    #[derive(Clone)]
    struct Down;

    impl Store for Down {
        fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
            StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "connection refused")))
        }
    }

    let file = file("down", CLOSED);
    let mut client = client(&file, Down).await;
    let status = client.should_rate_limit(request([descriptor(&LOGIN)])).await;
    assert_eq!(
        status.expect_err("the policy is closed").code(),
        StatusCode::Unavailable
    );
    let response = call(&mut client, request([descriptor(&ADDRESS)])).await;
    assert_eq!(codes(&response), (Code::Ok, vec![(Code::Ok, 99)]));
    fs::remove_file(file).expect("the file");

    // Those of the example are counted in the process.
    let mut client = self::client(LIMITS, Down).await;
    for code in [Code::Ok, Code::Ok, Code::OverLimit] {
        let response = call(&mut client, request([descriptor(&LOGIN)])).await;
        assert_eq!(response.overall_code(), code);
    }
}

#[tokio::test]
async fn a_request_that_fails_for_one_descriptor_is_counted_by_none() {
    /// Fails for logins alone.
    #[derive(Clone)]
    struct Partial(MemoryStore);

    impl Store for Partial {
        fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
            let mut charges = requests.iter().flat_map(|request| request.charges());
            match charges.any(|charge| charge.policy() == "shop.login.remote_address") {
                true => StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "connection refused"))),
                false => self.0.decide(requests),
            }
        }
    }

    let file = file("partial", CLOSED);
    let mut client = client(&file, Partial(MemoryStore::new())).await;
    let mut negative = request([descriptor(&ADDRESS), descriptor(&ADDRESS)]);
    negative.descriptors[1].is_negative_hits = true;
    for (failing, code) in [
        (
            request([descriptor(&ADDRESS), descriptor(&LOGIN)]),
            StatusCode::Unavailable,
        ),
        (negative, StatusCode::Unimplemented),
    ] {
        let status = client.should_rate_limit(failing).await.expect_err("it fails");
        assert_eq!(status.code(), code);
    }
    let response = call(&mut client, request([descriptor(&ADDRESS)])).await;
    assert_eq!(codes(&response), (Code::Ok, vec![(Code::Ok, 99)]));
    fs::remove_file(file).expect("the file");
}

#[tokio::test]
async fn of_several_denials_the_longest_is_shown() {
    let file = file(
        "denials",
        "policies.'shop.minute'.limit = '1/min'\npolicies.'shop.hour'.limit = '1/h'",
    );
    let mut client = client(&file, MemoryStore::new()).await;
    // The first one is in other spellings, and a name without a policy is admitted.
    let entries = [("generic_key", "Minute"), ("generic_key", "hour"), ("Path", "/")];
    let mut both = request(entries.map(|entry| descriptor(&[entry])));
    both.domain = "Shop".into();
    assert_eq!(call(&mut client, both.clone()).await.overall_code(), Code::Ok);
    let denied = call(&mut client, both).await;
    let denials: Vec<_> = denied.statuses.iter().map(DescriptorStatus::code).collect();
    assert_eq!(denials, [Code::OverLimit, Code::OverLimit, Code::Ok]);
    let mut fields = denied.response_headers_to_add.iter();
    let wait = fields.find(|field| field.key == "retry-after").expect("a wait");
    assert_eq!(wait.value.len(), "3600".len(), "{}", wait.value);
    fs::remove_file(file).expect("the file");
}

#[tokio::test]
async fn limits_follow_the_file() {
    let folder = std::env::temp_dir().join(format!("tower-quota-envoy-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let file = folder.join("limits.toml");
    let write =
        |quota| fs::write(&file, format!("policies.\"shop.remote_address\".limit = '{quota}/h'")).expect("a file");
    write(1);
    let mut client = client(file.to_str().expect("text"), MemoryStore::new()).await;
    let mut remaining = async || codes(&call(&mut client, request([descriptor(&ADDRESS)])).await).1[0];
    assert_eq!(remaining().await, (Code::Ok, 0));
    assert_eq!(remaining().await, (Code::OverLimit, 0));

    write(1_000);
    while remaining().await.0 == Code::OverLimit {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    // A limit that was not there at the start.
    let added = "policies.\"shop.search.remote_address\".limit = '1/h'";
    fs::write(&file, added).expect("a file");
    let search = [("generic_key", "search"), ADDRESS[0]];
    while call(&mut client, request([descriptor(&search)])).await.overall_code() == Code::Ok {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    fs::remove_dir_all(folder).expect("the folder");
}

/// As in the first example of the configuration of Envoy's own service.
#[tokio::test]
async fn a_value_may_have_a_limit_of_its_own() {
    let limits = "policies.\"db.database\".limit = '1/month UTC'\npolicies.\"db.database--users\".limit = '3/s'\n\
                  policies.\"db.database--users.role\".limit = '4/s'\npolicies.\"db.database.path\".limit = '5/s'";
    let file = file("values", limits);
    let mut client = client(&file, MemoryStore::new()).await;
    let mut limit = async |entries: &[(&str, &str)]| {
        let request = RateLimitRequest {
            domain: "db".into(),
            ..request([descriptor(entries)])
        };
        let response = call(&mut client, request).await;
        response.statuses[0]
            .current_limit
            .as_ref()
            .map(|limit| limit.requests_per_unit)
    };
    assert_eq!(limit(&[("database", "users")]).await, Some(3));
    assert_eq!(limit(&[("DATABASE", "users")]).await, Some(3));
    assert_eq!(limit(&[("database", "user")]).await, Some(1));
    assert_eq!(limit(&[("database", "users"), ("role", "reader")]).await, Some(4));
    // What a client chooses leads to no name of other keys, nor past the policy of these.
    assert_eq!(limit(&[("database", "path")]).await, Some(1));
    assert_eq!(limit(&[("database", "users.role")]).await, Some(1));
    for database in ["path", "users", "users.path", "other"] {
        assert_eq!(
            limit(&[("database", database), ("path", "/")]).await,
            Some(5),
            "{database}"
        );
    }
    fs::remove_file(file).expect("the file");
}

/// A limit that a filter computes for a request may be stricter than that of the file.
#[tokio::test]
async fn a_limit_of_the_request_is_not_ignored() {
    let mut client = client(LIMITS, MemoryStore::new()).await;
    let mut request = request([descriptor(&ADDRESS)]);
    request.descriptors[0].limit = Some(RateLimitOverride::default());
    let error = client.should_rate_limit(request).await.expect_err("it has no effect");
    assert_eq!(error.code(), StatusCode::Unimplemented);
}

/// Envoy keeps its connections open.
#[tokio::test]
async fn the_service_ends_while_a_client_is_connected() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    let (end, ended) = oneshot::channel::<()>();
    let served = tokio::spawn(async move {
        let served = envoy::serve(LIMITS, MemoryStore::new(), listener, async { drop(ended.await) });
        served.await.map_err(|error| error.to_string())
    });
    let client = Client::connect(format!("http://{addr}")).await;
    let mut client = client.expect("the service runs");
    let decided = client.should_rate_limit(request([descriptor(&ADDRESS)])).await;
    assert!(decided.is_ok(), "{decided:?}");
    end.send(()).expect("the service runs");
    let ended = timeout(Duration::from_secs(20), served).await;
    assert_eq!(ended.expect("it ends").expect("without a panic"), Ok(()));
}
