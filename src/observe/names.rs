//! The names of the metrics, with their units and descriptions.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

pub(super) const DECISIONS: &str = "tower_quota_decisions_total";
pub(super) const NEAR_LIMIT: &str = "tower_quota_near_limit_total";
pub(super) const LIMITS_HASH: &str = "tower_quota_limits_hash";
pub(super) const SLOTS_HELD: &str = "tower_quota_slots_held";
pub(super) const REQUESTS_WAITING: &str = "tower_quota_requests_waiting";
pub(super) const WAIT_DURATION: &str = "tower_quota_wait_duration_seconds";
pub(super) const CHECK_DURATION: &str = "tower_quota_check_duration_seconds";
pub(super) const STORE_ERRORS: &str = "tower_quota_store_errors_total";
pub(super) const LOST_SETTLEMENTS: &str = "tower_quota_lost_settlements_total";
pub(super) const CALL_REQUESTS: &str = "tower_quota_redis_call_requests";
pub(super) const REDIS_CHECKS: &str = "tower_quota_redis_checks_total";
pub(super) const DENY_CACHE_HITS: &str = "tower_quota_deny_cache_hits_total";
pub(super) const BREAKERS_OPEN: &str = "tower_quota_breakers_open";
pub(super) const EVICTIONS: &str = "tower_quota_memory_evictions_total";
pub(super) const FILE_HASH: &str = "tower_quota_file_hash";
pub(super) const FILE_LOADED: &str = "tower_quota_file_loaded_timestamp_seconds";
pub(super) const FILE_REFUSED: &str = "tower_quota_file_refused";

/// Passes the units and descriptions to the recorder.
pub(super) fn describe() {
    describe_counter!(DECISIONS, Unit::Count, "Requests by what a policy has done with them");
    describe_counter!(
        NEAR_LIMIT,
        Unit::Count,
        "Admitted requests after which a threshold of the quota, by default 80 %, is used"
    );
    describe_gauge!(
        LIMITS_HASH,
        Unit::Count,
        "Hash of the limits in force, which is the same in replicas with the same limits"
    );
    describe_gauge!(
        SLOTS_HELD,
        Unit::Count,
        "Slots of a concurrency limit that requests of this process hold"
    );
    describe_gauge!(
        REQUESTS_WAITING,
        Unit::Count,
        "Admitted requests that wait for their turn"
    );
    describe_histogram!(
        WAIT_DURATION,
        Unit::Seconds,
        "Time for which admitted requests have waited for their turn"
    );
    describe_histogram!(
        CHECK_DURATION,
        Unit::Seconds,
        "Time from a check to the reply of the store"
    );
    describe_counter!(
        STORE_ERRORS,
        Unit::Count,
        "Checks that the store failed, by the kind of the error"
    );
    describe_counter!(
        LOST_SETTLEMENTS,
        Unit::Count,
        "Refunds and later charges that no store has confirmed"
    );
    describe_histogram!(CALL_REQUESTS, Unit::Count, "Requests that one script call has decided");
    describe_counter!(
        REDIS_CHECKS,
        Unit::Count,
        "Checks that were sent to a server of Redis, by their outcome"
    );
    describe_counter!(DENY_CACHE_HITS, Unit::Count, "Checks that the deny cache has denied");
    describe_gauge!(
        BREAKERS_OPEN,
        Unit::Count,
        "Breakers that are open, since Redis does not reply"
    );
    describe_counter!(
        EVICTIONS,
        Unit::Count,
        "Keys that a full memory store has evicted before they expired"
    );
    describe_gauge!(
        FILE_HASH,
        Unit::Count,
        "Hash of the file of limits in force, which is the same in replicas with the same content"
    );
    describe_gauge!(
        FILE_LOADED,
        Unit::Seconds,
        "Time of the last load of the file of limits, since the Unix epoch"
    );
    describe_gauge!(
        FILE_REFUSED,
        Unit::Count,
        "1 if the newest content of the file of limits is refused or not seen, else 0"
    );
}
