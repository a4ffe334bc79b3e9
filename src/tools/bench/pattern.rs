//! What takes one process: filling and verifying, by each engine, and each call of the driver.

use super::{
    Bench, Room, Run, ask,
    orders::{Answer, Order},
    stats::{Samples, us},
    task::Role,
    tell,
    text::human,
    unfit, warm_up,
};
use crate::{driver::Backend, error::Result, tools::check::pattern::Engine};

const GPU_SIZES: [u64; 4] = [2 << 20, 64 << 20, 1 << 30, 8 << 30];
const HOST_SIZES: [u64; 3] = [2 << 20, 64 << 20, 1 << 30];

/// About how many bytes the host may move for one series: it takes a second for five thousand million.
const HOST_BYTES: u64 = 40 << 30;

/// The fewest samples of the host.
const HOST_COUNT: usize = 3;

pub(super) fn measure(run: &mut Run<'_>) -> Result<()> {
    let cuda = run.plan.backend == Backend::Cuda;
    if cuda {
        load(run)?;
    }
    let (process, room) = run.start(Role::Single, &[])?;
    let engines: &[Engine] = if cuda { &[Engine::Gpu, Engine::Host] } else { &[Engine::Host] };
    for size in run.sizes(if cuda { &GPU_SIZES } else { &HOST_SIZES }, room) {
        if !fits(run, Bench::Verify, size, room) {
            continue;
        }
        tell(&process, &Order::Prepare { size, ways: Vec::new() })?;
        for &engine in engines {
            // On the host backend it is far faster.
            if cuda && engine == Engine::Host && size > HOST_BYTES / HOST_COUNT as u64 {
                run.leave_out(format!("host fill and verify at {}: above 13 GiB they take too long", human(size)));
                continue;
            }
            let most = match engine {
                Engine::Gpu => run.plan.count,
                Engine::Host => run.plan.count.min(((HOST_BYTES / size) as usize).max(HOST_COUNT)),
            };
            let mut samples: [Samples; 4] = Default::default();
            let warm_up = if engine == Engine::Gpu { warm_up(most) } else { 1 };
            for round in 0..warm_up + most {
                run.tick(&format!("{engine} fills and verifies {}", human(size)), round, warm_up + most)?;
                match ask(&process, &Order::Pattern { engine })? {
                    Answer::Pattern { fill_us, verify_us, fill_whole_us, verify_whole_us, mismatches: 0 } => {
                        if round >= warm_up {
                            let all = [fill_us, verify_us, fill_whole_us, verify_whole_us];
                            samples.iter_mut().zip(all).for_each(|(samples, us)| samples.0.push(us));
                        }
                    }
                    Answer::Pattern { mismatches, .. } => {
                        return Err(process.failure(format!("found {mismatches} words wrong that it had just written")));
                    }
                    _ => return unfit(),
                }
            }
            add(run, engine, size, samples);
        }
    }
    tell(&process, &Order::Clear)
}

fn add(run: &mut Run<'_>, engine: Engine, size: u64, samples: [Samples; 4]) {
    let before = run.report.series.len();
    let names = match engine {
        Engine::Gpu => ["gpu fill, kernel", "gpu verify, kernel", "gpu fill", "gpu verify"],
        Engine::Host => ["host fill", "host verify", "", ""],
    };
    let named = names.into_iter().map(str::to_owned).zip(samples).filter(|(name, _)| !name.is_empty());
    run.add(Bench::Verify, size, named.collect(), "");
    for series in &mut run.report.series[before..] {
        series.rate = Some(size as f64 / (series.summary.p50_us / 1e6));
    }
}

/// Loading the kernels, in fresh processes: compiled, and found in the driver's cache.
fn load(run: &mut Run<'_>) -> Result<()> {
    let count = run.plan.count.min(5);
    let mut measured = Vec::new();
    for (name, disabled) in [("load kernels, compiled", "1"), ("load kernels, cached", "0")] {
        let mut samples = Samples::default();
        // The first one may have to put them into the cache.
        let warm_up = usize::from(disabled == "0");
        for round in 0..warm_up + count {
            run.tick(name, round, warm_up + count)?;
            let (process, _) = run.start(Role::Single, &[("CUDA_CACHE_DISABLE", disabled)])?;
            match ask(&process, &Order::Load)? {
                Answer::Took { us } if round >= warm_up => samples.0.push(us),
                Answer::Took { .. } => {}
                _ => return unfit(),
            }
        }
        measured.push((name.to_owned(), samples));
    }
    run.add(Bench::Verify, 0, measured, "");
    Ok(())
}

/// Each call, on memory of its own each time, while another exported descriptor is open.
pub(super) fn measure_stages(run: &mut Run<'_>) -> Result<()> {
    let (process, room) = run.start(Role::Single, &[])?;
    let cuda = run.plan.backend == Backend::Cuda;
    let (count, warm_up) = (run.plan.count, warm_up(run.plan.count));
    for size in run.sizes(if cuda { &GPU_SIZES } else { &HOST_SIZES }, room) {
        if !fits(run, Bench::Stages, size, room) {
            continue;
        }
        let mut samples: [Samples; 9] = Default::default();
        for round in 0..warm_up + count {
            run.tick(&format!("each call on {}", human(size)), round, warm_up + count)?;
            match ask(&process, &Order::Stages { size })? {
                Answer::Stages { create_us, export_us, opening, closing, .. } if round >= warm_up => {
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
                Answer::Stages { .. } => {}
                _ => return unfit(),
            }
        }
        let names =
            ["create", "export, anchor", "import", "reserve", "map", "set access", "unmap", "address free", "release"];
        let measured = names.into_iter().map(str::to_owned).zip(samples);
        // The host backend has no such calls.
        let made = measured.filter(|(name, _)| cuda || !CUDA_ALONE.contains(&name.as_str()));
        run.add(Bench::Stages, size, made.collect(), "");
    }
    Ok(())
}

/// The stages that host memory does not have.
const CUDA_ALONE: [&str; 5] = ["import", "reserve", "set access", "address free", "release"];

fn fits(run: &mut Run<'_>, bench: Bench, size: u64, room: Room) -> bool {
    let fits = size <= room.free;
    if !fits {
        run.leave_out(format!("{} at {}: there are {} for it", bench.as_str(), human(size), human(room.free)));
    }
    fits
}
