//! Clients of a server that is stopped or killed.

use super::*;

/// A reader of the name `a`, and the notices about its leases.
fn reader(path: &Path) -> (Client, Receiver<Result<Restored, Lost>>) {
    let client = Client::connect(path, &Config::default()).unwrap();
    let notices = notices(&client);
    (client, notices)
}

fn assert_bytes(object: &Object, byte: u8) {
    let memory = object.part("all").unwrap().memory().unwrap();
    let mut bytes = vec![0; memory.size() as usize];
    memory.copy_out(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|is| *is == byte));
}

/// The serving process. `SO_PEERCRED` names the process that called listen(2), which may be another one.
fn server_of(path: &Path) -> Pid {
    let answer = Raw::dial(path).unwrap().ask(&Raw::hello(), &[]).unwrap().unwrap().0;
    let Message::Hello(hello) = answer else { panic!("{answer:?}") };
    assert_ne!(hello.pid, std::process::id());
    Pid::from_raw(hello.pid as i32)
}

/// The leases: id, version, start and user.
fn held(client: &Client) -> Vec<(String, u64, u64, u32)> {
    let leases = client.who("a").unwrap().leases;
    leases.into_iter().map(|lease| (lease.id, lease.version, lease.since_ms, lease.uid)).collect()
}

#[test]
fn readers_restore_what_broker_lost() {
    for subject in [Subject::host(), Subject::fake()] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.sock");
        let start = || {
            let cancel = Cancel::new().unwrap();
            let mut config = ServerConfig::default();
            if subject.kind == Kind::Fake {
                config = internals::emulated(config);
            }
            let server = Server::bind(&path, config, &cancel).unwrap();
            (cancel, meanwhile(move || server.run().unwrap()))
        };
        let (cancel, serving) = start();
        {
            let maker = Client::connect(&path, &Config::default()).unwrap();
            for value in [1, 7] {
                let memory = filled(&subject.driver, 4 * MIB, Some(2 * MIB), value);
                maker.put(&weights(&memory)).unwrap();
            }
        }
        let ((one, of_one), (two, of_two)) = (reader(&path), reader(&path));
        let object = one.get(&Get::new("a")).unwrap().open(&subject.driver, None).unwrap();
        let lease = two.get(&Get::new("a")).unwrap();
        let before = one.stat("a", None).unwrap();
        assert_eq!((before.version.summary.version, before.version.summary.leases), (2, 2));
        cancel.cancel(CancelReason::Program);
        serving.join().unwrap();
        let (cancel, serving) = start();
        for notices in [&of_one, &of_two] {
            assert!(notices.recv_timeout(PATIENCE).unwrap().unwrap().rebuilt);
        }
        assert!(object.is_held() && lease.is_held());
        let mut after = one.stat("a", None).unwrap();
        // The maker of each part is the process that offered it: here always this process. Earlier versions are gone.
        assert_eq!(after.version.versions, [2]);
        after.version.versions.clone_from(&before.version.versions);
        assert_eq!(after, before);
        let again = two.get(&Get::new("a")).unwrap();
        assert_eq!(again.part("all").unwrap().arrays(), lease.part("all").unwrap().arrays());
        assert_bytes(&again.open(&subject.driver, None).unwrap(), 7);
        assert_bytes(&object, 7);
        drop((object, lease));
        until(|| one.who("").unwrap().leases.is_empty());
        cancel.cancel(CancelReason::Program);
        serving.join().unwrap();
    }
}

#[test]
fn requests_and_leases_survive_server_kill() {
    let subject = Subject::host();
    let place = Meeting::host();
    let mut server = crate::broker_commands::serve(&place, &[]).start();
    server.until("listening");
    let (client, notices) = reader(&place.socket());
    let memory = filled(&subject.driver, 4 * MIB, Some(2 * MIB), 7);
    client.put(&weights(&memory)).unwrap();
    client.put(&Put::new("mine").lifetime(Lifetime::Maker).part(PutPart::of("all", &memory).unwrap())).unwrap();
    let object = client.get(&Get::new("a")).unwrap().open(&subject.driver, None).unwrap();
    let waiting = meanwhile({
        let path = place.socket();
        move || {
            let client = Client::connect(&path, &Config::default()).unwrap();
            client.get(&Get::new("later").wait(Duration::from_secs(100))).unwrap().version()
        }
    });
    let other = Client::connect(&place.socket(), &Config::default()).unwrap();
    for _ in 0..3 {
        let killed = held(&other);
        assert_eq!(killed.len(), 1);
        kill(server_of(&place.socket()), Signal::SIGKILL).unwrap();
        let restored = notices.recv_timeout(PATIENCE).unwrap().unwrap();
        assert!(!restored.rebuilt && object.is_held());
        let now = held(&other);
        assert_eq!(now, killed, "the same lease, and no other");
    }
    assert_bytes(&object, 7);
    other.stat("mine", None).unwrap();
    other.put(&Put::new("later").part(PutPart::of("all", &memory).unwrap())).unwrap();
    assert_eq!(waiting.join().unwrap(), 1);
    // Dropping the client releases the lease, and deletes the object whose lifetime is tied to its maker.
    drop((object, client));
    until(|| other.who("a").unwrap().leases.is_empty() && other.stat("mine", None).is_err());
    server.signal(Signal::SIGTERM);
    server.end();
}
