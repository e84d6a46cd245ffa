//! Untrusted input against slow and obvious models: lists of addresses, paths, and limits as text.

use std::{net::IpAddr, time::Duration};

use axum::{Router, extract, routing::get};
use http::{HeaderName, HeaderValue, Request, Uri};
use http_body_util::BodyExt;
use proptest::{
    collection::vec,
    option,
    prelude::{Just, ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, proptest},
    prop_oneof, sample,
};
use tokio::runtime::{self, Runtime};
use tower::ServiceExt;
use tower_quota::{
    FixedWindow, Key, KeyExtractor, Limit, Policy, SlidingCounter, SlidingLog, TokenBucket,
    key::{self, ClientIpSource, PeerAddr},
    limit::Calendar,
};

const CASES: u32 = 2_000;

/// The header that holds the client address.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    XForwardedFor,
    Hop(usize),
    Forwarded,
    RealIp,
}

impl Source {
    fn extractor(self) -> key::Ip {
        let source = match self {
            Self::XForwardedFor => ClientIpSource::XForwardedFor,
            Self::Hop(n) => ClientIpSource::XForwardedForHop(n),
            Self::Forwarded => ClientIpSource::Forwarded,
            Self::RealIp => ClientIpSource::Header(HeaderName::from_static("x-real-ip")),
        };
        key::client_ip(source)
            .trusted(["10.0.0.0/8", "fd00::/8"])
            .unwrap()
            .ipv6_prefix(128)
    }

    fn header(self) -> &'static str {
        match self {
            Self::XForwardedFor | Self::Hop(_) => "x-forwarded-for",
            Self::Forwarded => "forwarded",
            Self::RealIp => "x-real-ip",
        }
    }

    /// `ip` as a proxy writes it.
    fn written(self, ip: IpAddr) -> String {
        match (self, ip) {
            (Self::Forwarded, IpAddr::V6(v6)) => format!("for=\"[{v6}]:4711\";proto=https;by=\"_proxy\""),
            (Self::Forwarded, IpAddr::V4(v4)) => format!("for=\"{v4}:4711\";proto=https"),
            _ => ip.to_string(),
        }
    }
}

fn key_of(source: Source, peer: IpAddr, fields: &[(&str, Vec<u8>)]) -> String {
    let mut request = Request::get("/").extension(PeerAddr((peer, 4711).into()));
    for (name, value) in fields {
        request = request.header(*name, HeaderValue::from_bytes(value).expect("a header value"));
    }
    let (parts, ()) = request.body(()).expect("a request").into_parts();
    let key = source.extractor().extract(&parts).expect("a key").expect("a key");
    key.to_string().strip_prefix("ip=").expect("an address").to_owned()
}

/// The rules for client addresses, line by line.
mod model {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use super::Source;

    pub(super) fn canon(ip: IpAddr) -> IpAddr {
        let IpAddr::V6(v6) = ip else { return ip };
        match v6.segments() {
            [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
                let [a, b] = high.to_be_bytes();
                let [c, d] = low.to_be_bytes();
                IpAddr::V4(Ipv4Addr::new(a, b, c, d))
            }
            _ => ip,
        }
    }

    pub(super) fn trusted(ip: IpAddr) -> bool {
        match canon(ip) {
            IpAddr::V4(v4) => v4.octets()[0] == 10,
            IpAddr::V6(v6) => v6.octets()[0] == 0xfd,
        }
    }

    pub(super) fn client(source: Source, peer: IpAddr, lines: &[Vec<u8>]) -> IpAddr {
        let peer = canon(peer);
        if !trusted(peer) {
            return peer;
        }
        let entries: Vec<Option<IpAddr>> = lines.iter().flat_map(|line| entries(source, line)).collect();
        match source {
            Source::Hop(n) => entries.into_iter().rev().nth(n - 1).flatten().map_or(peer, canon),
            Source::RealIp => match entries[..] {
                [Some(one)] if lines.len() == 1 => canon(one),
                _ => peer,
            },
            Source::XForwardedFor | Source::Forwarded => walk(peer, &entries),
        }
    }

    fn walk(peer: IpAddr, entries: &[Option<IpAddr>]) -> IpAddr {
        let mut last = peer;
        let mut examined = 0;
        for entry in entries.iter().rev() {
            examined += 1;
            if examined > 32 {
                return last;
            }
            match entry {
                None => return last,
                Some(entry) if trusted(*entry) => last = canon(*entry),
                Some(entry) => return canon(*entry),
            }
        }
        last
    }

