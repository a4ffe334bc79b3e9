//! The benches of one process: `verify`, with each engine, and `stages`, with each driver call.

use vmmfd::{driver::Backend, error::Result};

use super::{
    plan::Bench,
    protocol::{ProducerRequest, ProducerResponse},
    run::{BenchRun, Capacity, ask, ask_done, unexpected, warm_up},
    stats::{Samples, us},
    task::Role,
};
use vmmfd_cli::{check::pattern::Engine, units::about};

const GPU_SIZES: [u64; 4] = [2 << 20, 64 << 20, 1 << 30, 8 << 30];
const HOST_SIZES: [u64; 3] = [2 << 20, 64 << 20, 1 << 30];

/// The approximate number of bytes that the host copies for one series, at 5 GB/s.
const HOST_BYTES: u64 = 40 << 30;

/// The minimum number of samples for the host.
const HOST_COUNT: usize = 3;

pub(super) fn measure(run: &mut BenchRun<'_>) -> Result<()> {
    let cuda = run.plan.backend == Backend::Cuda;
    if cuda {
        load(run)?;
    }
    let (process, capacity) = run.start(Role::Single, &[])?;
    let engines: &[Engine] = if cuda { &[Engine::Gpu, Engine::Host] } else { &[Engine::Host] };
    for size in run.sizes(if cuda { &GPU_SIZES } else { &HOST_SIZES }, capacity) {
        if !fits(run, Bench::Verify, size, capacity) {
            continue;
        }
        ask_done(&process, &ProducerRequest::Prepare { size, segment: None, methods: Vec::new() })?;
        for &engine in engines {
            // Only on a GPU: the host backend is far faster.
            if cuda && engine == Engine::Host && size > HOST_BYTES / HOST_COUNT as u64 {
                run.leave_out(format!("host fill and verify at {}: above 13 GiB they take too long", about(size)));
                continue;
            }
            let most = match engine {
                Engine::Gpu => run.plan.count,
                Engine::Host => run.plan.count.min(((HOST_BYTES / size) as usize).max(HOST_COUNT)),
            };
            let mut samples: [Samples; 4] = Default::default();
            let warm_up = if engine == Engine::Gpu { warm_up(most) } else { 1 };
            for round in 0..warm_up + most {
                run.tick(&format!("{engine} fills and verifies {}", about(size)), round, warm_up + most)?;
                match ask(&process, &ProducerRequest::Pattern { engine })? {
                    ProducerResponse::Pattern { fill_us, verify_us, fill_whole_us, verify_whole_us, mismatches: 0 } => {
                        if round >= warm_up {
                            let all = [fill_us, verify_us, fill_whole_us, verify_whole_us];
                            samples.iter_mut().zip(all).for_each(|(samples, us)| samples.0.push(us));
                        }
                    }
                    ProducerResponse::Pattern { mismatches, .. } => {
                        return Err(process.failure(format!("found {mismatches} wrong words that it had just written")));
                    }
                    _ => return Err(unexpected()),
                }
            }
            add(run, engine, size, samples);
        }
    }
    ask_done(&process, &ProducerRequest::Clear)
}

fn add(run: &mut BenchRun<'_>, engine: Engine, size: u64, samples: [Samples; 4]) {
    let names = match engine {
        Engine::Gpu => ["gpu fill, kernel", "gpu verify, kernel", "gpu fill", "gpu verify"],
        Engine::Host => ["host fill", "host verify", "", ""],
    };
    let named = names.into_iter().map(str::to_owned).zip(samples).filter(|(name, _)| !name.is_empty());
    run.add(Bench::Verify, size, named.collect(), "");
}

/// Measures loading the kernels in new processes: compiled, and from the driver's cache.
fn load(run: &mut BenchRun<'_>) -> Result<()> {
    let count = run.plan.count.min(5);
    let mut measured = Vec::new();
    for (name, disabled) in [("load kernels, compiled", "1"), ("load kernels, cached", "0")] {
        let mut samples = Samples::default();
        // The first process may have to fill the cache.
        let warm_up = usize::from(disabled == "0");
        for round in 0..warm_up + count {
            run.tick(name, round, warm_up + count)?;
            let (process, _) = run.start(Role::Single, &[("CUDA_CACHE_DISABLE", disabled)])?;
            match ask(&process, &ProducerRequest::Load)? {
                ProducerResponse::Time { us } if round >= warm_up => samples.0.push(us),
                ProducerResponse::Time { .. } => {}
                _ => return Err(unexpected()),
            }
        }
        measured.push((name.to_owned(), samples));
    }
    run.add(Bench::Verify, 0, measured, "");
    Ok(())
}

/// Measures each driver call, on new memory each time, while another exported descriptor is open.
pub(super) fn measure_stages(run: &mut BenchRun<'_>) -> Result<()> {
    let (process, capacity) = run.start(Role::Single, &[])?;
    let cuda = run.plan.backend == Backend::Cuda;
    let (count, warm_up) = (run.plan.count, warm_up(run.plan.count));
    for size in run.sizes(if cuda { &GPU_SIZES } else { &HOST_SIZES }, capacity) {
        if !fits(run, Bench::Stages, size, capacity) {
            continue;
        }
        let mut samples: [Samples; 9] = Default::default();
        for round in 0..warm_up + count {
            run.tick(&format!("each call on {}", about(size)), round, warm_up + count)?;
            match ask(&process, &ProducerRequest::Stages { size })? {
                ProducerResponse::Stages { create_us, export_us, opening, closing, .. } if round >= warm_up => {
                    let all = [
                        create_us,
                        export_us,
                        us(opening.import),
                        us(opening.reserve),
                        us(opening.map),
                        us(opening.set_access),
                        us(closing.unmap),
                        us(closing.free),
                        us(closing.release),
                    ];
                    samples.iter_mut().zip(all).for_each(|(samples, us)| samples.0.push(us));
                }
                ProducerResponse::Stages { .. } => {}
                _ => return Err(unexpected()),
            }
        }
        let names =
            ["create", "export, anchor", "import", "reserve", "map", "set access", "unmap", "address free", "release"];
        let measured = names.into_iter().map(str::to_owned).zip(samples);
        // Some calls do not exist on the host backend.
        let made = measured.filter(|(name, _)| cuda || !CUDA_ONLY.contains(&name.as_str()));
        run.add(Bench::Stages, size, made.collect(), "");
    }
    Ok(())
}

/// The stages that only the CUDA backend has.
const CUDA_ONLY: [&str; 5] = ["import", "reserve", "set access", "address free", "release"];

fn fits(run: &mut BenchRun<'_>, bench: Bench, size: u64, capacity: Capacity) -> bool {
    let fits = size <= capacity.usable;
    if !fits {
        run.leave_out(format!("{} at {}: there are {} for it", bench.as_str(), about(size), about(capacity.usable)));
    }
    fits
}
