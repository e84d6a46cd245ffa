//! One subject of a policy: reads and resets its counts.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::http::StatusCode;
use serde_json::{Value, json};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    Admin,
    message::AdminError,
    selected::{Selected, WatchedPolicy},
};
use crate::{
    Decision, Denial, Key, Limit, Policy, PolicyDecision,
    decide::{self, Undecided, Waiting},
    key::Secret,
    store::{ErrorKind, NamedLimit, NodeState, NodeStatus, Operation, OverrideError, Store, StoreError, StoreRequest},
    sync::lock,
};

/// The most limits of a policy whose counts are read for one request, since a policy may choose any number of limits.
const MOST: usize = 20;

/// Reads the counts of a key of a policy in a store, of each limit that the policy has there.
pub(super) async fn peek(selected: &Selected) -> Result<Vec<Value>, AdminError> {
    let (key, mut counts) = (&selected.key, Vec::new());
    let checks_error = checks_error(&selected.policy);
    for (policy, own) in limits(selected).into_iter().take(MOST) {
        let overriding = policy.policy.overriding(&policy.context, &own.limit, key);
        let limit = overriding.as_ref().unwrap_or(own);
        let mut of_limit = peek_one(policy, limit, key).await?;
        if limit.limit.is_counted() && of_limit["store_error"].is_null() {
            of_limit["store_error"] = checks_error.as_deref().into();
        }
        // The limit of the policy that an override replaces by this one.
        of_limit["in_place_of"] = overriding.is_some().then(|| own.limit.to_string()).into();
        counts.push(of_limit);
    }
    Ok(counts)
}

/// Why checks fail on all nodes, although counts may be read: a Redis that is full or a replica refuses writes.
fn checks_error(policy: &WatchedPolicy) -> Option<String> {
    let of_store = policy
        .context
        .store
        .status()
        .into_iter()
        .flat_map(|status| status.nodes);
    let mut nodes: Vec<_> = of_store.chain(policy.context.failover.status()).collect();
    let fails = |node: &NodeStatus| node.state != NodeState::Ok && node.failed > 0;
    // In a cluster the node of the key may be another one than that which fails.
    let failing = nodes.iter().all(fails).then(|| nodes.pop()).flatten()?;
    let place = failing
        .address
        .map_or(String::new(), |address| format!(" at {address}"));
    Some(format!("checks fail{place}: {}", failing.error?))
}

/// Removes all counts of a key of a policy in a store, and its bans. Returns whether there is anything to reset.
pub(super) async fn reset(selected: &Selected) -> Result<bool, AdminError> {
    let key = &selected.key;
    // Limits of one shape share the counts of a key.
    let mut done = Vec::new();
    // While the store fails, each removes what this process has counted in its place.
    let mut result = Ok(());
    for policy in selected.sharing() {
        for limit in policy.policy.counted_limits((&policy.context, policy.position), key) {
            let counts = (limit.shape, policy.ban());
            if !done.contains(&counts) {
                let reset = perform(Operation::Reset, undecided(policy, &limit, key)).await;
                result = result.and(reset.map(drop));
                done.push(counts);
            }
        }
    }
    result?;
    Ok(!done.is_empty())
}

/// An error if no limit of the policy counts now, so that at most bans were reset.
pub(super) fn require_counts(selected: &Selected, is_reset: bool) -> Result<(), AdminError> {
    let known = || {
        selected
            .sharing()
            .flat_map(|of| of.limits.iter().map(move |own| (of, own)))
    };
    let counts = |(of, own): (&WatchedPolicy, &Arc<NamedLimit>)| {
        let overriding = of.policy.overriding(&of.context, &own.limit, &selected.key);
        own.limit.is_counted() || overriding.is_some_and(|limit| limit.limit.is_counted())
    };
    if known().any(counts) {
        return Ok(());
    }
    let reason = if known().next().is_none() {
        "no limit of this policy is known, since no request has chosen one in this process yet"
    } else {
        "no limit of this policy counts now; if it had one before, its counts stay until they expire or it has that again"
    };
    let done = if is_reset {
        "only bans are reset"
    } else {
        "nothing is reset"
    };
    Err(AdminError::new(StatusCode::CONFLICT, format!("{done}: {reason}")))
}

