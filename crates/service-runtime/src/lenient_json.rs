//! Reads JSON forgivingly and in one pass: a value of another type than expected reads as absent, so that
//! one odd object never costs us a list or watch of all others. Only text that is no JSON is an error.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The methods of a visitor for the types of values that were not expected.
macro_rules! absent_if {
    () => {};
    (bool $($rest:ident)*) => {
        fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
        $crate::lenient_json::absent_if!($($rest)*);
    };
    (number $($rest:ident)*) => {
        fn visit_i64<E: serde::de::Error>(self, _: i64) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
        fn visit_u64<E: serde::de::Error>(self, _: u64) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
        $crate::lenient_json::absent_if!(float $($rest)*);
    };
    (float $($rest:ident)*) => {
        fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
        $crate::lenient_json::absent_if!($($rest)*);
    };
    (text $($rest:ident)*) => {
        fn visit_str<E: serde::de::Error>(self, _: &str) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
        $crate::lenient_json::absent_if!($($rest)*);
    };
    (null $($rest:ident)*) => {
        fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
        $crate::lenient_json::absent_if!($($rest)*);
    };
    (list $($rest:ident)*) => {
        fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            while list.next_element::<serde::de::IgnoredAny>()?.is_some() {}
            Ok(Self::Value::default())
        }
        $crate::lenient_json::absent_if!($($rest)*);
    };
    (object $($rest:ident)*) => {
        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
            while object.next_entry::<serde::de::IgnoredAny, serde::de::IgnoredAny>()?.is_some() {}
            Ok(Self::Value::default())
        }
        $crate::lenient_json::absent_if!($($rest)*);
    };
}
pub(crate) use absent_if;

/// Defines objects of which only the named fields are read; all of them may be absent.
macro_rules! objects {
    ($($(#[$doc:meta])* $name:ident { $($json:literal => $field:ident: $type:ty,)+ })+) => {$(
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub(crate) struct $name<'a> {
            $(pub(crate) $field: $type,)+
            pub(crate) _borrows: std::marker::PhantomData<&'a str>,
        }

        impl<'de: 'a, 'a> serde::Deserialize<'de> for $name<'a> {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Reader<'a>(std::marker::PhantomData<&'a str>);

                impl<'de: 'a, 'a> serde::de::Visitor<'de> for Reader<'a> {
                    type Value = $name<'a>;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str("any JSON")
                    }

                    fn visit_map<A: serde::de::MapAccess<'de>>(
                        self,
                        mut object: A,
                    ) -> Result<Self::Value, A::Error> {
                        let mut value = $name::default();
                        while let Some(key) = object.next_key::<$crate::lenient_json::Key>()? {
                            match key.0.as_ref() {
                                $($json => value.$field = object.next_value()?,)+
                                _ => {
                                    object.next_value::<serde::de::IgnoredAny>()?;
                                }
                            }
                        }
                        Ok(value)
                    }

                    $crate::lenient_json::absent_if!(bool number text null list);
                }

                deserializer.deserialize_any(Reader(std::marker::PhantomData))
            }
        }
    )+};
}
pub(crate) use objects;

/// The key of a field.
#[derive(serde::Deserialize)]
pub(crate) struct Key<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

/// A string.
#[derive(Debug, Default)]
pub(crate) struct Text<'a>(pub(crate) Option<Cow<'a, str>>);

impl Text<'_> {
    /// The string if there is one and it is not empty.
    pub(crate) fn get(&self) -> Option<&str> {
        self.0.as_deref().filter(|text| !text.is_empty())
    }
}

struct TextReader<'a>(PhantomData<&'a str>);

impl<'de: 'a, 'a> Visitor<'de> for TextReader<'a> {
    type Value = Text<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Text(Some(Cow::Borrowed(text))))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Text(Some(Cow::Owned(text.to_owned()))))
    }

    absent_if!(bool number null list object);
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextReader(PhantomData))
    }
}

/// A whole number.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Number(pub(crate) Option<i64>);

struct NumberReader;

impl<'de> Visitor<'de> for NumberReader {
    type Value = Number;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Self::Value, E> {
        Ok(Number(Some(number)))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Number(number.try_into().ok()))
    }

    absent_if!(float bool text null list object);
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberReader)
    }
}

/// A truth value; absent is false.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flag(pub(crate) bool);

struct FlagReader;

impl<'de> Visitor<'de> for FlagReader {
    type Value = Flag;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }

    fn visit_bool<E: Error>(self, flag: bool) -> Result<Self::Value, E> {
        Ok(Flag(flag))
    }

    absent_if!(number text null list object);
}

impl<'de> Deserialize<'de> for Flag {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FlagReader)
    }
}

/// Whether there is an object at all, whatever is in it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Presence(pub(crate) bool);

struct PresenceReader;

impl<'de> Visitor<'de> for PresenceReader {
    type Value = Presence;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Presence(true))
    }

    absent_if!(bool number text null list);
}

impl<'de> Deserialize<'de> for Presence {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PresenceReader)
    }
}

/// A list; absent is empty.
#[derive(Debug)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

impl<T> Default for List<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

struct ListReader<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ListReader<T> {
    type Value = List<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(List(items))
    }

    absent_if!(bool number text null object);
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ListReader(PhantomData))
    }
}
