//! What a layer or a limiter decides by, replaced by each load of its files.

use std::sync::{Arc, Weak};

use arc_swap::{ArcSwap, Guard};

use super::follow::{File, Load, Subscriber, lock_loads};
use crate::{
    ConfigError,
    policy::{Basis, Policy, PolicyKey},
};

/// The [`Basis`] of a layer or a limiter with policies that follow files. A load of a file replaces it.
pub(crate) struct Live<K> {
    basis: ArcSwap<Basis<K>>,
}

impl<K: PolicyKey> Live<K> {
    /// Builds it of the policies as of the last loads of their files.
    pub(crate) fn new(
        mut policies: Vec<Policy<K>>,
        build: impl FnOnce(Vec<Policy<K>>) -> Result<Basis<K>, ConfigError>,
    ) -> Result<Arc<Self>, ConfigError> {
        let _loads = lock_loads();
        for file in files(&policies) {
            file.with_load(|load| renew(&mut policies, load));
        }
        build(policies).map(Self::follow)
    }

    /// Another one with a change. This one stays as it is, for clones of its layer.
    pub(crate) fn changed(&self, change: impl FnOnce(&mut Basis<K>)) -> Arc<Self> {
        let _loads = lock_loads();
        let mut basis = Basis::clone(&self.basis.load());
        change(&mut basis);
        Self::follow(basis)
    }

    fn follow(basis: Basis<K>) -> Arc<Self> {
        let files = files(&basis.policies);
        let live = Arc::new(Self {
            basis: ArcSwap::from_pointee(basis),
        });
        for file in files {
            let subscriber: Weak<Self> = Arc::downgrade(&live);
            file.subscribe(subscriber);
        }
        live
    }

    #[inline]
    pub(crate) fn newest(&self) -> Guard<Arc<Basis<K>>> {
        self.basis.load()
    }
}

impl<K: PolicyKey> Subscriber for Live<K> {
    fn prepare(self: Arc<Self>, load: &Load<'_>) -> Result<Box<dyn FnOnce()>, ConfigError> {
        let newest = self.basis.load();
        let mut policies = newest.policies.clone();
        renew(&mut policies, load);
        let renewed = newest.renewed(policies)?;
        Ok(Box::new(move || {
            renewed.context.register_metrics();
            renewed.context.log_conflict();
            self.basis.store(Arc::new(renewed));
        }))
    }
}

/// The files that policies follow, each of them once.
fn files<K>(policies: &[Policy<K>]) -> Vec<Arc<File>> {
    let mut files = Vec::<Arc<File>>::new();
    for (file, _) in policies.iter().filter_map(Policy::followed) {
        if !files.iter().any(|other| Arc::ptr_eq(other, file)) {
            files.push(file.clone());
        }
    }
    files
}

/// Gives those of the policies that follow the file what it has about them.
fn renew<K: PolicyKey>(policies: &mut [Policy<K>], load: &Load<'_>) {
    for policy in policies {
        let place = policy.followed().filter(|(file, _)| std::ptr::eq(&***file, load.file));
        if let Some(described) = place.and_then(|(_, place)| load.used.get(&**place)) {
            described.renew(policy, load.config);
        }
    }
}
