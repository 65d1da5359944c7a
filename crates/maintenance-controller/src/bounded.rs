//! Limits the length of texts from other programs before they are written to a status.

/// Maximum length of a text, in bytes. 40 such texts and the rest of a status stay far below the size limit of an object.
pub const MAX_TEXT: usize = 1024;

/// The text, shortened if it is too long.
pub fn text(text: &str) -> String {
    if text.len() <= MAX_TEXT {
        return text.into();
    }
    let mut short: String = text.chars().take(MAX_TEXT / 4).collect();
    short.push('…');
    short
}

/// The text as one line with at most this number of characters.
pub fn line(text: &str, characters: usize) -> String {
    let visible: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let line = visible.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= characters {
        return line;
    }
    let short: String = line.chars().take(characters.saturating_sub(1)).collect();
    format!("{}…", short.trim_end())
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
        assert_eq!(text("short"), "short");
        let long = text(&"ü".repeat(100_000));
        assert!(long.len() <= MAX_TEXT && long.ends_with('…'), "{}", long.len());
        assert_eq!(list(&["a", "b"], 2), "a, b");
        assert_eq!(list(&["a", "b", "c"], 1), "a and 2 more");
        assert_eq!(list::<&str>(&[], 1), "");
    }
}
