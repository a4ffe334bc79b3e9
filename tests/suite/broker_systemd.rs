//! The broker as a service of systemd, for which a stand-in stands (`support::manager`); and what the stand-in does.

use std::{
    fs,
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::pipe,
};
use vmmfd::{
    error::RefusalCode,
    wire::broker::{self, Delete, Message},
};

use crate::{
    broker::{filled, until},
    broker_crashes::token,
    broker_faults::{Material, get_message},
    broker_process::Raw,
    running::binary,
    support::{
        Subject,
        manager::{Manager, Unit, notify},
        served::{Keeper, Served},
    },
};

cases! {
    on crate::support::Subject; every backend: [
    the_store_of_systemd_has_each_descriptor_once_by_its_name,
    a_put_is_answered_once_systemd_has_read_it_and_keeps_no_other_waiting,
    a_put_that_the_store_has_no_room_for_is_refused,
    what_the_store_lost_or_should_not_have_is_no_object,
    ]
}

const MIB: u64 = 1 << 20;

fn shell(script: &str, store_max: usize) -> Unit {
    let command = ["/bin/sh", "-c", script].map(Into::into).to_vec();
    Unit { command, environment: Vec::new(), store_max, restart: true }
}

fn idle() -> Manager {
    Manager::start(shell("exec sleep 600", 4))
}

fn file() -> OwnedFd {
    tempfile::tempfile().unwrap().into()
}

/// Waits until the manager has read all that was sent.
fn settle(manager: &Manager) {
    let (mut reader, writer) = pipe().map(|(reader, writer)| (fs::File::from(reader), writer)).unwrap();
    notify(&manager.socket(), "BARRIER=1", &[writer.as_fd()]).unwrap();
    drop(writer);
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
}

#[test]
fn the_stand_in_drops_what_it_has_and_what_it_has_no_room_for() {
    let manager = idle();
    let socket = manager.socket();
    let (first, second, third) = (file(), file(), file());
    let other_of_first = first.try_clone().unwrap();
    let store = |name: &str, fds: &[&OwnedFd]| {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        notify(&socket, &format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), &fds).unwrap();
        settle(&manager);
    };
    store("a", &[&first]);
    store("b", &[&other_of_first]);
    assert_eq!(manager.names(), ["a"]);
    // One name for all.
    store("c", &[&second, &third]);
    assert_eq!(manager.names(), ["a", "c", "c"]);
    notify(&socket, "FDSTORE=1", &[file().as_fd()]).unwrap();
    settle(&manager);
    assert_eq!(manager.names(), ["a", "c", "c", "stored"]);
    store("d", &[&file()]);
    assert_eq!(manager.names(), ["a", "c", "c", "stored"]);
    notify(&socket, "FDSTOREREMOVE=1\nFDNAME=c", &[]).unwrap();
    settle(&manager);
    assert_eq!(manager.names(), ["a", "stored"]);
    store("c", &[&second]);
    assert_eq!(manager.names(), ["a", "c", "stored"]);
}

#[test]
fn the_stand_in_drops_what_hangs_up_unless_it_is_not_to_look() {
    let manager = idle();
    let [(kept, kept_peer), (dropped, dropped_peer)] = [UnixStream::pair().unwrap(), UnixStream::pair().unwrap()];
    notify(&manager.socket(), "FDSTORE=1\nFDNAME=kept\nFDPOLL=0", &[kept.as_fd()]).unwrap();
    notify(&manager.socket(), "FDSTORE=1\nFDNAME=dropped", &[dropped.as_fd()]).unwrap();
    settle(&manager);
    assert_eq!(manager.names(), ["dropped", "kept"]);
    drop((kept_peer, dropped_peer));
    until(|| manager.names() == ["kept"]);
}

#[test]
fn the_stand_in_reads_no_barrier_before_what_was_sent_before_it() {
    let manager = idle();
    manager.pause(true);
    let (reader, writer) = pipe().unwrap();
    notify(&manager.socket(), "FDSTORE=1\nFDNAME=a\nFDPOLL=0", &[file().as_fd()]).unwrap();
    // Not alone: not one.
    notify(&manager.socket(), "BARRIER=1\nREADY=1", &[writer.as_fd()]).unwrap();
    notify(&manager.socket(), "BARRIER=1", &[writer.as_fd()]).unwrap();
    drop(writer);
    assert!(manager.names().is_empty());
    manager.pause(false);
    assert_eq!(fs::File::from(reader).read(&mut [0]).unwrap(), 0);
    assert_eq!(manager.names(), ["a"]);
    assert_eq!(manager.log()[1..], ["stored a", "no barrier", "barrier"]);
}

