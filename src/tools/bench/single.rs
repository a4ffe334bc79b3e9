//! What takes one process: the pattern, and each call of the driver by itself.

use std::{os::fd::AsFd, time::Instant};

use super::{
    orders::{Answer, Order},
    stats::us,
    task::Task,
};
use crate::{
    driver::Driver,
    error::{Error, ProtocolError, Result},
    memory::{Device, Region, Shared, Spec},
    tools::check::pattern::{Choice, Engine, Pattern},
    tools::line::Line,
};

/// Does what it is told until whoever tells it has gone.
pub(super) fn serve(task: &Task, line: &Line) -> Result<()> {
    let (driver, device) = task.open()?;
    device.activate()?;
    line.send(&Answer::started(&device)?)?;
    // While this is open no export is the process's first.
    let anchor = driver.verbs().bare()?.create(device.ordinal(), device.granularity()?)?;
    let mut held = None;
    let mut shared = None;
    loop {
        let answer = match line.receive()? {
            Order::Prepare { size, .. } => {
                drop(shared.take());
                Shared::create(&device, Spec::vmm(size)).map(|memory| {
                    shared = Some(memory);
                    Answer::Done
                })
            }
            Order::Pattern { engine } => match &shared {
                Some(shared) => pattern(shared, engine),
                None => Err(ProtocolError::Unexpected { got: "order", want: "memory for it" }.into()),
            },
            Order::Stages { size } => {
                if held.is_none() {
                    held = Some(driver.verbs().bare()?.export(&anchor)?);
                }
                stages(&driver, &device, size)
            }
            Order::Load => load(&driver, &device),
            Order::Clear => {
                drop(shared.take());
                Ok(Answer::Done)
            }
            Order::Measure { .. } => {
                Err(ProtocolError::Unexpected { got: "order", want: "one for one process" }.into())
            }
        };
        line.send(&Answer::of(answer))?;
    }
}

fn pattern(shared: &Shared, engine: Engine) -> Result<Answer> {
    let (choice, size) = (Choice::Only(engine), shared.size());
    let pattern = Pattern::new(rand::random());
    let begun = Instant::now();
    let filled = choice.fill(shared, 0..size, pattern, &mut |_| Ok(()))?;
    let fill_whole_us = us(begun.elapsed());
    let begun = Instant::now();
    let (found, verified) = choice.verify(shared, 0, 0..size, pattern, &mut |_| Ok(()))?;
    Ok(Answer::Pattern {
        fill_us: us(filled.took),
        verify_us: us(verified.took),
        fill_whole_us,
        verify_whole_us: us(begun.elapsed()),
        mismatches: found.mismatches,
    })
}

/// Each call on memory of its own.
fn stages(driver: &Driver, device: &Device, size: u64) -> Result<Answer> {
    let (bare, ordinal) = (driver.verbs().bare()?, device.ordinal());
    let mut last = Instant::now();
    let mut lap = || us(std::mem::replace(&mut last, Instant::now()).elapsed());
    let created = bare.create(ordinal, size)?;
    let create_us = lap();
    let fd = bare.export(&created)?;
    let export_us = lap();
    let (opened, opening) = bare.open(ordinal, fd.as_fd(), size)?;
    let closing = bare.close(opened)?;
    bare.release(created)?;
    Ok(Answer::Stages { create_us, export_us, opening, closing })
}

fn load(driver: &Driver, device: &Device) -> Result<Answer> {
    let kernels = driver.verbs().kernels()?;
    if kernels.are_loaded(device.ordinal()) {
        return Err(Error::from(ProtocolError::Unexpected { got: "order", want: "kernels that are not loaded" }));
    }
    let begun = Instant::now();
    kernels.load(device.ordinal())?;
    Ok(Answer::Took { us: us(begun.elapsed()) })
}
