//! What a schedule contains.

use std::time::Duration;

use fastrand::Rng;

use super::faults::Faults;
use crate::store::Operation;

/// The deadline of all simulated stores.
pub(super) const DEADLINE: Duration = Duration::from_millis(100);

/// The contents of a schedule.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) clustered: bool,
    /// Whether a call can reach several slots of a node.
    pub(super) reaches_several_slots: bool,
    pub(super) runtimes: usize,
    /// How many runtimes end while the faults last.
    pub(super) endings: usize,
    /// How many runtimes are stalled while the faults last.
    pub(super) stalls: usize,
    pub(super) faults: Faults,
    /// Whether counts of shared keys are reset.
    pub(super) resets: bool,
    /// The number of processes that take slots. If it is above 1, all requests do.
    pub(super) processes: usize,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            clustered: false,
            reaches_several_slots: false,
            runtimes: 1,
            endings: 0,
            stalls: 0,
            faults: Faults::default(),
            resets: false,
            processes: 1,
        }
    }
}

impl Plan {
    /// The limit of the shared keys.
    pub(super) const QUOTA: u64 = 5;
    pub(super) const WINDOW: Duration = Duration::from_millis(400);
    pub(super) const WINDOW_US: u64 = Self::WINDOW.as_micros() as u64;
    /// What a request with a receipt is checked for.
    pub(super) const ESTIMATE: u64 = 10;
    /// The denials after which a key is banned, and for how long at first.
    pub(super) const DENIALS: u64 = 2;
    pub(super) const BAN: Duration = Duration::from_millis(50);
    /// The limit of the shared slots.
    pub(super) const SLOTS: u64 = 2;
    pub(super) const LEASE: Duration = Duration::from_secs(1);
    /// The longest wait for a slot. Places are refreshed each second.
    pub(super) const SLOT_WAIT: Duration = Duration::from_millis(2_500);
    /// The time of requests and faults.
    pub(super) const LASTS: Duration = Duration::from_millis(1_500);
    /// The time after the faults in which checks succeed again: a request replaces a probe that has ended, the new one waits and
    /// sends, and its reply closes the breaker.
    pub(super) const RECOVERS: Duration = Duration::from_secs(1);
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// A check of a shared key, which often denies.
    Shared,
    /// A check of a key of its own, which has room.
    Own,
    OwnCharge,
    /// A check of two keys of its own in one slot.
    OwnPair,
    /// A check of an estimate on a key of its own, whose receipt is settled.
    Settled {
        actual: u64,
    },
    /// A check of a slot of a shared key, which is held for so long. It may wait for the slot.
    Held {
        lasts: Duration,
        waits: bool,
    },
    /// A check of a shared key with bans, which often begin.
    Banned,
    /// A check of a shared key with windows of a calendar.
    Calendar,
    Peek,
    Reset,
    /// A check of two keys of its own and of one that denies, in three slots.
    Across,
}

impl Kind {
    pub(super) fn any(rng: &mut Rng, plan: &Plan) -> Self {
        let held = |rng: &mut Rng| Self::Held {
            // Past the lease, so that it is renewed.
            lasts: Duration::from_micros(rng.u64(..1_800_000)),
            waits: rng.bool(),
        };
        if plan.processes > 1 {
            return held(rng);
        }
        match rng.u32(..100) {
            ..45 => Self::Shared,
            45..54 => Self::Own,
            54..60 => Self::Banned,
            60..65 => Self::OwnCharge,
            65..68 => held(rng),
            68..70 => Self::Settled {
                actual: [0, 4, Plan::ESTIMATE, 25][rng.usize(..4)],
            },
            70..80 => Self::OwnPair,
            80..85 => Self::Calendar,
            85..92 => Self::Peek,
            92.. if plan.clustered => Self::Across,
            92.. if plan.resets => Self::Reset,
            _ => Self::Own,
        }
    }

    pub(super) fn operation(self) -> Operation {
        match self {
            Self::OwnCharge => Operation::Charge,
            Self::Peek => Operation::Peek,
            Self::Reset => Operation::Reset,
            Self::Shared
            | Self::Own
            | Self::OwnPair
            | Self::Settled { .. }
            | Self::Held { .. }
            | Self::Banned
            | Self::Calendar
            | Self::Across => Operation::Check,
        }
    }
}
