//! Converts descriptions of memory to wire data and back, for sessions and the broker. `memory` itself does not know the wire.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{
    array::ArrayDescriptor,
    error::{Error, ProtocolError, Result},
    memory::{ArrayHandle, Description, Mechanism, Placement, Sharing},
    wire,
};

impl From<&Description> for wire::Memory {
    fn from(description: &Description) -> Self {
        let Description { device, sharing, size, mapped_size, immutable } = description;
        let memory = Self {
            mechanism: Mechanism::Vmm,
            device: device.clone(),
            location: Placement::Device,
            size: *size,
            mapped_size: *mapped_size,
            segments: 0,
            pool: None,
            pointer: None,
            offset: 0,
            immutable: *immutable,
        };
        match *sharing {
            Sharing::Vmm { placement: location, segments } => Self { location, segments, ..memory },
            Sharing::Pool { pool, pointer, offset } => {
                Self { mechanism: Mechanism::Pool, pool: Some(pool), pointer: Some(pointer), offset, ..memory }
            }
            Sharing::Legacy { pointer, offset } => {
                Self { mechanism: Mechanism::Legacy, pointer: Some(pointer), offset, ..memory }
            }
        }
    }
}

impl TryFrom<wire::Memory> for Description {
    type Error = Error;

    /// # Errors
    /// [`PeerError::Protocol`](crate::error::PeerError::Protocol) if the mechanism lacks a field or has a field of another mechanism.
    fn try_from(memory: wire::Memory) -> Result<Self> {
        let wrong = |what: &str| Err(ProtocolError::Content(what.to_owned()).into());
        let wire::Memory { mechanism, device, location, size, mapped_size, segments, pool, pointer, offset, immutable } =
            memory;
        let of = |sharing| Ok(Self { device, sharing, size, mapped_size, immutable });
        if mechanism == Mechanism::Vmm {
            return match (pool, pointer, offset) {
                (None, None, 0) => of(Sharing::Vmm { placement: location, segments }),
                _ => wrong("memory shared by vmm has a pool, a pointer or an offset"),
            };
        }
        if location == Placement::Host || segments > 0 {
            return wrong("pool or legacy memory is host memory or has segments");
        }
        let Some(pointer) = pointer else {
            return wrong("the memory lacks the 64 bytes that open it");
        };
        match (mechanism, pool) {
            (Mechanism::Pool, Some(pool)) => of(Sharing::Pool { pool, pointer, offset }),
            (Mechanism::Pool, None) => wrong("pool memory lacks the pool's number"),
            (_, Some(_)) => wrong("legacy memory has a pool"),
            (_, None) => of(Sharing::Legacy { pointer, offset }),
        }
    }
}

/// The serialised form of [`ArrayHandle`].
#[derive(Serialize, Deserialize)]
struct HandleData {
    memory: wire::Memory,
    #[serde(default)]
    segments: Vec<u64>,
    array: ArrayDescriptor,
}

impl Serialize for ArrayHandle {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { memory, segments, array } = self;
        HandleData { memory: memory.into(), segments: segments.clone(), array: array.clone() }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ArrayHandle {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let HandleData { memory, segments, array } = HandleData::deserialize(deserializer)?;
        Ok(Self { memory: memory.try_into().map_err(de::Error::custom)?, segments, array })
    }
}
