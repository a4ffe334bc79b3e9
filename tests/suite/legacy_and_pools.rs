//! Legacy handles and memory pools of the CUDA backend, on the emulated driver and on a GPU. The expected results were measured on an H200.

use std::{io::IoSliceMut, mem::MaybeUninit};

use nix::unistd::dup;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use sendfd::SendWithFd;
use vmmfd::internals::{LegacyIpc, Pools};

use crate::support::prelude::*;

const INVALID: u32 = code::INVALID_VALUE;
const INVALID_CONTEXT: u32 = 201;
const INVALID_HANDLE: u32 = 400;

cases! {
    on crate::support::Subject; gpus alone: [
    legacy_memory_is_freed_once,
    legacy_handle_needs_whole_legacy_allocation,
    invalid_or_own_legacy_handle_is_refused,
    legacy_opens_are_counted,
    open_legacy_memory_outlives_its_owner,
    pool_is_destroyed_after_its_memory,
    other_descriptors_are_refused,
    pointer_imported_twice_is_freed_twice,
    imported_pool_memory_outlives_its_exporter,
    ]
}

fn legacy(subject: &Subject) -> &dyn LegacyIpc {
    subject.verbs.legacy().unwrap()
}

fn pools(subject: &Subject) -> &dyn Pools {
    subject.verbs.pools().unwrap()
}

fn write(subject: &Subject, address: u64, bytes: &[u8]) {
    subject.verbs.copy_in(0, address, bytes).unwrap();
}

fn read<const LENGTH: usize>(subject: &Subject, address: u64) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    subject.verbs.copy_out(0, address, &mut bytes).unwrap();
    bytes
}

/// Runs `owner` in another process and `here` in this process, each with a separate driver and one side of a socket pair. `here` finally
/// reads end-of-file, so the other process has exited.
fn with_owner(subject: &Subject, test: &str, owner: fn(&Subject, Wire), here: impl FnOnce(Wire)) {
    let module = if subject.kind == Kind::Cuda { "cuda" } else { "fake" };
    let test = format!("legacy_and_pools::{module}::{test}");
    let (near, far) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let prepare = |command: &mut Command| {
                command.stdin(OwnedFd::from(far));
            };
            in_child(&test, prepare, || {
                owner(subject, Wire::new(UnixStream::from(dup(io::stdin()).unwrap())));
                String::new()
            })
        });
        here(Wire::new(near));
    });
}

/// One side of a socket pair; reads have a timeout.
struct Wire(UnixStream);

impl Wire {
    fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(40))).unwrap();
        Self(stream)
    }

    fn say(&self, bytes: &[u8]) {
        (&self.0).write_all(bytes).unwrap();
    }

    fn hear<const LENGTH: usize>(&self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        (&self.0).read_exact(&mut bytes).unwrap();
        bytes
    }

    fn hear_the_end(&self) {
        assert_eq!((&self.0).read(&mut [0]).unwrap(), 0);
    }
}

// Legacy handles

fn legacy_memory_is_freed_once(mut subject: Subject) {
    // A parallel test could reserve the freed addresses.
    subject.alone();
    let legacy = legacy(&subject);
    assert_eq!(code(legacy.allocate(0, 0)), INVALID);
    assert_eq!(code(legacy.allocate(0, 1 << 50)), code::OUT_OF_MEMORY);
    assert_eq!(code(legacy.allocate(99, 4096)), code::INVALID_DEVICE);
    for size in [1, 4096, 1 << 20, (1 << 20) + 1, (4 << 20) + 5] {
        let address = legacy.allocate(0, size).unwrap();
        assert_eq!(subject.verbs.extent(0, address).unwrap(), (address, size));
        assert_eq!(subject.verbs.extent(0, address + size - 1).unwrap(), (address, size));
        assert_eq!(address % if size > 1 << 20 { 2 << 20 } else { 512 }, 0, "{size} bytes");
        for (what, ordinal, at) in
            [("what is behind it", 0, address + size), ("another device", 1, address), ("null", 0, 0)]
        {
            assert_eq!(code(legacy.deallocate(ordinal, at)), INVALID, "{what}");
        }
        assert_eq!(code(legacy.close(0, address)), INVALID, "what was not opened");
        assert_eq!(code(pools(&subject).free(0, address)), INVALID, "what is of no pool");
        legacy.deallocate(0, address).unwrap();
        assert_eq!(code(legacy.deallocate(0, address)), INVALID, "twice");
        assert_eq!(code(subject.verbs.extent(0, address)), INVALID, "freed");
    }
}

