use std::time::Duration;

use http::HeaderMap;

use crate::headers::RATELIMIT;

/// The longest wait of the policies in `RateLimit` of which nothing remains, in the syntax of any draft from -07 on.
///
/// In drafts -08 to -11 it is a list of `"name";r=0;t=30`; in draft -07 `limit=10, remaining=0, reset=30`.
pub(super) fn wait_of_exhausted(headers: &HeaderMap) -> Option<Duration> {
    let lines = headers.get_all(RATELIMIT).iter().filter_map(|line| line.to_str().ok());
    let waits = lines.flat_map(|line| {
        let of_members = line.split(',').map(|member| exhausted(member, ';', ["r", "t"]));
        let of_line = exhausted(line, ',', ["remaining", "reset"]);
        of_members.chain([of_line]).flatten()
    });
    waits.max().map(Duration::from_secs)
}

/// The seconds of the second parameter if the first one is 0.
fn exhausted(text: &str, delimiter: char, names: [&str; 2]) -> Option<u64> {
    let [remaining, wait] = names.map(|name| {
        let mut parameters = text.split(delimiter).filter_map(|parameter| parameter.split_once('='));
        let (_, value) = parameters.find(|(key, _)| key.trim() == name)?;
        value.trim().parse::<u64>().ok()
    });
    wait.filter(|_| remaining == Some(0))
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
