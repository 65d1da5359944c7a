//! Calls a parser with mutations of real inputs. It must not panic, and its memory must not grow. Inputs that are JSON are
//! mutated as JSON: fields are removed, duplicated, exchanged or replaced by huge, long or deeply nested values. All inputs
//! are also mutated as lines and bytes.
//!
//! A failure prints its seed. Set `HAULOUT_FUZZ_SEED` to it, and the first case is the one that failed.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use fastrand::Rng;
use serde_json::{Value, json};

use crate::metrics::resident_bytes;

/// How long each slow fuzz test runs. The tests of all crates together run ten minutes.
pub const SLOW: Duration = Duration::from_secs(100);
/// How long each of them runs in ordinary tests.
pub const QUICK: Duration = Duration::from_millis(700);

const SEED: &str = "HAULOUT_FUZZ_SEED";
/// Resident memory may grow by this much after the first tenth of the time. Memory that an allocator keeps does not add up.
const MAX_GROWTH: f64 = 128.0 * 1024.0 * 1024.0;
/// Stands for deeply nested JSON, which is built as text.
const NESTED: &str = "\u{1}nested\u{1}";

/// Calls `target` with mutations of this corpus, for this long.
///
/// # Panics
///
/// If `target` panics, or if memory grows.
#[allow(clippy::panic, clippy::print_stderr, reason = "only tests call it")]
pub fn fuzz(name: &str, time: Duration, corpus: &[Vec<u8>], target: impl Fn(&[u8])) {
    let seed = std::env::var(SEED).ok().and_then(|text| text.parse().ok());
    let first: u64 = seed.unwrap_or_else(|| fastrand::u64(..u64::MAX / 2));
    for input in corpus {
        target(input);
    }
    let (started, mut cases, mut baseline) = (Instant::now(), 0_u64, None);
    while started.elapsed() < time {
        let seed = first.wrapping_add(cases);
        let input = mutate(&mut Rng::with_seed(seed), corpus);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| target(&input))) {
            let beginning = input.get(..input.len().min(2000)).unwrap_or_default();
            eprintln!("{name} failed: {SEED}={seed}, case {cases}, {} bytes:", input.len());
            eprintln!("{}", String::from_utf8_lossy(beginning));
            resume_unwind(panic);
        }
        cases += 1;
        if baseline.is_none() && started.elapsed() > time / 10 {
            baseline = resident_bytes();
        }
    }
    let grown = resident_bytes().zip(baseline).map_or(0.0, |(now, baseline)| now - baseline);
    eprintln!("{name}: {cases} cases from {SEED}={first}, memory grew by {grown} bytes");
    assert!(grown < MAX_GROWTH, "{name}: memory grew by {grown} bytes in {cases} cases from {SEED}={first}");
}

/// A mutation of one of these inputs.
fn mutate(random: &mut Rng, corpus: &[Vec<u8>]) -> Vec<u8> {
    let Some(input) = random.choice(corpus) else { return Vec::new() };
    let mut input = match serde_json::from_slice::<Value>(input) {
        Ok(value) => mutate_json(random, value, corpus),
        Err(_) => input.clone(),
    };
    if random.u8(..4) == 0 {
        mutate_lines(random, &mut input);
    }
    if random.u8(..4) == 0 {
        for _ in 0..=random.usize(..4) {
            mutate_bytes(random, &mut input);
        }
    }
    input
}

fn mutate_json(random: &mut Rng, mut value: Value, corpus: &[Vec<u8>]) -> Vec<u8> {
    for _ in 0..=random.usize(..3) {
        let number = count(&value);
        let donor = random.choice(corpus).and_then(|donor| serde_json::from_slice::<Value>(donor).ok());
        let mut place = random.usize(..number);
        if let Some(found) = nth(&mut value, &mut place) {
            mutate_value(random, found, donor);
        }
    }
    let mut text = value.to_string();
    if text.contains("nested") {
        let depth = *random.choice(&[100_usize, 126, 127, 128, 129, 1000, 100_000]).unwrap_or(&1);
        let nested = if random.bool() {
            "[".repeat(depth) + &"]".repeat(depth)
        } else {
            r#"{"a":"#.repeat(depth) + "1" + &"}".repeat(depth)
        };
        text = text.replace(&json!(NESTED).to_string(), &nested);
    }
    if random.u8(..8) == 0 {
        // The same field twice.
        let fields: Vec<_> = text.match_indices(",\"").map(|(at, _)| at).collect();
        if let (Some(at), Some(other)) = (random.choice(&fields), random.choice(&fields)) {
            let (from, to) = (*at.min(other), *at.max(other));
            let copy = text.get(from..to).unwrap_or_default().to_owned();
            text.insert_str(from, &copy);
        }
    }
    text.into_bytes()
}

/// The number of values in a value, including itself.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum::<usize>(),
        _ => 0,
    }
}

/// The value at this place, in the order of [`count`].
fn nth<'a>(value: &'a mut Value, place: &mut usize) -> Option<&'a mut Value> {
    if *place == 0 {
        return Some(value);
    }
    *place -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| nth(item, place)),
        Value::Object(fields) => fields.values_mut().find_map(|field| nth(field, place)),
        _ => None,
    }
}

