//! A driver under test, of any backend.

use std::{
    fmt,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use vmmfd::{error::Result, internals::Live};

use super::{Copy, Fake, Fault, Faulty};
use crate::support::prelude::*;

/// The backend of a subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The host backend.
    Host,
    /// The CUDA backend on the emulated driver library.
    Fake,
    /// The CUDA backend on the driver of this machine's GPU.
    Cuda,
}

/// Tests on the GPU hold it for reading, and a test that needs the GPU exclusively holds it for writing. The whole process shares one
/// driver, and all its exports are the same file.
static GPU: RwLock<()> = RwLock::new(());

enum Turn {
    Together { _guard: RwLockReadGuard<'static, ()> },
    Alone { _guard: RwLockWriteGuard<'static, ()> },
    Free,
}

/// A driver under test. When it is dropped, all resources must have been released.
pub(crate) struct Subject {
    pub(crate) kind: Kind,
    /// The driver with its public interface.
    pub(crate) driver: Driver,
    /// The driver's verbs.
    pub(crate) verbs: Arc<dyn Verbs>,
    /// The same driver, for fault injection.
    pub(crate) faulty: Arc<Faulty>,
    /// The emulated library of a [`Kind::Fake`] subject.
    pub(crate) fake: Option<Fake>,
    host: Option<Arc<HostDriver>>,
    turn: Turn,
}

impl Subject {
    pub(crate) fn host() -> Self {
        let host = Arc::new(HostDriver::new().unwrap());
        Self::new(Kind::Host, Arc::clone(&host) as Arc<dyn Verbs>, Some(host), None, Turn::Free)
    }

    pub(crate) fn fake() -> Self {
        let copy = Copy::new();
        Self::of(copy.load())
    }

    /// The CUDA backend on a prepared copy of the emulated library.
    pub(crate) fn of(fake: Fake) -> Self {
        let driver = Arc::new(CudaDriver::load_from(fake.path()).unwrap());
        Self::new(Kind::Fake, driver, None, Some(fake), Turn::Free)
    }

    pub(crate) fn cuda() -> Self {
        let turn = Turn::Together { _guard: GPU.read().unwrap_or_else(PoisonError::into_inner) };
        let driver = CudaDriver::load().expect("a test on the GPU needs the driver and a GPU");
        Self::new(Kind::Cuda, Arc::new(driver), None, None, turn)
    }

    fn new(kind: Kind, driver: Arc<dyn Verbs>, host: Option<Arc<HostDriver>>, fake: Option<Fake>, turn: Turn) -> Self {
        let faulty = Arc::new(Faulty::new(driver));
        let verbs = Arc::clone(&faulty) as Arc<dyn Verbs>;
        Self { kind, driver: internals::driver(Arc::clone(&verbs)), verbs, faulty, fake, host, turn }
    }

    /// Waits until no other test uses this driver. For tests that count the driver's files, or use addresses after freeing them.
    pub(crate) fn alone(&mut self) {
        if self.kind == Kind::Cuda {
            // Release the read guard first: two callers would deadlock.
            self.turn = Turn::Free;
            self.turn = Turn::Alone { _guard: GPU.write().unwrap_or_else(PoisonError::into_inner) };
        }
    }

    pub(crate) fn device(&self) -> Device {
        Device::find(&self.driver, Selector::Ordinal(0)).unwrap()
    }

    /// Returns the granularity, the unit of sizes in the tests.
    pub(crate) fn unit(&self) -> u64 {
        self.verbs.granularity(&EXPORTABLE, Granularity::Minimum).unwrap()
    }

    /// Counts live resources, and compares the count with the driver's own where it has one.
    #[track_caller]
    pub(crate) fn live(&self) -> Live {
        let live = self.faulty.live();
        if let Some(host) = &self.host {
            assert_eq!(host.live(), live, "the host backend counts otherwise");
        }
        if let Some(fake) = &self.fake {
            let counts = [live.handles, live.reservations, live.mappings].map(|count| count as u64);
            assert_eq!(fake.live()[..3], counts, "the emulated driver counts otherwise");
        }
        live
    }

    /// Fails if any resource is live.
    #[track_caller]
    pub(crate) fn assert_empty(&self) {
        assert_eq!(self.live(), Live::default(), "something was not given back");
        if let Some(fake) = &self.fake {
            // A device's kernels stay loaded: a few bytes, two events and a module.
            let kernels = (0..2).filter(|&ordinal| self.verbs.kernels().unwrap().are_loaded(ordinal)).count() as u64;
            let expected = [kernels, 0, 0, 2 * kernels, kernels];
            assert_eq!(fake.live()[4..], expected, "the emulated driver counts otherwise");
        }
    }

    /// Repeats `work`, each time with another failing driver call. Each failure must be reported and must leak nothing. Returns the verbs
    /// that failed.
    pub(crate) fn fail_each_call(&self, work: impl Fn() -> Result<()>) -> Vec<&'static str> {
        self.faulty.take_verbs();
        work().unwrap();
        let mut failed = Vec::new();
        for verb in self.faulty.take_kinds() {
            for nth in 1.. {
                self.faulty.fail(Fault::NthOf(verb, nth), 4242);
                let result = work();
                if self.faulty.mend().is_none() {
                    result.unwrap();
                    break;
                }
                assert!(result.is_err(), "{verb}, call {nth}, is of no consequence");
                self.assert_empty();
                if self.kind != Kind::Cuda {
                    let open: usize = self.faulty.exported().iter().map(|file| file.open_here()).sum();
                    assert_eq!(open, 0, "{verb}, call {nth}, leaves descriptors open");
                }
                failed.push(verb);
            }
        }
        failed
    }
}

pub(crate) const EXPORTABLE: Properties =
    Properties { location: Location::Device(0), exportable: true, immutable: false, gpu_direct_rdma: false };

impl Drop for Subject {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.assert_empty();
        }
    }
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}