    fn entries(source: Source, line: &[u8]) -> Vec<Option<IpAddr>> {
        let elements = match source {
            Source::Forwarded => split_outside_quotes(line),
            Source::RealIp => vec![line.to_vec()],
            Source::XForwardedFor | Source::Hop(_) => line.split(|byte| *byte == b',').map(<[u8]>::to_vec).collect(),
        };
        let entries = elements.iter().filter_map(|element| {
            if element
                .iter()
                .any(|byte| *byte != b'\t' && !(0x20..=0x7e).contains(byte))
            {
                return Some(None);
            }
            let element = std::str::from_utf8(element).expect("ASCII").trim_matches(is_ows);
            match source {
                Source::RealIp => Some(entry(element)),
                _ if element.is_empty() => None,
                Source::Forwarded => Some(forwarded(element).and_then(|nodes| nodes[0])),
                Source::XForwardedFor | Source::Hop(_) => Some(entry(element)),
            }
        });
        let entries: Vec<_> = entries.collect();

        // In a well-formed line, a parser from the left finds the same.
        let text = std::str::from_utf8(line).ok().filter(|_| source == Source::Forwarded);
        if let Some(whole) = text.and_then(forwarded) {
            assert_eq!(entries, whole, "{text:?}");
        }
        entries
    }

    /// Cuts at the commas outside quotes, with the quotes paired from the right.
    fn split_outside_quotes(line: &[u8]) -> Vec<Vec<u8>> {
        let mut elements = vec![Vec::new()];
        let mut closing_quote = false;
        let mut bytes = line.iter().copied().rev().peekable();
        while let Some(byte) = bytes.next() {
            if byte == b',' && !closing_quote {
                elements.push(Vec::new());
                continue;
            }
            let element = elements.last_mut().expect("one element");
            element.push(byte);
            if byte != b'"' {
                continue;
            }
            if !closing_quote {
                closing_quote = true;
                continue;
            }
            let mut backslashes = 0;
            while bytes.peek() == Some(&b'\\') {
                element.extend(bytes.next());
                backslashes += 1;
            }
            closing_quote = backslashes % 2 == 1;
        }
        for element in &mut elements {
            element.reverse();
        }
        elements.reverse();
        elements
    }

    fn is_ows(c: char) -> bool {
        c == ' ' || c == '\t'
    }

    fn is_port(text: &str) -> bool {
        (1..=5).contains(&text.len())
            && text.chars().all(|c| c.is_ascii_digit())
            && text.parse::<u32>().is_ok_and(|port| port <= 65_535)
    }

    fn v4(text: &str) -> Option<IpAddr> {
        text.parse::<Ipv4Addr>().ok().map(IpAddr::V4)
    }

    /// With or without a zone: all ways to cut one off are tried.
    fn v6(text: &str) -> Option<IpAddr> {
        let cuts = text.char_indices().filter(|(at, c)| *c == '%' && at + 1 < text.len());
        let mut zoneless = cuts.map(|(at, _)| &text[..at]).chain([text]);
        zoneless.find_map(|text| text.parse::<Ipv6Addr>().ok()).map(IpAddr::V6)
    }

    /// `[IPv6]`
    fn bracketed(text: &str) -> Option<IpAddr> {
        let inner = text.strip_prefix('[')?.strip_suffix(']')?;
        if inner.contains(']') { None } else { v6(inner) }
    }

    /// `IPv4[:port]`, `IPv6`, `[IPv6]`, `[IPv6]:port`: all ways to cut a port off are tried.
    fn entry(text: &str) -> Option<IpAddr> {
        let cuts = text
            .char_indices()
            .filter(|(at, c)| *c == ':' && is_port(&text[at + 1..]));
        let mut portless = cuts.map(|(at, _)| &text[..at]);
        v4(text)
            .or_else(|| v6(text).filter(|_| !text.starts_with('[')))
            .or_else(|| bracketed(text))
            .or_else(|| portless.find_map(|text| v4(text).or_else(|| bracketed(text))))
    }

    #[derive(Clone, Copy)]
    enum State {
        /// Before a pair, or the end of an element.
        Pair,
        Name,
        Value,
        Token,
        Quoted,
        Escaped,
        /// After a value.
        End,
    }

