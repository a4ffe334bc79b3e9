//! The engines that write and check the pattern: GPU kernels and the host's CPUs.

use std::{
    fmt,
    ops::Range,
    time::{Duration, Instant},
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vmmfd::{
    driver::Access,
    error::{DeviceError, Error, MemoryError, Result},
    internals::{Counted, Kernels, PatternSpan},
    memory::Region,
};

use super::{Mismatch, Pattern, Verification, host, slices, touched, word};
use crate::check::check_range;
use crate::verbs::HasVerbs;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// GPU kernels: the data does not leave the GPU.
    Gpu,
    /// The host's CPUs, on copies of the data.
    Host,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Gpu => "gpu",
            Self::Host => "host",
        })
    }
}

/// The choice of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// The engine estimated to be faster, or the host if no kernels can be loaded.
    #[default]
    Auto,
    /// This engine, or an error.
    Only(Engine),
}

/// The engine that ran, and its time.
#[derive(Debug)]
pub struct Work {
    pub engine: Engine,
    /// On the GPU, the time of the kernels alone, measured by events.
    pub elapsed: Duration,
    /// Why the host ran although the GPU would have been faster, for a warning.
    pub fallback: Option<Error>,
}

/// The time to load the kernels if the driver has to compile them: 79 ms on an H200 host.
const LOAD: Duration = Duration::from_millis(79);

/// The time to launch a kernel and wait for it.
const LAUNCH: Duration = Duration::from_micros(40);

/// Bytes per second of the host with pageable copies: 5 GB/s on an H200 host.
const HOST_RATE: f64 = 5e9;

/// Bytes per second of kernels; every GPU is faster.
const GPU_RATE: f64 = 1e11;

/// The most bytes per kernel launch, which can't be interrupted while the peer waits. On memory behind PCIe a launch takes half a second.
const SPAN: usize = 8 << 30;

impl EngineChoice {
    /// As [`super::fill`], with the chosen engine.
    ///
    /// # Errors
    /// As [`super::fill`]; [`MemoryError::ReadOnly`]; [`DeviceError::Unsupported`] if the GPU is chosen and has no kernels.
    ///
    /// Driver calls: `cuLaunchKernel`, `cuStreamSynchronize`, or as [`super::fill`].
    pub fn fill(
        self,
        region: &dyn Region,
        range: Range<u64>,
        pattern: Pattern,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Work> {
        let behind = range.end..region.size();
        let work = self.write(region, 0, range, pattern, progress)?;
        host::clear(region, behind)?;
        Ok(work)
    }

    /// As [`super::write`], with the chosen engine.
    pub fn write(
        self,
        region: &dyn Region,
        start: u64,
        range: Range<u64>,
        pattern: Pattern,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Work> {
        let chosen = self.choose(region, start, &range)?;
        let Chosen::Gpu(kernels) = chosen else {
            return chosen.on_host(|| host::write(region, start, range, pattern, progress)).map(|((), work)| work);
        };
        let elapsed = write_with(kernels, region, start, range, pattern, progress)?;
        Ok(Work { engine: Engine::Gpu, elapsed, fallback: None })
    }

    /// As [`super::verify`], with the chosen engine. The result is the same.
    ///
    /// # Errors
    /// As [`super::verify`]; [`DeviceError::Unsupported`] if the GPU is chosen and has no kernels.
    ///
    /// Driver calls: `cuLaunchKernel`, `cuMemcpyDtoH`, or as [`super::verify`].
    pub fn verify(
        self,
        region: &dyn Region,
        start: u64,
        range: Range<u64>,
        pattern: Pattern,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<(Verification, Work)> {
        let chosen = self.choose(region, start, &range)?;
        let Chosen::Gpu(kernels) = chosen else {
            return chosen.on_host(|| host::verify(region, start, range, pattern, progress));
        };
        let mut all = Verification::default();
        let mut elapsed = Duration::ZERO;
        for part in slices(range.clone(), SPAN) {
            let span = span(region, start, &part, pattern);
            let counted = kernels.verify(region.device().ordinal(), &span)?;
            elapsed += counted.took;
            all.join(verification(region, start, &part, pattern, counted)?);
            progress(part.end - range.start)?;
        }
        Ok((all, Work { engine: Engine::Gpu, elapsed, fallback: None }))
    }

    fn choose<'a>(self, region: &'a dyn Region, start: u64, range: &Range<u64>) -> Result<Chosen<'a>> {
        check_range(region, start, range)?;
        let device = region.device();
        let here = Chosen::Host { fallback: None };
        let kernels = match (self, device.verbs().kernels()) {
            (Self::Only(Engine::Host), _) | (Self::Auto, Err(Error::Device(DeviceError::Unsupported { .. }))) => {
                return Ok(here);
            }
            (_, kernels) => kernels?,
        };
        let fits = (region.address() + (range.start - start)) % 4 == range.start % 4;
        if self == Self::Only(Engine::Gpu) {
            let problem = "the GPU checks the pattern only where the memory's words begin at multiples of 4 bytes";
            let unfit = || Error::Misuse { problem: problem.to_owned() };
            return if fits { Ok(Chosen::Gpu(kernels)) } else { Err(unfit()) };
        }
        if !fits || !gpu_is_faster(kernels.are_loaded(device.ordinal()), range.end - range.start) {
            return Ok(here);
        }
        match kernels.load(device.ordinal()) {
            Ok(()) => Ok(Chosen::Gpu(kernels)),
            Err(error @ Error::Forked { .. }) => Err(error),
            // The driver's compiler is missing or fails.
            Err(error) => Ok(Chosen::Host { fallback: Some(error) }),
        }
    }
}

/// Whether the GPU is faster than the host.
fn gpu_is_faster(loaded: bool, size: u64) -> bool {
    let at = |rate: f64| Duration::from_secs_f64(size as f64 / rate);
    let load = if loaded { Duration::ZERO } else { LOAD };
    load + LAUNCH + at(GPU_RATE) < at(HOST_RATE)
}

/// The chosen engine.
enum Chosen<'a> {
    Gpu(&'a dyn Kernels),
    Host { fallback: Option<Error> },
}

impl Chosen<'_> {
    fn on_host<T>(self, work: impl FnOnce() -> Result<T>) -> Result<(T, Work)> {
        let fallback = match self {
            Self::Host { fallback } => fallback,
            Self::Gpu(_) => None,
        };
        let started = Instant::now();
        let result = work()?;
        Ok((result, Work { engine: Engine::Host, elapsed: started.elapsed(), fallback }))
    }
}

