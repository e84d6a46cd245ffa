//! What happens to calls in a simulated network.

use std::time::Duration;

use fastrand::Rng;

/// The probability of each fault of a call, in a thousandth.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::store::redis) struct Faults {
    /// The call does not arrive, and the connection stays open.
    pub(super) request_lost: u32,
    /// The call is executed, and the reply does not arrive.
    pub(super) reply_lost: u32,
    /// The connection breaks before the call arrives.
    pub(super) cut_before: u32,
    /// The connection breaks after the call was executed.
    pub(super) cut_after: u32,
    /// The server replies with an error and does nothing.
    pub(super) error: u32,
    /// The server replies that it has only some of the keys.
    pub(super) try_again: u32,
    /// Some slots of the call have moved to another server.
    pub(super) moved: u32,
    /// One request of the call meets an error.
    pub(super) request_error: u32,
    /// The server forgets its scripts.
    pub(super) flush: u32,
    /// The clock of the server is set by up to 20 s.
    pub(super) clock_step: u32,
    /// The call or its reply takes longer than the deadline.
    pub(super) slow: u32,
    /// The call is executed a second time, later.
    pub(super) duplicate: u32,
}

impl Faults {
    /// Calls and replies that are lost, late and refused at random.
    pub(in crate::store::redis) fn at_random(rng: &mut Rng) -> Self {
        let mut chance = || [0, 0, 20, 100][rng.usize(..4)];
        Self {
            request_lost: chance(),
            reply_lost: chance(),
            cut_before: chance(),
            cut_after: chance(),
            error: chance(),
            slow: chance(),
            ..Self::default()
        }
    }
}

/// What happens to a call.
#[derive(Clone, Debug)]
pub(super) struct Fate {
    pub(super) there: Duration,
    pub(super) back: Duration,
    pub(super) event: Event,
    pub(super) flush: bool,
    pub(super) clock_step: i64,
    /// How much later the call is executed a second time.
    pub(super) duplicate: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Event {
    Nothing,
    RequestLost,
    ReplyLost,
    CutBefore,
    CutAfter,
    Error,
    TryAgain,
    /// Those of a random half.
    Moved,
    RequestError,
}

impl Fate {
    /// The fate of a call with this number of keys.
    pub(super) fn new(faults: &Faults, keys: usize, rng: &mut Rng) -> Self {
        let Faults {
            request_lost,
            reply_lost,
            cut_before,
            cut_after,
            error,
            try_again,
            moved,
            request_error,
            flush,
            clock_step,
            slow,
            duplicate,
        } = *faults;
        let mut event = Event::Nothing;
        for (chance, possible) in [
            (request_lost, Event::RequestLost),
            (reply_lost, Event::ReplyLost),
            (cut_before, Event::CutBefore),
            (cut_after, Event::CutAfter),
            (error, Event::Error),
            (try_again, Event::TryAgain),
            (moved, Event::Moved),
            (if keys > 0 { request_error } else { 0 }, Event::RequestError),
        ] {
            if rng.u32(..1_000) < chance {
                event = possible;
                break;
            }
        }
        let mut delay = |slow| Duration::from_micros(if slow { rng.u64(..150_000) } else { rng.u64(..2_000) });
        let (there, back) = (delay(false), delay(false));
        let (there, back) = match rng.u32(..1_000) < slow {
            true => (there + Duration::from_micros(rng.u64(..150_000)), back),
            false => (there, back),
        };
        let duplicated = duplicate > 0 && rng.u32(..1_000) < duplicate;
        Self {
            there,
            back,
            event,
            flush: rng.u32(..1_000) < flush,
            clock_step: match rng.u32(..1_000) < clock_step {
                true => rng.i64(-20_000_000..20_000_000),
                false => 0,
            },
            duplicate: duplicated.then(|| Duration::from_micros(rng.u64(..300_000))),
        }
    }
}
