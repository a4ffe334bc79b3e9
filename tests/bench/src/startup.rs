//! The group `startup`: from `exec` to ready, for the commands and for a program that only starts the driver.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use vmmfd::error::Result;
use vmmfd_cli::child::{Process, command};

use crate::{
    base::us,
    process::{Role, beside, wait_for_end, wait_for_line},
    run::{About, Run, nothing},
};

/// The most samples: the driver takes a third of a second for each.
const MOST: usize = 20;

/// A row: its program, and how it is measured.
struct Start {
    name: &'static str,
    /// `None` for a bare start.
    program: Option<PathBuf>,
    /// How many are started at once.
    number: usize,
    /// The word of a line of output that shows that it is ready. `None` measures until its end.
    ready: Option<&'static str>,
}

pub(crate) fn measure(run: &mut Run<'_>) -> Result<()> {
    let bare = |name, number, ready| Start { name, program: None, number, ready };
    let mut starts = vec![
        bare("bare start, to ready", 1, Some("ready")),
        bare("bare start, to its end", 1, None),
        bare("two bare starts at once, to the end", 2, None),
    ];
    let demo = beside("demo").or_else(|| beside("../../scripts/demo"));
    for (name, program, ready) in [
        ("producer, to ready", beside("producer"), Some("shared")),
        ("consumer, to ready", beside("consumer"), Some("consumer")),
        ("demo, to its end", demo.filter(|_| beside("producer").is_some()), None),
    ] {
        match program {
            None => run.leave_out(format!("{name}: a program is not beside this one")),
            program => starts.push(Start { name, program, number: 1, ready }),
        }
    }
    let names: Vec<&str> = starts.iter().map(|start| start.name).collect();
    let rows = run.turns("starting the driver, and the commands", &names, MOST, |row| {
        let Start { program, number, ready, .. } = &starts[row];
        let end = |process: &Process| wait_for_end(process, run.options.timeout, run.cancel);
        let begun = Instant::now();
        let mut processes = (0..*number).map(|_| start(run, program.as_deref())).collect::<Result<Vec<_>>>()?;
        for process in &mut processes {
            match ready {
                Some(word) => wait_for_line(process, word, run.options.timeout, run.cancel)?,
                None => end(process)?,
            }
        }
        let took = us(begun.elapsed());
        if program.is_none() {
            processes.iter().try_for_each(end)?;
        }
        Ok(took)
    })?;
    run.add(About::size(0), rows, None, nothing)
}

/// Starts a program, or a bare start.
fn start(run: &Run<'_>, program: Option<&Path>) -> Result<Process> {
    let backend = run.options.backend;
    let device = run.options.device.to_string();
    let mut command = match program {
        None => command(None, &Role::BareStart { backend, device })?,
        Some(program) => {
            let mut command = Command::new(program);
            if program.ends_with("demo") {
                let commands = beside("producer").and_then(|producer| producer.parent().map(Path::to_owned));
                command.arg(commands.unwrap_or_default()).arg("-q").env("TMPDIR", run.family.folder());
            } else {
                command.arg("--socket").arg(run.family.folder().join("ready.sock"));
            }
            command.args(["--backend", backend.as_str(), "--device", &device]).stderr(Stdio::null());
            command
        }
    };
    run.family.spawn("a program", command.stdin(Stdio::null()).stdout(Stdio::piped()))
}
