//! The process that measures the pattern and each driver call.

use std::{os::fd::AsFd, time::Instant};

use vmmfd::{
    driver::Driver,
    error::{Error, ProtocolError, Result},
    memory::{Device, Region, Shared, Spec},
};

use super::{
    protocol::{ProducerRequest, ProducerResponse},
    stats::us,
    task::Task,
};
use vmmfd_cli::verbs::HasVerbs;
use vmmfd_cli::{
    check::pattern::{Engine, EngineChoice, Pattern, random_salt},
    line::Line,
};

/// Answers the requests of the measuring process until it disconnects.
pub(super) fn serve(task: &Task, line: &Line) -> Result<()> {
    let (driver, device) = task.open()?;
    device.activate()?;
    line.send(&ProducerResponse::started(&device)?)?;
    // `Stages` exports it first and keeps the descriptor open, so that no measured export is the first of the process.
    let anchor = driver.verbs().bare()?.create(device.ordinal(), device.granularity()?)?;
    let mut held = None;
    let mut shared = None;
    loop {
        let response = match line.receive()? {
            ProducerRequest::Prepare { size, .. } => {
                drop(shared.take());
                Shared::create(&device, Spec::vmm(size)).map(|memory| {
                    shared = Some(memory);
                    ProducerResponse::Done
                })
            }
            ProducerRequest::Pattern { engine } => match &shared {
                Some(shared) => pattern(shared, engine),
                None => Err(ProtocolError::Unexpected { got: "request", want: "one that prepares memory" }.into()),
            },
            ProducerRequest::Stages { size } => {
                if held.is_none() {
                    held = Some(driver.verbs().bare()?.export(&anchor)?);
                }
                stages(&driver, &device, size)
            }
            ProducerRequest::Load => load(&driver, &device),
            ProducerRequest::Clear => {
                drop(shared.take());
                Ok(ProducerResponse::Done)
            }
            ProducerRequest::Measure { .. } | ProducerRequest::IsEmulated | ProducerRequest::Connect { .. } => {
                Err(ProtocolError::Unexpected { got: "request", want: "one for a single process" }.into())
            }
        };
        line.send(&ProducerResponse::of(response))?;
    }
}

fn pattern(shared: &Shared, engine: Engine) -> Result<ProducerResponse> {
    let (choice, size) = (EngineChoice::Only(engine), shared.size());
    let pattern = Pattern::new(random_salt()?);
    let begun = Instant::now();
    let filled = choice.fill(shared, 0..size, pattern, &mut |_| Ok(()))?;
    let fill_whole_us = us(begun.elapsed());
    let begun = Instant::now();
    let (found, verified) = choice.verify(shared, 0, 0..size, pattern, &mut |_| Ok(()))?;
    Ok(ProducerResponse::Pattern {
        fill_us: us(filled.elapsed),
        verify_us: us(verified.elapsed),
        fill_whole_us,
        verify_whole_us: us(begun.elapsed()),
        mismatches: found.mismatches,
    })
}

/// Measures each call, on new memory.
fn stages(driver: &Driver, device: &Device, size: u64) -> Result<ProducerResponse> {
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
    Ok(ProducerResponse::Stages { create_us, export_us, opening, closing })
}

fn load(driver: &Driver, device: &Device) -> Result<ProducerResponse> {
    let kernels = driver.verbs().kernels()?;
    if kernels.are_loaded(device.ordinal()) {
        return Err(Error::from(ProtocolError::Unexpected { got: "request", want: "kernels that are not loaded" }));
    }
    let begun = Instant::now();
    kernels.load(device.ordinal())?;
    Ok(ProducerResponse::Time { us: us(begun.elapsed()) })
}