/// Sets the limit of a key of a policy in a store for so long, in the name of an operator, or ends its override without a limit.
pub(super) async fn set_override(
    selected: &Selected,
    limit: Option<(Limit, Duration)>,
    actor: &str,
) -> Result<(), AdminError> {
    let policy = &selected.policy;
    let refused = |error: StoreError| AdminError::new(StatusCode::CONFLICT, error.to_string());
    let overrides = policy.context.require_overrides().map_err(refused)?;
    if let Some((limit, _)) = &limit {
        Policy::accept_override(selected.sharing().map(|of| &of.policy), limit)?;
    }
    let set = overrides
        .set(policy.policy.counted_as(), &selected.key, limit, Some(actor))
        .await;
    set.map_err(|error| match error {
        OverrideError::Refused(error) => refused(error),
        OverrideError::Unconfirmed(error) => {
            let message = format!("the store has not confirmed the change of the override: {error}");
            AdminError::new(StatusCode::SERVICE_UNAVAILABLE, message)
        }
    })
}

/// The limits of a policy in a store, each once.
///
/// Layers and limiters on one store share the counts of a policy, and may have it with other numbers or with bans.
fn limits(selected: &Selected) -> Vec<(&WatchedPolicy, &Arc<NamedLimit>)> {
    let mut limits: Vec<(&WatchedPolicy, &Arc<NamedLimit>)> = Vec::new();
    for policy in selected.sharing() {
        for limit in &policy.limits {
            let is_same = |(other, known): &(&WatchedPolicy, &Arc<NamedLimit>)| {
                let observes = |policy: &WatchedPolicy| policy.in_context().observes(&selected.key);
                known.limit == limit.limit && other.ban() == policy.ban() && observes(other) == observes(policy)
            };
            if !limits.iter().any(is_same) {
                limits.push((policy, limit));
            }
        }
    }
    limits
}

async fn peek_one(policy: &WatchedPolicy, limit: &Arc<NamedLimit>, key: &Key) -> Result<Value, AdminError> {
    let decision = match limit.limit == Limit::Unlimited {
        true => None,
        false => Some(perform(Operation::Peek, undecided(policy, limit, key)).await?),
    };
    let store_error = decision
        .as_ref()
        .and_then(Decision::store_error)
        .map(ToString::to_string);
    let decided = decision.as_ref().and_then(|decision| decision.policies().next());
    if decision.is_some() && decided.is_none() {
        // The policy is `Open`.
        let error = store_error.unwrap_or_default();
        return Err(StoreError::new(ErrorKind::Unreachable, error).into());
    }
    let denial = decided.and_then(PolicyDecision::denial);
    // The wait of the decision may be that of the limit.
    let banned_for = match denial {
        Some(Denial::Banned) => banned_for(policy, limit, key).await,
        _ => None,
    };
    Ok(json!({
        "limit": limit.limit.to_string(),
        // Whether a request of the cost of the policy is admitted now.
        "allowed": denial.is_none(),
        // Why it is not, also by a policy that only observes.
        "denial": denial.map(|denial| denial.to_string()),
        // None without a limit.
        "quota": decided.map(PolicyDecision::limit),
        "remaining": decided.map(PolicyDecision::remaining),
        // The rest of the ban that is in force.
        "banned_for_seconds": banned_for.map(|rest| rest.as_secs_f64()),
        "retry_after_seconds": decided.and_then(PolicyDecision::retry_after).map(|wait| wait.as_secs_f64()),
        "reset_after_seconds": decided.map_or(0.0, |decided| decided.reset_after().as_secs_f64()),
        "observed": policy.in_context().observes(key),
        // Whether this process has counted in place of the store.
        "counted_locally": store_error.is_some(),
        // Why it has, or why checks fail although the store has returned these counts.
        "store_error": store_error,
    }))
}

/// The rest of the ban of a key that is [bound](Key::bound); none if it is not banned. While the store fails it is that of this process.
pub(super) async fn banned_for(policy: &WatchedPolicy, limit: &Arc<NamedLimit>, key: &Key) -> Option<Duration> {
    let undecided = undecided(policy, limit, key);
    let undecided = undecided.as_slice().first()?;
    let peek = |store: &Arc<dyn Store>, charge| store.decide(&[StoreRequest::new(Operation::Peek, [charge])]);
    let response = match peek(&policy.context.store, &undecided.charge).await {
        Ok(response) => response,
        Err(_) => {
            let local = undecided.local_charge(Operation::Peek)?;
            peek(policy.context.failover.counts(), &local).await.ok()?
        }
    };
    response.outcomes().first()?.states().first()?.banned_for()
}

