//! Memory of a pool and legacy memory.

use super::*;

cases! {
    on crate::support::Subject; gpus alone: [
    pool_holds_many_buffers,
    legacy_handle_opens_in_another_process,
    ]
}

fn pool_holds_many_buffers(subject: Subject) {
    let device = subject.device();
    let pool = Pool::create(&device).unwrap();
    assert!(!PoolBuffer::allocate(&pool, 100).unwrap().is_protected());
    let buffers = [100, 5000, 3 << 20].map(|size| Shared::in_pool(&pool, size).unwrap());
    for (number, buffer) in buffers.iter().enumerate() {
        buffer.copy_in(0, &vec![number as u8 + 1; buffer.size() as usize]).unwrap();
    }
    let descriptions = buffers.each_ref().map(|buffer| buffer.describe().unwrap());
    // The pool is sent only once.
    let imported =
        Imported::pool(&device, &descriptions[0], pool.export().unwrap().try_clone_to_owned().unwrap()).unwrap();
    let given = descriptions.each_ref().map(|description| Imported::of_pool(&imported, description, ReadOnly).unwrap());
    for (number, memory) in given.iter().enumerate() {
        let size = memory.size() as usize;
        assert!(read(memory, 0, size) == vec![number as u8 + 1; size]);
        assert!(matches!(memory.copy_in(0, b"x"), Err(Error::Memory(MemoryError::ReadOnly))), "by agreement");
    }
    // The range exceeds the pointer's allocation.
    for (size, offset) in [(5001, 0), (5000, 1), (5000, u64::MAX)] {
        let mut lie = descriptions[1].clone();
        let pool = lie.pool().unwrap();
        let pointer = lie.pointer().unwrap();
        (lie.mapped_size, lie.sharing) = (size, Sharing::Pool { pool, pointer, offset });
        assert!(matches!(Imported::of_pool(&imported, &lie, ReadOnly), Err(Error::Peer(PeerError::Mismatch { .. }))));
    }
    // An imported pool cannot be exported again.
    assert_eq!(code(imported.export()), code::INVALID_VALUE);
    drop((given, imported));
    assert_eq!(read(&buffers[1], 0, 4), [2; 4]);
}

fn legacy_handle_opens_in_another_process(subject: Subject) {
    let device = subject.device();
    let memory = LegacyMemory::allocate(&device, 5000).unwrap();
    assert_eq!(memory.size(), 2 << 20, "a block of its own");
    assert!(!memory.is_protected());
    memory.copy_in(4096, b"interior").unwrap();
    let handle = memory.handle().unwrap();
    assert!(matches!(LegacyMemory::open(&device, &handle), Err(Error::Memory(MemoryError::OwnHandle))));
    let shared = Shared::in_legacy(&memory, 4096, 8).unwrap();
    let (travels, fds) = ArrayHandle::of(&shared, bytes(8)).unwrap();
    let pointer = memory.handle().unwrap();
    assert!(fds.is_empty() && travels.memory.sharing == Sharing::Legacy { pointer, offset: 4096 });
    let name = if subject.kind == Kind::Fake { "fake" } else { "cuda" };
    let told = in_child(
        &format!("shared::gpus::{name}::legacy_handle_opens_in_another_process"),
        |command| {
            command.env("HANDLE", serde_json::to_string(&travels).unwrap());
        },
        || {
            let text = env::var("HANDLE").unwrap();
            let travels: ArrayHandle = serde_json::from_str(&text).unwrap();
            let array = travels.open(&subject.driver, None, Vec::new(), ReadWrite).unwrap();
            assert_eq!(read(&**array.memory(), 0, 8), b"interior");
            // Numba and CuPy pass the bare 64 bytes and the array's layout.
            let words = ArrayDescriptor::new(ElementType::U16, [4], Order::C).unwrap();
            let pointer = travels.memory.pointer().unwrap();
            let raw = Array::open_legacy(&device, &pointer, 4096, words.clone()).unwrap();
            assert_eq!(raw.element(&[1]).unwrap(), b"te");
            assert!(Array::open_legacy(&device, &pointer, 2 << 20, words.clone()).is_err());
            assert!(Array::open_legacy(&device, &pointer, u64::MAX, words).is_err());
            assert!(LegacyMemory::open(&device, &Pointer([0; 64])).is_err());
            drop(array);
            raw.memory().copy_in(4096, b"I").unwrap();
            drop(raw);
            "closed".to_owned()
        },
    );
    assert_eq!(told, "closed");
    assert_eq!(read(&shared, 0, 8), b"Interior");
}
