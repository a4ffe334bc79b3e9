//! Every way of sharing through the two commands: mechanisms, locations, chunks, arrays, files, seals, other devices.

use std::os::unix::fs::symlink;

use vmmfd::{
    memory::Mechanism,
    session::handoff::{self, Served, serve},
    wire::Received,
};
use vmmfd_cli::check::Exercise;

use crate::{
    conversation::{answer, dial, hello, request},
    support::prelude::*,
};

mod data;
mod library;
mod mechanisms;

fn shared(spec: impl Into<Spec>) -> Shared {
    let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
    Shared::create(&Device::find(&driver, Selector::default()).unwrap(), spec).unwrap()
}