fn mutate_value(random: &mut Rng, value: &mut Value, donor: Option<Value>) {
    match value {
        Value::Object(fields) if random.bool() => {
            let keys: Vec<String> = fields.keys().cloned().collect();
            let (Some(one), Some(other)) = (random.choice(&keys), random.choice(&keys)) else { return };
            let taken = fields.remove(one).unwrap_or_default();
            match random.u8(..4) {
                0 => {}
                1 => {
                    fields.insert(text(random), taken);
                }
                2 => {
                    let other = fields.insert(other.clone(), taken).unwrap_or_default();
                    fields.insert(one.clone(), other);
                }
                _ => {
                    let many = 0..random.usize(..300);
                    fields.extend(many.map(|number| (format!("{one}{number}"), taken.clone())));
                }
            }
        }
        Value::Array(items) if random.bool() => {
            let Some(item) = random.choice(&*items).cloned() else { return };
            match random.u8(..3) {
                0 => items.clear(),
                1 => items.reverse(),
                _ => items.extend(std::iter::repeat_n(item, random.usize(..300))),
            }
        }
        Value::String(old) if random.u8(..3) == 0 => {
            // Annotations contain JSON, YAML or numbers.
            let mut bytes = std::mem::take(old).into_bytes();
            mutate_bytes(random, &mut bytes);
            *old = String::from_utf8_lossy(&bytes).into_owned();
        }
        _ => *value = any(random, donor),
    }
}

fn any(random: &mut Rng, donor: Option<Value>) -> Value {
    match random.u8(..12) {
        0 => Value::Null,
        1 => json!(random.bool()),
        2 => json!(
            *random.choice(&[0, -1, 1, i64::MAX, i64::MIN, 2_147_483_648, -2_147_483_649]).unwrap_or(&0)
        ),
        3 => json!(u64::MAX),
        4 => json!(*random.choice(&[1e308, -1e308, 0.5, -0.0, 5e-324]).unwrap_or(&0.5)),
        5 => json!([]),
        6 => json!({}),
        7 => json!(NESTED),
        8 => donor.unwrap_or_default(),
        _ => json!(text(random)),
    }
}

fn text(random: &mut Rng) -> String {
    const TEXTS: [&str; 24] = [
        "",
        " ",
        "\0",
        "-",
        "/",
        "~1",
        "a/b/c",
        "null",
        "true",
        "0",
        "-1",
        "99999999999999999999",
        "1e9",
        "2026-02-30T25:61:61Z",
        "9999-12-31T23:59:59.999999999Z",
        "-009999-01-01T00:00:00Z",
        "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11",
        "metadata.name",
        "Exists",
        "\u{feff}",
        "😀",
        "\u{202e}",
        "{",
        "[1,2",
    ];
    let text = random.choice(TEXTS).unwrap_or_default();
    match random.u8(..6) {
        0 => text.repeat(random.usize(..20_000)),
        1 => random
            .choice(['a', 'ü', '.', '-', '\u{1b}'])
            .unwrap_or('a')
            .to_string()
            .repeat(random.usize(..70_000)),
        _ => text.to_owned(),
    }
}

fn mutate_lines(random: &mut Rng, input: &mut Vec<u8>) {
    let mut lines: Vec<&[u8]> = input.split_inclusive(|byte| *byte == b'\n').collect();
    let Some(place) = (!lines.is_empty()).then(|| random.usize(..lines.len())) else { return };
    let line = lines.remove(place);
    let elsewhere = random.usize(..=lines.len());
    match random.u8(..3) {
        0 => {}
        1 => lines.insert(elsewhere, line),
        _ => lines.extend(std::iter::repeat_n(line, random.usize(..200))),
    }
    *input = lines.concat();
}

fn mutate_bytes(random: &mut Rng, input: &mut Vec<u8>) {
    let part = |random: &mut Rng, length: usize| -> Range<usize> {
        let start = random.usize(..=length);
        start..(start + random.usize(..64)).min(length)
    };
    let range = part(random, input.len());
    match random.u8(..6) {
        0 => input.truncate(range.start),
        1 => drop(input.drain(range)),
        2 => {
            let copy = input.get(range.clone()).unwrap_or_default().to_vec();
            input.splice(range.start..range.start, copy);
        }
        3 => drop(input.splice(range.start..range.start, [0xff, 0xc0, 0x80])),
        4 => {
            let bytes: Vec<u8> = range.clone().map(|_| random.u8(..)).collect();
            input.splice(range, bytes);
        }
        _ => {
            if let Some(byte) = input.get_mut(range.start) {
                *byte ^= 1 << random.u8(..8);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn seed_repeats_the_input_and_inputs_differ() {
        let corpus = [br#"{"a":{"b":[1,2,{"c":"d"}]},"e":"f"}"#.to_vec(), b"one\ntwo\nthree\n".to_vec()];
        let input = |seed| mutate(&mut Rng::with_seed(seed), &corpus);
        let inputs: BTreeSet<_> = (0..1000).map(input).collect();
        assert!(inputs.len() > 300, "{}", inputs.len());
        assert!((0..1000).all(|seed| input(seed) == input(seed)));
        let parses = |input: &&Vec<u8>| serde_json::from_slice::<Value>(input).is_ok();
        assert!(inputs.iter().filter(parses).count() > 150, "many are valid JSON");
    }

    const TIME: Duration = Duration::from_millis(600);

    #[test]
    fn panics_and_growth_are_found() {
        let corpus = [br#"{"name":"x","size":1}"#.to_vec()];
        let find = |target: &dyn Fn(&[u8])| {
            catch_unwind(AssertUnwindSafe(|| fuzz("test", TIME, &corpus, target))).is_err()
        };
        assert!(!find(&|_| ()));
        assert!(find(&|input| assert!(!input.starts_with(br#"{"name":null"#))));
        let (leak, started) = (RefCell::new(Vec::new()), Instant::now());
        assert!(find(&|_| {
            // After the first tenth of the time.
            if started.elapsed() > TIME / 4 && leak.borrow().len() < 20 {
                leak.borrow_mut().push(vec![1_u8; 16 * 1024 * 1024]);
            }
        }));
    }
}