    fn is_tchar(c: char) -> bool {
        c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c)
    }

    /// Forwarded = 1#( [ pair ] *( ";" [ pair ] ) ), with spaces around the delimiters.
    fn forwarded(line: &str) -> Option<Vec<Option<IpAddr>>> {
        let mut elements: Vec<Option<IpAddr>> = Vec::new();
        let (mut state, mut name, mut value) = (State::Pair, String::new(), String::new());
        let mut nodes: Vec<String> = Vec::new();
        let mut empty = true;

        for c in line.chars().chain([',']) {
            state = match (state, c) {
                (State::Pair | State::End, ' ' | '\t') if empty => State::Pair,
                (State::Pair, ' ' | '\t') => State::Pair,
                (State::End, ' ' | '\t') => State::End,
                (State::Token, ' ' | '\t' | ';' | ',') | (State::Pair | State::End, ';' | ',') => {
                    if matches!(state, State::Token) && name.eq_ignore_ascii_case("for") {
                        nodes.push(std::mem::take(&mut value));
                    }
                    match c {
                        ';' => {
                            empty = false;
                            State::Pair
                        }
                        ',' => {
                            if !empty {
                                elements.push(match &nodes[..] {
                                    [one] => node(one),
                                    _ => None,
                                });
                            }
                            nodes.clear();
                            empty = true;
                            State::Pair
                        }
                        _ => State::End,
                    }
                }
                (State::Pair, c) if is_tchar(c) => {
                    empty = false;
                    name = c.to_string();
                    State::Name
                }
                (State::Name, '=') => {
                    value.clear();
                    State::Value
                }
                (State::Name, c) if is_tchar(c) => {
                    name.push(c);
                    State::Name
                }
                (State::Value, '"') => State::Quoted,
                (State::Value | State::Token, c) if is_tchar(c) => {
                    value.push(c);
                    State::Token
                }
                (State::Quoted, '"') => {
                    if name.eq_ignore_ascii_case("for") {
                        nodes.push(std::mem::take(&mut value));
                    }
                    State::End
                }
                (State::Quoted, '\\') => State::Escaped,
                (State::Quoted | State::Escaped, c) => {
                    value.push(c);
                    State::Quoted
                }
                _ => return None,
            };
        }
        matches!(state, State::Pair).then_some(elements)
    }

    /// A node of RFC 7239 §6 that is an address: all ways to cut a port off are tried.
    fn node(text: &str) -> Option<IpAddr> {
        let is_node_port = |text: &str| {
            let obfuscated = text.strip_prefix('_');
            is_port(text)
                || obfuscated.is_some_and(|rest| {
                    !rest.is_empty() && rest.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
                })
        };
        let cuts = text
            .char_indices()
            .filter(|(at, c)| *c == ':' && is_node_port(&text[at + 1..]));
        let portless = cuts.map(|(at, _)| &text[..at]);
        portless
            .chain([text])
            .find_map(|text| v4(text).or_else(|| bracketed(text)))
    }
}

/// Addresses that the rules treat differently, more often than by chance.
fn addresses() -> impl Strategy<Value = IpAddr> {
    let named = [
        "10.0.0.2",
        "10.255.255.255",
        "11.0.0.0",
        "198.51.100.9",
        "127.0.0.1",
        "::1",
        "::",
        "fd00::1",
        "fe80::1",
        "2001:db8::9",
        "2001:db8::10.0.0.1",
        "::ffff:10.0.0.3",
        "::ffff:198.51.100.9",
        "64:ff9b::a00:3",
        "64:ff9b::c633:6409",
        "64:ff9b:1::1",
        "::10.0.0.1",
    ];
    let named: Vec<IpAddr> = named.iter().map(|text| text.parse().expect("an address")).collect();
    prop_oneof![4 => sample::select(named), 1 => any::<IpAddr>()]
}

fn trusted() -> impl Strategy<Value = IpAddr> {
    addresses().prop_filter("trusted", |ip| model::trusted(*ip))
}

fn untrusted() -> impl Strategy<Value = IpAddr> {
    addresses().prop_filter("not trusted", |ip| !model::trusted(*ip))
}

/// The bytes of these that a server accepts in the value of a header.
fn field(bytes: Vec<u8>) -> Vec<u8> {
    let allowed = |byte: u8| byte == b'\t' || byte >= 0x20 && byte != 0x7f;
    bytes.into_iter().filter(|byte| allowed(*byte)).collect()
}

/// One entry, or text that resembles one.
fn entries() -> impl Strategy<Value = String> {
    let port = prop_oneof![
        4 => Just(String::new()),
        2 => any::<u32>().prop_map(|port| format!(":{}", port % 70_000)),
        1 => sample::select(vec![":", ":_p1", ":_", ":+1", ":00080", ":000080", ":65536", ":_a.b-c", "x"]).prop_map(str::to_owned),
    ];
    let zone = prop_oneof![6 => Just(""), 1 => Just("%eth0"), 1 => Just("%"), 1 => Just("%25a"), 1 => Just("%a]")];
    let braces = sample::select(vec![("", ""), ("[", "]"), ("[", ""), ("", "]")]);
    let address = (addresses(), zone, braces, port)
        .prop_map(|(ip, zone, (open, close), port)| format!("{open}{ip}{zone}{close}{port}"));
    let odd = sample::select(vec![
        "",
        " ",
        "unknown",
        "_hidden",
        "198.51.100",
        "198.51.100.09",
        "0x7f.1",
        "1.2.3.4.5",
        "[]",
        "[",
        "]",
        "::ffff:1.2.3",
        "2001:DB8::A",
        "1",
        "localhost",
        "null",
        "\t",
    ]);
    prop_oneof![5 => address, 1 => odd.prop_map(str::to_owned), 1 => "[0-9a-f:.%\\[\\]]{0,12}"]
}

