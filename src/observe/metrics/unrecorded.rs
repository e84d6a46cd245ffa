//! The types and functions of `recorded.rs`, empty.

use std::sync::Arc;

use super::PolicyOutcome;
use crate::error::ErrorKind;

pub(crate) const ENABLED: bool = false;

#[derive(Clone)]
pub(crate) struct PolicyMetrics;

impl PolicyMetrics {
    pub(crate) fn new(_: Arc<str>) -> Self {
        Self
    }

    pub(crate) fn count(&self, _: PolicyOutcome) {}

    pub(crate) fn near_limit(&self) {}

    pub(crate) fn hold(&self, _: u64) -> HeldSlots {
        HeldSlots
    }

    pub(crate) fn wait(&self) -> WaitingRequest {
        WaitingRequest
    }
}

pub(crate) struct HeldSlots;

pub(crate) struct WaitingRequest;

#[derive(Clone, Default)]
pub(crate) struct CheckMetrics(());

impl CheckMetrics {
    pub(crate) fn end(&self, _: Option<Began>) {}

    pub(crate) fn failed(&self, _: ErrorKind) {}
}

#[derive(Clone, Copy)]
pub(crate) struct Began;

impl Began {
    pub(crate) fn now() -> Self {
        Self
    }
}

#[derive(Default)]
pub(crate) struct RedisMetrics(());

impl RedisMetrics {
    pub(crate) fn call(&self, _: u64) {}

    pub(crate) fn deny_cache_hit(&self) {}
}

#[derive(Default)]
pub(crate) struct NodeMetrics(());

impl NodeMetrics {
    pub(crate) fn new(_: &str) -> Self {
        Self(())
    }

    pub(crate) fn decided(&self, _: u64) {}

    pub(crate) fn failed(&self, _: u64) {}

    pub(crate) fn failed_by_key(&self, _: u64) {}
}

#[derive(Default)]
pub(crate) struct MemoryMetrics(());

impl MemoryMetrics {
    pub(crate) fn evicted(&self, _: u64) {}
}

pub(crate) fn lost_settlement() {}

pub(crate) fn breaker_opened() {}

pub(crate) fn breaker_closed() {}
