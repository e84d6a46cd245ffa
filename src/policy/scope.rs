use std::sync::atomic::{AtomicBool, Ordering};

use http::{Method, request::Parts};

use crate::{
    key,
    key::{Form, PathBytes, Segments, Spellings},
};

/// The routes and methods that a policy in a file is for.
#[derive(Debug)]
pub(super) struct Scope {
    pub(super) routes: Routes,
    /// All, if the list is empty.
    pub(super) methods: Vec<Method>,
}

/// The routes of a scope.
#[derive(Debug)]
pub(super) enum Routes {
    All,
    /// Those of these templates.
    These(Vec<Template>),
    /// Those of the requests that none of these scopes contains.
    NoneOf(Vec<Scope>),
}

/// Which spelling of a path must be that of a route. A service may take `/static/../login` and `/login/` for other paths than
/// they look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// One: for limits and blocks, which no spelling evades.
    Either,
    /// All: for what is skipped, which no spelling widens.
    Both,
}

/// A request in one spelling of its path.
#[derive(Clone, Copy)]
struct Spelled<'a> {
    methods: [&'a Method; 2],
    /// The template of the route that axum has matched.
    matched: Option<&'a Spellings<'a>>,
    form: Form,
    path: &'a [u8],
    rule: Spelling,
}

impl Spelled<'_> {
    /// Whether this path has led to the matched route, as its only one. A router within a service does not know the whole path,
    /// and the service behind a route with a rest may have routes of its own, such as one of tonic.
    fn is_matched_by(self, matched: &Spellings<'_>) -> bool {
        let template = match self.form {
            Form::Written | Form::Decoded => matched.written(),
            Form::Trimmed => key::trimmed(matched.written()),
            Form::Normalized => matched.normalized(),
        };
        !has_rest(matched.written()) && matches(template, self.path)
    }
}

impl Scope {
    pub(super) fn is_everything(&self) -> bool {
        matches!(self.routes, Routes::All) && self.methods.is_empty()
    }

    pub(super) fn contains(&self, parts: &Parts, rule: Spelling) -> bool {
        let methods = methods(parts);
        if matches!(self.routes, Routes::All) || !self.has_method(methods) {
            return self.has_method(methods);
        }
        let spellings = Spellings::of(parts);
        let matched = matched(parts);
        let spelled = || {
            spellings.iter().map(|(form, path)| Spelled {
                methods,
                matched: matched.as_ref(),
                form,
                path,
                rule,
            })
        };
        match rule {
            Spelling::Either if spelled().any(|request| self.holds(request)) => true,
            Spelling::Either => {
                self.warn_of_missed(spelled());
                false
            }
            Spelling::Both => spelled().all(|request| self.holds(request)),
        }
    }

    /// Warns of templates that do not apply to their path, since axum has matched another route.
    fn warn_of_missed<'a>(&self, requests: impl Iterator<Item = Spelled<'a>>) {
        if let Routes::These(templates) = &self.routes {
            for request in requests.filter(|request| request.matched.is_some()) {
                templates.iter().for_each(|template| template.warn_if_missed(request));
            }
        }
    }

    fn holds(&self, request: Spelled<'_>) -> bool {
        self.has_method(request.methods) && self.routes.contain(request)
    }

    fn has_method(&self, methods: [&Method; 2]) -> bool {
        self.methods.is_empty() || self.methods.iter().any(|one| methods.contains(&one))
    }
}

/// The method of a request, and the one that it counts as.
fn methods(parts: &Parts) -> [&Method; 2] {
    let counted = match parts.method {
        // RFC 9110 §9.3.2: HEAD is GET without the content, so handlers of GET respond to it.
        Method::HEAD => &Method::GET,
        // RFC 8441 §4: a CONNECT with a path opens in HTTP/2 what a GET with `Upgrade` opens in HTTP/1.1.
        Method::CONNECT if !parts.uri.path().is_empty() => &Method::GET,
        _ => &parts.method,
    };
    [&parts.method, counted]
}

