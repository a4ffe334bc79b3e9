//! What the commands are made of: their options, the doctor, the bench, and what the demonstration writes and checks.

pub mod bench;
pub mod check;
pub mod child;
pub mod cli;
pub mod conform;
pub mod doctor;
pub mod error;
mod exporter;
mod line;
mod stamp;
mod temporary;
mod units;

/// Does the task of a child process of [`doctor`] or [`mod@bench`], and exits.
///
/// A program that calls [`doctor::run`] or [`bench::run`] must call this with the argument of its hidden subcommand
/// [`child::SUBCOMMAND`]: their children are this program again.
pub fn run_child(task: &str) -> ! {
    let child = child::enter(task);
    let result = match child.tool.as_str() {
        doctor::TOOL => doctor::run_task(&child),
        bench::TOOL => bench::run_task(&child),
        tool => Err(crate::Error::Misuse { problem: format!("no tool is called `{tool}`") }),
    };
    child::leave(result)
}
