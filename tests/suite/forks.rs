//! Forks of a process whose threads are inside the library: each call in the child reports the fork or works, and none waits for a thread
//! that the child does not have.

#![allow(unsafe_code, reason = "unshare, and values that a fork drops")]

use std::{mem::ManuallyDrop, ptr};

use nix::{
    sched::{CloneFlags, unshare},
    unistd::{alarm, geteuid, getuid},
};
use rustix::time::{ClockId, clock_gettime};
use vmmfd::{
    channel::connect,
    session::order::{Completion, Timeline},
};

use crate::support::prelude::*;

const MIB: u64 = 1 << 20;

/// As [`in_fork`], with an alarm for calls that might hang.
fn in_short_fork(body: impl FnOnce() -> bool) {
    in_fork(|| {
        alarm::set(30);
        body()
    });
}

/// A CUDA driver directly on an emulated library, without test layers that take locks.
fn fake_driver() -> (Fake, Driver) {
    let fake = Copy::new().load();
    let driver = internals::driver(Arc::new(CudaDriver::load_from(fake.path()).unwrap()));
    (fake, driver)
}

/// Makes a driver call hang, starts `work` in a thread, runs `check` in a fork, and then ends the call.
fn in_fork_during(fake: &Fake, call: &str, work: impl FnOnce() + Send, check: impl FnOnce() -> bool) {
    let before = fake.calls(call);
    fake.set("FAKECUDA_SLOW", &format!("{call}:{HANGS}"));
    thread::scope(|scope| {
        scope.spawn(work);
        wait_for(call, || fake.calls(call) > before);
        in_short_fork(check);
        fake.set("FAKECUDA_SLOW", "");
    });
}

fn is_forked<T>(answer: &vmmfd::Result<T>) -> bool {
    matches!(answer, Err(Error::Forked { .. }))
}

/// A fork shares its parent's epoll instance.
#[test]
fn fork_leaves_its_parents_timelines() {
    let driver_of_a_fake = fake_driver();
    let device = Device::find(&driver_of_a_fake.1, Selector::default()).unwrap();
    let timeline = Timeline::create(&device).unwrap();
    let opened = || Timeline::open(timeline.as_fd().try_clone_to_owned().unwrap(), None).unwrap();
    let (watched, peer) = (ManuallyDrop::new(opened()), UnixStream::pair().unwrap());
    watched.release_with(peer.0.try_clone().unwrap().into()).unwrap();
    in_short_fork(|| {
        let is_refused = is_forked(&watched.release_with(peer.0.try_clone().unwrap().into()));
        // SAFETY: the fork drops its own copy of the value, once.
        drop(unsafe { ptr::read(&*watched) });
        is_refused
    });
    drop(peer.1);
    wait_for("a release", || watched.completion(1) == Completion::Lost);
    drop(ManuallyDrop::into_inner(watched));
}

/// The counts are in a page that a fork shares with its parent.
#[test]
fn fork_leaves_its_parents_counts() {
    let counts = || internals::TieCounts::of(process::id()).unwrap();
    in_child(
        "forks::fork_leaves_its_parents_counts",
        |_| (),
        || {
            let (_fake, driver) = fake_driver();
            let device = Device::find(&driver, Selector::default()).unwrap();
            let memory = Shared::create(&device, Spec::vmm(MIB)).unwrap();
            let all = ManuallyDrop::new((memory, device, driver));
            assert_eq!((counts().imported, counts().own), (0, 1));
            in_short_fork(|| {
                // SAFETY: the fork drops its own copy of the values, once.
                drop(unsafe { ptr::read(&*all) });
                true
            });
            assert_eq!(counts().own, 1);
            drop(ManuallyDrop::into_inner(all));
            assert_eq!(counts().own, 0);
            String::new()
        },
    );
}

#[test]
fn fork_keeps_no_stopped_brokers_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker.sock");
    let bind = || Server::bind(&path, ServerConfig::default(), &Cancel::new().unwrap());
    let (mut ours, mut forks) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        let stopped = bind().unwrap();
        scope.spawn(move || in_fork(|| forks.write_all(b"x").and_then(|()| forks.read_exact(&mut [0])).is_ok()));
        ours.read_exact(&mut [0]).unwrap();
        fs::remove_file(&path).unwrap();
        drop(stopped);
        let next = bind();
        ours.write_all(b"x").unwrap();
        next.unwrap();
    });
}

