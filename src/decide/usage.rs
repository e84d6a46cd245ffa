//! What admitted requests were charged in the end, for applications that invoice it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use super::{CheckContext, PolicyDecision, caught};
use crate::{
    Key,
    store::{Owed, OwedKind},
};

/// The units that a policy has charged an admitted request in the end: after refunds and settlements, also if the caller has left.
///
/// [`RateLimitLayer::on_settled`](crate::RateLimitLayer::on_settled) and [`Limiter::on_settled`](crate::Limiter::on_settled) observe
/// it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Usage<'a> {
    /// The name of the policy.
    pub policy: &'a str,
    /// The plan that the policy is of, if it is of one.
    pub plan: Option<&'a str>,
    /// The key that the request was counted under. One of more than 128 bytes is [hashed](Key::as_str): for an invoice, make keys of ids.
    pub key: &'a Key,
    /// The units: 0 if all of them were refunded. A refund or a settlement that the store has not confirmed is included.
    pub units: u64,
    /// When the request was admitted, by the clock of the store.
    pub admitted_at: SystemTime,
    /// Whether this process has counted them, since the store failed.
    pub is_local: bool,
}

pub(crate) type OnSettled = Arc<dyn Fn(&Usage<'_>) + Send + Sync>;

/// The account of an admitted request with a policy. Whatever may change it has a reference to it, so it is settled when the last one
/// is dropped.
pub(crate) struct Account {
    context: Arc<CheckContext>,
    position: usize,
    key: Key,
    admitted_at: SystemTime,
    is_local: bool,
    units: AtomicU64,
    /// Whether the caller had left before the request was admitted.
    is_void: AtomicBool,
    _owed: Owed,
}

impl Account {
    /// Opens accounts with the policies that have charged a request.
    #[cold]
    pub(super) fn open(policies: &mut [PolicyDecision]) {
        let charged = policies
            .iter_mut()
            .filter(|policy| policy.receipt.is_untaken() && !policy.is_observed());
        for policy in charged {
            policy.account = Some(Arc::new(Self {
                context: policy.context.clone(),
                position: policy.position,
                key: policy.charge.key.clone(),
                admitted_at: UNIX_EPOCH + policy.decided_at,
                is_local: policy.local.is_some(),
                units: AtomicU64::new(policy.charge.cost()),
                is_void: AtomicBool::new(false),
                _owed: policy.context.outstanding.owe(OwedKind::Settlement),
            }));
        }
    }

    /// Replaces a cost by what it was in fact.
    pub(super) fn replace(&self, cost: u64, actual: u64) {
        let others = self.units.load(Ordering::Relaxed).saturating_sub(cost);
        self.units.store(others.saturating_add(actual), Ordering::Relaxed);
    }

    pub(super) fn void(&self) {
        self.is_void.store(true, Ordering::Relaxed);
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let (false, Some(on_settled)) = (*self.is_void.get_mut(), &self.context.on_settled) else {
            return;
        };
        let policy = &self.context.policies[self.position];
        let usage = Usage {
            policy: &policy.limit.name,
            plan: policy.of_plan.as_deref(),
            key: &self.key,
            units: *self.units.get_mut(),
            admitted_at: self.admitted_at,
            is_local: self.is_local,
        };
        caught(|| on_settled(&usage));
    }
}