impl Routes {
    fn contain(&self, request: Spelled<'_>) -> bool {
        match self {
            Self::All => true,
            Self::These(templates) => templates.iter().any(|template| template.contains(request)),
            Self::NoneOf(scopes) => !scopes.iter().any(|scope| scope.holds(request)),
        }
    }
}

/// A template such as `/users/{id}` or `/files/{*rest}`, in the spellings of paths.
#[derive(Debug)]
pub(super) struct Template {
    written: String,
    decoded: PathBytes,
    normalized: PathBytes,
    warned: AtomicBool,
}

impl Template {
    pub(super) fn new(written: &str) -> Self {
        let decoded = key::decoded(written);
        Self {
            written: written.to_owned(),
            normalized: key::normalized(&decoded, Segments::Merged),
            decoded,
            warned: AtomicBool::new(false),
        }
    }

    fn contains(&self, request: Spelled<'_>) -> bool {
        let Some(matched) = request.matched else {
            return self.is_path(request);
        };
        let is_route = self.is_same(matched);
        match request.rule {
            Spelling::Both => self.is_path(request) && (is_route || !request.is_matched_by(matched)),
            Spelling::Either => {
                is_route
                    || self.is_path(request) && (has_rest(self.written.as_bytes()) || !request.is_matched_by(matched))
            }
        }
    }

    /// Whether a path is that of this template, in its form.
    fn is_path(&self, request: Spelled<'_>) -> bool {
        let template = match request.form {
            Form::Written => self.written.as_bytes(),
            Form::Trimmed => key::trimmed(self.written.as_bytes()),
            Form::Decoded => &self.decoded,
            Form::Normalized => &self.normalized,
        };
        matches(template, request.path)
    }

    /// Whether it is the matched route, with parameters of any names.
    fn is_same(&self, matched: &Spellings<'_>) -> bool {
        if self.written.as_bytes() == matched.written() {
            return true;
        }
        let [ours, others] =
            [&self.normalized[..], matched.normalized()].map(|template| template.split(|byte| *byte == b'/'));
        ours.map(Segment::of).eq(others.map(Segment::of))
    }
}

/// Whether a template is one such as `/shop.Accounts/{*rest}`.
fn has_rest(template: &[u8]) -> bool {
    template.windows(2).any(|pair| pair == b"{*")
}

impl Template {
    /// Warns once if the path is that of this template, but axum has matched a route that is not one of it.
    fn warn_if_missed(&self, request: Spelled<'_>) {
        let Some(matched) = request.matched else { return };
        let is_missed = self.is_path(request) && !matches(&self.normalized, matched.normalized());
        if is_missed && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                route = self.written,
                matched = %String::from_utf8_lossy(matched.written()),
                "a route of a file does not apply to its path, since axum has matched another"
            );
        }
    }
}

/// The route that axum has matched.
fn matched(parts: &Parts) -> Option<Spellings<'_>> {
    #[cfg(feature = "axum")]
    if let Some(matched) = parts.extensions.get::<::axum::extract::MatchedPath>() {
        return Some(Spellings::of_path(matched.as_str()));
    }
    let _ = parts;
    None
}

/// A segment of a template.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Segment<'a> {
    Literal(&'a [u8]),
    Parameter,
    Rest,
}

impl<'a> Segment<'a> {
    fn of(text: &'a [u8]) -> Self {
        match text {
            [b'{', b'*', .., b'}'] => Self::Rest,
            [b'{', .., b'}'] => Self::Parameter,
            _ => Self::Literal(text),
        }
    }
}

