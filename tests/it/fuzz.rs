//! What comes from strangers, against slow and obvious models: lists of addresses, paths, and limits as text.

use std::{net::IpAddr, time::Duration};

use http::{HeaderName, HeaderValue, Request, Uri};
use jiff::tz::TimeZone;
use proptest::{
    collection::vec,
    option,
    prelude::{Just, ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, proptest},
    prop_oneof, sample,
};
use tower_quota::{
    FixedWindow, Key, KeyExtractor, Limit, Policy, SlidingCounter, SlidingLog, TokenBucket,
    key::{self, ClientIpSource, PeerAddr},
    limit::Calendar,
};

const CASES: u32 = 2_000;

/// How the model reads a list.
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

/// The rules of the requirements, line by line.
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
            Source::Hop(n) => nth_from_the_right(n, lines).map_or(peer, canon),
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

    fn nth_from_the_right(mut n: usize, lines: &[Vec<u8>]) -> Option<IpAddr> {
        for line in lines.iter().rev() {
            if !is_printable(line) {
                return None; // of how many entries is unknown
            }
            for entry in entries(Source::XForwardedFor, line).into_iter().rev() {
                n -= 1;
                if n == 0 {
                    return entry;
                }
            }
        }
        None
    }

    pub(super) fn is_printable(line: &[u8]) -> bool {
        line.iter().all(|byte| *byte == b'\t' || (0x20..=0x7e).contains(byte))
    }

    fn entries(source: Source, line: &[u8]) -> Vec<Option<IpAddr>> {
        let Some(text) = std::str::from_utf8(line).ok().filter(|_| is_printable(line)) else {
            return vec![None];
        };
        match source {
            Source::Forwarded => forwarded(text).unwrap_or_else(|| vec![None]),
            Source::RealIp => vec![entry(text.trim_matches(is_ows))],
            _ => {
                let elements = text.split(',').map(|element| element.trim_matches(is_ows));
                elements.filter(|element| !element.is_empty()).map(entry).collect()
            }
        }
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

/// Addresses that mean something to the rules more often than by chance.
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

/// Bytes that a server lets through in the value of a header.
fn field(bytes: Vec<u8>) -> Vec<u8> {
    let allowed = |byte: u8| byte == b'\t' || byte >= 0x20 && byte != 0x7f;
    bytes.into_iter().filter(|byte| allowed(*byte)).collect()
}

/// One entry, or what looks like one.
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

/// One element of `Forwarded`, or what looks like one.
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
    fn x_forwarded_for_is_read_as_the_model_has_it(
        peer in addresses(), lines in lines(entries()), n in option::of(1..5usize),
    ) {
        let source = n.map_or(Source::XForwardedFor, Source::Hop);
        let fields: Vec<_> = lines.iter().map(|line| (source.header(), line.clone())).collect();
        prop_assert_eq!(key_of(source, peer, &fields), model::client(source, peer, &lines).to_string());
    }

    #[test]
    fn forwarded_is_read_as_the_model_has_it(peer in trusted(), lines in lines(elements())) {
        let fields: Vec<_> = lines.iter().map(|line| ("forwarded", line.clone())).collect();
        let client = model::client(Source::Forwarded, peer, &lines);
        prop_assert_eq!(key_of(Source::Forwarded, peer, &fields), client.to_string());
    }

    #[test]
    fn a_single_address_is_read_as_the_model_has_it(peer in trusted(), lines in vec(entries(), 0..3)) {
        let lines: Vec<_> = lines.into_iter().map(|line| field(line.into_bytes())).collect();
        let fields: Vec<_> = lines.iter().map(|line| ("x-real-ip", line.clone())).collect();
        prop_assert_eq!(key_of(Source::RealIp, peer, &fields), model::client(Source::RealIp, peer, &lines).to_string());
    }

    /// Two proxies, each of which appends to the last line or adds one of its own.
    #[test]
    fn nobody_behind_proxies_chooses_a_key_in_a_list(
        client in untrusted(),
        proxies in (trusted(), trusted()),
        claims in lines(prop_oneof![entries(), elements()]),
        others in others(),
        own_lines in (any::<bool>(), any::<bool>()),
        source in sample::select(vec![Source::XForwardedFor, Source::Hop(2), Source::Forwarded]),
    ) {
        let mut lines = claims;
        let claimed = lines.last().filter(|_| !own_lines.0).cloned().unwrap_or_default();
        for (hop, own_line) in [(client, own_lines.0), (proxies.0, own_lines.1)] {
            let written = source.written(hop).into_bytes();
            match lines.last_mut() {
                Some(line) if !own_line => {
                    line.extend_from_slice(b", ");
                    line.extend(written);
                }
                _ => lines.push(written),
            }
        }
        let mut fields: Vec<_> = others.into_iter().filter(|(name, _)| *name != source.header()).collect();
        fields.extend(lines.into_iter().map(|line| (source.header(), line)));

        let key = key_of(source, proxies.1, &fields);
        let written = model::canon(client).to_string();
        // A line that the client has spoiled says nothing, and nothing beyond it: then it counts as the proxies.
        let spoiled = [model::canon(proxies.1).to_string(), model::canon(proxies.0).to_string()];
        let sound = match source {
            Source::Forwarded => claimed.is_empty(),
            _ => model::is_printable(&claimed),
        };
        prop_assert!(key == written || !sound && spoiled.contains(&key), "{} is not {}: {:?}", key, written, fields);
    }

    #[test]
    fn nobody_behind_a_proxy_that_sets_a_header_chooses_a_key(
        client in addresses(), proxy in trusted(), others in others(), claim in option::of(entries()),
    ) {
        let mut fields: Vec<_> = others.into_iter().filter(|(name, _)| *name != "x-real-ip").collect();
        fields.push(("x-real-ip", client.to_string().into_bytes()));
        prop_assert_eq!(key_of(Source::RealIp, proxy, &fields), model::canon(client).to_string());

        // A proxy that only adds the header gives no client to trust.
        if let Some(claim) = claim {
            fields.insert(0, ("x-real-ip", field(claim.into_bytes())));
            prop_assert_eq!(key_of(Source::RealIp, proxy, &fields), model::canon(proxy).to_string());
        }
    }

    #[test]
    fn whoever_is_no_proxy_of_ours_counts_as_itself(
        peer in untrusted(), others in others(), lines in lines(prop_oneof![entries(), elements()]),
        source in sample::select(vec![Source::XForwardedFor, Source::Hop(1), Source::Forwarded, Source::RealIp]),
    ) {
        let mut fields = others;
        fields.extend(lines.into_iter().map(|line| (source.header(), line)));
        prop_assert_eq!(key_of(source, peer, &fields), model::canon(peer).to_string());
    }
}