fn undecided(policy: &WatchedPolicy, limit: &Arc<NamedLimit>, key: &Key) -> Undecided {
    let cost = policy.in_context().settings.fixed_cost().unwrap_or(1);
    let (context, key) = (policy.context.clone(), key.clone());
    let undecided = PolicyDecision::undecided(context, policy.position, limit.clone(), (key, cost), Waiting::default());
    Undecided::new(SmallVec::from_buf([undecided]))
}

async fn perform(operation: Operation, mut undecided: Undecided) -> Result<Decision, StoreError> {
    if operation == Operation::Peek {
        undecided.enter_lines();
    }
    decide::begin(operation, undecided).decided().await
}

/// Names subjects.
#[derive(Clone)]
pub(super) struct SubjectNames {
    /// Whether a name is the key itself.
    pub(super) show_keys: bool,
    hashed_by: Arc<Mutex<HashSecret>>,
}

/// The secret of the hashes of subjects.
struct HashSecret {
    secret: Secret,
    /// Its bytes, unless the application has set it.
    bytes: Option<[u8; 32]>,
    /// When the store is asked for it the next time.
    ask_at: Instant,
    /// Whether other processes have it too.
    is_shared: bool,
    /// Why the store has not returned it the last time.
    error: Option<String>,
}

/// The length of a hash in a response. Two of a million subjects have one hash with a probability of 3 in 100 million.
const BYTES: usize = 8;

/// How long the secret of a store is taken for that of all processes. After that Redis may have lost it, and have another one.
const ASKED_EVERY: Duration = Duration::from_secs(60);
/// The pause after the store has failed.
const PAUSE: Duration = Duration::from_secs(10);

impl SubjectNames {
    pub(super) fn new() -> Self {
        let bytes = Secret::random_bytes();
        Self::with(Secret::of_subjects(&bytes), Some(bytes))
    }

    fn with(secret: Secret, bytes: Option<[u8; 32]>) -> Self {
        Self {
            show_keys: false,
            hashed_by: Arc::new(Mutex::new(HashSecret {
                secret,
                bytes,
                ask_at: Instant::now(),
                is_shared: bytes.is_none(),
                error: None,
            })),
        }
    }

    pub(super) fn share(&mut self, secret: Secret) {
        self.hashed_by = Self::with(secret, None).hashed_by;
    }

    /// Whether other processes name a subject by the same hash; and why the store has not returned the secret the last time.
    pub(super) fn are_shared(&self) -> (bool, Option<String>) {
        let own = lock(&self.hashed_by);
        (own.is_shared, own.error.clone())
    }

    /// Takes the secret from the first store that has one for all processes, unless the application has set it.
    pub(super) async fn share_by(&self, admin: &Admin) {
        let known = {
            let own = lock(&self.hashed_by);
            own.bytes.filter(|_| own.ask_at <= Instant::now())
        };
        let mut stores = admin
            .watched
            .iter()
            .map(|set| set.newest().context.here().store.clone());
        let Some(secret) = known.and_then(|known| stores.find_map(|store| store.shared_secret(known))) else {
            return;
        };
        let secret = secret.await;
        let mut own = lock(&self.hashed_by);
        own.error = secret.as_ref().err().map(ToString::to_string);
        own.ask_at = Instant::now() + if secret.is_ok() { ASKED_EVERY } else { PAUSE };
        if let Ok(bytes) = secret {
            (own.secret, own.bytes, own.is_shared) = (Secret::of_subjects(&bytes), Some(bytes), true);
        }
    }

    /// Whether a text can be the hash of a subject.
    pub(super) fn is_hash(text: &str) -> bool {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        text.len() == 2 * BYTES && text.bytes().all(is_digit)
    }

    /// The name of a key that is [bound](Key::bound).
    pub(super) fn name(&self, key: &Key) -> String {
        if self.show_keys {
            return key.readable();
        }
        self.hash(key)
    }

    /// The hash of a key that is [bound](Key::bound).
    pub(super) fn hash(&self, key: &Key) -> String {
        let digest = lock(&self.hashed_by).secret.digest(key.as_bytes());
        digest[..BYTES].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_of_one_process_and_of_one_key() {
        let (names, others) = (SubjectNames::new(), SubjectNames::new());
        let (one, other) = (Key::from("1"), Key::from("2"));
        assert_eq!(names.name(&one), names.clone().name(&one));
        assert_ne!(names.name(&one), names.name(&other));
        assert_ne!(names.name(&one), others.name(&one));
        assert_eq!(names.name(&one).len(), 16);
    }
}