#[test]
fn opening_reports_the_fork() {
    let copy = Copy::new();
    copy.write("libcuda.so.1");
    let log = copy.folder().join("log");
    let prepare = |command: &mut Command| {
        command.env_remove("CUDA_VISIBLE_DEVICES").env("LD_LIBRARY_PATH", copy.folder());
        command.env("FAKECUDA_SLOW", format!("cuInit:{HANGS}")).env("FAKECUDA_LOG", &log).env("FAKECUDA_DEVICES", "1");
    };
    let found = in_child("forks::opening_reports_the_fork", prepare, || {
        let log = PathBuf::from(env::var_os("FAKECUDA_LOG").unwrap());
        let fake = Fake::load(log.with_file_name("libcuda.so.1"));
        let opening = thread::spawn(|| open(Choice::Only(Backend::Cuda)).map(drop));
        wait_for("cuInit", || fs::read_to_string(&log).is_ok_and(|log| log.contains("cuInit")));
        in_short_fork(|| {
            let only = open(Choice::Only(Backend::Cuda));
            is_forked(&only) && is_forked(&open(Choice::Auto)) && open(Choice::Only(Backend::Host)).is_ok()
        });
        fake.set("FAKECUDA_SLOW", "");
        format!("{:?}", opening.join().unwrap())
    });
    assert_eq!(found, "Ok(())");
}

#[test]
fn sizes_stay_known_during_access_change() {
    let (fake, driver) = fake_driver();
    let device = Device::find(&driver, Selector::default()).unwrap();
    for sealed in [false, true] {
        let spec = if sealed { Spec::vmm(5000).sealed() } else { Spec::vmm(5000) };
        let shared = Shared::create(&device, spec).unwrap();
        let check = || {
            let part = shared.chunks(0..5000);
            shared.size() == 5000
                && shared.mapped_size() == 2 * MIB
                && (sealed
                    || part
                        .is_ok_and(|part| part.is_some_and(|(part, chunks)| part.segments == 1 && chunks.len() == 1)))
                && (sealed || shared.describe().is_ok() && is_forked(&shared.make_read_only()))
                && is_forked(&shared.seal())
        };
        let work = || if sealed { shared.seal().map(drop) } else { shared.make_read_only() }.unwrap();
        in_fork_during(&fake, "cuMemSetAccess", work, check);
        assert_eq!((shared.access(), shared.describe().unwrap().segments()), (ReadOnly, 1));
    }
}

#[test]
fn arenas_report_the_fork() {
    let (fake, driver) = fake_driver();
    let device = Device::find(&driver, Selector::default()).unwrap();
    let arenas = Arenas::new(&device, 8 * MIB).unwrap();
    let address = arenas.allocate(1).unwrap();
    let check = || {
        is_forked(&arenas.allocate(1))
            && arenas.find(address).is_none()
            && !arenas.free(address)
            && !arenas.close(address)
            && arenas.figures() == Default::default()
    };
    in_fork_during(&fake, "cuMemCreate", || assert!(arenas.allocate(16 * MIB).is_ok()), check);
    assert_eq!(arenas.figures().blocks, 2);
}

#[test]
fn leases_report_the_fork() {
    let (subject, (fake, driver)) = (Subject::fake(), fake_driver());
    let broker = Broker::start(&subject);
    let (maker, reader) = (broker.client(), broker.client());
    let memory = filled(&driver, MIB, None, 7);
    maker.put(&Put::new("a").part(PutPart::of("all", &memory).unwrap())).unwrap();
    let lease = || reader.get(&Get::new("a")).unwrap();
    let (theirs, mut ours) = (lease(), Some(lease()));
    let work = || drop(theirs.open(&driver, None).unwrap());
    in_fork_during(&fake, "cuDeviceGetName", work, || {
        matches!(ours.take().unwrap().open(&driver, None), Err(Error::Misuse { .. }))
    });
    drop(ours.unwrap().open(&driver, None).unwrap());
}

mod cancel {
    use super::*;