fn legacy_handle_needs_whole_legacy_allocation(mut subject: Subject) {
    // A parallel test could reserve the freed addresses.
    subject.alone();
    let driver = &subject.verbs;
    let legacy = legacy(&subject);
    let unit = subject.unit();
    let [one, two] = [(); 2].map(|()| legacy.allocate(0, 4096).unwrap());
    let handle = legacy.handle(0, one).unwrap();
    assert_eq!(legacy.handle(0, one + 4095).unwrap(), handle, "of the middle");
    assert_ne!(legacy.handle(0, two).unwrap(), handle, "of another");
    let vmm = driver.reserve(unit, 0).unwrap();
    let memory = driver.create(unit, &EXPORTABLE).unwrap();
    driver.map(vmm, unit, 0, memory).unwrap();
    driver.set_access(vmm, unit, Location::Device(0), Some(ReadWrite)).unwrap();
    let pools = pools(&subject);
    let pool = pools.create(0).unwrap();
    let pooled = pools.allocate(pool, 0, 4096).unwrap();
    legacy.deallocate(0, two).unwrap();
    for (what, address) in [("mapped", vmm), ("pool", pooled), ("freed", two), ("no", 4096)] {
        assert_eq!(code(legacy.handle(0, address)), INVALID, "{what} memory");
        assert_eq!(code(legacy.deallocate(0, address)), INVALID, "{what} memory");
    }
    pools.free(0, pooled).unwrap();
    pools.destroy(pool).unwrap();
    driver.unmap(vmm, unit).unwrap();
    driver.free(vmm, unit).unwrap();
    driver.release(memory).unwrap();
    legacy.deallocate(0, one).unwrap();
}

fn invalid_or_own_legacy_handle_is_refused(subject: Subject) {
    let legacy = legacy(&subject);
    let address = legacy.allocate(0, 4096).unwrap();
    let handle = legacy.handle(0, address).unwrap();
    assert_eq!(code(legacy.open(0, &handle)), INVALID_CONTEXT);
    assert_eq!(code(legacy.open(0, &[0; 64])), INVALID);
    legacy.deallocate(0, address).unwrap();
}

/// Shares an allocation and executes commands: `f` frees it, `w` writes to it, and any other command returns.
fn legacy_owner(subject: &Subject, wire: Wire) {
    let legacy = legacy(subject);
    let address = legacy.allocate(0, 3000).unwrap();
    write(subject, address, b"from its owner");
    wire.say(&legacy.handle(0, address).unwrap());
    let mut freed = false;
    loop {
        match &wire.hear() {
            b"w" => write(subject, address, b"seen"),
            b"r" => {
                let bytes: [u8; 4] = read(subject, address);
                wire.say(&bytes);
                continue;
            }
            b"f" => {
                legacy.deallocate(0, address).unwrap();
                freed = true;
            }
            _ => break,
        }
        wire.say(b".");
    }
    if !freed {
        legacy.deallocate(0, address).unwrap();
    }
}

