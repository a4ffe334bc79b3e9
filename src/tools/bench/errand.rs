//! What a process of a bench does from its first moment to its last.

use std::{
    io::{self, Write},
    os::fd::AsFd,
};

use nix::{
    sys::{
        prctl::set_pdeathsig,
        signal::{Signal, killpg},
    },
    unistd::{getpgrp, getppid},
};
use serde::Serialize;

use super::{
    consumer,
    orders::{Answer, Failure, Reply},
    process::{Errand, Task},
    producer, single,
};
use crate::{
    channel::{Cancel, record::RecordSocket},
    driver::cuda::exit_at_once,
    error::{Error, Result},
    tools::line::Line,
};

/// Tells whoever asked what it failed with, unless that one has gone.
fn own_up<T: Serialize>(line: &Line, result: Result<()>, say: impl FnOnce(Failure) -> T) -> Result<()> {
    match result {
        Err(error) if !matches!(error, Error::PeerGone { .. }) => line.send(&say(error.into())),
        result => result,
    }
}

/// Does what the parent asks for, as a process of its own, and never returns.
pub fn run_errand(text: &str) -> ! {
    let Ok(errand) = serde_json::from_str::<Errand>(text) else { exit_at_once(2) };
    // Nothing outlives who asked for it. Who leads others notices by the line, and takes them along.
    let bound = matches!(errand.task, Task::Lead) || set_pdeathsig(Signal::SIGKILL).is_ok();
    if !bound || getppid().as_raw() != errand.parent {
        exit_at_once(1);
    }
    match run(&errand) {
        Ok(()) | Err(Error::PeerGone { .. }) if matches!(errand.task, Task::Start) => std::process::exit(0),
        // Whoever asked has gone, and wants no answer.
        Ok(()) | Err(Error::PeerGone { .. }) => exit_at_once(0),
        Err(error) => {
            // Nobody may be reading any more.
            let _ = writeln!(io::stderr(), "{}", error.in_full());
            exit_at_once(1)
        }
    }
}

fn run(errand: &Errand) -> Result<()> {
    // Without a timeout for the next order: another pair of processes may be measured meanwhile, and this process ends with its
    // parent.
    let line = || -> Result<Line> {
        let stdin = io::stdin().as_fd().try_clone_to_owned();
        let stdin = stdin.map_err(|error| Error::system("take standard input", error))?;
        Ok(Line::new(RecordSocket::blocking(stdin, &Cancel::new()?), "for another process of the bench"))
    };
    match &errand.task {
        Task::Produce { folder, consumers } => {
            let line = line()?;
            own_up(&line, producer::serve(errand, folder, *consumers, &line), Answer::Failed)
        }
        Task::Consume => {
            let line = line()?;
            own_up(&line, consumer::serve(errand, &line), Reply::Failed)
        }
        Task::Single => {
            let line = line()?;
            own_up(&line, single::serve(errand, &line), Answer::Failed)
        }
        Task::Lead => {
            // Nothing ever comes but the end.
            let _ = line()?.receive_bare(&mut [0; 2]);
            killpg(getpgrp(), Signal::SIGKILL).map_err(|errno| Error::system("end the commands", errno))
        }
        Task::Start => {
            let (driver, device) = errand.open()?;
            device.activate()?;
            // As a program ends that has nothing to add: what it holds is the kernel's to take back.
            std::mem::forget(driver);
            let said = writeln!(io::stdout(), "ready").and_then(|()| io::stdout().flush());
            said.map_err(|error| Error::system("write to standard output", error))
        }
    }
}