/// One element of `Forwarded`, or text that resembles one.
fn elements() -> impl Strategy<Value = String> {
    let name = sample::select(vec![
        "for", "For", "FOR", "by", "proto", "host", "secret", "", "fo r", "for ",
    ]);
    let quotes = sample::select(vec![
        ("", ""),
        ("\"", "\""),
        ("\"", "\""),
        ("\"", ""),
        ("\"\\", "\""),
        ("\"", "\\\""),
    ]);
    let pair =
        (name, quotes, entries()).prop_map(|(name, (open, close), entry)| format!("{name}={open}{entry}{close}"));
    let pair = prop_oneof![8 => pair, 1 => Just(String::new()), 1 => "[a-z=\";, \\\\\\t]{0,6}"];
    let delimiter = sample::select(vec![";", "; ", " ;\t", ";;"]);
    (vec(pair, 0..4), delimiter).prop_map(|(pairs, delimiter)| pairs.join(delimiter))
}

fn lines(entry: impl Strategy<Value = String>) -> impl Strategy<Value = Vec<Vec<u8>>> {
    let delimiter = sample::select(vec![",", ", ", " ,\t", ",,", " , , "]);
    let line = (vec(entry, 0..5), delimiter).prop_map(|(entries, delimiter)| entries.join(delimiter).into_bytes());
    let noise = vec(any::<u8>(), 0..30);
    let soup = "[0-9a-fo.:\\[\\]%,; \\t\"=\\\\_r]{0,30}".prop_map(String::into_bytes);
    let line = prop_oneof![12 => line, 1 => noise, 2 => soup].prop_map(field);
    prop_oneof![
        20 => vec(line, 0..4),
        1 => (30..40usize, 0..3usize).prop_map(|(hops, more)| {
            let hops: Vec<_> = (0..hops).map(|n| format!("10.0.0.{n}")).collect();
            vec![hops.join(",").into_bytes(); more]
        }),
    ]
}

/// Adds the element of a proxy, to the last line or as a line of its own.
fn append(lines: &mut Vec<Vec<u8>>, own_line: bool, element: &[u8]) {
    match lines.last_mut() {
        Some(line) if !own_line => {
            line.extend_from_slice(b", ");
            line.extend_from_slice(element);
        }
        _ => lines.push(element.to_vec()),
    }
}

