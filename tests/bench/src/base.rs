//! The clock, the device, and small conversions.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};
use vmmfd::{
    driver::{Backend, Choice, Driver, open},
    error::{Error, ProtocolError, Result},
    memory::Device,
};

/// The fraction of the free memory that is used.
const USED: f64 = 0.95;

/// The time for a process to fall asleep on its socket, as between two real handoffs.
const ASLEEP: Duration = Duration::from_micros(30);

pub(crate) fn open_device(backend: Backend, device: &str) -> Result<(Driver, Device)> {
    let driver = open(Choice::Only(backend))?.driver;
    let device = Device::find(&driver, device.parse().unwrap_or_default())?;
    device.activate()?;
    Ok((driver, device))
}

/// The bytes of a device that may be used.
pub(crate) fn usable(device: &Device) -> Result<u64> {
    Ok((device.memory_info()?.free as f64 * USED) as u64)
}

/// The time in nanoseconds on the clock that all processes of a machine share.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

pub(crate) fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Spins until another process has had time to fall asleep on its socket.
pub(crate) fn until_asleep() {
    let begun = Instant::now();
    while begun.elapsed() < ASLEEP {
        std::hint::spin_loop();
    }
}

/// The error of a request whose preparation is missing.
pub(crate) fn not_prepared() -> Error {
    ProtocolError::Unexpected { got: "request", want: "its preparation" }.into()
}

/// Borrows descriptors.
pub(crate) fn borrowed(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}
