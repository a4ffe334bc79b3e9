//! The groups of this process alone: `verify`, `stages` and `copies`.
#![allow(unsafe_code, reason = "copies of shared memory, beside memcpy")]

use std::{hint::black_box, ptr};

use vmmfd::{driver::Access, internals::copy};
use vmmfd_cli::check::pattern::{Engine, EngineChoice, Pattern, random_salt};

use crate::{prelude::*, process::exportable, run::Named};

/// The bytes that the CPUs check for one row of a GPU, at 5 GB/s, and the fewest samples.
const HOST_BYTES: u64 = 40 << 30;
const HOST_COUNT: u64 = 3;

pub(crate) fn verify(run: &mut Run<'_>) -> Result<()> {
    if run.is_cuda() {
        load_kernels(run)?;
    }
    let device = run.device()?;
    for size in run.sizes(&device, 1)? {
        let memory = Shared::create(&device, Spec::vmm(size))?;
        let mut rows = Vec::new();
        if run.is_cuda() {
            rows = check(run, &memory, Engine::Gpu, usize::MAX)?;
        }
        // Only beside a GPU: the host backend is far faster.
        if run.is_cuda() && size > HOST_BYTES / HOST_COUNT {
            run.leave_out(format!("host fill and verify at {}: they take too long", about(size)));
        } else {
            rows.extend(check(run, &memory, Engine::Host, (HOST_BYTES / size).max(HOST_COUNT) as usize)?);
        }
        run.add(About { unit: "GB/s", ..About::size(size) }, rows, None)?;
    }
    Ok(())
}

/// Fills and verifies. Returns the rates of the kernels, and those from a call to its return.
fn check(run: &Run<'_>, memory: &Shared, engine: Engine, most: usize) -> Result<Vec<Named>> {
    let names = match engine {
        Engine::Gpu => &["gpu fill, kernel", "gpu verify, kernel", "gpu fill", "gpu verify"][..],
        Engine::Host => &["host fill", "host verify"],
    };
    let choice = EngineChoice::Only(engine);
    let size = memory.size();
    run.rounds(&format!("{engine} fills and verifies {}", about(size)), names, most, |_| {
        let pattern = Pattern::new(random_salt()?);
        let begun = Instant::now();
        let filled = choice.fill(memory, 0..size, pattern, &mut |_| Ok(()))?;
        let fill = begun.elapsed();
        let begun = Instant::now();
        let (found, verified) = choice.verify(memory, 0, 0..size, pattern, &mut |_| Ok(()))?;
        if found.mismatches > 0 {
            let problem = format!("{} words differ from the pattern just written", found.mismatches);
            return Err(Error::Misuse { problem });
        }
        let times = [filled.elapsed, verified.elapsed, fill, begun.elapsed()];
        Ok(times.map(|time| size as f64 / time.as_secs_f64() / 1e9).into())
    })
}

/// Loads the kernels in new processes: compiled, and from the driver's cache, which the first of them fills.
fn load_kernels(run: &mut Run<'_>) -> Result<()> {
    let rows = run.turns("loading the kernels", &["load kernels, compiled", "load kernels, cached"], 5, |row| {
        let disabled = [("CUDA_CACHE_DISABLE", ["1", "0"][row])];
        let peer = run.family.peer("a process", &run.task, run.cancel, &disabled)?;
        peer.receive::<u64>()?;
        peer.took(&Request::LoadKernels)
    })?;
    run.add(About::size(0), rows, None).map(drop)
}

/// Each driver call, on new memory, while another exported descriptor is open.
pub(crate) fn stages(run: &mut Run<'_>) -> Result<()> {
    const NAMES: [&str; 9] =
        ["create", "export, anchor", "import", "reserve", "map", "set access", "unmap", "address free", "release"];
    let device = run.device()?;
    let verbs = device.verbs();
    let properties = exportable(&device);
    let anchor = verbs.create(device.granularity()?, &properties)?;
    let _held = verbs.export(anchor)?;
    for size in run.sizes(&device, 1)? {
        let rows = run.rounds(&format!("each call on {}", about(size)), &NAMES, usize::MAX, |_| {
            let mut times = Vec::with_capacity(NAMES.len());
            let created = timed(&mut times, || verbs.create(size, &properties))?;
            let fd = timed(&mut times, || verbs.export(created))?;
            let imported = timed(&mut times, || verbs.import(fd.as_fd(), size))?;
            let address = timed(&mut times, || verbs.reserve(size, 0))?;
            timed(&mut times, || verbs.map(address, size, 0, imported))?;
            let access = Some(Access::ReadWrite);
            timed(&mut times, || verbs.set_access(address, size, properties.location, access))?;
            timed(&mut times, || verbs.unmap(address, size))?;
            timed(&mut times, || verbs.free(address, size))?;
            timed(&mut times, || verbs.release(imported))?;
            verbs.release(created)?;
            Ok(times)
        })?;
        run.add(About::size(size), rows, None)?;
    }
    verbs.release(anchor)
}

/// Makes a call, and adds its duration.
fn timed<T>(times: &mut Vec<f64>, call: impl FnOnce() -> Result<T>) -> Result<T> {
    let begun = Instant::now();
    let made = call()?;
    times.push(us(begun.elapsed()));
    Ok(made)
}

/// Copies between shared memory of the host and private memory: memcpy, and the library's copy.
pub(crate) fn copies(run: &mut Run<'_>) -> Result<()> {
    let device = open_device(Backend::Host, "0")?;
    for (size, unit) in [(64, "ns"), (4 << 10, "ns"), (1 << 20, "us"), (64 << 20, "us")] {
        let memory = Shared::create(&device, Spec::vmm(size))?;
        let shared: *mut u8 = ptr::with_exposed_provenance_mut(memory.address() as usize);
        let mut private = vec![1_u8; size as usize];
        // Enough copies for the clock.
        let times = ((1 << 20) / size).clamp(1, 4096);
        let names = ["in, memcpy", "in", "out, memcpy", "out"];
        let rows = run.turns(&format!("copying {}", about(size)), &names, 100, |row| {
            let shared = black_box(shared);
            let private = black_box(&mut private[..]);
            let begun = Instant::now();
            for _ in 0..times {
                // SAFETY: both sides have `size` bytes and do not overlap, and only this thread accesses them.
                unsafe {
                    match row {
                        0 => ptr::copy_nonoverlapping(private.as_ptr(), shared, private.len()),
                        1 => copy::write(private, shared),
                        2 => ptr::copy_nonoverlapping(shared, private.as_mut_ptr(), private.len()),
                        _ => copy::read(shared, private),
                    }
                }
                black_box(&private);
            }
            Ok(us(begun.elapsed()) / times as f64 * if unit == "ns" { 1e3 } else { 1.0 })
        })?;
        run.add(About { unit, ..About::size(size) }, rows, None)?;
    }
    Ok(())
}
