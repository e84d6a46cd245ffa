//! What proxies write down: lists of addresses in `X-Forwarded-For` and `Forwarded`, and single addresses.

use std::net::{IpAddr, Ipv6Addr};

use http::HeaderValue;

/// One hop that a proxy wrote down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hop {
    Address(IpAddr),
    /// Unknown, obfuscated or malformed: nothing left of it can be trusted.
    Opaque,
    /// A whole line that is no text, and so who knows how many hops.
    Unreadable,
}

/// The hops of one line of `X-Forwarded-For`, first to last.
pub(super) fn x_forwarded_for(line: &HeaderValue) -> Vec<Hop> {
    let Some(line) = printable(line) else {
        return vec![Hop::Unreadable];
    };
    let elements = line.split(',').map(trim).filter(|element| !element.is_empty());
    elements
        .map(|element| address(element).map_or(Hop::Opaque, Hop::Address))
        .collect()
}

/// The hops of one line of `Forwarded` (RFC 7239 §4), first to last. A line that does not parse is one opaque hop.
pub(super) fn forwarded(line: &HeaderValue) -> Vec<Hop> {
    printable(line)
        .and_then(|line| Elements(line).parse())
        .unwrap_or_else(|| vec![Hop::Opaque])
}

/// The address in a header that holds one.
pub(super) fn single(line: &HeaderValue) -> Option<IpAddr> {
    address(trim(printable(line)?))
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

fn printable(line: &HeaderValue) -> Option<&str> {
    line.to_str().ok() // tab and 0x20 to 0x7E
}

fn trim(text: &str) -> &str {
    text.trim_matches([' ', '\t'])
}

/// What is left of a line of `Forwarded`.
struct Elements<'a>(&'a str);

impl Elements<'_> {
    fn parse(mut self) -> Option<Vec<Hop>> {
        let mut hops = Vec::new();
        loop {
            self.skip_space();
            if !matches!(self.peek(), None | Some(b',')) {
                hops.push(self.element()?);
            }
            match self.next() {
                None => return Some(hops),
                Some(b',') => {}
                Some(_) => return None,
            }
        }
    }

    /// `for=192.0.2.60;proto=http;by=203.0.113.43`
    fn element(&mut self) -> Option<Hop> {
        let mut hop = None;
        let mut repeated = false;
        loop {
            self.skip_space();
            if !matches!(self.peek(), None | Some(b',' | b';')) {
                let name = self.token()?;
                (self.next()? == b'=').then_some(())?;
                let value = self.value()?;
                if name.eq_ignore_ascii_case("for") {
                    repeated |= hop.is_some();
                    hop = Some(node(&value).map_or(Hop::Opaque, Hop::Address));
                }
            }
            self.skip_space();
            if self.peek() != Some(b';') {
                let once = hop.filter(|_| !repeated);
                return Some(once.unwrap_or(Hop::Opaque));
            }
            self.next();
        }
    }

    fn token(&mut self) -> Option<String> {
        let end = self.0.bytes().position(|byte| !is_token(byte)).unwrap_or(self.0.len());
        let (token, rest) = self.0.split_at_checked(end)?;
        self.0 = rest;
        (!token.is_empty()).then(|| token.to_owned())
    }

    fn value(&mut self) -> Option<String> {
        if self.peek() != Some(b'"') {
            return self.token();
        }

        // RFC 9110 §5.6.4
        self.next();
        let mut value = String::new();
        loop {
            match self.next()? {
                b'"' => return Some(value),
                b'\\' => value.push(char::from(self.next()?)),
                byte => value.push(char::from(byte)),
            }
        }
    }

    fn skip_space(&mut self) {
        self.0 = self.0.trim_start_matches([' ', '\t']);
    }

    fn peek(&self) -> Option<u8> {
        self.0.bytes().next()
    }

    fn next(&mut self) -> Option<u8> {
        let next = self.peek()?;
        self.0 = self.0.get(1..)?;
        Some(next)
    }
}

