use std::{ops::Deref, sync::Arc};

#[cfg(feature = "serde")]
use arc_swap::Guard;

use super::{
    Policy,
    access::Access,
    list::{PolicyKey, context, validate_policies},
    plans::PlanChoice,
};
#[cfg(feature = "serde")]
use super::{
    list::{contexts, listed},
    live::Live,
};
use crate::{ConfigError, decision::CheckContext, store::Store};

/// The policies of a layer or a limiter.
#[derive(Clone)]
pub(crate) enum PolicySet<K> {
    Fixed(Arc<Basis<K>>),
    /// They follow files.
    #[cfg(feature = "serde")]
    Live(Arc<Live<K>>),
}

/// What a layer or a limiter decides requests by.
#[derive(Clone)]
pub(crate) struct Basis<K> {
    pub(crate) policies: Vec<Policy<K>>,
    pub(crate) context: Arc<CheckContext>,
    /// How the plan of a request is found, if there are plans.
    pub(crate) plans: Option<Arc<PlanChoice>>,
    /// The requests that are skipped or blocked, if there are conditions.
    pub(crate) access: Option<Access>,
    /// Those of them that are conditions in code.
    own_access: Access,
}

impl<K: PolicyKey> PolicySet<K> {
    /// The policies, or the reason why they are not valid.
    pub(crate) fn new(store: impl Store, policies: Vec<Policy<K>>) -> Result<Self, ConfigError> {
        #[cfg(feature = "serde")]
        if policies.iter().any(|policy| policy.file().is_some()) {
            return Live::new(policies, |policies| Basis::new(store, policies)).map(Self::Live);
        }
        Basis::new(store, policies).map(Arc::new).map(Self::Fixed)
    }

    /// What requests are decided by now.
    #[inline(always)]
    pub(crate) fn newest(&self) -> Newest<'_, K> {
        match self {
            Self::Fixed(basis) => Newest::Fixed(basis),
            #[cfg(feature = "serde")]
            Self::Live(live) => Newest::Live(live.newest()),
        }
    }

    /// Changes the context, apart from what clones have.
    pub(crate) fn change_context(&mut self, change: impl FnOnce(&mut CheckContext)) {
        self.change(|basis| change(Arc::make_mut(&mut basis.context)));
    }

    /// Adds conditions on requests, apart from what clones have.
    pub(crate) fn change_access(&mut self, change: impl Fn(&mut Access)) {
        self.change(|basis| {
            change(&mut basis.own_access);
            change(basis.access.get_or_insert_default());
        });
    }

    fn change(&mut self, change: impl FnOnce(&mut Basis<K>)) {
        match self {
            Self::Fixed(basis) => change(Arc::make_mut(basis)),
            #[cfg(feature = "serde")]
            Self::Live(live) => *live = live.changed(change),
        }
    }
}

/// A basis, which a reload does not replace meanwhile.
pub(crate) enum Newest<'a, K> {
    Fixed(&'a Basis<K>),
    #[cfg(feature = "serde")]
    Live(Guard<Arc<Basis<K>>>),
}

impl<K> Deref for Newest<'_, K> {
    type Target = Basis<K>;

    #[inline(always)]
    fn deref(&self) -> &Basis<K> {
        match self {
            Self::Fixed(basis) => basis,
            #[cfg(feature = "serde")]
            Self::Live(basis) => basis,
        }
    }
}

impl<K: PolicyKey> Basis<K> {
    fn new(store: impl Store, policies: Vec<Policy<K>>) -> Result<Self, ConfigError> {
        validate_policies(&policies)?;
        Ok(Self {
            context: Arc::new(context(store, &policies)),
            #[cfg(feature = "serde")]
            access: Access::default().joined(&listed(&policies)),
            #[cfg(not(feature = "serde"))]
            access: None,
            own_access: Access::default(),
            plans: policies
                .iter()
                .find_map(|policy| Some(policy.plan.as_ref()?.choice.clone())),
            policies,
        })
    }

    /// The same with other terms of its policies.
    #[cfg(feature = "serde")]
    pub(super) fn renewed(&self, policies: Vec<Policy<K>>) -> Result<Self, ConfigError> {
        for policy in &policies {
            policy.validate_slots()?;
            K::validate(policy)?;
        }
        Ok(Self {
            context: Arc::new(self.context.with_policies(contexts(&policies))),
            access: self.own_access.joined(&listed(&policies)),
            own_access: self.own_access.clone(),
            plans: self.plans.clone(),
            policies,
        })
    }
}
