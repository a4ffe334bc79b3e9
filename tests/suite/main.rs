//! The tests that need more than one module: each file is about one thing and named for it.

#[macro_use]
mod cases;

mod bench;
mod broker;
mod broker_commands;
mod broker_faults;
mod broker_files;
mod broker_limits;
mod broker_parts;
mod broker_process;
mod broker_stress;
mod broker_users;
mod command_line;
mod commands;
mod conform;
mod conform_broker;
mod contract;
mod conversation;
mod cuda_library;
mod deploy;
mod diagnosis;
mod docs;
mod doctor;
mod doctor_broker;
mod doctor_meeting;
mod doctor_rules;
mod engines;
mod examples;
mod fakecuda;
mod foreign_files;
mod host_memory;
mod identity;
mod kernel_floor;
mod kernels;
#[cfg(feature = "launch")]
mod launch;
mod legacy_and_pools;
mod options;
mod protocol;
mod protocol_files;
mod public_api;
mod ranges;
mod rdma;
mod reach;
mod running;
mod seccomp;
mod sessions;
mod shared;
mod sharing_commands;
mod stream;
mod support;
mod terminal;
mod users;
