use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// Makes a gRPC call by hand, over HTTP/2 (RFC 9113) without a library, and returns the frames of the answer in their
/// order, such as `HEADERS END_STREAM`.
pub(crate) async fn frames(authority: &str, path: &str, message: &[u8]) -> Vec<String> {
    let mut stream = TcpStream::connect(authority).await.expect("the server listens");

    // RFC 7541: POST and http from the static table, and literals that are not indexed.
    let mut header_block = vec![0x83, 0x86];
    for (name, value) in [
        (":path", path),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        header_block.push(0);
        for text in [name, value] {
            header_block.push(u8::try_from(text.len()).expect("a short text"));
            header_block.extend_from_slice(text.as_bytes());
        }
    }

    let mut request = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    request.extend(frame(SETTINGS, 0, 0, &[]));
    request.extend(frame(HEADERS, END_HEADERS, 1, &header_block));
    request.extend(frame(DATA, END_STREAM, 1, message));
    stream.write_all(&request).await.expect("the server reads");

    let answer = async {
        let mut answer = Vec::new();
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).await.expect("a frame");
            let [a, b, c, kind, flags, id @ ..] = head;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            stream.read_exact(&mut payload).await.expect("all of the frame");
            if u32::from_be_bytes(id) != 1 {
                continue;
            }

            let name = match kind {
                DATA => "DATA".to_owned(),
                HEADERS => "HEADERS".to_owned(),
                WINDOW_UPDATE => continue,
                other => format!("frame of type {other}"),
            };
            let ended = matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0;
            answer.push(if ended { name + " END_STREAM" } else { name });
            if ended || kind == RST_STREAM {
                return answer;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), answer)
        .await
        .expect("the answer ends")
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const WINDOW_UPDATE: u8 = 8;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, id: u32, payload: &[u8]) -> Vec<u8> {
    let [_, length @ ..] = u32::try_from(payload.len()).expect("a short payload").to_be_bytes();
    let head = [&length[..], &[kind, flags], &id.to_be_bytes()].concat();
    [&head, payload].concat()
}
