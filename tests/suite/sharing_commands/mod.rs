//! Every way of sharing through the two commands: mechanisms, locations, chunks, arrays, files, seals, other devices.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    thread,
    time::Duration,
};

use nix::sys::signal::Signal;
use serde_json::json;
use vmmfd::{
    channel::{Channel, Listener},
    driver::{Access, Backend, Choice, open},
    memory::{Device, Mechanism, Mirror, Region, Selector, Shared, Spec},
    session::{
        Config, Verdict,
        handoff::{self, Buffer, Consumer, ServeOptions, Served, Unchecked, serve},
    },
    wire::{Message, Received},
};
use vmmfd_cli::check::{DataVerifier, Exercise};

use crate::{
    conversation::{answer, dial, hello, request},
    running::{Meeting, On},
};

mod data;
mod library;
mod mechanisms;

fn shared(spec: impl Into<Spec>) -> Shared {
    let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
    Shared::create(&Device::find(&driver, Selector::default()).unwrap(), spec).unwrap()
}