/// Headers of the client's own, beside the one that the proxy writes.
fn others() -> impl Strategy<Value = Vec<(&'static str, Vec<u8>)>> {
    let name = sample::select(vec![
        "x-forwarded-for",
        "forwarded",
        "x-real-ip",
        "cf-connecting-ip",
        "x-client-ip",
        "true-client-ip",
        "x_forwarded_for",
        "via",
        "host",
    ]);
    let value = prop_oneof![entries(), elements()].prop_map(|text| field(text.into_bytes()));
    vec((name, value), 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn x_forwarded_for_is_read_as_by_the_model(
        peer in addresses(), lines in lines(entries()), n in option::of(1..5usize),
    ) {
        let source = n.map_or(Source::XForwardedFor, Source::Hop);
        let fields: Vec<_> = lines.iter().map(|line| (source.header(), line.clone())).collect();
        prop_assert_eq!(key_of(source, peer, &fields), model::client(source, peer, &lines).to_string());
    }

    #[test]
    fn forwarded_is_read_as_by_the_model(peer in trusted(), lines in lines(elements())) {
        let fields: Vec<_> = lines.iter().map(|line| ("forwarded", line.clone())).collect();
        let client = model::client(Source::Forwarded, peer, &lines);
        prop_assert_eq!(key_of(Source::Forwarded, peer, &fields), client.to_string());
    }

    #[test]
    fn a_single_address_is_read_as_by_the_model(peer in trusted(), lines in vec(entries(), 0..3)) {
        let lines: Vec<_> = lines.into_iter().map(|line| field(line.into_bytes())).collect();
        let fields: Vec<_> = lines.iter().map(|line| ("x-real-ip", line.clone())).collect();
        prop_assert_eq!(key_of(Source::RealIp, peer, &fields), model::client(Source::RealIp, peer, &lines).to_string());
    }

    /// Each of two proxies appends to the last line or adds one of its own.
    #[test]
    fn no_client_behind_proxies_chooses_a_key_in_a_list(
        client in untrusted(),
        proxies in (trusted(), trusted()),
        claims in lines(prop_oneof![entries(), elements()]),
        others in others(),
        own_lines in (any::<bool>(), any::<bool>()),
        source in sample::select(vec![Source::XForwardedFor, Source::Hop(2), Source::Forwarded]),
    ) {
        let mut lines = claims;
        for (hop, own_line) in [(client, own_lines.0), (proxies.0, own_lines.1)] {
            append(&mut lines, own_line, source.written(hop).as_bytes());
        }
        let mut fields: Vec<_> = others.into_iter().filter(|(name, _)| *name != source.header()).collect();
        fields.extend(lines.into_iter().map(|line| (source.header(), line)));

        let key = key_of(source, proxies.1, &fields);
        prop_assert_eq!(key, model::canon(client).to_string(), "{:?}", fields);
    }

    /// The element of the proxy is an address that is not trusted, or no address.
    #[test]
    fn no_bytes_of_a_client_change_how_the_element_of_the_proxy_is_read(
        proxy in trusted(),
        client in untrusted(),
        kind in 0..4usize,
        quoted in "[ -~]{0,8}|[\",\\\\;=]{0,8}",
        claims in lines(prop_oneof![entries(), elements()]),
        claim in vec(any::<u8>(), 0..12).prop_map(field),
        punctuation in sample::select(vec!["", "\"", "\\", "\"\\", "\\\"", "for=\"", "by=\"\\", ",", "\u{ff}"]),
        own_line in any::<bool>(),
        source in sample::select(vec![Source::XForwardedFor, Source::Hop(1), Source::Forwarded]),
    ) {
        let quoted = quoted.replace('\\', "\\\\").replace('"', "\\\"");
        let element = match (source, kind) {
            (Source::Forwarded, 0) => "for=unknown".to_owned(),
            (Source::Forwarded, 1) => format!("host=\"{quoted}\""),
            (Source::Forwarded, _) => format!("{};secret=\"{quoted}\"", source.written(client)),
            (_, 0) => "unknown".to_owned(),
            (_, 1) => "\"no address\"".to_owned(),
            _ => source.written(client),
        };
        let mut lines = claims;
        lines.push([&claim, punctuation.as_bytes()].concat());
        append(&mut lines, own_line, element.as_bytes());

        let fields = |lines: Vec<Vec<u8>>| lines.into_iter().map(|line| (source.header(), line)).collect::<Vec<_>>();
        let alone = key_of(source, proxy, &fields(vec![element.into_bytes()]));
        let right = if kind < 2 { proxy } else { client };
        prop_assert_eq!(&alone, &model::canon(right).to_string());
        prop_assert_eq!(key_of(source, proxy, &fields(lines.clone())), alone, "{:?}", lines);
    }

    #[test]
    fn no_client_behind_a_proxy_that_sets_a_header_chooses_a_key(
        client in addresses(), proxy in trusted(), others in others(), claim in option::of(entries()),
    ) {
        let mut fields: Vec<_> = others.into_iter().filter(|(name, _)| *name != "x-real-ip").collect();
        fields.push(("x-real-ip", client.to_string().into_bytes()));
        prop_assert_eq!(key_of(Source::RealIp, proxy, &fields), model::canon(client).to_string());

        // If a proxy adds a line and keeps the client's, neither is trusted.
        if let Some(claim) = claim {
            fields.insert(0, ("x-real-ip", field(claim.into_bytes())));
            prop_assert_eq!(key_of(Source::RealIp, proxy, &fields), model::canon(proxy).to_string());
        }
    }

    #[test]
    fn a_peer_that_is_not_a_trusted_proxy_counts_as_itself(
        peer in untrusted(), others in others(), lines in lines(prop_oneof![entries(), elements()]),
        source in sample::select(vec![Source::XForwardedFor, Source::Hop(1), Source::Forwarded, Source::RealIp]),
    ) {
        let mut fields = others;
        fields.extend(lines.into_iter().map(|line| (source.header(), line)));
        prop_assert_eq!(key_of(source, peer, &fields), model::canon(peer).to_string());
    }
}

/// The settings of a path, one bit each.
fn path_with(options: u8) -> key::Path {
    let setters: [fn(key::Path) -> key::Path; 4] = [
        key::Path::strip_trailing_slash,
        key::Path::collapse_slashes,
        key::Path::remove_dot_segments,
        key::Path::ignore_case,
    ];
    let chosen = setters
        .into_iter()
        .enumerate()
        .filter(|(bit, _)| options & (1 << bit) != 0);
    chosen.fold(key::path(), |path, (_, set)| set(path))
}

fn spelled(path: key::Path, uri: &Uri) -> String {
    let (parts, ()) = Request::get(uri.clone()).body(()).expect("a request").into_parts();
    unescaped(&path.extract(&parts).expect("a key").expect("a key"))
}

/// The path that a key holds, with a character for each byte.
fn unescaped(key: &Key) -> String {
    let mut rest = key.as_str().strip_prefix("path=").expect("a path").as_bytes();
    let mut path = String::new();
    while let [first, tail @ ..] = rest {
        rest = match (first, tail) {
            (b'^', [high, low, tail @ ..]) => {
                let hex = [*high, *low];
                let hex = std::str::from_utf8(&hex).expect("hexadecimal digits");
                path.push(u8::from_str_radix(hex, 16).expect("hexadecimal digits").into());
                tail
            }
            _ => {
                path.push(char::from(*first));
                tail
            }
        };
    }
    path
}

/// The meaning of a path: segments of bytes that are decoded once.
fn segments(path: &str) -> Vec<Vec<u8>> {
    let decoded = path.split('/').map(|segment| {
        let mut bytes = Vec::new();
        let mut at = 0;
        while let Some(byte) = segment.as_bytes().get(at) {
            let hex = segment
                .get(at + 1..at + 3)
                .filter(|hex| *byte == b'%' && hex.bytes().all(|b| b.is_ascii_hexdigit()));
            bytes.push(hex.map_or(*byte, |hex| u8::from_str_radix(hex, 16).expect("hexadecimal digits")));
            at += if hex.is_some() { 3 } else { 1 };
        }
        bytes
    });
    decoded.collect()
}

/// The path with this meaning, with every byte escaped.
fn escaped(segments: &[Vec<u8>]) -> String {
    let escape = |segment: &Vec<u8>| segment.iter().map(|byte| format!("%{byte:02x}")).collect::<String>();
    segments.iter().map(escape).collect::<Vec<_>>().join("/")
}

/// A URI of this path, which holds a character for each byte.
fn uri_of(path: &str) -> Uri {
    let escape = |c: char| match c {
        'a'..='z' | 'A'..='Z' | '0'..='9' | '/' | '%' | '.' => c.to_string(),
        _ => format!("%{:02X}", u32::from(c)),
    };
    path.chars().map(escape).collect::<String>().parse().expect("a path")
}

/// RFC 3986 §5.2.4 to the letter.
fn without_dot_segments(path: &str) -> String {
    let (mut input, mut output) = (path.to_owned(), String::new());
    let parent = |output: &str| output[..output.rfind('/').unwrap_or(0)].to_owned();
    while !input.is_empty() {
        if let Some(rest) = input.strip_prefix("../").or_else(|| input.strip_prefix("./")) {
            input = rest.to_owned(); // A
        } else if let Some(rest) = input.strip_prefix("/./") {
            input = format!("/{rest}"); // B
        } else if input == "/." {
            input = "/".to_owned();
        } else if let Some(rest) = input.strip_prefix("/../") {
            input = format!("/{rest}"); // C
            output = parent(&output);
        } else if input == "/.." {
            input = "/".to_owned();
            output = parent(&output);
        } else if input == "." || input == ".." {
            input.clear(); // D
        } else {
            let end = input[1..].find('/').map_or(input.len(), |at| at + 1); // E
            output.push_str(&input[..end]);
            input = input[end..].to_owned();
        }
    }
    output
}

fn model_of_options(path: &str, options: u8) -> String {
    let mut path = path.to_owned();
    while options & 2 != 0 && path.contains("//") {
        path = path.replace("//", "/");
    }
    if options & 4 != 0 {
        path = without_dot_segments(&path);
    }
    while options & 1 != 0 && path.len() > 1 && path.ends_with('/') {
        path.pop();
    }
    if options & 8 != 0 {
        path = path.to_ascii_lowercase().replace("%2f", "%2F");
    }
    path
}

fn paths() -> impl Strategy<Value = Uri> {
    let piece = sample::select(vec![
        "/", "//", "/a", "/B", ".", "..", "/.", "/..", "/./", "/../", "%", "%%", "%2", "%2e", "%2E", "%2f", "%2F",
        "%25", "%34", "%41", "%61", "%7e", "%zz", "%c3%A9", "4", "1", "A", "é", "|", "=", "^", ";", "{", "}",
    ]);
    let text = prop_oneof![
        8 => vec(piece, 0..10).prop_map(|pieces| format!("/{}", pieces.concat())),
        1 => "/[!-~]{0,20}",
        1 => "/[%0-9a-fA-F/.]{0,12}",
    ];
    text.prop_filter_map("a URI", |text| text.parse().ok())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2 * CASES))]

    #[test]
    fn two_paths_are_one_key_if_they_mean_the_same(a in paths(), b in paths()) {
        let respelled = escaped(&segments(a.path()));
        prop_assert_eq!(Key::path(a.path()), Key::path(&respelled));
        for b in [b.path(), &a.path().replacen("%2F", "/", 1), &a.path().replacen("%25", "%", 1)] {
            let same = segments(a.path()) == segments(b);
            prop_assert_eq!(Key::path(a.path()) == Key::path(b), same, "{} and {}", a, b);
        }
    }

    #[test]
    fn every_setting_of_a_path_works_as_in_the_model(uri in paths(), options in 0..16u8) {
        let canonical = spelled(key::path(), &uri);
        prop_assert_eq!(spelled(path_with(options), &uri), model_of_options(&canonical, options));
    }

    #[test]
    fn normalizing_a_path_again_changes_nothing(uri in paths(), options in 0..16u8) {
        let once = spelled(path_with(options), &uri);
        prop_assert_eq!(spelled(path_with(options), &uri_of(&once)), once);
    }

    #[test]
    fn any_text_is_a_path(text in any::<String>()) {
        prop_assert_eq!(Key::path(&escaped(&segments(&text))), Key::path(&text));
    }
}

