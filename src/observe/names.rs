//! The names of the metrics, with their units and descriptions.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

/// Metrics, each with the macro that describes it, its name, its unit and its description.
macro_rules! metrics {
    ($($describe:ident $metric:ident = $name:literal, $unit:ident, $description:literal;)+) => {
        $(pub(super) const $metric: &str = $name;)+

        /// Passes the units and descriptions to the recorder.
        pub(super) fn describe() {
            $($describe!($metric, Unit::$unit, $description);)+
        }
    };
}

metrics! {
    describe_counter DECISIONS = "tower_quota_decisions_total", Count,
        "Requests by what a policy has done with them";
    describe_counter NEAR_LIMIT = "tower_quota_near_limit_total", Count,
        "Admitted requests after which a threshold of the quota, by default 80 %, is used";
    describe_gauge LIMITS_HASH = "tower_quota_limits_hash", Count,
        "Hash of the limits in force, which is the same in replicas with the same limits";
    describe_gauge SLOTS_HELD = "tower_quota_slots_held", Count,
        "Slots of a concurrency limit that requests of this process hold";
    describe_gauge REQUESTS_WAITING = "tower_quota_requests_waiting", Count,
        "Admitted requests that wait for their turn";
    describe_histogram WAIT_DURATION = "tower_quota_wait_duration_seconds", Seconds,
        "Time for which admitted requests have waited for their turn";
    describe_histogram CHECK_DURATION = "tower_quota_check_duration_seconds", Seconds,
        "Time from a check to the reply of the store";
    describe_counter STORE_ERRORS = "tower_quota_store_errors_total", Count,
        "Checks that the store failed, by the kind of the error";
    describe_counter LOST_SETTLEMENTS = "tower_quota_lost_settlements_total", Count,
        "Refunds and later charges that no store has confirmed";
    describe_histogram CALL_REQUESTS = "tower_quota_redis_call_requests", Count,
        "Requests that one script call has decided";
    describe_counter REDIS_CHECKS = "tower_quota_redis_checks_total", Count,
        "Checks that were sent to a server of Redis, by their outcome";
    describe_counter DENY_CACHE_HITS = "tower_quota_deny_cache_hits_total", Count,
        "Checks that the deny cache has denied";
    describe_gauge BREAKERS_OPEN = "tower_quota_breakers_open", Count,
        "Breakers that are open, since Redis does not reply";
    describe_counter EVICTIONS = "tower_quota_memory_evictions_total", Count,
        "Keys that a full memory store has evicted before they expired";
    describe_gauge FILE_HASH = "tower_quota_file_hash", Count,
        "Hash of the file of limits in force, which is the same in replicas with the same content";
    describe_gauge FILE_LOADED = "tower_quota_file_loaded_timestamp_seconds", Seconds,
        "Time of the last load of the file of limits, since the Unix epoch";
    describe_gauge FILE_REFUSED = "tower_quota_file_refused", Count,
        "1 if the newest content of the file of limits is refused or not seen, else 0";
}
