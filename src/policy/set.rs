use std::sync::Arc;

use super::{
    Policy,
    access::{Access, Condition},
    list::{PolicyKey, context, validate_policies},
};
#[cfg(feature = "serde")]
use super::{
    list::listed,
    live::{Newest, Renewals},
};
use crate::{ConfigError, decision::CheckContext, store::Store};

/// The policies of a layer or a limiter: those that it was built with, or those after a reload of the file that they follow.
#[derive(Clone)]
pub(crate) struct PolicySet<K> {
    policies: Arc<[Policy<K>]>,
    context: Arc<CheckContext>,
    access: Option<Access>,
    /// The policies after a reload, if they follow a file.
    #[cfg(feature = "serde")]
    renewals: Option<Renewals<K>>,
}

impl<K: PolicyKey> PolicySet<K> {
    /// The policies, or the reason why they do not fit together.
    #[cfg_attr(not(feature = "serde"), expect(unused_mut, reason = "a file may have newer limits"))]
    pub(crate) fn new(store: impl Store, mut policies: Vec<Policy<K>>) -> Result<Self, ConfigError> {
        #[cfg(feature = "serde")]
        let renewals = Renewals::of(&mut policies);
        validate_policies(&policies)?;
        policies.iter().try_for_each(K::validate)?;

        Ok(Self {
            context: Arc::new(context(store, &policies)),
            #[cfg(feature = "serde")]
            access: Access::default().joined(&listed(&policies)),
            #[cfg(not(feature = "serde"))]
            access: None,
            #[cfg(feature = "serde")]
            renewals,
            policies: policies.into(),
        })
    }

    /// Applies the policies after the last reload.
    #[inline(always)]
    pub(crate) fn with_newest<R>(&self, apply: impl FnOnce(Basis<'_, K>) -> R) -> R {
        let built = Basis {
            policies: &self.policies,
            context: &self.context,
            access: self.access.as_ref(),
        };
        #[cfg(feature = "serde")]
        let newest = self.renewals.as_ref().and_then(|renewals| renewals.newest(&built));
        #[cfg(feature = "serde")]
        let built = newest.as_ref().and_then(Newest::basis).unwrap_or(built);
        apply(built)
    }

    /// Those that were built.
    pub(crate) fn policies(&self) -> &[Policy<K>] {
        &self.policies
    }

    /// The context of the checks that was built. A reload changes what depends on the policies, and nothing else.
    #[inline]
    pub(crate) fn context(&self) -> &CheckContext {
        &self.context
    }

    pub(crate) fn context_mut(&mut self) -> &mut CheckContext {
        #[cfg(feature = "serde")]
        if let Some(renewals) = &mut self.renewals {
            renewals.forget();
        }
        Arc::make_mut(&mut self.context)
    }

    /// Adds a condition to this list.
    pub(crate) fn add_condition(&mut self, list: fn(&mut Access) -> &mut Vec<Condition>, condition: Condition) {
        #[cfg(feature = "serde")]
        if let Some(renewals) = &mut self.renewals {
            list(&mut renewals.access).push(condition.clone());
            renewals.forget();
        }
        list(self.access.get_or_insert_default()).push(condition);
    }
}

/// What a layer or a limiter decides requests by. A reload replaces all of it at once.
pub(crate) struct Basis<'a, K> {
    pub(crate) policies: &'a [Policy<K>],
    pub(crate) context: &'a Arc<CheckContext>,
    /// What is decided without the policies, if anything is.
    pub(crate) access: Option<&'a Access>,
}

impl<K> Clone for Basis<'_, K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Basis<'_, K> {}
