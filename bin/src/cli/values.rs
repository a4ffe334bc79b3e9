//! Options with a fixed list of values, for help and completions.

use std::ffi::OsStr;

use clap::{
    Arg, Command,
    builder::{PossibleValue, PossibleValuesParser, TypedValueParser},
    error::ErrorKind,
};
use vmmfd::{
    array::{ElementType, Order},
    driver::{Access, Backend, Choice},
    internals::element_type_names,
    memory::{Mechanism, Placement},
};

use crate::check::pattern::{Engine, EngineChoice};

/// The values of an option: each value, its word and its help.
#[derive(Debug, Clone, Copy)]
pub struct OneOf<T: 'static>(&'static [(T, &'static str, &'static str)]);

const CUDA: &str = "memory of an NVIDIA GPU";
const HOST: &str = "ordinary memory, without a GPU";

/// The backends, and the automatic choice.
pub(super) const CHOICE: OneOf<Choice> = OneOf(&[
    (Choice::Auto, "auto", "cuda; host only if no driver library loads or the driver finds no device"),
    (Choice::Only(Backend::Cuda), "cuda", CUDA),
    (Choice::Only(Backend::Host), "host", HOST),
]);

/// The backends.
pub const BACKEND: OneOf<Backend> = OneOf(&[(Backend::Cuda, "cuda", CUDA), (Backend::Host, "host", HOST)]);

pub(super) const ACCESS: OneOf<Access> =
    OneOf(&[(Access::ReadOnly, "ro", "read-only"), (Access::ReadWrite, "rw", "read-write")]);

pub(super) const MECHANISM: OneOf<Mechanism> = OneOf(&[
    (Mechanism::Vmm, "vmm", "virtual memory management: a file descriptor for each allocation"),
    (Mechanism::Pool, "pool", "a memory pool: its descriptor, and a handle of 64 bytes"),
    (Mechanism::Legacy, "legacy", "cuIpcMemHandle: a handle of 64 bytes"),
]);

pub(super) const PLACEMENT: OneOf<Placement> = OneOf(&[
    (Placement::Device, "device", "device memory"),
    (Placement::Host, "host", "host memory next to the device (host-NUMA), for CPU and GPU"),
]);

pub(super) const ORDER: OneOf<Order> =
    OneOf(&[(Order::C, "C", "the last index varies fastest"), (Order::F, "F", "the first index varies fastest")]);

pub(super) const ENGINE: OneOf<EngineChoice> = OneOf(&[
    (EngineChoice::Auto, "auto", "the faster engine by estimate; host if the driver cannot compile the kernels"),
    (EngineChoice::Only(Engine::Gpu), "gpu", "kernels on the GPU"),
    (EngineChoice::Only(Engine::Host), "host", "the CPUs, on copies"),
]);

impl<T: Copy + Send + Sync> OneOf<T> {
    fn words(self) -> impl Iterator<Item = PossibleValue> {
        self.0.iter().map(|&(_, word, help)| PossibleValue::new(word).help(help))
    }
}

impl<T: Copy + Send + Sync> TypedValueParser for OneOf<T> {
    type Value = T;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<T, clap::Error> {
        let given = PossibleValuesParser::new(self.words()).parse_ref(command, arg, value)?;
        // The parser above has checked the case.
        let found = self.0.iter().find(|(_, word, _)| word.eq_ignore_ascii_case(&given));
        found.map(|&(value, ..)| value).ok_or_else(|| clap::Error::new(ErrorKind::InvalidValue).with_cmd(command))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.words()))
    }
}

/// Parses any element type; completions list the common types.
#[derive(Debug, Clone, Copy)]
pub(super) struct ElementTypeParser;

impl TypedValueParser for ElementTypeParser {
    type Value = ElementType;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<ElementType, clap::Error> {
        let parse = |text: &str| text.parse::<ElementType>();
        TypedValueParser::parse_ref(&parse, command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(element_type_names().map(PossibleValue::new)))
    }
}