    /// Waits for a listener that never comes. Returns the result, and the CPU time of this thread.
    fn wait(cancel: &Cancel, limit: Duration) -> (vmmfd::Result<()>, Duration) {
        let used = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
        let before = used();
        let waited = connect(Path::new("/nonexistent/vmmfd.sock"), limit, &Trust::default(), cancel).map(drop);
        (waited, used() - before)
    }

    fn waits_idly(cancel: &Cancel) -> bool {
        let limit = Duration::from_millis(500);
        let (waited, cpu) = wait(cancel, limit);
        matches!(waited, Err(Error::Socket(_))) && cpu < limit / 4
    }

    #[test]
    fn fork_cancels_only_its_waits() {
        let cancel = Cancel::new().unwrap();
        in_short_fork(|| {
            let waiting = thread::spawn({
                let cancel = cancel.clone();
                move || wait(&cancel, Duration::from_secs(60)).0
            });
            thread::sleep(Duration::from_millis(50));
            cancel.cancel(CancelReason::Program);
            matches!(waiting.join().unwrap(), Err(Error::Interrupted { .. }))
        });
        assert!(waits_idly(&cancel));
        cancel.cancel(CancelReason::Program);
        assert!(matches!(wait(&cancel, Duration::from_secs(60)).0, Err(Error::Interrupted { .. })));
    }

    #[test]
    fn parent_cancels_only_its_waits() {
        let cancel = Cancel::new().unwrap();
        let ((mut forked, mut in_child), (mut cancelled, mut in_parent)) = (io::pipe().unwrap(), io::pipe().unwrap());
        thread::scope(|scope| {
            scope.spawn(|| {
                in_short_fork(|| {
                    in_child.write_all(&[0]).unwrap();
                    cancelled.read_exact(&mut [0]).unwrap();
                    cancel.check().is_ok() && waits_idly(&cancel)
                });
            });
            forked.read_exact(&mut [0]).unwrap();
            cancel.cancel(CancelReason::Program);
            in_parent.write_all(&[0]).unwrap();
        });
    }

    #[test]
    fn server_refuses_parents_cancel() {
        let folder = tempfile::tempdir().unwrap();
        let cancel = Cancel::new().unwrap();
        in_short_fork(|| {
            let server = Server::bind(&folder.path().join("vmmfd.sock"), ServerConfig::default(), &cancel).unwrap();
            matches!(server.run(), Err(Error::Misuse { .. }))
        });
    }
}

mod namespaces {
    use super::*;

    /// Creates a PID namespace for later forks: as root, or in a user namespace.
    fn enter_pid_namespace() {
        let (uid, mut flags) = (getuid(), CloneFlags::CLONE_NEWPID);
        if !geteuid().is_root() {
            flags |= CloneFlags::CLONE_NEWUSER;
        }
        unshare(flags).unwrap();
        if flags.contains(CloneFlags::CLONE_NEWUSER) {
            fs::write("/proc/self/uid_map", format!("0 {uid} 1")).unwrap();
        }
    }

    #[test]
    #[ignore = "needs the right to make namespaces: make test-all runs it where there is"]
    fn init_forks_into_pid_namespace() {
        let subject = Subject::host();
        let broker = Broker::start(&subject);
        in_short_fork(|| {
            enter_pid_namespace();
            in_fork(|| {
                assert_eq!(process::id(), 1);
                let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
                let (memory, client) = (filled(&driver, MIB, None, 7), broker.client());
                client.put(&Put::new("a").part(PutPart::of("all", &memory).unwrap())).unwrap();
                let lease = client.get(&Get::new("a")).unwrap();
                unshare(CloneFlags::CLONE_NEWPID).unwrap();
                let mut inherited = Some(lease);
                in_fork(|| {
                    assert_eq!(process::id(), 1);
                    let lease = inherited.take().unwrap();
                    assert!(!lease.is_held());
                    assert!(is_forked(&memory.copy_in(0, b"no")));
                    assert!(is_forked(&driver.version()));
                    assert!(matches!(client.list(""), Err(Error::Misuse { .. })));
                    assert!(matches!(lease.open(&driver, None), Err(Error::Misuse { .. })));
                    open(Choice::Only(Backend::Host)).is_ok_and(|opened| opened.driver != driver)
                });
                assert_eq!(client.who("").unwrap().leases.len(), 1, "the fork ended its parent's lease");
                inherited.is_some_and(|lease| lease.is_held())
            });
            true
        });
    }
}
