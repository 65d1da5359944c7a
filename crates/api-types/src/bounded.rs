//! Limits the length of text from other programs before it is written to an object. A user chooses the names of objects, and
//! a webhook the message of its rejection: without limits, one of them could make every write of a status fail.
//!
//! Lengths are in bytes, because objects and requests are limited in bytes. A limit of a schema counts characters, which are
//! never more than the bytes.

use std::borrow::Cow;

/// Maximum length of a text of another program, in bytes.
pub const MAX_TEXT: usize = 1024;

/// Maximum length of a message that we compose, in bytes. The longest one names 20 objects, with up to 253 bytes each.
pub const MAX_MESSAGE: usize = 8 * 1024;

const ELLIPSIS: char = '…';

/// The text, shortened to this number of bytes, with an ellipsis at the end.
pub fn cut(text: &str, max_bytes: usize) -> Cow<'_, str> {
    if text.len() <= max_bytes {
        return Cow::Borrowed(text);
    }
    let Some(mut end) = max_bytes.checked_sub(ELLIPSIS.len_utf8()) else { return Cow::Borrowed("") };
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut short = text.get(..end).unwrap_or_default().to_owned();
    short.push(ELLIPSIS);
    Cow::Owned(short)
}

/// A text of another program: at most [`MAX_TEXT`] bytes, without control characters except line breaks.
pub fn text(text: &str) -> String {
    let visible = |c: char| if c.is_control() && c != '\n' { ' ' } else { c };
    // A control character has at most two bytes and is replaced by one, so that more than this is never needed.
    let beginning = cut(text, 2 * MAX_TEXT + ELLIPSIS.len_utf8());
    let replaced: String = beginning.chars().map(visible).collect();
    cut(&replaced, MAX_TEXT).into_owned()
}

/// A message of ours that includes names or texts of others: at most [`MAX_MESSAGE`] bytes.
pub fn message(text: String) -> String {
    match cut(&text, MAX_MESSAGE) {
        Cow::Borrowed(_) => text,
        Cow::Owned(short) => short,
    }
}

/// The text as one line with at most this number of characters.
pub fn line(text: &str, characters: usize) -> String {
    let visible: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let line = visible.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= characters {
        return line;
    }
    let mut short: String = line.chars().take(characters.saturating_sub(1)).collect();
    short.truncate(short.trim_end().len());
    short.push(ELLIPSIS);
    short
}

/// The first elements, and the number of others.
pub fn list<T: AsRef<str>>(all: &[T], max: usize) -> String {
    let first: Vec<String> = all.iter().take(max).map(|one| text(one.as_ref())).collect();
    match all.len().saturating_sub(first.len()) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn line_has_bounded_length() {
        for (text, expected) in [
            ("", ""),
            ("short", "short"),
            ("  two\n\tlines\u{0} \u{2028}here ", "two lines here"),
            ("exactly 20 letters !", "exactly 20 letters !"),
            ("one more than twenty!", "one more than twent…"),
            ("üüüüüüüüüüüüüüüüüüüüü", "üüüüüüüüüüüüüüüüüüü…"),
            (" \n ", ""),
        ] {
            assert_eq!(line(text, 20), expected, "{text:?}");
        }
    }

    #[test]
    fn long_texts_and_lists_are_shortened() {
        assert_eq!(text("short\nline"), "short\nline");
        assert_eq!(text("\u{1b}[31mred\u{7f}"), " [31mred ");
        let long = text(&"ü".repeat(100_000));
        assert_eq!(long.len(), MAX_TEXT - 1, "as much as fits");
        assert!(long.ends_with("ü…"), "{long}");
        assert_eq!(text(&"\u{85}".repeat(MAX_TEXT)).len(), MAX_TEXT, "replaced characters are shorter");
        assert_eq!(message("x".repeat(MAX_MESSAGE)).len(), MAX_MESSAGE);
        assert_eq!(message("x".repeat(MAX_MESSAGE + 1)).len(), MAX_MESSAGE);
        assert_eq!(list(&["a", "b"], 2), "a, b");
        assert_eq!(list(&["a", "b", "c"], 1), "a and 2 more");
        assert_eq!(list::<&str>(&[], 1), "");
    }

    proptest! {
        /// Only text that is too long changes, and it keeps its beginning.
        #[test]
        fn cut_keeps_the_beginning(text in "\\PC{0,40}|.{0,40}", max in 0usize..60) {
            let short = cut(&text, max);
            prop_assert!(short.len() <= max);
            match short.strip_suffix(ELLIPSIS) {
                _ if text.len() <= max => prop_assert_eq!(&*short, &text),
                Some(beginning) => {
                    prop_assert!(text.starts_with(beginning));
                    let next = text[beginning.len()..].chars().next().unwrap();
                    prop_assert!(short.len() + next.len_utf8() > max, "as much as fits");
                }
                None => prop_assert_eq!((&*short, max < 3), ("", true)),
            }
        }

        #[test]
        fn texts_and_lines_are_bounded(text in ".{0,80}", times in 0usize..1500) {
            let long = text.repeat(times);
            prop_assert!(super::text(&long).len() <= MAX_TEXT);
            prop_assert!(super::text(&long).chars().all(|c| c == '\n' || !c.is_control()));
            let line = line(&long, 100);
            prop_assert!(line.chars().count() <= 100 && !line.contains('\n'));
        }
    }
}
