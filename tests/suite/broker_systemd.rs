//! The broker as a service of systemd, for which a stand-in stands (`support::manager`); and what the stand-in does.

use std::{
    fs,
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use nix::unistd::pipe;

use crate::{
    broker::until,
    support::manager::{Manager, Unit, notify},
};

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
    nix::sys::signal::kill(second, nix::sys::signal::Signal::SIGKILL).unwrap();
    manager.wait_for_end();
    assert_eq!(manager.starts(), 2);
}
