//! The names that many files of the suite use.

pub(crate) use crate::{
    broker::filled,
    running::{Ended, HANGS, Meeting, On, Run, Running, wait_for},
    support::{EXPORTABLE, Fault, Kind, Mapped, Subject, code, in_child, served::Served},
};
pub(crate) use nix::sys::{
    memfd::{MFdFlags, memfd_create},
    signal::Signal,
};
pub(crate) use serde_json::{Value, json};
pub(crate) use std::{
    collections::BTreeSet,
    env,
    fs::{self, File},
    io::{Read, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{fs::PermissionsExt, net::UnixStream, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
pub(crate) use vmmfd::{
    Error,
    array::{ArrayDescriptor, ElementType, Order},
    broker::{Client, Get, Put, PutPart},
    channel::{Cancel, Channel, Listener},
    driver::{
        Access::{self, ReadOnly, ReadWrite},
        Attribute, Backend, Choice, Driver, code, open,
    },
    error::{DeviceError, ErrorKind, MemoryError, PeerError},
    internals::{self, CudaDriver, HostDriver, Location, Verbs},
    memory::{
        Allocation, Arenas, ArrayHandle, Device, LegacyMemory, Mapping, Mirror, Region, Reservation, Selector, Shared,
        Spec,
    },
    session::{
        Config, Verdict,
        handoff::{Buffer, Consumer, Request, ServeOptions, Unchecked, serve_connection},
    },
    wire::Message,
};
pub(crate) use vmmfd_cli::check::{
    DataVerifier,
    pattern::{self, Pattern},
};