fn legacy_opens_are_counted(mut subject: Subject) {
    subject.alone();
    let test = "legacy_opens_are_counted";
    with_owner(&subject, test, legacy_owner, |wire| {
        let (driver, legacy) = (&subject.verbs, legacy(&subject));
        let handle: [u8; 64] = wire.hear();
        let address = legacy.open(0, &handle).unwrap();
        assert_eq!(driver.extent(0, address).unwrap(), (address, 3000));
        assert_eq!(&read(&subject, address), b"from its owner");
        write(&subject, address, b"back");
        wire.say(b"r");
        assert_eq!(&wire.hear(), b"back");
        wire.say(b"w");
        assert_eq!(&wire.hear(), b".");
        assert_eq!(&read(&subject, address), b"seen");
        assert_eq!(code(driver.copy_out(0, address + 2999, &mut [0; 2])), INVALID, "past its end");
        assert_eq!(code(legacy.handle(0, address)), INVALID, "a handle of what was opened");
        assert_eq!(code(legacy.deallocate(0, address)), INVALID, "what was opened is not freed");
        assert_eq!(code(pools(&subject).export_pointer(0, address)), INVALID, "nor of a pool");
        assert_eq!(code(legacy.close(0, address + 1)), INVALID, "not its start");
        assert_eq!(legacy.open(0, &handle).unwrap(), address, "the same again");
        legacy.close(0, address).unwrap();
        assert_eq!(&read(&subject, address), b"seen", "once is left");
        if let Some(fake) = &subject.fake {
            // The failed open closes the handle again and is not counted.
            fake.set("FAKECUDA_FAIL", "cuMemGetAddressRange_v2:1:700");
            assert_eq!((code(legacy.open(0, &handle)), fake.calls("cuIpcCloseMemHandle")), (700, 2));
        }
        legacy.close(0, address).unwrap();
        assert_eq!(code(legacy.close(0, address)), INVALID, "once too often");
        assert_eq!(code(driver.copy_out(0, address, &mut [0; 4])), INVALID, "closed");
        wire.say(b"x");
    });
}

fn open_legacy_memory_outlives_its_owner(mut subject: Subject) {
    subject.alone();
    let test = "open_legacy_memory_outlives_its_owner";
    let leave = |subject: &Subject, wire: Wire| {
        let address = legacy(subject).allocate(0, 8 << 20).unwrap();
        write(subject, address, b"from its owner");
        wire.say(&legacy(subject).handle(0, address).unwrap());
        wire.hear::<1>();
    };
    with_owner(&subject, test, leave, |wire| {
        let legacy = legacy(&subject);
        let handle: [u8; 64] = wire.hear();
        let address = legacy.open(0, &handle).unwrap();
        wire.say(b"x");
        wire.hear_the_end();
        assert_eq!(&read(&subject, address), b"from its owner");
        assert_eq!(subject.verbs.extent(0, address).unwrap(), (address, 8 << 20));
        legacy.close(0, address).unwrap();
        assert_eq!(code(legacy.open(0, &handle)), INVALID_HANDLE);
    });
}

// Pools

fn pool_is_destroyed_after_its_memory(mut subject: Subject) {
    subject.alone();
    let (driver, pools) = (&subject.verbs, pools(&subject));
    assert_eq!(code(pools.create(99)), code::INVALID_DEVICE);
    let pool = pools.create(0).unwrap();
    assert_eq!(code(pools.allocate(pool, 0, 0)), INVALID);
    assert_eq!(code(pools.allocate(pool, 0, 1 << 50)), code::OUT_OF_MEMORY);
    let addresses = [1, 1000, 3 << 20].map(|size| {
        let address = pools.allocate(pool, 0, size).unwrap();
        assert_eq!((address % 512, driver.extent(0, address).unwrap()), (0, (address, size)));
        write(&subject, address, &[7]);
        assert_eq!(code(driver.copy_out(0, address, &mut vec![0; size as usize + 1])), INVALID, "past its end");
        address
    });
    pools.allow(pool, 0).unwrap();
    assert_ne!(code(pools.allow(pool, 99)), 0);
    assert_eq!(code(pools.destroy(pool)), INVALID, "with memory of it in use");
    for address in addresses {
        assert_eq!(read(&subject, address), [7]);
        for (what, ordinal, at) in [("the middle", 0, address + 1), ("another device", 1, address)] {
            assert_eq!(code(pools.free(ordinal, at)), INVALID, "{what}");
        }
        assert_eq!(code(legacy(&subject).deallocate(0, address)), INVALID);
        pools.free(0, address).unwrap();
        assert_eq!(code(pools.free(0, address)), INVALID, "twice");
        assert_eq!(code(driver.copy_out(0, address, &mut [0])), INVALID, "freed");
    }
    pools.destroy(pool).unwrap();
    for answer in [
        code(pools.destroy(pool)),
        code(pools.export(pool)),
        code(pools.allow(pool, 0)),
        code(pools.allocate(pool, 0, 1)),
        code(pools.import_pointer(pool, 0, &[0; 64])),
    ] {
        assert_eq!(answer, INVALID, "destroyed");
    }
}