/// The parameter of `/{user}` or `/files/{*rest}` as a handler of axum receives it, if it is text.
fn parameter(uri: &Uri) -> Option<String> {
    thread_local! {
        static AXUM: (Runtime, Router) = {
            let runtime = runtime::Builder::new_current_thread().build().expect("a runtime");
            let echo = || get(async |extract::Path(parameter): extract::Path<String>| parameter);
            (runtime, Router::new().route("/{user}", echo()).route("/files/{*rest}", echo()))
        };
    }
    AXUM.with(|(runtime, app)| {
        let request = Request::get(uri.clone())
            .body(axum::body::Body::empty())
            .expect("a request");
        runtime.block_on(async {
            let response = app.clone().oneshot(request).await.expect("an answer");
            let found = response.status().is_success();
            let body = response.into_body().collect().await.expect("a body").to_bytes();
            found.then(|| String::from_utf8(body.to_vec()).expect("text"))
        })
    })
}

/// Characters that are reserved, not ASCII, or part of an escape, each with a number that chooses its spelling.
fn characters() -> impl Strategy<Value = Vec<(char, u8)>> {
    let odd: Vec<char> = "!$&'()*+,;=:@[]^|\"{}~-._ ?#<>`\\/%%%2F5aAfé€😀".chars().collect();
    let character = prop_oneof![6 => sample::select(odd), 1 => any::<char>()];
    vec((character, any::<u8>()), 1..8)
}

