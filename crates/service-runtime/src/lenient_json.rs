//! Parses JSON leniently, in one pass. A value of an unexpected type counts as absent, so that one invalid object does
//! not break a list or watch. Only invalid JSON is an error.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// A type that can be parsed from any JSON. A type overrides the method for the JSON that it expects. Anything else counts as
/// absent, which is the default.
pub(crate) trait Lenient<'de>: Default {
    fn from_bool(_: bool) -> Self {
        Self::default()
    }

    fn from_number(_: i64) -> Self {
        Self::default()
    }

    fn from_text(_: Cow<'de, str>) -> Self {
        Self::default()
    }

    fn from_list<A: SeqAccess<'de>>(mut list: A) -> Result<Self, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Self::default())
    }

    fn from_object<A: MapAccess<'de>>(mut object: A) -> Result<Self, A::Error> {
        while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Self::default())
    }
}

/// Parses a lenient value.
pub(crate) fn read<'de, T: Lenient<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    deserializer.deserialize_any(Reader(PhantomData))
}

struct Reader<T>(PhantomData<T>);

impl<'de, T: Lenient<'de>> Visitor<'de> for Reader<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }

    fn visit_bool<E: Error>(self, flag: bool) -> Result<T, E> {
        Ok(T::from_bool(flag))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        Ok(T::from_number(number))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        Ok(number.try_into().map(T::from_number).unwrap_or_default())
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<T, E> {
        Ok(T::default())
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<T, E> {
        Ok(T::from_text(Cow::Borrowed(text)))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        Ok(T::from_text(Cow::Owned(text.to_owned())))
    }

    fn visit_unit<E: Error>(self) -> Result<T, E> {
        Ok(T::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<T, A::Error> {
        T::from_list(list)
    }

    fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<T, A::Error> {
        T::from_object(object)
    }
}

/// Implements `Deserialize` for lenient types.
macro_rules! deserialize {
    ($($type:ty),+) => {$(
        impl<'de: 'a, 'a> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::lenient_json::read(deserializer)
            }
        }
    )+};
}
pub(crate) use deserialize;

/// Defines objects of which only the named fields are parsed. All fields are optional.
macro_rules! objects {
    ($($(#[$doc:meta])* $name:ident { $($json:literal => $field:ident: $type:ty,)+ })+) => {$(
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub(crate) struct $name<'a> {
            $(pub(crate) $field: $type,)+
        }

        impl<'de: 'a, 'a> $crate::lenient_json::Lenient<'de> for $name<'a> {
            fn from_object<A: serde::de::MapAccess<'de>>(mut object: A) -> Result<Self, A::Error> {
                let mut value = Self::default();
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
        }

        $crate::lenient_json::deserialize!($name<'a>);
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

impl<'de: 'a, 'a> Lenient<'de> for Text<'a> {
    fn from_text(text: Cow<'de, str>) -> Self {
        Self(Some(text))
    }
}

/// A whole number.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Number(pub(crate) Option<i64>);

impl Lenient<'_> for Number {
    fn from_number(number: i64) -> Self {
        Self(Some(number))
    }
}

/// A boolean; absent is false.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flag(pub(crate) bool);

impl Lenient<'_> for Flag {
    fn from_bool(flag: bool) -> Self {
        Self(flag)
    }
}

/// Whether an object is present, with any content.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Presence(pub(crate) bool);

impl<'de> Lenient<'de> for Presence {
    fn from_object<A: MapAccess<'de>>(mut object: A) -> Result<Self, A::Error> {
        while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Self(true))
    }
}

deserialize!(Text<'a>, Number, Flag, Presence);

/// A list; absent is empty.
#[derive(Debug)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

impl<T> Default for List<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>> Lenient<'de> for List<T> {
    fn from_list<A: SeqAccess<'de>>(mut list: A) -> Result<Self, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Self(items))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer)
    }
}
