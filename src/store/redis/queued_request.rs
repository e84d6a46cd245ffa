use tokio::{sync::oneshot, time::Instant};

use super::{
    deny_cache::{DenyCache, Generation},
    merge::BatchPosition,
    reply::ScriptReply,
    request::OwnedRequest,
};
use crate::store::{StoreError, StoreResponse};

/// The requests of one caller, which wait in a commit queue and are sent in one call.
pub(super) struct QueuedRequest {
    pub(super) requests: Vec<OwnedRequest>,
    /// When the caller made the request.
    made_at: Instant,
    pub(super) queued_at: Instant,
    /// For a lone check, if the deny cache is on.
    generation: Option<Generation>,
    response: oneshot::Sender<Response>,
}

type Response = Result<StoreResponse, StoreError>;

impl QueuedRequest {
    /// A request, and the receiver of its response.
    pub(super) fn new(
        requests: Vec<OwnedRequest>,
        made_at: Instant,
        generation: Option<Generation>,
    ) -> (Self, oneshot::Receiver<Response>) {
        let (sender, receiver) = oneshot::channel();
        let request = Self {
            requests,
            made_at,
            queued_at: Instant::now(),
            generation,
            response: sender,
        };
        (request, receiver)
    }

    /// Whether the caller has dropped its future.
    pub(super) fn is_canceled(&self) -> bool {
        self.response.is_closed()
    }

    pub(super) fn respond(self, response: Response) {
        let _ = self.response.send(response); // the caller may have dropped its future
    }

    /// Responds from the reply to a call, in which the requests have these positions.
    pub(super) fn respond_with(self, positions: &[BatchPosition], reply: &Result<ScriptReply, StoreError>) {
        let reply = reply.as_ref().map_err(Clone::clone);
        let response = reply.and_then(|reply| self.response_in(positions, reply));
        self.respond(response);
    }

    fn response_in(&self, positions: &[BatchPosition], reply: &ScriptReply) -> Response {
        let mut response = StoreResponse::new(reply.server_time, []);
        for (request, position) in self.requests.iter().zip(positions) {
            let merged = reply.replies[position.merged]
                .as_ref()
                .map_err(|failure| failure.error.clone());
            let outcome = merged.map(|merged| merged.outcome(request, position.nth));
            response.outcomes.push(request.outcome(outcome)?);
        }
        Ok(response)
    }

    /// Updates the deny cache from the reply to a call, in which the requests have these positions.
    pub(super) fn update_cache(
        &self,
        cache: &DenyCache,
        positions: &[BatchPosition],
        reply: &Result<ScriptReply, StoreError>,
    ) {
        // Also after an error: the script may have been executed.
        cache.invalidate(&self.requests);

        // The states in the reply are those of the first denied request.
        if let (Some(generation), [check], [position], Ok(reply)) =
            (self.generation, &self.requests[..], positions, reply)
            && let Ok(merged) = &reply.replies[position.merged]
            && position.nth == merged.admitted
        {
            cache.insert(check, self.made_at, generation, reply.server_time, &merged.states);
        }
    }
}
