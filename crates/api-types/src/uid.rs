//! The UID of a pod, in 16 bytes.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A pod's UID: a UUID that the API server assigns.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uid([u8; 16]);

impl Uid {
    /// The smallest UID, for the start of a range.
    pub const MIN: Self = Self([0; 16]);
}

/// Text that is not a UID.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is not a UID; expected for example 1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11")]
pub struct InvalidUid(String);

impl FromStr for Uid {
    type Err = InvalidUid;

    fn from_str(text: &str) -> Result<Self, InvalidUid> {
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
        read().ok_or_else(|| InvalidUid(text.to_owned()))
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
    fn uid_round_trips() {
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
            assert_eq!(odd.parse::<Uid>(), Err(InvalidUid(odd.to_owned())));
        }
    }
}