/// Whether a template is that of a path.
fn matches(template: &[u8], path: &[u8]) -> bool {
    let mut segments = path.split(|byte| *byte == b'/');
    for expected in template.split(|byte| *byte == b'/') {
        let Some(segment) = segments.next() else { return false };
        let is_same = match Segment::of(expected) {
            Segment::Rest => return !segment.is_empty() || segments.next().is_some(),
            Segment::Parameter => !segment.is_empty(),
            Segment::Literal(text) => text == segment,
        };
        if !is_same {
            return false;
        }
    }
    segments.next().is_none()
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    #[test]
    fn a_template_is_that_of_a_path() {
        for (template, path, expected) in [
            ("/login", "/login", true),
            ("/login", "/login/x", false),
            ("/login", "/", false),
            ("/", "/", true),
            ("/users/{id}", "/users/42", true),
            ("/users/{id}", "/users/", false),
            ("/users/{id}", "/users/42/posts", false),
            ("/users/{id}/posts", "/users/42/posts", true),
            ("/files/{*rest}", "/files/a/b", true),
            ("/files/{*rest}", "/files//b", true),
            ("/files/{*rest}", "/files/", false),
            ("/files/{*rest}", "/files", false),
            ("/test.Echo/{method}", "/test.Echo/Once", true),
        ] {
            let (parts, ()) = Request::get(path).body(()).unwrap().into_parts();
            let scope = Scope {
                routes: Routes::These(vec![Template::new(template)]),
                methods: vec![],
            };
            for spelling in [Spelling::Either, Spelling::Both] {
                assert_eq!(scope.contains(&parts, spelling), expected, "{template} of {path}");
            }
        }
    }

    #[test]
    fn a_path_that_a_service_may_take_for_another_evades_no_limit_and_is_not_skipped() {
        for (template, path) in [
            ("/login", "/login/"),
            ("/login/", "/login"),
            ("/login", "/%6Cogin"),
            ("/login", "/LOGIN"),
            ("/login", "/login;v=1"),
            ("/login", "/static/../login"),
            ("/login", "/static/..;/login"),
            ("/a/b", "/a//../b"),
            ("/b", "/a//../b"),
            ("/%6Cogin", "/login"),
            ("/{id}", "/users%2Froot/"),
            ("/{id}", "/../"),
            ("/login", "/static/%2e%2e/login"),
            ("/login", "/static/..%2flogin"),
            ("/static/{*rest}", "/static/../login"),
            ("/files/private", "/files//private"),
            ("/files/private", "/files/./private"),
            ("/files/dir/x", "/files/dir%2Fx"),
            ("/users/{id}", "/users/a%2Fb"),
            ("/files/{id}", "/files/a/../b"),
        ] {
            let (parts, ()) = Request::get(path).body(()).unwrap().into_parts();
            let scope = Scope {
                routes: Routes::These(vec![Template::new(template)]),
                methods: vec![],
            };
            assert!(scope.contains(&parts, Spelling::Either), "{template} of {path}");
            assert!(!scope.contains(&parts, Spelling::Both), "{template} of {path}");
            let others = Scope {
                routes: Routes::NoneOf(vec![scope]),
                methods: vec![],
            };
            assert!(
                others.contains(&parts, Spelling::Either),
                "others than {template}: {path}"
            );
        }
    }

    #[test]
    fn get_is_also_for_head_and_for_websockets_of_http2() {
        for (methods, method, expected) in [
            (vec![], "DELETE", true),
            (vec![Method::POST], "POST", true),
            (vec![Method::POST], "GET", false),
            (vec![Method::POST], "HEAD", false),
            (vec![Method::GET], "HEAD", true),
            (vec![Method::HEAD], "HEAD", true),
            (vec![Method::HEAD], "GET", false),
            (vec![Method::PUT, Method::POST], "POST", true),
            (vec![Method::GET], "CONNECT", true),
            (vec![Method::CONNECT], "CONNECT", true),
            (vec![Method::HEAD, Method::POST], "CONNECT", false),
            (vec![Method::GET], "CONNECT tunnel", false),
            (vec![Method::CONNECT], "CONNECT tunnel", true),
        ] {
            let (method, uri) = match method.strip_suffix(" tunnel") {
                Some(method) => (method, "example.com:443"),
                None => (method, "https://example.com/"),
            };
            let request = Request::builder().method(method).uri(uri).body(()).unwrap();
            let scope = Scope {
                routes: Routes::All,
                methods,
            };
            assert_eq!(
                scope.contains(&request.into_parts().0, Spelling::Either),
                expected,
                "{method} {uri} in {scope:?}"
            );
        }
    }
}
