//! Bounds the number of series of a metric with a label that users choose, such as the class of an evacuator.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

/// Maximum number of different values of a label that users choose, besides the reserved ones and [`OTHER_VALUES`].
pub const MAX_LABEL_VALUES: usize = 50;
/// The value that all further values share.
pub const OTHER_VALUES: &str = "other";

/// The values of a label that users choose. The first [`MAX_LABEL_VALUES`] are exported, all further ones as
/// [`OTHER_VALUES`]. A value that is exported once stays until the process ends, so that its series does not move between
/// the two. Clones share the values.
#[derive(Clone, Debug)]
pub struct LabelValues {
    reserved: &'static [&'static str],
    known: Arc<Mutex<BTreeSet<String>>>,
}

impl LabelValues {
    /// Without values of users. The reserved values are always exported, whatever users choose first.
    pub fn new(reserved: &'static [&'static str]) -> Self {
        Self { reserved, known: Arc::default() }
    }

    /// The value to export.
    pub fn bounded(&self, value: &str) -> String {
        if self.reserved.contains(&value) {
            return value.to_owned();
        }
        let mut known = self.known.lock();
        if known.contains(value) {
            return value.to_owned();
        }
        if known.len() >= MAX_LABEL_VALUES {
            return OTHER_VALUES.to_owned();
        }
        known.insert(value.to_owned());
        value.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_values_keep_their_series_and_others_share_one() {
        let values = LabelValues::new(&["ours"]);
        let name = |number: usize| format!("class-{number}.example.com");
        let exported = |range: std::ops::Range<usize>| {
            range.map(|number| values.bounded(&name(number))).collect::<BTreeSet<_>>()
        };
        let first = exported(0..1000);
        assert_eq!(first.len(), MAX_LABEL_VALUES + 1);
        assert!(first.contains(OTHER_VALUES));
        let mut reversed: Vec<_> = (0..1000).collect();
        reversed.reverse();
        let again = reversed.into_iter().map(|number| values.bounded(&name(number))).collect();
        assert_eq!(first, again, "independent of the order");
        assert_eq!(values.bounded("ours"), "ours", "whatever users choose first");
        assert_eq!(values.clone().bounded("late"), OTHER_VALUES, "clones share the values");
    }
}
