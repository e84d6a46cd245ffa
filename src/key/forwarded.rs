//! Parsers for the headers in which proxies record the client address: `X-Forwarded-For`, `Forwarded`, and headers that
//! hold a single address.
//!
//! The nearest proxy wrote the last bytes of a line, and the client may have written the first. So elements are split off from
//! the right, on bytes, and no byte changes how the elements right of it are read.

use std::{
    iter,
    net::{IpAddr, Ipv6Addr},
};

use http::{HeaderName, HeaderValue};

/// The elements of one line of `X-Forwarded-For`, from right to left: an address, or `None` for what is unknown, obfuscated or
/// malformed. No element left of it can be trusted.
pub(super) fn x_forwarded_for(line: &HeaderValue) -> impl Iterator<Item = Option<IpAddr>> {
    let last_comma = |line: &[u8]| line.iter().rposition(|byte| *byte == b',');
    from_the_right(line.as_bytes(), last_comma).map(|element| printable(element).and_then(address))
}

/// The elements of one line of `Forwarded` (RFC 7239 §4), from right to left.
pub(super) fn forwarded(line: &HeaderValue) -> impl Iterator<Item = Option<IpAddr>> {
    from_the_right(line.as_bytes(), |line| last_outside_quotes(line, b',')).map(client)
}

/// The elements of a line from right to left, without the empty ones (RFC 9110 §5.6.1.2).
fn from_the_right(line: &[u8], last_delimiter: impl Fn(&[u8]) -> Option<usize>) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(line);
    let elements = iter::from_fn(move || {
        let line = rest?;
        let Some(delimiter) = last_delimiter(line) else {
            rest = None;
            return Some(line);
        };
        rest = Some(&line[..delimiter]);
        Some(&line[delimiter + 1..])
    });
    elements.map(<[u8]>::trim_ascii).filter(|element| !element.is_empty())
}

/// The last delimiter that is not in a quoted string, with the quotes paired from the right.
///
/// In a well-formed line these are the pairs that a parser from the left finds: an escaped quote has an odd number of
/// backslashes before it, and the quote that begins a string has none.
fn last_outside_quotes(line: &[u8], delimiter: u8) -> Option<usize> {
    let mut quoted = false;
    for (position, byte) in line.iter().enumerate().rev() {
        match byte {
            b'"' if !quoted => quoted = true,
            b'"' if !ends_in_escape(&line[..position]) => quoted = false,
            _ if *byte == delimiter && !quoted => return Some(position),
            _ => {}
        }
    }
    None
}

/// Whether the line ends in a backslash that escapes the next character.
fn ends_in_escape(line: &[u8]) -> bool {
    let backslashes = line.iter().rev().take_while(|byte| **byte == b'\\').count();
    backslashes % 2 == 1
}

/// The address in a header that holds one.
pub(super) fn single(name: &HeaderName, line: &HeaderValue) -> Option<IpAddr> {
    let text = printable(line.as_bytes().trim_ascii())?;
    match text.rsplit_once(':') {
        // It has a port, also after an IPv6 address without brackets.
        Some((host, port)) if name == "cloudfront-viewer-address" && is_port(port) && !text.starts_with('[') => {
            host.parse().ok()
        }
        _ => address(text),
    }
}

/// `IPv4[:port]`, `IPv6`, `[IPv6]` or `[IPv6]:port`, the IPv6 ones with an optional `%zone`.
pub(super) fn address(text: &str) -> Option<IpAddr> {
    if let Some(rest) = text.strip_prefix('[') {
        let (address, port) = rest.split_once(']')?;
        if !port.is_empty() {
            is_port(port.strip_prefix(':')?).then_some(())?;
        }
        return ipv6(address);
    }

    match text.split_once(':') {
        None => text.parse().ok().map(IpAddr::V4),
        Some((address, port)) if !port.contains(':') && !address.is_empty() => {
            is_port(port).then_some(())?;
            address.parse().ok().map(IpAddr::V4)
        }
        Some(_) => ipv6(text),
    }
}

fn ipv6(text: &str) -> Option<IpAddr> {
    let address = match text.split_once('%') {
        Some((_, "")) => return None,
        Some((address, _)) => address,
        None => text,
    };
    address.parse::<Ipv6Addr>().ok().map(IpAddr::V6)
}

fn is_port(text: &str) -> bool {
    (1..=5).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok()
}

/// The text of an element, if it consists of tabs and printable ASCII.
fn printable(element: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(element).ok()?;
    text.bytes()
        .all(|byte| byte == b'\t' || (0x20..=0x7e).contains(&byte))
        .then_some(text)
}

/// The address of the only `for` of an element of `Forwarded`, such as `for=192.0.2.60;proto=http;by=203.0.113.43`.
fn client(element: &[u8]) -> Option<IpAddr> {
    let mut client = None;
    for pair in from_the_right(element, |rest| last_outside_quotes(rest, b';')) {
        let (name, value) = printable(pair)?.split_once('=')?;
        let value = unquoted(value).filter(|_| is_token(name))?;
        if name.eq_ignore_ascii_case("for") && client.replace(node(&value)?).is_some() {
            return None;
        }
    }
    client
}

/// The text of a token, or of a quoted string (RFC 9110 §5.6.4).
fn unquoted(value: &str) -> Option<String> {
    let Some(quoted) = value.strip_prefix('"') else {
        return is_token(value).then(|| value.to_owned());
    };
    let mut text = String::new();
    let mut rest = quoted.strip_suffix('"')?.chars();
    while let Some(next) = rest.next() {
        match next {
            '"' => return None,
            '\\' => text.push(rest.next()?),
            _ => text.push(next),
        }
    }
    Some(text)
}

/// The address of a node (RFC 7239 §6), unless it is unknown or obfuscated.
fn node(text: &str) -> Option<IpAddr> {
    let is_obfuscated = |port: &str| {
        !port.is_empty()
            && port
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    let node = match text.rsplit_once(":_") {
        Some((node, port)) if is_obfuscated(port) && (node.ends_with(']') || !node.contains(':')) => node,
        _ => text,
    };
    address(node).filter(|address| address.is_ipv4() || node.starts_with('['))
}

fn is_token(text: &str) -> bool {
    let is_of_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(is_of_token)
}
