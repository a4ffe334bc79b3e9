//! The auto traits of the public types: which types are `Send`, and which are `Sync`.

use vmmfd::{
    Error,
    array::{ArrayDescriptor, ElementType, Interface, Order},
    broker::{
        Claim, ClaimOf, Client, Get, Lease, LeasedPart, Lost, Object, ObjectPart, Prepared, Put, PutPart, Restored,
        Server, ServerConfig, ServerReport,
    },
    channel::{Cancel, Channel, Listener, Peer, Trust},
    driver::{Access, Backend, Choice, DeviceUuid, Driver, MemoryInfo, Opened},
    error::{DeviceError, LoadError, MemoryError, ParseError, PeerError, ProtocolError, SocketError, WeightsError},
    memory::{
        Allocation, Arenas, Array, ArrayHandle, Chunk, Description, Device, Imported, LegacyMemory, Mapping, Mirror,
        Pool, PoolBuffer, Region, Reservation, Selector, Shared, Spec,
    },
    session::{
        Config, Verdict,
        handoff::{Buffer, Consumer, ImportedObject, Request, ServeOptions, ServeReport, Served, Unchecked},
        stream::{Event, Format, Loan, Publisher, Received, Sample, Subscriber},
    },
    weights::{Checkpoint, LoadOptions, Loaded, Tensor},
};

fn both<T: Send + Sync + ?Sized>() {}

fn sent<T: Send>() {}

fn lives<T: 'static>() {}

#[test]
fn public_types_are_send_and_mostly_sync() {
    both::<Error>();
    both::<(DeviceError, LoadError, MemoryError, ParseError, PeerError, ProtocolError, SocketError, WeightsError)>();
    both::<(ArrayDescriptor, ElementType, Interface, Order)>();
    both::<(Cancel, Channel, Listener, Peer, Trust)>();
    both::<(Access, Backend, Choice, DeviceUuid, Driver, MemoryInfo, Opened)>();
    both::<(Allocation, Array, ArrayHandle, Chunk, Description, Device, Imported, LegacyMemory, Mapping)>();
    both::<(Arenas, Pool, PoolBuffer, Reservation, Selector, Shared, Spec)>();
    both::<dyn Region>();
    both::<(Config, Verdict, Buffer<'_>, ImportedObject, Request, ServeOptions, ServeReport, Served, Unchecked)>();
    both::<(Event, Format, Loan, Publisher, Received, Sample, Subscriber)>();
    lives::<(Loan, Sample)>();
    sent::<(Consumer<'_>, Mirror<'_>)>();
    both::<(Client, Lease, LeasedPart, Object, ObjectPart, Prepared, Claim)>();
    both::<(Lost, Restored)>();
    both::<(Put<'_>, PutPart<'_>, Get, ClaimOf, ServerConfig, ServerReport)>();
    sent::<Server>();
    both::<(Checkpoint, LoadOptions, Loaded, Tensor)>();
}
