use http::HeaderValue;
use smallvec::SmallVec;

/// The value of a field while it is written: most fit without an allocation.
#[derive(Default)]
pub(super) struct Text(SmallVec<[u8; 128]>);

impl Text {
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    pub(super) fn number(&mut self, number: u64) -> &mut Self {
        self.text(itoa::Buffer::new().format(number))
    }

    /// Begins a member of a list.
    pub(super) fn delimit(&mut self) -> &mut Self {
        match self.0.is_empty() {
            true => self,
            false => self.text(", "),
        }
    }
}

impl From<Text> for HeaderValue {
    fn from(text: Text) -> Self {
        // Always is a value: names, numbers, and what was one before.
        Self::from_bytes(&text.0).unwrap_or(const { Self::from_static("") })
    }
}

impl From<u64> for Text {
    fn from(number: u64) -> Self {
        let mut text = Self::default();
        text.number(number);
        text
    }
}
