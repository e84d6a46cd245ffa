use http::{Method, request::Parts};

use crate::key::{decoded_path, normalized_path};

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
    These(Vec<String>),
    /// Those of the requests that none of these scopes contains.
    NoneOf(Vec<Scope>),
}

/// Which spelling of a path must be that of a route. A service may take `/static/../login` and `/static//login` for other paths
/// than they look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// The path as it is, or as it is normalized: for limits and blocks, which no spelling evades.
    Either,
    /// Both: for what is skipped, which no spelling widens.
    Both,
}

impl Scope {
    pub(super) fn is_everything(&self) -> bool {
        matches!(self.routes, Routes::All) && self.methods.is_empty()
    }

    pub(super) fn contains(&self, parts: &Parts, spelling: Spelling) -> bool {
        let holds = |is_normalized| self.holds(parts, is_normalized);
        match spelling {
            Spelling::Either => holds(false) || holds(true),
            Spelling::Both => holds(false) && holds(true),
        }
    }

    /// Whether it contains the request with its path as it is, or as it is normalized.
    fn holds(&self, parts: &Parts, is_normalized: bool) -> bool {
        (self.methods.is_empty() || self.has_method(&parts.method)) && self.routes.contain(parts, is_normalized)
    }

    fn has_method(&self, method: &Method) -> bool {
        // RFC 9110 §9.3.2: HEAD is GET without the content, so handlers of GET respond to it.
        let same = if *method == Method::HEAD { &Method::GET } else { method };
        self.methods.iter().any(|one| one == method || one == same)
    }
}

impl Routes {
    fn contain(&self, parts: &Parts, is_normalized: bool) -> bool {
        match self {
            Self::All => true,
            Self::These(routes) => has_route(routes, parts, is_normalized),
            Self::NoneOf(scopes) => !scopes.iter().any(|scope| scope.holds(parts, is_normalized)),
        }
    }
}

fn has_route(routes: &[String], parts: &Parts, is_normalized: bool) -> bool {
    #[cfg(feature = "axum")]
    if let Some(matched) = parts.extensions.get::<::axum::extract::MatchedPath>() {
        let matched = matched.as_str();
        if routes.iter().any(|route| route == matched) {
            return true;
        }
        // A service with routes of its own, such as one of tonic, is matched by `/shop.Accounts/{*rest}`.
        if !matched.contains("{*") {
            return false;
        }
    }
    let path = decoded_path(parts);
    let is_listed = |path: &[u8]| routes.iter().any(|route| matches(route, path));
    match is_normalized {
        true => is_listed(&normalized_path(&path)),
        false => is_listed(&path),
    }
}

/// Whether a template such as `/users/{id}` or `/files/{*rest}` is that of a path.
fn matches(template: &str, path: &[u8]) -> bool {
    let mut segments = path.split(|byte| *byte == b'/');
    for expected in template.split('/') {
        let Some(segment) = segments.next() else { return false };
        let parameter = expected.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
        let is_same = match parameter {
            Some(name) if name.starts_with('*') => return !segment.is_empty() || segments.next().is_some(),
            Some(_) => !segment.is_empty(),
            None => expected.as_bytes() == segment,
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
            ("/login", "/%6Cogin", true),
            ("/login", "/login/", false),
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
                routes: Routes::These(vec![template.into()]),
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
            ("/login", "/static/../login"),
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
                routes: Routes::These(vec![template.into()]),
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
    fn get_is_also_for_head() {
        for (methods, method, expected) in [
            (vec![], "DELETE", true),
            (vec![Method::POST], "POST", true),
            (vec![Method::POST], "GET", false),
            (vec![Method::POST], "HEAD", false),
            (vec![Method::GET], "HEAD", true),
            (vec![Method::HEAD], "HEAD", true),
            (vec![Method::HEAD], "GET", false),
            (vec![Method::PUT, Method::POST], "POST", true),
        ] {
            let request = Request::builder().method(method).body(()).unwrap();
            let scope = Scope {
                routes: Routes::All,
                methods,
            };
            assert_eq!(
                scope.contains(&request.into_parts().0, Spelling::Either),
                expected,
                "{method} in {scope:?}"
            );
        }
    }
}
