use http::{Method, request::Parts, uri::PathAndQuery};

use crate::{
    key,
    key::{Form, Forms, PathBytes, RoutedPaths},
};

/// The routes and methods that a policy in a file is for.
#[derive(Clone, Debug)]
pub(super) struct Scope {
    pub(super) routes: Routes,
    /// All, if the list is empty.
    pub(super) methods: Vec<Method>,
}

#[derive(Clone, Debug, Default)]
pub(super) enum Routes {
    #[default]
    All,
    /// Those of these templates.
    These(Vec<Template>),
    /// Those of the requests that none of these scopes contains, which are those of the other policies of a plan.
    Others(Vec<Scope>),
}

/// Which spelling of a path must be that of a route. A service may take `/static/../login` and `/login/` for other paths than
/// they look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// One: for limits and blocks, which no spelling evades.
    Any,
    /// All: for what is skipped, which no spelling widens.
    All,
}

/// A request in one spelling of its path.
#[derive(Clone, Copy)]
struct Spelled<'a> {
    methods: [&'a Method; 2],
    /// The template of the route that axum has matched.
    matched: Option<&'a Matched<'a>>,
    form: Form,
    path: &'a [u8],
    rule: Spelling,
    /// Whether a template must be that of the path as one service takes both. Else each may be as some service takes it.
    is_strict: bool,
}

impl Spelled<'_> {
    /// Whether this path has led to the matched route, as its only one. A router within a service does not know the whole path,
    /// and the service behind a route with a rest may have routes of its own, such as one of tonic.
    fn is_matched_by(self, matched: &Matched<'_>) -> bool {
        let written = matched.written.as_bytes();
        let is_path = match self.form {
            Form::Written | Form::Decoded => matches(written, self.path),
            Form::Trimmed => matches(key::trimmed(written), self.path),
            Form::Normal => matched.normal.iter().any(|template| matches(template, self.path)),
        };
        !has_rest(written) && is_path
    }
}

impl Scope {
    pub(super) fn is_everything(&self) -> bool {
        matches!(self.routes, Routes::All) && self.methods.is_empty()
    }

    pub(super) fn contains(&self, parts: &Parts, rule: Spelling) -> bool {
        let is_strict = rule == Spelling::All;
        let methods = methods(parts, is_strict);
        let has_method = self.has_method(methods, is_strict);
        if matches!(self.routes, Routes::All) || !has_method {
            return has_method;
        }
        let matched = Matched::of(parts);
        let RoutedPaths { whole, rests, is_set } = RoutedPaths::of(parts);
        let request = Spelled {
            methods,
            matched: matched.as_ref(),
            form: Form::Written,
            path: whole.as_bytes(),
            rule,
            is_strict,
        };
        let holds = |form, path: &[u8]| self.holds(Spelled { form, path, ..request });
        let is_for = |path: &str| key::any_spelling(path, holds);
        let compares_rests = match rule {
            Spelling::All => is_set,
            Spelling::Any => !matched.as_ref().is_some_and(|matched| request.is_matched_by(matched)),
        };
        let mut paths = [&whole].into_iter().chain(rests.iter().filter(|_| compares_rests));
        match (rule, &self.routes) {
            (Spelling::All, _) => paths.all(|path| !key::any_spelling(path, |form, path| !holds(form, path))),
            (Spelling::Any, Routes::Others(_)) => paths.all(|path| is_for(path)),
            (Spelling::Any, Routes::All | Routes::These(_)) => paths.any(|path| is_for(path)),
        }
    }

    fn holds(&self, request: Spelled<'_>) -> bool {
        self.has_method(request.methods, request.is_strict) && self.routes.contain(request)
    }

    fn has_method(&self, methods: [&Method; 2], is_strict: bool) -> bool {
        let is_one = |listed: &Method| methods.iter().any(|method| is_method(method, listed, is_strict));
        self.methods.is_empty() || self.methods.iter().any(is_one)
    }
}

