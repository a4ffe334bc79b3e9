//! The group `startup`: from `exec` to ready, for the commands and for a program that only starts the driver.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use vmmfd_cli::child::Process;

use crate::{
    prelude::*,
    process::{beside, wait_for_end, wait_for_word},
};

/// The most samples: the driver takes a third of a second for each.
const MOST: usize = 20;

pub(crate) fn measure(run: &mut Run<'_>) -> Result<()> {
    let mut names = vec!["bare start, to ready", "two bare starts at once, to the end"];
    let mut programs = Vec::new();
    let demo = beside("demo").or_else(|| beside("../../scripts/demo"));
    // With the word that shows that the program is ready, or until its end.
    for (name, program, word) in [
        ("producer, to ready", beside("producer"), Some("shared")),
        ("consumer, to ready", beside("consumer"), Some("consumer")),
        ("demo, to its end", demo.filter(|_| beside("producer").is_some()), None),
    ] {
        if let Some(program) = program {
            names.push(name);
            programs.push((program, word));
        } else {
            run.leave_out(format!("{name}: a program is not beside this one"));
        }
    }
    let end = |process: &Process| wait_for_end(process, run.options.timeout, run.cancel);
    let rows = run.turns("starting the driver, and the commands", &names, MOST, |row| {
        let begun = Instant::now();
        if row < 2 {
            let peers = (0..=row).map(|_| run.peer("a program")).collect::<Result<Vec<Peer>>>()?;
            peers.iter().try_for_each(|peer| peer.receive::<u64>().map(drop))?;
            let ready = begun.elapsed();
            peers.iter().try_for_each(|peer| peer.send(&Request::Exit, &[]))?;
            peers.iter().try_for_each(|peer| end(&peer.process))?;
            return Ok(us(if row == 0 { ready } else { begun.elapsed() }));
        }
        let (program, word) = &programs[row - 2];
        let mut process = start(run, program)?;
        match word {
            Some(word) => wait_for_word(&mut process, word, run.options.timeout, run.cancel)?,
            None => end(&process)?,
        }
        Ok(us(begun.elapsed()))
    })?;
    run.add(About::size(0), rows, None).map(drop)
}

fn start(run: &Run<'_>, program: &Path) -> Result<Process> {
    let mut command = Command::new(program);
    if program.ends_with("demo") {
        let commands = beside("producer").and_then(|producer| producer.parent().map(Path::to_owned));
        command.arg(commands.unwrap_or_default()).arg("-q").env("TMPDIR", run.family.folder());
    } else {
        command.arg("--socket").arg(run.family.folder().join("ready.sock"));
    }
    command.args(["--backend", run.options.backend.as_str(), "--device", &run.task.device]);
    run.family.spawn("a program", command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()))
}
