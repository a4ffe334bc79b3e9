//! What the commands are made of: their options, the doctor, the bench, and what the demonstration writes and checks.

pub mod bench;
pub mod check;
pub mod cli;
pub mod doctor;
mod line;
mod temporary;