/// Methods are case-sensitive (RFC 9110 §9.1), but some services take `post` for `POST`.
fn is_method(method: &Method, listed: &Method, is_strict: bool) -> bool {
    method == listed || !is_strict && method.as_str().eq_ignore_ascii_case(listed.as_str())
}

/// The method of a request, and the one that it counts as.
fn methods(parts: &Parts, is_strict: bool) -> [&Method; 2] {
    let method = &parts.method;
    // RFC 9110 §9.3.2: HEAD is GET without the content, so handlers of GET respond to it.
    let is_head = is_method(method, &Method::HEAD, is_strict);
    // RFC 8441 §4: a CONNECT with a path opens in HTTP/2 what a GET with `Upgrade` opens in HTTP/1.1. A service may have another handler
    // for it.
    let is_websocket = !is_strict && is_method(method, &Method::CONNECT, false) && !parts.uri.path().is_empty();
    [method, if is_head || is_websocket { &Method::GET } else { method }]
}

impl Routes {
    fn contain(&self, request: Spelled<'_>) -> bool {
        match self {
            Self::All => true,
            Self::These(templates) => templates.iter().any(|template| template.contains(request)),
            Self::Others(scopes) => {
                let is_strict = true;
                !scopes.iter().any(|scope| scope.holds(Spelled { is_strict, ..request }))
            }
        }
    }
}

/// A template such as `/users/{id}` or `/files/{*rest}`, in the spellings of paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template {
    written: String,
    decoded: PathBytes,
    normal: Forms,
}

/// Whether it looks like `/shop.Accounts`, which is no path of a call. Packages begin with a lower-case letter.
fn is_grpc_service(written: &str) -> bool {
    let name = written.strip_prefix('/').and_then(|service| service.rsplit_once('.'));
    name.is_some_and(|(package, name)| {
        !written[1..].contains('/')
            && package.starts_with(|first: char| first.is_ascii_lowercase())
            && name.starts_with(|first: char| first.is_ascii_uppercase())
            && name.contains(char::is_lowercase)
    })
}

impl Template {
    /// A template that is that of the paths which it looks like. The error is the fix.
    pub(super) fn parse(written: &str) -> Result<Self, String> {
        let Some(("", segments)) = written.split_once('/') else {
            return Err("begin it with `/`, as in `/login`".to_owned());
        };
        let mut segments = segments.split('/').peekable();
        while let Some(segment) = segments.next() {
            validate_segment(segment, segments.peek().is_none())?;
        }
        if written.contains('|') || written.contains(",/") {
            return Err("several routes are a list, such as `[\"/login\", \"/sign-in\"]`".to_owned());
        }
        let service = written.trim_end_matches('/');
        if is_grpc_service(service) {
            return Err(format!("all methods of a gRPC service are `{service}/{{*rest}}`"));
        }
        if written.contains(['?', '#']) || PathAndQuery::try_from(written).is_err() {
            return Err("a path has no white space, query or fragment; a space is `%20`".to_owned());
        }
        let decoded = key::decoded(written);
        let braces = |text: &[u8]| text.iter().filter(|byte| **byte == b'{').count();
        if braces(&decoded) != braces(written.as_bytes()) {
            return Err("a brace is that of a parameter".to_owned());
        }
        let normal =
            key::normal_forms(written).ok_or("services may take it for too many paths; write fewer escapes")?;
        Ok(Self {
            written: written.to_owned(),
            decoded,
            normal,
        })
    }

    fn contains(&self, request: Spelled<'_>) -> bool {
        let Some(matched) = request.matched else {
            return self.is_path(request);
        };
        let is_route = self.is_same(matched);
        // As axum prefers `/users/me` to `/users/{id}`.
        let is_less_specific = || {
            !has_rest(self.written.as_bytes())
                && request.is_matched_by(matched)
                && self
                    .first_forms(matched)
                    .is_some_and(|[ours, other]| matches(ours, other))
        };
        match request.rule {
            Spelling::All => self.is_path(request) && (is_route || !is_less_specific()),
            Spelling::Any => is_route || self.is_path(request) && !is_less_specific(),
        }
    }

