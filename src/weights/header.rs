//! The header of a safetensors file. Every value is checked against the file before it is used.

use std::{collections::HashMap, fmt, marker::PhantomData};

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor},
};

use crate::{
    array::{ElementType, MAX_DIMENSIONS},
    error::units::bytes,
};

/// The size of the length field before the header, in bytes.
pub(super) const LENGTH: u64 = 8;

/// The format's limit on the length of a header, in bytes.
const MAX_HEADER: u64 = 100_000_000;

/// A header that matches its file.
#[derive(Debug)]
pub(super) struct Header {
    /// The file's `__metadata__`.
    pub metadata: HashMap<String, String>,
    /// In file order, without gaps.
    pub tensors: Vec<Entry>,
}

/// A tensor in a file.
#[derive(Debug)]
pub(super) struct Entry {
    pub name: String,
    pub dtype: ElementType,
    pub shape: Vec<u64>,
    /// The offset of its bytes in the file.
    pub offset: u64,
    pub bytes: u64,
}

/// Parses the length of the header from a file's first bytes. `size` is the file's size in bytes.
///
/// # Errors
/// The predicate of a sentence whose subject is the file's path.
pub(super) fn size_of(first: [u8; 8], size: u64) -> Result<u64, String> {
    let length = u64::from_le_bytes(first);
    let room = size.saturating_sub(LENGTH);
    if length > MAX_HEADER {
        return Err("is not a safetensors file: it does not begin with the length of a header".to_owned());
    }
    if length > room {
        let length = bytes(length);
        let room = bytes(room);
        return Err(format!(
            "is not a safetensors file, or incomplete: its header claims {length}, but only {room} follow"
        ));
    }
    Ok(length)
}

/// Parses a header. `size` is the file's size in bytes.
///
/// # Errors
/// The predicate of a sentence whose subject is the file's path.
pub(super) fn read(header: &[u8], size: u64) -> Result<Header, String> {
    let Table { metadata, mut tensors } = serde_json::from_slice(header)
        .map_err(|error| format!("is not a safetensors file: invalid header: {error}"))?;
    tensors.sort_by_key(|(_, tensor)| tensor.data_offsets);
    let start = LENGTH + header.len() as u64;
    let room = size - start;
    let mut end = 0;
    for (index, (name, tensor)) in tensors.iter().enumerate() {
        let first = tensor.data_offsets.0 as u64;
        let last = tensor.data_offsets.1 as u64;
        let name = name.as_str();
        if last < first {
            return Err(format!("is corrupt: tensor {name:?} ends at byte {last}, before its start at {first}"));
        }
        if last > room {
            return Err(format!(
                "is corrupt: tensor {name:?} has the bytes {first} to {last}, but only {room} bytes follow the header"
            ));
        }
        if first < end {
            let other = &tensors[index - 1].0;
            return Err(format!(
                "is corrupt: tensor {name:?} starts at byte {first}, inside {other:?}, which ends at {end}"
            ));
        }
        if first > end {
            return Err(format!("is corrupt: the bytes {end} to {first}, before tensor {name:?}, belong to no tensor"));
        }
        if tensor.shape.len() > MAX_DIMENSIONS {
            let count = tensor.shape.len();
            return Err(format!("has a tensor {name:?} of {count} dimensions: at most {MAX_DIMENSIONS} are supported"));
        }
        let bits = tensor.shape.iter().try_fold(tensor.dtype.bitsize(), |bits, length| bits.checked_mul(*length));
        if bits.is_none_or(|bits| bits as u64 != 8 * (last - first)) {
            let bytes = last - first;
            let shape = &tensor.shape;
            let dtype = tensor.dtype;
            return Err(format!(
                "is corrupt: tensor {name:?} has {bytes} bytes, which do not match {dtype:?} {shape:?}"
            ));
        }
        end = last;
    }
    if end != room {
        return Err(format!("is corrupt: its last {} bytes belong to no tensor", room - end));
    }
    let entries = tensors.iter().map(|(name, tensor)| {
        Ok(Entry {
            name: name.clone(),
            dtype: element(tensor.dtype).ok_or_else(|| {
                format!("has a tensor {name:?} of {:?}: elements smaller than a byte are not supported", tensor.dtype)
            })?,
            shape: tensor.shape.iter().map(|length| *length as u64).collect(),
            offset: start + tensor.data_offsets.0 as u64,
            bytes: (tensor.data_offsets.1 - tensor.data_offsets.0) as u64,
        })
    });
    let entries = entries.collect::<Result<Vec<Entry>, String>>()?;
    // Also apply the checks of the format's reference implementation.
    Metadata::new(None, tensors).map_err(|error| format!("is corrupt: {error}"))?;
    Ok(Header { metadata, tensors: entries })
}

/// The element type; `None` if elements have less than 8 bits.
fn element(dtype: Dtype) -> Option<ElementType> {
    Some(match dtype {
        Dtype::BOOL => ElementType::BOOL,
        Dtype::U8 => ElementType::U8,
        Dtype::I8 => ElementType::I8,
        Dtype::F8_E5M2 => ElementType::F8E5M2,
        Dtype::F8_E4M3 => ElementType::F8E4M3FN,
        Dtype::F8_E8M0 => ElementType::F8E8M0FNU,
        Dtype::F8_E4M3FNUZ => ElementType::F8E4M3FNUZ,
        Dtype::F8_E5M2FNUZ => ElementType::F8E5M2FNUZ,
        Dtype::I16 => ElementType::I16,
        Dtype::U16 => ElementType::U16,
        Dtype::F16 => ElementType::F16,
        Dtype::BF16 => ElementType::BF16,
        Dtype::I32 => ElementType::I32,
        Dtype::U32 => ElementType::U32,
        Dtype::F32 => ElementType::F32,
        Dtype::C64 => ElementType::C64,
        Dtype::F64 => ElementType::F64,
        Dtype::I64 => ElementType::I64,
        Dtype::U64 => ElementType::U64,
        _ => return None,
    })
}

/// A header as stored.
struct Table {
    metadata: HashMap<String, String>,
    tensors: Vec<(String, TensorInfo)>,
}

impl<'de> Deserialize<'de> for Table {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Table;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Table, A::Error> {
                let mut metadata = None;
                let mut tensors = HashMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    let twice = match name.as_str() {
                        "__metadata__" => {
                            metadata.replace(map.next_value::<Strings<HashMap<String, String>>>()?.0).is_some()
                        }
                        _ => tensors.insert(name.clone(), map.next_value::<TensorInfo>()?).is_some(),
                    };
                    if twice {
                        return Err(A::Error::custom(format!("it has {name:?} twice")));
                    }
                }
                Ok(Table { metadata: metadata.unwrap_or_default(), tensors: tensors.into_iter().collect() })
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

/// An object of strings without duplicate keys.
#[derive(Debug)]
pub(super) struct Strings<T>(pub T);

impl<'de, T: Extend<(String, String)> + Default> Deserialize<'de> for Strings<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);

        impl<'de, T: Extend<(String, String)> + Default> Visitor<'de> for Entries<T> {
            type Value = Strings<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Strings<T>, A::Error> {
                let mut entries = HashMap::new();
                while let Some((name, value)) = map.next_entry::<String, String>()? {
                    if entries.insert(name.clone(), value).is_some() {
                        return Err(A::Error::custom(format!("it has {name:?} twice")));
                    }
                }
                let mut strings = T::default();
                strings.extend(entries);
                Ok(Strings(strings))
            }
        }

        deserializer.deserialize_map(Entries(PhantomData))
    }
}
