//! The auto traits of the public types: which types are `Send`, and which are `Sync`.

use vmmfd::{
    array::Interface,
    broker::{Claim, LeasedPart, Lost, ObjectPart, Prepared, Restored, ServerReport},
    channel::Peer,
    driver::{DeviceUuid, MemoryInfo, Opened},
    error::{LoadError, ParseError, ProtocolError, WeightsError},
    memory::{Chunk, Imported, Pool, PoolBuffer},
    session::{
        handoff::{ImportedObject, ServeReport, Served},
        stream::{Event, Format, Loan, Received, Sample},
    },
    weights::{Checkpoint, LoadOptions, Loaded, Tensor},
};

use crate::support::prelude::*;

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