    /// Whether a path is that of this template, in its form.
    fn is_path(&self, request: Spelled<'_>) -> bool {
        match request.form {
            Form::Written => matches(self.written.as_bytes(), request.path),
            Form::Trimmed => matches(key::trimmed(self.written.as_bytes()), request.path),
            Form::Decoded => matches(&self.decoded, request.path),
            // Without dot segments, each form of the path is that of one form of the template.
            Form::Normal if request.is_strict && self.normal.len() > 1 && key::has_dot_segment(request.path) => false,
            Form::Normal => self.normal.iter().any(|template| matches(template, request.path)),
        }
    }

    /// Whether it is the matched route, with parameters of any names.
    fn is_same(&self, matched: &Matched<'_>) -> bool {
        if self.written == matched.written {
            return true;
        }
        self.first_forms(matched).is_some_and(|templates| {
            let [ours, others] = templates.map(|template| template.split(|byte| *byte == b'/'));
            ours.map(Segment::of).eq(others.map(Segment::of))
        })
    }

    /// This template and that of the matched route, as they look like.
    fn first_forms<'a>(&'a self, matched: &'a Matched<'_>) -> Option<[&'a [u8]; 2]> {
        Some([self.normal.first()?, matched.normal.first()?])
    }
}

/// Refuses a segment that is in the syntax of other routers, patterns and shells, and matches no such path in that of axum.
fn validate_segment(segment: &str, is_last: bool) -> Result<(), String> {
    let (literal, name) = match segment.strip_suffix('}').and_then(|text| text.split_once('{')) {
        Some(("", name)) if is_last => ("", name.strip_prefix('*').unwrap_or(name)),
        Some((prefix, name)) => (prefix, name),
        None => (segment, "id"),
    };
    let is_name = |part: char| part.is_alphanumeric() || part == '_' || part == '-';
    // Not `$count`, which is a path of OData.
    let is_pattern =
        literal.len() < segment.len() && literal.ends_with('$') || literal.starts_with('(') && literal.ends_with(')');
    let is_valid = !is_pattern && !name.is_empty() && name.chars().all(is_name);
    if is_valid && !literal.starts_with(':') && !literal.contains(['*', '{', '}', '<', '>', '[', ']', '\\']) {
        return Ok(());
    }
    Err(format!(
        "in `{segment}`, write a parameter as `{{id}}` at the end of a segment, and a rest as `{{*rest}}` at the end of the route"
    ))
}

/// Whether a template is one such as `/shop.Accounts/{*rest}`.
fn has_rest(template: &[u8]) -> bool {
    template.windows(2).any(|pair| pair == b"{*")
}

/// The template of the route that axum has matched.
struct Matched<'a> {
    written: &'a str,
    normal: Forms,
}

