//! Descriptions as plain wire data, and back. Nothing else in this folder knows the wire.

use serde::{Deserialize, Serialize};

use super::{ArrayHandle, Description, DeviceIdentity, Part, Placement, Pointer, Sharing};
use crate::{
    array::ArrayDescriptor,
    error::{Error, ErrorCode, PeerError, ProtocolError, Result},
    wire,
};

impl From<&Description> for wire::Memory {
    fn from(description: &Description) -> Self {
        let Description { device, sharing, size, mapped_size, immutable } = description;
        let memory = Self {
            mechanism: wire::Mechanism::Vmm,
            device: wire::Device { uuid: device.uuid, name: device.name.clone() },
            location: wire::Location::Device,
            size: *size,
            mapped_size: *mapped_size,
            segments: 0,
            pool: None,
            pointer: None,
            offset: 0,
            immutable: *immutable,
        };
        match *sharing {
            Sharing::Vmm { placement, segments } => {
                let location = match placement {
                    Placement::Device => wire::Location::Device,
                    Placement::Host => wire::Location::Host,
                };
                Self { location, segments, ..memory }
            }
            Sharing::Pool { pool, pointer, offset } => Self {
                mechanism: wire::Mechanism::Pool,
                pool: Some(pool),
                pointer: Some(wire::Pointer(pointer.0)),
                offset,
                ..memory
            },
            Sharing::Legacy { pointer, offset } => {
                Self { mechanism: wire::Mechanism::Legacy, pointer: Some(wire::Pointer(pointer.0)), offset, ..memory }
            }
        }
    }
}

impl TryFrom<wire::Memory> for Description {
    type Error = Error;

    /// # Errors
    /// [`PeerError::Mismatch`] for a mechanism or a location that this version does not know; [`PeerError::Protocol`] if a field
    /// that belongs to the mechanism is missing.
    fn try_from(memory: wire::Memory) -> Result<Self> {
        let unknown = |message: &str| {
            Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Failed, message: message.to_owned() }))
        };
        let missing = |what: &str| ProtocolError::Content(what.to_owned());
        let placement = match memory.location {
            wire::Location::Device => Placement::Device,
            wire::Location::Host => Placement::Host,
            wire::Location::Unknown => return unknown("the memory is at a location that this version does not know"),
        };
        let pointer = memory.pointer.map(|pointer| Pointer(pointer.0));
        let pointer = || pointer.ok_or_else(|| missing("memory comes without the 64 bytes that open it"));
        let offset = memory.offset;
        let sharing = match (memory.mechanism, placement) {
            (wire::Mechanism::Vmm, placement) => Sharing::Vmm { placement, segments: memory.segments },
            (wire::Mechanism::Pool, Placement::Device) => {
                let pool = memory.pool.ok_or_else(|| missing("memory of a pool comes without the pool's number"))?;
                Sharing::Pool { pool, pointer: pointer()?, offset }
            }
            (wire::Mechanism::Legacy, Placement::Device) => Sharing::Legacy { pointer: pointer()?, offset },
            (wire::Mechanism::Pool | wire::Mechanism::Legacy, _) => {
                return unknown("the memory is the host's, and shared by a mechanism that has only the device's");
            }
            (wire::Mechanism::Unknown, _) => {
                return unknown("the memory is shared by a mechanism that this version does not know");
            }
        };
        let wire::Memory { device: wire::Device { uuid, name }, size, mapped_size, immutable, .. } = memory;
        Ok(Self { device: DeviceIdentity { uuid, name }, sharing, size, mapped_size, immutable })
    }
}

impl From<Part> for wire::Part {
    fn from(Part { first, segments, offset, size }: Part) -> Self {
        Self { first, segments, offset, size }
    }
}

impl From<wire::Part> for Part {
    fn from(wire::Part { first, segments, offset, size }: wire::Part) -> Self {
        Self { first, segments, offset, size }
    }
}

/// An [`ArrayHandle`] as it serialises.
#[derive(Serialize, Deserialize)]
pub(super) struct HandleData {
    memory: wire::Memory,
    #[serde(default)]
    segments: Vec<u64>,
    array: ArrayDescriptor,
}

impl From<ArrayHandle> for HandleData {
    fn from(handle: ArrayHandle) -> Self {
        let ArrayHandle { memory, segments, array } = handle;
        Self { memory: (&memory).into(), segments, array }
    }
}

impl TryFrom<HandleData> for ArrayHandle {
    type Error = Error;

    fn try_from(data: HandleData) -> Result<Self> {
        let HandleData { memory, segments, array } = data;
        Ok(Self { memory: memory.try_into()?, segments, array })
    }
}
