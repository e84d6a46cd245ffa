//! The response to an admitted request.

use http::Response;

use super::{Presentation, completed::AwaitedCompletion, denied};
use crate::{
    Decision, ResponseBody,
    decide::{End, Release},
};

/// The decisions about an admitted request.
pub(crate) struct Admitted {
    /// That of this layer.
    pub(super) own: Decision,
    /// That of this layer and of those around it, if it is left in the extensions of the response.
    pub(super) left: Option<Decision>,
    /// That of the layers around this one, if one of them learns from the response.
    pub(super) learning: Option<Decision>,
    /// If a policy depends on how the request ends.
    pub(super) completion: Option<Box<AwaitedCompletion>>,
    /// If a policy has a limit of concurrency: dropped when the request has ended.
    pub(super) release: Option<Release>,
}

impl Admitted {
    pub(super) fn completion_of(admitted: &mut Option<Self>) -> Option<&mut AwaitedCompletion> {
        admitted.as_mut()?.completion.as_deref_mut()
    }

    /// Adds the fields and the decision, if a policy applied, to the response of the inner service.
    pub(super) fn annotate<B>(admitted: Option<Self>, mut response: Response<B>) -> Response<ResponseBody<B>> {
        let Some(admitted) = admitted else {
            return response.map(|body| ResponseBody::inner(body, None, None));
        };
        let own = &admitted.own;
        let completion = admitted.completion.and_then(|completion| completion.respond(&response));
        if let Some(policy) = own.as_slice().first()
            && !denied::made(&response)
        {
            let fields = &Presentation::of(&policy.context).fields;
            let has_fields = fields.annotate(own, response.status(), response.headers_mut());
            if has_fields && let Some(learning) = &admitted.learning {
                learning.record_inner_fields();
            }
        }
        if let Some(release) = &admitted.release
            && release.outlives(response.status())
        {
            release.warn_of_upgrade();
        }
        if let Some(left) = admitted.left {
            let extensions = response.extensions_mut();
            // That of an inner layer has the policies of this one too. One without them is about another request, of the handler.
            let joined = match extensions.get::<Decision>() {
                Some(inner) if inner.includes(own) => None,
                Some(other) => left.followed_by(other),
                None => Some(left),
            };
            joined.map(|joined| extensions.insert(joined));
        }
        response.map(|body| ResponseBody::inner(body, completion, admitted.release))
    }

    /// Ends with an error of the inner service.
    pub(super) fn fail(mut admitted: Option<Self>) {
        if let Some(completion) = Self::completion_of(&mut admitted) {
            completion.end(End::Failed);
        }
    }
}
