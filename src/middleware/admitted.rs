use http::{Response, StatusCode};

use crate::{
    Decision, ResponseBody,
    check::AwaitedCompletion,
    decision::{Release, denied},
};

/// The decisions about an admitted request.
pub(crate) struct Admitted {
    /// Whether they are left in the extensions of the response.
    pub(super) extensions: bool,
    /// That of this layer.
    pub(super) own: Decision,
    /// That of this layer and of those around it, if there are any.
    pub(super) joined: Option<Decision>,
    /// If a policy depends on how the request ends.
    pub(super) completion: Option<Box<AwaitedCompletion>>,
    /// If a policy has a limit of concurrency: dropped when the request has ended.
    pub(super) release: Option<Release>,
}

impl Admitted {
    /// Adds the fields and the decision to the response of the inner service.
    pub(super) fn annotate<B>(self, mut response: Response<B>) -> Response<ResponseBody<B>> {
        let Self {
            extensions,
            own,
            joined,
            completion,
            release,
        } = self;
        let completion = completion.and_then(|completion| completion.respond(&response));
        if let Some(policy) = own.as_slice().first()
            && !denied::made(&response)
        {
            let fields = &policy.context.fields;
            fields.annotate(&own, response.status(), response.headers_mut());
        }
        if let Some(release) = &release
            && response.status() == StatusCode::SWITCHING_PROTOCOLS
        {
            release.warn_of_upgrade();
        }
        if extensions {
            // The decision of an inner layer has the policies of this one too.
            response.extensions_mut().get_or_insert_with(|| joined.unwrap_or(own));
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
