use std::sync::Arc;

use arc_swap::{ArcSwapOption, Guard};
use smallvec::SmallVec;

use super::source::{Requirement, Snapshot, Source};
use crate::{
    decision::CheckContext,
    policy::{
        Basis, Policy,
        access::Access,
        list::{PolicyKey, contexts, is_composite, listed, waits},
    },
};

/// The newest policies of a layer or a limiter whose policies follow a file.
///
/// A request compares the revision of its policies with that of their source. The first request after a reload builds
/// the policies anew, all from one snapshot, so that none is decided by parts of two files.
pub(crate) struct Renewals<K> {
    sources: SmallVec<[Arc<Source>; 1]>,
    /// The revision of the policies that the layer was built with.
    built_at: u64,
    /// The conditions of the layer in code, which a reload keeps.
    pub(crate) access: Access,
    /// Clones share it, so that one that is made for a request builds nothing.
    newest: Arc<ArcSwapOption<Renewed<K>>>,
    /// A file that contradicts the settings in code of these policies is refused while this exists.
    requirement: Arc<Requirement>,
}

/// Policies after a reload, with the context of their checks.
struct Renewed<K> {
    revision: u64,
    policies: Arc<[Policy<K>]>,
    context: Arc<CheckContext>,
    access: Option<Access>,
}

/// Policies that stay while a request is decided by them.
pub(crate) struct Newest<K>(Guard<Option<Arc<Renewed<K>>>>);

impl<K> Newest<K> {
    pub(crate) fn basis(&self) -> Option<Basis<'_, K>> {
        let Renewed {
            policies,
            context,
            access,
            ..
        } = self.0.as_deref()?;
        Some(Basis {
            policies,
            context,
            access: access.as_ref(),
        })
    }
}

impl<K: PolicyKey> Renewals<K> {
    /// Brings policies up to date; `None` if none of them follows a file.
    pub(crate) fn of(policies: &mut [Policy<K>]) -> Option<Self> {
        let mut sources = SmallVec::<[Arc<Source>; 1]>::new();
        for origin in policies.iter().filter_map(|policy| policy.settings.origin.as_ref()) {
            if !sources.iter().any(|source| Arc::ptr_eq(source, &origin.source)) {
                sources.push(origin.source.clone());
            }
        }
        if sources.is_empty() {
            return None;
        }

        // Before they are brought up to date: a reload in between is refused, or seen.
        let requirement = requirement(policies);
        sources.iter().for_each(|source| source.require(&requirement));
        let built_at = renew(policies, &sources);
        Some(Self {
            sources,
            built_at,
            access: Access::default(),
            newest: Arc::default(),
            requirement,
        })
    }

    /// The newest policies, unless they are what the layer was `built` with.
    #[inline]
    pub(crate) fn newest(&self, built: &Basis<'_, K>) -> Option<Newest<K>> {
        let revision = match &self.sources[..] {
            [only] => only.revision(),
            several => several.iter().map(|source| source.revision()).sum(),
        };
        (self.built_at < revision).then(|| self.newest_of(revision, built))
    }

    fn newest_of(&self, revision: u64, built: &Basis<'_, K>) -> Newest<K> {
        let newest = self.newest.load();
        match newest.as_deref() {
            Some(renewed) if renewed.revision >= revision => Newest(newest),
            _ => Newest(Guard::from_inner(Some(self.renew(built)))),
        }
    }

    /// Forgets what was built with other settings of the layer.
    pub(crate) fn forget(&mut self) {
        self.newest = Arc::default();
    }

    #[cold]
    fn renew(&self, built: &Basis<'_, K>) -> Arc<Renewed<K>> {
        let mut renewed = built.policies.to_vec();
        let revision = renew(&mut renewed, &self.sources);
        let contexts = contexts(&renewed);
        let context = CheckContext {
            is_composite: is_composite(&contexts),
            waits: waits(&contexts),
            policies: contexts,
            ..CheckContext::clone(built.context)
        };
        let renewed = Arc::new(Renewed {
            revision,
            access: self.access.joined(&listed(&renewed)),
            policies: renewed.into(),
            context: Arc::new(context),
        });
        // Another request may have seen a newer snapshot.
        self.newest.rcu(|newest| match newest {
            Some(newest) if newest.revision >= revision => Some(newest.clone()),
            _ => Some(renewed.clone()),
        });
        renewed
    }
}

/// Replaces the terms of policies by the newest, and returns their revision: the sum of those of their sources.
fn renew<K: PolicyKey>(policies: &mut [Policy<K>], sources: &[Arc<Source>]) -> u64 {
    let snapshots: SmallVec<[_; 1]> = sources.iter().map(|source| (source, source.newest())).collect();
    for policy in policies {
        for (source, snapshot) in &snapshots {
            renew_from(policy, source, snapshot);
        }
    }
    snapshots.iter().map(|(_, snapshot)| snapshot.revision).sum()
}

/// Replaces the terms of a policy by those of a snapshot, if it is of this source.
fn renew_from<K: PolicyKey>(policy: &mut Policy<K>, source: &Source, snapshot: &Snapshot) {
    let Some(origin) = &policy.settings.origin else {
        return;
    };
    if !std::ptr::eq(&*origin.source, source) {
        return;
    }
    let has_key = origin.has_key;
    policy.settings.listed = snapshot.listed.clone();
    let Some(description) = snapshot.policies.get(policy.name()) else {
        return;
    };
    policy.settings.terms = description.terms.clone();
    if let (true, Some(key)) = (has_key, &description.key) {
        policy.key.replace(key);
    }
}

/// Refuses snapshots that contradict the settings in code of these policies.
fn requirement<K: PolicyKey>(policies: &[Policy<K>]) -> Arc<Requirement> {
    let policies = policies.to_vec();
    Arc::new(move |source, snapshot| {
        policies.iter().try_for_each(|policy| {
            let mut renewed = policy.clone();
            renew_from(&mut renewed, source, snapshot);
            renewed.validate_slots()?;
            K::validate(&renewed)
        })
    })
}

impl<K> Clone for Renewals<K> {
    fn clone(&self) -> Self {
        Self {
            sources: self.sources.clone(),
            built_at: self.built_at,
            access: self.access.clone(),
            newest: self.newest.clone(),
            requirement: self.requirement.clone(),
        }
    }
}