/// A segment of the characters, each plain or escaped.
fn segment(characters: &[(char, u8)], other_spelling: bool) -> String {
    let spell = |(character, spelling): &(char, u8)| {
        let spelling = if other_spelling { spelling >> 2 } else { *spelling } & 3;
        let plain = !matches!(
            character,
            '/' | '?' | '#' | '<' | '>' | '`' | ' ' | '\0'..='\x1f' | '\x7f'
        );
        let mut buffer = [0; 4];
        let bytes = character.encode_utf8(&mut buffer).bytes();
        match spelling {
            0 | 1 if plain => character.to_string(),
            2 => bytes.map(|byte| format!("%{byte:02x}")).collect(),
            _ => bytes.map(|byte| format!("%{byte:02X}")).collect(),
        }
    };
    characters.iter().map(spell).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2 * CASES))]

    /// The same characters in two spellings, and other characters.
    #[test]
    fn two_paths_are_one_key_if_axum_decodes_one_parameter(characters in characters(), others in characters()) {
        let spellings = [segment(&characters, false), segment(&characters, true), segment(&others, false)];
        let found: Vec<_> = spellings
            .iter()
            .filter_map(|segment| {
                let uri: Uri = format!("/{segment}").parse().ok()?;
                Some((parameter(&uri)?, spelled(key::path(), &uri)))
            })
            .collect();
        for (a, a_key) in &found {
            for (b, b_key) in &found {
                prop_assert_eq!(a == b, a_key == b_key, "{} and {} of {:?}", a, b, spellings);
            }
        }
    }

    /// On a wildcard route axum decodes `%2F` to `/`; they stay two keys.
    #[test]
    fn two_paths_that_axum_distinguishes_are_two_keys(
        a in vec(characters(), 1..4), b in vec(characters(), 1..4),
    ) {
        let path_of = |segments: &[Vec<(char, u8)>], other_spelling| {
            let segments: Vec<_> = segments.iter().map(|text| segment(text, other_spelling)).collect();
            format!("/files/{}", segments.join("/"))
        };
        let slashed = path_of(&a, false).replace("%2F", "/");
        let paths = [path_of(&a, false), path_of(&a, true), slashed, path_of(&b, false)];
        let found: Vec<_> = paths
            .iter()
            .filter_map(|path| {
                let uri: Uri = path.parse().ok()?;
                Some((parameter(&uri)?, path.matches('/').count(), spelled(key::path(), &uri)))
            })
            .collect();
        for (a, a_slashes, a_key) in &found {
            for (b, b_slashes, b_key) in &found {
                let same = a == b && a_slashes == b_slashes;
                prop_assert!(a == b || a_key != b_key, "{} and {} of {:?}", a, b, paths);
                prop_assert!(a_slashes == b_slashes || a_key != b_key, "{} and {} of {:?}", a, b, paths);
                // The key depends on which slashes are escaped.
                let plain = a.matches('/').count() + "/files/".matches('/').count() == *a_slashes;
                prop_assert!(!(same && plain) || a_key == b_key, "{} of {:?}", a, paths);
            }
        }
    }
}

