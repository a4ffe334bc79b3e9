//! Memory for GPUDirect RDMA: created where the device supports it, refused elsewhere.

use vmmfd::{Result, memory::Rdma};

use crate::support::prelude::*;

const FOR_RDMA: Properties = Properties { gpu_direct_rdma: true, ..EXPORTABLE };

cases! {
    on crate::support::Subject; every backend: [
    rdma_memory_has_the_flag,
    failed_call_leaves_nothing,
    ]
}

/// Reports whether the device supports GPUDirect RDMA. Some GPUs do not.
fn supported(subject: &Subject) -> bool {
    subject.verbs.device_attribute(0, Attribute::GpuDirectRdma).unwrap() != 0
}

/// Returns the feature that the device does not support.
#[track_caller]
fn lacking<T>(result: Result<T>) -> &'static str {
    match result {
        Err(Error::Device(DeviceError::Unsupported { feature, .. })) => feature,
        Err(error) => panic!("another error: {error}"),
        Ok(_) => panic!("no error"),
    }
}

fn rdma_memory_has_the_flag(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    if !supported(&subject) {
        assert!(lacking(device.require_gpu_direct_rdma()).contains("gpuDirectRDMACapable"));
        assert!(lacking(Allocation::create_gpu_direct_rdma(&device, unit)).contains("gpuDirectRDMACapable"));
        assert!(lacking(Shared::create(&device, Spec::vmm(unit).gpu_direct_rdma())).contains("gpuDirectRDMACapable"));
        if subject.kind == Kind::Host {
            assert_eq!(code(subject.verbs.create(unit, &FOR_RDMA)), code::NOT_SUPPORTED);
        }
        return;
    }
    device.require_gpu_direct_rdma().unwrap();
    for (wanted, properties) in [(true, FOR_RDMA), (false, EXPORTABLE)] {
        let handle = subject.verbs.create(unit, &properties).unwrap();
        assert_eq!(subject.verbs.properties(handle).unwrap().gpu_direct_rdma, wanted);
        subject.verbs.release(handle).unwrap();
    }
    assert!(!Allocation::create(&device, 1).unwrap().properties().gpu_direct_rdma);
    let allocation = Allocation::create_gpu_direct_rdma(&device, unit + 1).unwrap();
    assert_eq!((allocation.properties(), allocation.size()), (FOR_RDMA, 2 * unit));
    // An importer sees only flags that the maker requested.
    let import = |from: &Allocation| {
        let fd = from.export().unwrap().try_clone_to_owned().unwrap();
        Allocation::import(&device, fd, from.size()).unwrap()
    };
    assert!(!import(&Allocation::create(&device, 1).unwrap()).properties().gpu_direct_rdma);
    drop(import(&allocation));
    // All chunks of a buffer have the flag, and the buffer is shared like any other.
    subject.faulty.take_created();
    let shared = Shared::create(&device, Spec::vmm(3 * unit).chunk(unit).gpu_direct_rdma()).unwrap();
    assert_eq!(subject.faulty.take_created(), [FOR_RDMA; 3]);
    shared.copy_in(unit - 2, b"seen").unwrap();
    let bytes = ArrayDescriptor::new(ElementType::U8, [shared.size()], Order::C).unwrap();
    let (handle, fds) = ArrayHandle::of(&shared, bytes).unwrap();
    let array = handle.open(&subject.driver, None, fds, ReadOnly).unwrap();
    let mut seen = [0; 4];
    array.memory().copy_out(unit - 2, &mut seen).unwrap();
    assert_eq!(&seen, b"seen");
}

fn failed_call_leaves_nothing(subject: Subject) {
    let device = subject.device();
    if supported(&subject) {
        let failed =
            subject.fail_each_call(|| Shared::create(&device, Spec::vmm(3).chunk(1).gpu_direct_rdma()).map(drop));
        assert!(failed.contains(&"properties"), "{failed:?}");
    }
}

#[test]
fn missing_support_is_an_error() {
    for (setting, value, word) in [
        // The device reports no support.
        ("FAKECUDA_ATTRIBUTE", "110:0", "gpuDirectRDMACapable"),
        // The driver ignores the flag.
        ("FAKECUDA_RDMA", "0", "its driver ignored gpuDirectRDMACapable"),
    ] {
        let subject = Subject::fake();
        subject.fake.as_ref().unwrap().set(setting, value);
        let device = subject.device();
        let create = |spec: vmmfd::memory::VmmSpec| Shared::create(&device, spec);
        let feature = lacking(create(Spec::vmm(1).gpu_direct_rdma()));
        assert!(feature.contains(word), "{feature}");
        create(Spec::vmm(1)).unwrap();
        assert!(!create(Spec::vmm(1).rdma(Rdma::Auto)).unwrap().is_gpu_direct_rdma());
    }
    // The driver refuses the flag.
    let subject = Subject::fake();
    let device: Device = subject.device();
    subject.fake.as_ref().unwrap().set("FAKECUDA_FAIL", "cuMemCreate:1:801");
    assert_eq!(code(Shared::create(&device, Spec::vmm(1).gpu_direct_rdma())), code::NOT_SUPPORTED);
    subject.fake.as_ref().unwrap().set("FAKECUDA_FAIL", "cuMemCreate:1:801");
    assert!(!Shared::create(&device, Spec::vmm(1).rdma(Rdma::Auto)).unwrap().is_gpu_direct_rdma());
    subject.fake.as_ref().unwrap().set("FAKECUDA_ATTRIBUTE", "110:0");
    assert_eq!(
        code(subject.verbs.create(subject.unit(), &FOR_RDMA)),
        code::NOT_SUPPORTED,
        "as the emulated driver does"
    );
}
