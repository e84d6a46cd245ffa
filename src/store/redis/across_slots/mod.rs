mod by_key;

use std::{sync::Arc, time::Duration};

use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;

use super::{
    key_format::slot_of_charge,
    queues::{CommitQueues, Decided},
    request::OwnedRequest,
    task::DetachOnDrop,
};
use crate::{
    observe::lost_settlement,
    store::{ChargeState, ErrorKind, Operation, Outcome, StoreError, StoreId, StoreResponse},
};

/// Decides requests with keys in several slots of a cluster, one slot after the other, since no script call can reach two nodes; and
/// those with several keys in a slot that is moving, one key after the other.
/// When a slot denies or fails, the charges in the earlier ones are refunded, even if the caller drops its future. Of those that a
/// call has not executed, each call declares all keys.
pub(super) async fn decide(
    queues: Arc<CommitQueues>,
    partly: Decided,
    made_at: Instant,
    declares_keys: bool,
) -> Result<StoreResponse, StoreError> {
    let store = (StoreId::of(&queues), queues.backend.runtime.clone());
    let decided = async move {
        let mut response = StoreResponse::new(partly.server_time, []);
        let mut failure = None;
        for (request, decided) in partly.requests.iter().zip(partly.outcomes) {
            let decided = match decided {
                // The time of the response may be that of another node.
                Some(decided) => decided.map(|outcome| outcome.at(partly.server_time)),
                None => {
                    let progress = Progress::new(&queues, request, declares_keys);
                    request.outcome(decide_one(progress, made_at, &mut response.server_time).await)
                }
            };
            match decided {
                Ok(outcome) => response.outcomes.push(outcome),
                Err(error) if matches!(request.operation, Operation::Check | Operation::Wait) => return Err(error),
                // Refunds and ends of leases in other slots do not depend on it.
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        failure.map_or(Ok(response), Err)
    };
    DetachOnDrop::refunding(store, decided).await
}

async fn decide_one(
    mut progress: Progress<'_>,
    made_at: Instant,
    server_time: &mut Duration,
) -> Result<Outcome, StoreError> {
    let Progress { queues, request, .. } = progress;
    let slots = by_slot(request);
    let is_across = slots.len() > 1;
    if request.is_check() && request.units > 1 && is_across {
        return Err(StoreError::invalid(
            "the units of a request are counted in one slot of the cluster; give the policies the same key",
        ));
    }
    if request.operation.decides() {
        check_breakers(queues, request, &slots)?;
    }
    let cache = queues.backend.deny_cache.as_ref().filter(|_| request.is_check());
    let generation = cache.map(|cache| cache.generation(request));
    progress.decide(slots).await?;
    let refunds = progress.refund().await;

    *server_time = progress.server_time.max(*server_time);
    if let (Some(cache), Some(generation), false) = (cache, generation, progress.allowed) {
        let generation = cache.generation_after_refunds(generation, request, &refunds);
        cache.insert(request, made_at, generation, *server_time, &progress.states);
    }
    let units = if progress.allowed { progress.units } else { 0 };
    Ok(Outcome {
        is_of_first: is_across || progress.is_by_key,
        ..Outcome::new(progress.allowed, progress.states).of_units(units)
    })
}

/// Fails if one of the slots is known to fail, before anything is charged in the others.
fn check_breakers(queues: &CommitQueues, request: &OwnedRequest, slots: &[(u16, Positions)]) -> Result<(), StoreError> {
    let queues = slots
        .iter()
        .map(|(slot, positions)| (queues.queue_at(*slot, false), positions));
    let mut failing = queues.filter(|(queue, _)| queue.breaker.is_open());
    failing.try_for_each(|(queue, positions)| queue.check_breaker(1, &[request.part(request.operation, positions)]))
}

/// A request that is decided slot by slot.
struct Progress<'a> {
    queues: &'a CommitQueues,
    request: &'a OwnedRequest,
    /// Whether each call declares all of its keys.
    declares_keys: bool,
    allowed: bool,
    /// Whether charges in one slot were decided one after the other.
    is_by_key: bool,
    /// How many of the units are admitted in each slot.
    units: u32,
    states: SmallVec<[ChargeState; 1]>,
    /// The latest of the times of the slots.
    server_time: Duration,
    /// The slots that were charged, the positions of their charges, and when.
    charged: Vec<(u16, Positions, Duration)>,
}

type Positions = SmallVec<[usize; 4]>;

impl<'a> Progress<'a> {
    fn new(queues: &'a CommitQueues, request: &'a OwnedRequest, declares_keys: bool) -> Self {
        Self {
            queues,
            request,
            declares_keys,
            allowed: true,
            is_by_key: false,
            units: request.units,
            states: smallvec![ChargeState::new(0, None, Duration::ZERO); request.charge_count()],
            server_time: Duration::ZERO,
            charged: Vec::new(),
        }
    }

    async fn decide(&mut self, slots: Vec<(u16, Positions)>) -> Result<(), StoreError> {
        let mut failure = None;
        for (slot, positions) in slots {
            let of_request = self.request.operation;
            let operation = self.next(of_request);
            match self.run_in(slot, &positions, operation).await {
                Ok(()) => {}
                // The request is denied and its charges are refunded, whether or not this slot replies.
                Err(_) if !self.allowed && of_request != Operation::Peek => {}
                Err(error) if matches!(operation, Operation::Check | Operation::Wait | Operation::Peek) => {
                    // The failure mode decides now, and a request that waits is checked again.
                    self.allowed = false;
                    self.refund().await;
                    return Err(error);
                }
                // A refund, a reset or the end of a lease in another slot does not depend on it.
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// The next part of an operation. After a denial the others only report their states.
    fn next(&self, operation: Operation) -> Operation {
        match operation.decides() && !self.allowed {
            true => Operation::Peek,
            false => operation,
        }
    }

    /// Refunds the charges of a check that is denied or fails, and returns the refunds.
    async fn refund(&mut self) -> Vec<OwnedRequest> {
        let mut refunds = Vec::new();
        if self.allowed {
            return refunds;
        }
        for (slot, positions, admitted_at) in std::mem::take(&mut self.charged) {
            let operation = Operation::Refund { admitted_at };
            match self.run_in(slot, &positions, operation).await {
                Ok(()) => refunds.push(self.request.part(operation, &positions)),
                Err(_) => lost_settlement(),
            }
        }
        refunds
    }

    /// Runs an operation on the charges in one slot.
    async fn run_in(&mut self, slot: u16, positions: &[usize], operation: Operation) -> Result<(), StoreError> {
        let part = self.request.part(operation, positions);
        match self.queues.decide_at(slot, self.declares_keys, part).await?.response() {
            Some(response) => self.record(slot, positions, operation, &response?),
            None => self.run_by_key(slot, positions, operation).await,
        }
    }

    /// Records the states of these charges, and whether they were charged.
    fn record(
        &mut self,
        slot: u16,
        positions: &[usize],
        operation: Operation,
        response: &StoreResponse,
    ) -> Result<(), StoreError> {
        let [outcome] = &*response.outcomes else {
            return Err(StoreError::new(
                ErrorKind::Protocol,
                "the reply to one request does not contain one outcome",
            ));
        };
        let outcome = outcome.clone().at(response.server_time);
        for (position, state) in positions.iter().zip(outcome.states) {
            self.states[*position] = state;
        }
        self.server_time = self.server_time.max(response.server_time);
        self.allowed &= outcome.allowed;
        self.units = self.units.min(outcome.units);
        if operation.decides() && self.allowed && self.request.units > 0 {
            self.charged.push((slot, positions.into(), response.server_time));
        }
        Ok(())
    }
}

/// Each slot, and the positions of the charges that lie in it.
fn by_slot(request: &OwnedRequest) -> Vec<(u16, Positions)> {
    let mut slots: Vec<(u16, Positions)> = Vec::new();
    for (position, charge) in request.charges().enumerate() {
        let slot = slot_of_charge(charge);
        match slots.iter_mut().find(|(other, _)| *other == slot) {
            Some((_, positions)) => positions.push(position),
            None => slots.push((slot, smallvec![position])),
        }
    }
    slots
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, pin::pin, task::Poll};

    use super::*;
    use crate::{
        FailureMode, FixedWindow, Key, Limit, Limiter, Policy, SlidingLog,
        limit::Arrival,
        store::{
            Charge, ChargeLine, Store, StoreRequest,
            redis::{
                simulation::network::{Network, simulated_backend},
                store::RedisStore,
            },
        },
    };

    async fn outcome(store: &RedisStore, operation: Operation, charges: &[Charge]) -> Outcome {
        let response = store.decide(&[StoreRequest::new(operation, charges)]).await;
        response.expect("the network is good").outcomes[0].clone()
    }

    #[tokio::test(start_paused = true)]
    async fn all_charges_in_a_slot_are_refunded_when_another_slot_denies() {
        let backend = simulated_backend(Network::new(0, true));
        let store = RedisStore::new(CommitQueues::new(backend));
        let (five, one) = [5, 1].map(|quota| Limit::from(SlidingLog::per_hour(quota))).into();
        let (key, other) = (Key::from("a"), Key::from("b"));
        let charges = ["one", "two", "three"].map(|policy| Charge::new(policy, &five, &key, 1));
        let full = [Charge::new("full", &one, &other, 1)];
        assert!(outcome(&store, Operation::Check, &full).await.allowed);
        assert!(outcome(&store, Operation::Check, &charges).await.allowed);

        let across = [&charges[..], &full].concat();
        assert!(!outcome(&store, Operation::Check, &across).await.allowed);
        let left = outcome(&store, Operation::Peek, &charges).await.states;
        assert_eq!(left.iter().map(|state| state.remaining).collect::<Vec<_>>(), [4, 4, 4]);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_charged_in_a_slot_while_another_one_is_known_to_fail() {
        let network = Network::new(0, true);
        let backend = simulated_backend(network.clone());
        let store = RedisStore::new(CommitQueues::new(backend));
        let limit = Limit::from(SlidingLog::per_hour(5));
        let (key, other) = (Key::from("a"), Key::from("b"));
        let across = [
            Charge::new("one", &limit, &key, 1),
            Charge::new("two", &limit, &other, 1),
        ];
        let check = async |charges: &[Charge]| store.decide(&[StoreRequest::new(Operation::Check, charges)]).await;
        network.cut_off();
        for _ in 0..3 {
            assert!(check(&across[1..]).await.is_err());
        }
        network.heal();
        let calls = network.calls();
        assert!(check(&across).await.is_err(), "no probe has had a reply yet");
        assert_eq!(network.calls(), calls, "the other one is not called");
        let left = outcome(&store, Operation::Peek, &across[..1]).await.states;
        assert_eq!(left[0].remaining, 5);
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_check_that_fails_no_later_one_of_its_call_is_made() {
        let network = Network::new(0, true);
        let backend = simulated_backend(network.clone());
        let store = RedisStore::new(CommitQueues::new(backend));
        let limit = Limit::from(SlidingLog::per_hour(5));
        let keys = ["a", "b", "c"].map(Key::from);
        let [a, b, c] = keys.each_ref().map(|key| Charge::new("p", &limit, key, 1));
        network.cut_off();
        for _ in 0..3 {
            let check = [b.clone()];
            assert!(
                store
                    .decide(&[StoreRequest::new(Operation::Check, &check)])
                    .await
                    .is_err()
            );
        }
        network.heal();

        let (failing, later) = ([a.clone(), b], [a, c]);
        let checks = [&failing, &later].map(|charges| StoreRequest::new(Operation::Check, charges));
        assert!(store.decide(&checks).await.is_err(), "no probe has had a reply yet");
        let left = outcome(&store, Operation::Peek, &later).await.states;
        assert_eq!(left.iter().map(|state| state.remaining).collect::<Vec<_>>(), [5, 5]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refund_is_waited_for_after_the_caller_has_left() {
        let backend = simulated_backend(Network::new(0, true));
        let store = RedisStore::new(CommitQueues::new(backend));
        let (five, one) = [5, 1].map(|quota| Limit::from(SlidingLog::per_hour(quota))).into();
        let (key, other) = (Key::from("a"), Key::from("b"));
        let across = [Charge::new("one", &five, &key, 1), Charge::new("full", &one, &other, 1)];
        assert!(outcome(&store, Operation::Check, &across[1..]).await.allowed);

        {
            let mut check = pin!(store.decide(&[StoreRequest::new(Operation::Check, &across)]));
            assert!(poll_fn(|cx| Poll::Ready(check.as_mut().poll(cx).is_pending())).await);
        }
        let undrained = store.drained(Duration::ZERO).await.unwrap_err();
        let undrained = undrained.to_string();
        assert!(undrained.contains("1 settlement and 0 releases"), "{undrained}");
        assert!(store.drained(Duration::from_secs(60)).await.is_ok());
        let left = outcome(&store, Operation::Peek, &across[..1]).await.states;
        assert_eq!(left[0].remaining, 5);
    }

    /// Waits until there have been so many calls.
    async fn until_calls(network: &Network, calls: usize) {
        while network.calls() < calls {
            tokio::time::sleep(Duration::from_micros(1)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn if_a_slot_after_the_one_that_denies_fails_a_request_is_denied_and_a_peek_fails() {
        let network = Network::new(0, true);
        let store = RedisStore::new(CommitQueues::new(simulated_backend(network.clone())));
        let limit = Limit::from(SlidingLog::per_hour(1));
        let keys = ["a", "b"].map(Key::from);
        let across = keys.each_ref().map(|key| Charge::new("p", &limit, key, 1));
        assert!(outcome(&store, Operation::Check, &across).await.allowed);

        let decided = async |operation| {
            let calls = network.calls();
            let cut_off = async {
                until_calls(&network, calls + 1).await;
                network.cut_off();
            };
            let request = [StoreRequest::new(operation, &across)];
            let (decided, ()) = tokio::join!(store.decide(&request), cut_off);
            network.heal();
            decided
        };
        let denied = decided(Operation::Check).await.expect("the first slot denies it");
        let states = denied.outcomes()[0].states();
        assert!(states[0].retry_after.is_some() && states[1].retry_after.is_none());
        assert!(decided(Operation::Peek).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_slot_that_fails_no_other_one_is_charged() {
        let network = Network::new(0, true);
        let backend = simulated_backend(network.clone());
        let store = RedisStore::new(CommitQueues::new(backend));
        let limit = Limit::from(SlidingLog::per_hour(5));
        let keys = ["a", "b"].map(Key::from);
        let across = keys.each_ref().map(|key| Charge::new("p", &limit, key, 1));
        let check = [StoreRequest::new(Operation::Check, &across)];

        // Only the first call is lost.
        let calls = network.calls();
        network.cut_off();
        let heal = async {
            until_calls(&network, calls + 1).await;
            network.heal();
        };
        let (failed, ()) = tokio::join!(store.decide(&check), heal);
        assert!(failed.is_err());
        let left = outcome(&store, Operation::Peek, &across).await.states;
        assert_eq!(left.iter().map(|state| state.remaining).collect::<Vec<_>>(), [5, 5]);
    }

    fn in_line(charge: Charge, number: u64, leads: Option<u64>) -> Charge {
        charge.in_line(Some(ChargeLine {
            number,
            longest_us: 1,
            ahead: 0,
            leads,
            leads_elsewhere: false,
        }))
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_that_is_removed_gives_nothing_back() {
        let network = Network::new(0, true);
        let store = RedisStore::new(CommitQueues::new(simulated_backend(network.clone())));
        let limit = Limit::from(FixedWindow::per_hour(5));
        let keys = ["a", "b"].map(Key::from);
        let across = keys.each_ref().map(|key| Charge::new("p", &limit, key, 1));
        assert!(outcome(&store, Operation::Check, &across).await.allowed);

        // The second slot does not reply.
        let calls = network.calls();
        let cut_off = async {
            until_calls(&network, calls + 1).await;
            network.cut_off();
            until_calls(&network, calls + 2).await;
            network.heal();
        };
        let [first, second] = across.clone();
        let lines = [in_line(first, 1, Some(u64::MAX >> 12)), in_line(second, 2, None)];
        let removes = [StoreRequest::new(Operation::Wait, &lines).standing(Some(&[]), 0)];
        let (removed, ()) = tokio::join!(store.decide(&removes), cut_off);
        assert!(removed.is_err(), "{removed:?}");
        assert_eq!(network.calls(), calls + 2, "a refund was sent");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_stands_in_the_line_of_each_slot_that_lacks_room_for_it() {
        let store = RedisStore::new(CommitQueues::new(simulated_backend(Network::new(0, true))));
        let limit = Limit::from(FixedWindow::per_hour(1));
        let keys = ["a", "b"].map(Key::from);
        let [first, second] = keys.each_ref().map(|key| Charge::new("p", &limit, key, 1));
        let full = store
            .decide(&[StoreRequest::new(Operation::Check, [&first, &second])])
            .await;
        let admitted_at = full.expect("the network is good").server_time;

        let lines = [
            in_line(first, 1, Some(u64::MAX >> 12)),
            in_line(second.clone(), 2, None),
        ];
        let arrived = [Arrival { at: 1, weight: 1 }];
        let waits = StoreRequest::new(Operation::Wait, &lines).standing(Some(&arrived), 1);
        let denied = store.decide(&[waits]).await.expect("the network is good");
        assert!(!denied.outcomes[0].allowed);

        let second = [in_line(second, 3, None)];
        assert!(
            outcome(&store, Operation::Refund { admitted_at }, &second)
                .await
                .allowed
        );
        let later = outcome(&store, Operation::Check, &second).await;
        assert!(!later.allowed, "it was admitted before one that waits");
    }

    /// Whatever the failure mode.
    #[tokio::test(start_paused = true)]
    async fn units_of_several_slots_are_refused_and_not_counted_in_the_process() {
        let store = RedisStore::new(CommitQueues::new(simulated_backend(Network::new(0, true))));
        for mode in [FailureMode::Local, FailureMode::Open] {
            let of = |name| Policy::new(name, SlidingLog::per_hour(3)).failure_mode(mode);
            let both = Limiter::new(store.clone(), [of("one"), of("two")])
                .on_failure(|error| panic!("the store has not failed: {error}"));
            let taken = both.request("a").key_of("two", "b").take_up_to(2).await;
            assert!(taken.expect_err("no slot has both keys").kind() == ErrorKind::Invalid);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn equal_requests_that_wait_leave_a_line_one_by_one() {
        let store = RedisStore::new(CommitQueues::new(simulated_backend(Network::new(0, true))));
        let [short, long] =
            [Duration::from_secs(1), Duration::from_secs(3_600)].map(|window| SlidingLog::new(1, window));
        let of = |limit: SlidingLog, name| Policy::new(name, limit).wait_up_to(Duration::from_secs(7_200));
        let both = Limiter::new(store.clone(), [of(short, "short"), of(long, "long")]);
        let admitted = both.request("a").key_of("long", "b").check().await;
        assert!(admitted.expect("the network is good").is_allowed());
        let acquire =
            |both: Limiter| tokio::spawn(async move { both.request("a").key_of("long", "b").acquire().await });
        let waiting = [both.clone(), both.clone(), both].map(acquire);
        tokio::time::sleep(Duration::from_millis(1_200)).await;

        // Those that wait lack the other key.
        let one = Limiter::new(store, of(short, "short"));
        assert!(one.check("a").await.expect("the network is good").is_allowed());
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
    }

    #[cfg(feature = "metrics")]
    #[tokio::test(start_paused = true)]
    async fn a_refund_that_fails_when_another_slot_denies_is_counted_as_lost() {
        let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
        let scraped = recorder.handle();
        let _guard = metrics::set_default_local_recorder(&recorder);
        let network = Network::new(0, true);
        let backend = simulated_backend(network.clone());
        let store = RedisStore::new(CommitQueues::new(backend));
        let (five, one) = [5, 1].map(|quota| Limit::from(SlidingLog::per_hour(quota))).into();
        let (key, other) = (Key::from("a"), Key::from("b"));
        let across = [Charge::new("five", &five, &key, 1), Charge::new("one", &one, &other, 1)];
        assert!(outcome(&store, Operation::Check, &across).await.allowed);

        // The connection breaks after the second slot has denied.
        let calls = network.calls();
        let cut_off = async {
            while network.calls() < calls + 2 {
                tokio::time::sleep(Duration::from_micros(1)).await;
            }
            network.cut_off();
        };
        let (denied, ()) = tokio::join!(outcome(&store, Operation::Check, &across), cut_off);
        assert!(!denied.allowed);
        let scraped = scraped.render();
        assert!(scraped.contains("tower_quota_lost_settlements_total 1\n"), "{scraped}");
    }

    /// The clocks of two nodes differ.
    #[tokio::test(start_paused = true)]
    async fn the_time_of_a_request_is_the_latest_of_its_nodes_and_each_charge_has_its_own() {
        let queues = CommitQueues::new(simulated_backend(Network::new(0, true)));
        let limit = Limit::from(SlidingLog::per_hour(5));
        let keys = ["a", "b"].map(Key::from);
        let across = keys.each_ref().map(|key| Charge::new("p", &limit, key, 1));
        let request = StoreRequest::new(Operation::Check, &across).to_owned(|_| {});
        let mut progress = Progress::new(&queues, &request, false);
        let times = [9, 7].map(Duration::from_secs);
        for (position, time) in times.into_iter().enumerate() {
            let state = ChargeState::new(4, None, Duration::ZERO);
            let response = StoreResponse::new(time, [Outcome::new(true, [state])]);
            let recorded = progress.record(0, &[position], Operation::Check, &response);
            assert!(recorded.is_ok());
        }
        assert_eq!(progress.server_time, times[0]);
        let decided_at: Vec<_> = progress.states.iter().map(|state| state.decided_at).collect();
        assert_eq!(decided_at, times.map(Some));
    }
}