fn calendar() -> impl Strategy<Value = Limit> {
    let windows = [
        Calendar::Hour,
        Calendar::Day,
        Calendar::Week,
        Calendar::Month,
        Calendar::Year,
    ];
    let zones = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu"];
    (
        1..1_000_000u64,
        sample::select(windows.to_vec()),
        sample::select(zones.to_vec()),
    )
        .prop_map(|(quota, window, zone)| FixedWindow::calendar(quota, window, zone).unwrap().into())
}

/// Limits that a policy accepts.
fn limits() -> impl Strategy<Value = Limit> {
    let quota = || {
        prop_oneof![
            1..200u64,
            1..u64::MAX,
            sample::select(vec![1, 999, 1_000, 100_000, 1_000_000_000])
        ]
    };
    let unit = sample::select(vec![
        1u64,
        1_000,
        1_000_000,
        60_000_000,
        3_600_000_000,
        86_400_000_000,
        604_800_000_000,
    ]);
    let window = prop_oneof![
        (1..100u64, unit).prop_map(|(n, unit)| Duration::from_micros(n * unit)),
        (1_000..315_576_000_000_000u64).prop_map(Duration::from_micros),
        any::<u64>().prop_map(Duration::from_nanos),
    ];
    let parts = (0..8u8, quota(), window, quota(), 1..100_000u32);
    let limit = parts.prop_filter_map("a limit", |(kind, quota, window, burst, precision)| {
        Some(match kind {
            0 => SlidingLog::try_new(quota, window).ok()?.into(),
            1 => SlidingLog::try_new(quota, window).ok()?.precision(precision).into(),
            2 => SlidingCounter::try_new(quota, window).ok()?.into(),
            3 => FixedWindow::try_new(quota, window).ok()?.into(),
            4 => FixedWindow::try_new(quota, window).ok()?.aligned().into(),
            5 => TokenBucket::try_new(quota, window).ok()?.into(),
            6 => TokenBucket::try_new(quota, window).ok()?.burst(burst).into(),
            _ if burst % 2 == 0 => Limit::Unlimited,
            _ => Limit::DenyAll,
        })
    });
    prop_oneof![8 => limit, 1 => calendar()].prop_filter("a policy accepts it", |limit| {
        Policy::new("p", limit.clone()).validate().is_ok()
    })
}

/// Text that resembles a limit.
fn nearly_limits() -> impl Strategy<Value = String> {
    let word = sample::select(vec![
        "sliding-log",
        "sliding-counter",
        "fixed-window",
        "token-bucket",
        "unlimited",
        "deny-all",
        "precision",
        "burst",
        "aligned",
        "Europe/Berlin",
        "UTC",
        "Mars/Base",
        "100/min",
        "3/month",
        "1/10s",
        "0/s",
        "5/0s",
        "1/us",
        "1/1000us",
        "7/1w",
        "9/d",
        "18446744073709551615/s",
        "18446744073709551616/s",
        "1/18446744073709551615w",
        "10/ms",
        "1/",
        "/s",
        "/",
        "+1/s",
        "-1/s",
        "1/m",
        "1/M",
        "1.5/s",
        "5/15m",
        "5/15",
        "100 per",
        "per",
        "minutes",
        "3/day",
        "1_000/hours",
        "0",
        "1",
        "30",
        "1000",
        "100000",
        "100001",
        "4294967296",
        "\u{a0}",
        "é/min",
        "٣/min",
        "1/٣s",
    ]);
    let number = any::<u64>().prop_map(|number| number.to_string());
    let word = prop_oneof![8 => word.prop_map(str::to_owned), 1 => number, 1 => "[0-9]{1,3}/[0-9]{0,3}(us|ms|s|min|h|d|w|year|hour|m|mo|days)"];
    prop_oneof![
        8 => (vec(word, 0..5), sample::select(vec![" ", "  ", "\t", "\n", ""])).prop_map(|(words, space)| words.join(space)),
        1 => any::<String>(),
        1 => "(sliding-log|fixed-window|token-bucket) \\PC{0,12}",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2 * CASES))]

    #[test]
    fn a_limit_parses_from_its_text(limit in limits()) {
        let text = limit.to_string();
        prop_assert_eq!(text.parse::<Limit>(), Ok(limit), "{}", text);
    }

    #[test]
    fn a_limit_that_parses_prints_text_that_parses_to_it(text in nearly_limits()) {
        let Ok(limit) = text.parse::<Limit>() else { return Ok(()) };
        let printed = limit.to_string();
        prop_assert_eq!(printed.parse::<Limit>(), Ok(limit.clone()), "{} prints as {}", text, printed);
        prop_assert!(Policy::new("p", limit).validate().is_ok(), "a policy accepts what parses: {}", text);
    }
}
