use std::ops::Deref;
#[cfg(feature = "redis")]
use std::sync::Arc;

use crate::store::health::Node;

/// The health of the server of a slot.
pub(in crate::store::redis) enum NodeOfSlot<'a> {
    Fixed(&'a Node),
    #[cfg(feature = "redis")]
    Current(Arc<Node>),
}

impl Deref for NodeOfSlot<'_> {
    type Target = Node;

    fn deref(&self) -> &Node {
        match self {
            Self::Fixed(node) => node,
            #[cfg(feature = "redis")]
            Self::Current(node) => node,
        }
    }
}
