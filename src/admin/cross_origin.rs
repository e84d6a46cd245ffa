//! Protection against requests that other sites make in the browser of an operator (CSRF).

use axum::http::{HeaderMap, Method, Uri, header};

/// Refuses a request that a page of another origin has made.
///
/// Browsers send `Sec-Fetch-Site` to HTTPS and to localhost (W3C Fetch Metadata, section 2.3), and otherwise at least `Origin`
/// with each `POST` (Fetch, section 3.1). A client that sends neither is not a browser, so it carries no credentials of
/// an operator without the operator's doing. Both names are forbidden to scripts (Fetch, section 2.2.2).
///
/// To an address that an operator enters, the browser sends `Sec-Fetch-Site: none`, which is a `GET`. A `GET` for an image of
/// another page has no `Origin`, but the page as `Referer`, unless it has suppressed that.
pub(super) fn verify(method: &Method, headers: &HeaderMap, uri: &Uri) -> Result<(), CrossOrigin> {
    if let Some(site) = headers.get("sec-fetch-site") {
        return match site.as_bytes() {
            b"same-origin" => Ok(()),
            b"none" if method.is_safe() => Ok(()),
            _ => Err(CrossOrigin),
        };
    }
    let referer = headers.get(header::REFERER).filter(|_| method.is_safe());
    let Some(origin) = headers.get(header::ORIGIN).or(referer) else {
        return Ok(());
    };
    // RFC 6454 section 7: `null`, or a scheme with a host and its port; a `Referer` goes on with the path.
    let origin = origin.to_str().ok().and_then(|origin| {
        let (_, rest) = origin.split_once("://")?;
        rest.split('/').next()
    });
    let host = match headers.get(header::HOST) {
        Some(host) => host.to_str().ok(),
        None => uri.authority().map(|authority| authority.as_str()), // HTTP/2
    };
    match origin.zip(host) {
        Some((origin, host)) if origin.eq_ignore_ascii_case(host) => Ok(()),
        _ => Err(CrossOrigin),
    }
}

/// A page of another origin has made the request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CrossOrigin;

#[cfg(test)]
mod tests {
    use super::*;

    fn verify_fields(fields: &[(&'static str, &'static str)], uri: &'static str) -> Result<(), CrossOrigin> {
        verify_as(&Method::POST, fields, uri)
    }

    fn verify_as(
        method: &Method,
        fields: &[(&'static str, &'static str)],
        uri: &'static str,
    ) -> Result<(), CrossOrigin> {
        let fields = fields.iter().map(|(name, value)| {
            let name: axum::http::HeaderName = name.parse().unwrap();
            (name, value.parse().unwrap())
        });
        verify(method, &fields.collect(), &Uri::from_static(uri))
    }

    #[test]
    fn a_get_is_made_by_the_page_by_hand_or_by_another_program() {
        let host = ("host", "a.example");
        for (fields, expected) in [
            (&[host][..], Ok(())),
            (&[host, ("sec-fetch-site", "same-origin")], Ok(())),
            (&[host, ("sec-fetch-site", "none")], Ok(())),
            (&[host, ("referer", "https://a.example/admin?x=//y")], Ok(())),
            (&[host, ("sec-fetch-site", "cross-site")], Err(CrossOrigin)),
            (&[host, ("sec-fetch-site", "same-site")], Err(CrossOrigin)),
            (&[host, ("origin", "http://evil.example")], Err(CrossOrigin)),
            (&[host, ("referer", "http://evil.example/a.example")], Err(CrossOrigin)),
            (&[host, ("referer", "http://evil.example")], Err(CrossOrigin)),
        ] {
            for method in [Method::GET, Method::HEAD] {
                assert_eq!(verify_as(&method, fields, "/subject"), expected, "{fields:?}");
            }
        }
    }

    #[test]
    fn requests_of_the_page_and_of_other_programs_pass() {
        for fields in [
            &[("host", "a.example")][..],
            &[("host", "a.example"), ("sec-fetch-site", "same-origin")],
            // A proxy has replaced `Host`.
            &[
                ("host", "10.0.0.1"),
                ("sec-fetch-site", "same-origin"),
                ("origin", "https://a.example"),
            ],
            &[("host", "a.example:3000"), ("origin", "http://a.example:3000")],
            &[("host", "a.example"), ("origin", "http://A.example")],
        ] {
            assert_eq!(verify_fields(fields, "/reset"), Ok(()), "{fields:?}");
        }
        assert_eq!(
            verify_fields(&[("origin", "https://a.example")], "https://a.example/reset"),
            Ok(())
        );
    }

    #[test]
    fn requests_of_other_sites_do_not() {
        for fields in [
            &[("host", "a.example"), ("sec-fetch-site", "cross-site")][..],
            &[
                ("host", "a.example"),
                ("sec-fetch-site", "same-site"),
                ("origin", "http://a.example"),
            ],
            &[("host", "a.example"), ("sec-fetch-site", "none")],
            &[("host", "a.example"), ("origin", "http://evil.example")],
            &[("host", "a.example"), ("origin", "http://a.example:81")],
            &[("host", "a.example"), ("origin", "null")],
            &[("host", "a.example"), ("origin", "a.example")],
            &[("origin", "http://a.example")],
        ] {
            assert_eq!(verify_fields(fields, "/reset"), Err(CrossOrigin), "{fields:?}");
        }
    }
}