fn other_descriptors_are_refused(subject: Subject) {
    let driver = &subject.verbs;
    let pools = pools(&subject);
    let unit = subject.unit();
    let null = File::open("/dev/null").unwrap();
    let memfd = memfd_create(c"no pool", MFdFlags::MFD_CLOEXEC).unwrap();
    for (what, fd) in [("a device", null.as_fd()), ("a memfd", memfd.as_fd())] {
        assert_eq!(code(pools.import(fd)), code::UNKNOWN, "{what}");
    }
    let memory = driver.create(unit, &EXPORTABLE).unwrap();
    let exported = driver.export(memory).unwrap();
    assert_eq!(code(pools.import(exported.as_fd())), code::NOT_SUPPORTED, "memory");
    driver.release(memory).unwrap();
    let pool = pools.create(0).unwrap();
    let exported = pools.export(pool).unwrap();
    assert_eq!(code(driver.import(exported.as_fd(), unit)), code::NOT_SUPPORTED, "a pool as memory");
    pools.destroy(pool).unwrap();
}

fn pointer_imported_twice_is_freed_twice(mut subject: Subject) {
    subject.alone();
    let pools = pools(&subject);
    let pool = pools.create(0).unwrap();
    let imported = pools.import(pools.export(pool).unwrap().as_fd()).unwrap();
    let address = pools.allocate(pool, 0, 1000).unwrap();
    write(&subject, address, b"twice");
    let data = pools.export_pointer(0, address).unwrap();
    let [one, two] = [(); 2].map(|()| pools.import_pointer(imported, 0, &data).unwrap());
    assert_eq!(one, two);
    assert_eq!(code(pools.export_pointer(0, one)), INVALID, "exported again");
    pools.free(0, one).unwrap();
    assert_eq!(&read(&subject, two), b"twice");
    assert_eq!(code(pools.destroy(imported)), INVALID, "with a pointer of it in use");
    pools.free(0, two).unwrap();
    assert_eq!(code(pools.free(0, two)), INVALID, "once too often");
    assert_eq!(code(subject.verbs.copy_out(0, two, &mut [0])), INVALID);
    assert_eq!(&read(&subject, address), b"twice", "the owner's stays");
    pools.free(0, address).unwrap();
    pools.destroy(imported).unwrap();
    pools.destroy(pool).unwrap();
}

fn imported_pool_memory_outlives_its_exporter(mut subject: Subject) {
    subject.alone();
    let share = |subject: &Subject, wire: Wire| {
        let pools = pools(subject);
        let pool = pools.create(0).unwrap();
        let address = pools.allocate(pool, 0, 3000).unwrap();
        write(subject, address, b"from its owner");
        let fd = pools.export(pool).unwrap();
        let data = pools.export_pointer(0, address).unwrap();
        wire.0.send_with_fd(&data, &[fd.as_raw_fd()]).unwrap();
        wire.hear::<1>();
        assert_eq!(&read(subject, address), b"from the importer");
        wire.say(b".");
        wire.hear::<1>();
    };
    with_owner(&subject, "imported_pool_memory_outlives_its_exporter", share, |wire| {
        let pools = pools(&subject);
        let mut data = [0; 64];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        // Another test may start a program at any time, which must not inherit the descriptor.
        let flags = RecvFlags::CMSG_CLOEXEC;
        assert_eq!(recvmsg(&wire.0, &mut [IoSliceMut::new(&mut data)], &mut control, flags).unwrap().bytes, 64);
        let Some(RecvAncillaryMessage::ScmRights(mut fds)) = control.drain().next() else { panic!("no descriptor") };
        let pool = pools.import(fds.next().unwrap().as_fd()).unwrap();
        let address = pools.import_pointer(pool, 0, &data).unwrap();
        assert_eq!(subject.verbs.extent(0, address).unwrap(), (address, 3000));
        assert_eq!(&read(&subject, address), b"from its owner");
        write(&subject, address, b"from the importer");
        wire.say(b"x");
        assert_eq!(&wire.hear(), b".");
        wire.say(b"x");
        wire.hear_the_end();
        assert_eq!(&read(&subject, address), b"from the importer");
        pools.free(0, address).unwrap();
        pools.destroy(pool).unwrap();
    });
}
