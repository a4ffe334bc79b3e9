//! The two engines of the pattern: kernels on the device, and threads on all CPUs of the host.

use std::ops::Range;

use vmmfd::internals::{Kernels, PatternSpan};
use vmmfd_cli::check::pattern::{Engine, EngineChoice, Mismatch, Verification};

use crate::support::prelude::*;

const GPU: EngineChoice = EngineChoice::Only(Engine::Gpu);

cases! {
    on crate::support::Subject; every backend: [
    many_cpus_find_what_one_finds,
    forced_engine_is_used_or_refused,
    ]
    gpus alone: [
    both_engines_write_the_same,
    both_engines_find_the_same,
    words_of_two_runs_differ,
    a_fill_leaves_zeros_behind,
    inaccessible_range_runs_no_kernel,
    unmapped_range_is_refused,
    loaded_kernels_select_the_gpu,
    host_replaces_missing_kernels,
    ]
}

fn kernels(subject: &Subject) -> &dyn Kernels {
    subject.verbs.kernels().unwrap()
}

fn mapping(subject: &Subject, size: u64) -> Mapping {
    Mapping::new(&Allocation::create(&subject.device(), size).unwrap(), ReadWrite).unwrap()
}

fn read(region: &dyn Region, range: Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    region.copy_out(range.start, &mut bytes).unwrap();
    bytes
}

fn expected(salt: u32, range: Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    Pattern::new(salt).write(range.start, &mut bytes);
    bytes
}

fn verify(choice: EngineChoice, region: &dyn Region, start: u64, range: Range<u64>, salt: u32) -> Verification {
    let (found, work) = choice.verify(region, start, range, Pattern::new(salt), &mut |_| Ok(())).unwrap();
    let engine = if choice == GPU { Engine::Gpu } else { Engine::Host };
    assert_eq!(work.engine, engine);
    found
}

/// Short ranges around every edge of a 16-byte access, and long ranges.
fn ranges() -> impl Iterator<Item = Range<u64>> {
    let short = (0..20).flat_map(|start| (0..36).map(move |size| start..start + size));
    short.chain([3..1_000_003, 16..1_048_576, 5..70_000])
}

// The host

fn many_cpus_find_what_one_finds(subject: Subject) {
    let size = (24 << 20) + 5;
    let mapping = mapping(&subject, size);
    let mut done = Vec::new();
    let all = mapping.size();
    pattern::fill(&mapping, 0..size, Pattern::new(8), &mut |reached| {
        done.push(reached);
        Ok(())
    })
    .unwrap();
    assert!(done.is_sorted() && done.last() == Some(&size), "{done:?}");
    let check = || pattern::verify(&mapping, 0, 0..size, Pattern::new(8), &mut |_| Ok(())).unwrap();
    assert_eq!(check(), Verification { words: size.div_ceil(4), mismatches: 0, first: None });
    assert!(read(&mapping, size..all).iter().all(|byte| *byte == 0));
    let wrong = [(9 << 20) + 2, (9 << 20) + 3, (17 << 20) + 7, 24 << 20, size - 1];
    for at in wrong {
        mapping.copy_in(at, &[!read(&mapping, at..at + 1)[0]]).unwrap();
    }
    let found = check();
    assert_eq!((found.words, found.mismatches), (size.div_ceil(4), 4));
    let index = (9 << 20) / 4;
    let expected = Pattern::new(8).word(index);
    assert_eq!(found.first, Some(Mismatch { index, expected, found: expected ^ 0xFFFF_0000 }));
    let mut stop = |_| Err(Error::Interrupted { reason: CancelReason::Program });
    let ended = [
        pattern::fill(&mapping, 0..size, Pattern::new(2), &mut stop),
        pattern::verify(&mapping, 0, 0..size, Pattern::new(2), &mut stop).map(drop),
    ];
    assert!(ended.iter().all(|ended| matches!(ended, Err(Error::Interrupted { .. }))), "{ended:?}");
    let beyond = pattern::verify(&mapping, 0, 0..all + 1, Pattern::new(8), &mut |_| Ok(()));
    assert!(matches!(beyond, Err(Error::Memory(MemoryError::OutOfRange { .. }))), "{beyond:?}");
}

fn forced_engine_is_used_or_refused(subject: Subject) {
    let mapping = mapping(&subject, 4096);
    let fill = |choice: EngineChoice| choice.fill(&mapping, 0..4096, Pattern::new(1), &mut |_| Ok(()));
    assert_eq!(fill(EngineChoice::Only(Engine::Host)).unwrap().engine, Engine::Host);
    match (subject.kind, fill(GPU)) {
        (Kind::Host, Err(error @ Error::Device(DeviceError::Unsupported { .. }))) => {
            assert!(error.to_string().contains("kernels"))
        }
        (Kind::Fake | Kind::Cuda, Ok(work)) => assert_eq!(work.engine, Engine::Gpu),
        (kind, other) => panic!("{kind:?}: {other:?}"),
    }
    assert_eq!(read(&mapping, 0..4096), expected(1, 0..4096));
}

