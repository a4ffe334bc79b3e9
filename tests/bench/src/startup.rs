//! The group `startup`: from `exec` to ready, for the commands and for a program that only starts the driver.

use std::{
    io::{BufRead, BufReader},
    os::fd::AsFd,
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

use nix::poll::PollFlags;
use vmmfd::{
    error::{Error, Result},
    internals::wait,
};
use vmmfd_cli::temporary::temporary_folder;

use crate::{
    base::us,
    process::{Program, Role, beside, this_program},
    run::{About, Run, nothing},
};

/// The most samples: the driver takes a third of a second for each.
const MOST: usize = 20;

pub(crate) fn measure(run: &mut Run<'_>) -> Result<()> {
    let folder = temporary_folder("vmmfd-bench.")?;
    let commands = ["producer", "consumer"].map(beside);
    let demo = beside("demo").or_else(|| beside("../../scripts/demo"));
    let mut names = vec!["bare start, to ready", "bare start, to its end", "two bare starts at once, to the end"];
    let others =
        [("producer, to ready", &commands[0]), ("consumer, to ready", &commands[1]), ("demo, to its end", &demo)];
    for (name, program) in others {
        match program {
            Some(_) if name.starts_with("demo") && commands.iter().any(Option::is_none) => {}
            Some(_) => names.push(name),
            None => run.leave_out(format!("{name}: the program is not beside this one")),
        }
    }
    let rows = run.turns("starting the driver, and the commands", &names, MOST, |row| {
        let begun = Instant::now();
        match names[row] {
            "bare start, to ready" => {
                let (took, program) = ready(run, bare(run)?, "ready")?;
                ended(run, &program).map(|()| took)
            }
            "bare start, to its end" => {
                ended(run, &start("a bare start", &mut bare(run)?)?).map(|()| us(begun.elapsed()))
            }
            "two bare starts at once, to the end" => {
                let both = [start("a bare start", &mut bare(run)?)?, start("a bare start", &mut bare(run)?)?];
                both.iter().try_for_each(|program| ended(run, program)).map(|()| us(begun.elapsed()))
            }
            "demo, to its end" => {
                let (Some(demo), Some(folder_of)) = (&demo, commands[0].as_deref().and_then(Path::parent)) else {
                    return Ok(0.0);
                };
                let mut command = Command::new(demo);
                command.stderr(Stdio::null()).arg(folder_of).arg("-q").args(options(run)).env("TMPDIR", folder.path());
                ended(run, &start("the demo", &mut command)?).map(|()| us(begun.elapsed()))
            }
            name => {
                let (program, word) =
                    if name.starts_with("producer") { (&commands[0], "shared") } else { (&commands[1], "consumer") };
                let Some(program) = program else { return Ok(0.0) };
                let mut command = Command::new(program);
                // Its last line is about the signal that ends it.
                command.stderr(Stdio::null()).arg("--socket").arg(folder.path().join("ready.sock")).args(options(run));
                ready(run, command, word).map(|(took, _)| took)
            }
        }
    })?;
    run.add(About::size(0), rows, None, nothing)
}

fn options(run: &Run<'_>) -> [String; 4] {
    ["--backend".to_owned(), run.options.backend.to_string(), "--device".to_owned(), run.options.device.to_string()]
}

fn bare(run: &Run<'_>) -> Result<Command> {
    this_program(&Role::BareStart { backend: run.options.backend, device: run.options.device.to_string() })
}

fn start(name: &'static str, command: &mut Command) -> Result<Program> {
    Program::start(name, command.stdin(Stdio::null()).stdout(Stdio::null()))
}

/// Starts a program and waits for a line of output that contains `word`. Returns the time.
fn ready(run: &Run<'_>, mut command: Command, word: &str) -> Result<(f64, Program)> {
    let begun = Instant::now();
    let program = Program::start("a program", command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
    let stdout = program.child.borrow_mut().stdout.take();
    let (mut line, deadline) = (String::new(), begun + run.options.timeout);
    let mut stdout = BufReader::new(stdout.ok_or_else(|| program.failure("has no output".to_owned()))?);
    while !line.contains(word) {
        line.clear();
        // The output has whole lines: the read does not block in the middle of one.
        if stdout.buffer().is_empty() && !wait(run.cancel, stdout.get_ref().as_fd(), PollFlags::POLLIN, deadline)? {
            return Err(program.failure(format!("was not ready within {:?}", run.options.timeout)));
        }
        if stdout.read_line(&mut line).map_err(|error| Error::system("read a program's output", error))? == 0 {
            return Err(program.failure(format!("{} before it was ready", program.end_of_dead().unwrap_or_default())));
        }
    }
    // Open, so that the program can still write.
    program.child.borrow_mut().stdout = Some(stdout.into_inner());
    Ok((us(begun.elapsed()), program))
}

/// Waits until a program has ended with success.
fn ended(run: &Run<'_>, program: &Program) -> Result<()> {
    match program.wait(run.options.timeout) {
        Some(status) if status.success() => Ok(()),
        Some(_) => Err(program.failure(program.end_of_dead().unwrap_or_default())),
        None => Err(program.failure(format!("did not end within {:?}", run.options.timeout))),
    }
}
