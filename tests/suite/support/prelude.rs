//! The names that many files of the suite use.

pub(crate) use crate::{
    running::{Ended, HANGS, Meeting, On, Run, Running, binary, wait_for},
    support::{
        Broker, Copy, EXPORTABLE, Fake, Fault, Kind, Mapped, Raw, Subject, become_user, code, filled, in_child,
        in_fork, refused,
        served::{Keeper, Served, is_alive},
        until,
    },
};
pub(crate) use nix::{
    sys::{
        memfd::{MFdFlags, memfd_create},
        signal::{Signal, kill},
    },
    unistd::Pid,
};
pub(crate) use serde_json::{Value, json};
pub(crate) use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{
            fs::{MetadataExt, PermissionsExt},
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};
pub(crate) use tempfile::TempDir;
pub(crate) use vmmfd::{
    Error,
    array::{ArrayDescriptor, ElementType, Order},
    broker::{ArrayEntry, ClaimOf, Client, Condition, Found, Get, Lease, Object, Put, PutPart, Server, ServerConfig},
    channel::{Cancel, CancelReason, Channel, Listener, Trust},
    driver::{
        Access::{self, ReadOnly, ReadWrite},
        Attribute, Backend, Choice, Driver, code, open,
    },
    error::{DeviceError, ErrorCode, ErrorKind, MemoryError, PeerError, RefusalCode, SocketError},
    internals::{self, CudaDriver, Granularity, HostDriver, Location, Properties, Verbs},
    memory::{
        Allocation, Arenas, Array, ArrayHandle, Description, Device, LegacyMemory, Mapping, Mirror, Placement, Region,
        Reservation, Selector, Shared, Sharing, Spec,
    },
    session::{
        Config, Verdict,
        handoff::{Buffer, Consumer, Request, ServeOptions, Unchecked, serve_connection},
        stream::{PublishOptions, Publisher, SubscribeOptions, Subscriber},
    },
    wire::Message,
};
pub(crate) use vmmfd_cli::check::{
    DataVerifier,
    pattern::{self, Pattern},
};