// Kernels

fn both_engines_write_the_same(subject: Subject) {
    let mapping = mapping(&subject, 2 << 20);
    for range in ranges() {
        mapping.copy_in(0, &vec![0xAA; range.end as usize + 64]).unwrap();
        let work = GPU.write(&mapping, 0, range.clone(), Pattern::new(77), &mut |_| Ok(())).unwrap();
        assert_eq!(work.engine, Engine::Gpu);
        let around = read(&mapping, 0..range.end + 64);
        let (before, rest) = around.split_at(range.start as usize);
        let (inside, behind) = rest.split_at((range.end - range.start) as usize);
        assert_eq!(inside, expected(77, range.clone()), "{range:?}");
        assert!(before.iter().chain(behind).all(|byte| *byte == 0xAA), "beside {range:?}");
    }
}

fn both_engines_find_the_same(subject: Subject) {
    let mapping = mapping(&subject, 2 << 20);
    let whole = 0..2 << 20;
    GPU.write(&mapping, 0, whole.clone(), Pattern::new(5), &mut |_| Ok(())).unwrap();
    let host = EngineChoice::Only(Engine::Host);
    let clean = verify(GPU, &mapping, 0, whole.clone(), 5);
    assert_eq!(clean, Verification { words: (2 << 20) / 4, mismatches: 0, first: None });
    let other = verify(GPU, &mapping, 0, whole.clone(), 6);
    assert_eq!(other.mismatches, other.words, "another salt differs in every word");
    assert_eq!(other, verify(host, &mapping, 0, whole, 6));
    // One byte of a word, two bytes, a whole word, and bytes at the edges of the ranges.
    for (at, bytes) in [(1, 1), (6, 2), (16, 4), (30, 1), (34, 1), (51, 2), (69_997, 3), (1_000_002, 1), (1_048_572, 4)]
    {
        let inverted: Vec<u8> = read(&mapping, at..at + bytes).iter().map(|byte| !byte).collect();
        mapping.copy_in(at, &inverted).unwrap();
    }
    for range in ranges() {
        let found = verify(GPU, &mapping, 0, range.clone(), 5);
        assert_eq!(found, verify(host, &mapping, 0, range.clone(), 5), "{range:?}");
    }
}

fn words_of_two_runs_differ(subject: Subject) {
    let mapping = mapping(&subject, 1 << 20);
    // Ranges that start shortly before a word index that is a multiple of 2^31, at every distance from a vector's edge.
    for (run, before) in [(1, 400), (1, 404), (1, 408), (3, 412), (7, 16), (12, 20)] {
        let (start, length) = ((run << 33) - before, 4096);
        let range = start..start + length;
        GPU.write(&mapping, start, range.clone(), Pattern::new(3), &mut |_| Ok(())).unwrap();
        assert_eq!(read(&mapping, 0..length), expected(3, range.clone()), "{before} bytes before run {run}");
        assert!(verify(GPU, &mapping, start, range.clone(), 3).passed());
        mapping.copy_in(before + 9, &[0xEE]).unwrap();
        let found = verify(GPU, &mapping, start, range.clone(), 3);
        assert_eq!(found, verify(EngineChoice::Only(Engine::Host), &mapping, start, range, 3));
        assert_eq!(found.first.unwrap().index, (run << 31) + 2);
    }
}

fn a_fill_leaves_zeros_behind(subject: Subject) {
    let mapping = mapping(&subject, 1 << 20);
    let (size, all) = (1_000_001, mapping.size());
    mapping.copy_in(0, &vec![0xFF; all as usize]).unwrap();
    let mut done = 0;
    GPU.fill(&mapping, 0..size, Pattern::new(4), &mut |reached| {
        done = reached;
        Ok(())
    })
    .unwrap();
    assert_eq!(done, size);
    assert_eq!(read(&mapping, 0..size), expected(4, 0..size));
    assert!(read(&mapping, size..all).iter().all(|byte| *byte == 0));
}