#[test]
fn the_stand_in_gives_back_what_it_keeps_to_the_process_that_it_names() {
    let folder = tempfile::tempdir().unwrap();
    let said = folder.path().join("said");
    let script = format!(
        "{{ echo \"$$ $LISTEN_PID $LISTEN_FDS $LISTEN_FDNAMES $FDSTORE\"; [ -z \"$LISTEN_FDS\" ] || cat <&3 <&4; }} >> {}; \
         exec sleep 600",
        said.display()
    );
    let manager = Manager::start(shell(&script, 9));
    let lines = || fs::read_to_string(&said).unwrap_or_default();
    let first = manager.main(1);
    until(|| lines().ends_with("9\n"));
    assert_eq!(lines(), format!("{first}    9\n"));
    let files = ["one\n", "two\n"].map(|text| {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        OwnedFd::from(file)
    });
    for (name, fd) in ["x", "yz"].into_iter().zip(&files) {
        notify(&manager.socket(), &format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), &[fd.as_fd()]).unwrap();
    }
    settle(&manager);
    let second = manager.kill_main();
    assert_ne!(first, second);
    until(|| lines().ends_with("two\n"));
    assert_eq!(lines(), format!("{first}    9\n{second} {second} 2 x:yz 9\ntwo\n"));
    manager.restart(false);
    kill(second, Signal::SIGKILL).unwrap();
    manager.wait_for_end();
    assert_eq!(manager.starts(), 2);
}

fn small(subject: &Subject, segments: u64) -> Material {
    Material::of(&filled(&subject.driver, segments * 2 * MIB, Some(2 * MIB), 1))
}

fn request(material: &Material, name: &str) -> Message {
    Message::Put(Box::new(broker::Put { request: Some(token()), ..material.put(name) }))
}

#[track_caller]
fn put(raw: &Raw, material: &Material, name: &str) {
    let answer = raw.ask(&request(material, name), &material.fds()).unwrap();
    assert!(matches!(answer, Some((Message::Published(_), _))), "{answer:?}");
}

#[track_caller]
fn delete(raw: &Raw, name: &str) {
    let delete = Message::Delete(Delete { name: name.to_owned(), request: Some(token()) });
    assert!(matches!(raw.ask(&delete, &[]).unwrap(), Some((Message::Done(_), _))));
}

#[track_caller]
fn names(raw: &Raw) -> Vec<String> {
    raw.list().into_iter().map(|of| of.name).collect()
}

/// How many segments a get of a name hands out.
#[track_caller]
fn segments(raw: &Raw, name: &str) -> usize {
    match raw.ask(&get_message(name), &[]).unwrap() {
        Some((Message::Lease(_), fds)) => fds.len(),
        other => panic!("{other:?}"),
    }
}

fn the_store_of_systemd_has_each_descriptor_once_by_its_name(mut subject: Subject) {
    subject.alone();
    let served = Served::start(Keeper::Systemd, &subject);
    let manager = served.manager.as_ref().unwrap();
    let (raw, _) = served.greeted();
    let (two, one) = (small(&subject, 2), small(&subject, 1));
    put(&raw, &two, "a");
    put(&raw, &one, "b");
    // Memory that is there already: systemd would drop it, and its name.
    put(&raw, &two, "c");
    assert_eq!(manager.names(), ["0", "1", "2", "CAT0", "CAT1", "SOCK"]);
    delete(&raw, "a");
    served.kill_server();
    let (raw, _) = served.greeted();
    assert_eq!((names(&raw), segments(&raw, "c"), segments(&raw, "b")), (vec!["b".to_owned(), "c".to_owned()], 2, 1));
    delete(&raw, "c");
    drop(raw);
    until(|| manager.names() == ["2", "CAT0", "CAT1", "SOCK"]);
    let (raw, _) = served.greeted();
    put(&raw, &two, "d");
    until(|| manager.names() == ["0", "1", "2", "CAT0", "CAT1", "SOCK"]);
    let log = manager.log();
    assert!(log.iter().any(|line| line == "READY=1"), "{log:#?}");
    // Nothing was dropped, and no barrier was malformed.
    let wrong = |line: &&String| line.contains("already") || line.contains("room") || line.contains("no barrier");
    assert_eq!(log.iter().find(wrong), None, "{log:#?}");
}

