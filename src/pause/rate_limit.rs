use std::time::Duration;

use http::HeaderMap;

use crate::headers::RATELIMIT;

/// The longest wait of the policies in `RateLimit` of which nothing remains, in the syntax of any draft from -07 on.
///
/// In drafts -08 to -11 it is a list of `"name";r=0;t=30`; in draft -07 `limit=10, remaining=0, reset=30`.
pub(super) fn wait_of_exhausted(headers: &HeaderMap) -> Option<Duration> {
    let lines = headers.get_all(RATELIMIT).iter().filter_map(|line| line.to_str().ok());
    let lines: Vec<&str> = lines.collect();
    // Lines are one list, or one dictionary (RFC 9651 §4.2).
    let joined = lines.join(",");
    let of_members = split(&joined, ',').map(|member| exhausted(member, ';', ["r", "t"]));
    let of_lines = lines.iter().copied().chain([&*joined]);
    let of_lines = of_lines.map(|line| exhausted(line, ',', ["remaining", "reset"]));
    let waits = of_members.chain(of_lines).flatten();
    waits.max().map(Duration::from_secs)
}

/// The seconds of the second parameter if the first one is 0. Of equal names the last one counts (RFC 9651 §4.2.3.2).
fn exhausted(text: &str, delimiter: char, names: [&str; 2]) -> Option<u64> {
    let [remaining, wait] = names.map(|name| {
        let parameters = split(text, delimiter).filter_map(|parameter| parameter.split_once('='));
        let (_, value) = parameters.filter(|(key, _)| key.trim() == name).last()?;
        // Without its own parameters.
        value.split(';').next()?.trim().parse::<u64>().ok()
    });
    wait.filter(|_| remaining == Some(0))
}

/// Splits at delimiters outside of strings (RFC 9651 §3.3.3).
fn split(text: &str, delimiter: char) -> impl Iterator<Item = &str> {
    let (mut is_string, mut is_escaped) = (false, false);
    text.split(move |char| {
        if is_escaped {
            is_escaped = false;
            return false;
        }
        match char {
            '\\' => is_escaped = is_string,
            '"' => is_string = !is_string,
            _ => {}
        }
        char == delimiter && !is_string
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn the_wait_is_that_of_the_policies_of_which_nothing_remains() {
        for (lines, expected) in [
            (&["\"default\";r=0;t=30"][..], Some(30)),
            (&["\"a\";r=0;t=3, \"b\";r=0;t=30, \"c\";r=1;t=300"], Some(30)),
            (&["\"a\";r=0;t=3", "\"b\";r=0;t=30"], Some(30)),
            (&["\"a\";r=0;pk=:cHsdsRa894==:;t=7"], Some(7)),
            (&["limit=10, remaining=0, reset=30"], Some(30)),
            (&["limit=10,remaining=0,reset=30"], Some(30)),
            (&["limit=10, remaining=3, reset=30"], None),
            (&["\"a\";r=0"], None),
            (&["\"a\";r=0;t=soon"], None),
            (&["\"a\";r=0;t=-3"], None),
            (&["\"x;r=0;t=99;\";r=5;t=1"], None),
            (&["\"x, \\\";r=0;t=99\";r=0;t=1"], Some(1)),
            (&["\"a\";r=0;t=3;t=4"], Some(4)),
            (&["limit=10;x=1, remaining=0;x=1, reset=30;y"], Some(30)),
            (&["limit=10, remaining=0", "reset=30"], Some(30)),
            (
                &["limit=10, remaining=0, reset=30", "limit=5, remaining=3, reset=10"],
                Some(30),
            ),
            (&["10"], None),
            (&[], None),
        ] {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(RATELIMIT, HeaderValue::from_static(line));
            }
            assert_eq!(
                wait_of_exhausted(&headers),
                expected.map(Duration::from_secs),
                "{lines:?}"
            );
        }
    }
}
