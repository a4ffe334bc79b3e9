//! Leases whose pages are copied when this process writes to them.

use vmmfd::{
    Error,
    broker::{Client, Condition, Get, Object, Put, PutPart},
    driver::Access,
    error::{DeviceError, ErrorKind, MemoryError},
    memory::{Device, Mirror, Region, Selector, Shared, Spec},
};

use crate::{
    broker::Broker,
    support::{Fault, Kind, Subject},
};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 4 * MIB;

/// Puts a version of `a` in two segments. All bytes have the same value.
fn put(client: &Client, subject: &Subject, value: u8, seal: bool) {
    let device = Device::find(&subject.driver, Selector::default()).unwrap();
    let spec = Spec::vmm(SIZE).chunk(2 * MIB);
    let memory = Shared::create(&device, if seal { spec.sealed() } else { spec }).unwrap();
    memory.copy_in(0, &vec![value; SIZE as usize]).unwrap();
    if seal {
        memory.seal().unwrap();
    }
    client.put(&Put::new("a").condition(Condition::Any).part(PutPart::of("all", &memory).unwrap())).unwrap();
}

fn open(client: &Client, subject: &Subject) -> Object {
    client.get(&Get::new("a")).unwrap().open_copy_on_write(&subject.driver, None).unwrap()
}

/// The common value of an object's bytes.
#[track_caller]
fn value(object: &Object) -> u8 {
    let mut bytes = vec![0; SIZE as usize];
    object.parts()[0].memory().unwrap().copy_out(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "bytes of several versions");
    bytes[0]
}

fn fill(object: &Object, value: u8) {
    object.parts()[0].memory().unwrap().copy_in(0, &vec![value; SIZE as usize]).unwrap();
}

#[test]
fn writes_stay_in_one_object() {
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let client = broker.client();
    for seal in [false, true] {
        put(&client, &subject, 1, seal);
        let (object, other) = (open(&client, &subject), open(&client, &subject));
        let reader = client.get(&Get::new("a")).unwrap().open(&subject.driver, None).unwrap();
        let memory = object.parts()[0].memory().unwrap();
        assert_eq!(memory.access(), Access::ReadWrite);
        // A write to the memory would change a slice of it, so there is no slice.
        let mut mirror = Mirror::of(&**memory, 0, SIZE).unwrap();
        assert!(mirror.is_direct() && mirror.bytes().is_none());
        let sealed = Mirror::of(&**reader.parts()[0].memory().unwrap(), 0, SIZE).unwrap();
        assert_eq!(sealed.bytes().is_some(), seal);
        mirror.write(0, &[5]).unwrap();
        drop(mirror);
        fill(&object, 6);
        assert_eq!((value(&object), value(&other), value(&reader)), (6, 1, 1));
        assert!(sealed.bytes().is_none_or(|bytes| bytes.iter().all(|byte| *byte == 1)));
        let written = reader.parts()[0].memory().unwrap().copy_in(0, &[1]);
        assert!(matches!(written, Err(Error::Memory(MemoryError::ReadOnly))), "{written:?}");
    }
}

#[test]
fn versions_replace_what_was_written() {
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let client = broker.client();
    put(&client, &subject, 1, true);
    let mut object = open(&client, &subject);
    fill(&object, 9);
    put(&client, &subject, 2, false);
    let next = object.prepare(client.get(&Get::new("a")).unwrap()).unwrap();
    let old = object.switch(next).unwrap();
    assert_eq!(value(&object), 2);
    fill(&object, 9);
    drop(object.switch(old).unwrap());
    assert_eq!(value(&object), 1);
    fill(&object, 9);
    object.park_with_lease().unwrap();
    object.unpark(client.get(&Get::new("a")).unwrap()).unwrap();
    assert_eq!(value(&object), 2);
    // After unpark the object is still copy-on-write.
    fill(&object, 9);
    assert_eq!((value(&object), value(&open(&client, &subject))), (9, 2));
}

#[test]
fn a_failed_call_leaves_nothing() {
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let client = broker.client();
    put(&client, &subject, 1, true);
    let live = subject.live();
    let mut failed = Vec::new();
    for nth in 1.. {
        let lease = client.get(&Get::new("a")).unwrap();
        subject.faulty.fail(Fault::Nth(nth), 4242);
        let opened = lease.open_copy_on_write(&subject.driver, None);
        let Some(verb) = subject.faulty.mend() else {
            assert_eq!(value(&opened.unwrap()), 1);
            break;
        };
        assert!(opened.is_err(), "{verb}, call {nth}");
        assert_eq!(subject.live(), live, "{verb}, call {nth}");
        failed.push(verb);
    }
    assert_eq!(failed.iter().filter(|verb| **verb == "map_private").count(), 2, "{failed:?}");
    // A failed switch maps the old version again, writable.
    let mut object = open(&client, &subject);
    put(&client, &subject, 2, true);
    let next = object.prepare(client.get(&Get::new("a")).unwrap()).unwrap();
    subject.faulty.fail(Fault::Nth(3), 4242);
    let switched = object.switch(next);
    assert_eq!(subject.faulty.mend(), Some("replace"));
    assert!(matches!(switched, Err(Error::Memory(MemoryError::NotExchanged { back: None, .. }))), "{switched:?}");
    assert_eq!(value(&object), 1);
    fill(&object, 9);
    assert_eq!(value(&object), 9);
}

fn cuda_refuses_it(subject: Subject) {
    let broker = Broker::start(&subject);
    let client = broker.client();
    put(&client, &subject, 1, false);
    let live = subject.live();
    let error = client.get(&Get::new("a")).unwrap().open_copy_on_write(&subject.driver, None).unwrap_err();
    assert!(matches!(error, Error::Device(DeviceError::Unsupported { .. })), "{error:?}");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let sentence = "does not support copy-on-write mappings, as CUDA has none: copy what is to be written";
    assert!(error.to_string().ends_with(sentence), "{error}");
    assert_eq!(subject.live(), live);
    assert!(client.who("").unwrap().leases.is_empty());
    assert_ne!(subject.kind, Kind::Host);
}

cases! {
    on crate::support::Subject; gpus alone: [
    cuda_refuses_it,
    ]
}