fn a_put_is_answered_once_systemd_has_read_it_and_keeps_no_other_waiting(mut subject: Subject) {
    subject.alone();
    let served = Served::start(Keeper::Systemd, &subject);
    let manager = served.manager.as_ref().unwrap();
    let (raw, server) = served.greeted();
    put(&raw, &small(&subject, 1), "a");
    manager.pause(true);
    let material = small(&subject, 1);
    // More than the socket's queue takes (net.unix.max_dgram_qlen).
    let queue: usize = fs::read_to_string("/proc/sys/net/unix/max_dgram_qlen").unwrap().trim().parse().unwrap();
    let puts: Vec<(Raw, Material)> = (0..queue + 20).map(|_| (served.greeted().0, small(&subject, 1))).collect();
    for (at, (put, own)) in puts.iter().enumerate() {
        put.send(&request(own, &format!("p{at:04}")), &own.fds()).unwrap();
    }
    // It serves others meanwhile.
    assert_eq!((names(&raw), segments(&raw, "a")), (vec!["a".to_owned()], 1));
    delete(&raw, "a");
    assert!(names(&raw).is_empty());
    manager.pause(false);
    for (put, _) in &puts {
        assert!(matches!(put.receive().unwrap(), Some((Message::Published(_), _))));
    }
    assert_eq!(names(&raw).len(), puts.len());
    manager.pause(true);
    let (late, _) = served.greeted();
    late.send(&request(&material, "late"), &material.fds()).unwrap();
    assert_eq!(names(&raw).len(), puts.len());
    kill(server, Signal::SIGKILL).unwrap();
    assert!(!matches!(late.receive(), Ok(Some((Message::Published(_), _)))));
    manager.pause(false);
    let (raw, _) = served.greeted();
    assert_eq!(names(&raw).len(), puts.len());
    until(|| manager.names().len() == puts.len() + 3);
}

fn a_put_that_the_store_has_no_room_for_is_refused(mut subject: Subject) {
    subject.alone();
    // The socket, two catalogues, and a put of three with what its tables might take.
    let served = Served::with(Keeper::Systemd, &subject, &binary("vmmfd"), 9, &[]);
    let manager = served.manager.as_ref().unwrap();
    let (raw, _) = served.greeted();
    let material = small(&subject, 3);
    put(&raw, &material, "a");
    let full = small(&subject, 4);
    match raw.ask(&request(&full, "b"), &full.fds()).unwrap() {
        Some((Message::Refused(refusal), _)) => {
            assert_eq!(refusal.code, RefusalCode::Full);
            assert!(refusal.message.contains("FileDescriptorStoreMax"), "{}", refusal.message);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(names(&raw), ["a"]);
    for _ in 0..3 {
        served.kill_server();
        let (raw, _) = served.greeted();
        assert_eq!((names(&raw), segments(&raw, "a")), (vec!["a".to_owned()], 3));
        assert!(matches!(raw.ask(&request(&full, "b"), &full.fds()).unwrap(), Some((Message::Refused(_), _))));
    }
    let (raw, _) = served.greeted();
    delete(&raw, "a");
    // Also of what a lease holds: those of the connections above have ended.
    until(|| manager.names().len() == 3);
    put(&raw, &full, "b");
    assert!(manager.log().iter().all(|line| !line.starts_with("no room")), "{:#?}", manager.log());
}

fn what_the_store_lost_or_should_not_have_is_no_object(mut subject: Subject) {
    subject.alone();
    let served = Served::start(Keeper::Systemd, &subject);
    let manager = served.manager.as_ref().unwrap();
    let (raw, _) = served.greeted();
    put(&raw, &small(&subject, 2), "half");
    put(&raw, &small(&subject, 1), "whole");
    // As an operator may, by hand.
    notify(&manager.socket(), "FDSTOREREMOVE=1\nFDNAME=1", &[]).unwrap();
    for name in ["zz", "9", "stored", "0"] {
        manager.put_in(name, file());
    }
    settle(manager);
    assert_eq!(manager.names(), ["0", "0", "2", "9", "CAT0", "CAT1", "SOCK", "stored", "zz"]);
    served.kill_server();
    let (raw, _) = served.greeted();
    assert_eq!((names(&raw), segments(&raw, "whole")), (vec!["whole".to_owned()], 1));
    until(|| manager.names() == ["2", "CAT0", "CAT1", "SOCK"]);
    served.kill_server();
    assert_eq!(names(&served.greeted().0), ["whole"]);
}
