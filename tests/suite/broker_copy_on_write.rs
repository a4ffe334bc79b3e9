//! Objects with private copies of written pages. `python/tests/test_copy_on_write.py` has the writes, the switches and the refusal on GPUs.

use crate::support::prelude::*;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 4 * MIB;

/// Puts a sealed version of `a` in two segments. All bytes have the same value.
fn put(client: &Client, subject: &Subject, value: u8) {
    let memory = Shared::create(&subject.device(), Spec::vmm(SIZE).chunk(2 * MIB).sealed()).unwrap();
    memory.copy_in(0, &vec![value; SIZE as usize]).unwrap();
    memory.seal().unwrap();
    client.put(&Put::new("a").condition(Condition::Any).part(PutPart::of("all", &memory).unwrap())).unwrap();
}

/// The common value of an object's bytes.
#[track_caller]
fn value(object: &Object) -> u8 {
    let mut bytes = vec![0; SIZE as usize];
    object.parts()[0].memory().unwrap().copy_out(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "bytes of several versions");
    bytes[0]
}

#[test]
fn a_failed_call_leaves_nothing() {
    let subject = Subject::host();
    let broker = Broker::start(&subject);
    let client = broker.client();
    put(&client, &subject, 1);
    let live = subject.live();
    let mut failed = Vec::new();
    let mut object = loop {
        let lease = client.get(&Get::new("a")).unwrap();
        subject.faulty.fail(Fault::Nth(failed.len() as u64 + 1), 4242);
        let opened = lease.open_copy_on_write(&subject.driver, None);
        let Some(verb) = subject.faulty.mend() else { break opened.unwrap() };
        assert!(opened.is_err() && subject.live() == live, "{verb}, after {failed:?}");
        failed.push(verb);
    };
    assert_eq!(failed.iter().filter(|verb| **verb == "map_private").count(), 2, "{failed:?}");
    // A write to the memory would change a slice of it, so there is no slice.
    let mirror = Mirror::of(&**object.parts()[0].memory().unwrap(), 0, SIZE).unwrap();
    assert!(mirror.is_direct() && mirror.bytes().is_none());
    drop(mirror);
    // A failed switch maps the old version again, writable.
    put(&client, &subject, 2);
    let next = object.prepare(client.get(&Get::new("a")).unwrap()).unwrap();
    subject.faulty.fail(Fault::Nth(3), 4242);
    let switched = object.switch(next);
    assert_eq!(subject.faulty.mend(), Some("replace"));
    assert!(matches!(switched, Err(Error::Memory(MemoryError::NotExchanged { back: None, .. }))), "{switched:?}");
    assert_eq!(value(&object), 1);
    object.parts()[0].memory().unwrap().copy_in(0, &vec![9; SIZE as usize]).unwrap();
    assert_eq!(value(&object), 9);
}