/// The options of a path, one bit each.
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

/// The path that a key holds.
fn unescaped(key: &Key) -> String {
    let mut rest = key.as_str().strip_prefix("path=").expect("a path").as_bytes();
    let mut path = Vec::new();
    while let [first, tail @ ..] = rest {
        rest = match (first, tail) {
            (b'^', [high, low, tail @ ..]) => {
                let hex = [*high, *low];
                let hex = std::str::from_utf8(&hex).expect("hexadecimal digits");
                path.push(u8::from_str_radix(hex, 16).expect("hexadecimal digits"));
                tail
            }
            _ => {
                path.push(*first);
                tail
            }
        };
    }
    String::from_utf8(path).expect("the path was text")
}

/// What a path says: characters, and reserved characters that are escaped.
#[derive(Debug, PartialEq)]
enum Said {
    Character(u8),
    Escaped(u8),
}

fn said(path: &str) -> Vec<Said> {
    let mut said = Vec::new();
    let mut at = 0;
    while let Some(byte) = path.as_bytes().get(at) {
        let hex = path
            .get(at + 1..at + 3)
            .filter(|hex| *byte == b'%' && hex.bytes().all(|b| b.is_ascii_hexdigit()));
        let escaped = hex.map(|hex| u8::from_str_radix(hex, 16).expect("hexadecimal digits"));
        said.push(match escaped {
            Some(byte) if byte.is_ascii_alphanumeric() || "-._~".contains(char::from(byte)) => Said::Character(byte),
            Some(byte) => Said::Escaped(byte),
            None => Said::Character(*byte),
        });
        at += if hex.is_some() { 3 } else { 1 };
    }
    said
}