impl<'a> Matched<'a> {
    fn of(parts: &'a Parts) -> Option<Self> {
        #[cfg(feature = "axum")]
        if let Some(matched) = parts.extensions.get::<::axum::extract::MatchedPath>() {
            let written = matched.as_str();
            let normal = key::normal_forms(written).unwrap_or_default();
            return Some(Self { written, normal });
        }
        let _ = parts;
        None
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Segment<'a> {
    Literal(&'a [u8]),
    /// After its prefix, as in `user-{id}`.
    Parameter(&'a [u8]),
    Rest,
}

impl<'a> Segment<'a> {
    fn of(text: &'a [u8]) -> Self {
        let parameter = text.iter().position(|byte| *byte == b'{');
        match parameter.map(|begin| text.split_at(begin)) {
            Some((b"", [_, b'*', .., b'}'])) => Self::Rest,
            Some((prefix, [_, .., b'}'])) => Self::Parameter(prefix),
            _ => Self::Literal(text),
        }
    }
}

fn matches(template: &[u8], path: &[u8]) -> bool {
    let mut segments = path.split(|byte| *byte == b'/');
    for expected in template.split(|byte| *byte == b'/') {
        let Some(segment) = segments.next() else { return false };
        let is_same = match Segment::of(expected) {
            Segment::Rest => return !segment.is_empty() || segments.next().is_some(),
            Segment::Parameter(prefix) => segment.len() > prefix.len() && segment.starts_with(prefix),
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
            ("/user-{id}", "/user-42", true),
            ("/user-{id}", "/user-", false),
            ("/user-{id}", "/users", false),
            // What one service takes for syntax is part of a name for another.
            ("/a%2Fb", "/a%2Fb", true),
            ("/a;b/{id}", "/a;b/42", true),
            ("/a%5Cb%3F/{*rest}", "/a%5Cb%3F/x", true),
        ] {
            let (parts, ()) = Request::get(path).body(()).unwrap().into_parts();
            let scope = Scope {
                routes: Routes::These(vec![Template::parse(template).unwrap()]),
                methods: vec![],
            };
            for spelling in [Spelling::Any, Spelling::All] {
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
            ("/login", "/a%2Fb/../login"),
            ("/login", "/a%5Cb/../login"),
            ("/login", "/a\\b/../login"),
            ("/login", "/a%3F/../login"),
            ("/login", "/a%23/../login"),
            ("/login", "/login;%2Fx"),
            ("/login", "/login;x%2Fy"),
            ("/files/{id}", "/FILES/a%2Fb"),
            ("/a%2Fb", "/x%5Cy/../a%2Fb"),
            ("/static/{*rest}", "/static/a%2Fb/../../login"),
            ("/static/{*rest}", "/static/a%5Cb/../../login"),
            ("/static/{*rest}", "/static/a\\b/../../login"),
            ("/static/{*rest}", "/static/a%3F/../../login"),
            ("/static/{*rest}", "/static/a%23/../../login"),
            ("/static/{*rest}", "/static/a;%2Fb/../../login"),
            // It is the path of the template only for different services.
            ("/a;b/{*rest}", "/a;b/../../a/x"),
            ("/a%2Fb/{*rest}", "/a%2Fb/../../a/b/x"),
            // One service after the other.
            ("/login", "/b%2Fc/../login/..;%2F.."),
            ("/login", "/;%5Cx\\login"),
            ("/login", "/login//%2e%2e/%2e/../"),
            ("/login", "/login%5C..%3B//..;x..;xa"),
        ] {
            let (parts, ()) = Request::get(path).body(()).unwrap().into_parts();
            let scope = Scope {
                routes: Routes::These(vec![Template::parse(template).unwrap()]),
                methods: vec![],
            };
            assert!(scope.contains(&parts, Spelling::Any), "{template} of {path}");
            assert!(!scope.contains(&parts, Spelling::All), "{template} of {path}");
            let others = Scope {
                routes: Routes::Others(vec![scope]),
                methods: vec![],
            };
            assert!(others.contains(&parts, Spelling::Any), "others than {template}: {path}");
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
            (vec![Method::POST], "pOST", true),
            (vec![Method::GET], "get", true),
            (vec![Method::GET], "head", true),
            (vec![Method::POST], "POSTS", false),
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
            let (parts, ()) = request.into_parts();
            assert_eq!(
                scope.contains(&parts, Spelling::Any),
                expected,
                "{method} {uri} in {scope:?}"
            );

            // What is skipped is so for each service.
            let is_for_all = expected && (scope.methods.is_empty() || parts.method == *method.to_uppercase());
            let is_get = scope.methods == [Method::GET] && parts.method == Method::CONNECT;
            assert_eq!(
                scope.contains(&parts, Spelling::All),
                is_for_all && !is_get,
                "{method} {uri} in {scope:?}"
            );
        }
    }
}