/// A part of an object in memory that starts at the object's offset `start`.
fn span(region: &dyn Region, start: u64, part: &Range<u64>, pattern: Pattern) -> PatternSpan {
    let address = region.address() + (part.start - start);
    PatternSpan { address, start: part.start, size: part.end - part.start, salt: pattern.salt() }
}

fn write_with(
    kernels: &dyn Kernels,
    region: &dyn Region,
    start: u64,
    range: Range<u64>,
    pattern: Pattern,
    progress: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<Duration> {
    if region.access() == Access::ReadOnly {
        return Err(Error::Memory(MemoryError::ReadOnly));
    }
    let mut elapsed = Duration::ZERO;
    for part in slices(range.clone(), SPAN) {
        elapsed += kernels.fill(region.device().ordinal(), &span(region, start, &part, pattern))?;
        progress(part.end - range.start)?;
    }
    Ok(elapsed)
}

/// Converts a kernel's result. The first mismatch is read back.
fn verification(
    region: &dyn Region,
    start: u64,
    part: &Range<u64>,
    pattern: Pattern,
    counted: Counted,
) -> Result<Verification> {
    let words = touched(part);
    let first = match counted.first {
        Some(index) if words.contains(&index) => {
            let inside = (index * 4).max(part.start)..(index * 4).saturating_add(4).min(part.end);
            let mut found = [0; 4];
            let mut expected = [0; 4];
            let length = (inside.end - inside.start) as usize;
            region.copy_out(inside.start - start, &mut found[..length])?;
            pattern.write(inside.start, &mut expected[..length]);
            let skip = (inside.start % 4) as usize;
            let found = word(skip, &found[..length]);
            let expected = word(skip, &expected[..length]);
            // Another process may have corrected the word since the kernel read it.
            (found != expected).then_some(Mismatch { index, expected, found })
        }
        _ => None,
    };
    Ok(Verification { words: words.end - words.start, mismatches: counted.mismatches, first })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_selects_the_faster_engine() {
        for (loaded, size, gpu) in [
            (false, 1 << 20, false),
            (false, 64 << 20, false),
            (false, 1 << 30, true),
            (true, 4096, false),
            (true, 1 << 20, true),
        ] {
            assert_eq!(gpu_is_faster(loaded, size), gpu, "{size} bytes, loaded: {loaded}");
        }
    }
}