/// The path that says this, where no `%` stands for itself.
fn written(said: &[Said]) -> String {
    let bytes = said.iter().flat_map(|said| match said {
        Said::Character(byte) => vec![*byte],
        Said::Escaped(byte) => format!("%{byte:02X}").into_bytes(),
    });
    String::from_utf8(bytes.collect()).expect("the path was text")
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
        path = path.to_ascii_lowercase();
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
    fn a_path_keeps_what_it_says_and_has_one_spelling(uri in paths()) {
        let canonical = spelled(key::path(), &uri);
        let meaning = said(uri.path());
        prop_assert_eq!(&said(&canonical), &meaning);
        // Where a `%` stands for itself, how it was written is part of what it says.
        if !meaning.contains(&Said::Character(b'%')) {
            prop_assert_eq!(&canonical, &written(&meaning));
        }
        prop_assert_eq!(Key::path(uri.path()), Key::path(&canonical));
    }

    #[test]
    fn every_option_of_a_path_is_what_the_model_makes_of_it(uri in paths(), options in 0..16u8) {
        let canonical = spelled(key::path(), &uri);
        prop_assert_eq!(spelled(path_with(options), &uri), model_of_options(&canonical, options));
    }

    #[test]
    fn normalizing_a_path_again_changes_nothing(uri in paths(), options in 0..16u8) {
        let once = spelled(path_with(options), &uri);
        let again: Uri = once.parse().expect("a normal path is a path");
        prop_assert_eq!(spelled(path_with(options), &again), once);
    }

    #[test]
    fn no_text_is_too_odd_for_a_path(text in any::<String>()) {
        let once = unescaped(&Key::path(&text));
        prop_assert_eq!(unescaped(&Key::path(&once)), once);
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
        .prop_map(|(quota, window, zone)| {
            let zone = TimeZone::get(zone).expect("a time zone");
            FixedWindow::calendar(quota, window, zone).into()
        })
}

/// Limits that a policy takes.
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
    prop_oneof![8 => limit, 1 => calendar()]
        .prop_filter("a policy takes it", |limit| Policy::try_new("p", limit.clone()).is_ok())
}

/// Text that is nearly a limit.
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
        "1.5/s",
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
    let word = prop_oneof![8 => word.prop_map(str::to_owned), 1 => number, 1 => "[0-9]{1,3}/[0-9]{0,3}(us|ms|s|min|h|d|w|year|hour)"];
    prop_oneof![
        8 => (vec(word, 0..5), sample::select(vec![" ", "  ", "\t", "\n", ""])).prop_map(|(words, space)| words.join(space)),
        1 => any::<String>(),
        1 => "(sliding-log|fixed-window|token-bucket) \\PC{0,12}",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2 * CASES))]

    #[test]
    fn a_limit_is_what_its_text_says(limit in limits()) {
        let text = limit.to_string();
        prop_assert_eq!(text.parse::<Limit>(), Ok(limit), "{}", text);
    }

    #[test]
    fn whatever_parses_prints_to_text_that_parses_to_the_same(text in nearly_limits()) {
        let Ok(limit) = text.parse::<Limit>() else { return Ok(()) };
        let printed = limit.to_string();
        prop_assert_eq!(printed.parse::<Limit>(), Ok(limit.clone()), "{} prints as {}", text, printed);
        prop_assert!(Policy::try_new("p", limit).is_ok(), "what parses can be kept: {}", text);
    }
}
