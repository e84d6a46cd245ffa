//! Files of settings and secrets.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read},
    path::Path,
};

/// The most bytes of a file.
const MOST: u64 = 1 << 20;

/// Reads a small regular file. Reading a FIFO would wait for its next writer, and a device may have no end.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let mut content = Vec::new();
    File::open(path)?.take(MOST + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MOST {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it has more than 1 MiB"));
    }
    String::from_utf8(content).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}
