//! The values of options that are one of a few words, as clap lists them in help and completions.

use std::ffi::OsStr;

use clap::{
    Arg, Command, ValueEnum,
    builder::{PossibleValue, TypedValueParser},
};

use crate::{
    array::{ElementType, Order},
    driver::{Access, Backend, Choice},
    memory::{Mechanism, Placement},
    tools::check::pattern::{Engine, EngineChoice},
};

impl ValueEnum for Choice {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Auto, Self::Only(Backend::Cuda), Self::Only(Backend::Host)]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Self::Auto => PossibleValue::new("auto")
                .help("cuda; host only if no driver library loads or the driver finds no device"),
            Self::Only(backend) => backend.to_possible_value()?,
        })
    }
}

impl ValueEnum for Backend {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Cuda, Self::Host]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Self::Cuda => PossibleValue::new("cuda").help("memory of an NVIDIA GPU"),
            Self::Host => PossibleValue::new("host").help("ordinary memory: no GPU takes part"),
        })
    }
}

impl ValueEnum for Access {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::ReadOnly, Self::ReadWrite]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Self::ReadOnly => PossibleValue::new("ro").help("read-only"),
            Self::ReadWrite => PossibleValue::new("rw").help("read-write"),
        })
    }
}

impl ValueEnum for Mechanism {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Vmm, Self::Pool, Self::Legacy]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Self::Vmm => {
                PossibleValue::new("vmm").help("virtual memory management: a file descriptor for each allocation")
            }
            Self::Pool => PossibleValue::new("pool").help("a memory pool: its descriptor, and a handle of 64 bytes"),
            Self::Legacy => PossibleValue::new("legacy").help("cuIpcMemHandle: a handle of 64 bytes"),
        })
    }
}

impl ValueEnum for Placement {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Device, Self::Host]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Self::Device => PossibleValue::new("device").help("the device's own"),
            Self::Host => {
                PossibleValue::new("host").help("the host's next to it (host-NUMA), which CPU and GPU both access")
            }
        })
    }
}

impl ValueEnum for Order {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::C, Self::F]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Self::C => PossibleValue::new("C").help("the last index varies fastest"),
            Self::F => PossibleValue::new("F").help("the first index varies fastest"),
        })
    }
}

impl ValueEnum for EngineChoice {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Auto, Self::Only(Engine::Gpu), Self::Only(Engine::Host)]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Self::Auto => PossibleValue::new("auto").help(
                "the one that is estimated to be faster; the host where the driver has no compiler for the kernels",
            ),
            Self::Only(Engine::Gpu) => PossibleValue::new("gpu").help("kernels on the GPU"),
            Self::Only(Engine::Host) => PossibleValue::new("host").help("the CPUs, on copies"),
        })
    }
}

/// Parses any element type, and lists the common ones for completions.
#[derive(Debug, Clone, Copy)]
pub(super) struct ElementTypeParser;

impl TypedValueParser for ElementTypeParser {
    type Value = ElementType;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<ElementType, clap::Error> {
        let parse = |text: &str| text.parse::<ElementType>();
        TypedValueParser::parse_ref(&parse, command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(ElementType::names().map(PossibleValue::new)))
    }
}