/// A node of RFC 7239 §6, unless it is unknown or obfuscated.
fn node(text: &str) -> Option<IpAddr> {
    let (name, port) = match text.strip_prefix('[') {
        Some(rest) => rest
            .split_once(']')
            .map(|(name, rest)| (name, rest.strip_prefix(':').or(empty(rest))))?,
        None => match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, Some("")),
        },
    };
    let port = port?;
    let valid = match port.strip_prefix('_') {
        // obfport
        Some(rest) => {
            !rest.is_empty()
                && rest
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        }
        None => is_port(port) || (port.is_empty() && !text.ends_with(':')),
    };
    valid.then_some(())?;

    match text.starts_with('[') {
        true => ipv6(name),
        false => name.parse().ok().map(IpAddr::V4),
    }
}

fn empty(text: &str) -> Option<&str> {
    text.is_empty().then_some("")
}

/// RFC 9110 §5.6.2
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_have_a_port_and_a_zone() {
        for (text, parsed) in [
            ("192.0.2.1", "192.0.2.1"),
            ("192.0.2.1:65535", "192.0.2.1"),
            ("2001:db8::1", "2001:db8::1"),
            ("2001:db8::1:443", "2001:db8::1:443"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("[2001:db8::1]:0", "2001:db8::1"),
            ("[fe80::1%eth0]:80", "fe80::1"),
            ("fe80::1%25", "fe80::1"),
            ("::ffff:192.0.2.1", "::ffff:192.0.2.1"),
        ] {
            assert_eq!(address(text), Some(parsed.parse().unwrap()), "{text}");
        }
        for text in [
            "",
            " ",
            ":",
            ":80",
            "192.0.2",
            "192.0.2.01",
            "192.0.2.1:",
            "192.0.2.1:65536",
            "192.0.2.1:+1",
            "[",
            "[]",
            "[192.0.2.1]",
            "[2001:db8::1",
            "[2001:db8::1]80",
            "[2001:db8::1]:",
            "2001:db8::1]",
            "fe80::1%",
            "unknown",
            "_hidden",
            "localhost",
            "0x7f.1",
            "1.2.3.4.5",
        ] {
            assert_eq!(address(text), None, "{text}");
        }
    }

    #[test]
    fn forwarded_is_read_as_the_rfc_has_it() {
        let hop = |text: &str| Hop::Address(text.parse().unwrap());
        for (line, hops) in [
            ("for=\"_gazonk\"", vec![Hop::Opaque]),
            ("For=\"[2001:db8:cafe::17]:4711\"", vec![hop("2001:db8:cafe::17")]),
            ("for=192.0.2.60;proto=http;by=203.0.113.43", vec![hop("192.0.2.60")]),
            (
                "for=192.0.2.43, for=198.51.100.17",
                vec![hop("192.0.2.43"), hop("198.51.100.17")],
            ),
            ("proto=https; for=192.0.2.43 ;by=_x,,", vec![hop("192.0.2.43")]),
            ("for=\"192.0.2.43:_p.1\"", vec![hop("192.0.2.43")]),
            ("for=\"1\\92.0.2.43\"", vec![hop("192.0.2.43")]),
            (
                "for=\"_a,b\\\"\";by=x, for=192.0.2.43",
                vec![Hop::Opaque, hop("192.0.2.43")],
            ),
            (
                "for=192.0.2.43;for=192.0.2.44, for=192.0.2.45",
                vec![Hop::Opaque, hop("192.0.2.45")],
            ),
            ("proto=https", vec![Hop::Opaque]),
            ("for=2001:db8::1", vec![Hop::Opaque]),
            ("for=\"2001:db8::1\"", vec![Hop::Opaque]),
            ("for=\"192.0.2.43:\"", vec![Hop::Opaque]),
            ("for=\"", vec![Hop::Opaque]),
            ("for = 192.0.2.43", vec![Hop::Opaque]),
            ("for=192.0.2.43 for=192.0.2.44", vec![Hop::Opaque]),
            ("", vec![]),
        ] {
            assert_eq!(forwarded(&HeaderValue::from_str(line).unwrap()), hops, "{line}");
        }
    }
}
