//! The response to an admitted request.

use http::Response;

use super::{Presentation, completed::AwaitedCompletion, denied};
use crate::{Decision, ResponseBody, decide::Release};

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
    /// Adds the fields and the decision to the response of the inner service.
    pub(super) fn annotate<B>(self, mut response: Response<B>) -> Response<ResponseBody<B>> {
        let Self {
            own,
            left,
            learning,
            completion,
            release,
        } = self;
        let completion = completion.and_then(|completion| completion.respond(&response));
        if let Some(policy) = own.as_slice().first()
            && !denied::made(&response)
        {
            let fields = &Presentation::of(&policy.context).fields;
            let has_fields = fields.annotate(&own, response.status(), response.headers_mut());
            if has_fields && let Some(learning) = learning {
                learning.record_inner_fields();
            }
        }
        if let Some(release) = &release
            && release.outlives(response.status())
        {
            release.warn_of_upgrade();
        }
        if let Some(left) = left {
            let extensions = response.extensions_mut();
            // That of an inner layer has the policies of this one too. One without them is about another request, of the handler.
            let joined = match extensions.get::<Decision>() {
                Some(inner) if inner.includes(&own) => None,
                Some(other) => left.followed_by(other),
                None => Some(left),
            };
            joined.map(|joined| extensions.insert(joined));
        }
        response.map(|body| ResponseBody::inner(body, completion, release))
    }

    /// Ends with an error of the inner service.
    pub(super) fn fail(self) {
        if let Some(mut completion) = self.completion {
            completion.fail();
        }
    }
}