fn inaccessible_range_runs_no_kernel(subject: Subject) {
    let memory = Mapped::new(&*subject.verbs, &EXPORTABLE, 2);
    let stretch = PatternSpan { address: memory.address, start: 0, size: memory.size, salt: 1 };
    kernels(&subject).fill(0, &stretch).unwrap();
    memory.allow(Some(ReadOnly));
    assert_eq!(code(kernels(&subject).fill(0, &stretch)), code::INVALID_VALUE);
    assert_eq!(kernels(&subject).verify(0, &stretch).unwrap().mismatches, 0);
    memory.allow(None);
    assert_eq!(code(kernels(&subject).verify(0, &stretch)), code::INVALID_VALUE);
    memory.allow(Some(ReadWrite));
    // The context still works.
    assert_eq!(kernels(&subject).verify(0, &stretch).unwrap().mismatches, 0);
    memory.end();
    assert_eq!(code(kernels(&subject).verify(0, &stretch)), code::INVALID_VALUE);
}

fn unmapped_range_is_refused(subject: Subject) {
    let memory = Mapped::new(&*subject.verbs, &EXPORTABLE, 1);
    let good = PatternSpan { address: memory.address, start: 0, size: memory.size, salt: 1 };
    for bad in [
        PatternSpan { size: memory.size + 1, ..good },
        PatternSpan { address: memory.address - 4, ..good },
        PatternSpan { address: memory.address + 4, ..good },
        PatternSpan { address: 0, ..good },
        PatternSpan { size: u64::MAX, ..good },
        PatternSpan { start: u64::MAX - 3, ..good },
        PatternSpan { start: 1, size: 8, ..good },
        PatternSpan { address: memory.address + 2, size: 8, ..good },
    ] {
        assert_eq!(code(kernels(&subject).fill(0, &bad)), code::INVALID_VALUE, "{bad:?}");
        assert_eq!(code(kernels(&subject).verify(0, &bad)), code::INVALID_VALUE, "{bad:?}");
    }
    assert_eq!(code(kernels(&subject).fill(99, &good)), code::INVALID_DEVICE);
    kernels(&subject).fill(0, &good).unwrap();
    memory.end();
}

fn loaded_kernels_select_the_gpu(subject: Subject) {
    let mapping = mapping(&subject, 8 << 20);
    let auto = |start, range: Range<u64>| {
        let (_, work) = EngineChoice::Auto.verify(&mapping, start, range, Pattern::new(1), &mut |_| Ok(())).unwrap();
        assert!(work.fallback.is_none());
        work.engine
    };
    if subject.kind == Kind::Fake {
        // On a GPU, another test may have loaded the kernels.
        assert_eq!(auto(0, 0..8 << 20), Engine::Host, "compiling them takes longer than the work");
    }
    kernels(&subject).load(0).unwrap();
    assert_eq!(auto(0, 0..8 << 20), Engine::Gpu);
    assert_eq!(auto(0, 0..64), Engine::Host, "starting a kernel takes longer than the work");
    assert_eq!(auto(2, 2..8 << 20), Engine::Host, "words do not begin where words can be");
    let refused = GPU.verify(&mapping, 2, 2..64, Pattern::new(1), &mut |_| Ok(())).unwrap_err();
    assert!(matches!(refused, Error::Misuse { .. }), "{refused}");
}

fn host_replaces_missing_kernels(subject: Subject) {
    let mapping = mapping(&subject, 8 << 20);
    kernels(&subject).load(0).unwrap();
    subject.faulty.fail(Fault::Verb("kernels load"), 221);
    let work = EngineChoice::Auto.fill(&mapping, 0..8 << 20, Pattern::new(2), &mut |_| Ok(())).unwrap();
    assert_eq!(work.engine, Engine::Host);
    assert!(matches!(work.fallback, Some(Error::Driver { code: 221, .. })), "{work:?}");
    subject.faulty.mend();
    assert!(verify(GPU, &mapping, 0, 0..8 << 20, 2).passed());
}

#[test]
fn failed_load_leaves_no_kernels() {
    let fake = Copy::new().load();
    let driver: Arc<dyn Verbs> = Arc::new(CudaDriver::load_from(fake.path()).unwrap());
    let kernels = || driver.kernels().unwrap();
    for (call, nth, failure) in [
        ("cuModuleLoadData", 1, 221),
        ("cuModuleGetFunction", 1, 500),
        ("cuModuleGetFunction", 2, 500),
        ("cuEventCreate", 2, 2),
        ("cuMemAlloc_v2", 1, 2),
    ] {
        fake.set("FAKECUDA_FAIL", &format!("{call}:{nth}:{failure}"));
        assert_eq!(code(kernels().load(0)), failure, "{call}");
        assert!(!kernels().are_loaded(0));
        assert_eq!(fake.live()[4..], [0; 5], "after {call} failed");
    }
    kernels().load(0).unwrap();
    assert!(kernels().are_loaded(0));
    let before = fake.calls("cuModuleLoadData");
    kernels().load(0).unwrap();
    assert_eq!(fake.calls("cuModuleLoadData"), before, "they are loaded once");
    drop(driver);
    assert_eq!(fake.live(), [0; 9]);
}
