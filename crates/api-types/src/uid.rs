//! The UID of a pod, in 16 bytes.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A pod's UID, which is a UUID: the API server gives it, nobody else.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uid([u8; 16]);

impl Uid {
    /// The least of all, where a range begins.
    pub const MIN: Self = Self([0; 16]);
}

/// A text that is no UID of a pod.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is not a UID as the API server gives them, such as 1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11")]
pub struct NotAUid(String);

impl FromStr for Uid {
    type Err = NotAUid;

    fn from_str(text: &str) -> Result<Self, NotAUid> {
        let digit = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        let read = || {
            let text: &[u8; 36] = text.as_bytes().try_into().ok()?;
            let mut digits = text.iter().enumerate().filter(|(place, _)| !DASHES.contains(place));
            let mut bytes = [0; 16];
            for byte in &mut bytes {
                let (high, low) = (digits.next()?.1, digits.next()?.1);
                *byte = digit(*high)? << 4 | digit(*low)?;
            }
            DASHES.iter().all(|place| text.get(*place) == Some(&b'-')).then_some(Self(bytes))
        };
        read().ok_or_else(|| NotAUid(text.to_owned()))
    }
}

/// Where the dashes are in a UUID.
const DASHES: [usize; 4] = [8, 13, 18, 23];

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, byte) in self.0.iter().enumerate() {
            if matches!(place, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uid_is_read_and_written_as_the_api_server_does() {
        let text = "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11";
        assert_eq!(text.parse::<Uid>().unwrap().to_string(), text);
        for odd in [
            "",
            "x",
            "1F0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11",
            "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e1",
            "1f0c3a52_7f0e-4a52-9f57-0d8a1c7f0e11",
            "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e1ä",
        ] {
            assert_eq!(odd.parse::<Uid>(), Err(NotAUid(odd.to_owned())));
        }
    }
}
